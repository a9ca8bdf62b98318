"""uvicorn as this server runs it: bounds on connections and headers, and a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from examples.server.app import Limits, Server, body_of
from examples.server.asks import Refused

log = logging.getLogger(__name__)

ALWAYS = ("/health", "/metrics")  # answered also where there are too many connections
ANSWERS_S = 5  # seconds for the last answers to reach their clients, after the requests were aborted
BACK_S = 1  # seconds after which a client that was refused may come back


class Front(uvicorn.Server):
    """Serves a Server's app over HTTP/1.1.

    Parameters
    ----------
    server : Server
    log_level : of uvicorn.
    """

    def __init__(self, server: Server, log_level: str = "warning") -> None:
        limits = server.limits
        app = Bounded(server.app, limits, lambda: len(self.server_state.connections))
        protocol: Any = partial(Connection, header_s=limits.header_s)
        until_s = math.ceil(limits.stop_s) + ANSWERS_S
        super().__init__(
            uvicorn.Config(app, http=protocol, ws="none", log_level=log_level, timeout_graceful_shutdown=until_s)
        )
        self._serving, self._stop_s = server.serving, limits.stop_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the scheduler beside uvicorn's own wait for the answers.

        The scheduler ends the requests, and their answers say why. uvicorn cancels only the tasks whose answers have
        not reached their clients `ANSWERS_S` seconds after that. A second SIGINT aborts the requests at once.
        """
        if self.server_state.tasks:
            log.info(
                "stopping: %d requests have %g s to end; a second SIGINT (Ctrl-C) aborts them at once",
                len(self.server_state.tasks), self._stop_s,
            )  # fmt: skip
        stopping = asyncio.ensure_future(self._serving.stop(abort_after_s=self._stop_s))
        await super().shutdown(sockets)
        if self.force_exit:
            await self._serving.stop(abort_after_s=0.0)
        await stopping


class Bounded:
    """ASGI middleware that refuses requests while there are too many connections.

    Parameters
    ----------
    app : answers the others, and those to `ALWAYS`.
    limits : Limits
    connections : counts the connections now, that of the request included.
    """

    def __init__(self, app: ASGIApp, limits: Limits, connections: Callable[[], int]) -> None:
        self._app, self._limits, self._connections = app, limits, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        most = self._limits.connections
        if scope["type"] != "http" or scope["path"] in ALWAYS or self._connections() <= most:
            await self._app(scope, receive, send)
            return
        with contextlib.suppress(Refused, ClientDisconnect):  # a client that still sends might not see the refusal
            await body_of(Request(scope, receive), replace(self._limits, body_bytes=0))
        refused = Refused(
            429, f"there are more than {most} connections: come back in {BACK_S} s", code="too_many_connections",
            headers={"retry-after": str(BACK_S), "connection": "close"},
        )  # fmt: skip
        await JSONResponse(refused.body(), refused.status, refused.headers)(scope, receive, send)


class Connection(H11Protocol):
    """An HTTP/1.1 connection, closed where the header of its next request takes too long.

    The time runs from the beginning, and from the end of each answer, until a header is whole. Bytes of a header, and
    of a body whose request was answered, do not prolong it.

    Parameters
    ----------
    header_s : seconds for a header.
    """

    def __init__(self, *arguments: Any, header_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._header_s = header_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._set_timer()

    def handle_events(self) -> None:
        """Take what has come; also called after an answer, where the request was whole."""
        super().handle_events()
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        super().connection_lost(exc)
        self._unset_timer()

    def _set_timer(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._header_s, self.timeout_keep_alive_handler)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
