"""What a caller names a request by comes back in the spans of its work.

Of its own spans, and of the steps that it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.observe.hooks import Span

from .conftest import SPEC, prompt


class Spans:
    """Remembers the traces of each span as it began."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    def begin(self, span: Span) -> None:
        self.told.append((span.name, span.traces))

    def end(self, span: Span, state: Any) -> None:
        pass

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [traces for told, traces in self.told if told == name]


@contextmanager
def listening(cache: pk.KVCache) -> Iterator[Spans]:
    spans = Spans()
    cache.hooks.add(spans)
    yield spans
    cache.hooks.remove(spans)


def test_spans_of_a_request_carry_its_trace_and_a_step_those_of_all_in_it(serve):
    server = serve(max_batch_tokens=64)
    with listening(server.cache) as spans:
        server.submit(prompt(1), 3, trace="a")
        server.submit(prompt(2), 3, trace={"unhashable": "b"})
        server.submit(prompt(3), 3)
        server.run()
    named = ("a",), ({"unhashable": "b"},), ()
    assert spans.of("sequence") == spans.of("match") == list(named)
    assert sorted(map(str, spans.of("release"))) == sorted(map(str, named))
    assert spans.of("step") == spans.of("allocate") == [("a", {"unhashable": "b"})] * 3


def test_branches_of_a_request_name_it_once(serve):
    server, trace = serve(100, max_batch_tokens=64), object()
    with listening(server.cache) as spans:
        server.submit(prompt(1, 14), 3, n=3, trace=trace)
        server.run()
    assert {name for name, _ in spans.told} >= {"fork", "step", "release"}
    assert all(traces == (trace,) for _, traces in spans.told)


@pytest.mark.parametrize("share", [0.0, 0.25], ids=["waits", "beside"])
def test_a_request_that_comes_back_and_the_moves_that_it_asks_for_carry_its_trace(serve, share):
    server = serve(12, host=60, watermark=0.0, loading_share=share)
    with listening(server.cache) as spans:
        first, second = server.submit(prompt(1, 9), 40, trace="first"), server.submit(prompt(2, 13), 20, trace="second")
        server.run()
    assert first.num_preemptions + second.num_preemptions
    assert spans.of("sequence").count(("second",)) == 1 + second.num_preemptions
    assert spans.of("promote") or share, "no caller waits for a load beside others"
    assert set(spans.of("promote")) <= {("first",), ("second",)}
    known = {("first",), ("second",), ("first", "second"), ("second", "first")}
    assert spans.of("moves")
    assert set(spans.of("moves")) <= known, "the dispatcher's thread tells of whom it moves for"


def test_what_the_body_of_a_step_does_of_its_own_is_not_for_the_step(serve):
    server = serve()
    with listening(server.cache) as spans:
        server.submit(prompt(1), 2, trace="a")
        plan = server.scheduler.schedule()
        with server.scheduler.step(plan) as step:
            server.cache.sequence(prompt(9), trace="other").release()
            server.cache.sequence(prompt(9)).release()
            server.write(plan, step)
        server.scheduler.report(plan, [3])
    assert spans.of("sequence") == [("a",), ("other",), ()]
    assert spans.of("step") == [("a",)]


def test_a_sequence_of_ones_own_carries_a_trace_too():
    with (
        pk.KVCache(SPEC, pk.Blocks(8)) as cache,
        listening(cache) as spans,
        cache.sequence(prompt(1), trace="mine") as seq,
    ):
        rest = np.zeros((1, 10, 1, 2), np.float32)
        seq.scatter(rest, rest)
        (fork,) = seq.fork()
        assert fork.trace == seq.trace == "mine"
        fork.truncate(3)
        fork.release()
        seq.release()
    names = {"sequence", "match", "request", "step", "allocate", "fork", "truncate", "release"}
    assert {name for name, _ in spans.told} == names
    assert all(traces == ("mine",) for _, traces in spans.told)


@pytest.mark.parametrize("fails", [True, False])
def test_a_trace_ends_with_its_work(serve, fails):
    server = serve()
    with listening(server.cache) as spans:
        server.submit(prompt(1), 1, trace="a")
        plan = server.scheduler.schedule()
        if fails:
            with pytest.raises(ValueError, match="body"):
                server.compute(plan, ValueError("body"))
        else:
            server.compute(plan)
        server.cache.purge(None)
    assert spans.told[-1] == ("purge", ())
