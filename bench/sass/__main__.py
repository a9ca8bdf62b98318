"""``python -m bench.sass``: count hot loops and compare with the committed figures.

Needs NVRTC 13 and nvdisasm (the extra ``test``) and no GPU. Every figure is a prediction: the bounds are upper ones.
``--check`` compares with ``bench/results/sass.json`` and ends with 1 if a figure moved by 5 % or more, whether it got
worse or better; ``--json bench/results/sass.json`` commits the new ones, and ``python -m bench.report`` draws them.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.results import ROOT, environment, read_results, write_results
from bench.sass.bar import compare
from bench.sass.cases import LOOPS, cases, measure, toolkit
from bench.sass.errors import SassError
from bench.sass.views import table
from bench.table import print_table
from pagedkv.errors import PagedKVError
from pagedkv.kernels.jit import available_cpus

COMMITTED = ROOT / "bench" / "results" / "sass.json"
COMMIT = (
    "if this is meant, commit the figures: python -m bench.sass --json bench/results/sass.json; python -m bench.report"
)


def main() -> int:
    """Count, print, and write or compare on request; 1 if the bar does not hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.sass", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--kernel", choices=LOOPS, help="only this kernel")
    parser.add_argument("--arch", help="only this architecture, such as sm_90")
    asked = parser.parse_args()
    if asked.json and (asked.kernel or asked.arch):
        parser.error("--json writes all figures: it takes neither --kernel nor --arch")

    def wanted(kernel: str, arch: str) -> bool:
        return asked.kernel in (None, kernel) and asked.arch in (None, arch)

    env = environment()
    try:
        nvrtc = toolkit()
        chosen = [case for case in cases() if wanted(case.kernel.name, case.arch(nvrtc))]
        with ThreadPoolExecutor(available_cpus()) as pool:
            rows = list(pool.map(lambda case: measure(case, nvrtc), chosen))
    except (PagedKVError, SassError) as error:
        print(f"bench.sass: {error}", file=sys.stderr)
        return 1
    print_table(table(rows), title="upper bounds by a static model; nothing here was measured")
    if asked.json:
        version = ".".join(map(str, nvrtc.version))
        write_results(asked.json, "sass", rows, env=env, nvrtc=version)
    if not asked.check:
        return 0
    committed = [row for row in read_results(COMMITTED)["rows"] if wanted(row["kernel"], row["arch"])]
    found = compare(committed, rows)
    for line in [*found, COMMIT] if found else ["all figures are within 5 % of the committed ones"]:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
