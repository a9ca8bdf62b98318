"""A shared prefix attended once for all its requests gives what every request alone gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.attention import CascadeAttention, PagedAttention, merge_states
from pagedkv.attention.places import Device
from pagedkv.kernels import schedules
from pagedkv.reference import pack_mask, paged_attention

HEADS, GROUP, DIM = 2, 2, 32
SIZES = {"num_qo_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": DIM}


def kv(rng: np.random.Generator, num_tokens: int, dim: int = DIM) -> Any:
    return rng.standard_normal((2, num_tokens, HEADS, dim)).astype(np.float16)


def paged(parts: list[Any], size: int) -> tuple[Any, Any, Any]:
    """Build a pool, block tables and lengths for some (k, v).

    The pool is [2, num_blocks, size, HEADS, head_dim]; slots that no sequence owns are NaN.
    """
    lens = np.array([part.shape[1] for part in parts], np.int32)
    blocks = -(-lens // size)
    tables = np.full((len(parts), max(1, int(blocks.max()))), -1, np.int32)
    pool = np.full((2, int(blocks.sum()) + 1, size, *parts[0].shape[2:]), np.nan, np.float16)
    for seq, (part, count, end) in enumerate(zip(parts, blocks, np.cumsum(blocks), strict=True)):
        tables[seq, :count] = np.arange(end - count, end)[::-1]
        for token in range(lens[seq]):
            pool[:, tables[seq, token // size], token % size] = part[:, token]
    return pool, tables, lens


def one_by_one(q: Any, indptr: Any, parts: list[Any], **options: Any) -> Any:
    """What each request gets from its whole KV."""
    pool, tables, lens = paged(parts, 4)
    return paged_attention(q.astype(np.float64), pool[0], pool[1], tables, lens, indptr, return_lse=True, **options)


@pytest.mark.parametrize("q_len", [1, 3])
def test_two_levels_equal_attention_over_the_whole(device: Device, q_len: int) -> None:
    rng = np.random.default_rng(q_len)
    prefixes, suffixes = [kv(rng, 21), kv(rng, 8)], [kv(rng, n) for n in (q_len, 5, 9, 4)]
    groups = [0, 0, 0, 1]  # whose prefix each request has
    indptr = np.arange(5, dtype=np.int32) * q_len
    q = rng.standard_normal((4 * q_len, HEADS * GROUP, DIM)).astype(np.float16)
    shared, own = paged(prefixes, 16), paged(suffixes, 4)
    cascade = CascadeAttention([16, 4], max_groups=[2, 4], max_q_len=q_len, device=device, **SIZES)
    cascade.plan([(*shared[1:], np.array([0, 3, 4], np.int32) * q_len), (*own[1:], indptr)])
    lse = np.full(q.shape[:2], np.nan, np.float32)
    o = cascade.run(q, [(shared[0][0], shared[0][1]), (own[0][0], own[0][1])], lse=lse)
    wholes = [np.concatenate([prefixes[g], suffix], axis=1) for g, suffix in zip(groups, suffixes, strict=True)]
    exact, exact_lse = one_by_one(q, indptr, wholes)
    assert np.abs(o - exact).max() < 3e-3
    assert np.abs(lse - exact_lse).max() < 3e-3


def test_three_levels_sinks_and_a_tree_mask_equal_attention_over_the_whole(device: Device) -> None:
    rng = np.random.default_rng(5)
    system, users = kv(rng, 16), [kv(rng, 6), kv(rng, 11)]
    own = [kv(rng, 4), kv(rng, 3), kv(rng, 6)]
    indptr = np.array([0, 2, 4, 6], np.int32)
    q = rng.standard_normal((6, HEADS * GROUP, DIM)).astype(np.float16)
    sinks = rng.standard_normal(HEADS * GROUP).astype(np.float32)
    trees = [rng.random((2, part.shape[1])) < 0.6 for part in own]
    mask, mask_indptr = pack_mask(trees)
    levels = [paged([system], 16), paged(users, 8), paged(own, 4)]
    cascade = CascadeAttention(
        [16, 8, 4], max_groups=[1, 2, 3], max_q_len=2, device=device, causal=False, sinks=sinks, custom_mask=True,
        soft_cap=6.0, **SIZES,
    )  # fmt: skip
    queries = [np.array([0, 6], np.int32), np.array([0, 4, 6], np.int32), indptr]
    cascade.plan(
        [(*level[1:], q_indptr) for level, q_indptr in zip(levels, queries, strict=True)],
        mask=mask, mask_indptr=mask_indptr,
    )  # fmt: skip
    wholes = [np.concatenate([system, users[u], part], axis=1) for u, part in zip((0, 0, 1), own, strict=True)]
    whole_masks = [
        np.concatenate([np.ones((2, whole.shape[1] - tree.shape[1]), bool), tree], axis=1)
        for whole, tree in zip(wholes, trees, strict=True)
    ]
    whole_mask, whole_indptr = pack_mask(whole_masks)
    caches = [(level[0][0], level[0][1]) for level in levels]
    o = np.array(cascade.run(q, caches))
    of_a_layer = np.array(cascade.run(q, caches, sinks=sinks + 3))
    for found, own_sinks in ((o, sinks), (of_a_layer, sinks + 3)):
        exact, _ = one_by_one(
            q, indptr, wholes, causal=False, sinks=own_sinks, soft_cap=6.0, mask=whole_mask, mask_indptr=whole_indptr
        )
        assert np.abs(found - exact).max() < 3e-3


def test_a_level_without_keys_for_a_request_leaves_the_others(device: Device) -> None:
    rng = np.random.default_rng(6)
    own = [kv(rng, 3), kv(rng, 5)]
    q = rng.standard_normal((2, HEADS * GROUP, DIM)).astype(np.float16)
    indptr = np.array([0, 1, 2], np.int32)
    shared, alone = paged([kv(rng, 0)], 16), paged(own, 4)
    cascade = CascadeAttention([16, 4], max_groups=[1, 2], device=device, **SIZES)
    cascade.plan([(*shared[1:], np.array([0, 2], np.int32)), (*alone[1:], indptr)])
    o = cascade.run(q, [(shared[0][0], shared[0][1]), (alone[0][0], alone[0][1])])
    assert np.abs(o - one_by_one(q, indptr, own)[0]).max() < 3e-3


def test_a_step_without_queries_gives_nothing(device: Device) -> None:
    """NumPy gives arrays without elements strides of 0."""
    q, pool = np.zeros((0, 4, DIM), np.float16), kv(np.random.default_rng(0), 16).reshape(2, 1, 16, HEADS, DIM)
    q = np.lib.stride_tricks.as_strided(q, strides=(0, 0, 0))
    cascade = CascadeAttention([16, 16], max_groups=[1, 1], device=device, **SIZES)
    level = (np.zeros((1, 1), np.int32), np.array([3], np.int32), np.zeros(2, np.int32))
    cascade.plan([level, level])
    assert cascade.run(q, (pool[0], pool[1]), out=q.copy()).shape == q.shape


SLOPES = np.exp2(-np.arange(1, HEADS * GROUP + 1)).astype(np.float32)


def reached_blocks(levels: list[Any], groups: list[Any], sizes: list[int], q_len: int, window: int | None) -> list[Any]:
    """Which entries of each level's block tables hold a key that a query sees.

    ``groups`` has each request's sequence by level. Every key is asked.
    """
    before = np.zeros(len(groups[0]), int)
    total = sum(lens[group] for (_, _, lens), group in zip(levels, groups, strict=True))
    reached = []
    for (_, tables, lens), group, size in zip(levels, groups, sizes, strict=True):
        reached.append(np.zeros(tables.shape, bool))
        for request, seq in enumerate(group):
            first = total[request] - q_len + 1 - (window or 10**9) - before[request]
            for key in range(max(first, 0), lens[seq]):
                reached[-1][seq, key // size] = True
        before = before + lens[group]
    return reached


def check_distances(
    device: Device, kernel: str, q_len: int, shared: list[int], own: list[int], window: int | None, alibi: bool,
    *, causal: bool = True, head_dim: int = DIM,
) -> None:  # fmt: skip
    """Three levels: what all share, what halves of the requests share, what each has alone.

    Blocks that the windows of all their requests have left are not there any more.
    """
    variants = {"window": window, "alibi_slopes": SLOPES if alibi else None, "causal": causal}
    rng = np.random.default_rng(q_len)
    count = len(own)
    halves = [count // 2, count - count // 2]
    system, *users = (kv(rng, n, head_dim) for n in shared)
    alone = [kv(rng, n, head_dim) for n in own]
    indptr = np.arange(count + 1, dtype=np.int32) * q_len
    q = rng.standard_normal((count * q_len, HEADS * GROUP, head_dim)).astype(np.float16)
    half = np.repeat([0, 1], halves)
    wholes = [np.concatenate([system, users[h], part], axis=1) for h, part in zip(half, alone, strict=True)]
    levels = [paged([system], 16), paged(users, 8), paged(alone, 8)]
    groups = [np.zeros(count, int), half, np.arange(count)]
    for (_, tables, _), reached in zip(levels, reached_blocks(levels, groups, [16, 8, 8], q_len, window), strict=True):
        tables[~reached] = -1
    cascade = CascadeAttention(
        [16, 8, 8], max_groups=[1, 2, count], max_q_len=q_len, device=device, kernel=kernel,
        **{**SIZES, "head_dim": head_dim}, **variants,
    )  # fmt: skip
    queries = [np.array([0, indptr[-1]], np.int32), np.cumsum([0, *halves]).astype(np.int32) * q_len, indptr]
    cascade.plan([(*level[1:], q_indptr.astype(np.int32)) for level, q_indptr in zip(levels, queries, strict=True)])
    lse = np.full(q.shape[:2], np.nan, np.float32)
    o = cascade.run(q, [(level[0][0], level[0][1]) for level in levels], lse=lse)
    exact, exact_lse = one_by_one(q, indptr, wholes, **variants)
    assert np.abs(o - exact).max() < 3e-3
    assert np.abs(lse - exact_lse).max() < 3e-3


@pytest.mark.parametrize(("q_len", "window", "alibi"), [(1, 25, False), (3, None, True), (2, 60, True)])
def test_windows_and_alibi_reach_through_all_levels(device: Device, q_len: int, window: int, alibi: bool) -> None:
    """A window of 25 leaves nothing of the shared levels to requests with 40 own keys."""
    check_distances(device, "auto", q_len, [57, 9, 14], [20, 40, 3, 12, 23], window, alibi)


def check_blocks_out_of_reach(seed: int, kernel: str) -> None:
    """Blocks that no window reaches may be gone; without any other the call is refused."""
    rng = np.random.default_rng(seed)
    count, q_len, window = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 60))
    group = np.sort(rng.integers(0, 2, count))
    prefixes, own = ([kv(rng, int(n)) for n in rng.integers(*span)] for span in ((0, 40, 2), (3, 30, count)))
    sizes = [int(size) for size in rng.choice([3, 4, 16], 2)]
    levels = [paged(prefixes, sizes[0]), paged(own, sizes[1])]
    reached = reached_blocks(levels, [group, np.arange(count)], sizes, q_len, window)
    for (_, tables, _), there in zip(levels, reached, strict=True):
        tables[~there] = rng.choice([-1, 99])
    indptr = np.arange(count + 1, dtype=np.int32) * q_len
    offsets = np.array([0, (group == 0).sum(), count], np.int32) * np.int32(q_len)
    q = rng.standard_normal((count * q_len, HEADS * GROUP, DIM)).astype(np.float16)
    cascade = CascadeAttention(
        sizes, max_groups=[2, count], max_q_len=q_len, window=window, device="cpu", kernel=kernel, **SIZES
    )
    arrays = [(*levels[0][1:], offsets), (*levels[1][1:], indptr)]
    caches = [(pool[0], pool[1]) for pool, _, _ in levels]
    cascade.plan(arrays)
    wholes = [np.concatenate([prefixes[g], part], axis=1) for g, part in zip(group, own, strict=True)]
    exact, _ = one_by_one(q, indptr, wholes, window=window)
    assert np.abs(cascade.run(q, caches) - exact).max() < 3e-3
    level = int(rng.choice([level for level in range(2) if reached[level].any()]))
    entry = tuple(rng.choice(np.argwhere(reached[level])))
    levels[level][1][entry] = -1
    with pytest.raises(pk.errors.InvalidArgument, match=r"block_tables\["):
        cascade.plan(arrays)
    levels[level][1][entry] = 99
    cascade.plan(arrays)
    with pytest.raises(pk.errors.PagedKVError, match=r"block_tables\[|sees a block id outside"):
        cascade.run(q, caches)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_blocks_that_no_window_reaches_need_not_be_there_but_all_others_must(kernel: str) -> None:
    for seed in range(25):
        check_blocks_out_of_reach(seed, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_many_tables_with_holes(kernel: str) -> None:
    for seed in range(100, 1600):
        check_blocks_out_of_reach(seed, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 50, 130, 400, 10**6])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("kernel", ["decode_simt", "decode_mma", "decode_tma", "prefill_mma", "cpu", "reference"])
def test_every_kernel_knows_distances_in_every_level(kernel: str, alibi: bool, window: int | None) -> None:
    if kernel in ("cpu", "reference"):
        device: Device = "cpu"
    else:
        from tests.ptxsim.backend import PtxsimBackend

        device = PtxsimBackend()
    own, causal = [2, 90, 17, 64, 5, 130], window != 130
    check_distances(device, kernel, 2, [500, 70, 3], own, window, alibi, causal=causal, head_dim=64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: {2: np.array([0, 1], np.int32)}}, "the levels have 1 and 2 queries"),
        ({0: {2: np.array([0, 9], np.int32)}, 1: {2: np.array([0, 4, 9], np.int32)}}, "9 queries, but this was made"),
        ({0: {1: np.array([8, 8], np.int32)}}, "2 sequences, but this level was made for 1"),
    ],
)
def test_positions_of_a_batch_that_does_not_fit_are_refused(
    device: Device, change: dict[int, dict[int, Any]], words: str
) -> None:
    cascade = CascadeAttention([16, 4], max_groups=[1, 2], device=device, window=9, **SIZES)
    own = (np.array([[0], [1]], np.int32), np.array([1, 3], np.int32), np.array([0, 1, 2], np.int32))
    levels = [[np.array([[0]], np.int32), np.array([8], np.int32), np.array([0, 2], np.int32)], list(own)]
    for level, arrays in change.items():
        for index, array in arrays.items():
            levels[level][index] = array
    with pytest.raises(pk.errors.InvalidArgument, match=words):
        cascade.plan(levels)
    with pytest.raises(pk.errors.ClosedError, match="plan"):
        cascade.run(None, None)


def check_fewer_own_keys(device: Device, own: list[int], q_len: int, *, kernel: str = "auto", **variants: Any) -> None:
    """What requests get equals what each gets from its whole KV."""
    rng = np.random.default_rng(q_len)
    prefix, parts = kv(rng, 21), [kv(rng, n) for n in own]
    indptr = np.arange(len(own) + 1, dtype=np.int32) * q_len
    q = rng.standard_normal((len(own) * q_len, HEADS * GROUP, DIM)).astype(np.float16)
    shared, alone = paged([prefix], 16), paged(parts, 4)
    cascade = CascadeAttention(
        [16, 4], max_groups=[1, len(own)], max_q_len=q_len, device=device, kernel=kernel, **variants, **SIZES
    )
    cascade.plan([(*shared[1:], indptr[[0, -1]]), (*alone[1:], indptr)])
    o = cascade.run(q, [(shared[0][0], shared[0][1]), (alone[0][0], alone[0][1])])
    wholes = [np.concatenate([prefix, part], axis=1) for part in parts]
    assert np.abs(o - one_by_one(q, indptr, wholes, **variants)[0]).max() < 3e-3


WITHIN = [([0, 2], 1, {}), ([2, 3], 3, {}), ([2, 3], 3, {"window": 4})]
WITHIN += [([2, 1, 0], 3, {"window": window, "causal": False}) for window in (None, 4)]


@pytest.mark.parametrize(("own", "q_len", "variants"), WITHIN)
def test_a_request_may_have_one_query_more_than_own_keys(own: list[int], q_len: int, variants: dict[str, Any]) -> None:
    """The first of them stands at the last key of the levels above.

    Calls that are not causal take any number.
    """
    check_fewer_own_keys("cpu", own, q_len, **variants)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "q_len", "variants"), WITHIN)
def test_every_kernel_takes_one_query_more_than_own_keys(own: list[int], q_len: int, variants: dict[str, Any]) -> None:
    from tests.ptxsim.backend import PtxsimBackend

    for kernel in ("decode_simt", "decode_mma", "prefill_mma"):
        check_fewer_own_keys(PtxsimBackend(), own, q_len, kernel=kernel, **variants)


@pytest.mark.parametrize("window", [None, 4])
def test_queries_before_the_last_key_of_the_levels_above_are_refused(device: Device, window: int | None) -> None:
    words = "request 1 has 3 queries and 1 own keys in the last level: a causal cascade takes at most one query more"
    with pytest.raises(pk.errors.InvalidArgument, match=words):
        check_fewer_own_keys(device, [2, 1], 3, window=window)


def test_a_plan_that_does_not_fit_leaves_the_batch_before(device: Device) -> None:
    rng = np.random.default_rng(1)
    q, pool = rng.standard_normal((2, 4, DIM)).astype(np.float16), kv(rng, 64).reshape(2, 4, 16, HEADS, DIM)
    cascade = CascadeAttention([16, 16], max_groups=[1, 2], device=device, window=20, **SIZES)
    tables = np.array([[0, 3]], np.int32), np.array([[1], [2]], np.int32)
    levels = [(tables[0], np.array([21], np.int32), None), (tables[1], np.array([3, 5], np.int32), None)]
    levels[0] = (*levels[0][:2], np.array([0, 2], np.int32))
    cascade.plan(levels)
    before = cascade.run(q, (pool[0], pool[1]))
    with pytest.raises(pk.errors.LayoutMismatch, match=r"block_tables must be \[2, max_blocks\]"):
        cascade.plan([(tables[0], np.array([7], np.int32), levels[0][2]), (tables[1][:1], *levels[1][1:])])
    assert (cascade.run(q, (pool[0], pool[1])) == before).all()
    plans = [level._plan for level in cascade.levels if level._plan is not None]
    counters = [array for plan in plans for array in plan.division.counters]
    for array in counters:
        array[...] = 1  # as a kernel that was killed midway leaves them
    cascade.reset()
    assert not any(array.any() for array in counters)
    assert len(counters) >= len(plans)
    with pytest.raises(pk.errors.ClosedError, match="plan"):
        cascade.run(q, (pool[0], pool[1]))
    cascade.plan(levels)
    assert (cascade.run(q, (pool[0], pool[1])) == before).all()


def check_division(device: Device) -> None:
    """Queries 300 keys behind a prefix see 100 keys of it through a window of 400."""
    lens, prefix = np.full(6, 300, np.int32), np.array([700], np.int32)
    tables = np.zeros((1, 44), np.int32), np.zeros((6, 19), np.int32)
    arrays = {}
    for kernel in ("prefill_mma", "decode_mma"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedules, "MIN_PART_KEYS", 128)
            cascade = CascadeAttention(
                [16, 16], max_groups=[1, 6], device=device, window=400, kernel=kernel, **{**SIZES, "head_dim": 64}
            )
        cascade.plan([(tables[0], prefix, np.array([0, 6], np.int32)), (tables[1], lens, np.arange(7, dtype=np.int32))])
        arrays[kernel] = cascade.levels[0]._plan.division.arrays
    tiling = cascade.levels[0]._plan.tiling
    tiles = -(-700 // tiling.tile_tokens) - 600 // tiling.tile_tokens
    assert arrays["prefill_mma"]["work_list"][0, 3] == 1, "parts"
    row_tiles = -(-6 * GROUP // tiling.row_tile)
    assert arrays["decode_mma"]["unit_indptr"][1] == row_tiles * (tiles + schedules.OVERHEAD_UNITS)


def test_a_schedule_divides_what_a_window_leaves_of_a_prefix() -> None:
    from tests.ptxsim.backend import PtxsimBackend

    check_division(PtxsimBackend())


def test_levels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(pk.errors.InvalidArgument, match="at least two levels"):
        CascadeAttention([16], max_groups=[1], device="cpu", **SIZES)
    cascade = CascadeAttention([16, 4], max_groups=[1, 2], device="cpu", **SIZES)
    q = np.zeros((2, 4, DIM), np.float16)
    with pytest.raises(pk.errors.ClosedError, match="plan"):
        cascade.run(q, [(q, q)] * 2)
    with pytest.raises(pk.errors.InvalidArgument, match="2 levels, got 1"):
        cascade.plan([(None, None, None)])


def test_states_merge_by_their_log_sum_exp_in_any_number(device: Device) -> None:
    rng = np.random.default_rng(2)
    scores = rng.standard_normal((3, 4, 2, 5))
    values = rng.standard_normal((3, 4, 2, 5, DIM))
    weights = np.exp(scores)
    states = (weights[..., None] * values).sum(3) / weights.sum(3)[..., None]
    lses = np.log(weights.sum(3)).astype(np.float32)
    states, lses[1, 0] = states.astype(np.float16), -np.inf
    weights[1, 0] = 0
    states[1, 0] = np.nan
    exact = np.nansum(weights[..., None] * values, axis=(0, 3)) / weights.sum((0, 3))[..., None]
    lse = np.empty((4, 2), np.float32)
    assert np.abs(merge_states(states, lses, lse=lse, device=device) - exact).max() < 3e-3
    assert np.abs(lse - np.log(weights.sum((0, 3)))).max() < 1e-4


@pytest.mark.parametrize(("kernel", "level"), [("auto", "prefill_mma"), ("prefill_wgmma", "prefill_wgmma")])
def test_a_long_prefix_is_divided_among_multiprocessors(
    device: Device, monkeypatch: pytest.MonkeyPatch, kernel: str, level: str
) -> None:
    """Level 0 is one sequence with all requests' queries: few row tiles, many keys."""
    monkeypatch.setattr(schedules, "MIN_PART_KEYS", 128)
    if device == "cpu":
        pytest.skip("the CPU has no multiprocessors")
    rng = np.random.default_rng(9)
    prefix, own = kv(rng, 700, 64), [kv(rng, n, 64) for n in (1, 9, 4, 16, 3, 2)]
    indptr = np.arange(7, dtype=np.int32) * 2
    q = rng.standard_normal((12, HEADS * GROUP, 64)).astype(np.float16)
    shared, alone = paged([prefix], 16), paged(own, 8)
    sizes = {**SIZES, "head_dim": 64}
    cascade = CascadeAttention([16, 8], max_groups=[1, 6], max_q_len=2, device=device, kernel=kernel, **sizes)
    cascade.plan([(*shared[1:], np.array([0, 12], np.int32)), (*alone[1:], indptr)])
    o = cascade.run(q, [(shared[0][0], shared[0][1]), (alone[0][0], alone[0][1])])
    assert cascade.levels[0].kernel == level
    division = cascade.levels[0]._plan.division
    assert division.arrays["work_list"][0, 3] > 1, "the prefix was not divided"
    wholes = [np.concatenate([prefix, suffix], axis=1) for suffix in own]
    assert np.abs(o - one_by_one(q, indptr, wholes)[0]).max() < 3e-3


def test_latents_are_given_to_every_level_without_v() -> None:
    rng = np.random.default_rng(0)
    latents, q = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 4, 1, 24), (2, 3, 24)))
    options: dict[str, Any] = {
        "num_qo_heads": 3, "num_kv_heads": 1, "head_dim": 24, "head_dim_v": 16, "dtype": "float32", "v_in_k": True,
        "softmax_scale": 0.2, "device": "cpu",
    }  # fmt: skip
    shared, own = np.array([[4, 2]], np.int32), np.array([[1], [5]], np.int32)
    cascade = CascadeAttention(block_sizes=(4, 4), max_groups=(1, 2), **options)
    cascade.plan([
        (shared, np.array([8], np.int32), np.array([0, 2], np.int32)),
        (own, np.array([3, 1], np.int32), np.array([0, 1, 2], np.int32)),
    ])  # fmt: skip
    whole = PagedAttention(block_size=4, max_sequences=2, **options)
    whole.plan(np.hstack([np.repeat(shared, 2, axis=0), own]), np.array([11, 9], np.int32))
    assert np.abs(cascade.run(q, (latents, None)) - whole.run(q, latents)).max() < 1e-5
