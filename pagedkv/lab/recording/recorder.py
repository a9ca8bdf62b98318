"""The recorder: a hook that takes a picture after each thing that the cache does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from pagedkv._core.tier import TIER_NAMES
from pagedkv.cache.cache import KVCache
from pagedkv.errors import WrongType
from pagedkv.lab.recording import captions
from pagedkv.lab.recording.file import write_recording
from pagedkv.lab.recording.group_snapshot import extents_of
from pagedkv.lab.recording.groups import GroupOfLayers
from pagedkv.lab.recording.model import Frame, Move, Recording
from pagedkv.lab.recording.snapshot import Known, Snapshot, take
from pagedkv.observe.hooks import Span
from pagedkv.spec.groups import Group, groups_of
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import whole_number

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ALWAYS = {"sequence", "fork", "truncate", "allocate", "step", "release"}  # a frame even where no block changed hands
IF_DROPPED = {"make_room", "purge", "flush"}  # a frame if blocks are gone


class Recorder:
    """Records a cache: ``with Recorder(cache) as recorder: ...``.

    Or from :meth:`start` to :meth:`stop`.

    Recording changes nothing in the cache. A frame looks at every owned block and at every cached token: this is for
    small pools. Sequences that were opened before the recording show as other owners of their blocks. Of a cache by
    groups of layers it has the pages of every group, the points, and the extents of each group.

    Parameters
    ----------
    cache : KVCache
    text : callable, optional
        Turns a token into words for the pictures. Default: its number.
    max_frames : int
        Frames to record at most; what comes after is counted in ``recording.left_out``.

    Raises
    ------
    WrongType, InvalidArgument
    """

    def __init__(self, cache: KVCache, *, text: Callable[[int], str] | None = None, max_frames: int = 1000) -> None:
        if not isinstance(cache, KVCache):
            raise WrongType(f"a Recorder records a KVCache, not a {type(cache).__name__}")
        if text is not None and not callable(text):
            raise WrongType(f"text must turn a token into a str, and {type(text).__name__} cannot be called")
        self._cache, self._text = cache, text
        is_by_group = cache.placement.num_groups > 1
        self._groups = groups_of(cache.spec) if is_by_group else (Group((), None, None, cache.spec),)
        self._max_frames = whole_number(max_frames, "max_frames", 1, 2**31 - 1)
        self._frames: list[Frame] = []
        self._left_out = 0
        self._known: dict[int, Known] = {}  # by row
        self._named = 0
        self._moves: dict[int, list[tuple[Move, bool]]] = {}  # in flight, by their span; whether it leaves its source
        self._lock = threading.RLock()

    # ---- recording

    def start(self) -> None:
        """Record from now on; again, after :meth:`stop`.

        Raises
        ------
        InvalidArgument
            It is recording.
        """
        block_size, extents = self._cache.spec.block_size, extents_of(self._cache.placement)
        sizes = {tier: shared.num_extents for tier, shared in extents.items()}
        with self._lock:
            self._cache.hooks.add(self)
            if not self._frames and extents:
                self._add("opened", lambda now: captions.opened_by_group(block_size, len(self._groups), sizes))
            elif not self._frames:
                self._add("opened", lambda now: captions.opened(block_size, self._sizes()))

    def stop(self) -> None:
        """Record no more; keep the recording.

        Raises
        ------
        InvalidArgument
            It is not recording.
        """
        self._cache.hooks.remove(self)

    def __enter__(self) -> Recorder:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def note(self, text: str) -> None:
        """Add a frame of how things are, with a caption of one's own."""
        if not isinstance(text, str):
            raise WrongType(f"a note is text, not {type(text).__name__}")
        with self._lock:
            self._add("note", lambda now: text)

    # ---- what there is

    @property
    def recording(self) -> Recording:
        """The recording so far."""
        with self._lock:
            frames, left_out = tuple(self._frames), self._left_out
        spec, policy = self._cache.spec, self._cache.placement.policy
        told = tuple(_told(spec, group) for group in self._groups) if len(self._groups) > 1 else ()
        per_extent = {tier: extents.per_extent for tier, extents in extents_of(self._cache.placement).items()}
        return Recording(
            spec.block_size, policy, self._sizes(), frames, left_out, self._texts(frames), told, per_extent
        )  # fmt: skip

    def _sizes(self) -> dict[str, int]:
        pools = self._cache.placement.pools
        return {TIER_NAMES[i]: pool.max_blocks for i, pool in enumerate(pools) if pool is not None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording so far to a JSON file, for ``pagedkv show``."""
        write_recording(self.recording, path)

    def _texts(self, frames: tuple[Frame, ...]) -> dict[int, str]:
        if self._text is None:
            return {}
        tokens = {token for frame in frames for sequence in frame.sequences for token in sequence.tokens}
        tokens |= {t for frame in frames for held in frame.tiers.values() for block in held for t in block.tokens}
        tokens |= {t for frame in frames for held in frame.pages.values() for page in held for t in page.tokens}
        texts = {token: self._text(token) for token in sorted(tokens)}
        for text in texts.values():
            if not isinstance(text, str):
                raise WrongType(f"text(token) must be a str, and was {type(text).__name__}")
        return texts

    # ---- as a hook

    def begin(self, span: Span) -> None:
        """The cache begins something."""
        if span.name == "moves":
            with self._lock:
                told = ("src_tier", "src_block", "dst_tier", "dst_block", "lane")
                moves = tuple(
                    Move(TIER_NAMES[source], block, TIER_NAMES[destination], to, group)
                    for source, block, destination, to, group in (tuple(int(m[k]) for k in told) for m in span.subject)
                )
                self._moves[id(span)] = list(zip(moves, _leaves_source(span.subject), strict=True))
                self._add("moves", lambda now: captions.of_moves_begun(self._last, now, moves), moves=moves)

    def end(self, span: Span, state: Any) -> None:
        """The cache has done something."""
        with self._lock:
            if span.name == "moves":
                self._ended_moves(span)
            elif span.name in ALWAYS and (span.error is None or span.name == "step"):
                self._ended(span)
            elif span.name in IF_DROPPED:
                self._add(span.name, lambda now: captions.of_drop(self._last, now, span.name), if_dropped=True)

    def _ended_moves(self, span: Span) -> None:
        moves = tuple(move for move, _ in self._moves.pop(id(span), ()))
        arrived, pages = (span.attributes.get(name, 0) for name in ("moved_blocks", "moved_pages"))
        self._add("moves", lambda now: captions.of_moves_ended(moves, arrived, pages), moves=moves)

    def _ended(self, span: Span) -> None:
        row = span.attributes.get("row", -1)
        if span.name == "sequence":
            name = self._name(row, "")
            self._add("sequence", lambda now: captions.of_sequence(name, span))
        elif span.name == "fork":
            parent = self._known[row].name if row in self._known else "a sequence"
            names = [self._name(int(new_row), parent) for new_row in span.subject]
            num_blocks = len(self._cache.table.blocks(row))
            self._add("fork", lambda now: captions.of_fork(parent, names, num_blocks))
        elif span.name == "allocate":
            self._allocated(span.subject)
        elif span.name == "step":
            self._add("step", lambda now: captions.of_step(self._last, now, span))
        elif row in self._known:
            name = self._known[row].name
            if span.name == "release":
                del self._known[row]
                self._add("release", lambda now: f"{name} is released. Its full blocks stay cached.")
            else:
                self._add("truncate", lambda now: f"{name} is cut back to {span.attributes['tokens']} tokens.")

    def _allocated(self, arrays: Any) -> None:
        first = {tuple(row[row >= 0].tolist()) for row in arrays.block_tables}
        copies = tuple(captions.pairs(arrays.copies))
        parts = enumerate(arrays.groups, start=1)
        page_copies = tuple((group, *pair) for group, part in parts for pair in captions.pairs(part.copies))

        def caption(now: Snapshot) -> str:
            names = [sequence.name for sequence in now.sequences if sequence.blocks in first]
            return captions.of_allocate(self._last, now, arrays, names)

        self._add("allocate", caption, copies=copies, page_copies=page_copies)

    @property
    def _last(self) -> Frame:
        return self._frames[-1] if self._frames else Frame("", "", (), {}, (), ())

    def _name(self, row: int, parent: str) -> str:
        number, name = self._named, ""
        while number >= 0:
            name = NAMES[number % len(NAMES)] + name
            number = number // len(NAMES) - 1
        self._named += 1
        self._known[row] = Known(row, name, parent)
        return name

    def _add(
        self,
        what: str,
        caption: Callable[[Snapshot], str],
        *,
        copies: tuple[tuple[int, int], ...] = (),
        page_copies: tuple[tuple[int, int, int], ...] = (),
        moves: tuple[Move, ...] = (),
        if_dropped: bool = False,
    ) -> None:
        """Add a frame of the current state.

        With `if_dropped`, only if blocks are gone since the last frame.
        """
        if len(self._frames) >= self._max_frames:
            self._left_out += 1
            return
        flying = [each for some in self._moves.values() for each in some]
        now = take(self._cache.placement, self._cache.table, self._groups, self._known.values(), flying)
        if now is None:
            self._left_out += 1
            return
        if if_dropped and not captions.gone(self._last, now):
            return
        books, text = now.groups, caption(now)
        if what not in ("opened", "note"):
            text += captions.of_groups(self._last, now, is_told=what == "moves" or what in IF_DROPPED)
        self._frames.append(
            Frame(
                what, text, now.sequences, now.tiers, copies, moves, books.pages, page_copies, books.points,
                books.extents,
            )
        )  # fmt: skip


def _told(spec: KVSpec, group: Group) -> GroupOfLayers:
    """A group in the model's own numbers."""
    layers = (layer for layer in range(spec.num_model_layers) if spec.own_layer(layer) in group.layers)
    windows, chunks = ({limit for limit in limits or () if limit} for limits in (group.spec.windows, group.spec.chunks))
    return GroupOfLayers(tuple(layers), tuple(sorted(windows)), next(iter(chunks), None))


def _leaves_source(moves: Any) -> list[bool]:
    """Of each move, whether its block leaves where it is.

    A copy to a colder tier leaves it there. The last transfer of a group that makes room is a demotion; those before it
    are copies.
    """
    last = {int(move["group"]): int(move["transfer"]) for move in moves}
    return [not move["reason"] and last[int(move["group"])] == int(move["transfer"]) for move in moves]
