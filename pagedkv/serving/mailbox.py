"""One request between the thread that steps and the event loop that waits for its tokens.

The thread fills, the loop reads. What is handed over is handed over by ``call_soon_threadsafe``, once for a step and a
loop, so neither side takes a lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pagedkv.errors import SlowReader
from pagedkv.scheduler import Branch, Request
from pagedkv.scheduler.request import Tokens


class Chunk(NamedTuple):
    """Tokens of one sample of a request, as they come.

    Attributes
    ----------
    sample : int
        Which of the samples, 0..n-1, or of the beams.
    tokens : list of int
        New ones; none where it ended without one more.
    finish_reason : ``"stop"``, ``"length"``, ``"aborted"``, ``"deadline"`` or None
        Set in the last chunk of each sample.
    """

    sample: int
    tokens: list[int]
    finish_reason: str | None


class Mailbox:
    """What a request's stream has not read yet.

    Parameters
    ----------
    loop : the event loop that reads.
    max_unread : tokens that may lie here.
    give_up : called on the loop, with the reason, when there are more.

    Attributes
    ----------
    request : Request or None
        Set by the thread when the request is queued.
    abandoned : whether the reader is gone.
    over : whether nothing more will come.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_unread: int, give_up: Callable[[Mailbox, Exception], None]
    ) -> None:
        self.loop, self._max_unread, self._give_up = loop, max_unread, give_up
        self.request: Request | None = None
        self.abandoned = self.over = False
        self.problem: BaseException | None = None
        self._chunks: deque[Chunk] = deque()
        self._unread = 0
        self._reader: asyncio.Future[None] | None = None
        self._samples: dict[Branch, int] = {}  # the thread's: samples in the order in which they came
        self._ended: set[int] = set()

    # ---- in the thread

    def chunk_of(self, branch: Branch, tokens: Tokens) -> Chunk:
        """New tokens of a branch."""
        sample = self._samples.setdefault(branch, len(self._samples))
        reason = branch.finish_reason
        if reason is not None:
            self._ended.add(sample)
        return Chunk(sample, tokens.tolist(), reason)

    def last_chunks(self, request: Request) -> list[Chunk]:
        """What is left to say of a request that has ended: beams, and the ends of samples."""
        if request.beams > 1:
            beams = enumerate(request.branches)
            return [Chunk(i, one.output.tolist(), one.finish_reason or request.finish_reason) for i, one in beams]
        reason = request.finish_reason
        return [Chunk(sample, [], reason) for sample in range(request.n) if sample not in self._ended]

    # ---- in the loop

    def receive(self, chunks: list[Chunk], over: bool, problem: BaseException | None) -> None:
        """Take what the thread hands over."""
        if self.over or self.abandoned:
            self.over = self.over or over
            return
        self._chunks += chunks
        self._unread += sum(len(chunk.tokens) for chunk in chunks)
        if over:
            self.over, self.problem = True, problem
        elif self._unread > self._max_unread:
            self.over, self.problem = True, SlowReader(self._unread, self._max_unread)
            self._chunks.clear()
            self._give_up(self, self.problem)
        self._wake()

    async def next(self) -> Chunk | None:
        """The next chunk; None at the end.

        Raises
        ------
        StepFailed, SlowReader, ClosedError
            There will be no more.
        """
        while not self._chunks:
            if self.over or self.abandoned:
                if self.problem is not None:
                    problem, self.problem = self.problem, None
                    raise problem
                return None
            self._reader = self.loop.create_future()
            await self._reader
        chunk = self._chunks.popleft()
        self._unread -= len(chunk.tokens)
        return chunk

    def abandon(self) -> None:
        """Nothing more is read; what lies here is dropped."""
        self.abandoned = True
        self._chunks.clear()
        self.problem = None
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
