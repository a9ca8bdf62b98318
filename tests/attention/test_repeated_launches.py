"""A launch is worked out once per form, then repeated with the addresses of each layer.

Another form makes another launch; arrays that do not fit are refused as they are the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pagedkv as pk
from pagedkv.attention import PagedAttention
from pagedkv.attention.places import Device
from pagedkv.kernels.attention import AttentionPlan
from tests.attention.noting import Noting, aligned

HEADS, GROUP, DIM, BLOCK, SEQS = 2, 4, 64, 16, 3
KERNELS = ("decode_simt", "decode_mma", "decode_tma", "prefill_mma", "prefill_wgmma")
Arrays = dict[str, Any]


def layer(blocks: int = 5, dtype: Any = np.float16) -> Arrays:
    """Arrays of one call."""
    rows = (SEQS, HEADS * GROUP, DIM)
    pools = {name: aligned((blocks, BLOCK, HEADS, DIM), dtype) for name in ("k_cache", "v_cache")}
    return {"q": aligned(rows, dtype), **pools, "out": aligned(rows, dtype)}


def batch(width: int = 4) -> Arrays:
    return {"block_tables": aligned((SEQS, width), np.int32), "seq_lens": aligned((SEQS,), np.int32)}


def made(backend: Noting, **options: Any) -> PagedAttention:
    return PagedAttention(
        num_qo_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM, block_size=BLOCK, max_sequences=8,
        device=backend, **options,
    )  # fmt: skip


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each launch that is worked out."""
    counted: list[int] = []
    real = AttentionPlan.layer_launch

    def counting(self: AttentionPlan, *arguments: Any, **options: Any) -> Any:
        counted.append(1)
        return real(self, *arguments, **options)

    monkeypatch.setattr(AttentionPlan, "layer_launch", counting)
    return counted


@pytest.mark.parametrize("kernel", KERNELS)
def test_layers_of_one_form_are_worked_out_once_and_get_their_own_addresses(kernel: str, worked_out: list[int]) -> None:
    backend, layers, steps = Noting(), [layer() for _ in range(4)], batch()
    attention, fresh = made(backend, kernel=kernel), made(backend, kernel=kernel)
    fresh._plan = attention._plan  # one workspace: the structs must be the same
    for _ in range(2):
        attention.plan(**steps)
        for arrays in layers:
            attention.run(**arrays)
    assert len(worked_out) == 1
    repeated = [launch for launch in backend.launches if launch.kernel == kernel]
    backend.launches.clear()
    for arrays in layers:
        fresh.plan(**steps)
        assert fresh._planned is not None
        fresh._planned.launches.clear()
        fresh.run(**arrays)
    alone = [launch for launch in backend.launches if launch.kernel == kernel]
    assert len(repeated) == 2 * len(alone) == 8
    for ours, theirs in zip(repeated, alone * 2, strict=True):
        assert (ours.grid, ours.params.tobytes()) == (theirs.grid, theirs.params.tobytes())
    assert len({launch.params.tobytes() for launch in alone}) == 4


def lse(rows: int = SEQS) -> Any:
    return aligned((rows, HEADS * GROUP), np.float32)


def other_strides(arrays: Arrays) -> Arrays:
    both = aligned((5, 2, BLOCK, HEADS, DIM), np.float16)
    return {**arrays, "k_cache": both[:, 0], "v_cache": both[:, 1]}


FITTING: dict[str, Callable[[Arrays], Arrays]] = {
    "more blocks": lambda arrays: {**arrays, **{name: layer(7)[name] for name in ("k_cache", "v_cache")}},
    "strides of K and V": other_strides,
    "strides of q": lambda arrays: {**arrays, "q": aligned((SEQS, 2 * HEADS * GROUP, DIM), np.float16)[:, ::2]},
    "strides of out": lambda arrays: {**arrays, "out": aligned((SEQS, 2 * HEADS * GROUP, DIM), np.float16)[:, ::2]},
    "with lse": lambda arrays: {**arrays, "lse": lse()},
    "without out": lambda arrays: {**arrays, "out": None},
}


@pytest.mark.parametrize("change", FITTING)
def test_another_form_that_fits_is_worked_out_anew(change: str, worked_out: list[int]) -> None:
    backend, first = Noting(), layer()
    attention = made(backend, kernel="decode_tma")
    attention.plan(**batch())
    attention.run(**first)
    second = FITTING[change](first)
    attention.run(**second)
    assert len(worked_out) == 2
    attention.run(**first)
    attention.run(**second)
    assert len(worked_out) == 2
    if change != "without out":
        last = backend.launches[-1].params["attention"][0]
        assert last["q_head_stride"] == second["q"].strides[1] // 2
        assert last["o_head_stride"] == second["out"].strides[1] // 2
        assert last["kv"]["k_block_stride"] == second["k_cache"].strides[0] // 2
        assert last["kv"]["num_blocks"] == len(second["k_cache"])
        assert bool(last["lse"]) == ("lse" in second)


