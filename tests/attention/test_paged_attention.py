"""PagedAttention and forward, on the CPU's reference and on the kernels.

Both give the same results and raise the same errors.
"""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pagedkv as pk
from pagedkv.attention import CascadeAttention, PagedAttention, forward
from pagedkv.attention.places import Device, home_of
from pagedkv.reference import pack_mask, paged_attention

HEADS, GROUP, DIM, SIZE = 2, 2, 32, 8
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def batch(seed: int = 0, seq_lens: tuple[int, ...] = (5, 17, 1), q_lens: tuple[int, ...] = (1, 1, 1)) -> dict[str, Any]:
    """Random queries and a pool whose unowned slots are NaN."""
    rng = np.random.default_rng(seed)
    lens = np.array(seq_lens, np.int32)
    blocks = -(-lens // SIZE)
    order = rng.permutation(int(blocks.sum()) + 2).astype(np.int32)
    tables = np.full((len(lens), int(blocks.max()) + 1), -1, np.int32)
    pool = np.full((len(order), 2, SIZE, HEADS, DIM), np.nan, np.float16)
    for seq, (count, end) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
        tables[seq, :count] = order[end - count : end]
        for token in range(lens[seq]):
            pool[tables[seq, token // SIZE], :, token % SIZE] = rng.standard_normal((2, HEADS, DIM))
    indptr = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    q = rng.standard_normal((int(indptr[-1]), HEADS * GROUP, DIM)).astype(np.float16)
    return {"q": q, "k": pool[:, 0], "v": pool[:, 1], "tables": tables, "lens": lens, "indptr": indptr}


def attention(device: Device, **options: Any) -> PagedAttention:
    heads = {"num_qo_heads": HEADS * GROUP, "num_kv_heads": HEADS}
    given: dict[str, Any] = {"max_sequences": 4, "block_size": SIZE, **heads}
    return PagedAttention(head_dim=DIM, device=device, **{**given, **options})


def expected(b: dict[str, Any], **options: Any) -> Any:
    return paged_attention(
        b["q"].astype(np.float64), b["k"], b["v"], b["tables"], b["lens"], b["indptr"], return_lse=True, **options
    )


def test_plan_and_run_give_the_attention_of_the_batch(device: Device) -> None:
    b = batch()
    paged = attention(device)
    paged.plan(b["tables"], b["lens"])
    out, lse = np.full_like(b["q"], np.nan), np.full(b["q"].shape[:2], np.nan, np.float32)
    assert paged.run(b["q"], b["k"], b["v"], out=out, lse=lse) is out
    o, exact_lse = expected(b)
    assert np.abs(out - o).max() < 2e-3
    assert np.abs(lse - exact_lse).max() < 2e-3


def test_a_plan_is_made_anew_for_other_lengths(device: Device) -> None:
    paged = attention(device)
    for seed, lens in enumerate([(5, 17, 1), (40,), (0, 9)]):
        b = batch(seed, lens, (1,) * len(lens))
        paged.plan(b["tables"], b["lens"])
        assert np.abs(paged.run(b["q"], b["k"], b["v"]) - expected(b)[0]).max() < 2e-3


def test_variants_reach_the_computation(device: Device) -> None:
    b = batch(3, (9, 20), (3, 2))
    slopes, sinks = np.array([0.5, 0.25, 0.1, 1], np.float32), np.array([0, 1, -1, 0.5], np.float32)
    options = {"window": 6, "soft_cap": 5.0, "alibi_slopes": slopes, "sinks": sinks, "softmax_scale": 0.3}
    paged = attention(device, max_q_len=4, **options)
    paged.plan(b["tables"], b["lens"], b["indptr"])
    assert np.abs(paged.run(b["q"], b["k"], b["v"]) - expected(b, **options)[0]).max() < 2e-3


def test_each_layer_may_have_sinks_of_its_own(device: Device) -> None:
    b = batch(3, (9, 20), (3, 2))
    first, second = np.array([0, 1, -1, 0.5], np.float32), np.array([4, 3, 2, 1], np.float32)
    arrays = (b["q"], b["k"], b["v"])
    paged = attention(device, max_q_len=4, sinks=True)
    own = attention(device, max_q_len=4, sinks=first)
    for one in (paged, own):
        one.plan(b["tables"], b["lens"], b["indptr"])
    for sinks in (first, second, first):  # the plan serves all of them
        assert np.abs(paged.run(*arrays, sinks=sinks) - expected(b, sinks=sinks)[0]).max() < 2e-3
    assert np.abs(own.run(*arrays, sinks=second) - expected(b, sinks=second)[0]).max() < 2e-3
    assert np.abs(own.run(*arrays) - expected(b, sinks=first)[0]).max() < 2e-3


def test_sinks_are_given_where_an_attention_was_made_for_them(device: Device) -> None:
    b = batch(3, (9, 20), (3, 2))
    arrays, sinks = (b["q"], b["k"], b["v"]), np.zeros(4, np.float32)
    with_sinks, without = (attention(device, max_q_len=4, sinks=given) for given in (True, False))
    for one in (with_sinks, without):
        one.plan(b["tables"], b["lens"], b["indptr"])
    with pytest.raises(pk.errors.InvalidArgument, match="each run must be given its layer's sinks"):
        with_sinks.run(*arrays)
    with pytest.raises(pk.errors.InvalidArgument, match="sinks must not be given"):
        without.run(*arrays, sinks=sinks)
    with_sinks.run(*arrays, sinks=sinks)
    for wrong, error in (
        (np.zeros(3, np.float32), pk.errors.LayoutMismatch),
        (np.zeros(4, np.float64), pk.errors.WrongType),
        (np.zeros(8, np.float32)[::2], pk.errors.LayoutMismatch),
    ):
        with pytest.raises(error, match="sinks"):
            with_sinks.run(*arrays, sinks=wrong)


def test_a_window_as_wide_as_there_can_be_hides_nothing(device: Device) -> None:
    """Queries before the first key, which calls that are not causal may have, see all keys."""
    b = batch(seq_lens=(2,), q_lens=(5,))
    paged = attention(device, max_q_len=8, causal=False, window=2**31 - 1)
    paged.plan(b["tables"], b["lens"], b["indptr"])
    assert np.abs(paged.run(b["q"], b["k"], b["v"]) - expected(b, causal=False)[0]).max() < 2e-3


def test_a_custom_mask_selects_the_keys(device: Device) -> None:
    b = batch(4, (9, 20), (3, 2))
    rng = np.random.default_rng(9)
    mask, indptr = pack_mask([rng.random((n, length)) < 0.6 for n, length in ((3, 9), (2, 20))])
    paged = attention(device, max_q_len=4, custom_mask=True, causal=False)
    paged.plan(b["tables"], b["lens"], b["indptr"], mask=mask, mask_indptr=indptr)
    o, _ = expected(b, causal=False, mask=mask, mask_indptr=indptr)
    assert np.abs(paged.run(b["q"], b["k"], b["v"]) - o).max() < 2e-3


@pytest.mark.parametrize("path", ["auto", "contiguous", "paged"])
def test_forward_computes_the_same_on_either_path(device: Device, path: str) -> None:
    rng = np.random.default_rng(1)
    keys = np.array([0, 30, 37])
    q = rng.standard_normal((5, 4, DIM)).astype(np.float16)
    k, v = (rng.standard_normal((37, HEADS, DIM)).astype(np.float16) for _ in "kv")
    queries = np.array([0, 3, 5])
    tables = np.full((2, 30), -1)
    tables[0], tables[1, :7] = np.arange(30), np.arange(30, 37)
    o = paged_attention(q.astype(np.float64), k[:, None], v[:, None], tables, np.diff(keys), queries)
    found = forward(
        q, k, v, q_indptr=queries, kv_indptr=keys, path=path, paged_threshold=20, block_size=8, device=device
    )
    assert np.abs(found - o).max() < 2e-3


def test_run_before_plan_is_an_error_that_says_what_to_call(device: Device) -> None:
    b = batch()
    with pytest.raises(pk.errors.ClosedError, match="plan"):
        attention(device).run(b["q"], b["k"], b["v"])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": lambda b: b["q"][:, :3]}, pk.errors.LayoutMismatch, "q must be"),
        ({"q": lambda b: b["q"].astype(np.float32)}, pk.errors.WrongType, "q must hold float16, got dtype float32"),
        ({"k": lambda b: b["k"][..., :16]}, pk.errors.LayoutMismatch, "k_cache must be"),
        ({"v": lambda b: b["v"].astype(np.float64)}, pk.errors.WrongType, "v_cache must hold float16, got .* float64"),
        ({"q": lambda b: b["q"][:2]}, pk.errors.LayoutMismatch, "q has 2 tokens"),
        ({"k": lambda b: np.swapaxes(np.swapaxes(b["k"], 2, 3).copy(), 2, 3)}, pk.errors.LayoutMismatch, "last axis"),
        ({"out": lambda b: np.empty((3, 4, 31), np.float16)}, pk.errors.LayoutMismatch, "out must be"),
        ({"lse": lambda b: np.empty((3, 4), np.float64)}, pk.errors.WrongType, "lse must be float32"),
        ({"k_scale": lambda b: np.ones(1, np.float32)}, pk.errors.InvalidArgument, "k_scale must not be given"),
    ],
)
def test_an_array_that_does_not_fit_is_named_and_nothing_is_written(
    device: Device, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    b = batch()
    paged = attention(device)
    paged.plan(b["tables"], b["lens"])
    arguments = {"q": b["q"], "k": b["k"], "v": b["v"], "out": np.full_like(b["q"], 7)}
    arguments.update({name: make(b) for name, make in change.items()})
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(error, match=words):
        paged.run(q, k, v, **arguments)
    if "out" not in change:
        assert (arguments["out"] == 7).all()


@pytest.mark.parametrize("num_tokens", [2, 4])
def test_queries_of_another_number_than_q_indptr_says_are_refused(num_tokens: int) -> None:
    b = batch()
    paged = attention("cpu", max_q_len=2)
    paged.plan(b["tables"][:2], b["lens"][:2], np.array([0, 1, 3], np.int32))
    out = np.full((num_tokens, 4, 32), 7, np.float16)
    with pytest.raises(pk.errors.InvalidArgument, match=f"q has {num_tokens} tokens, but q_indptr ends at 3"):
        paged.run(np.resize(b["q"], out.shape), b["k"], b["v"], out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("tables", "lens", "words"),
    [
        ([[0, 99]], [12], r"block_tables\[0, 1\] is 99"),
        ([[0, -1]], [12], r"block_tables\[0, 1\] is -1"),
        ([[0, 1]], [17], "seq_lens must be in 0..16"),
        ([[0, 1]], [-1], "seq_lens must be in 0..16"),
        ([[0]] * 5, [1] * 5, "max_sequences = 4"),
    ],
)
def test_a_bad_table_or_length_is_refused_on_the_host(tables: Any, lens: Any, words: str) -> None:
    with pytest.raises(pk.errors.InvalidArgument, match=words):
        attention("cpu").plan(np.array(tables, np.int32), np.array(lens, np.int32), num_blocks=10)


def test_positions_are_given_where_they_were_asked_for(device: Device) -> None:
    b, placed = batch(), attention(device, positions=True)
    positions = {"q_positions": np.full(3, 40, np.int32), "position_spans": np.full((3, 2), 40, np.int32)}
    with pytest.raises(pk.errors.InvalidArgument, match="positions = True: q_positions and position_spans must both"):
        placed.plan(b["tables"], b["lens"])
    with pytest.raises(pk.errors.InvalidArgument, match="positions = False: q_positions and position_spans must not"):
        attention(device).plan(b["tables"], b["lens"], **positions)
    with pytest.raises(pk.errors.LayoutMismatch, match=r"position_spans must be \[3, 2\]"):
        placed.plan(b["tables"], b["lens"], **{**positions, "position_spans": np.zeros((3, 1), np.int32)})
    placed.plan(b["tables"], b["lens"], **{**positions, "q_positions": np.zeros(2, np.int32)})
    with pytest.raises(pk.errors.LayoutMismatch, match="q has 3 tokens, but q_positions only 2"):
        placed.run(b["q"], b["k"], b["v"])


def test_blocks_that_a_window_no_longer_sees_may_be_gone() -> None:
    attention("cpu", window=8).plan(np.array([[-1, 3, 4]], np.int32), np.array([24], np.int32), num_blocks=10)
    with pytest.raises(pk.errors.InvalidArgument, match="is -1"):
        attention("cpu", window=17).plan(np.array([[-1, 3, 4]], np.int32), np.array([24], np.int32), num_blocks=10)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_qo_heads": 5}, pk.errors.InvalidArgument, "multiple"),
        ({"block_size": 257}, pk.errors.InvalidArgument, "block_size must be in 0..256"),
        ({"dtype": "float64"}, pk.errors.InvalidArgument, "dtype must be one of"),
        ({"max_sequences": 1.5}, pk.errors.WrongType, "max_sequences must be a whole number"),
        ({"soft_cap": -1.0}, pk.errors.InvalidArgument, "soft_cap"),
        ({"window": 0}, pk.errors.InvalidArgument, "window must be in 1"),
        ({"max_workspace_bytes": 2**63}, pk.errors.InvalidArgument, r"must be in 0\.\.9223372036854775807, got"),
        ({"softmax_scale": float("nan")}, pk.errors.InvalidArgument, "softmax_scale"),
        ({"kv_alignment": 3}, pk.errors.InvalidArgument, "kv_alignment"),
        ({"device": "gpu"}, pk.errors.InvalidArgument, "device must be"),
        ({"sinks": np.zeros(3, np.float32)}, pk.errors.LayoutMismatch, "sinks must be"),
    ],
)
def test_a_number_that_makes_no_sense_is_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        attention(options.pop("device", "cpu"), **options)
    attention("cpu", max_workspace_bytes=2**63 - 1)


