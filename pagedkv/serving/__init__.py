"""A scheduler under asyncio: one thread steps, and tokens stream to tasks.

::

    async with AsyncScheduler(scheduler, compute) as serving:
        stream = await serving.submit(prompt, max_new_tokens=100)
        async for chunk in stream:
            print(chunk.sample, chunk.tokens, chunk.finish_reason)
"""

from pagedkv.serving.async_scheduler import AsyncScheduler
from pagedkv.serving.stream import Chunk, Stream

__all__ = ["AsyncScheduler", "Chunk", "Stream"]
