"""The routes: completions, their tokens, chats, models, health, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import pagedkv as pk
from examples.server.asks import Ask, Refused, namespace_of, read
from examples.server.engine import Engine, Job
from examples.server.replies import Reply
from pagedkv.observe.metrics import CacheCollector
from pagedkv.serving import AsyncScheduler, Stream

log = logging.getLogger("examples.server")

LONG_BYTES = 1 << 14  # of a body: longer ones are read one at a time, so that they hold up each other and no short one
GONE = 499  # the client closed the connection; the status is for the log alone
WORDS = {"aborted": "the server is stopping", "deadline": "the request took longer than the server allows"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows a request.

    Attributes
    ----------
    body_bytes : of a body; a longer one is read to its end, up to `drain_bytes`, and refused.
    body_s : seconds until all of it must have come.
    header_s : seconds until the header of a request must have come, from the beginning of its connection or the end of
        the last answer over it.
    connections : at once; requests on more of them are refused.
    request_s : seconds until the request is given up.
    chat_tokens : of an answer in a chat where the client does not say.
    stop_s : seconds for the requests that run when the server is stopped.
    """

    body_bytes: int = 1 << 20
    drain_bytes: int = 64 << 20
    body_s: float = 30.0
    header_s: float = 30.0
    connections: int = 512
    request_s: float = 600.0
    chat_tokens: int = 256
    stop_s: float = 20.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("stop_s", "body_bytes", "drain_bytes") else 1 if isinstance(value, int) else 1e-3
            if not least <= value < float("inf"):
                raise pk.InvalidArgument(f"{name} = {value}: a number of at least {least:g} is needed")


