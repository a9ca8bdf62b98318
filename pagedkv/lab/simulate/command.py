"""``pagedkv simulate``: a trace and a machine in, table, JSON and plot out.

Exit code 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from typing import TextIO, get_args

import numpy as np

from pagedkv._version import __version__
from pagedkv.cache.admission import Mode
from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay.about import printable
from pagedkv.lab.replay.command import require_format
from pagedkv.lab.replay.progress import progress
from pagedkv.lab.replay.report import require_writable, write_json
from pagedkv.lab.simulate import studies
from pagedkv.lab.simulate.concurrency import concurrency
from pagedkv.lab.simulate.hardware import Hardware, parse_gpus
from pagedkv.lab.simulate.links import parse_tiers, read_moves
from pagedkv.lab.simulate.plot import plot_results, plot_study
from pagedkv.lab.simulate.run import simulate
from pagedkv.lab.simulate.served import MODELS, ServedModel, served_by_config
from pagedkv.lab.simulate.systems import DEFAULT_SYSTEMS, SYSTEMS, choose
from pagedkv.lab.simulate.table import FOUND_LEGEND, LEGEND, WIDTH, Row, found_rows, markdown, print_rows, rows
from pagedkv.lab.simulate.workload import Workload, load_workload
from pagedkv.lab.sizing.checks import by_name
from pagedkv.lab.sizing.command import parse_count
from pagedkv.lab.sizing.machines import GPUS
from pagedkv.spec.budgets import WRITES, check_choice
from pagedkv.spec.sizes import parse_size

DESCRIPTION = """Serve a trace with the real scheduler and cache, with a cost model in place of a model and on a virtual
clock, and compare ways to hold the KV."""
COLUMNS = (
    "Columns of the table, those left out that say nothing: "
    + "; ".join(f"{name}: {what}" for name, what in LEGEND.items())
    + ". Of --by-tier: "
    + "; ".join(f"{name}: {what}" for name, what in FOUND_LEGEND.items())
    + "."
)
STUDIES = (*studies.STUDIES, "concurrency")
DEFAULT_MODEL = "llama-3-8b"
DEFAULT_SIZE, DEFAULT_RATE = "host=256GiB", "50GB/s"
NOT_MODELLED = (
    "generated tokens: their KV is found again only where a later request sends them back as input, as in the trace",
    "users: requests come when the trace says, whatever the server does",
    "contention: moves run beside steps, promotions one after the other on each link, and slow no computing down",
    "attention that reads a shared prefix once for several sequences",
    "copies to the disk in the background: they are decided only in calls that move other blocks, 64 blocks at a time",
    "write budgets of the disk, and restarts",
    "the CPU time of scheduling",
)
ADMISSIONS = tuple(mode for mode in get_args(Mode) if mode != "hazard")  # which needs its policy; here it is LRU


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``simulate`` command and its options."""
    parser = commands.add_parser(
        "simulate", help="serve a trace on a virtual machine", description=DESCRIPTION, epilog=COLUMNS
    )
    add = parser.add_argument
    add(
        "trace", nargs="?", default="synthetic:chat:0:500", metavar="TRACE",
        help="as for replay, or an .npz of t_ms, input_tokens and output_tokens alone (default: %(default)s)",
    )  # fmt: skip
    add("--gpus", default="H100", metavar="[Nx]NAME", help=f"of: {' '.join(GPUS)} (default: %(default)s)")
    add("--model", metavar="NAME", help=f"of: {' '.join(MODELS)} (default: {DEFAULT_MODEL})")
    add("--config", metavar="FILE", help="a model by its config.json, with --params")
    add("--params", metavar="N", help="of --config: weights, as in 27B")
    add("--active-params", metavar="N", help="of --config: weights that one token meets (default: all)")
    add(
        "--tiers", metavar="T=SIZE@RATE/s,...",
        help=f"under the device: host, disk; or none (default: {DEFAULT_SIZE}@{DEFAULT_RATE})",
    )  # fmt: skip
    add(
        "--moves", metavar="FILE",
        help="a result of python -m bench.tiers: rates as measured, for tiers that say none (T=SIZE)",
    )  # fmt: skip
    add(
        "--disk-admission", metavar="MODE",
        help="what is written to a disk: all, cost or second_hit (default: cost, or with a budget second_hit)",
    )  # fmt: skip
    add(
        "--disk-write", metavar="WHEN",
        help="when it is written: reused, evicted, all or never (default: reused where the disk has at least 4 times "
        "the blocks of memory, else evicted)",
    )  # fmt: skip
    add("--disk-write-budget", metavar="SIZE", help="bytes that may be written to it in a day (default: any number)")
    add(
        "--systems", metavar="S,S,...",
        help="; ".join(f"{s.name}: {s.what}" for s in SYSTEMS.values()) + f" (default: {','.join(DEFAULT_SYSTEMS)})",
    )  # fmt: skip
    add("--by-tier", action="store_true", help="also times to the first token by where the prompt was found")
    add("--memory-share", type=float, default=0.9, metavar="X", help="of the GPUs' memory, for weights and KV (0.9)")
    add("--requests", type=int, metavar="N", help="only the first N requests of the trace")
    add("--speed", type=float, default=1.0, metavar="X", help="arrivals X times as fast; 0: all at once (default: 1)")
    add(
        "--whole-blocks", action="store_true",
        help="end prompts with the trace's last whole block, beyond which it does not say that a later one agrees",
    )  # fmt: skip
    add("--block-size", type=int, default=16, metavar="TOKENS", help="of the cache (default: %(default)s)")
    add("--trace-block-size", type=int, metavar="TOKENS", help="of a .jsonl trace (default: 512)")
    add("--max-running", type=int, default=256, metavar="N", help="sequences at once (default: %(default)s)")
    add("--max-batch-tokens", type=int, metavar="N", help="tokens of a step (default: 2048 beside --max-running)")
    add("--longest", type=int, metavar="TOKENS", help="that `contiguous` reserves (default: the trace's longest)")
    add(
        "--study", metavar="NAME",
        help=f"instead, measure one thing over the trace's lengths: {', '.join(STUDIES)}",
    )  # fmt: skip
    add("--beam-spread", type=float, default=3.0, metavar="X", help="study beams: spread of the logits (default: 3)")
    add("--json", metavar="OUT", help="write the report; - for stdout (the table then goes to stderr)")
    add("--plot", metavar="OUT.png", help="write a plot (needs the bench extra)")
    add("--wide", action="store_true", help="all columns of the table (default: those that fit 80 characters)")
    add("--markdown", action="store_true", help="print the table as Markdown, with all columns")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--progress", action="store_true", default=None, help="progress even if stderr is no terminal")
    shown.add_argument("--quiet", action="store_false", dest="progress", help="no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Do what the options say.

    Raises the errors that ``pagedkv.cli`` turns into one line and exit code 2.
    """
    start = time.perf_counter()
    hardware = _hardware(arguments)
    names = _systems(arguments, hardware)
    if arguments.json not in (None, "-"):
        require_writable("--json", arguments.json)
    if arguments.plot is not None:
        require_writable("--plot", arguments.plot)
        require_format(arguments.plot)
    if arguments.study is not None and arguments.study not in STUDIES:
        raise InvalidArgument(f"--study: unknown study {arguments.study[:40]!r}; known: {', '.join(STUDIES)}")
    workload = load_workload(
        arguments.trace, block_size=arguments.trace_block_size, requests=arguments.requests, speed=arguments.speed,
        whole_blocks=arguments.whole_blocks,
    )  # fmt: skip
    about = f"{printable(workload.trace.name)}: {len(workload):,} requests"
    report: dict[str, object] = {
        "trace": workload.trace.name, "sha256": workload.trace.sha256, "requests": len(workload),
        "command": shlex.join(["pagedkv", *argv]), "version": __version__, "python": platform.python_version(),
        "numpy": np.__version__,
    }  # fmt: skip
    if arguments.study is not None:
        study = _study(arguments, workload, hardware)
        lines, title = study.rows, f"{about}, study {arguments.study}"
        report |= {"study": arguments.study, "rows": lines}
        if arguments.plot is not None:
            plot_study(study, title, arguments.plot)
    else:
        with progress(arguments.progress) as shown:
            results = simulate(
                workload, hardware, names,
                block_size=arguments.block_size, max_running=arguments.max_running,
                max_batch_tokens=_max_batch_tokens(arguments),
                longest=arguments.longest, progress=shown,
            )  # fmt: skip
        lines = rows(results)
        title = f"{about} on {hardware.gpus}, {hardware.model.name}"
        report |= {"hardware": hardware.assumptions(), "results": [result.to_json() for result in results]}
        if arguments.plot is not None:
            plot_results(results, title, arguments.plot)
    report |= {"wall_s": round(time.perf_counter() - start, 3), "not_modelled": list(NOT_MODELLED)}
    _show(arguments, lines, title)
    if arguments.by_tier and arguments.study is None:
        print(file=_out(arguments))
        _show(arguments, found_rows(results), "Times to the first token by where prompts were found")
    if arguments.json is not None:
        write_json(report, arguments.json)
    return 0


def _max_batch_tokens(arguments: argparse.Namespace) -> int:
    return int(arguments.max_batch_tokens or 2048 + arguments.max_running)


def _show(arguments: argparse.Namespace, lines: Sequence[Row], title: str) -> None:
    if arguments.markdown:
        print(markdown(lines), file=_out(arguments))
    else:
        print_rows(lines, title, _out(arguments), None if arguments.wide else WIDTH)


def _out(arguments: argparse.Namespace) -> TextIO:
    return sys.stderr if arguments.json == "-" else sys.stdout


def _systems(arguments: argparse.Namespace, hardware: Hardware) -> list[str]:
    """Those asked for; by default, without tiers, not those that differ by them alone."""
    if arguments.systems is None:
        return [name for name in DEFAULT_SYSTEMS if hardware.tiers or not SYSTEMS[name].tiered]
    chosen = choose([name.strip() for name in arguments.systems.split(",")])
    for system in chosen:
        if system.tiered and not hardware.tiers:
            raise InvalidArgument(
                f"--systems {system.name} needs tiers under the device: give --tiers, or leave it out"
            )
    return [system.name for system in chosen]


def _budget(given: str | None) -> int | None:
    if given is None:
        return None
    try:
        budget = parse_size(given)
    except InvalidArgument as problem:
        raise InvalidArgument(f"--disk-write-budget: {problem}") from None
    if budget < 1:
        raise InvalidArgument("--disk-write-budget must be at least one byte; to write nothing: --disk-write never")
    return budget


def _model(arguments: argparse.Namespace) -> ServedModel:
    """By its name, or by its file; not by both."""
    params, active = arguments.params, arguments.active_params
    if arguments.config is None:
        if (params, active) != (None, None):
            option = "--active-params" if params is None else "--params"
            raise InvalidArgument(f"{option} is for --config FILE: a model by its name has its weights")
        try:
            return by_name(MODELS, arguments.model or DEFAULT_MODEL, "model", "of those whose widths are known, ")
        except InvalidArgument as problem:
            raise InvalidArgument(f"--model: {problem}") from None
    if arguments.model is not None:
        raise InvalidArgument("give --model or --config, not both")
    if params is None:
        raise InvalidArgument("--config needs --params too: a config.json does not count the weights")
    count = parse_count(params, "--params")
    return served_by_config(arguments.config, count, None if active is None else parse_count(active, "--active-params"))


def _hardware(arguments: argparse.Namespace) -> Hardware:
    gpu, number = parse_gpus(arguments.gpus)
    model = _model(arguments)
    if arguments.disk_admission is not None:
        check_choice("--disk-admission", arguments.disk_admission, ADMISSIONS)
    if arguments.disk_write is not None:
        check_choice("--disk-write", arguments.disk_write, WRITES)
    if not 0 < arguments.memory_share <= 1:
        raise InvalidArgument(f"--memory-share: {arguments.memory_share} is not in 0..1, above 0")
    measured = None
    if arguments.moves is not None:
        measured = read_moves(arguments.moves, max(1, arguments.block_size) * model.kv_bytes_per_token)
    tiers = arguments.tiers
    if tiers is None:
        tiers = DEFAULT_SIZE if measured else f"{DEFAULT_SIZE}@{DEFAULT_RATE}"
    hardware = Hardware(
        gpu, number, model, parse_tiers(tiers, measured),
        memory_share=arguments.memory_share, disk_admission=arguments.disk_admission,
        disk_write=arguments.disk_write, disk_write_budget=_budget(arguments.disk_write_budget),
        moves={} if measured is None else measured.source,
    )  # fmt: skip
    hardware.kv_bytes  # noqa: B018 - raises where the weights leave no room
    return hardware


def _study(arguments: argparse.Namespace, workload: Workload, hardware: Hardware) -> studies.Study:
    if arguments.study == "waste":
        return studies.waste(workload, arguments.longest, len(workload))
    if arguments.study == "prefix":
        return studies.prefix(workload, arguments.block_size)
    if arguments.study == "concurrency":
        return concurrency(
            workload, hardware, arguments.longest, arguments.block_size, arguments.max_running,
            _max_batch_tokens(arguments),
        )  # fmt: skip
    if not 0 < arguments.beam_spread <= 100:
        raise InvalidArgument(f"--beam-spread: {arguments.beam_spread} is not in 0..100, above 0")
    return studies.beams(workload, arguments.block_size, len(workload), arguments.beam_spread)
