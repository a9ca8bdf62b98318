"""What the cache has for a scheduler.

Batches, measured costs, and an error with the numbers.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache.cost_model import FRESH_S, CostModel
from pagedkv.cache.sequence import Batch
from pagedkv.scheduler.limits import blocks_at_most

from .conftest import SPEC, greedy, prompt


def test_a_step_over_a_batch_is_the_step_over_its_sequences():
    with pk.KVCache(SPEC, pk.Blocks(20)) as cache:
        seqs = [cache.sequence(prompt(i, 3 + i)) for i in range(3)]
        batch = Batch(seqs, np.array([seq.row for seq in seqs]))
        assert len(batch) == 3
        with cache.step(batch, q_lens=[1, 2, 3]) as step:
            assert step.q_indptr.tolist() == [0, 1, 3, 6]
            step.mark_written(0)
        assert [seq.num_computed for seq in seqs] == [1, 2, 3]
        with cache.step(seqs) as step:
            step.mark_written(0)
        assert [seq.num_computed for seq in seqs] == [3, 4, 5]


def test_a_batch_that_was_released_or_is_of_another_cache_is_refused():
    with pk.KVCache(SPEC, pk.Blocks(20)) as cache, pk.KVCache(SPEC, pk.Blocks(20)) as other:
        seqs = [cache.sequence(prompt(i)) for i in range(2)]
        batch = Batch(seqs, np.array([seq.row for seq in seqs]))
        with pytest.raises(pk.InvalidArgument, match="another cache"):
            other.step(batch)
        with pytest.raises(pk.InvalidArgument, match="2 sequences but 1 rows"):
            Batch(seqs, batch.rows[:1])
        seqs[0].release()
        with pytest.raises(pk.StaleHandle), cache.step(batch):
            pass
        cache.check_integrity()


def test_costs_are_unknown_until_they_are_measured_and_follow_what_was():
    now = [0.0]
    costs = CostModel(16, 1000, 1000.0, clock=lambda: now[0])
    assert costs.compute_s(100) is None
    assert costs.load_s(10, 1) is None
    costs.observe_prefill(1000, 3.0)
    assert costs.compute_s(1000) == pytest.approx(3.0)
    assert costs.compute_s(1000, context=1000) == pytest.approx(3.0 * 2.5 / 1.5), "attention grows with depth"
    costs.observe_load(1, 10_000, 0.01)
    assert costs.load_s(10, 1) == pytest.approx(0.01)
    assert costs.load_s(20, 1) == pytest.approx(0.02)
    assert costs.load_s(10, 2) is None
    now[0] = FRESH_S + 1
    assert costs.load_s(10, 1) is None, "too long ago to be believed"


def test_a_cache_says_what_it_has_measured_and_how_many_sequences_it_takes():
    with pk.KVCache(SPEC, pk.Blocks(20), max_sequences=7, prefill_tokens_per_s=1000.0) as cache:
        assert cache.max_sequences == 7
        assert cache.costs.compute_s(100) == pytest.approx(0.1, rel=0.01)


def test_the_error_of_what_is_too_large_has_its_numbers_and_can_be_pickled():
    error = pk.RequestTooLarge(7, 5, "blocks on the device", "ask for less")
    assert (error.asked, error.capacity) == (7, 5)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("numbers", "blocks"),
    [((1, 1, 1, 4), 1), ((4, 1, 1, 4), 1), ((4, 2, 1, 4), 2), ((9, 12, 1, 4), 5), ((9, 12, 1, 4, 3), 6),
     ((9, 12, 3, 4), 2 + 3 * (3 + 1)), ((3, 2, 2, 4), 2 * 2)],
    ids=repr,
)  # fmt: skip
def test_the_most_blocks_that_a_request_can_hold(numbers, blocks):
    assert blocks_at_most(*numbers) == blocks


class Names:
    """A hook that notes what began."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self, span: Any) -> None:
        self.names.append(span.name)

    def end(self, span: Any) -> None:
        """Nothing to note."""


def test_a_scheduler_over_a_cache_with_hooks_does_the_same(serve):
    server = serve(60)
    hook = Names()
    server.cache.hooks.add(hook)
    requests = [server.submit(prompt(i, 9), 5) for i in range(4)]
    server.run()
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]
    assert hook.names.count("sequence") == 4
    assert hook.names.count("step") == server.steps


def test_suspended_blocks_may_go_as_far_as_the_disk(serve, tmp_path):
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(200), admission="all")
    server = serve(12, host=4, watermark=0.0, cache_options={"disk": disk})
    requests = [server.submit(prompt(i, 4), 24) for i in range(4)]
    server.run()
    assert [request.outputs[0].tolist() for request in requests] == [greedy(request) for request in requests]
    assert server.cache.stats().moved_bytes.get("disk_to_device", 0) > 0


@pytest.mark.slow
@pytest.mark.checkout
def test_the_bench_runs_at_its_smallest_sizes():
    from bench.scheduler import plain, rows

    parts = {row["part"]: row for row in rows("full", 8, 60)}
    assert parts["schedule + report"]["median_us"] > 0
    assert parts["a request"]["finished"] > 0
    assert plain(8, 5)[0]["steps"] == 5
