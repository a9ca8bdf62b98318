"""Loops of a kernel, and the path that a warp takes through one in its common case.

The path is found by rule, not by label: among all ways from a loop's head back to it, that with the most work (on
tensor cores, unless the caller counts other operations), among those the one with the most copies into shared memory,
and then the shortest. So blocks that run rarely (masked tiles, rescaling, refills of block ids) are left out where a
way around them does the same work. An inner loop is passed once; the caller multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from bench.sass.disassembly import Instruction, Kernel
from bench.sass.errors import SassError
from bench.sass.opcodes import is_copy, tensor_flops

_ENDS = {"EXIT", "RET", "BRX", "BRXU", "JMX"}
_JUMPS = {"BRA", "JMP"}


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop: the number of its head's block, and those of all its blocks."""

    head: int
    blocks: frozenset[int]


class Flow:
    """Control flow of one kernel.

    Parameters
    ----------
    operations : an instruction -> its share of the work.
    """

    def __init__(self, kernel: Kernel, operations: Callable[[Instruction], int] = tensor_flops) -> None:
        self.kernel = kernel
        self._operations = operations
        starts = {0, *kernel.labels.values()}
        for index, instruction in enumerate(kernel.instructions):
            if instruction.base in _ENDS or _jumps(instruction):
                starts.add(index + 1)
        inside = sorted(start for start in starts if start < len(kernel.instructions))
        self._ranges = list(zip(inside, [*inside[1:], len(kernel.instructions)], strict=True))
        self._block_at = {first: number for number, (first, _) in enumerate(self._ranges)}
        self.next = [list(self._successors(number)) for number in range(len(self._ranges))]

    def instructions(self, block: int) -> tuple[Instruction, ...]:
        """Those of a block."""
        first, end = self._ranges[block]
        return self.kernel.instructions[first:end]

    def label(self, block: int) -> str:
        """A block's label in the disassembly, or its first instruction's index."""
        first = self._ranges[block][0]
        return next((name for name, at in self.kernel.labels.items() if at == first), f"instruction {first}")

    @cached_property
    def loops(self) -> list[Loop]:
        """All natural loops, one for each head."""
        found: dict[int, set[int]] = {}
        before: dict[int, list[int]] = {block: [] for block in self._order}
        for block in self._order:
            for after in self.next[block]:
                before[after].append(block)
        for block in self._order:
            for head in self.next[block]:
                if head not in self._dominators[block]:
                    continue
                body, waiting = found.setdefault(head, {head}), [block]
                while waiting:
                    one = waiting.pop()
                    if one not in body:
                        body.add(one)
                        waiting += before[one]
        return [Loop(head, frozenset(body)) for head, body in found.items()]

    def path(self, loop: Loop) -> list[int]:
        """The blocks of the common pass through a loop, in order.

        Raises
        ------
        SassError
            The loop cannot be followed from its head back to it.
        """
        place = {block: number for number, block in enumerate(self._order)}
        best: dict[int, tuple[tuple[int, int, int], int | None]] = {loop.head: (self._worth[loop.head], None)}
        for block in self._order:
            if block not in best:
                continue
            worth = best[block][0]
            for after in self.next[block]:
                if after not in loop.blocks or place[after] <= place[block]:
                    continue
                work, copies, length = (a + b for a, b in zip(worth, self._worth[after], strict=True))
                if after not in best or (work, copies, length) > best[after][0]:
                    best[after] = ((work, copies, length), block)
        ends = [block for block in best if loop.head in self.next[block]]
        if not ends:
            raise SassError(f"no way leads through the loop at {self.label(loop.head)}")
        block: int | None = max(ends, key=lambda one: best[one][0])
        taken = []
        while block is not None:
            taken.append(block)
            block = best[block][1]
        return taken[::-1]

    def work(self, blocks: frozenset[int] | list[int]) -> int:
        """Operations of a warp in some blocks, each run once."""
        return sum(self._worth[block][0] for block in blocks)

    @cached_property
    def _worth(self) -> list[tuple[int, int, int]]:
        """Of each block: operations, copies, and its instructions as a loss."""
        found = []
        for block in range(len(self._ranges)):
            mine = self.instructions(block)
            found.append((sum(map(self._operations, mine)), sum(map(is_copy, mine)), -len(mine)))
        return found

    def _successors(self, block: int) -> Iterator[int]:
        """Where a block goes on, out-of-line code for warps that diverged left out (BRA.DIV)."""
        last = self.instructions(block)[-1]
        if _jumps(last) and "DIV" not in last.parts:
            target = last.target
            if target is None or target not in self.kernel.labels:
                raise SassError(f"{last.opcode} {last.operands}: a branch to a place that the text does not have")
            if self.kernel.labels[target] in self._block_at:
                yield self._block_at[self.kernel.labels[target]]
        leaves = last.base in _ENDS or _jumps(last)
        if not (leaves and not last.guard and not _conditional(last)) and block + 1 < len(self._ranges):
            yield block + 1

    @cached_property
    def _order(self) -> list[int]:
        """Blocks that the entry reaches, each before its successors (backward edges aside)."""
        seen, done = {0}, []
        stack = [(0, iter(self.next[0]))]
        while stack:
            block, rest = stack[-1]
            after = next((one for one in rest if one not in seen), None)
            if after is None:
                stack.pop()
                done.append(block)
            else:
                seen.add(after)
                stack.append((after, iter(self.next[after])))
        return done[::-1]

    @cached_property
    def _dominators(self) -> dict[int, set[int]]:
        """Of each block, those that every way to it passes."""
        order = self._order
        before: dict[int, list[int]] = {block: [] for block in order}
        for block in order:
            for after in self.next[block]:
                before[after].append(block)
        found = {block: set(order) for block in order}
        found[0] = {0}
        changed = True
        while changed:
            changed = False
            for block in order[1:]:
                new = set.intersection(*(found[one] for one in before[block])) | {block}
                if new != found[block]:
                    found[block], changed = new, True
        return found


def _jumps(instruction: Instruction) -> bool:
    """Whether it goes to a label; on sm_80 a call to a label inside the kernel never returns."""
    return instruction.base in _JUMPS or (instruction.base == "CALL" and (instruction.target or "").startswith(".L"))


def _conditional(branch: Instruction) -> bool:
    """Whether a branch depends on an operand, as in ``BRA.U !UP0, target``."""
    return bool({"DIV", "CONV", "ANY"} & branch.parts) or branch.operands.partition("`")[0].strip(" ,") != ""