class Server:
    """Answers requests from a model.

    Parameters
    ----------
    engine : the model.
    serving : AsyncScheduler over a cache of its KVSpec; the app starts and stops it.
    limits : Limits
    when_over : called in a thread when the requests have ended, at the end of the app: to close the cache.
    """

    def __init__(
        self,
        engine: Engine,
        serving: AsyncScheduler,
        limits: Limits | None = None,
        when_over: Callable[[], object] = lambda: None,
    ) -> None:
        self.engine, self.serving, self.limits = engine, serving, limits or Limits()
        self._when_over, self._numbers, self._shared_told = when_over, itertools.count(1), False
        self._long = ThreadPoolExecutor(1, "examples-server-long")
        import prometheus_client

        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(CacheCollector(**{engine.name.replace("-", "_"): serving.scheduler}))
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/completions/render", self.render, methods=["POST"]),
                Route("/v1/chat/completions", self.chats, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ],
            lifespan=self._life,
            exception_handlers={404: _no_route, 405: _no_route, 500: _broken},
        )

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self.serving.start()
        try:
            yield
        finally:
            await self.serving.stop(abort_after_s=self.limits.stop_s)
            self._long.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self._when_over)

    # ---- routes

    async def completions(self, request: Request) -> Response:
        """A prompt goes on."""
        return await self._answer(request, "completions")

    async def chats(self, request: Request) -> Response:
        """A dialogue goes on."""
        return await self._answer(request, "chat")

    async def render(self, request: Request) -> Response:
        """Tokens of a completion's prompt, computing nothing: routers ask for them."""
        try:
            ask = await self._read(request, "completions")
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Refused as problem:
            return JSONResponse(problem.body(), problem.status, problem.headers)
        return JSONResponse([{"token_ids": ask.prompt}])

    async def models(self, request: Request) -> Response:
        """The one model."""
        model = {"id": self.engine.name, "object": "model", "created": 0, "owned_by": "pagedkv"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """200 while requests are taken."""
        if self.serving.is_running:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "stopped", "problem": repr(self.serving.problem)}, 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    # ---- one request

    async def _answer(self, request: Request, kind: str) -> Response:
        name = f"req-{next(self._numbers)}"
        try:
            ask = await self._read(request, kind)
            stream = await self._submit(name, ask, _key_of(request))
            reply = Reply(self.engine, ask, stream.request)
            if ask.is_streamed:
                return Events(self._events(stream, reply), stream, {"x-request-id": name})
            return await self._whole(request, stream, reply, name)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Refused as problem:
            return JSONResponse(problem.body(), problem.status, {"x-request-id": name, **problem.headers})

    async def _read(self, request: Request, kind: str) -> Ask:
        body = await body_of(request, self.limits)
        return await asyncio.get_running_loop().run_in_executor(
            self._long if len(body) > LONG_BYTES else None, read, body, kind, self.engine, self.limits.chat_tokens
        )

    async def _submit(self, name: str, ask: Ask, key: str | None) -> Stream:
        namespace = namespace_of(key, ask.user)
        if namespace is None and not self._shared_told:
            self._shared_told = True
            log.warning("%s has neither an API key nor a user: all such requests share one cache", name)
        tenant = "" if namespace is None else str(namespace.tenant)
        try:
            return await self.serving.submit(
                ask.prompt, ask.max_tokens, n=ask.n, namespace=namespace, tenant=tenant,
                stop_tokens=self.engine.stop_ids, deadline_s=self.limits.request_s, trace=Job(name, ask.sampling),
            )  # fmt: skip
        except pk.QueueFull as full:
            seconds = min(60, max(1, math.ceil(full.retry_after_s or 1.0)))
            said = f"{full.waiting} requests wait already: come back in {seconds} s"
            raise Refused(429, said, code="queue_full", headers={"retry-after": str(seconds)}) from None
        except pk.RequestTooLarge as large:
            raise Refused(400, f"this request does not fit on the device: {large}", code="request_too_large") from None
        except pk.ClosedError:
            raise Refused(503, "the server is stopping", headers={"retry-after": "5", **_closing()}) from None

    async def _whole(self, request: Request, stream: Stream, reply: Reply, name: str) -> Response:
        async def listen() -> None:
            async with stream:
                async for chunk in stream:
                    _check(chunk.finish_reason)
                    reply.hear(chunk)
                    if reply.is_over:
                        await stream.aclose(reason="stop")
                        break

        listening, leaving = asyncio.ensure_future(listen()), asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({listening, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                return Response(status_code=GONE)
            try:
                listening.result()
            except pk.PagedKVError as problem:
                raise _failed(problem) from None
            return JSONResponse(reply.whole(), headers={"x-request-id": name})
        finally:
            for task in (listening, leaving):
                task.cancel()
            await asyncio.gather(listening, leaving, return_exceptions=True)

    async def _events(self, stream: Stream, reply: Reply) -> AsyncIterator[bytes]:
        try:
            for event in reply.begin():
                yield _line(event)
            async for chunk in stream:
                _check(chunk.finish_reason)
                for event in reply.hear(chunk):
                    yield _line(event)
                if reply.is_over:
                    await stream.aclose(reason="stop")
                    break
            for event in reply.end():
                yield _line(event)
        except (pk.PagedKVError, Refused) as problem:
            yield _line((problem if isinstance(problem, Refused) else _failed(problem)).body())
        yield b"data: [DONE]\n\n"


async def body_of(request: Request, limits: Limits) -> bytes:
    """The body of a request. A long one is read to its end, up to ``limits.drain_bytes``.

    Raises
    ------
    Refused
        408 or 413: it did not come in time, or is too long.
    ClientDisconnect
    """

    async def collect() -> bytes | None:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size <= limits.body_bytes:
                parts.append(part)
            elif size > limits.drain_bytes:
                break
        return b"".join(parts) if size <= limits.body_bytes else None

    try:
        body = await asyncio.wait_for(collect(), limits.body_s)
    except (asyncio.TimeoutError, TimeoutError):
        raise Refused(408, f"the body did not come within {limits.body_s:g} s", headers=_closing()) from None
    if body is None:
        raise Refused(413, f"the body has more than {limits.body_bytes:,} bytes: send less", headers=_closing())
    return body


class Events(StreamingResponse):
    """Server-sent events of a stream; however the connection ends, the stream is closed."""

    def __init__(self, events: AsyncIterator[bytes], stream: Stream, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store", **headers})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        async with self._stream:
            await super().__call__(scope, receive, send)


def _key_of(request: Request) -> str | None:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() or None if kind.lower() == "bearer" else None


def _closing() -> dict[str, str]:
    return {"connection": "close"}


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def _check(reason: str | None) -> None:
    if reason in WORDS:
        status, headers = (504, {}) if reason == "deadline" else (503, {"retry-after": "5"})
        raise Refused(status, WORDS[reason], code=reason, headers=headers)


def _failed(problem: pk.PagedKVError) -> Refused:
    log.warning("a request failed: %s", problem)
    return Refused(500, f"the request failed: {type(problem).__name__}", code="failed")


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _broken(request: Request, problem: Exception) -> Response:
    return JSONResponse(Refused(500, f"the server failed: {type(problem).__name__}").body(), 500)


async def _no_route(request: Request, problem: Exception) -> Response:
    status = getattr(problem, "status_code", 404)
    said = f"there is no {request.method} {request.url.path[:200]} here"
    return JSONResponse(Refused(status, said).body(), status, getattr(problem, "headers", None))
