"""The kernels' own threads: how many, who shares them, and what a fork leaves of them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagedkv import cpu
from pagedkv.cpu import _attend
from pagedkv.errors import InvalidArgument, WrongType
from tests.cpu.batches import batch


def run(script: str, **environment: str) -> str:
    """A process of its own, and what it printed."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_number_of_threads_can_be_set(threads):
    cpu.set_num_threads(3)
    assert cpu.num_threads() == 3


NO_NUMBERS = [(0, InvalidArgument), (257, InvalidArgument), ("2", WrongType), (True, WrongType)]


@pytest.mark.parametrize(("number", "kind"), NO_NUMBERS)
def test_a_number_of_threads_that_makes_no_sense_is_refused(threads, number, kind):
    before = cpu.num_threads()
    with pytest.raises(kind, match="number of threads"):
        cpu.set_num_threads(number)
    assert cpu.num_threads() == before


def test_instructions_that_are_not_here_are_refused():
    before = cpu.isa()
    with pytest.raises(InvalidArgument, match="portable"):
        cpu.set_isa("sse9")
    assert cpu.isa() == before


def test_the_environment_says_how_many_threads_and_which_instructions():
    script = "from pagedkv import cpu; print(cpu.num_threads(), cpu.isa())"
    assert run(script, PAGEDKV_NUM_THREADS="5", PAGEDKV_CPU_ISA="portable") == "5 portable"


@pytest.mark.parametrize("name", ["PAGEDKV_NUM_THREADS", "PAGEDKV_CPU_ISA"])
def test_an_environment_that_makes_no_sense_is_an_error_that_names_it(name):
    script = """
        from pagedkv import cpu
        from pagedkv.errors import InvalidArgument
        try:
            cpu.num_threads(), cpu.isa()
        except InvalidArgument as error:
            print(error)
    """
    said = run(script, **{name: "many"})
    assert name in said
    assert "many" in said


def test_the_best_instructions_of_this_cpu_are_the_default():
    assert run("from pagedkv import cpu; print(cpu.isa())", PAGEDKV_CPU_ISA="") == _attend.isas()[0]


def test_many_callers_at_once_all_get_their_own_results(threads):
    cpu.set_num_threads(4)
    batches = [batch((700, 40 + seed, 1500), (1, 9, 1), heads=4, dim=64, seed=seed) for seed in range(6)]
    right = [b.attend(threads=1)[0] for b in batches]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(20):
            for found, expected in zip(pool.map(lambda b: b.attend()[0], batches), right):
                np.testing.assert_array_equal(found, expected)


def test_more_and_fewer_threads_from_call_to_call(threads):
    b = batch((4000,), heads=4, dim=64)
    right = b.attend(threads=1)[0]
    for number in (2, 9, 1, 3, 16, 2) * 5:
        np.testing.assert_array_equal(b.attend(threads=number)[0], right)


def test_a_forked_child_computes_with_threads_of_its_own():
    script = """
        import os, signal, warnings
        import numpy as np
        from pagedkv import cpu
        rng = np.random.default_rng(0)
        k, v = (rng.standard_normal((200, 16, 4, 64)).astype(np.float32) for _ in range(2))
        q = rng.standard_normal((1, 8, 64)).astype(np.float32)
        tables, lens = np.arange(200, dtype=np.int32)[None], np.array([3200], np.int32)
        attend = lambda: cpu.attend(q, k, v, lens, block_tables=tables, threads=3)
        right = attend()
        warnings.simplefilter("ignore")
        child = os.fork()
        if not child:
            signal.alarm(60)
            os._exit(0 if all(np.array_equal(attend(), right) for _ in range(50)) else 1)
        _, status = os.waitpid(child, 0)
        assert np.array_equal(attend(), right)
        print(status)
    """
    assert run(script) == "0"


def test_a_child_that_is_forked_while_other_threads_attend_computes_all_the_same():
    script = """
        import os, signal, threading, warnings
        import numpy as np
        from pagedkv import cpu
        k = np.ones((4, 16, 1, 16), np.float32)
        q, tables, lens = np.ones((1, 1, 16), np.float32), np.arange(4, dtype=np.int32)[None], np.array([64], np.int32)
        attend = lambda: cpu.attend(q, k, k, lens, block_tables=tables)
        over = threading.Event()
        def work():
            while not over.is_set():
                attend()
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        warnings.simplefilter("ignore")
        hung = 0
        for _ in range(150):
            child = os.fork()
            if not child:
                signal.alarm(20)
                attend()
                os._exit(0)
            hung += os.waitpid(child, 0)[1] != 0
        over.set()
        print(hung)
    """
    assert run(script) == "0"
