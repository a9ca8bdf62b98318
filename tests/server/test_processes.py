"""The command in a process of its own: started again, it finds on disk what it computed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from examples.server.command import WRITE_S, leave, main
from examples.server.toy import END, greedy

from .conftest import LIMIT_S

ROOT = Path(__file__).parents[2]
PROMPT = "a prompt of some blocks, asked for again after a restart. " * 8
SMALL = ("--model", "toy", "--port", "0", "--device-memory", "32KiB", "--host-memory", "32KiB", "--disk-size", "4MiB")


@contextmanager
def process(*arguments: str, errors: IO[str] | None = None) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The command, and a client of it."""
    command = [sys.executable, "-W", "error", "-m", "examples.server", *SMALL, *arguments]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        found = re.fullmatch(r"toy on (http://127\.0\.0\.1:\d+)/v1\n", line)
        assert found, line
        with httpx.Client(base_url=found[1], timeout=LIMIT_S) as client:
            yield started, client
    finally:
        started.kill()
        started.wait(LIMIT_S)
        started.stdout.close()


def ask(client: httpx.Client, prompt: str = PROMPT, most: int = 24) -> int:
    """A completion, compared with the model's own; tokens of its prompt that were cached."""
    reply = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": most}).json()
    said = "".join(chr(token) for token in greedy(prompt.encode(), most) if token != END)
    assert reply["choices"][0]["text"] == said
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def hits_from_disk(client: httpx.Client) -> float:
    """Tokens so far."""
    return count(client, r'pagedkv_tier_hit_tokens_total\{.*tier="disk".*\}')


def count(client: httpx.Client, name: str) -> float:
    """A number of the metrics."""
    line = re.search(rf"^{name} (.*)$", client.get("/metrics").text, re.MULTILINE)
    assert line
    return float(line[1])


@pytest.mark.slow
@pytest.mark.checkout
def test_a_server_that_is_stopped_finds_its_blocks_again(tmp_path: Path) -> None:
    disk = ("--disk", str(tmp_path / "kv"))
    with process(*disk) as (started, client):
        assert ask(client) == 0
        started.send_signal(signal.SIGTERM)
        assert started.wait(LIMIT_S) == 0
    with process(*disk) as (_, client):
        assert ask(client) >= 400
        assert hits_from_disk(client) >= 400


@pytest.mark.slow
@pytest.mark.checkout
@pytest.mark.parametrize("write", ["reused", "all"])
def test_a_server_that_is_killed_among_requests_finds_its_blocks_again(tmp_path: Path, write: str) -> None:
    disk = ("--disk", str(tmp_path / "kv"), "--disk-write", write)
    with process(*disk, "--toy-step-ms", "2") as (started, client):
        assert ask(client) == 0
        while count(client, r"pagedkv_disk_written_blocks_total\{.*\}") < 20:
            ask(client)
        body = {"prompt": "x" * 64, "max_tokens": 500, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_bytes())
            started.kill()
            assert started.wait(LIMIT_S) == -signal.SIGKILL
    with process(*disk) as (_, client):
        assert ask(client) >= 160
        assert hits_from_disk(client) >= 160


def test_the_end_gives_the_disk_a_limited_time() -> None:
    class Cache:
        def __init__(self) -> None:
            self.closed: list[dict[str, float]] = []

        def close(self, **options: float) -> None:
            self.closed.append(options)

    cache = Cache()
    leave(cache)
    assert cache.closed == [{"write_s": WRITE_S}]


def test_options_that_are_wrong_are_told_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    disk = ["--disk", str(tmp_path), "--disk-size", "1B"]
    bad = (
        "--device-memory 12", "--max-waiting 0", "--max-unread 0", "--port 99999", "--port -1", "--deadline -5",
        "--deadline nan", "--max-connections -1", "--max-body -1", "--stop-after -1", "--toy-step-ms -1",
    )  # fmt: skip
    for arguments in (*map(str.split, bad), disk):
        assert main(["--model", "toy", "--port", "0", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.startswith("server: error: ")
        assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.checkout
def test_a_first_ctrl_c_waits_for_requests_and_says_so_and_a_second_ends_them(tmp_path: Path) -> None:
    prompt = next(text for text in map(str, range(1000)) if len(greedy(text.encode(), 400)) == 400)
    asked = {"prompt": prompt, "max_tokens": 400, "stream": True}  # two minutes
    said = tmp_path / "stderr"
    with said.open("w") as errors, process("--toy-step-ms", "300", "--stop-after", "900", errors=errors) as (
        started, client,
    ), client.stream("POST", "/v1/completions", json=asked) as reply:  # fmt: skip
        events = reply.iter_lines()
        assert "choices" in next(events)
        started.send_signal(signal.SIGINT)
        until = time.monotonic() + LIMIT_S
        while "stopping: 1 requests have 900 s to end; a second SIGINT (Ctrl-C) aborts them" not in said.read_text():
            assert time.monotonic() < until, said.read_text()
            time.sleep(0.05)
        more = [next(line for line in events if line) for _ in range(2)]
        assert all("choices" in line for line in more)  # it goes on
        started.send_signal(signal.SIGINT)
        assert started.wait(LIMIT_S) == 0
