"""``python -m bench.adapters``: our cache in llama-cpp-python, beside its own two caches.

Needs llama-cpp-python. SmolLM2 computes prompts of 1,500 tokens; each has another question behind a text that was
stored with a first one. Before each prompt the context is emptied, and before each load from disk the page cache of its
files is dropped. All systems run in turn, in one process: read the ratios, not the times. A time to the first token is
that of ``create_completion(stream=True)``. Bars A to H are those of the adapters: a figure beside its bar, met or not.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from bench.results import ROOT
from bench.timing import environment, print_table, rss_bytes, write_results
from examples.llama_numpy import source

TEXT = "In the year {} the keeper of the lighthouse counted {} ships and wrote each of them into a book. "
COLUMNS = ("bar", "figure", "value", "median", "limit", "met")
ANSWER = 8  # tokens


def say(what: str) -> None:
    """Progress, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def open_llm(path: Path, threads: int, **options: Any) -> Any:
    """A Llama without flash attention."""
    import llama_cpp

    return llama_cpp.Llama(
        str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False, seed=1, **options
    )  # fmt: skip


def prompt(llm: Any, number: int, length: int) -> list[int]:
    """Tokens of a text that the number makes."""
    text = "".join(TEXT.format(year, number + year % 97) for year in range(1000 + number, 1000 + number + length // 8))
    return llm.tokenize(text.encode())[:length]  # type: ignore[no-any-return]


def emptied(llm: Any) -> Any:
    """The Llama with an empty context."""
    llm._ctx.kv_cache_seq_rm(-1, 0, -1)
    llm.reset()
    return llm


def first_token_s(llm: Any, tokens: list[int], answer: int = 2) -> float:
    """Seconds to the first piece of a stream; the answer goes on for so many tokens."""
    began = time.perf_counter()
    stream = llm.create_completion(tokens, max_tokens=answer, temperature=0.0, stream=True)
    next(stream)
    seconds = time.perf_counter() - began
    for _ in stream:
        pass
    return seconds


def drop_pages(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def least(rows: list[dict[str, float]], name: str) -> float:
    """The minimum of a figure over the prompts."""
    return min(row[name] for row in rows)


def shown(rows: list[dict[str, float]], name: str) -> str:
    """Minimum and median, in milliseconds."""
    return f"{least(rows, name) * 1e3:.0f} / {statistics.median(row[name] for row in rows) * 1e3:.0f} ms"


def long_prompts(llm: Any, folder: Path, count: int, length: int) -> list[dict[str, float]]:
    """Times of each prompt by each system: bars A, B, C, G, and attaching."""
    from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

    from pagedkv.adapters.llama_cpp import attach

    memory, disk = pk.Blocks(3 * length // 16), pk.Disk(str(folder / "kv"), "2GiB")
    rows = []
    for number in range(count):
        row: dict[str, float] = {}
        text = prompt(llm, 100 * number, length - 20)
        first, second, *others = ([*text, *prompt(llm, 7000 + number + 50 * i, 20)] for i in range(6))
        say(f"prompt {number + 1} of {count}: cold")
        row["cold"] = first_token_s(emptied(llm), second)
        emptied(llm)
        began = time.perf_counter()
        cache = attach(llm, memory, disk)
        row["attach"] = time.perf_counter() - began
        began = time.perf_counter()
        first_token_s(llm, first, 64)
        row["answer"], row["save"] = time.perf_counter() - began, cache.stats().save_s
        say("memory, its own memory cache")
        row["memory"] = row["load"] = row["memcpy"] = float("inf")
        state_bytes = cache._context.layout.size(length)
        state, room = (np.random.default_rng(n).integers(0, 255, state_bytes, np.uint8) for n in range(2))
        for other in others[:3]:
            before = cache.stats().load_s
            row["memory"] = min(row["memory"], first_token_s(emptied(llm), other))
            row["load"] = min(row["load"], cache.stats().load_s - before)
            row["memcpy"] = min(row["memcpy"], timed(functools.partial(np.copyto, room, state)))  # as cold as a load
        began = time.perf_counter()
        first_token_s(emptied(llm), others[3], 64)
        row["warm_answer"] = time.perf_counter() - began
        row["warm_save"] = cache.stats().save_s - row["save"]
        cache.close(write_s=None)
        theirs: Any
        for name, theirs in (("ram", LlamaRAMCache()), ("disk_cache", LlamaDiskCache(str(folder / "theirs")))):
            llm.set_cache(theirs)
            first_token_s(llm, first)  # the context holds most of it; then it is stored
            if name == "disk_cache":
                theirs.cache.close()
                drop_pages(folder / "theirs")
                llm.set_cache(LlamaDiskCache(str(folder / "theirs")))
            row[name] = first_token_s(emptied(llm), second)
            llm.set_cache(None)
            del theirs
        say("disk, after a restart")
        drop_pages(folder / "kv")
        cache = attach(emptied(llm), memory, disk)
        row["disk"] = first_token_s(llm, second)
        row["disk_load"], row["disk_tokens"] = cache.stats().load_s, cache.stats().loaded_tokens
        cache.close()
        row["read"] = read_s(folder / "plain", state_bytes)
        rows.append(row)
        shutil.rmtree(folder / "theirs")
    return rows


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def read_s(path: Path, num_bytes: int) -> float:
    """Seconds to read so many bytes of a file that is not in the page cache; the best of three."""
    path.write_bytes(os.urandom(num_bytes))
    found = []
    for _ in range(3):
        drop_pages(path.parent)
        found.append(timed(path.read_bytes))
    return min(found)


def exactness(llm: Any, count: int) -> tuple[int, int]:
    """Prompts that hit, with the tokens of a cold run; their prefix was a prompt, too."""
    from pagedkv.adapters.llama_cpp import attach

    system, same = prompt(llm, 5, 264), 0

    def answer(tokens: list[int]) -> list[int]:
        return list(itertools.islice(emptied(llm).generate(tokens, temp=0.0), ANSWER))

    cold = []
    for number in range(count):
        cold.append(answer([*system, *prompt(llm, 9000 + number, 20)]))
        if number % 10 == 9:
            say(f"cold, {number + 1} of {count} short prompts")
    with attach(llm, "64MiB", store_generated=False) as cache:
        answer(system)
        for number in range(count):
            before = cache.stats().loaded_tokens
            is_same = answer([*system, *prompt(llm, 9000 + number, 20)]) == cold[number]
            same += is_same and cache.stats().loaded_tokens - before >= 0.9 * len(system)
    return same, count


def conversations(llm: Any, folder: Path, count: int, rounds: int, room: int) -> dict[str, Any]:
    """Conversations with one system prompt, in turn, in memory for some of them: bars E and F."""
    from llama_cpp.llama_cache import LlamaRAMCache

    from pagedkv.adapters.llama_cpp import attach

    system = prompt(llm, 11, 400)
    found: dict[str, Any] = {}
    tokens = {
        (number, turn): prompt(llm, 200 + 31 * number + 7 * turn, 20)
        for number in range(count)
        for turn in range(rounds)
    }
    for name in ("ours", "ram"):
        emptied(llm)
        before, times, due, early = rss_bytes(), [], 0, 0
        token_bytes = 23_040  # of SmolLM2
        distinct = 400 + room * rounds * (20 + ANSWER)
        cache = None
        if name == "ours":
            cache = attach(llm, pk.Bytes(int(distinct * token_bytes * 1.1)), pk.Disk(str(folder / "many"), "4GiB"))
        else:
            llm.set_cache(LlamaRAMCache(capacity_bytes=room * (400 + rounds * (20 + ANSWER)) * token_bytes))
        texts = [list(system) for _ in range(count)]
        for turn in range(rounds):
            say(f"{name}: {count} conversations, round {turn + 1}")
            for number, text in enumerate(texts):
                known = len(text) if turn else 0
                text += tokens[number, turn]
                began = time.perf_counter()
                stream = llm.create_completion(text, max_tokens=ANSWER, temperature=0.0, stream=True)
                next(stream)
                times.append((turn, time.perf_counter() - began))
                for _ in stream:
                    pass
                text += llm.input_ids[len(text) : llm.n_tokens].tolist()
                if turn:
                    due += known
                elif cache is not None:
                    early = cache.stats().loaded_tokens
        found[f"{name}_first_token_s"] = [statistics.median(t for turn, t in times if turn == r) for r in range(rounds)]
        found[f"{name}_rss_bytes"] = rss_bytes() - before
        if cache is None:
            llm.set_cache(None)
            continue
        stats = cache.stats()
        hits = stats.loaded_tokens - early
        placed = stats.cache.blocks["device"]["cached"] * cache.store.spec.block_bytes
        found |= {"hit_tokens": hits, "due_tokens": due, "device_bytes": placed, "failures": dict(stats.failures)}
        cache.close()
    return found


def sharing(llm: Any) -> float:
    """Bytes of ten conversations' blocks over those of their distinct tokens: bar E."""
    from pagedkv.adapters.llama_cpp import attach

    system = prompt(llm, 12, 400)
    with attach(llm, "256MiB") as cache:
        distinct = set()
        for number in range(10):
            text = [*system, *prompt(llm, 300 + 17 * number, 20)]
            list(itertools.islice(llm.generate(text, temp=0.0), ANSWER))
            held = llm.input_ids[: llm.n_tokens].tolist()
            distinct |= {tuple(held[:end]) for end in range(1, len(held) + 1)}
        blocks = cache.stats().cache.blocks["device"]["cached"]
        return blocks * cache.store.spec.block_bytes / (len(distinct) * cache.store.spec.bytes_per_token)


def live(path: Path, folder: Path, length: int) -> Iterator[list[int]]:
    """A process that answers one prompt and then waits to be killed."""
    from pagedkv.adapters.llama_cpp import attach

    llm = open_llm(path, 1)
    attach(llm, "256MiB", pk.Disk(str(folder), "1GiB"))
    yield list(itertools.islice(llm.generate(prompt(llm, 77, length), temp=0.0), ANSWER))
    time.sleep(600)


def killed(llm: Any, path: Path, folder: Path, length: int, wait_s: float) -> float:
    """Part of a prompt and its answer that is found after their process was killed: bar H.

    The answer's last token has no KV: no runtime computes it.
    """
    from pagedkv.adapters.llama_cpp import attach

    command = [sys.executable, "-m", "bench.adapters", "--live", str(folder), "--length", str(length)]
    with subprocess.Popen([*command, "--model", str(path)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        answer = [int(token) for token in process.stdout.readline().split()]
        time.sleep(wait_s)
        process.kill()
    with attach(emptied(llm), "256MiB", pk.Disk(str(folder), "1GiB")) as cache:
        first_token_s(llm, [*prompt(llm, 77, length), *answer, *prompt(llm, 78, 10)])
        return cache.stats().loaded_tokens / (length + len(answer) - 1)


def bars(rows: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Bars A, B, C, G and attaching, by the minima and by the medians; met by both."""

    def bar(name: str, figure: str, over: str, under: str | None, limit: float) -> dict[str, Any]:
        found = []
        for of in (min, statistics.median):
            value = of(row[over] for row in rows)
            found.append(value / of(row[under] for row in rows) if under else value)
        met = all(value >= limit if "at least" in figure else value <= limit for value in found)
        return {"bar": name, "figure": figure, "value": found[0], "median": found[1], "limit": limit, "met": met}

    return [
        bar("A", "cold / memory, at least", "cold", "memory", 50.0),
        bar("A", "LlamaRAMCache / memory, at least", "ram", "memory", 3.0),
        bar("B", "cold / disk, at least", "cold", "disk", 30.0),
        bar("B", "LlamaDiskCache / disk, at least", "disk_cache", "disk", 1.3),
        bar("C", "load from memory / memcpy", "load", "memcpy", 2.6),
        bar("C", "load from disk / reading", "disk_load", "read", 1.3),
        bar("G", "save / answer of 64 tokens to a new prompt", "save", "answer", 0.03),
        bar("G", "save / answer of 64 tokens to a hit", "warm_save", "warm_answer", 0.03),
        bar("attach", "seconds", "attach", None, 0.15),
    ]


def of_conversations(many: dict[str, Any]) -> list[dict[str, Any]]:
    """Bar F."""
    hits = many["hit_tokens"] / max(many["due_tokens"], 1)
    times = many["ram_first_token_s"][-1] / many["ours_first_token_s"][-1]
    return [
        {"bar": "F", "figure": "tokens that could be hits, at least", "value": hits, "limit": 0.95,
         "met": hits >= 0.95},
        {"bar": "F", "figure": "LlamaRAMCache / ours, first token, at least", "value": times, "limit": 2.0,
         "met": times >= 2},
    ]  # fmt: skip


def main() -> None:
    """Run, print, and write the result file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result file here")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file; default: SmolLM2-135M")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=5, help="long ones (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1500, help="of the long prompts, in tokens")
    parser.add_argument("--exact", type=int, default=100, help="prompts compared with a cold run, or 0")
    parser.add_argument("--conversations", type=int, default=50, help="or 0")
    parser.add_argument("--rounds", type=int, default=3, help="of the conversations")
    parser.add_argument("--live", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    path = arguments.model or source.find() or source.download()
    if arguments.live:
        for answer in live(path, arguments.live, arguments.length):
            print(*answer, flush=True)
        return
    import llama_cpp

    env, llm = environment(), open_llm(path, arguments.threads)
    (ROOT / "build").mkdir(exist_ok=True)  # on a disk, unlike some temporary folders
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="bench-adapters-") as place:
        folder = Path(place)
        times = long_prompts(llm, folder, arguments.prompts, arguments.length)
        rows = bars(times)
        names = ("cold", "ram", "disk_cache", "memory", "disk")
        print_table(
            [{"system": name, "first token, min / median": shown(times, name)} for name in names],
            title=f"{arguments.length} tokens, {arguments.prompts} prompts",
        )  # fmt: skip
        same, of = exactness(llm, arguments.exact) if arguments.exact else (0, 0)
        if of:
            rows.append({"bar": "D", "figure": f"of {of} prompts, a hit and tokens as cold, at least", "value": same,
                         "limit": of, "met": same == of})  # fmt: skip
        shares = sharing(llm)
        rows.append({"bar": "E", "figure": "bytes / KV of distinct tokens", "value": shares, "limit": 1.05,
                     "met": shares <= 1.05})  # fmt: skip
        say("a process that is killed")
        part = killed(llm, path, folder / "killed", 400, 10.0)
        rows.append({"bar": "H", "figure": "found after a kill, at least", "value": part, "limit": 0.95,
                     "met": part >= 0.95})  # fmt: skip
        count = arguments.conversations
        many = conversations(llm, folder, count, arguments.rounds, max(count // 5, 1)) if count else {}
        if many:
            rows += of_conversations(many)
    print_table(rows, COLUMNS, title="Bars")
    if arguments.json:
        write_results(
            arguments.json, "adapters", rows, env=env, runtime=f"llama-cpp-python {llama_cpp.__version__}",
            threads=arguments.threads, times=times, conversations=many,
        )  # fmt: skip


if __name__ == "__main__":
    main()
