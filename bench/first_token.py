"""``python -m bench.first_token``.

Time to the first token, with and without another process's blocks. Runs examples/prefill_decode some times: a process
computes SmolLM2's prompt by itself, another one computes it and publishes its blocks in a redis-server, a third waits
for them, a fourth comes when they are there. Each is a fresh process; its time begins when its model is loaded.
``share`` is the time over that of the process alone in the same run. All are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.results import ROOT
from bench.timing import environment, print_table, write_results

COLUMNS = ("process", "first_token_s", "share", "worst_share", "tokens_from_store", "runs")


def once(num_tokens: int, options: list[str]) -> dict[str, dict[str, Any]]:
    """One run of the example: its processes by name.

    Raises
    ------
    subprocess.CalledProcessError
    """
    command = [sys.executable, "-m", "examples.prefill_decode", "--json", "--tokens", str(num_tokens), *options]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout)
    return found


def main() -> None:
    """Run, print, and write the result file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_token", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result file here")
    parser.add_argument("--tokens", type=int, default=1500, help="of the prompt (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file; default: SmolLM2-135M")
    arguments = parser.parse_args()
    env, options = environment(), ["--model", arguments.model] if arguments.model else ["--download"]
    runs = [once(arguments.tokens, options) for _ in range(arguments.runs)]
    alone = next(iter(runs[0]))
    rows = []
    for name in runs[0]:
        shares = [run[name]["ttft_s"] / run[alone]["ttft_s"] for run in runs]
        rows.append({
            "process": name, "first_token_s": statistics.median(run[name]["ttft_s"] for run in runs),
            "share": statistics.median(shares), "worst_share": max(shares),
            "tokens_from_store": runs[0][name]["from_store"], "runs": len(runs),
        })  # fmt: skip
    print_table(rows, COLUMNS, title=f"A prompt of {arguments.tokens} tokens")
    if arguments.json:
        write_results(arguments.json, "first_token", rows, env=env, tokens=arguments.tokens)


if __name__ == "__main__":
    main()
