"""A frame of a cache by groups of layers as text: a lane per group, blank at holes."""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.lab.recording import Frame, HeldBlock, HeldPage, Recording, SequenceState
from pagedkv.lab.show.styles import MARKS, MOST_ROWS, WIDTH, Line, Style, counted, cut, filled, printable

LETTERS = ".0123"  # a free extent, and those of groups 0 to 3
MOST_POINTS = 16


def tables(frame: Frame) -> list[Line]:
    """The sequences and their tables: a lane per group, a column per logical block."""
    names = [printable(f"{seq.name} (of {seq.parent})" if seq.parent else seq.name) for seq in frame.sequences]
    width = max(len("sequence"), *map(len, names))
    found: list[Line] = [[(f"{'sequence':<{width}}  tokens  computed  logical block -> device block or page", "dim")]]
    for name, seq in zip(names, frame.sequences, strict=True):
        head = f"{name:<{width}}  {len(seq.tokens):>6}  {seq.computed:>8}  "
        lanes = [_lane(frame, seq, group) for group in range(len(seq.tables) + 1)]
        size = max((len(text) for lane in lanes for text, _ in lane.values()), default=0) + 1
        last = max((logical for lane in lanes for logical in lane), default=0)
        columns = max(1, (WIDTH - len(head) - len("group 0  ")) // size)
        for begin in range(0, last + 1, columns):
            cells = range(begin, min(begin + columns, last + 1))
            for group, lane in enumerate(lanes):
                if group and not any(logical in lane for logical in cells) and begin + columns <= last:
                    continue  # a hole all along, and more of the lane below
                lead = head if not group and not begin else " " * len(head)
                pieces: Line = [(lead, ""), (f"group {group}  ", "dim")]
                for logical in cells:
                    text, style = lane.get(logical, ("", ""))
                    pieces.append((f"{text:<{size}}", style))
                found.append(pieces)
    return found


def _lane(frame: Frame, seq: SequenceState, group: int) -> dict[int, tuple[str, Style]]:
    """What stands in each column, by logical block."""
    first, ids = (seq.tables[group - 1].first, seq.tables[group - 1].pages) if group else (0, seq.blocks)
    held: dict[int, HeldBlock] | dict[int, HeldPage] = frame.held_pages(group) if group else frame.held()
    copied = {target for of, _, target in frame.page_copies if of == group}
    copied |= set() if group else {target for _, target in frame.copies}
    lane: dict[int, tuple[str, Style]] = {}
    for logical, page in enumerate(ids, start=first):
        style: Style = "copied" if page in copied else "shared" if held[page].shared else ""
        lane[logical] = f"{logical}->{page}{MARKS[style]}", style
    return lane


def pages(recording: Recording, frame: Frame, tier: str, group: int) -> list[Line]:
    """The pages of a short group in a tier."""
    held = list(frame.held_pages(group, tier).values())
    title = f"  {recording.groups[group].label(group)}: {counted(len(held), 'page')}"
    if not held:
        return [[(title, "head")]]
    shown = held[:MOST_ROWS]
    owners = [_holders(page) for page in shown]
    bar, width = filled(recording, 0), max(len("holders"), *map(len, owners))
    fills = max(len(bar), len("filled"))
    found: list[Line] = [
        [(title, "head")],
        [(f"   page  {'filled':<{fills}}  refs  of block  tree  {'holders':<{width}}  tokens", "dim")],
    ]
    copies = {target: source for of, source, target in frame.page_copies if of == group and tier == "device"}
    for page, owner in zip(shown, owners, strict=True):
        style: Style = "moving" if page.moving else "shared" if page.shared else ""
        text = recording.words(page.tokens)
        if page.page in copies:
            style, text = "copied", f"{text}  (copy of {copies[page.page]})"
        room = max(20, WIDTH - width - fills - 35)
        of_block = "?" if page.logical < 0 else str(page.logical)
        found.append([
            (f"  {page.page:>5}  ", ""), (f"{filled(recording, len(page.tokens)):<{fills}}", style),
            (f"  {page.references:>4}  {of_block:>8}  {'yes' if page.in_tree else '':<4}  ", ""),
            (f"{owner:<{width}}", style), (f"  {cut(text, room)}", "dim"),
        ])  # fmt: skip
    if len(held) > len(shown):
        found.append([(f"  ... and {len(held) - len(shown)} more", "dim")])
    return found


def _holders(page: HeldPage) -> str:
    parts = [] if not page.points else ["point"] if page.points == 1 else [f"{page.points} points"]
    parts += [*page.sequences]
    reading = page.moves and not page.moving
    parts += {"out": ["leaving"], "in": ["arriving"], "": ["being copied"] if reading else []}[page.moving]
    return printable(" ".join([*parts, *([f"{page.others} other"] if page.others else [])]))


def extents(frame: Frame, tier: str) -> Iterator[Line]:
    """Which group has which extent of a tier, a character for each."""
    owners = frame.extents[tier]
    used = sum(owner >= 0 for owner in owners)
    head = f"{tier}: {used} of {counted(len(owners), 'extent')} in use"
    yield [(f"{head}{', each by a group' if used else ''}", "head")]
    told = "".join(LETTERS[owner + 1] for owner in owners)
    rows = [told[i : i + WIDTH - 4] for i in range(0, len(told), WIDTH - 4)]
    for row in rows[: 4 if used else 0]:
        yield [("  " + row, "dim")]
    if used and len(rows) > 4:
        yield [(f"  ... and {len(told) - 4 * (WIDTH - 4)} more", "dim")]


def points(frame: Frame) -> list[Line]:
    """Where requests can go on."""
    found: list[Line] = [[(f"points: {len(frame.points)}", "head")]]
    for point in frame.points[:MOST_POINTS]:
        where = f"after {counted(point.num_blocks, 'block')}, the last of which is {point.tier} block {point.block}"
        found.append([(f"  {where}; pages on the {' and the '.join(point.tiers)}", "")])
    if len(frame.points) > MOST_POINTS:
        found.append([(f"  ... and {len(frame.points) - MOST_POINTS} more", "dim")])
    return found
