"""A prefix cache over groups of layers in plain Python: the rules for a core with groups.

A *group* is all layers that see equally far back. A *page* is a group's KV of one block of tokens; a recurrent group's
page of a block is the state behind it. A *point* is a block boundary from which a sequence may go on: it keeps, in each
group, the last ``need(k)`` blocks before it. A page that no point needs and no row holds is dropped at once, and its
block is a hole in that group. A boundary that needs pages of full attention alone is kept without being made a point,
as recent as the last sequence that left it.

Matching asks only for pages: a prefix of k blocks may be used if every group has its last ``need(k)`` blocks before k.
Eviction takes boundaries, the one that was used longest ago first, and each as a whole.

Each page says which tokens a correct computation put into it, and a step checks every position that a layer reads
(:func:`reads`), so a mistake in a rule shows as a read of a hole or of other tokens' KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pagedkv.spec.layers import Attention, Layer, Recurrent

Tokens: TypeAlias = tuple[int, ...]
Need: TypeAlias = Callable[[Layer, int, int], int]
WRITTEN = -1  # in the place of a block's number: the state that a row writes


class NoRoom(Exception):
    """The rows hold so much that a step finds no room."""


def reads(layer: Layer, token: int) -> range:
    """Positions that a token reads, its own included; none but its own of a recurrent layer."""
    if isinstance(layer, Recurrent):
        return range(token, token + 1)
    if isinstance(layer, Attention) and layer.window is not None:
        return range(max(0, token - layer.window + 1), token + 1)
    if isinstance(layer, Attention) and layer.chunk is not None:
        return range(token // layer.chunk * layer.chunk, token + 1)
    return range(token + 1)


def needed(layer: Layer, num_blocks: int, block_size: int) -> int:
    """The product's own rule; mutants give the model another."""
    return layer.need(num_blocks, block_size)


@dataclass(eq=False)
class Page:
    """One group's KV of a block: the tokens that it was computed from, and how many hold it."""

    group: int
    content: Tokens
    references: int = 1


@dataclass(eq=False)
class Block:
    """A block of tokens in the tree: a page of each group, or a hole.

    Attributes
    ----------
    marks : by group, points that need this block's page.
    used : when the boundary behind it was last used as a point; 0: it is none.
    left : when the last row left the boundary behind it, where that is kept for nothing; 0: it is not.
    rows : whose path it is on.
    """

    parent: Block | None
    tokens: Tokens
    pages: dict[int, Page] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    children: dict[Tokens, Block] = field(default_factory=dict)
    used: int = 0
    left: int = 0
    rows: int = 0


@dataclass(eq=False)
class Row:
    """A sequence: its tokens, its blocks in the tree, by group the pages that it holds.

    Attributes
    ----------
    wanted : boundaries that become points when they are computed.
    """

    tokens: list[int]
    num_computed: int
    path: list[Block]
    pages: list[dict[int, Page]]
    wanted: set[int]


