"""The cache tells hooks what it does, in nested spans.

Whatever a hook does, the cache ends as it would without it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache.step import Step
from pagedkv.core import MOVE_DTYPE
from pagedkv.observe.hooks import OFF, Hooks, Span

from .conftest import BLOCK, Toy, all_free, prompt


class Log:
    """Remembers spans: begins and ends in order, and how deep each was."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[tuple[str, dict[str, Any], BaseException | None]] = []
        self.depths: dict[int, int] = {}
        self.order: list[tuple[int, str]] = []

    def begin(self, span: Span) -> int:
        thread = threading.get_ident()
        assert span.thread_id == thread
        assert span.ended_ns == 0
        depth = self.depths[thread] = self.depths.get(thread, 0) + 1
        self.began.append(span.name)
        self.order.append((depth, span.name))
        return depth

    def end(self, span: Span, state: int) -> None:
        assert state == self.depths[threading.get_ident()]
        assert span.ended_ns >= span.began_ns > 0
        self.depths[threading.get_ident()] -= 1
        self.ended.append((span.name, dict(span.attributes), span.error))

    def last(self, name: str) -> dict[str, Any]:
        return next(attributes for ended, attributes, _ in reversed(self.ended) if ended == name)


class Failing:
    """Raises whenever it is told something."""

    def __init__(self, problem: BaseException, moments: str = "begin end") -> None:
        self.problem, self.moments, self.calls = problem, moments, 0

    def begin(self, span: Span) -> None:
        self.calls += 1
        if "begin" in self.moments:
            raise self.problem

    def end(self, span: Span, state: Any) -> None:
        self.calls += 1
        if "end" in self.moments:
            raise self.problem


def test_a_request_is_told_in_nested_spans(open_cache):
    toy, log = Toy(open_cache(8, host=8)), Log()
    toy.use(prompt(1))
    toy.use(prompt(2))
    toy.cache.hooks.add(log)
    toy.use(prompt(3))
    assert log.order == [
        (1, "sequence"), (2, "match"), (1, "request"),
        (1, "step"), (2, "allocate"), (3, "make_room"), (1, "moves"),  # by the dispatcher's thread
        (1, "release"),
    ]  # fmt: skip
    log.order.clear()
    toy.use(prompt(3))
    assert [name for _, name in log.order[:4]] == ["sequence", "match", "request", "step"], "nothing to promote"
    log.order.clear()
    toy.use(prompt(1))
    assert log.order[:3] == [(1, "sequence"), (2, "match"), (2, "promote")]
    assert not any(log.depths.values())
    assert all(error is None for _, _, error in log.ended)


def test_spans_say_what_was_asked_and_what_came_of_it(open_cache):
    toy, log = Toy(open_cache(4, host=8)), Log()
    toy.cache.hooks.add(log)
    toy.use(prompt(1))
    toy.use(prompt(2))
    assert log.last("make_room") == {"blocks": 4, "tier": "device"}
    assert log.last("moves") == {
        "direction": "demote", "blocks": 3, "bytes": 3 * toy.spec.block_bytes, "moved_blocks": 3,
    }  # fmt: skip
    toy.use(prompt(1))
    assert log.last("match") == {"tokens": 13, "blocks": 3, "cold_blocks": 3}
    assert log.last("promote") == {"blocks": 3}
    told = log.last("sequence")
    assert told.pop("row") >= 0
    assert told == {
        "tokens": 13, "hit_tokens_device": 0, "hit_tokens_host": 3 * BLOCK, "hit_tokens_partial": 0,
    }  # fmt: skip
    assert log.last("step") == {"sequences": 1, "tokens": 1}
    assert log.last("allocate") == {"sequences": 1, "lookahead": 0, "tokens": 1, "copied_blocks": 0}


