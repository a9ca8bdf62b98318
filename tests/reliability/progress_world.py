"""One cache, one scheduler and random requests: a world of the proof *progress*.

Everything that may come between them comes.

What is refused is compared with the books at that moment. A refusal is just if no request that has not ended would fit,
at its largest and with its prompt shared, beside what pins, other sequences and the other thread hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.scheduler import Branch, Plan, Request, Scheduler
from tests.reliability.history_model import SIZE, alone, beam_tokens, read_back, said
from tests.reliability.progress_others import NAMESPACES, VISITOR_BLOCKS, Others, some_prompt
from tests.reliability.progress_shape import Shape, worst_case
from tests.reliability.proof import Tally

MOST_TURNS = 3000  # after the last request has come


class Interruption(Exception):
    """What a step's body raises."""


@dataclass(eq=False)
class Asked:
    """A request and what was asked of it."""

    request: Request
    salt: int
    worst: int
    deadline: float | None
    aborted: bool = False

    @property
    def kind(self) -> str:
        """What it is counted as."""
        return "beams" if self.request.beams > 1 else "samples" if self.request.n > 1 else "single"


class World:
    """A scheduler in use.

    `tally` gets what happens and what is wrong; `how` says how to see it again.
    """

    def __init__(self, seed: int, tally: Tally, disk: str | None = None, *, has_visitor: bool = False) -> None:
        self.random = Random(seed)
        self.shape = Shape(self.random, disk, has_visitor)
        self.cache = self.shape.open()
        self.now = 0.0
        self.scheduler = Scheduler(self.cache, self.shape.options, clock=lambda: self.now)
        self.tally, self.how = tally, f"world of seed {seed}" + (", with a visitor" if has_visitor else "")
        self.asked: dict[Request, Asked] = {}
        self.others = Others(self.cache, self.random, tally, self.shape.has_visitor, self.shape.is_narrow)
        self.k, self.v = (layer.reshape(-1, SIZE) for layer in self.cache.layer(0))
        self.is_out = False  # a plan that was not reported

    # ---- requests

    def submit(self) -> None:
        """A request of any kind; whether it is taken is compared with what was promised."""
        r, options, narrow = self.random, self.shape.options, self.shape.is_narrow
        kind, wide = r.random(), r.randint(2, 3 if narrow else 4)
        n, beams = (wide, 1) if kind < 0.25 else (1, wide) if kind < 0.45 else (1, 1)
        most, width = r.randint(1, 10), max(n, beams)
        tokens, salt = some_prompt(r, (16, 21, 26)) if narrow and width > 1 else some_prompt(r)
        worst = worst_case(len(tokens), most, width, options.lookahead)
        stops = tuple(r.sample(range(50), r.choice([0, 0, 1, 4])))
        wait = r.choice([None, None, None, None, float(r.randint(5, 40))])
        takes = worst <= self.shape.device and width <= options.max_running
        try:
            request = self.scheduler.submit(
                tokens, most, tenant=r.choice("abc"), priority=r.choice([0, 50, 50, 100]), stop_tokens=stops,
                namespace=NAMESPACES[salt], deadline_s=wait, n=n, beams=beams,
            )  # fmt: skip
        except pk.RequestTooLarge:
            self.tally.add("refused by submit")
            if takes:
                self.wrong("unjust refusals", f"submit refused {worst} blocks of {self.shape.device}, width {width}")
            return
        if not takes:
            self.wrong("taken too much", f"submit took {worst} blocks of {self.shape.device}, width {width}")
        self.asked[request] = Asked(request, salt, worst, None if wait is None else self.now + wait)

    def wrong(self, kind: str, what: str) -> None:
        """Note a wrong case of a kind."""
        self.tally.add(kind)
        self.tally.fail(f"{self.how}: {what}")

    def interfere(self) -> None:
        """An abort, drafts, or nothing."""
        what = self.random.random()
        if what < 0.02:
            self.abort()
        elif what < 0.14 and not self.is_out:
            self.draft()

    def abort(self) -> None:
        """One request, wherever it is."""
        live = [asked for asked in self.asked.values() if not asked.request.ended]
        if live:
            asked = self.random.choice(live)
            asked.aborted = True
            self.scheduler.abort(asked.request)

    def draft(self) -> None:
        """Tokens for a branch, right up to some point."""
        r = self.random
        lanes = [branch for branch in self.scheduler._running.lanes.branches if branch.request.beams == 1]
        if lanes:
            branch = r.choice(lanes)
            right = alone(branch.tokens.tolist(), self.asked[branch.request].salt, r.randint(1, 4), (), 1, 1)[0]
            self.scheduler.draft(branch, [*right, *(r.randrange(50) for _ in range(r.randint(0, 2)))])
            self.tally.add("drafts")

    # ---- steps

    def turn(self) -> None:
        """One step, from its plan to its report, or a mishap on the way."""
        self.now += 1.0
        try:
            plan = self.scheduler.schedule()
        except (pk.OutOfBlocks, pk.InvalidArgument) as refused:
            self.judge(refused)
            return
        self.is_out = bool(plan)
        for request in plan.expired:
            self.ended(request)
        if self.scheduler.stats().loading:
            self.tally.add("plans with loads beside them")
        if not plan:
            self.scheduler.wait()
            return
        mishap = self.random.random()
        try:
            with self.scheduler.step(plan) as step:
                if mishap < 0.01:
                    raise Interruption
                entries = self.compute(plan, step)
                if mishap < 0.02:
                    raise Interruption
        except Interruption:
            return
        except pk.OutOfBlocks as refused:
            self.tally.add("steps for which the other thread left no room")
            if not self.shape.has_visitor:
                self.wrong("unjust refusals", f"a step did not fit, and no other thread is there: {refused}")
            return
        if mishap < 0.03:
            return  # never reported
        self.report(plan, entries)

    def report(self, plan: Plan, entries: list[Any]) -> None:
        """Tell it, once more without the others' sequences where those are in the way of forks."""
        self.is_out = False
        try:
            try:
                finished = self.scheduler.report(plan, entries)
            except pk.InvalidArgument:
                if any(branch.request.width <= self.left()[1] for branch in plan.lanes):
                    raise
                self.tally.add("forks that others left no sequence for")
                self.others.let_go()
                finished = self.scheduler.report(plan, entries)
        except pk.InvalidArgument as refused:
            self.wrong("unjust refusals", f"a report was refused: {refused}")
            for request in {branch.request for branch in plan.lanes} & self.asked.keys():  # it would be refused again
                self.asked[request].aborted = True
                self.scheduler.abort(request)
            return
        for request in finished:
            self.ended(request)

    def compute(self, plan: Plan, step: pk.Step) -> list[Any]:
        """Write the new tokens' KV, and say what follows from what is read back."""
        salts = {id(branch.seq): self.asked[branch.request].salt for branch in self.scheduler._running.computing}
        salts |= {id(branch.seq): self.asked[branch.request].salt for branch in plan.lanes}
        each = np.array([salts[id(seq)] for seq in plan.sequences])
        values = (step.tokens + 1 + 64 * np.repeat(each, plan.q_lens)).astype(np.float32)[:, None, None]
        step.write(0, values, -values)
        if not plan.lanes:
            return []
        sums, ends = read_back(self.k, self.v, step, len(plan.lanes)), step.seq_lens.tolist()
        totals = [int(sums[i, ends[i] - 1]) for i in range(len(plan.lanes))]
        self.tally.hits += sum(ends[: len(plan.lanes)])
        beams: dict[Request, list[int]] = {}
        entries: list[Any] = []
        for i, branch in enumerate(plan.lanes):
            request = branch.request
            if request.beams > 1:
                beams.setdefault(request, []).append(i)
                entries.append([])
            elif request.n > 1 and branch.num_output == 0:
                entries.append([said(totals[i], which) for which in range(request.n)])
            elif len(branch.draft):
                entries.append(_verified(branch, sums[i, ends[i] - 1 - len(branch.draft) : ends[i]].tolist()))
            else:
                entries.append(said(totals[i]))
        for request, lanes in beams.items():
            for i, tokens in zip(lanes, beam_tokens([totals[i] for i in lanes], request.beams), strict=True):
                entries[i] = tokens
        return entries

    # ---- judging

    def judge(self, refused: pk.PagedKVError) -> None:
        """Judge whether the scheduler had to refuse.

        Compares its requests that have not ended with what others leave.
        """
        self.tally.add(f"refused by schedule: {type(refused).__name__}")
        while self.cache.moves.run_moves():
            pass
        blocks, rows = self.left()
        live = [asked for asked in self.asked.values() if not asked.request.ended]
        if any(asked.worst <= blocks and asked.request.width <= rows for asked in live):
            left = f"others leave {blocks} blocks and {rows} sequences"
            self.wrong("unjust refusals", f"{left}, and it refused: {refused}")
        if self.random.random() < 0.5:
            self.others.let_go()

    def left(self) -> tuple[int, int]:
        """Blocks and sequences that others leave, at least."""
        own = {id(branch.seq): branch.seq for asked in self.asked.values() for branch in asked.request.live()}
        own.pop(id(None), None)
        others = self.others
        if others.has_visitor:  # what it holds now is not what it held then: the most that it ever holds
            held = sum(len(seq.blocks) for seq in others.sequences) + sum(others.pins.values())
            return self.shape.device - held - VISITOR_BLOCKS, self.cache.max_sequences - len(others.sequences) - 1
        blocks = {block for seq in own.values() if seq is not None for block in seq.blocks.tolist()}
        live = self.cache.stats().blocks["device"]["live"]
        return self.shape.device - (live - len(blocks)), self.cache.max_sequences - len(others.sequences)

    def ended(self, request: Request) -> None:
        """A request is over: its outcome was asked for, and its tokens are the oracle's."""
        asked = self.asked.pop(request)
        self.tally.count += 1
        self.tally.add(f"{request.state}, {asked.kind}")
        self.tally.add("suspensions", request.num_preemptions)
        if request.num_preemptions and request.width > 1:
            self.tally.add("requests of several branches that were suspended")
        if request.state == "expired" and (asked.deadline is None or asked.deadline > self.now):
            self.wrong("ends not asked for", f"{request} expired by {self.now}, its deadline is {asked.deadline}")
        if request.state == "aborted" and not asked.aborted:
            self.wrong("ends not asked for", f"{request} was aborted, and that was not asked for")
        outputs = sorted(output.tolist() for output in request.outputs)
        wanted = alone(
            request.prompt.tolist(), asked.salt, request.max_new_tokens, request.stop_tokens, request.n, request.beams
        )
        if request.state == "finished":
            if outputs != wanted:
                self.wrong("wrong tokens", f"{request} came to {outputs}, alone it comes to {wanted}")
        elif request.beams == 1 and not all(any(right[: len(o)] == o for right in wanted) for o in outputs):
            self.wrong("wrong tokens", f"{request}, {request.state}, came to {outputs}, alone it comes to {wanted}")

    # ---- life

    def run(self, count: int) -> None:
        """So many requests, and then to the end: beside what others hold, and at last without it."""
        r, submitted = self.random, 0
        while submitted < count:
            while self.scheduler.stats().waiting < 4 and submitted < count and r.random() < 0.8:
                self.submit()
                submitted += 1
            self.others.act()
            self.interfere()
            self.turn()
            self.sweep()
        self.drain(beside_others=True)
        self.others.let_go()
        self.drain(beside_others=False)
        self.close()

    def sweep(self) -> None:
        """What was aborted has ended."""
        for asked in [asked for asked in self.asked.values() if asked.aborted and asked.request.ended]:
            self.ended(asked.request)

    def drain(self, beside_others: bool) -> None:
        """No more requests come: all end, or all that fit beside what others hold."""
        for _ in range(MOST_TURNS):
            if not self.scheduler.has_work:
                return
            before = self.tally.found.get("refused by schedule: OutOfBlocks", 0)
            self.turn()
            self.sweep()
            if beside_others and self.tally.found.get("refused by schedule: OutOfBlocks", 0) > before:
                return
        self.wrong("lock-ups", f"still at work after {MOST_TURNS} turns: {self.scheduler.stats()}")
        for asked in self.asked.values():
            asked.aborted = True
            self.scheduler.abort(asked.request)
        self.sweep()

    def close(self) -> None:
        """Nothing is left behind."""
        self.others.leave()
        while self.cache.moves.run_moves():  # a call returns once it has its room
            pass
        try:
            self.scheduler.check_integrity()
        except AssertionError as problem:
            self.wrong("wrong books", f"books: {problem}")
        held = {name: counts["live"] for name, counts in self.cache.stats().blocks.items() if counts["live"]}
        if held or self.cache.table.num_rows:
            self.wrong("leaks", f"left behind: blocks {held}, {self.cache.table.num_rows} sequences")
        self.cache.close()


def _verified(branch: Branch, sums: list[int]) -> list[int]:
    """Return as much of a draft as is right, and the token after it.

    `sums` are those after the last token and after each of the draft's.
    """
    draft, right = branch.draft.tolist(), 0
    while right < len(draft) and draft[right] == said(sums[right]):
        right += 1
    return [said(total) for total in sums[: right + 1]]
