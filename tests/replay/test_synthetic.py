"""The generated traces.

They are the same every time and shaped like the real ones; nonsense is refused.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay import References, Trace, load_trace


@pytest.mark.parametrize("name", ["chat", "agent"])
def test_the_same_text_gives_the_same_trace(name: str) -> None:
    a, b = load_trace(f"synthetic:{name}:7:300"), load_trace(f"synthetic:{name}:7:300")
    assert a.sha256 == b.sha256
    assert np.array_equal(a.paths, b.paths)
    assert load_trace(f"synthetic:{name}:8:300").sha256 != a.sha256
    assert a.num_requests == 300
    assert (np.diff(a.t_ms) >= 0).all()


@pytest.mark.parametrize("name", ["chat", "agent"])
def test_every_id_has_one_parent_and_one_depth(name: str) -> None:
    trace = load_trace(f"synthetic:{name}:1:400")
    for i in range(trace.num_requests):
        path = trace.path(i)
        if len(path):
            assert trace.parents[path].tolist() == [-1, *path[:-1].tolist()]
            assert trace.depths[path].tolist() == list(range(len(path)))


def rates(trace: Trace) -> tuple[float, float]:
    references = References(trace)
    lru = references.total("lru", trace.num_unique // 20)
    return lru / trace.num_accesses, references.total("infinite", 1) / trace.num_accesses


def test_chat_has_the_statistics_of_the_real_conversations() -> None:
    trace = load_trace("synthetic:chat:0:8000")
    lru, infinite = rates(trace)  # real: .14 and .35
    assert 0.10 < lru < 0.20
    assert 0.25 < infinite < 0.40
    assert 20 < trace.num_accesses / trace.num_requests < 30  # real: 24.8
    assert 5000 < np.median(trace.input_tokens) < 9000  # real: 7,284


def test_agent_has_the_statistics_of_the_real_sessions() -> None:
    trace = load_trace("synthetic:agent:0:20000")
    lru, infinite = rates(trace)  # real: .84 and .96
    assert 0.70 < lru < 0.90
    assert 0.94 < infinite < 0.98
    assert 150 < trace.num_accesses / trace.num_requests < 300  # real: 227


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "chat:",
        "chat:x",
        "chat:-1",
        "chat:1:0",
        "chat:1:9999999",
        "chat:1:2:3",
        "chat:99999999999999999999",
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="synthetic"):
        load_trace(f"synthetic:{text}")