def test_forks_copies_cuts_and_prefetches_are_told(open_cache):
    toy, log = Toy(open_cache()), Log()
    toy.cache.hooks.add(log)
    a = toy.cache.sequence(prompt(1, 6))
    toy.run(a)
    b, c = a.fork(2)
    for seq, token in ((a, 1), (b, 2), (c, 3)):
        seq.append(token)
    toy.run(a, b, c)
    assert log.last("fork") == {"row": a.row, "forks": 2}
    assert log.last("allocate")["copied_blocks"] >= 2
    c.truncate(5)
    assert log.last("truncate") == {"row": c.row, "tokens": 5}
    for seq in (a, b, c):
        seq.release()
    assert toy.cache.prefetch(prompt(1, 6)).wait(60) == BLOCK
    assert log.last("prefetch") == {"tokens": 6, "hit_tokens": BLOCK}
    toy.cache.purge(None)
    assert log.last("purge") == {"dropped_blocks": 1}


def test_moves_and_arrays_are_handed_over_as_they_are(open_cache):
    seen: dict[str, Any] = {}

    class Looking(Log):
        def end(self, span: Span, state: Any) -> None:
            super().end(span, state)
            seen[span.name] = span.subject

    toy = Toy(open_cache(4, host=8))
    toy.cache.hooks.add(Looking())
    toy.use(prompt(1))
    toy.use(prompt(2))
    assert seen["moves"].dtype == MOVE_DTYPE
    assert seen["moves"]["src_tier"].tolist() == [0, 0, 0]
    assert len(seen["allocate"].tokens) == 13
    assert seen["match"] is None
    assert isinstance(seen["request"], pk.Sequence)


def test_a_sequence_on_trial_is_a_request_once_it_is_kept(open_cache):
    toy, log = Toy(open_cache()), Log()
    toy.cache.hooks.add(log)
    with toy.cache.sequence(prompt(1), on_trial=True):
        assert "request" not in log.began
    with toy.cache.sequence(prompt(1), on_trial=True) as seq:
        toy.cache.count(seq)
        assert log.began.count("request") == 1
        assert log.last("request") == {"row": seq.row, "tokens": 13}


def test_what_raised_is_told_and_still_raises(open_cache):
    toy, log = Toy(open_cache(4)), Log()
    toy.cache.hooks.add(log)
    seq = toy.cache.sequence(prompt(1))
    with pytest.raises(ZeroDivisionError), toy.cache.step([seq]):
        raise ZeroDivisionError
    toy.run(seq)
    other = toy.cache.sequence(prompt(2))
    with pytest.raises(pk.OutOfBlocks):
        toy.run(other)
    errors = [(name, type(error)) for name, _, error in log.ended if error is not None]
    assert errors == [
        ("step", ZeroDivisionError),
        ("make_room", pk.OutOfBlocks), ("allocate", pk.OutOfBlocks), ("step", pk.OutOfBlocks),
    ]  # fmt: skip
    assert not any(log.depths.values())


@pytest.mark.parametrize("moments", ["begin", "end", "begin end"])
def test_a_hook_that_raises_changes_nothing_and_is_logged_once(open_cache, caplog, moments):
    quiet, loud = (Toy(open_cache(8, host=4)) for _ in range(2))
    hook = Failing(RuntimeError("a caller's hook failed"), moments)
    loud.cache.hooks.add(hook)
    log = Log()
    loud.cache.hooks.add(log)
    with caplog.at_level(logging.WARNING, "pagedkv"):
        for start in (1, 2, 3, 4, 1, 2):
            assert quiet.use(prompt(start)) == loud.use(prompt(start))
    assert hook.calls > 20
    assert log.began
    assert not any(log.depths.values())
    assert [record.name for record in caplog.records] == ["pagedkv.hooks"]
    assert "Failing" in caplog.text
    assert "a caller's hook failed" in caplog.text
    assert loud.cache.stats().hook_failures > 20
    assert quiet.cache.stats().placement == loud.cache.stats().placement


