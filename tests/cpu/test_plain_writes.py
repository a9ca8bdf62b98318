"""The fast check of a write passes the usual call and none that the full check refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.attention import write_kv
from pagedkv.cpu import _write
from pagedkv.errors import PagedKVError

Call = dict[str, Any]


def usual() -> Call:
    """Three tokens, and caches as a layer has them: views of one arena."""
    arena = np.zeros((4, 2, 8, 2, 16), np.float32)
    values = np.random.default_rng(0).standard_normal((2, 3, 2, 16)).astype(np.float32)
    slots, own = np.array([5, -1, 31]), np.zeros((4, 8, 2, 16), np.float32)
    return {"own": own, "k": values[0], "v": values[1], "k_cache": arena[:, 0], "v_cache": arena[:, 1], "slots": slots}


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


UNUSUAL: dict[str, Callable[[Call], Any]] = {
    "a slot beyond the cache": lambda call: {"slots": np.array([5, 0, 32])},
    "a slot of int32": lambda call: {"slots": call["slots"].astype(np.int32)},
    "slots as a list": lambda call: {"slots": call["slots"].tolist()},
    "too few slots": lambda call: {"slots": call["slots"][:2]},
    "every second slot of an array": lambda call: {"slots": np.arange(6)[::2]},
    "slots in another byte order": lambda call: {"slots": call["slots"].astype(">i8")},
    "slots in two dimensions": lambda call: {"slots": call["slots"][:, None]},
    "a token fewer in v": lambda call: {"v": call["v"][:2].copy()},
    "another number of heads": lambda call: {"k": np.zeros((3, 1, 16), np.float32)},
    "another head dim": lambda call: {"v": np.zeros((3, 2, 8), np.float32)},
    "k in two dimensions": lambda call: {"k": call["k"].reshape(3, 32)},
    "k with the axes turned": lambda call: {"k": np.zeros((3, 16, 2), np.float32).swapaxes(1, 2)},
    "k in another byte order": lambda call: {"k": call["k"].astype(">f4")},
    "k in the cache itself": lambda call: {"k": call["k_cache"][0, :3]},
    "v in the memory of K's cache": lambda call: {"k_cache": call["own"], "v": call["own"][1, 2:5]},
    "a cache that is read-only": lambda call: {"v_cache": read_only(call["v_cache"])},
    "caches of two types": lambda call: {"v_cache": np.zeros((4, 8, 2, 16), np.float16)},
    "caches of two sizes": lambda call: {"v_cache": np.zeros((5, 8, 2, 16), np.float32)},
    "a cache in three dimensions": lambda call: {"k_cache": call["k_cache"][0]},
    "a cache in another byte order": lambda call: {"k_cache": np.zeros((4, 8, 2, 16), ">f4")},
    "a cache that runs backwards": lambda call: {"k_cache": call["k_cache"][::-1]},
    "a cache of an array's subclass": lambda call: {"k_cache": np.ma.masked_array(np.zeros((4, 8, 2, 16), np.float32))},
}


def written(call: Call) -> tuple[str, bytes, bytes]:
    """What a call does: its error's type, and the caches' bytes after it."""
    try:
        write_kv(call["k"], call["v"], call["k_cache"], call["v_cache"], call["slots"])
        told = ""
    except PagedKVError as error:
        told = type(error).__name__
    return told, np.asarray(call["k_cache"]).tobytes(), np.asarray(call["v_cache"]).tobytes()


def is_plain(call: Call) -> bool:
    return _write.plainly_fits(call["k"], call["v"], call["k_cache"], call["v_cache"], call["slots"])


def test_the_usual_call_takes_the_fast_check() -> None:
    assert is_plain(usual())


@pytest.mark.parametrize("what", UNUSUAL)
def test_anything_unusual_takes_the_full_check(what: str) -> None:
    call = usual()
    call |= UNUSUAL[what](call)
    assert not is_plain(call)


def test_calls_of_any_shape_do_the_same_by_both_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call twice: as it comes, and with the full check alone. There are both kinds."""
    random, plain = np.random.default_rng(7), 0

    def call() -> Call:
        made = usual()
        for change in [UNUSUAL[what](made) for what in chosen]:
            made |= change
        return made

    for _ in range(600):
        chosen = [str(what) for what in random.choice(list(UNUSUAL), random.integers(0, 3), replace=False)]
        plain += is_plain(call())
        quick = written(call())
        with monkeypatch.context() as patched:
            patched.setattr(_write, "plainly_fits", lambda *_: False)
            assert written(call()) == quick, chosen
    assert 100 < plain < 500


def test_a_step_of_the_cache_writes_by_the_fast_check(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    real = _write.plainly_fits
    monkeypatch.setattr(_write, "plainly_fits", lambda *arrays: told.append(real(*arrays)) or told[-1])
    for dtype in ("float32", "float16", "bfloat16"):
        for layout in ("NHD", "HND"):
            spec = pk.KVSpec(2, 2, 8, dtype, 4, layout=layout)
            with pk.KVCache(spec, pk.Blocks(8)) as cache, cache.step([cache.sequence([1, 2, 3, 4, 5])]) as step:
                for layer in range(2):
                    step.write(layer, np.ones((5, 2, 8), np.float32), np.ones((5, 2, 8), spec.np_dtype))
    assert told == [True] * 12
