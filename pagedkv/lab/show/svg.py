"""One step of a recorded run as a picture: sequences above, tiers below, wires between.

It is one SVG file without scripts, which follows the reader's light or dark theme.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

from pagedkv.errors import InvalidArgument
from pagedkv.lab.recording import Frame, HeldBlock, Recording, SequenceState
from pagedkv.lab.show.styles import printable
from pagedkv.lab.show.text import frame_of

LEFT, CELL, HIGH, GAP = 96, 110, 40, 8  # of the first column; of a block
HEAD, LANE = 46, 26  # the caption; a sequence's row, with the gap below it
MOST_BLOCKS = 16  # of a tier, and of a sequence: a larger run is for --html
MOST_LETTERS = 14  # of a block's text
COLOURS = 4
STYLE = """
svg { --paper: #ffffff; --ink: #1d2330; --faint: #5b6475; --cell: #f3f5f9; --line: #c4cad6; --copied: #b4450b;
  --s0: #0b62a4; --s1: #a8480b; --s2: #00745a; --s3: #9b2f7a; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14171d; --ink: #e6e9f0; --faint: #a3adbf; --cell: #1f242d; --line: #434b5a; --copied: #ff9d66;
    --s0: #6fb7f2; --s1: #ffa46b; --s2: #4fd6b4; --s3: #f08bd0; }
}
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.paper { fill: var(--paper); } .head { font-weight: 600; font-size: 14px; }
.faint { fill: var(--faint); font-size: 11px; }
.cell { fill: var(--cell); stroke: var(--line); } .free { fill: none; stroke: var(--line); stroke-dasharray: 3 3; }
.shared { stroke: var(--ink); stroke-width: 2.5; } .copied { stroke: var(--copied); stroke-width: 2.5; }
.wire { fill: none; stroke-width: 1.5; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); } .s3 { stroke: var(--s3); }
.n0 { fill: var(--s0); } .n1 { fill: var(--s1); } .n2 { fill: var(--s2); } .n3 { fill: var(--s3); }
"""


def svg(recording: Recording, step: int | None = None) -> str:
    """A step as an SVG document; the last one unless another is asked for.

    Raises
    ------
    InvalidArgument, WrongType
        There is no such step; or it is too large for a picture, or of a cache by groups of layers: `page` has those.
    """
    _, frame = frame_of(recording, step)
    if recording.groups:
        raise InvalidArgument("a picture of a cache by groups of layers is not drawn as SVG: write a page with --html")
    most = max([*recording.tiers.values(), *(len(seq.blocks) for seq in frame.sequences)])
    if most > MOST_BLOCKS:
        raise InvalidArgument(f"a row of {most} blocks is too long for an SVG ({MOST_BLOCKS} at most): use --html")
    width = LEFT + most * (CELL + GAP) + GAP
    tops = [HEAD + i * (HIGH + LANE) for i in range(len(frame.sequences) + len(recording.tiers))]
    first = len(frame.sequences)
    tiers = {name: tops[first + i] + LANE for i, name in enumerate(recording.tiers)}
    height = (tops[-1] if tops else HEAD) + 2 * LANE + HIGH
    shapes = [*_wires(frame, tops, tiers["device"])]  # under the blocks
    for i, seq in enumerate(frame.sequences):
        shapes += _sequence(recording, frame, seq, i % COLOURS, tops[i])
    for name, size in recording.tiers.items():
        shapes += _tier(recording, frame, name, size, tiers[name])
    title = html.escape(printable(frame.caption))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
        f'<title>{title}</title><style>{STYLE}</style><rect class="paper" width="{width}" height="{height}"/>'
        f"{_text(GAP, 24, frame.caption, 'head')}{''.join(shapes)}</svg>\n"
    )


def _left(column: int) -> int:
    return LEFT + column * (CELL + GAP)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{html.escape(printable(text))}</text>'


def _box(x: float, y: float, kind: str, high: int = HIGH) -> str:
    return f'<rect x="{x}" y="{y}" width="{CELL}" height="{high}" rx="4" class="{kind}"/>'


def _cut(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def _sequence(recording: Recording, frame: Frame, seq: SequenceState, colour: int, top: int) -> Iterator[str]:
    """A sequence's tokens in blocks, each with the device block that holds its KV."""
    held, size = frame.held(), recording.block_size
    yield _text(GAP, top + 17, seq.name, f"head n{colour}")
    yield _text(GAP, top + 33, f"fork of {seq.parent}" if seq.parent else f"{len(seq.tokens)} tokens", "faint")
    for i, block in enumerate(seq.blocks):
        shared = " shared" if held[block].shared else ""
        words = recording.words(seq.tokens[i * size : (i + 1) * size])
        yield _box(_left(i), top, f"cell s{colour}{shared}")
        yield _text(_left(i) + 6, top + 16, _cut(words))
        yield _text(_left(i) + 6, top + 33, f"in block {block}", "faint")


def _tier(recording: Recording, frame: Frame, name: str, size: int, top: int) -> Iterator[str]:
    held: Mapping[int, HeldBlock] = {block.block: block for block in frame.tiers[name]}
    copied = {target for _, target in frame.copies} if name == "device" else set()
    yield _text(GAP, top + 17, name, "head")
    yield _text(GAP, top + 33, f"{len(held)} of {size} owned", "faint")
    for i in range(size):
        block = held.get(i)
        if block is None:
            yield _box(_left(i), top, "free")
            yield _text(_left(i) + CELL / 2, top + 24, "free", "faint", "middle")
            continue
        kind = "cell copied" if i in copied else "cell shared" if block.shared else "cell"
        owners = [*(["tree"] if block.in_tree else []), *block.sequences]
        yield _box(_left(i), top, kind)
        yield _text(_left(i) + 6, top + 16, _cut(recording.words(block.tokens)))
        yield _text(_left(i) + 6, top + 33, _cut(f"{i}: {' '.join(owners)}"), "faint")


def _wires(frame: Frame, tops: list[int], device: int) -> Iterator[str]:
    """From each block of each sequence to the device block that holds it."""
    for row, seq in enumerate(frame.sequences):
        shift = (row % COLOURS - (COLOURS - 1) / 2) * 10  # so that no wire hides another one
        for i, block in enumerate(seq.blocks):
            x, y, to = _left(i) + CELL / 2 + shift, tops[row] + HIGH, _left(block) + CELL / 2 + shift
            middle = (y + device) / 2
            yield f'<path class="wire s{row % COLOURS}" d="M{x} {y} C{x} {middle} {to} {middle} {to} {device}"/>'