@pytest.mark.parametrize("moment", ["begin", "end"])
@pytest.mark.parametrize("name", ["sequence", "match", "promote", "make_room", "moves", "step", "allocate", "release"])
def test_an_interrupt_inside_a_hook_comes_through_and_the_books_agree(open_cache, moment, name):
    class Interrupting(Log):
        armed = True

        def interrupt(self, span: Span, when: str) -> None:
            if self.armed and when == moment and span.name == name:
                self.armed = False
                raise KeyboardInterrupt

        def begin(self, span: Span) -> Any:
            self.interrupt(span, "begin")

        def end(self, span: Span, state: Any) -> None:
            self.interrupt(span, "end")

    toy = Toy(open_cache(4, host=8))
    toy.use(prompt(1))
    toy.use(prompt(2))
    toy.cache.hooks.add(Interrupting())

    def use_all() -> None:
        for start in (1, 2, 1):
            toy.use(prompt(start))

    with pytest.raises(KeyboardInterrupt):
        use_all()
    toy.cache.check_integrity()
    assert all_free(toy.cache)
    use_all()
    assert toy.cache.stats().placement["in_flight"] == 0


@pytest.mark.parametrize("moment", ["begin", "end"])
def test_without_memory_for_hooks_of_moves_no_later_call_fails(open_cache, moment):
    """The dispatcher's thread had none; a caller that only waits for moves did nothing wrong."""

    class Hungry(Log):
        def starve(self, span: Span, when: str) -> None:
            if span.name == "moves" and when == moment:
                raise MemoryError("the hook's")

        def begin(self, span: Span) -> Any:
            self.starve(span, "begin")

        def end(self, span: Span, state: Any) -> None:
            self.starve(span, "end")

    toy = Toy(open_cache(4, host=8))
    toy.cache.hooks.add(Hungry())
    for start in (1, 2, 1, 2):
        toy.use(prompt(start))
    toy.cache.flush()
    assert toy.cache.hooks.failures >= 3
    assert toy.cache.stats().placement["in_flight"] == 0
    toy.cache.check_integrity()


def test_callers_go_on_once_the_hooks_of_their_moves_have_returned(open_cache):
    class Slow:
        went_on, told, early = threading.Event(), threading.Event(), False

        def begin(self, span: Span) -> None:
            pass

        def end(self, span: Span, state: Any) -> None:
            if span.attributes.get("direction") == "promote":
                self.early = self.went_on.wait(0.3)
                self.told.set()

    toy, slow = Toy(open_cache(4, host=8)), Slow()
    for start in (1, 2):
        toy.use(prompt(start))
    toy.cache.hooks.add(slow)
    toy.cache.sequence(prompt(1)).release()
    slow.went_on.set()
    assert slow.told.wait(60)
    assert not slow.early


def test_a_full_tier_met_by_a_hook_is_the_hooks_own_trouble(open_cache):
    """OutOfBlocks is a MemoryError, but the process has memory left.

    The cache counts it like any other Exception of a hook.
    """
    toy = Toy(open_cache(4))
    toy.cache.hooks.add(Failing(pk.OutOfBlocks(9, 0, 0, 4)))
    toy.use(prompt(1))
    assert toy.cache.hooks.failures > 0
    assert toy.cache.stats().hook_failures == toy.cache.hooks.failures


def test_no_end_is_told_twice_where_the_begin_was_interrupted():
    """As the dispatcher does: it ends a span whose begin was cut off between two hooks."""

    class Cut(tuple[Any, ...]):
        def __iter__(self) -> Any:
            yield self[0]
            raise MemoryError("between two hooks")

    log, hooks = Log(), Hooks()
    hooks.all = Cut((log,))
    span = hooks.span("moves")
    with pytest.raises(MemoryError):
        span.__enter__()
    span.__exit__(None, None, None)
    assert (len(log.ended), hooks.failures) == (1, 0)