class GroupsModel:
    """The cache.

    Parameters
    ----------
    layers : one of each group.
    page_bytes : by group.
    block_size : tokens of a block.
    budget : bytes of all pages.
    need : how many blocks before a boundary a group needs.
    """

    def __init__(
        self, layers: Sequence[Layer], page_bytes: Sequence[int], block_size: int, budget: int, need: Need = needed
    ) -> None:
        self.layers, self.page_bytes, self.block_size, self.budget = layers, page_bytes, block_size, budget
        self._need = need
        self.root = Block(None, ())
        self.rows: list[Row] = []
        self.bytes = self._clock = self.lagging_tokens = 0
        self._states = [group for group, layer in enumerate(layers) if isinstance(layer, Recurrent)]
        self._sees_all = layers[0].need(1000, 1) == 1000

    def need(self, group: int, num_blocks: int) -> int:
        """Blocks before a boundary that a group needs: the last."""
        return max(0, min(num_blocks, self._need(self.layers[group], num_blocks, self.block_size)))

    def blocks(self) -> Iterator[Block]:
        """All of the tree."""
        left = list(self.root.children.values())
        while left:
            block = left.pop()
            yield block
            left += block.children.values()

    @staticmethod
    def path_to(block: Block) -> list[Block]:
        """Blocks from the beginning of a prefix to this one."""
        path = []
        while block.parent is not None:
            path.append(block)
            block = block.parent
        return path[::-1]

    # ---- memory

    def _new_page(self, group: int, content: Tokens) -> Page:
        while self.bytes + self.page_bytes[group] > self.budget:
            self._evict()
        self.bytes += self.page_bytes[group]
        return Page(group, content)

    def _let_go(self, page: Page) -> None:
        page.references -= 1
        assert page.references >= 0, "dropped twice"
        if not page.references:
            self.bytes -= self.page_bytes[page.group]

    def _may_go(self) -> list[Block]:
        """Boundaries that eviction may take: points, but not those at which a row ends."""
        ends = {id(row.path[-1]) for row in self.rows if row.path}
        return [block for block in self.blocks() if block.used and id(block) not in ends]

    def _evict(self) -> None:
        points = [(block.used, 0, -len(self.path_to(block)), block) for block in self._may_go()]
        left = [
            (block.left, 1, -len(self.path_to(block)), block)
            for block in self.blocks() if block.left and not block.rows
        ]  # fmt: skip
        if not points and not left:
            raise NoRoom
        _, is_left, _, coldest = min(points + left, key=lambda one: one[:3])
        if is_left:
            self.drop_left(coldest)
        else:
            self.drop_point(coldest)

    def tails(self, path: list[Block]) -> Iterator[tuple[int, Block]]:
        """Group and block of all that a point at the end of this path needs."""
        for group in range(len(self.layers)):
            for block in path[len(path) - self.need(group, len(path)) :]:
                yield group, block

    def make_point(self, path: list[Block]) -> bool:
        """Keep the boundary behind this path, if all that it needs is there."""
        self._clock += 1
        if not path[-1].used:
            tails = list(self.tails(path))
            if any(group not in block.pages for group, block in tails):
                return False
            for group, block in tails:
                block.marks[group] = block.marks.get(group, 0) + 1
        path[-1].used = self._clock
        return True

    def needs_full_attention_alone(self, boundary: int) -> bool:
        """Whether a boundary is kept without being made a point."""
        return self._sees_all and not any(self.need(group, boundary) for group in range(1, len(self.layers)))

    def _leave(self, path: list[Block]) -> None:
        """The last row has left these blocks."""
        for boundary, block in enumerate(path, start=1):
            if not block.rows and self.needs_full_attention_alone(boundary):
                if not block.left:
                    for one in path[:boundary]:
                        one.marks[0] = one.marks.get(0, 0) + 1
                block.left = self._clock

    def drop_left(self, end: Block) -> None:
        """Let go of a boundary that no point keeps."""
        path = self.path_to(end)
        end.left = 0
        for block in path:
            block.marks[0] -= 1
        self._sweep(path)

    def drop_point(self, end: Block) -> None:
        """Let go of a boundary, and of all that was there for it alone."""
        path = self.path_to(end)
        end.used = 0
        for group, block in self.tails(path):
            block.marks[group] -= 1
        self._sweep(path)

    def _sweep(self, path: list[Block]) -> None:
        """Drop pages that no point and no row needs, and blocks without any page, child and row."""
        for block in reversed(path):
            for group in [g for g, page in block.pages.items() if not block.marks.get(g) and page.references == 1]:
                self._let_go(block.pages.pop(group))
            if not block.pages and not block.children and not block.rows and block.parent is not None:
                del block.parent.children[block.tokens]

    # ---- requests

    def find(self, tokens: Sequence[int]) -> list[Block]:
        """The tree's blocks on the way of a prompt, holes and all."""
        path, block = [], self.root
        for begin in range(0, len(tokens) - self.block_size + 1, self.block_size):
            child = block.children.get(tuple(tokens[begin : begin + self.block_size]))
            if child is None:
                break
            path.append(child)
            block = child
        return path

    def match(self, path: list[Block]) -> int:
        """Blocks of the longest prefix that may be used: one walk, with one number for each group."""
        best, since = 0, [0] * len(self.layers)
        for boundary, block in enumerate(path, start=1):
            for group in range(len(self.layers)):
                if group not in block.pages:
                    since[group] = boundary
            if all(since[group] <= boundary - self.need(group, boundary) for group in range(len(self.layers))):
                best = boundary
        return best

    def open(self, tokens: Sequence[int]) -> Row:
        """Own the longest usable prefix of a prompt, at least one token short of it."""
        path = self.find(tokens[:-1])
        hit = self.match(path)
        self.lagging_tokens += (len(path) - hit) * self.block_size
        row = Row(list(tokens), hit * self.block_size, path[:hit], [{} for _ in self.layers], set())
        for group in range(len(self.layers)):
            for number in range(hit - self.need(group, hit), hit):
                page = row.pages[group][number] = path[number].pages[group]
                page.references += 1
        for block in row.path:
            block.rows += 1
        if hit and path[hit - 1].used:
            self._clock += 1
            path[hit - 1].used = self._clock
        # two requests agreed as far as `path`; and a prompt's end is where its answer, and the next turn, begin
        row.wanted = {len(path), (len(tokens) - 1) // self.block_size} - set(range(hit + 1))
        self.rows.append(row)
        return row

    def step(self, row: Row, num_tokens: int) -> None:
        """Compute tokens. A step ends where a state has to be kept.

        Raises
        ------
        NoRoom
            Nothing has changed.
        AssertionError
            A layer would read a hole, or KV of other tokens.
        """
        first, size = row.num_computed, self.block_size
        if self._states:
            ahead = [boundary * size - first for boundary in row.wanted if boundary * size > first]
            num_tokens = min([num_tokens, *ahead])
        last = first + num_tokens
        fresh: list[tuple[int, int]] = []
        states: dict[int, Page] = {}
        try:
            for group in range(len(self.layers)):
                if group in self._states:
                    states[group] = self._new_page(group, tuple(row.tokens[:last]))
                    continue
                for number in range(first // size, -(-last // size)):
                    if number not in row.pages[group]:
                        row.pages[group][number] = self._new_page(group, ())
                        fresh.append((group, number))
        except NoRoom:
            for page in [*states.values(), *(row.pages[group].pop(number) for group, number in fresh)]:
                self._let_go(page)
            raise
        for group, layer in enumerate(self.layers):
            if group not in self._states:
                self._compute(row, group, layer, range(first, last))
        for group, page in states.items():
            self._compute_state(row, group, page)
        row.num_computed = last
        self._commit(row)

    def _compute(self, row: Row, group: int, layer: Layer, tokens: range) -> None:
        pages, size = row.pages[group], self.block_size
        for token in tokens:
            page = pages[token // size]
            assert page.references == 1, "writes into a page that others hold"
            for position in reads(layer, token):
                if position < token:
                    there = pages.get(position // size)
                    assert there is not None, f"{layer} at {token} reads a hole at {position}"
                    known = there.content[: position + 1]
                    assert known == tuple(row.tokens[: position + 1]), f"{layer} at {token} reads KV of other tokens"
            page.content = tuple(row.tokens[: token + 1])

    def _compute_state(self, row: Row, group: int, page: Page) -> None:
        pages, first = row.pages[group], row.num_computed
        before = pages.get(WRITTEN) or (pages.get(first // self.block_size - 1) if first else None)
        assert not first or before is not None, "the state is a hole"
        known = () if before is None else before.content
        assert known == tuple(row.tokens[:first]), "a state of other tokens, or of another moment"
        if WRITTEN in pages:
            self._let_go(pages[WRITTEN])
        pages[WRITTEN] = page

    def _commit(self, row: Row) -> None:
        """Whole blocks join the tree, and boundaries that were wanted become points."""
        full = row.num_computed // self.block_size
        for number in range(len(row.path), full):
            parent = row.path[-1] if row.path else self.root
            tokens = tuple(row.tokens[number * self.block_size : (number + 1) * self.block_size])
            block = parent.children.setdefault(tokens, Block(parent, tokens))
            block.rows += 1
            row.path.append(block)
            for group in range(len(self.layers)):
                self._give(row, group, number, block)
        for boundary in sorted(row.wanted):
            if 0 < boundary <= full:
                self.make_point(row.path[:boundary])
                row.wanted.discard(boundary)
        for group in range(len(self.layers)):
            if group not in self._states:
                for number in [n for n in row.pages[group] if n < full - self.need(group, full)]:
                    self._let_go(row.pages[group].pop(number))
        self._sweep(row.path)

    def _give(self, row: Row, group: int, number: int, block: Block) -> None:
        """Give a row's page of a whole block to the tree, or take the tree's."""
        pages, is_state = row.pages[group], group in self._states
        source = WRITTEN if is_state else number
        if is_state and row.num_computed != (number + 1) * self.block_size:
            return  # the state behind this block was never written
        page = pages.pop(source, None)
        if page is None:
            return
        if group in block.pages:
            self._let_go(page)
            page = block.pages[group]
        else:
            block.pages[group] = page
        page.references += 1
        if is_state:
            for old in [old for old in pages if old != number]:
                self._let_go(pages.pop(old))
        pages[number] = page

    def release(self, row: Row) -> bool:
        """End a sequence; whether its newest whole block could become a point."""
        kept = not row.path or self.make_point(row.path)
        self.rows.remove(row)
        for pages in row.pages:
            for page in pages.values():
                self._let_go(page)
        for block in row.path:
            block.rows -= 1
        self._leave(row.path)
        self._sweep(row.path)
        return kept

    # ---- the equations

    def check(self) -> None:
        """Nothing is leaked, kept for none, or missing where it is needed."""
        pages = {id(page): page for block in self.blocks() for page in block.pages.values()}
        pages |= {id(page): page for row in self.rows for group in row.pages for page in group.values()}
        assert self.bytes == sum(self.page_bytes[page.group] for page in pages.values()) <= self.budget, "a leak"
        for block in self.blocks():
            path = self.path_to(block)
            content = tuple(token for one in path for token in one.tokens)
            for group, page in block.pages.items():
                holders = sum(page is held for row in self.rows for held in row.pages[group].values())
                assert page.content == content, "a page of other tokens"
                assert page.references == 1 + holders, "holders miscounted"
                assert block.marks.get(group) or holders, "kept for none"
            if block.used:
                assert all(group in one.pages for group, one in self.tails(path)), "a point without all that it needs"
            assert block.children or block.used or block.left or block.rows, "a dead end"
