"""``python -m tests.slow``: write docs/testing.md's table of slow tests.

A row for each file with a test that the quick run leaves to the slow one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- slow tests: python -m tests.slow -->", "<!-- end of slow tests -->"
WHAT = {
    "tests/adapters/test_onnx.py": "SmolLM2 in ONNX Runtime",
    "tests/attention/test_graphs.py": "captured graphs of the other attention kernels",
    "tests/attention/test_cascade.py": "windows and ALiBi through levels with every kernel",
    "tests/attention/test_nonsense.py": "nonsense to each kernel in the interpreter",
    "tests/bench/test_attention_bench.py": "a run of the whole bench in the interpreter",
    "tests/bench/test_c_api_bench.py": "compiles a loop in C",
    "tests/bench/test_cpu_attention_bench.py": "a run of the whole bench, with its peers",
    "tests/bench/test_hooks_bench.py": "a run of the whole bench",
    "tests/bench/test_policies_bench.py": "a run of the whole bench",
    "tests/bench/test_sass.py": "the static bar of every hot loop",
    "tests/bench/test_server_bench.py": "a run of the whole bench",
    "tests/bench/test_small_benches.py": "a first token through a store, stores that stand still, and scales",
    "tests/c_api/test_engine.py": "compiles an engine in C++",
    "tests/cache/test_by_group_on_disk.py": "restarts under the other kinds of groups",
    "tests/cache/test_by_group_on_kernels.py": "other kinds of groups on the interpreter",
    "tests/cache/test_by_group_power_loss.py": "power failures under a cache by groups of layers",
    "tests/cache/test_cache_on_kernels.py": "other quantised pages on the interpreter",
    "tests/cache/test_failures.py": "reads that fail under traffic",
    "tests/cache/test_interrupted_storage.py": "interrupts at the lines of a caller's round of moves",
    "tests/cache/test_interrupts.py": "interrupts at the lines of two longer calls",
    "tests/cache/test_latents.py": "latents of other dtypes on the interpreter",
    "tests/cache/test_names_forgotten.py": "many names under each policy",
    "tests/cache/test_reentrancy.py": "random orders of calls that call back",
    "tests/cache/test_remainders.py": "more random chats over restarts",
    "tests/cache/test_threads.py": "threads under each policy",
    "tests/cache/test_tiers_end_to_end.py": "each policy with the other order of demotion",
    "tests/core/test_forgetting.py": "compiles a driver",
    "tests/core/test_hazard_bound.py": "the other stake of an adversary",
    "tests/core/test_memory.py": "objects left by the other classes",
    "tests/core/test_native_callers.py": "a C compiler and Numba call the core",
    "tests/core/test_policy_example.py": "compiles the policy of `examples/policy_lfu`",
    "tests/core/test_short_of_memory.py": "failing allocations under each policy",
    "tests/core/test_tails_between_tiers.py": "more random requests over two and three tiers",
    "tests/core/test_write_policies.py": "write policies on a real trace",
    "tests/docs/test_examples.py": "every example runs",
    "tests/docs/test_figures.py": "the replay of a real trace that a page shows",
    "tests/docs/test_prose.py": "counts of all words of the tree",
    "tests/docs/test_slow_table.py": "this table",
    "tests/events/test_answers.py": "more seeds of a thousand answers",
    "tests/events/test_consumers.py": "Dynamo's indexer and smg's relay, where they are installed",
    "tests/kernels/test_compile.py": "a sample of all variants on all architectures",
    "tests/kernels/test_decode_mla.py": "other numbers of heads, block sizes and schedules",
    "tests/kernels/test_decode_mla_wgmma.py": "other lengths, blocks, variants, and mutants",
    "tests/kernels/test_decode_mma.py": "other head dims, groups and block sizes, many parts",
    "tests/kernels/test_decode_simt.py": "other head dims, groups, block sizes and scales",
    "tests/kernels/test_decode_tma.py": "other head dims, block sizes and lengths for one plan, and one multiprocessor",
    "tests/kernels/test_doctor.py": "compiles every kernel",
    "tests/kernels/test_prefill_mma.py": "other row tiles and quantised variants, a pool of more than 2^31 elements",
    "tests/kernels/test_matrix.py": "pairs of values of the PTX matrix",
    "tests/kernels/test_mutants_cache.py": "seven in eight mutants",
    "tests/kernels/test_mutants_decode.py": "seven in eight mutants",
    "tests/kernels/test_mutants_parts.py": "seven in eight mutants",
    "tests/kernels/test_mutants_prefill.py": "seven in eight mutants",
    "tests/kernels/test_on_gpu.py": "large pools, and compute-sanitizer",
    "tests/kernels/test_parts.py": "the other head dim, other lengths for one plan, parts without a key",
    "tests/kernels/test_prefill_wgmma.py": "the other head dim, and seven in eight mutants",
    "tests/kernels/test_trial.py": "a later item of prefill is wrong, parts of prefill, latents under many heads",
    "tests/kernels/test_tuning.py": "files of another compiler or source",
    "tests/model/test_native_driver.py": "compiles a driver",
    "tests/model/test_placement_driver.py": "half of the seeds with all books recounted",
    "tests/mutants/test_leaving.py": "an interpreter that aborts after tests that passed",
    "tests/mutants/test_mutants.py": "mutants, and the same tests on a copy without a mistake",
    "tests/mutants/test_prepared.py": "starts the server that tries mutants",
    "tests/oracle/test_groups_of_the_core.py": "a million moves of the core over groups of layers",
    "tests/packaging/test_wheel.py": "builds and installs the wheel",
    "tests/ptxsim/test_races.py": "a chain of CTAs",
    "tests/ranks/test_example.py": "a split tiny model, and a number of ranks that does not divide it",
    "tests/ranks/test_lost.py": "half a minute of silence, and a kill between moves",
    "tests/realmodel": "SmolLM2 beyond its goldens, Gemma 3",
    "tests/reliability/test_api_places.py": "oddities in two in three calls",
    "tests/reliability/test_proofs.py": "the proofs outside `QUICK`",
    "tests/remote": "a thousand late replies, every byte of a value, S3, prefill and decode by a model",
    "tests/replay/test_cli.py": "the command without arguments, and with a model's layers",
    "tests/replay/test_engine_real.py": "a long trace with real bytes",
    "tests/replay/test_policy_hits.py": "every policy on the shared traces, where they are",
    "tests/scheduler/test_by_group_on_kernels.py": "a scheduler over other groups on the interpreter",
    "tests/scheduler/test_cache_parts.py": "the bench at its smallest sizes",
    "tests/scheduler/test_by_group.py": "random runs of a scheduler over groups of layers",
    "tests/scheduler/test_loading.py": "random queues whose prefixes lie on slow tiers",
    "tests/scheduler/test_mending.py": "lines at which a scheduler is interrupted",
    "tests/scheduler/test_random_runs.py": "long runs of a scheduler at capacity",
    "tests/scheduler/test_sharing_random.py": "random programs full of herds",
    "tests/server/test_events.py": "events of the server as a process, and vllm-router, where it is installed",
    "tests/server/test_processes.py": "the example's server as a process",
    "tests/show/test_in_a_browser.py": "the page of `pagedkv show --html` in a browser",
    "tests/show/test_recording_of_groups.py": "random runs, each page against the books",
    "tests/simulate/test_groups.py": "more published models by groups of layers",
    "tests/sizing/test_plan_command.py": "odd values of the other options",
    "tests/spec/test_reach.py": "the walk with blocks of one token",
    "tests/tiers/test_growth.py": "kills while a store grows",
    "tests/tools": "random damage to stores for groups of layers, repaired",
}


class Counts(Counter[tuple[str, bool]]):
    """A pytest plugin: counts the collected tests by file and by whether they are slow."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.update((place(item.nodeid), item.get_closest_marker("slow") is not None) for item in items)


