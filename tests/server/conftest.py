"""The server of examples/server in this process, on a free port, with the toy model."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import pagedkv as pk
from examples.server.engine import Engine, compute
from examples.server.toy import Toy
from pagedkv.serving import AsyncScheduler

LIMIT_S = 120.0  # only a hang reaches it

openai = pytest.importorskip("openai", reason="the openai client is not installed")
pytest.importorskip("uvicorn", reason="the server extra is not installed")
pytest.importorskip("starlette", reason="the server extra is not installed")
# pytest rewrites this module as it is imported. In a server's thread, CPython 3.11 may then raise SystemError: its
# compiler counts the recursions of all threads as one.
importlib.import_module("anyio._backends._asyncio")

from examples.server.app import Limits, Server  # noqa: E402
from examples.server.command import listen  # noqa: E402
from examples.server.front import Front  # noqa: E402


class Running:
    """A server that runs in a thread.

    Attributes
    ----------
    cache, serving : what it serves from.
    engine : its model.
    url : of ``/v1``.
    """

    def __init__(self, engine: Engine, limits: Limits, options: dict[str, Any], cache_options: dict[str, Any]) -> None:
        self.engine = engine
        self.cache = pk.KVCache(engine.kv_spec(4), **{"device_memory": pk.Blocks(4096), **cache_options})
        options = {"max_running": 32, "max_batch_tokens": 512, "max_waiting": 256, **options}
        scheduler = pk.Scheduler(self.cache, pk.SchedulerOptions(**options))
        self._clients: dict[str, Any] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.serving = AsyncScheduler(scheduler, partial(self._compute, engine))
        self._listening = listen("127.0.0.1", 0)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # so that a test can fill it
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        server = Server(engine, self.serving, limits)
        self._server = Front(server, "error")
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listening]}, daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    def _compute(self, engine: Engine, plan: Any, step: pk.Step) -> list[Any]:
        assert self.gate.wait(LIMIT_S)
        return compute(engine, plan, step)

    def client(self, key: str = "key") -> Any:
        """OpenAI's client, with this API key."""
        if key not in self._clients:
            self._clients[key] = openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=LIMIT_S)
        return self._clients[key]

    def post(self, body: Any) -> bytes:
        """A request of a completion, as it goes over the wire."""
        content = json.dumps(body).encode()
        return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)

    def stats(self) -> Any:
        """Of the scheduler."""
        return self.serving.scheduler.stats()

    def idle(self) -> None:
        """Wait until no request is left, and nothing of them."""
        until(lambda: not self.serving.scheduler.has_work)
        until(lambda: self.cache.table.num_rows == 0 and not self.serving._stepper._boxes)

    def stop(self) -> None:
        """End it; nothing is held then."""
        for client in self._clients.values():
            client.close()
        self._server.should_exit = True
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self._listening.close()
        assert not self.serving.is_running
        self.serving.scheduler.check_integrity()
        assert self.cache.table.num_rows == 0
        assert self.cache.stats().blocks["device"]["live"] == 0
        self.cache.close()


def until(true: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextlib.contextmanager
def running(
    engine: Engine | None = None, limits: Limits | None = None, cache: dict[str, Any] | None = None, **options: Any
) -> Iterator[Running]:
    """A server for as long as the block lasts."""
    made = Running(engine or Toy(), limits or Limits(), options, cache or {})
    try:
        yield made
    finally:
        made.gate.set()
        made.stop()


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """One for all tests of a module that leave nothing behind."""
    with running() as made:
        yield made
