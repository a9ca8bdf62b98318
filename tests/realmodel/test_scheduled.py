"""The scheduler serves on a device that is too small for all requests.

A request that was suspended goes on with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pagedkv as pk
from examples.llama_numpy.errors import NumericsError, PromptError
from examples.llama_numpy.generation import generate
from examples.llama_numpy.model import Llama
from examples.llama_numpy.sampling import Sampling
from examples.llama_numpy.serving import serve, steps, submit
from examples.llama_numpy.weights import Floats
from pagedkv.scheduler import Branch, Request
from tests.realmodel import tiny
from tests.realmodel.bed import Bed

Open = Callable[..., pk.KVCache]
CASES = [("tiny_beds", 1, 12), ("tiny_beds", 1, 100), ("tiny_beds", 8, 12), ("tiny_beds", 8, 100)]


@pytest.mark.parametrize("host", [True, False], ids=["swapped", "recomputed"])
@pytest.mark.parametrize(
    ("beds", "size", "budget"),
    [*CASES, pytest.param("smollm2_bed", 16, 30, marks=[pytest.mark.realmodel, pytest.mark.slow])],
)
def test_suspended_requests_go_on_with_the_same_tokens(
    request: pytest.FixtureRequest, opened: Open, host: bool, beds: str, size: int, budget: int
) -> None:
    """Every logit equals the golden one, in steps that mix prompt chunks with decoding."""
    found = request.getfixturevalue(beds)
    bed: Bed = found[size] if isinstance(found, dict) else found
    names = ("single", "france", "code")  # short prompts and long continuations: all begin, and not all can end
    lengths = {name: (len(bed.goldens[name].ids), len(bed.goldens[name].greedy)) for name in names}
    room = max(bed.blocks(ids + greedy) for ids, greedy in lengths.values()) * bed.block_size
    cache = opened(bed, room, **({"host": bed.blocks(4 * room)} if host else {}))
    options = pk.SchedulerOptions(max_running=len(names), max_batch_tokens=budget, watermark=0.0)
    scheduler = pk.Scheduler(cache, options)
    requests = {scheduler.submit(bed.so_far(name), lengths[name][1]): name for name in names}
    suspended = 0

    def follow(branch: Branch, row: Floats) -> int:
        name, place = requests[branch.request], branch.num_output
        bed.check(name, place, row)
        return bed.goldens[name].greedy[place]

    for _ in steps(bed.model, scheduler, follow):
        suspended += scheduler.stats().suspended
        scheduler.check_integrity()
    assert suspended
    for served, name in requests.items():
        assert served.outputs[0].tolist() == bed.goldens[name].greedy


@pytest.mark.parametrize("size", [1, 16])
def test_every_answer_is_the_one_that_its_prompt_gets_alone(tiny_beds: dict[int, Bed], opened: Open, size: int) -> None:
    """Answers drawn with a temperature, on a device too small for all of them.

    The caller is told of each once, when it is finished.
    """
    bed, sampling = tiny_beds[size], Sampling(temperature=0.9, top_k=40, seed=6)
    prompts = [bed.so_far(name) for name in ("code", "single", "mixed", "france", "code")]
    alone = [
        generate(bed.model, opened(bed, 128), [prompt], max_tokens=14, sampling=sampling).completions[0].tokens
        for prompt in prompts
    ]
    scheduler = pk.Scheduler(opened(bed, 96, host=bed.blocks(256)), pk.SchedulerOptions(4, 24, watermark=0.0))
    requests = [submit(bed.model, scheduler, prompt, max_tokens=14) for prompt in prompts]
    told: list[Request] = []
    served = serve(bed.model, scheduler, requests, sampling=sampling, on_answer=told.append)
    assert [request.outputs[0].tolist() for request in requests] == alone
    assert sorted(request.id for request in told) == list(range(5))
    assert all(request.state == "finished" for request in told)
    assert served.new_tokens == 5 * 14
    assert served.swapped + served.recomputed == sum(request.num_preemptions for request in requests) > 0
    assert served.hit_tokens["device"] + served.hit_tokens["host"] + served.hit_tokens["partial"] >= bed.whole(12)


def test_a_request_ends_where_the_models_context_does(tiny_beds: dict[int, Bed], opened: Open) -> None:
    bed = tiny_beds[16]
    scheduler = pk.Scheduler(opened(bed, tiny.CONTEXT), pk.SchedulerOptions(2, 512))
    long = submit(bed.model, scheduler, [5] * (tiny.CONTEXT - 2), max_tokens=50)
    serve(bed.model, scheduler, [long])
    assert len(long.outputs[0]) == 2
    with pytest.raises(PromptError, match="context"):
        submit(bed.model, scheduler, [5] * tiny.CONTEXT, max_tokens=1)
    assert not scheduler.has_work


@pytest.mark.parametrize("fail_at", [1, 2, 5, 17])
def test_a_step_that_raises_commits_nothing_and_its_requests_go_on(
    tiny_beds: dict[int, Bed], opened: Open, fail_at: int
) -> None:
    bed = tiny_beds[8]
    cache = opened(bed, 96)
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(3, 24))
    requests = {submit(bed.model, scheduler, bed.so_far(name), max_tokens=16): name for name in ("code", "mixed")}
    left = fail_at

    def choose(branch: Branch, row: Floats) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        name, place = requests[branch.request], branch.num_output
        bed.check(name, place, row)
        return bed.goldens[name].greedy[place]

    with pytest.raises(KeyboardInterrupt):
        list(steps(bed.model, scheduler, choose))
    scheduler.check_integrity()
    for _ in steps(bed.model, scheduler, choose):
        scheduler.check_integrity()
    assert [request.outputs[0].tolist() for request in requests] == [
        bed.goldens[name].greedy for name in requests.values()
    ]


def test_a_printer_that_raises_ends_all_requests_and_releases_everything(
    tiny_beds: dict[int, Bed], opened: Open
) -> None:
    bed = tiny_beds[16]
    scheduler = pk.Scheduler(opened(bed, 256), pk.SchedulerOptions(3, 24))
    requests = [submit(bed.model, scheduler, bed.so_far("code"), max_tokens=count) for count in (3, 9, 12)]

    def broken(request: Request) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        serve(bed.model, scheduler, requests, on_answer=broken)
    assert [request.state for request in requests] == ["finished", "aborted", "aborted"]
    assert not scheduler.has_work


def test_logits_that_are_no_numbers_end_the_serving_and_release_everything(
    tiny_beds: dict[int, Bed], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = tiny_beds[16]
    scheduler = pk.Scheduler(opened(bed, 256), pk.SchedulerOptions(3, 24))
    request = submit(bed.model, scheduler, bed.so_far("code"), max_tokens=3)
    real = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda *args: real(*args) * np.float32("nan"))
    with pytest.raises(NumericsError):
        serve(bed.model, scheduler, [request])
    assert request.state == "aborted"