def place(test: str) -> str:
    """The row of a test: its file, or the folder where the whole folder is one row."""
    file = test.partition("::")[0]
    return next((row for row in WHAT if file.startswith(row + "/")), file)


def collect() -> dict[str, tuple[int, int]]:
    """Slow tests and all tests of each file that has slow ones; collects in another process."""
    command = [sys.executable, "-m", "tests.slow", "--collect"]
    environment = {name: value for name, value in os.environ.items() if name != "PAGEDKV_MUTANTS"}  # all of them
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {row: (slow, of) for row, slow, of in json.loads(done.stdout.rpartition("\n\n")[2])}


def table(rows: Mapping[str, tuple[int, int]]) -> str:
    """The table in Markdown, most slow tests first.

    Raises
    ------
    KeyError
        `WHAT` has no words for one of the files.
    """
    lines = ["| tests | slow | of | |", "|---|---:|---:|---|"]
    for name, (slow, of) in sorted(rows.items(), key=lambda row: (-row[1][0], row[0])):
        lines.append(f"| `{name}` | {slow:,} | {of:,} | {WHAT[name]} |")
    return "\n".join(lines)


def with_table(page: str, drawn: str) -> str:
    """The page with this table between the marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert (begin, end) == (BEGIN, END), "the page lacks its marks"
    return f"{head}{begin}\n\n{drawn}\n\n{end}{tail}"


def main(argv: list[str]) -> int:
    """Write the table; with ``--collect``, print its rows as JSON."""
    if argv == ["--collect"]:
        counts = Counts()
        options = ["--collect-only", "-qq", "-n", "0", "-m", "not full", "-p", "no:cacheprovider", str(ROOT / "tests")]
        if code := pytest.main(options, plugins=[counts]):
            return int(code)
        rows = [(file, n, n + counts[file, False]) for (file, slow), n in sorted(counts.items()) if slow]
        print("\n\n" + json.dumps(rows))
        return 0
    PAGE.write_text(with_table(PAGE.read_text(), table(collect())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