UNFIT: dict[str, tuple[Callable[[Arrays], Arrays], type[Exception]]] = {
    "queries": (lambda a: {**a, "q": a["q"][:2]}, pk.errors.LayoutMismatch),
    "heads": (lambda a: {**a, "q": a["q"][:, :4]}, pk.errors.LayoutMismatch),
    "dtype of q": (lambda a: {**a, "q": a["q"].view(ml_dtypes.bfloat16)}, pk.errors.WrongType),
    "dtype of V": (lambda a: {**a, "v_cache": a["v_cache"].view(ml_dtypes.bfloat16)}, pk.errors.WrongType),
    "alignment of K": (lambda a: {**a, "k_cache": aligned((5, BLOCK, HEADS, DIM), np.float16, 8)}, pk.LayoutMismatch),
    "columns of K": (lambda a: {**a, "k_cache": np.swapaxes(a["k_cache"], 1, 2)}, pk.errors.LayoutMismatch),
    "rows of out": (lambda a: {**a, "out": a["out"][:2]}, pk.errors.LayoutMismatch),
    "rows of lse": (lambda a: {**a, "lse": lse(2)}, pk.errors.LayoutMismatch),
    "a scale": (lambda a: {**a, "k_scale": aligned((1,), np.float32)}, pk.errors.InvalidArgument),
    "no array": (lambda a: {**a, "v_cache": None}, pk.errors.WrongType),
}


@pytest.mark.parametrize("change", UNFIT)
def test_another_form_that_does_not_fit_is_refused_as_the_first_time(change: str) -> None:
    backend, first = Noting(), layer()
    attention = made(backend, kernel="decode_mma")
    attention.plan(**batch())
    attention.run(**first)
    before = len(backend.launches)
    make, error = UNFIT[change]
    for _ in range(2):
        with pytest.raises(error):
            attention.run(**make(first))
    assert len(backend.launches) == before


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_slopes_and_sinks_must_lie_on_the_device(name: str) -> None:
    backend = Noting()
    backend.name = "cupy"
    with pytest.raises(pk.errors.WrongType, match=f"{name} is in host memory"):
        made(backend, kernel="decode_mma", **{name: np.ones(HEADS * GROUP, np.float32)})


@pytest.mark.parametrize("kernel", KERNELS[:-1])  # prefill_wgmma has no sinks
def test_the_sinks_of_each_layer_go_to_its_launch(kernel: str, worked_out: list[int]) -> None:
    backend, arrays = Noting(), layer()
    attention = made(backend, kernel=kernel, sinks=True)
    attention.plan(**batch())
    given = [aligned((HEADS * GROUP,), np.float32) for _ in range(3)]
    for sinks in given:
        attention.run(**arrays, sinks=sinks)
    assert len(worked_out) == 1
    structs = [launch.params[0] for launch in backend.launches if launch.kernel == kernel]
    found = [(struct["attention"] if kernel == "decode_tma" else struct)["sinks"] for struct in structs]
    assert found == [sinks.ctypes.data for sinks in given]


class OnDevice(np.ndarray):
    """An array that says it lies on a device."""

    __cuda_array_interface__: dict[str, Any] = {}


def test_sinks_of_a_layer_must_lie_on_the_device() -> None:
    backend, arrays = Noting(), {name: array.view(OnDevice) for name, array in layer().items()}
    attention = made(backend, kernel="decode_mma", sinks=True)
    attention.plan(**batch())
    backend.name = "cupy"
    with pytest.raises(pk.errors.WrongType, match="sinks is in host memory"):
        attention.run(**arrays, sinks=np.ones(HEADS * GROUP, np.float32))
    assert not [launch for launch in backend.launches if launch.kernel == "decode_mma"]


def test_a_plan_over_the_same_arrays_keeps_the_launches_and_other_arrays_get_their_own(worked_out: list[int]) -> None:
    backend, arrays, first = Noting(), layer(), batch()
    attention = made(backend, kernel="decode_mma")
    for steps in (first, first, batch(), {**first, "block_tables": first["block_tables"][:, :2].copy()}):
        attention.plan(**steps)
        attention.run(**arrays)
        struct = backend.launches[-1].params[0]
        assert struct["seq_lens"] == steps["seq_lens"].ctypes.data
        assert struct["kv"]["block_tables"] == steps["block_tables"].ctypes.data
        assert struct["kv"]["table_stride"] == steps["block_tables"].shape[1]
    assert len(worked_out) == 3


