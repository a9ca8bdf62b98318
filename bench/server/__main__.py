"""``python -m bench.server``.

Goodput, time to first token (TTFT) and time per output token (TPOT) of examples/server, with and without the cache.

Clients of this process hold chats with the server in a thread of it, over the loopback, in a closed loop: each sends
its next turn when the answer to the last one is there. A chat's prompt is all of its turns so far behind one of a few
system messages. ``cache`` shares all of it; ``no cache`` is the same load on the same server with a namespace for each
request, so that no request finds anything. Goodput is requests per second of those whose TTFT and TPOT are both within
their bars. Percentiles are over requests; a request's TPOT is its mean. The toy model sleeps for each token that it
computes; ``--models toy smollm2`` has SmolLM2-135M compute, too. The cache has three tiers, and
a temporary folder for its disk.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import pagedkv as pk
from bench.server.load import Load, Told, run
from bench.timing import environment, print_table, write_results
from examples.server.engine import Engine, compute
from examples.server.toy import Toy
from pagedkv.serving import AsyncScheduler

COLUMNS = (
    "model", "case", "requests", "goodput_per_s", "tokens_per_s", "cached_share", "ttft_p50_ms", "ttft_p90_ms",
    "ttft_p99_ms", "tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms", "refused",
)  # fmt: skip
CASES = {"no cache": False, "cache": True}


def row(case: str, told: Told, bars_s: tuple[float, float]) -> dict[str, Any]:
    """The table's line for a case."""
    first, token = np.array(told.first_s), np.array(told.token_s)
    good = int(np.count_nonzero((first <= bars_s[0]) & (token <= bars_s[1])))
    found: dict[str, Any] = {
        "case": case, "requests": len(first), "goodput_per_s": good / told.wall_s,
        "tokens_per_s": told.new_tokens / told.wall_s, "cached_share": told.cached_tokens / told.prompt_tokens,
        "refused": told.refused, "wall_s": told.wall_s,
    }  # fmt: skip
    for name, times in (("ttft", first), ("tpot", token)):
        found |= {f"{name}_p{p}_ms": float(np.percentile(times, p)) * 1e3 for p in (50, 90, 99)}
    return found


def measured(engine: Engine, load: Load, arguments: argparse.Namespace, *, cached: bool) -> Told:
    """One case on a server of its own."""
    from examples.server.app import Server
    from examples.server.command import listen
    from examples.server.front import Front

    with (
        tempfile.TemporaryDirectory(prefix="pagedkv-bench-") as folder,
        pk.KVCache(
            engine.kv_spec(16), arguments.device_memory, arguments.host_memory, pk.Disk(f"{folder}/kv", arguments.disk)
        ) as cache,
        listen("127.0.0.1", 0) as listening,
    ):
        options = pk.SchedulerOptions(arguments.max_running, arguments.max_batch_tokens, max_waiting=4 * load.clients)
        serving = AsyncScheduler(pk.Scheduler(cache, options), partial(compute, engine))
        server = Front(Server(engine, serving), log_level="error")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        try:
            return asyncio.run(run(url, engine.name, load, cached=cached))
        finally:
            server.should_exit = True
            thread.join()


def rows(model: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Both cases with one model."""
    load = Load(arguments.clients, arguments.chats, arguments.turns, answer_tokens=arguments.answer_tokens)
    if model == "toy":
        engine: Engine = Toy(token_s=arguments.toy_token_us * 1e-6)
        load = replace(load, system_words=60, turn_words=10)  # a byte is a token: shorter messages for the same context
    else:
        from examples.llama_numpy import source
        from examples.llama_numpy.weight_cache import load_model
        from examples.server.llama import LlamaEngine

        engine = LlamaEngine(load_model(source.find_checked()))
    bars_s = (arguments.ttft_ms * 1e-3, arguments.tpot_ms * 1e-3)
    found = [row(case, measured(engine, load, arguments, cached=cached), bars_s) for case, cached in CASES.items()]
    return [{"model": engine.name, **line} for line in found]


def main() -> None:
    """Run both cases and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.server", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--models", choices=("toy", "smollm2"), nargs="+", default=["toy"])
    parser.add_argument("--toy-token-us", type=float, default=200.0, help="that a token of the toy takes")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--chats", type=int, default=2, help="of each client")
    parser.add_argument("--turns", type=int, default=4, help="of a chat")
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--device-memory", default="256MiB", metavar="SIZE")
    parser.add_argument("--host-memory", default="256MiB", metavar="SIZE")
    parser.add_argument("--disk", default="2GiB", metavar="SIZE")
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--max-batch-tokens", type=int, default=256)
    parser.add_argument("--ttft-ms", type=float, default=1000.0, help="bar of the goodput")
    parser.add_argument("--tpot-ms", type=float, default=100.0, help="bar of the goodput")
    arguments = parser.parse_args()
    env = environment()
    found = [line for model in arguments.models for line in rows(model, arguments)]
    print_table(found, COLUMNS, title=f"{arguments.clients} clients, chats of {arguments.turns} turns")
    if arguments.json:
        write_results(arguments.json, "server", found, env=env)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
