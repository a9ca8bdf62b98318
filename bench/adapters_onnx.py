"""``python -m bench.adapters_onnx``: our cache behind an ONNX decoder.

SmolLM2 as a graph with past and present KV computes prompts of 1,500 tokens; each has another question behind a text
that was stored with a first one. Before a hit the decoder holds another prompt, and before each load from disk the page
cache of its files is dropped. The ways run in turn: read the ratios, not the times.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import pagedkv as pk
from bench.adapters import drop_pages, least, say, shown
from bench.timing import environment, print_table, write_results
from examples.llama_numpy import source
from examples.llama_numpy.weight_cache import load_model
from examples.onnx_decoder.graph import decoder
from pagedkv.adapters.onnx import CachedDecoder

QUESTION = 20  # tokens


def first_token_s(cached: CachedDecoder, prompt: Any) -> float:
    """Seconds of a prefill."""
    began = time.perf_counter()
    cached.prefill(prompt)
    return time.perf_counter() - began


def prompts(session: Any, vocab: int, folder: Path, count: int, length: int) -> list[dict[str, float]]:
    """Times of each prompt: computed, from memory, from disk after a restart."""
    draw, rows = np.random.default_rng(0), []
    disk = pk.Disk(str(folder / "kv"), "1GiB")
    for number in range(count):
        say(f"prompt {number + 1} of {count}")
        row: dict[str, float] = {}
        text, other = draw.integers(0, vocab, length - QUESTION), draw.integers(0, vocab, QUESTION)
        first, second, third, fourth = (np.concatenate((text, draw.integers(0, vocab, QUESTION))) for _ in range(4))
        with CachedDecoder(session, "512MiB", disk, revision="smollm2") as one:
            row["cold"] = first_token_s(one, first)
            began = time.perf_counter()
            one.save()
            row["save"] = time.perf_counter() - began
            one.prefill(other)
            before = one.stats().load_s
            row["memory"] = first_token_s(one, second)
            row["load"] = one.stats().load_s - before
            one.prefill(other)
            row["memory"] = min(row["memory"], first_token_s(one, third))
            one.close(write_s=None)
        drop_pages(folder / "kv")
        with CachedDecoder(session, "512MiB", disk, revision="smollm2") as one:
            row["disk"] = first_token_s(one, fourth)
            row["disk_tokens"] = float(one.stats().loaded_tokens)
        rows.append(row)
    return rows


def main() -> None:
    """Run it, print a table, write the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapters_onnx", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result file here")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--length", type=int, default=1500, help="of the prompts, in tokens")
    options = parser.parse_args()
    env = environment()
    weights = load_model(source.find() or source.download()).weights
    with tempfile.TemporaryDirectory() as folder:
        times = prompts(decoder(weights), weights.config.vocab_size, Path(folder), options.prompts, options.length)
    ways = ("cold", "memory", "disk")
    table = [
        {
            "way": way,
            "first token, min / median": shown(times, way),
            "cold / this": least(times, "cold") / least(times, way),
        }
        for way in ways
    ]
    print_table(table, title=f"{options.length} tokens, {options.prompts} prompts")
    if options.json:
        write_results(
            options.json, "adapters_onnx", table, env=env, runtime=f"onnxruntime {onnxruntime.__version__}", times=times
        )  # fmt: skip


if __name__ == "__main__":
    main()
