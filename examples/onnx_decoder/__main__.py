"""``python -m examples.onnx_decoder``: an exported decoder, and a cache on disk behind it.

SmolLM2-135M as an ONNX graph answers a question behind a long text. Run it twice: the second run loads the KV of what
the first one computed. Needs ``pip install onnx onnxruntime gguf``.
"""

from __future__ import annotations

import argparse
import sys
import time

import pagedkv as pk
from examples.llama_numpy import source
from examples.llama_numpy.errors import LlamaError
from examples.llama_numpy.tokenizer import Tokenizer
from examples.llama_numpy.weight_cache import load_model
from examples.onnx_decoder.graph import decoder
from pagedkv.adapters.onnx import CachedDecoder

STORY = "In the year {} the keeper of the lighthouse counted {} ships and wrote each of them into a book. "


def main() -> None:
    """Answer one question, and print how long its first token took."""
    parser = argparse.ArgumentParser(prog="python -m examples.onnx_decoder", description=__doc__.split("\n\n")[1])
    parser.add_argument("--disk", default="onnx-kv", help="directory of the cache (default: %(default)s)")
    parser.add_argument("--years", type=int, default=40, help="of the text, 25 tokens each (default: %(default)s)")
    parser.add_argument("--question", default="In the year 1805 the keeper of the lighthouse counted")
    parser.add_argument("--tokens", type=int, default=16, help="of the answer (default: %(default)s)")
    options = parser.parse_args()
    model = load_model(source.find() or source.download())
    tokenizer = Tokenizer(model.vocabulary)
    text = "".join(STORY.format(year, 17 + year % 97) for year in range(1800, 1800 + options.years))
    prompt = tokenizer.encode(text + options.question)
    disk = pk.Disk(options.disk, "1GiB")
    with CachedDecoder(decoder(model.weights), "512MiB", disk, revision="SmolLM2-135M from GGUF, float32") as cached:
        began = time.perf_counter()
        answer = cached.generate(prompt, options.tokens)
        tokens = [next(answer)]
        first_s = time.perf_counter() - began
        tokens += answer
        print(options.question + tokenizer.decode(tokens))
        loaded = cached.stats().loaded_tokens
        print(f"{loaded} of {len(prompt)} tokens of the prompt came from {options.disk}/; first token: {first_s:.2f} s")


if __name__ == "__main__":
    try:
        main()
    except (LlamaError, pk.PagedKVError, ImportError, OSError) as problem:
        sys.exit(f"onnx_decoder: error: {problem}")
