"""Servers that publish KV events, and a real router in front of two."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

import pagedkv as pk
from examples.server.command import main
from tests.events.reader import Subscriber

from .conftest import LIMIT_S, Running, running, until
from .test_processes import PROMPT, ask, process

ROOT = Path(__file__).parents[2]
SIZE = 4  # tokens of a block of `running`
ROUTED = 100  # requests


def test_a_router_gets_the_tokens_of_a_prompt(served: Running) -> None:
    said = httpx.post(f"{served.url}/completions/render", json={"model": "toy", "prompt": "abc", "max_tokens": 4})
    assert said.json() == [{"token_ids": [97, 98, 99]}]
    said = httpx.post(f"{served.url}/completions/render", json={"prompt": []})
    assert (said.status_code, said.json()["error"]["param"]) == (400, "prompt")


def test_options_of_events_that_are_wrong_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--kv-events", "nowhere"], ["--kv-events", "tcp://127.0.0.1:*", "--kv-replay", "x"]):
        assert main(["--model", "toy", "--port", "0", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.startswith("server: error: cannot listen at ")
        assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.checkout
def test_the_command_publishes_what_it_computes(tmp_path: Path) -> None:
    where, again = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/again"

    class Published:
        endpoint, replay = where, again

    with process("--kv-events", where, "--kv-replay", again) as (_, client), Subscriber(Published) as reader:
        ask(client)
        tokens = list(PROMPT.encode())
        until(lambda: reader.catch_up() >= 0 and len(reader.index.blocks(tokens, 16)) == len(tokens) // 16)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def router(servers: list[Running], publishers: list[Any]) -> Iterator[str]:
    """vllm-router in front of these."""
    port, urls = free_port(), [f"http://127.0.0.1:{server.port}" for server in servers]
    command = [sys.executable, "-c", "import sys; from vllm_router.launch_router import main; sys.exit(main())"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), "--policy", "kv_aware"]
    command += ["--worker-urls", *urls, "--kv-event-block-size", str(SIZE), "--kv-event-model", "toy"]
    for url, publisher in zip(urls, publishers, strict=True):
        command += ["--kv-event-source", f"{url}={publisher.endpoint}"]
        command += ["--kv-event-replay-source", f"{url}={publisher.replay}"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        started.kill()
        started.wait(LIMIT_S)
        assert started.stdout is not None
        print(re.sub(r"\x1b\[[0-9;]*m", "", started.stdout.read())[-4000:])
        started.stdout.close()


@pytest.mark.slow
@pytest.mark.checkout
def test_a_router_sends_requests_where_their_prefix_is() -> None:
    """100 of 100; and behind a purge, where it has been computed since."""
    if importlib.util.find_spec("vllm_router") is None:
        pytest.skip("vllm-router is not installed")
    rng, any_port = Random(0), "tcp://127.0.0.1:*"
    prompts = ["".join(rng.choices("abcdefgh", k=rng.randint(40, 80))) for _ in range(20)]
    with contextlib.ExitStack() as closing:
        servers = [closing.enter_context(running(cache={"event_words": 1 << 18})) for _ in range(2)]
        publishers = [
            closing.enter_context(pk.events.ZmqPublisher(server.cache, any_port, replay=any_port, every_s=0.01))
            for server in servers
        ]
        url = closing.enter_context(router(servers, publishers))
        client = closing.enter_context(httpx.Client(timeout=LIMIT_S))

        def went_to(prompt: str) -> int:
            before = [server.cache.stats().prompt_tokens for server in servers]
            body = {"model": "toy", "prompt": prompt, "max_tokens": 1}
            said = client.post(f"{url}/v1/completions", json=body)
            assert said.status_code == 200, said.text
            after = [server.cache.stats().prompt_tokens for server in servers]
            (where,) = (i for i in range(2) if after[i] > before[i])
            return where

        def compute(where: int, prompt: str) -> None:
            body = {"prompt": prompt, "max_tokens": 1}
            assert client.post(f"{servers[where].url}/completions", json=body).status_code == 200

        def heard() -> None:
            """Wait until the router knows prompts that each has computed last."""

            def knows(where: int) -> bool:
                marks = [f"{time.monotonic_ns()} is the mark " * 2 for _ in range(6)]
                for mark in marks:
                    compute(where, mark)
                time.sleep(0.05)
                return all(went_to(mark) == where for mark in marks)

            for where in (0, 1):
                until(lambda where=where: knows(where))

        def ready() -> bool:
            try:
                return went_to("is it there?") >= 0
            except (httpx.HTTPError, AssertionError):
                return False

        until(ready)
        at = {prompt: i % 2 for i, prompt in enumerate(prompts)}
        for prompt, where in at.items():
            compute(where, prompt)
        heard()
        right = sum(went_to(asked + "xyz") == at[asked] for asked in rng.choices(prompts, k=ROUTED))
        print(f"{right} of {ROUTED} requests went where their prefix is")
        assert right == ROUTED
        servers[0].idle()
        servers[0].cache.purge(None)
        for prompt, where in at.items():
            if where == 0:
                compute(1, prompt)
        heard()
        moved = [prompt for prompt in prompts if at[prompt] == 0]
        right = sum(went_to(asked + "xyz") == 1 for asked in rng.choices(moved, k=ROUTED))
        print(f"{right} of {ROUTED} requests went to the other after a purge")
        assert right == ROUTED
