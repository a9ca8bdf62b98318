"""The readers-writer gate of a tier counts callers in and out, also where allocations fail."""

from __future__ import annotations

import threading

import pytest

from pagedkv.errors import ClosedError
from pagedkv.tiers.disk._rw_gate import ReadersWriterGate

testcapi = pytest.importorskip("_testcapi", reason="this Python has no _testcapi, which makes allocations fail")


@pytest.mark.parametrize("alone", [False, True])
def test_a_caller_leaves_also_where_there_is_no_memory(alone: bool) -> None:
    gate = ReadersWriterGate("it")
    visit = gate.alone() if alone else gate.inside()
    visit.__enter__()
    leave, no_memory, memory = visit.__exit__, testcapi.set_nomemory, testcapi.remove_mem_hooks
    no_memory(0, 0)  # every allocation fails from here
    try:
        leave(None, None, None)
    finally:
        memory()
    assert gate.shut()
    assert gate.is_empty(0.0, None)
    with pytest.raises(ClosedError, match="it is closed"), gate.inside():
        pass


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_a_caller_that_is_refused_without_memory_leaves_the_gate_as_it_was(alone: bool, calls: int) -> None:
    """The refusal is an exception, and what is made for that may fail, too."""
    gate = ReadersWriterGate("it")
    gate.shut()
    no_memory, memory = testcapi.set_nomemory, testcapi.remove_mem_hooks
    for first in range(40):
        visit = gate.alone() if alone else gate.inside()
        enter = visit.__enter__
        no_memory(first, first + calls)
        try:
            enter()
        except (MemoryError, ClosedError):
            pass
        finally:
            memory()
    waiting = threading.Thread(target=gate.is_empty, args=(0.0, None))
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive(), "its mutex is taken"


@pytest.mark.parametrize("alone", [False, True])
def test_every_allocation_of_a_visit_may_fail(alone: bool) -> None:
    gate = ReadersWriterGate("it")
    no_memory, memory = testcapi.set_nomemory, testcapi.remove_mem_hooks

    def visit() -> None:
        with gate.alone() if alone else gate.inside():
            pass

    visit()
    for first in range(100):
        failed = False
        no_memory(first, first + 1)
        try:
            visit()
        except MemoryError:
            failed = True
        finally:
            memory()
        visit()
        if not failed and first > 5:
            break
    assert gate.shut()
    assert gate.is_empty(0.0, None)
