"""``pagedkv replay``: options in, table, JSON and plot out.

Exit code 0 done, 1 wrong bytes, 2 bad input.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay.about import fitting
from pagedkv.lab.replay.advice import advise
from pagedkv.lab.replay.capacity import LLAMA_3_8B_BYTES_PER_TOKEN
from pagedkv.lab.replay.load import DEFAULT_TRACE, load_trace
from pagedkv.lab.replay.options import DEFAULT_BLOCK_BYTES, DEMOTIONS, KNOWN, Options, check_policies
from pagedkv.lab.replay.pages import keeps_less, limits_all
from pagedkv.lab.replay.plot import plot, require_matplotlib
from pagedkv.lab.replay.progress import progress
from pagedkv.lab.replay.references import BOUNDS, References
from pagedkv.lab.replay.report import Report, require_writable
from pagedkv.lab.replay.run import replay
from pagedkv.lab.replay.sweep import DEFAULT_SWEEP, capacities
from pagedkv.lab.replay.table import print_table
from pagedkv.lab.sizing.checks import by_name
from pagedkv.lab.sizing.models import MODELS, Model, model_of_config
from pagedkv.lab.sizing.shape import token_bytes
from pagedkv.spec.sizes import parse_size

DESCRIPTION = """Replay a serving trace through the real cache and report what each eviction policy is worth.
A size is '5000 blocks', a share of the trace's unique blocks (5%) or bytes (40GiB)."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``replay`` command and its options."""
    parser = commands.add_parser("replay", help="replay a serving trace through the cache", description=DESCRIPTION)
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        default=DEFAULT_TRACE,
        metavar="TRACE",
        help=".npz, .jsonl[.gz|.zst], synthetic:chat|agent[:SEED[:REQUESTS]], or a real one that is in the package "
        "(default: %(default)s)",
    )
    add(
        "--policy",
        action="append",
        metavar="P",
        help=f"may be repeated; of: {' '.join(KNOWN)} (default: all; engine real: lru and the bounds)",
    )
    add("--device-memory", dest="device", metavar="SIZE", help="device tier (default: 1%% with host 4%% and disk 10%%)")
    add("--host-memory", dest="host", metavar="SIZE", help="host tier (default: none)")
    add("--disk", metavar="SIZE[:DIR]", help="disk tier and its folder, made if missing (default: none; temporary)")
    add(
        "--sweep",
        nargs="?",
        const=DEFAULT_SWEEP,
        metavar="SIZE,SIZE,...",
        help="several device sizes (default: %(const)s)",
    )
    add(
        "--engine",
        default="sim",
        metavar="sim|real",
        help="sim: no bytes; real: a KVCache, every byte verified",
    )
    add(
        "--demotion",
        default=DEMOTIONS[0],
        metavar="ORDER",
        help=f"{' or '.join(DEMOTIONS)} (default: %(default)s)",
    )
    add(
        "--inclusive",
        default="disk",
        metavar="TIERS",
        help="tiers that keep their copy on promotion, or none (default: disk)",
    )
    add(
        "--generating",
        type=float,
        metavar="MS",
        help="milliseconds per output token, in which a request holds its blocks, also in the bounds (default: none)",
    )
    add(
        "--hazard-stake",
        type=float,
        metavar="X",
        help="policy hazard: share of what it won over LRU lately that may be at risk too; 0: strict, inf: no bound "
        "(default: 1)",
    )
    add("--requests", type=int, metavar="N", help="only the first N requests of the trace")
    add("--block-size", type=int, metavar="TOKENS", help="of a .jsonl trace that does not say (default: 512)")
    add(
        "--bytes-per-token",
        type=int,
        metavar="N",
        help=f"of KV over all layers (default: {LLAMA_3_8B_BYTES_PER_TOKEN}, Llama 3 8B)",
    )
    add("--model", metavar="NAME", help="of `pagedkv plan`; its layers keep only tokens they can still read")
    add("--config", metavar="FILE", help="the same for a model's config.json")
    add("--keep-window", action="store_true", help="its layers keep all tokens")
    add(
        "--block-bytes",
        default=f"{DEFAULT_BLOCK_BYTES >> 10}KiB",
        metavar="SIZE",
        help="payload of a block, engine real (default: %(default)s)",
    )
    add("--wide", action="store_true", help="all columns of the table, and a line for each bound")
    add("--table-only", action="store_true", help="no advice, and none of the further replays that it takes")
    add("--json", metavar="OUT", help="write the report; - for stdout (the table then goes to stderr)")
    add("--plot", metavar="OUT.png", help="write a plot (needs the bench extra)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--progress", action="store_true", default=None, help="progress even if stderr is no terminal")
    shown.add_argument("--quiet", action="store_false", dest="progress", help="no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Do what the options say.

    Raises the errors that ``pagedkv.cli`` turns into one line and exit code 2.
    """
    start = time.perf_counter()
    layers = _layers(arguments)
    by_group = layers is not None and not arguments.keep_window and keeps_less(layers.groups)
    if layers is not None and not arguments.keep_window and not by_group and limits_all(layers.groups):
        print(f"{layers.name}: no layer sees everything, so a cache keeps all tokens of every layer", file=sys.stderr)
    policies = [
        name.strip()
        for given in arguments.policy or _default_policies(arguments.engine, by_group)
        for name in given.split(",")
    ]
    check_policies(policies)
    inclusive = tuple(name.strip() for name in arguments.inclusive.split(",") if name.strip() not in ("none", ""))
    options = Options(
        engine=arguments.engine,
        demotion=arguments.demotion,
        inclusive=inclusive,
        bytes_per_token=_bytes_per_token(arguments, layers),
        layers=layers if by_group else None,
        block_bytes=_bytes("--block-bytes", arguments.block_bytes),
        generating=arguments.generating,
        hazard_stake=arguments.hazard_stake,
    )
    if arguments.json not in (None, "-"):
        require_writable("--json", arguments.json)
    if arguments.plot is not None:
        require_writable("--plot", arguments.plot)
        require_format(arguments.plot)
    trace = load_trace(arguments.trace, block_size=arguments.block_size)
    if arguments.requests is not None:
        trace = trace.head(arguments.requests)
    sizes = capacities(
        trace, arguments.device, arguments.host, arguments.disk, arguments.sweep, options.bytes_per_token
    )
    references = References(trace, options.generating)
    with progress(arguments.progress) as shown:
        results = replay(trace, policies, sizes, options=options, progress=shown, references=references)
    out = sys.stderr if arguments.json == "-" else sys.stdout
    print_table(trace, results, out, options=options, wide=arguments.wide)
    advice = None
    if not arguments.table_only:
        with progress(arguments.progress) as shown:
            advice = advise(trace, results, options, references, shown)
        print(*("", *map(fitting, advice.sentences)), sep="\n", file=out)
    command = shlex.join(["pagedkv", *argv])
    report = Report(trace, results, command, time.perf_counter() - start, options, advice)
    if arguments.json is not None:
        report.write_json(arguments.json)
    if arguments.plot is not None:
        plot(trace, results, arguments.plot, references)
    wrong = sum(result.wrong_bytes for result in results)
    if wrong:
        print(f"pagedkv: error: {wrong} wrong bytes were served", file=sys.stderr)
    return 1 if wrong else 0


def _default_policies(engine: str, by_group: bool) -> tuple[str, ...]:
    """All of them; where bytes move, or layers do not keep all tokens, LRU alone."""
    return ("lru", *BOUNDS) if engine == "real" or by_group else KNOWN


def _layers(arguments: argparse.Namespace) -> Model | None:
    """The model of the options."""
    given = [name for name in ("model", "config") if getattr(arguments, name) is not None]
    if len(given) == 2:
        raise InvalidArgument("--model, --config: give one of them")
    if not given:
        if arguments.keep_window:
            raise InvalidArgument("--keep-window: give --model or --config, whose layers have the windows")
        return None
    try:
        if given == ["model"]:
            return by_name(MODELS, arguments.model, "model", "give --config, or ")
        return model_of_config(arguments.config, 0)
    except InvalidArgument as error:
        raise InvalidArgument(f"--{given[0]}: {error}") from None


def _bytes_per_token(arguments: argparse.Namespace, layers: Model | None) -> int:
    given: int | None = arguments.bytes_per_token
    if layers is None:
        return LLAMA_3_8B_BYTES_PER_TOKEN if given is None else given
    if given is not None:
        raise InvalidArgument("--bytes-per-token: the model says it; leave this out, or --model and --config")
    return token_bytes(layers.groups)


def require_format(out: str) -> None:
    """matplotlib is there and can write a file with this suffix."""
    known = require_matplotlib().figure().canvas.get_supported_filetypes()
    suffix = out.rpartition(".")[2].lower()
    if "." not in out or suffix not in known:
        raise InvalidArgument(f"--plot: {out} must end in one of {', '.join('.' + name for name in sorted(known))}")


def _bytes(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {error}") from None