def test_a_hook_may_ask_the_cache_and_even_use_it(open_cache):
    toy = Toy(open_cache(8, host=8))

    class Curious:
        depth = 0

        def begin(self, span: Span) -> None:
            toy.cache.stats()
            toy.cache.explain(prompt(1))

        def end(self, span: Span, state: Any) -> None:
            if not self.depth and span.name == "release":
                self.depth = 1
                toy.use(prompt(9))
                self.depth = 0

    toy.cache.hooks.add(Curious())
    for start in (1, 2, 3, 1):
        toy.use(prompt(start))


def test_hooks_are_told_in_the_order_they_were_added_and_of_ends_in_the_reverse():
    told: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self, span: Span) -> str:
            told.append(f"begin {self.name}")
            return self.name

        def end(self, span: Span, state: str) -> None:
            assert state == self.name
            told.append(f"end {self.name}")

    hooks, a, b = Hooks(), Named("a"), Named("b")
    hooks.add(a)
    hooks.add(b)
    with hooks.span("x"):
        hooks.remove(a)  # is still told the end of what it was told the begin of
    with hooks.span("y"):
        pass
    assert told == ["begin a", "begin b", "end b", "end a", "begin b", "end b"]


def test_what_is_no_hook_is_refused(open_cache):
    hooks = open_cache().hooks
    with pytest.raises(pk.WrongType, match="a hook has methods begin"):
        hooks.add(lambda span: None)  # type: ignore[arg-type]
    log = Log()
    hooks.add(log)
    with pytest.raises(pk.InvalidArgument, match="added before"):
        hooks.add(log)
    hooks.remove(log)
    with pytest.raises(pk.InvalidArgument, match="not one of those added"):
        hooks.remove(log)
    assert not hooks


def test_without_hooks_a_step_is_a_plain_step_and_no_span_is_made(open_cache):
    toy = Toy(open_cache())
    assert toy.cache.hooks.span("anything", tokens=3) is OFF
    with toy.cache.sequence(prompt(1)) as seq:
        assert type(toy.cache.step([seq])) is Step
        log = Log()
        toy.cache.hooks.add(log)
        assert type(toy.cache.step([seq])) is not Step
        toy.cache.hooks.remove(log)
        assert type(toy.cache.step([seq])) is Step
    assert not log.began


def test_a_step_entered_twice_is_refused_and_its_span_ends_once(open_cache):
    toy, log = Toy(open_cache()), Log()
    toy.cache.hooks.add(log)
    with toy.cache.sequence(prompt(1)) as seq, toy.cache.step([seq]) as step:
        with pytest.raises(pk.InvalidArgument, match="under way already"):
            step.__enter__()
        toy.write(step, seq)
    assert [name for name, _, _ in log.ended].count("step") == 1
    assert not any(log.depths.values())


def test_a_hook_added_in_the_middle_of_a_step_is_told_no_end_without_a_begin(open_cache):
    toy, log = Toy(open_cache()), Log()
    with toy.cache.sequence(prompt(1)) as seq:
        with toy.cache.step([seq]) as step:
            toy.cache.hooks.add(log)
            toy.write(step, seq)
        assert not log.ended
    assert log.began == ["release"]


def test_a_sequence_that_is_collected_tells_nobody(open_cache):
    toy, log = Toy(open_cache()), Log()
    seq = toy.cache.sequence(prompt(1))
    toy.run(seq)
    toy.cache.hooks.add(log)
    del seq
    assert log.began == []
    assert all_free(toy.cache)


def test_threads_are_told_apart(open_cache):
    toy, log = Toy(open_cache(64, host=64)), Log()
    toy.cache.hooks.add(log)
    threads = [threading.Thread(target=lambda i=i: [toy.use(prompt(10 * i + j)) for j in range(5)]) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.began.count("step") == 15
    assert not any(log.depths.values())
    assert np.all([error is None for _, _, error in log.ended])