def test_no_kernel_for_a_combination_says_which_and_why() -> None:
    from tests.ptxsim.backend import PtxsimBackend

    with pytest.raises(pk.errors.UnsupportedVariant, match=r"decode_simt.*head_dim 1000"):
        PagedAttention(num_qo_heads=2, num_kv_heads=1, head_dim=1000, max_sequences=1, device=PtxsimBackend())
    with pytest.raises(pk.errors.UnsupportedVariant, match="kernel 'magic': there are 'auto'"):
        attention(PtxsimBackend(), kernel="magic")
    with pytest.raises(pk.errors.InvalidArgument, match="schedules"):
        attention(PtxsimBackend(), kernel="decode_simt", schedule="listed")


def latent_attention(device: Device, **options: Any) -> PagedAttention:
    sizes: dict[str, Any] = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 320, "head_dim_v": 256}
    sizes |= {"max_sequences": 2, "v_in_k": True, "softmax_scale": 0.07}
    return PagedAttention(**{**sizes, "device": device, **options})


def test_latents_have_no_scale_of_their_width(device: Device) -> None:
    said = r"softmax_scale must be given .*\(qk_nope_head_dim \+ qk_rope_head_dim\) \*\* -0\.5.* width, 320"
    with pytest.raises(pk.errors.InvalidArgument, match=said):
        latent_attention(device, softmax_scale=None)
    options: dict[str, Any] = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 320, "head_dim_v": 256}
    with pytest.raises(pk.errors.InvalidArgument, match=said):
        CascadeAttention((16, 16), max_groups=(1, 2), v_in_k=True, device=device, **options)


