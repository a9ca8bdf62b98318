"""Nonsense for any argument is refused by pagedkv's own errors, and changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.attention import CascadeAttention, PagedAttention
from pagedkv.attention.places import Device


class Tensor:
    """An array of a library that pagedkv does not know."""

    shape, dtype, device = (2, 4, 32), "float16", "cuda"


POOL = np.ones((1, 16, 2, 32), np.float16)
NONSENSE: list[Any] = [
    None, True, -1, 1.5, float("nan"), 1e300, 10**400, "x", b"x", [], [[0]], [1, 2], ("x", "y"), {}, object(), Tensor(),
    np.float32("nan"), np.bool_(True), np.array(3), np.zeros(0), np.zeros((1, 1), np.int64), np.array([[None]]),
    np.zeros(4, "V3"), np.array(["x"]), np.zeros((2, 4, 32), np.dtype(np.float16).newbyteorder()),
    np.zeros((2, 4, 64), np.float16)[:, :, ::2], (POOL,) * 3, [[POOL] * 2] * 3, POOL[None], np.array([3, -5], np.int32),
]  # fmt: skip
SIZES: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32}
Cases = Iterable[tuple[str, dict[str, Any]]]


def each(given: dict[str, Any]) -> Cases:
    """Every argument in turn is nonsense."""
    return ((name, {**given, name: value}) for name in given for value in NONSENSE)


def within(given: dict[str, Any], name: str, path: Sequence[int]) -> Cases:
    """An element of a nested argument is nonsense."""

    def put(nested: Any, path: Sequence[int], value: Any) -> Any:
        if not path:
            return value
        return [put(one, path[1:], value) if at == path[0] else one for at, one in enumerate(nested)]

    return ((f"{name}{list(path)}", {**given, name: put(given[name], path, value)}) for value in NONSENSE)


def accepted(call: Callable[..., Any], cases: Cases, state: Callable[[], Any] = lambda: None) -> set[str]:
    """The arguments that take some of the nonsense; a refusal must leave the state as it is."""
    found = set()
    for name, arguments in cases:
        before = state()
        try:
            call(**arguments)
        except pk.errors.PagedKVError as error:
            refused = str(error)
        except Exception as raw:
            raise AssertionError(f"{name} = {arguments!r}") from raw
        else:
            found.add(name)
            continue
        assert len(refused) > 20, name
        assert state() == before, name
    return found


def steps(device: Device) -> Any:
    """Instructions that the device has executed."""
    return getattr(device, "steps", 0)


def test_nothing_is_made_of_nonsense() -> None:
    given = {
        name: None if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in inspect.signature(PagedAttention).parameters.items()
    } | {**SIZES, "max_sequences": 2, "softmax_scale": 0.1, "device": "cpu"}
    optional = {"head_dim_v", "kv_dtype", "max_tokens", "softmax_scale", "window", "soft_cap", "alibi_slopes"}
    optional |= {"sinks", "kv_alignment", "causal", "custom_mask", "debug", "v_in_k", "positions"}
    assert accepted(PagedAttention, each(given)) == optional
    levels: dict[str, Any] = {"block_sizes": [16, 16], "max_groups": [1, 2], "device": "cpu", **SIZES}
    more = {"max_q_len": 1, "causal": True, "sinks": None, "custom_mask": False, "kernel": "auto", "window": None}
    more |= {"scale_mode": "none"}
    cases = [*each({**levels, **more})]
    cases += [case for name in ("block_sizes", "max_groups") for at in (0, 1) for case in within(levels, name, [at])]
    makes_sense = {"block_sizes", "max_groups", "causal", "sinks", "custom_mask", "window"}  # [1, 2], True and None
    assert accepted(CascadeAttention, cases) == makes_sense
    for name in ("block_size", "max_sequences", "max_tokens", "positions"):
        with pytest.raises(pk.errors.InvalidArgument, match=f"{name} must not be given"):
            CascadeAttention(**levels, **{name: None})
    with pytest.raises(pk.errors.InvalidArgument, match="takes no scales"):
        CascadeAttention(**levels, kv_dtype="int8", scale_mode="tensor")


def check_paged(device: Device, kernel: str) -> None:
    attention = PagedAttention(**SIZES, max_sequences=2, device=device, kernel=kernel)
    batch = {
        "block_tables": np.zeros((2, 1), np.int32), "seq_lens": np.array([3, 5], np.int32),
        "q_indptr": np.arange(3, dtype=np.int32), "kv_indptr": None, "mask": None, "mask_indptr": None,
        "q_positions": None, "position_spans": None, "num_blocks": 1,
    }  # fmt: skip
    optional = {"q_indptr", "kv_indptr", "mask", "mask_indptr", "q_positions", "position_spans", "num_blocks"}
    assert accepted(attention.plan, each(batch), lambda: (id(attention._planned), steps(device))) == optional
    attention.plan(**batch)
    out, lse = np.full((2, 4, 32), 7, np.float16), np.full((2, 4), 7, np.float32)
    layer = {
        "q": np.ones((2, 4, 32), np.float16), "k_cache": POOL, "v_cache": POOL, "out": out, "lse": lse,
        "k_scale": None, "v_scale": None,
    }  # fmt: skip
    found = accepted(attention.run, each(layer), lambda: (out.tobytes(), lse.tobytes(), steps(device)))
    assert found == {"out", "lse", "k_scale", "v_scale"}


def check_cascade(device: Device, kernel: str) -> None:
    cascade = CascadeAttention([16, 16], max_groups=[1, 2], max_q_len=2, device=device, kernel=kernel, **SIZES)
    table, indptr = np.zeros((2, 1), np.int32), np.arange(3, dtype=np.int32)
    levels = [
        [table[:1], np.array([3], np.int32), np.array([0, 2], np.int32)], [table, np.array([3, 5], np.int32), indptr]
    ]  # fmt: skip
    batch = {"levels": levels, "mask": None, "mask_indptr": None}
    cases = [*each(batch), *(case for level in (0, 1) for case in within(batch, "levels", [level]))]
    cases += [case for level in (0, 1) for array in range(3) for case in within(batch, "levels", [level, array])]

    def planned() -> Any:
        return [id(level._planned) for level in cascade.levels], cascade._planned, steps(device)

    assert accepted(cascade.plan, cases, planned) == {"mask", "mask_indptr", "levels[1, 2]"}
    cascade.plan(levels)
    out, lse = np.full((2, 4, 32), 7, np.float16), np.full((2, 4), 7, np.float32)
    caches = [[POOL, POOL], [POOL, POOL]]
    layer = {"q": np.ones((2, 4, 32), np.float16), "caches": caches, "out": out, "lse": lse}
    cascade._parts[...] = 7
    cases = [case for level in (0, 1) for array in (0, 1) for case in within(layer, "caches", [level, array])]
    cases += [*(case for level in (0, 1) for case in within(layer, "caches", [level])), *each(layer)]
    written = (out, lse, cascade._parts)
    found = accepted(cascade.run, cases, lambda: ([array.tobytes() for array in written], steps(device)))
    assert found == {"out", "lse"}


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_nonsense_is_refused_and_nothing_is_written(kernel: str) -> None:
    check_paged("cpu", kernel)
    check_cascade("cpu", kernel)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["out", "lse"])
def test_a_result_is_not_written_into_memory_that_is_read_only(kernel: str, name: str) -> None:
    attention = PagedAttention(**SIZES, max_sequences=2, device="cpu", kernel=kernel)
    attention.plan(np.zeros((2, 1), np.int32), np.array([3, 5], np.int32))
    results = {"out": np.full((2, 4, 32), 7, np.float16), "lse": np.full((2, 4), 7, np.float32)}
    results[name].flags.writeable = False
    with pytest.raises(pk.errors.LayoutMismatch, match=f"{name} is read-only"):
        attention.run(np.ones((2, 4, 32), np.float16), POOL, POOL, **results)
    assert all((array == 7).all() for array in results.values())


@pytest.mark.slow
def test_nonsense_is_refused_and_nothing_is_launched() -> None:
    from tests.ptxsim.backend import PtxsimBackend

    for kernel in ("decode_simt", "decode_mma"):
        check_paged(PtxsimBackend(), kernel)
        check_cascade(PtxsimBackend(), kernel)
