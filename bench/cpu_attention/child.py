"""One system in a process of its own, told by lines of JSON what to do.

Peers' threads and settings must not meet.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any

import numpy as np

from bench.cpu_attention.problems import Problem, arrays
from bench.cpu_attention.systems import SYSTEMS
from pagedkv.spec.dtypes import bfloat16_to_float32

LEAST_S, FEWEST_CALLS = 0.25, 5  # of a round


def as_floats(result: Any, problem: Problem) -> np.ndarray:
    """A result as float32, whatever kept it."""
    if problem.dtype == "bfloat16" and not isinstance(result, np.ndarray):
        return np.asarray(result.float().numpy())
    found = np.asarray(result)
    return bfloat16_to_float32(found) if found.dtype == np.uint16 else found.astype(np.float32)


def main() -> None:
    """Answers every line with one."""
    name, threads = sys.argv[1], int(sys.argv[2])
    system, call, problem = SYSTEMS[name][1](), None, None
    turn = 0
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "prepare":
            call, turn = None, 0
            problem = Problem(**order["problem"])
            if not system.takes(problem):
                answer: Any = None
            else:
                given = arrays(problem)
                call = system.prepare(problem, given, threads)
                answer = as_floats(call(0), problem).ravel()[:4096:7].tolist()
        else:
            assert call is not None
            assert problem is not None
            times: list[float] = []
            began = time.perf_counter()
            while len(times) < FEWEST_CALLS or time.perf_counter() - began < LEAST_S:
                start = time.perf_counter()
                call(turn % problem.layers)
                times.append(time.perf_counter() - start)
                turn += 1
            answer = median(times)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
