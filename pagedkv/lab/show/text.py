"""A frame as lines of text: block tables, then every owned block of every tier.

Plain, or in colours where rich is installed.
"""

from __future__ import annotations

import textwrap

from pagedkv.errors import InvalidArgument
from pagedkv.lab.recording import Frame, HeldBlock, Recording
from pagedkv.lab.show import group_text
from pagedkv.lab.show.styles import MARKS, MOST_ROWS, WIDTH, Line, Style, counted, cut, filled, printable
from pagedkv.spec.sizes import whole_number

KEY = "* shared by several sequences   + copied on write, just now"


def picture(recording: Recording, step: int | None = None) -> str:
    """A frame as plain text.

    Parameters
    ----------
    recording : Recording
    step : int, optional
        From 1 on. Default: the last.

    Raises
    ------
    InvalidArgument, WrongType
        There is no such step.
    """
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines(recording, step))


def steps(recording: Recording) -> str:
    """What happened, numbered, a line or more per frame."""
    width = len(str(len(recording.frames)))
    told = []
    for i, frame in enumerate(recording.frames, 1):
        parts = textwrap.wrap(printable(frame.caption), WIDTH - width - 2) or [""]
        told += [f"{i:>{width}}  {parts[0]}", *(" " * (width + 2) + part for part in parts[1:])]
    if recording.left_out:
        told.append(f"{'':{width}}  ({recording.left_out} more were not recorded)")
    return "\n".join(told)


def frame_of(recording: Recording, step: int | None) -> tuple[int, Frame]:
    """The number of a step, and its frame.

    Raises
    ------
    InvalidArgument, WrongType
    """
    count = len(recording.frames)
    number = count if step is None else whole_number(step, "step", -(2**63), 2**63 - 1)
    if not 1 <= number <= count:
        raise InvalidArgument(f"step {number} is not in this recording: it has steps 1 to {count}")
    return number, recording.frames[number - 1]


def lines(recording: Recording, step: int | None = None) -> list[Line]:
    """A frame as lines of styled pieces of text."""
    number, frame = frame_of(recording, step)
    head = f"step {number} of {len(recording.frames)}  "
    caption = textwrap.wrap(printable(frame.caption), WIDTH - len(head)) or [""]
    found: list[Line] = [[(head, "dim"), (caption[0], "head")]]
    found += [[(" " * len(head), ""), (part, "head")] for part in caption[1:]]
    if frame.sequences:
        found += [[], *(group_text.tables(frame) if recording.groups else _tables(frame))]
    for tier, size in recording.tiers.items():
        found += [
            [],
            *(_tier_by_group(recording, frame, tier) if recording.groups else _tier(recording, frame, tier, size)),
        ]
    if recording.groups:
        found += [[], *group_text.points(frame)]
    if any(mark in "".join(text for text, _ in line) for line in found[len(caption) :] for mark in ("* ", "+ ")):
        found += [[], [(KEY, "dim")]]
    return found


def _tables(frame: Frame) -> list[Line]:
    """The sequences and their block tables."""
    held = frame.held()
    copied = {target for _, target in frame.copies}
    names = [printable(f"{seq.name} (of {seq.parent})" if seq.parent else seq.name) for seq in frame.sequences]
    width = max(len("sequence"), *map(len, names))
    indent = " " * (width + 20)
    found: list[Line] = [[(f"{'sequence':<{width}}  tokens  computed  logical block -> device block", "dim")]]
    for name, seq in zip(names, frame.sequences, strict=True):
        line: Line = [(f"{name:<{width}}  {len(seq.tokens):>6}  {seq.computed:>8}  ", "")]
        used = len(indent)
        for logical, block in enumerate(seq.blocks):
            style: Style = "copied" if block in copied else "shared" if held[block].shared else ""
            cell = f"{logical}->{block}{MARKS[style]} "
            if used + len(cell) > WIDTH:
                found.append(line)
                line, used = [(indent, "")], len(indent)
            line.append((cell, style))
            used += len(cell)
        found.append(line)
    return found


def _tier_by_group(recording: Recording, frame: Frame, tier: str) -> list[Line]:
    """The extents of a tier, and the owned blocks or pages of each group."""
    title = f"  {recording.groups[0].label(0)}: {counted(len(frame.tiers[tier]), 'block')}"
    found = list(group_text.extents(frame, tier))
    if not frame.tiers[tier] and not frame.pages[tier]:
        return found
    found += _blocks(recording, frame, tier, title)
    for group in range(1, len(recording.groups)):
        found += group_text.pages(recording, frame, tier, group)
    return found


def _tier(recording: Recording, frame: Frame, tier: str, size: int) -> list[Line]:
    """The owned blocks of a tier."""
    return _blocks(recording, frame, tier, f"{tier}: {len(frame.tiers[tier])} of {size} blocks owned")


def _blocks(recording: Recording, frame: Frame, tier: str, title: str) -> list[Line]:
    """The owned blocks of a tier under a title."""
    blocks = frame.tiers[tier]
    if not blocks:
        return [[(title, "head")]]
    shown = blocks[:MOST_ROWS]
    owners = [_owners(block) for block in shown]
    fills = max(len(filled(recording, 0)), len("filled"))
    width = max(len("owners"), *map(len, owners))
    found: list[Line] = [
        [(title, "head")],
        [(f"  block  {'filled':<{fills}}  refs  {'owners':<{width}}  tokens", "dim")],
    ]
    copies = {target: source for source, target in frame.copies} if tier == "device" else {}
    for block, owner in zip(shown, owners, strict=True):
        style: Style = "moving" if block.moving else "shared" if block.shared else ""
        if block.block in copies:
            style = "copied"
        text = recording.words(block.tokens)
        if block.block in copies:
            text = f"{text}  (copy of {copies[block.block]})"
        room = max(20, WIDTH - width - fills - 19)
        found.append([
            (f"  {block.block:>5}  ", ""), (f"{filled(recording, len(block.tokens)):<{fills}}", style),
            (f"  {block.references:>4}  ", ""), (f"{owner:<{width}}", style), (f"  {cut(text, room)}", "dim"),
        ])  # fmt: skip
    if len(blocks) > len(shown):
        found.append([(f"  ... and {len(blocks) - len(shown)} more", "dim")])
    return found


def _owners(block: HeldBlock) -> str:
    parts = [*(["tree"] if block.in_tree else []), *block.sequences]
    parts += {"out": ["leaving"], "in": ["arriving"], "": []}[block.moving]
    return printable(" ".join([*parts, *([f"{block.others} other"] if block.others else [])]))
