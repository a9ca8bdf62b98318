"""Clients that come in crowds, go away, or never read: no one else waits for them.

Nothing is left of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from examples.server.app import LONG_BYTES, Limits
from examples.server.toy import Toy, greedy
from pagedkv.scheduler import Plan

from .conftest import LIMIT_S, openai, running, until


class Paced(Toy):
    """A toy that ends no answer, and between two steps lets the event loops come round.

    So it takes a client some steps to leave, and the server some steps to notice that, on however busy a machine.

    Attributes
    ----------
    loops : event loops that a step waits for; they run until the last step is over.
    """

    def __init__(self) -> None:
        super().__init__(ends=False)
        self.loops: set[asyncio.AbstractEventLoop] = set()

    def logits(self, plan: Plan, step: pk.Step) -> NDArray[Any]:
        for loop in self.loops:
            came_round = threading.Event()
            loop.call_soon_threadsafe(came_round.set)
            assert came_round.wait(LIMIT_S)
        return super().logits(plan, step)


def test_64_clients_of_which_a_third_leave_get_what_each_would_get_alone() -> None:
    engine = Paced()
    cache = {"device_memory": pk.Blocks(400), "host_memory": pk.Blocks(400)}
    with running(engine, cache=cache, max_running=24) as made:

        async def ask(client: openai.AsyncOpenAI, number: int) -> None:
            leaves = number % 3 == 0
            prompt = f"{'the same beginning of all prompts, ' * (number % 3)}and number {number}"
            most = 400 if leaves else 40  # steps in which the server has to notice
            full = "".join(map(chr, greedy(prompt.encode(), 40, ends=False)))
            options = {"model": "toy", "prompt": prompt, "max_tokens": most, "user": f"u{number % 5}"}
            if number % 2 and not leaves:
                whole = await client.completions.create(**options)
                assert whole.choices[0].text == full
                return
            text, events = "", await client.completions.create(**options, stream=True)
            async for event in events:
                text += event.choices[0].text
                if leaves and len(text) >= number % 7 + 1:
                    await events.close()
                    break
            assert full.startswith(text) if leaves else text == full

        async def crowd() -> None:
            async with openai.AsyncOpenAI(base_url=made.url, api_key="k", max_retries=0, timeout=LIMIT_S) as client:
                made.gate.clear()
                asked = [asyncio.ensure_future(ask(client, number)) for number in range(64)]
                while not made.serving._stepper._boxes:
                    await asyncio.sleep(0.005)
                engine.loops = {asyncio.get_running_loop(), next(iter(made.serving._stepper._boxes.values())).loop}
                made.gate.set()
                await asyncio.gather(*asked)
                while made.serving.scheduler.has_work:
                    await asyncio.sleep(0.005)

        asyncio.run(crowd())
        made.idle()
        assert made.stats().ended == {"stop": 0, "length": 42, "aborted": 22, "deadline": 0, "refused": 0}


@pytest.mark.parametrize("streamed", [True, False], ids=["in events", "whole"])
def test_a_client_that_disconnects_ends_its_request(streamed: bool) -> None:
    with running(Toy(0.001, ends=False)) as made:
        made.gate.clear()
        with socket.create_connection(("127.0.0.1", made.port)) as client:
            client.sendall(made.post({"prompt": "go on", "max_tokens": 1500, "stream": streamed, "n": 2}))
            until(lambda: made.stats().running == 1)
        made.gate.set()
        made.idle()
        assert made.stats().ended["aborted"] == 1


def test_long_prompts_are_encoded_one_at_a_time_and_short_ones_do_not_wait() -> None:
    class Slow(Toy):
        at_once = most_at_once = 0

        def __init__(self) -> None:
            super().__init__()
            self.go_on = threading.Event()

        def encode(self, text: str) -> list[int]:
            if len(text) > LONG_BYTES:
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                assert self.go_on.wait(LIMIT_S)
                self.at_once -= 1
            return super().encode(text[:8])

    engine = Slow()
    with running(engine) as made:

        async def crowd() -> None:
            async with openai.AsyncOpenAI(base_url=made.url, api_key="k", max_retries=0, timeout=LIMIT_S) as client:
                options = {"model": "toy", "max_tokens": 1}
                tasks = [
                    asyncio.ensure_future(client.completions.create(prompt=f"{i}" + "x" * LONG_BYTES, **options))
                    for i in range(40)  # more than threads that asyncio has for all
                ]
                while not engine.at_once:
                    await asyncio.sleep(0.005)
                for _ in range(40):
                    assert (await client.completions.create(prompt="short", **options)).choices
                engine.go_on.set()
                assert all(reply.choices for reply in await asyncio.gather(*tasks))

        try:
            asyncio.run(crowd())
        finally:
            engine.go_on.set()
    assert engine.most_at_once == 1


def test_a_queue_that_is_full_says_when_to_come_back() -> None:
    with running(max_running=1, max_waiting=2, max_batch_tokens=64) as made:
        made.gate.clear()

        async def crowd() -> list[object]:
            async with openai.AsyncOpenAI(base_url=made.url, api_key="k", max_retries=0, timeout=LIMIT_S) as client:
                asks = [client.completions.create(model="toy", prompt=f"{i}", max_tokens=2) for i in range(12)]
                tasks = [asyncio.ensure_future(ask) for ask in asks]
                while not any(task.done() for task in tasks):
                    await asyncio.sleep(0.005)
                made.gate.set()
                return await asyncio.gather(*tasks, return_exceptions=True)

        replies = asyncio.run(crowd())
        refused = [reply for reply in replies if isinstance(reply, openai.RateLimitError)]
        assert refused
        assert len(refused) + sum(not isinstance(reply, Exception) for reply in replies) == 12
        for error in refused:
            assert 1 <= int(error.response.headers["retry-after"]) <= 60
            assert error.code == "queue_full"
        made.idle()


def test_a_client_that_never_reads_holds_up_no_one_and_nothing_of_it_is_left() -> None:
    with running(Toy(0.0005, ends=False), cache={"device_memory": pk.Blocks(8192)}) as made:
        made.serving._max_unread = 50
        with socket.socket() as never:
            never.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            never.connect(("127.0.0.1", made.port))
            never.sendall(made.post({"prompt": "go on", "max_tokens": 1500, "n": 16, "stream": True}))
            until(lambda: made.stats().new_tokens)
            reply = made.client().completions.create(model="toy", prompt="another", max_tokens=8)
            assert reply.choices[0].text == "".join(map(chr, greedy(b"another", 8, ends=False)))
            until(lambda: sum(made.stats().ended.values()) == 2)
            assert made.stats().ended["aborted"] == 1, "its tokens pile up no further"
            made.idle()


def test_a_client_that_reads_slowly_gets_all_of_its_answer() -> None:
    with running(Toy(ends=False), cache={"device_memory": pk.Blocks(8192)}) as made:
        body = {"prompt": "go on", "max_tokens": 1000, "stream": True}
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", made.port))
            slow.settimeout(LIMIT_S)
            slow.sendall(made.post(body))
            found = b""
            while b"[DONE]" not in found:  # a few bytes of each token's 200 at a time
                found += slow.recv(97)
            made.idle()
        events = [json.loads(line[6:]) for line in found.decode().splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        assert text == "".join(map(chr, greedy(b"go on", 1000, ends=False)))


def test_a_request_that_takes_too_long_is_ended() -> None:
    with running(Toy(0.002, ends=False), limits=Limits(request_s=0.05)) as made:
        with pytest.raises(openai.APIStatusError) as told:
            made.client().completions.create(model="toy", prompt="go on", max_tokens=1500)
        assert (told.value.status_code, told.value.code) == (504, "deadline")


def test_a_server_whose_time_to_stop_is_over_tells_its_clients() -> None:
    limits = Limits(stop_s=0.2)
    with running(Toy(0.01, ends=False), limits=limits) as made, ThreadPoolExecutor(2) as threads:
        body, url = {"prompt": "go on", "max_tokens": 1900}, f"{made.url}/completions"

        def read_events() -> list[str]:
            with httpx.stream("POST", url, json={**body, "stream": True}, timeout=LIMIT_S) as reply:
                return [line for line in reply.iter_lines() if line]

        whole, events = threads.submit(httpx.post, url, json=body, timeout=LIMIT_S), threads.submit(read_events)
        until(lambda: made.stats().running == 2)
        made._server.should_exit = True
        *_, last, done = events.result()
        assert (json.loads(last[6:])["error"]["code"], done) == ("aborted", "data: [DONE]")
        reply = whole.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "aborted")
        assert int(reply.headers["retry-after"]) > 0


def test_a_connection_without_a_whole_header_is_closed() -> None:
    with running(limits=Limits(header_s=0.2)) as made:
        address, begins = ("127.0.0.1", made.port), b"GET /health HTTP/1.1\r\nhost: x\r\n"
        with socket.create_connection(address, LIMIT_S) as silent, socket.create_connection(address, LIMIT_S) as slow:
            slow.sendall(begins)
            assert (silent.recv(100), slow.recv(100)) == (b"", b"")
        unread = b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n"
        for request, more in ((begins + b"\r\n", begins), (unread, b"{")):
            with socket.create_connection(address, LIMIT_S) as answered, contextlib.suppress(ConnectionError):
                answered.sendall(request)
                if answered.recv(10_000):  # or it was closed before, on a machine that is busy
                    answered.sendall(more)
                    while answered.recv(10_000):
                        pass
        until(lambda: not made._server.server_state.connections)


def test_requests_on_too_many_connections_are_refused_and_the_health_is_told() -> None:
    with running(limits=Limits(connections=2)) as made, contextlib.ExitStack() as idle:
        for _ in range(2):
            idle.enter_context(socket.create_connection(("127.0.0.1", made.port)))
        until(lambda: len(made._server.server_state.connections) == 2)
        with pytest.raises(openai.RateLimitError) as told:
            made.client().completions.create(model="toy", prompt="x" * 500_000, max_tokens=1)
        assert told.value.code == "too_many_connections"
        assert int(told.value.response.headers["retry-after"]) > 0
        for path in ("health", "metrics"):
            assert httpx.get(f"http://127.0.0.1:{made.port}/{path}", timeout=LIMIT_S).status_code == 200
        idle.close()
        until(lambda: not made._server.server_state.connections)
        assert made.client().completions.create(model="toy", prompt="x", max_tokens=1).choices


def test_a_server_that_stops_ends_what_runs_and_refuses_the_rest() -> None:
    with running(Toy(0.001, ends=False), limits=Limits(stop_s=60.0)) as made:
        prompt = "go on"
        with httpx.Client(base_url=made.url, timeout=LIMIT_S) as client:
            body = {"prompt": prompt, "max_tokens": 200, "stream": True}
            with client.stream("POST", "/completions", json=body) as reply:
                lines = reply.iter_lines()
                first = next(line for line in lines if line)
                made._server.should_exit = True
                rest = [line for line in lines if line]
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in [first, *rest[:-1]]]
        assert rest[-1] == "data: [DONE]"
        assert "".join(texts) == "".join(map(chr, greedy(prompt.encode(), 200, ends=False)))
