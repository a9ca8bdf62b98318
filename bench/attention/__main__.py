"""``python -m bench.attention``.

This library's attention kernels, their peers and the memory's ceilings, in one run.

On a GPU (``--device cuda``) everything is over in under nine minutes; what time does not allow is listed.
``--device cpu`` measures :mod:`pagedkv.cpu` beside its own peers and ceilings (options: ``--device cpu --help``).
``--device ptxsim`` runs the same control flow on tiny problems in the tests' PTX interpreter: it times nothing.

Peers take part where they are installed: FlashInfer (``flashinfer-python``, with kernels that are built already, or
with ``--peer-jit``), FlashAttention-3 out of vLLM (``PEER_FA3`` names its library where vLLM is not installed), torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.attention.peers.torch_side import version
from bench.attention.plots import plot, require_pyplot
from bench.attention.progress import progress
from bench.attention.sections import NAMES
from bench.attention.simulated import LABEL
from bench.attention.supervisor import Outcome, supervise
from bench.attention.views import TITLES, view
from bench.timing import environment, print_table, write_results

PEERS = ("torch", "flashinfer-python", "vllm")
MINUTES = 8.6
SILENCE_S = 60.0  # a GPU that is heard nothing of for so long hangs
PATIENT_S = 600.0  # where a peer compiles, or an interpreter runs the kernels


def main() -> int:
    if ("--device", "cpu") in pairwise(sys.argv) or "--device=cpu" in sys.argv:
        from bench.cpu_attention.run import main as on_cpu

        rest = [word for word in sys.argv[1:] if word not in ("--device", "cpu", "--device=cpu")]
        return on_cpu(rest)
    parser = argparse.ArgumentParser(
        prog="python -m bench.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "ptxsim", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--plot", metavar="DIR", help="write plots there (needs matplotlib)")
    parser.add_argument("--only", metavar="NAMES", default=",".join(NAMES), help=f"sections, of {','.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller problems: does it run on this GPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for everything (default {MINUTES})")
    parser.add_argument("--peer-jit", action="store_true", help="let peers compile what is not built already: minutes")
    options = parser.parse_args()
    only = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = [name for name in only if name not in NAMES]
    if unknown or not only:
        parser.error(f"--only takes names of {','.join(NAMES)}, got {options.only!r}")
    if options.plot:
        try:
            require_pyplot()
        except ImportError as error:
            parser.error(str(error))

    described = environment()
    begin = time.monotonic()
    outcome = run(options, only)
    if not outcome.about:
        print(f"bench.attention: {outcome.failure}", file=sys.stderr)
        return 2
    document = {
        "device": outcome.about["device"],
        "label": LABEL if options.device == "ptxsim" else "",
        "quick": options.quick,
        "peers": {name: found for name in PEERS if (found := version(name))},
        "seconds": round(time.monotonic() - begin, 1),
        "section_ended_at": outcome.ended,
        "starts": outcome.starts,
        "failure": outcome.failure,
        "rows": outcome.rows,
    }
    show(document, only)
    if options.json:
        extra = {key: value for key, value in document.items() if key != "rows"}
        write_results(options.json, "attention", outcome.rows, env=described, **extra)
        print(f"wrote {options.json}")
    if options.plot:
        for path in plot(outcome.rows, Path(options.plot), str(document["device"].get("device", options.device))):
            print(f"wrote {path}")
    if outcome.failure:
        print(f"bench.attention: {outcome.failure}", file=sys.stderr)
        return 1
    bad = [row for row in outcome.rows if row["status"] in ("wrong", "failed", "crashed")]
    return 1 if any(row.get("own", True) for row in bad) else 0


def run(options: argparse.Namespace, only: list[str]) -> Outcome:
    """Start the process that measures, and follow it."""
    arguments = ["--device", options.device, "--only", ",".join(only), *(["--quick"] if options.quick else [])]
    if options.peer_jit:
        os.environ["BENCH_PEER_JIT"] = "1"
    silence = PATIENT_S if options.peer_jit or options.device == "ptxsim" else SILENCE_S
    shown = progress()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-attention-") as folder:
            return supervise(arguments, Path(folder), shown, seconds=60 * options.minutes, silence_s=silence)
    finally:
        shown.close()


def show(document: dict[str, Any], only: list[str]) -> None:
    """Print a table for each section, then the bars, then what has no figure."""
    if document["label"]:
        print(f"{document['label']}. The steps below are an interpreter's; they say nothing about a GPU.")
    for name in NAMES:
        rows = view(document, name)
        if rows and (name in only or name == "ceilings"):
            print_table(rows, title=f"\n{TITLES[name]}")
    print_table(view(document, "bars"), title="\nBars")
    missing = view(document, "unmeasured")
    if missing:
        print_table(missing, title="\nWithout a figure")
    print(f"\n{document['seconds']:.0f} s, {document['starts']} process(es)")


if __name__ == "__main__":
    sys.exit(main())