def test_a_launch_worked_out_while_another_thread_plans_is_of_its_own_batch_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, arrays, first, second = Noting(), layer(), batch(), batch()
    attention = made(backend, kernel="decode_mma")
    attention.plan(**first)
    real = AttentionPlan.layer_launch

    def interrupted(self: AttentionPlan, *arguments: Any, **options: Any) -> Any:
        launch = real(self, *arguments, **options)
        monkeypatch.setattr(AttentionPlan, "layer_launch", real)
        attention.plan(**second)
        return launch

    monkeypatch.setattr(AttentionPlan, "layer_launch", interrupted)
    for steps in (first, second):
        attention.run(**arrays)
        assert backend.launches[-1].params[0]["seq_lens"] == steps["seq_lens"].ctypes.data


def test_a_plan_that_fails_leaves_the_launches_of_the_one_before() -> None:
    backend, arrays, first = Noting(), layer(), batch()
    attention = made(backend, kernel="decode_mma")
    attention.plan(**first)
    with pytest.raises(pk.errors.WrongType):
        attention.plan(first["block_tables"], first["seq_lens"].astype(np.int64))
    with pytest.raises(pk.errors.WrongType):
        attention.plan(first["block_tables"], [1, 2, 3])
    attention.run(**arrays)
    assert backend.launches[-1].params[0]["seq_lens"] == first["seq_lens"].ctypes.data


def test_each_attention_has_its_own_workspace_and_each_call_its_stream() -> None:
    backend, arrays, steps = Noting(), layer(), batch()
    found = []
    for attention in (made(backend, kernel="decode_mma"), made(backend, kernel="decode_mma")):
        attention.plan(**steps)
        for stream in (None, 7):
            attention.run(**arrays, stream=stream)
            found.append(backend.launches[-1])
    assert [launch.stream for launch in found] == [None, 7, None, 7]
    spaces = [launch.params[0]["schedule"]["partial_o"] for launch in found]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]


def test_a_launch_within_a_launch_has_a_struct_of_its_own() -> None:
    """As two threads that launch the same form at once."""
    backend, outer, inner = Noting(), layer(), layer()
    attention = made(backend, kernel="decode_tma")
    attention.plan(**batch())
    attention.run(**outer)
    expected = backend.launches[-1].params.tobytes()

    def nested() -> None:
        backend.during = lambda: None
        attention.run(**inner)

    backend.during = nested
    attention.run(**outer)
    assert backend.launches[-1].params.tobytes() == expected
    assert backend.launches[-2].params[0]["attention"]["q"] == inner["q"].ctypes.data


def test_a_launch_holds_no_array_of_a_layer_that_is_gone() -> None:
    backend, arrays = Noting(), layer()
    attention = made(backend, kernel="decode_mma")
    attention.plan(**batch())
    attention.run(**arrays)
    assert attention._planned is not None
    (launch,) = attention._planned.launches.values()
    (spare,) = launch._recipe._spare  # type: ignore[attr-defined]
    assert spare.params.arrays == ()


def test_a_batch_without_queries_launches_nothing_twice() -> None:
    backend = Noting()
    attention = made(backend, kernel="decode_mma")
    attention.plan(aligned((0, 4), np.int32), aligned((0,), np.int32))
    empty = {name: array[:0] if name in ("q", "out") else array for name, array in layer().items()}
    for _ in range(2):
        assert len(attention.run(**empty)) == 0
    assert [launch.kernel for launch in backend.launches] == ["plan"]


SCALES = {"tensor": (1,), "head": (HEADS,), "token_head": (5, BLOCK, HEADS)}


