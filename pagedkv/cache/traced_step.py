"""A step whose hooks are told: one span from its begin to its commit.

Steps without hooks are plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from numpy.typing import ArrayLike

from pagedkv.cache.engine import Engine
from pagedkv.cache.sequence import Batch, Sequence
from pagedkv.cache.step import Step
from pagedkv.observe.hooks import Off, OnBehalfOf, Running


class TracedStep(Step):
    """A Step that is a span. Made by :meth:`KVCache.step` where the cache has hooks."""

    def __init__(self, engine: Engine, seqs: Seq[Sequence] | Batch, q_lens: ArrayLike | None, lookahead: int) -> None:
        super().__init__(engine, seqs, q_lens, lookahead)
        self._traces = OnBehalfOf(seq.trace for seq in self._seqs)
        self._span: Running | Off | None = None

    def __enter__(self) -> Step:
        with self._traces:  # not beyond: calls of the body's own are not for these requests
            return self._entered()

    def _entered(self) -> Step:
        if self._span is not None:
            return super().__enter__()  # refuses
        span = self._engine.hooks.span("step", sequences=len(self._seqs))
        try:
            span.__enter__()
            super().__enter__()
            span.set(tokens=len(self.arrays.tokens))
            self._span = span
        except BaseException as error:
            if self._arrays is not None:
                self._cancel()
            span.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._traces:
            self._left(kind, *rest)

    def _left(self, kind: type[BaseException] | None, *rest: object) -> None:
        span = self._span
        error = rest[0] if rest and isinstance(rest[0], BaseException) else None
        try:
            super().__exit__(kind, *rest)
        except BaseException as problem:
            error = problem
            raise
        finally:
            self._span = None
            if span is not None:
                span.__exit__(type(error) if error else None, error, None)