@pytest.mark.parametrize("kv_dtype", ["float16", "float8_e4m3"])
def test_latents_are_given_once(device: Device, kv_dtype: str) -> None:
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((9, 16, 1, 320)).astype(kv_dtype if kv_dtype == "float16" else E4M3)
    q = rng.standard_normal((2, 16, 320)).astype(np.float16)
    tables, lens = np.array([[7, 2, 5], [1, -1, -1]], np.int32), np.array([40, 9], np.int32)
    scale = None if kv_dtype == "float16" else np.array([0.7], np.float32)
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "scale_mode": "none" if scale is None else "tensor"}
    attention, two = latent_attention(device, **options), latent_attention("cpu", v_in_k=False, **options)
    to: Any = np.asarray
    if attention.backend is not None:
        assert attention.kernel == "decode_mla" or attention.backend.capability < (8, 0)
        to = attention.backend.asarray
    attention.plan(to(tables), to(lens))
    found = attention.run(to(q), to(latents), k_scale=None if scale is None else to(scale))
    two.plan(tables, lens)
    wanted = two.run(q, latents, latents[..., :256], k_scale=scale, v_scale=scale)
    assert np.abs(np.asarray(found, np.float32) - wanted.astype(np.float32)).max() < 5e-3
    again = attention.run(to(q), to(latents[::-1].copy()), k_scale=None if scale is None else to(scale))
    three_axes = attention.run(to(q), to(latents[::-1, :, 0].copy()), k_scale=None if scale is None else to(scale))
    wanted = two.run(q, latents[::-1], latents[::-1, ..., :256], k_scale=scale, v_scale=scale)
    no_width = to(np.zeros((*latents.shape[:3], 0), latents.dtype))  # as KVCache.layer gives V
    with_no_v = attention.run(to(q), to(latents[::-1].copy()), no_width, k_scale=None if scale is None else to(scale))
    for other in (again, three_axes, with_no_v):
        assert np.abs(np.asarray(other, np.float32) - wanted.astype(np.float32)).max() < 5e-3


