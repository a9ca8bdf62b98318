"""Random programs full of herds, over an arena whose slots say which prefix they hold.

What stands in a slot of a layer follows from the layer, the namespace, and all tokens up to the slot's. A write puts it
there; attention asserts it of every position of every row that it reads. A step that raises spoils all slots that it
was to write, so nothing of it can be taken for computed.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.scheduler import Plan, Request, Scheduler, SchedulerOptions
from tests import toy
from tests.in_blocks import in_blocks
from tests.slices import one_in

from .conftest import after, entry, greedy

SPEC = pk.KVSpec(2, 1, 1, "float32", 4, model="toy")
SPACES = [pk.Namespace(tenant="a"), pk.Namespace(tenant="b")]


class Interruption(Exception):
    """Raised by a step's body."""


class Herds:
    """Requests that come in herds, in two namespaces, and everything that can happen to them."""

    def __init__(self, seed: int, share: str, host: int | None, disk: Path | None) -> None:
        self.random = Random(seed)
        disk_option = None if disk is None else pk.Disk(str(disk), pk.Blocks(60))
        self.cache = pk.KVCache(SPEC, in_blocks(self.random.choice([26, 34, 60])), in_blocks(host), disk_option)
        self.scheduler = Scheduler(
            self.cache,
            SchedulerOptions(
                max_running=6, max_batch_tokens=self.random.choice([14, 40, 90]), share=share, watermark=0.0,
                lookahead=self.random.choice([0, 0, 3]), order=self.random.choice(["first_come", "longest_prefix"]),
            ),
        )  # fmt: skip
        self.requests: list[Request] = []
        self.followed = 0
        self.is_out = False  # a plan that was not reported

    def come(self) -> None:
        """One beginning for several requests, of which some leave it early."""
        random = self.random
        beginning = [random.randrange(4) for _ in range(random.choice([5, 16, 27]))]
        for _ in range(random.randint(2, 4)):
            kept = random.choice([len(beginning), len(beginning), random.randint(1, len(beginning))])
            tokens = [*beginning[:kept], *(random.randrange(4) for _ in range(random.randint(1, 5)))]
            kind = random.choice([{}, {}, {}, {"n": 2}, {"beams": 2}])
            for space in random.choice([SPACES, SPACES[:1], SPACES[1:]]):
                self.requests.append(
                    self.scheduler.submit(
                        tokens, random.randint(1, 9), namespace=space, priority=random.choice([0, 50, 50, 100]), **kind
                    )
                )

    def disturb(self) -> None:
        random = self.random
        live = [request for request in self.requests if not request.ended]
        what = random.random()
        if what < 0.08 and live:
            self.scheduler.abort(random.choice(live))
        elif what < 0.3 and live and not self.is_out:
            request = random.choice(live)
            if request.beams == 1:
                for branch in request.live():
                    self.scheduler.draft(branch, [after(branch.tokens), *(random.randrange(50) for _ in range(2))])
        elif what < 0.36:
            self.cache.set_quota(random.choice(SPACES), random.choice([pk.Blocks(1), pk.Blocks(4), None]))
        elif what < 0.4:
            self.cache.purge(random.choice(SPACES))

    def turn(self) -> None:
        random, scheduler = self.random, self.scheduler
        if len([request for request in self.requests if not request.ended]) < 4:
            self.come()
        self.disturb()
        plan = scheduler.schedule()
        self.is_out = bool(plan)
        if not plan:
            return
        self.followed += 0 if plan.batch.follow is None else len(plan.batch.follow)
        mishap = random.random()
        if mishap < 0.04:
            if mishap < 0.02:
                scheduler.cancel(plan)
                self.is_out = False
            return
        try:
            with scheduler.step(plan) as step:
                self.cache.check_integrity()
                self.run(plan, step, random.choice([0, 1, 2]) if mishap < 0.15 else None)
                if mishap > 0.92:
                    scheduler.abort(random.choice([branch.request for branch in plan.lanes] or self.requests[-1:]))
        except Interruption:
            scheduler.check_integrity()
            return
        scheduler.check_integrity()
        if mishap < 0.2:
            return  # committed, and never reported
        scheduler.report(plan, [entry(branch) for branch in plan.lanes])
        self.is_out = False
        scheduler.check_integrity()

    def run(self, plan: Plan, step: pk.Step, raises_at: int | None) -> None:
        """Layer by layer: write all rows, then attend all rows; or raise at a layer or at the end."""
        roots = [self.salt(plan.sequences[i]) for i in range(len(plan.sequences))]
        for layer in range(SPEC.num_layers):
            values = [self.values(seq.tokens, roots[i], layer) for i, seq in enumerate(plan.sequences)]
            of_row = np.repeat(np.arange(len(values)), np.diff(step.q_indptr))
            new = [values[row][at] for row, at in zip(of_row.tolist(), step.positions.tolist(), strict=True)]
            if raises_at == layer:
                self.spoil(step)
                raise Interruption
            kv = np.array(new, np.float32)[:, None, None]
            step.write(layer, kv, kv)
            k, _ = self.cache.layer(layer)
            for wanted, length, blocks in zip(values, step.seq_lens.tolist(), step.block_tables, strict=True):
                there = k[blocks[: -(-length // 4)], :, 0, 0].reshape(-1)[:length]
                assert there.tolist() == wanted[:length].tolist(), "a row attends another prefix"
        if raises_at == SPEC.num_layers:
            self.spoil(step)
            raise Interruption

    def spoil(self, step: pk.Step) -> None:
        blocks, offsets = np.divmod(step.slot_mapping, 4)
        for layer in range(SPEC.num_layers):
            for array in self.cache.layer(layer):
                array[blocks, offsets] = np.nan

    def salt(self, seq: pk.Sequence) -> int:
        """Which of the two namespaces a sequence is in."""
        (request,) = (one for one in self.requests if any(branch.seq is seq for branch in one.branches))
        assert request.namespace is not None
        return 1 + SPACES.index(request.namespace)

    def values(self, tokens: NDArray[np.int32], salt: int, layer: int) -> NDArray[np.int64]:
        return (toy.chain(tokens, salt) + 7919 * layer) % toy.EXACT["float32"]

    def check_outputs(self) -> None:
        for request in self.requests:
            assert request.ended
            if request.state == "finished" and request.beams == 1:
                expected = sorted(greedy(request, first) for first in range(request.n))
                assert sorted(out.tolist() for out in request.outputs) == expected
        assert self.cache.table.num_rows == 0
        while self.cache.stats().placement["in_flight"]:  # what moves owns its blocks
            time.sleep(0.001)
        assert self.cache.stats().blocks["device"]["live"] == 0


def play(seed: int, share: str, tiers: int, folder: Path, turns: int) -> Herds:
    herds = Herds(seed, share, 40 if tiers > 1 else None, folder / "kv" if tiers > 2 else None)
    with herds.cache:
        for _ in range(turns):
            herds.turn()
        for request in herds.requests:
            if herds.random.random() < 0.5:
                herds.scheduler.abort(request)
        herds.come = lambda: None  # type: ignore[method-assign]
        for _ in range(1000):
            if not herds.scheduler.has_work:
                break
            herds.turn()
        herds.check_outputs()
    return herds


@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.parametrize("share", ["step", "next"])
@pytest.mark.parametrize("seed", one_in(2, range(4)))
def test_every_row_attends_its_own_prefix_whatever_happens(seed, share, tiers, tmp_path):
    herds = play(seed, share, tiers, tmp_path, 90)
    assert (herds.followed > 3) == (share == "step")
    assert herds.scheduler.stats().shared_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(100, 112))
def test_every_row_attends_its_own_prefix_in_long_programs(seed, tiers, tmp_path):
    assert play(seed, "step", tiers, tmp_path, 500).followed > 20
