"""Who is inside a tier: counted in and out, whatever there is memory for."""

from __future__ import annotations

import pytest

from pagedkv.errors import ClosedError
from pagedkv.tiers.disk._entrance import Entrance

testcapi = pytest.importorskip("_testcapi", reason="this Python has no _testcapi, which makes allocations fail")


@pytest.mark.parametrize("alone", [False, True])
def test_a_caller_leaves_also_where_there_is_no_memory(alone: bool) -> None:
    entrance = Entrance("it")
    visit = entrance.alone() if alone else entrance.inside()
    visit.__enter__()
    leave, no_memory, memory = visit.__exit__, testcapi.set_nomemory, testcapi.remove_mem_hooks
    no_memory(0, 0)  # every allocation fails from here
    try:
        leave(None, None, None)
    finally:
        memory()
    assert entrance.shut()
    assert entrance.is_empty(0.0, None)
    with pytest.raises(ClosedError, match="it is closed"), entrance.inside():
        pass
