"""Users who come together with one new prompt get the tokens that each of them gets alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pagedkv as pk
from examples.llama_numpy.serving import steps
from examples.llama_numpy.weights import Floats
from pagedkv.scheduler import Branch, Request
from tests.realmodel.bed import COLD_TOLERANCE, Bed

Open = Callable[..., pk.KVCache]
NEW, USERS = 4, 20


def found(request: pytest.FixtureRequest, beds: str, size: int) -> Bed:
    value = request.getfixturevalue(beds)
    bed: Bed = value[size] if isinstance(value, dict) else value
    return bed


def alone(bed: Bed, opened: Open, prompt: list[int]) -> tuple[list[int], list[Floats]]:
    """Greedy tokens of a prompt in a cache of its own, and the logits that gave each."""
    cache = opened(bed, len(prompt) + NEW + bed.block_size)
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=1, max_batch_tokens=256, share="never"))
    served, logits = scheduler.submit(prompt, NEW), list[Floats]()

    def best(_: Branch, row: Floats) -> int:
        logits.append(row)
        return int(np.argmax(row))

    for _ in steps(bed.model, scheduler, best):
        pass
    return served.outputs[0].tolist(), logits


@pytest.mark.parametrize("share", ["step", "next"])
@pytest.mark.parametrize("budget", [64, 4096])
@pytest.mark.parametrize(
    ("beds", "size"),
    [
        ("tiny_beds", 1),
        ("tiny_beds", 8),
        pytest.param("smollm2_bed", 16, marks=[pytest.mark.realmodel, pytest.mark.slow]),
    ],
)
def test_a_herd_of_users_gets_the_tokens_of_each_alone(
    request: pytest.FixtureRequest, opened: Open, beds: str, size: int, budget: int, share: str
) -> None:
    bed = found(request, beds, size)
    common = bed.so_far("shared_a")
    prompts = [[*common, *bed.so_far("single")[:1], 10 + user] for user in range(USERS)]
    wanted = [alone(bed, opened, prompt) for prompt in prompts]
    cache = opened(bed, len(common) + USERS * (NEW + 2 + 2 * bed.block_size))  # one prompt, and a tail for each
    options = pk.SchedulerOptions(max_running=USERS, max_batch_tokens=budget, share=share, watermark=0.0)
    scheduler = pk.Scheduler(cache, options)
    requests: dict[Request, int] = {scheduler.submit(prompt, NEW): user for user, prompt in enumerate(prompts)}

    def choose(branch: Branch, row: Floats) -> int:
        tokens, logits = wanted[requests[branch.request]]
        place = branch.num_output
        np.testing.assert_allclose(row, logits[place], rtol=0, atol=COLD_TOLERANCE)
        first, second = np.sort(row)[[-1, -2]]
        assert int(np.argmax(row)) == tokens[place] or first - second < 2 * COLD_TOLERANCE
        return tokens[place]

    for _ in steps(bed.model, scheduler, choose):
        scheduler.check_integrity()
    for served, user in requests.items():
        assert served.outputs[0].tolist() == wanted[user][0]
    own = len(prompts[0]) - bed.whole(len(common))
    assert cache.stats().computed_tokens <= len(prompts[0]) + (USERS - 1) * own + USERS * NEW
    assert all(served.num_preemptions == 0 for served in requests)


@pytest.mark.parametrize(
    ("beds", "size"),
    [
        ("tiny_beds", 1),
        ("tiny_beds", 8),
        pytest.param("smollm2_bed", 16, marks=[pytest.mark.realmodel, pytest.mark.slow]),
    ],
)
def test_all_golden_prompts_three_times_at_once(
    request: pytest.FixtureRequest, opened: Open, beds: str, size: int
) -> None:
    """Every logit equals the golden one, in steps in which most prompts follow others."""
    bed = found(request, beds, size)
    lengths = {name: len(golden.ids) + NEW for name, golden in bed.goldens.items()}
    cache = opened(bed, sum(3 * length for length in lengths.values()) + 3 * len(lengths) * bed.block_size)
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=3 * len(lengths), max_batch_tokens=8192))
    requests = {scheduler.submit(bed.so_far(name), NEW): name for _ in range(3) for name in lengths}

    def follow(branch: Branch, row: Floats) -> int:
        name, place = requests[branch.request], branch.num_output
        bed.check(name, place, row)
        return bed.goldens[name].greedy[place]

    for _ in steps(bed.model, scheduler, follow):
        scheduler.check_integrity()
    assert scheduler.stats().shared_tokens >= 2 * sum(bed.whole(length - NEW - 1) for length in lengths.values())
