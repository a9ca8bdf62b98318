"""Exceptions at every place of a step.

Nothing of that step is committed, nothing stays held, and the next request is right.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import pagedkv as pk
from examples.llama_numpy.beams import beam_search
from examples.llama_numpy.generation import generate
from examples.llama_numpy.model import Llama
from examples.llama_numpy.sampling import Sampling
from tests.realmodel.bed import Bed

Open = Callable[..., pk.KVCache]
POINTS = [
    (pk.KVCache, "sequence"), (pk.KVCache, "step"), (pk.Step, "__enter__"), (pk.Step, "write"), (pk.Step, "attend"),
    (pk.Sequence, "append"), (pk.Sequence, "fork"), (Llama, "forward"), (Sampling, "choose"),
]  # fmt: skip


class Abort(BaseException):
    """As a KeyboardInterrupt: no handler of errors expects it."""


class Fault:
    """Raises at the n-th call that a generation makes.

    It raises before or after the call is carried out.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.is_late = 10**9, False
        for owner, name in POINTS:
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            now = self.left == 0
            if now and not self.is_late:
                raise Abort
            result = real(*args, **kwargs)
            if now:
                raise Abort
            return result

        return call

    @contextlib.contextmanager
    def at(self, number: int, *, is_late: bool) -> Any:
        """Raise at this call within the block."""
        self.left, self.is_late = number, is_late
        try:
            yield
        finally:
            self.left = 10**9


def run_samples(bed: Bed, cache: pk.KVCache) -> None:
    prompts = [bed.so_far("code"), bed.so_far("mixed")[:30]]
    generate(bed.model, cache, prompts, samples=2, max_tokens=3, chunk=20, sampling=Sampling(temperature=1.0))


def run_beams(bed: Bed, cache: pk.KVCache) -> None:
    beam_search(bed.model, cache, bed.so_far("mixed")[:30], width=3, max_tokens=3, chunk=20)


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("run", [run_samples, run_beams])
def test_an_abort_at_any_call_leaves_a_sound_cache(
    tiny_beds: dict[int, Bed], opened: Open, monkeypatch: pytest.MonkeyPatch, run: Any, is_late: bool
) -> None:
    bed = tiny_beds[16]
    cache = opened(bed, 160, host=8)
    fault = Fault(monkeypatch)
    for number in itertools.count(1):
        aborted = False
        with fault.at(number, is_late=is_late):
            try:
                run(bed, cache)
            except Abort:
                aborted = True
        cache.check_integrity()
        stats = cache.stats()
        assert stats.sequences == 0
        assert all(counts["live"] == 0 for counts in stats.blocks.values())
        if number % 8 == 0 or not aborted:
            right = generate(bed.model, cache, [bed.so_far("mixed")], max_tokens=4).completions[0].tokens
            assert right == bed.goldens["mixed"].greedy[:4]
        if not aborted:
            break
        cache.purge(None)
    assert number > 30, "every call of a whole run was a place to stop"


class Broken(Exception):
    """What a printer raises whose reader left."""


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_printer_that_raises_commits_nothing_of_its_step(tiny_beds: dict[int, Bed], opened: Open, nth: int) -> None:
    bed = tiny_beds[16]
    cache = opened(bed, 160)
    prompt = bed.so_far("mixed")
    told: list[int] = []

    def printer(_prompt: int, _sample: int, token: int) -> None:
        told.append(token)
        if len(told) == nth:
            raise Broken

    with pytest.raises(Broken):
        generate(bed.model, cache, [prompt], max_tokens=8, on_token=printer)
    assert cache.stats().computed_tokens == (0 if nth == 1 else len(prompt) + nth - 2)
    assert cache.explain(prompt).cached_tokens == (0 if nth == 1 else bed.whole(len(prompt)))
    cache.check_integrity()
    again = generate(bed.model, cache, [prompt], max_tokens=8).completions[0].tokens
    assert again == bed.goldens["mixed"].greedy[:8]
    assert told == again[:nth]


def test_a_beam_printer_that_raises_commits_nothing_of_its_step(tiny_beds: dict[int, Bed], opened: Open) -> None:
    bed = tiny_beds[16]
    cache = opened(bed, 160)

    def printer(_beams: object) -> None:
        raise Broken

    with pytest.raises(Broken):
        beam_search(bed.model, cache, bed.so_far("mixed"), width=2, max_tokens=8, on_beams=printer)
    assert cache.stats().computed_tokens == 0
    cache.check_integrity()
