"""The tokens of one request as an async iterator. Who stops reading aborts the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from pagedkv.errors import InvalidArgument
from pagedkv.scheduler import Request
from pagedkv.scheduler.request import AbortReason, abort_reason
from pagedkv.serving.mailbox import Chunk, Mailbox

__all__ = ["Chunk", "Stream"]


class Stream:
    """Chunks of a request as they are generated. Made by :meth:`AsyncScheduler.submit`.

    A request whose reader goes away is aborted: when the task that waits for the next chunk is cancelled, at
    :meth:`aclose` and at the end of an ``async with`` block before the last chunk, and when the stream is dropped.

    Attributes
    ----------
    request : Request
        What it is about, to be looked at: `hit_tokens`, times, `finish_reason`. The thread that steps changes it; its
        branches and outputs are whole when the stream is over.
    """

    def __init__(self, box: Mailbox, abort: Callable[[Mailbox, AbortReason], None]) -> None:
        assert box.request is not None
        self._box, self._abort = box, abort
        self._reading = False
        self.request: Request = box.request

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises
        ------
        StepFailed
            The step that computed it raised. The request is aborted; others go on.
        SlowReader
            More tokens lay unread than `max_unread`. The request is aborted.
        ClosedError
            The thread that steps has ended.
        InvalidArgument
            Another task reads this stream.
        """
        if self._reading:
            raise InvalidArgument("another task waits for the next chunk of this stream: read it from one task")
        self._reading = True
        try:
            chunk = await self._box.next()
        except asyncio.CancelledError:
            self._give_up()
            raise
        finally:
            self._reading = False
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def whole(self) -> list[Chunk]:
        """Wait for the end: one chunk with all tokens of each sample, in their order.

        Raises
        ------
        StepFailed, SlowReader, ClosedError
            As for each chunk.
        """
        tokens: dict[int, list[int]] = {}
        reasons: dict[int, str | None] = {}
        async for sample, new, reason in self:
            tokens.setdefault(sample, []).extend(new)
            reasons[sample] = reason
        return [Chunk(sample, tokens[sample], reasons[sample]) for sample in sorted(tokens)]

    async def aclose(self, *, reason: AbortReason = "aborted") -> None:
        """Abort the request, unless it is over. Again is fine.

        Parameters
        ----------
        reason : ``"aborted"`` or ``"stop"``
            As :meth:`Scheduler.abort`: ``"stop"`` where the reader has found the end of the output, as at a stop text.

        Raises
        ------
        WrongType, InvalidArgument
        """
        self._give_up(abort_reason(reason))

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_up()

    def _give_up(self, reason: AbortReason = "aborted") -> None:
        if not (self._box.over or self._box.abandoned):
            self._abort(self._box, reason)
        self._box.abandon()

    def __del__(self) -> None:
        box = getattr(self, "_box", None)
        if box is not None and not (box.over or box.abandoned):
            box.abandoned = True
            self._abort(box, "aborted")
