"""Checks plain data and makes a Recording of it.

The data are checked as a whole: a recording that could not have happened is refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, get_args

from pagedkv.errors import RecordingFormatError
from pagedkv.lab.recording.groups import HeldPage, Moving
from pagedkv.lab.recording.model import Frame, HeldBlock, Move, Recording, SequenceState

TIERS = ("device", "host", "disk", "remote")
MOST_BLOCKS, MOST_BLOCK_SIZE = 2**31 - 1, 1 << 16


def shown(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


class Reader:
    """Of recordings without groups of layers, version 1."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def recording(self, data: dict[str, Any]) -> Recording:
        """The recording of a file's data.

        Raises
        ------
        RecordingFormatError
        """
        block_size = self._number(data, "block_size", "", 1, MOST_BLOCK_SIZE)
        given = self._get(data, "tiers", "", dict, "an object")
        tiers = {name: self._number(given, name, "tiers", 1, MOST_BLOCKS) for name in given}
        if "device" not in tiers or [name for name in TIERS if name in tiers] != list(tiers):
            raise self._problem("tiers", f"{', '.join(tiers) or 'none'}: the device and others of {', '.join(TIERS)}")
        texts = self._texts(self._get(data, "texts", "", dict, "an object"))
        groups = self._groups(data, tiers)
        frames = self._list(data, "frames", "")
        if not frames:
            raise self._problem("frames", "there are none")
        return Recording(
            block_size=block_size,
            policy=self._get(data, "policy", "", str, "text"),
            tiers=tiers,
            frames=tuple(self._frame(frame, f"frame {i + 1}", block_size, tiers) for i, frame in enumerate(frames)),
            left_out=self._number(data, "left_out", "", 0, 2**62),
            texts=texts,
            **groups,
        )

    def _groups(self, data: dict[str, Any], tiers: dict[str, int]) -> dict[str, Any]:
        """Further fields of the recording."""
        return {}

    def _texts(self, given: dict[str, Any]) -> dict[int, str]:
        texts: dict[int, str] = {}
        for key, text in given.items():
            digits = key.removeprefix("-")
            if not (digits.isascii() and digits.isdigit() and len(digits) < 11) or not isinstance(text, str):
                raise self._problem("texts", f"{key[:40]!r}: a token's number and its text are needed")
            texts[int(key)] = text
        return texts

    def _frame(self, data: Any, where: str, block_size: int, tiers: dict[str, int]) -> Frame:
        self._is(data, where, dict, "an object")
        given = self._get(data, "tiers", where, dict, "an object")
        if list(given) != list(tiers):
            raise self._problem(f"{where}, tiers", f"{', '.join(given) or 'none'}, but there are {', '.join(tiers)}")
        held = {
            tier: tuple(
                self._held(block, f"{where}, {tier} block {i}", block_size, tiers[tier])
                for i, block in enumerate(self._list(given, tier, where))
            )
            for tier in tiers
        }
        for tier, blocks in held.items():
            ids = [block.block for block in blocks]
            if ids != sorted(set(ids)):
                raise self._problem(f"{where}, {tier}", "the blocks do not stand once each, by their ids")
        sequences = tuple(
            self._sequence(sequence, f"{where}, sequence {i}", block_size)
            for i, sequence in enumerate(self._list(data, "sequences", where))
        )
        frame = Frame(
            what=self._get(data, "what", where, str, "text"),
            caption=self._get(data, "caption", where, str, "text"),
            sequences=sequences,
            tiers=held,
            copies=tuple(self._copy(pair, f"{where}, copies", tiers) for pair in self._list(data, "copies", where)),
            moves=tuple(self._move(move, f"{where}, moves", tiers) for move in self._list(data, "moves", where)),
        )
        self._agree(frame, where)
        return frame

    def _agree(self, frame: Frame, where: str) -> None:
        """Block tables and blocks tell the same story."""
        names = [sequence.name for sequence in frame.sequences]
        if len(set(names)) != len(names):
            raise self._problem(where, "two sequences have the same name")
        having: dict[int, set[str]] = {}
        for sequence in frame.sequences:
            for block_id in sequence.blocks:
                having.setdefault(block_id, set()).add(sequence.name)
        told = {block.block: set(block.sequences) for block in frame.tiers["device"] if block.sequences}
        if having != told:
            different = min(i for i in having | told if having.get(i) != told.get(i))
            raise self._problem(f"{where}, device block {different}", "the sequences' block tables say otherwise")
        for tier, blocks in frame.tiers.items():
            for block in blocks:
                if tier != "device" and block.sequences:
                    raise self._problem(f"{where}, {tier} block {block.block}", "sequences have device blocks only")

    def _held(self, data: Any, where: str, block_size: int, num_blocks: int) -> HeldBlock:
        self._is(data, where, dict, "an object")
        block = HeldBlock(
            block=self._number(data, "block", where, 0, num_blocks - 1),
            references=self._number(data, "references", where, 1, 2**31 - 1),
            in_tree=self._get(data, "in_tree", where, bool, "true or false"),
            sequences=self._names(data, where),
            moving=self._moving(data, where),
            tokens=self._tokens(data, where),
        )
        self._fits(block, where, block_size)
        return block

    def _moving(self, data: dict[str, Any], where: str) -> Moving:
        moving: Any = data.get("moving")
        if moving not in get_args(Moving):
            raise self._problem(where, f"moving = {shown(moving)}: one of {', '.join(map(repr, get_args(Moving)))}")
        return moving  # type: ignore[no-any-return]

    def _names(self, data: dict[str, Any], where: str) -> tuple[str, ...]:
        return tuple(self._is(name, where, str, "text") for name in self._list(data, "sequences", where))

    def _fits(self, block: HeldBlock | HeldPage, where: str, block_size: int) -> None:
        """It has as many references as owners, and no more tokens than slots."""
        if block.others < 0 or len(set(block.sequences)) != len(block.sequences):
            raise self._problem(where, f"{block.references} references are fewer than the owners that are named")
        if len(block.tokens) > block_size:
            raise self._problem(where, f"{len(block.tokens)} tokens do not fit into a block of {block_size}")

    def _sequence(self, data: Any, where: str, block_size: int) -> SequenceState:
        self._is(data, where, dict, "an object")
        tokens = self._tokens(data, where)
        blocks = tuple(self._int(block, where, 0, MOST_BLOCKS) for block in self._list(data, "blocks", where))
        computed = self._number(data, "computed", where, 0, len(tokens))
        if computed > len(blocks) * block_size:
            raise self._problem(where, f"{computed} computed tokens do not fit into {len(blocks)} blocks")
        name, parent = (self._get(data, key, where, str, "text") for key in ("name", "parent"))
        return SequenceState(name, parent, tokens, computed, blocks)

    def _copy(self, pair: Any, where: str, tiers: dict[str, int]) -> tuple[int, int]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise self._problem(where, "a pair of block ids is needed")
        source, destination = (self._int(block, where, 0, tiers["device"] - 1) for block in pair)
        return source, destination

    def _move(self, data: Any, where: str, tiers: dict[str, int]) -> Move:
        self._is(data, where, dict, "an object")
        source, destination = (self._get(data, key, where, str, "text") for key in ("source", "destination"))
        for tier in (source, destination):
            if tier not in tiers:
                raise self._problem(where, f"{tier!r} is none of the tiers {', '.join(tiers)}")
        block = self._number(data, "block", where, 0, tiers[source] - 1)
        return Move(source, block, destination, self._number(data, "to", where, 0, tiers[destination] - 1))

    def _tokens(self, data: dict[str, Any], where: str) -> tuple[int, ...]:
        place = f"{where}, tokens"
        return tuple(self._int(token, place, -(2**31), 2**31 - 1) for token in self._list(data, "tokens", where))

    def _list(self, data: dict[str, Any], key: str, where: str) -> Sequence[Any]:
        found: list[Any] = self._get(data, key, where, list, "a list")
        return found

    def _number(self, data: dict[str, Any], key: str, where: str, least: int, most: int) -> int:
        place = f"{where}, {key}" if where else key
        if key not in data:
            raise self._problem(place, "is not there")
        return self._int(data[key], place, least, most)

    def _int(self, value: Any, where: str, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise self._problem(where, f"{shown(value)}: a whole number from {least} to {most} is needed")
        return value

    def _get(self, data: dict[str, Any], key: str, where: str, kind: type, words: str) -> Any:
        place = f"{where}, {key}" if where else key
        if key not in data:
            raise self._problem(place, "is not there")
        return self._is(data[key], place, kind, words)

    def _is(self, value: Any, where: str, kind: type, words: str) -> Any:
        if not isinstance(value, kind):
            raise self._problem(where, f"{shown(value)}: {words} is needed")
        return value

    def _problem(self, where: str, problem: str) -> RecordingFormatError:
        return RecordingFormatError(self._path, where, problem)