def test_latents_that_do_not_fit_are_refused_and_nothing_is_launched(device: Device) -> None:
    attention = latent_attention(device)
    backend = attention.backend
    to: Any = np.asarray if backend is None else backend.asarray
    q, latents = to(np.zeros((1, 16, 320), np.float16)), to(np.zeros((2, 16, 1, 320), np.float16))
    attention.plan(to(np.zeros((1, 1), np.int32)), to(np.ones(1, np.int32)))
    steps = getattr(backend, "steps", 0)
    out = to(np.full((1, 16, 256), 7, np.float16))
    with pytest.raises(pk.errors.LayoutMismatch, match=r"k_cache must be \[num_blocks, 16, 1, 320\], got .*256"):
        attention.run(q, latents[..., :256], out=out)
    with pytest.raises(pk.errors.InvalidArgument, match="v_cache must not be given"):
        attention.run(q, latents, latents[..., :256], out=out)
    with pytest.raises(pk.errors.WrongType, match=r"k_cache.*float32"):
        attention.run(q, to(np.zeros((2, 16, 1, 320), np.float32)), out=out)
    with pytest.raises(pk.errors.InvalidArgument, match="k_scale must not be given"):
        attention.run(q, latents, out=out, k_scale=to(np.ones(1, np.float32)))
    with pytest.raises(pk.errors.InvalidArgument, match="v_scale must not be given"):
        attention.run(q, latents, out=out, v_scale=to(np.ones(1, np.float32)))
    with pytest.raises(pk.errors.LayoutMismatch, match="out must be"):
        attention.run(q, latents, out=to(np.full((1, 16, 320), 7, np.float16)))
    assert (out == 7).all()
    assert getattr(backend, "steps", 0) == steps


def test_values_are_part_of_latents_alone_and_not_wider() -> None:
    q, latents = np.zeros((1, 16, 320), np.float16), np.zeros((2, 16, 1, 320), np.float16)
    plain = latent_attention("cpu", v_in_k=False)
    plain.plan(np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    with pytest.raises(pk.errors.WrongType, match="v_cache must be an array"):
        plain.run(q, latents)
    with pytest.raises(pk.errors.InvalidArgument, match="head_dim_v = 512 is more"):
        latent_attention("cpu", head_dim_v=512)


@pytest.mark.parametrize("device", [5, pk.Blocks(3), None, b"cpu"])
def test_what_is_no_place_is_refused(device: object) -> None:
    with pytest.raises(pk.WrongType, match="device is a place"):
        attention(device)  # type: ignore[arg-type]


def test_arrays_of_different_places_are_refused() -> None:
    with pytest.raises(pk.errors.WrongType, match="NumPy or a CuPy array, not list"):
        home_of(q=np.zeros(3), k=[1, 2])


def test_every_option_is_documented() -> None:
    text = PagedAttention.__doc__ or ""
    for name in list(inspect.signature(PagedAttention.__init__).parameters)[1:]:
        assert name in text, name