@pytest.mark.parametrize("mode", SCALES)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_another_shape_dtype_or_strides_launch_nothing(mode: Any, name: str) -> None:
    backend = Noting()
    attention = made(backend, kernel="decode_mma", dtype="float16", kv_dtype="int8", scale_mode=mode)
    attention.plan(**batch())
    pools = {pool: aligned((5, BLOCK, HEADS, DIM), np.int8) for pool in ("k_cache", "v_cache")}
    fitting = {**layer(), **pools, "k_scale": aligned(SCALES[mode], np.float32)}
    fitting["v_scale"] = aligned(SCALES[mode], np.float32)
    attention.run(**fitting)
    before, shape = len(backend.launches), SCALES[mode]
    wanted = ", ".join(map(str, shape))
    for wrong in ((3,), (*shape, 1), (*shape[:-1], shape[-1] + 1)):
        with pytest.raises(pk.errors.LayoutMismatch, match=rf"{name} must be \[{wanted}\], got"):
            attention.run(**{**fitting, name: aligned(wrong, np.float32)})
    with pytest.raises(pk.errors.WrongType, match=f"{name} must be float32"):
        attention.run(**{**fitting, name: aligned(shape, np.float64)})
    with pytest.raises(pk.errors.InvalidArgument, match=f"{name} must be given"):
        attention.run(**{**fitting, name: None})
    if shape != (1,):
        with pytest.raises(pk.errors.LayoutMismatch, match="must have the same strides"):
            attention.run(**{**fitting, name: aligned((*shape, 2), np.float32)[..., 0]})
    assert len(backend.launches) == before


def test_scales_per_head_may_lie_apart_but_not_off_their_alignment() -> None:
    backend = Noting()
    attention = made(backend, kernel="decode_mma", dtype="float16", kv_dtype="int8", scale_mode="head")
    attention.plan(**batch())
    arrays = layer() | {name: aligned((5, BLOCK, HEADS, DIM), np.int8) for name in ("k_cache", "v_cache")}
    table = aligned((HEADS, 3), np.float32)
    for scale, stride in ((aligned((HEADS,), np.float32), 1), (table[:, 1], 3), (table[::-1, 1], -3)):
        attention.run(**arrays, k_scale=scale, v_scale=scale)
        assert backend.launches[-1].params[0]["kv"]["k_scale"] == scale.ctypes.data
        assert backend.launches[-1].params[0]["kv"]["scale_head_stride"] == stride
    packed = aligned((2, 6 * HEADS), np.uint8)
    apart = np.ndarray((HEADS,), np.float32, packed, 0, (6,))
    for wrong in (apart, np.ndarray((HEADS,), np.float32, packed, 2, (4,))):
        with pytest.raises(pk.errors.LayoutMismatch, match="k_scale is not aligned"):
            attention.run(**arrays, k_scale=wrong, v_scale=wrong)
    assert len(backend.launches) == 4


def test_a_column_of_a_table_of_scales_is_read_as_its_copy_is(device: Device) -> None:
    rng = np.random.default_rng(0)
    attention = PagedAttention(
        num_qo_heads=2, num_kv_heads=2, head_dim=64, kv_dtype="int8", scale_mode="head", max_sequences=1,
        kernel="auto" if device == "cpu" else "decode_simt", device=device,
    )  # fmt: skip
    attention.plan(np.zeros((1, 1), np.int32), np.array([9], np.int32))
    k, v = (rng.integers(-99, 99, (1, BLOCK, 2, 64)).astype(np.int8) for _ in "kv")
    q, table = rng.standard_normal((1, 2, 64)).astype(np.float16), np.array([[0.01, 9], [0.05, 9]], np.float32)
    results = [attention.run(q, k, v, k_scale=one, v_scale=one) for one in (table[:, 0], table[:, 0].copy())]
    assert (results[0] == results[1]).all()


def test_latents_of_another_width_launch_nothing() -> None:
    backend = Noting()
    attention = PagedAttention(
        num_qo_heads=16, num_kv_heads=1, head_dim=576, head_dim_v=512, v_in_k=True, dtype="bfloat16", max_sequences=8,
        block_size=BLOCK, softmax_scale=192**-0.5, device=backend,
    )  # fmt: skip
    assert attention.kernel == "decode_mla"
    attention.plan(**batch())
    q, latents = aligned((SEQS, 16, 576), ml_dtypes.bfloat16), aligned((5, BLOCK, 1, 576), ml_dtypes.bfloat16)
    attention.run(q, latents)
    before = len(backend.launches)
    for width in (512, 575, 640):
        wrong = aligned((5, BLOCK, 1, width), ml_dtypes.bfloat16)
        with pytest.raises(pk.errors.LayoutMismatch, match=rf"k_cache must be \[num_blocks, 16, 1, 576\].*{width}"):
            attention.run(q, wrong)
        with pytest.raises(pk.errors.LayoutMismatch, match=r"q must be \[num_tokens, 16, 576\]"):
            attention.run(aligned((SEQS, 16, width), ml_dtypes.bfloat16), latents)
    with pytest.raises(pk.errors.LayoutMismatch, match="out must be"):
        attention.run(q, latents, out=q)
    assert len(backend.launches) == before
