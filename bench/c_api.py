"""``python -m bench.c_api``: calls of ``pagedkv.h`` beside the core's own and Python's.

Needs a C compiler. A small library loops over the calls in C; all cases take turns in each round, on the CPU clock of
the calling thread.

``allocate and free 16 blocks``: through the header; the core's ``pool_alloc`` and ``pool_free`` by address, each under
an uncontended mutex as every caller of the core takes it, and without one; ``BlockPool.alloc`` and ``free``.

``decode step of 256 rows``: append, step and commit, through the header and in Python.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv
from bench.core import workloads
from bench.core.pagedkv_runner import Cache
from bench.timing import CPU, environment, gc_off, print_table, write_results
from pagedkv import c_api
from pagedkv.core import FUNCTIONS, BlockPool, BlockTable

BLOCKS, ROWS = 16, 256
COLUMNS = ("work", "by", "value", "unit", "ratio")
LOOPS = """
#include <pagedkv.h>
#include <pthread.h>

typedef int (*take)(intptr_t pool, int32_t n, intptr_t ids);
typedef int (*give)(intptr_t pool, intptr_t ids, int32_t n, intptr_t bad);

int through_header(const pagedkv_api *kv, pagedkv_pool *pool, int32_t n, int32_t rounds) {
    int32_t ids[256];
    for (int32_t i = 0; i < rounds; i++)
        if (kv->pool_alloc(pool, n, ids) != 0 || kv->pool_free(pool, ids, n, NULL) != 0) return -1;
    return 0;
}

int by_address(intptr_t alloc, intptr_t release, intptr_t pool, int32_t n, int32_t rounds, int locked) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    int32_t ids[256], bad;
    for (int32_t i = 0; i < rounds; i++) {
        if (locked) pthread_mutex_lock(&mutex);
        if (((take)alloc)(pool, n, (intptr_t)ids) != 0) return -1;
        if (locked) pthread_mutex_unlock(&mutex);
        if (locked) pthread_mutex_lock(&mutex);
        if (((give)release)(pool, (intptr_t)ids, n, (intptr_t)&bad) != 0) return -1;
        if (locked) pthread_mutex_unlock(&mutex);
    }
    return 0;
}

int decode(const pagedkv_api *kv, pagedkv_table *table, const int64_t *rows, const int32_t *tokens, int32_t n,
           pagedkv_step *step, int32_t rounds) {
    int64_t committed;
    for (int32_t i = 0; i < rounds; i++)
        if (kv->table_append(table, rows, tokens, n, NULL) != 0
            || kv->table_step(table, rows, n, NULL, 0, step, NULL) != 0
            || kv->table_commit(table, rows, n, step->number, &committed, NULL) != 0) return -1;
    return 0;
}
"""


def loops(folder: str) -> ctypes.CDLL:
    """The library, compiled."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise SystemExit(f"this bench compiles C: there is no compiler {compiler}")
    (Path(folder) / "loops.c").write_text(LOOPS)
    command = [compiler, "-std=c99", "-O2", "-fPIC", "-shared", f"-I{pagedkv.get_include()}", "loops.c", "-pthread"]
    subprocess.run([*command, "-o", "loops.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(Path(folder) / "loops.so"))


class Rows:
    """A table of decoding rows, and the arrays of their steps."""

    def __init__(self) -> None:
        self.table = BlockTable(Cache(ROWS * (4096 // workloads.BLOCK_SIZE)).placement, ROWS)
        handles = [self.table.open(workloads.decode_prompt(i))[0] for i in range(ROWS)]
        self.rows, self.tokens = np.array(handles, np.int64), np.full(ROWS, 7, np.int32)
        self.table.commit(self.rows, self.table.step(self.rows).number)
        self.blocks = np.zeros((ROWS, 256), np.int32)
        self.words, self.slots = np.zeros((4, ROWS + 1), np.int32), np.zeros(ROWS, np.int64)
        self.step = np.zeros(1, c_api.struct("pagedkv_step"))
        self.step["block_tables"], self.step["tables_room"] = self.blocks.ctypes.data, self.blocks.size
        for field, array in zip(("seq_lens", "q_indptr", "positions", "tokens"), self.words, strict=True):
            self.step[field] = array.ctypes.data
        self.step["slot_mapping"], self.step["tokens_room"] = self.slots.ctypes.data, ROWS

    def python(self, rounds: int) -> None:
        """Decode by Python's calls."""
        for _ in range(rounds):
            self.table.append(self.rows, self.tokens)
            self.table.commit(self.rows, self.table.step(self.rows).number)

    def native(self, library: ctypes.CDLL, rounds: int) -> int:
        """Decode by the loop in C."""
        addresses = (self.rows.ctypes.data, self.tokens.ctypes.data)
        pointers = (ctypes.c_void_p(address) for address in (c_api.ADDRESS, c_api.handle_of(self.table), *addresses))
        return int(library.decode(*pointers, ROWS, ctypes.c_void_p(self.step.ctypes.data), rounds))


def in_turns(calls: dict[str, Callable[[], object]], rounds: int, inner: int) -> dict[str, list[float]]:
    """Seconds by round of one of a call's `inner` repetitions, after a first round."""
    times: dict[str, list[float]] = {case: [] for case in calls}
    with gc_off():
        for _ in range(rounds + 1):
            for case, call in calls.items():
                begin = CPU()
                if call() not in (None, 0):
                    raise RuntimeError(f"{case}: a call was refused")
                times[case].append((CPU() - begin) / inner)
    return {case: taken[1:] for case, taken in times.items()}


def measured(rounds: int) -> list[dict[str, Any]]:
    """All rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        library, pool = loops(folder), BlockPool(100_000)
        kv, handle = ctypes.c_void_p(c_api.ADDRESS), ctypes.c_void_p(c_api.handle_of(pool))
        own = [ctypes.c_void_p(address) for address in (FUNCTIONS["pool_alloc"][0], FUNCTIONS["pool_free"][0])]
        inner = 5000

        def core(locked: int) -> int:
            return int(library.by_address(*own, ctypes.c_void_p(pool.address), BLOCKS, inner, locked))

        def python() -> None:
            for _ in range(inner):
                pool.free(pool.alloc(BLOCKS))

        blocks: dict[str, Callable[[], object]] = {
            "the core's functions, a mutex each": lambda: core(1),
            "pagedkv.h": lambda: library.through_header(kv, handle, BLOCKS, inner),
            "the core's functions, no mutex": lambda: core(0),
            "Python": python,
        }
        found = table(f"allocate and free {BLOCKS} blocks", in_turns(blocks, rounds, inner), "ns", 1e9)
        by_c, by_python, steps = Rows(), Rows(), 20
        decoding: dict[str, Callable[[], object]] = {
            "Python": lambda: by_python.python(steps),
            "pagedkv.h": lambda: by_c.native(library, steps),
        }
        return found + table(f"decode step of {ROWS} rows", in_turns(decoding, rounds, steps), "us", 1e6)


def table(work: str, times: dict[str, list[float]], unit: str, scale: float) -> list[dict[str, Any]]:
    """Medians, and their ratio to the first case's."""
    medians = {case: statistics.median(taken) for case, taken in times.items()}
    first = next(iter(medians.values()))
    return [
        {"work": work, "by": case, "value": median * scale, "unit": unit, "ratio": median / first}
        for case, median in medians.items()
    ]


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.c_api", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, not how fast is it")
    arguments = parser.parse_args()
    env = environment()
    found = measured(3 if arguments.quick else 60)
    print_table(found, COLUMNS, title="The C interface")
    if arguments.json:
        write_results(arguments.json, "c_api", found, env=env)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
