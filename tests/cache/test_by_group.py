"""A cache that keeps each layer's reach alone computes the same, in less memory.

Not covered: remote stores, which such a cache does not have yet. test_by_group_in_host_memory.py and
test_by_group_on_disk.py have the tiers below the device, test_by_group_on_kernels.py has a GPU, and tests/scheduler
runs it under a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.cache.tiered import TieredStorage
from pagedkv.spec.groups import GroupLayout, layout_of

HEADS, DIM, SIZE = 2, 8, 4
FULL, WINDOW = pk.Attention(HEADS, DIM), pk.Attention(HEADS, DIM, window=9)
CHUNK, LONGER = pk.Attention(HEADS, DIM, chunk=12), pk.Attention(HEADS, DIM, window=30)
INT8 = [pk.Attention(HEADS, DIM, dtype="int8", scales="token_head", window=w) for w in (None, 9, 9)]
MIXED = [WINDOW, WINDOW, FULL] * 2
SPECS: dict[str, pk.KVSpec] = {
    "windows": pk.KVSpec.of(MIXED, dtype="float32", block_size=SIZE),
    "chunks": pk.KVSpec.of([CHUNK, CHUNK, FULL], dtype="float32", block_size=SIZE),
    "both": pk.KVSpec.of([CHUNK, FULL, WINDOW, LONGER], dtype="float32", block_size=SIZE),
    "shared": pk.KVSpec.of([WINDOW, FULL, pk.SameAs(0), pk.SameAs(1)], dtype="float32", block_size=SIZE),
    "int8": pk.KVSpec.of(INT8, block_size=SIZE),
    "HND": pk.KVSpec.of(MIXED, dtype="float16", block_size=SIZE, layout="HND"),
    "bfloat16": pk.KVSpec.of(MIXED, dtype="bfloat16", block_size=SIZE),
}


def kv_of(layer: int, tokens: NDArray[np.int32], positions: NDArray[np.int32]) -> tuple[NDArray[Any], ...]:
    """Q, K and V [num_tokens, heads, dim]: of the token, its place and the layer alone."""
    rows = [
        np.random.default_rng([int(token) & 0xFFFF, int(at), layer]).standard_normal((4, HEADS, DIM))
        for token, at in zip(tokens, positions, strict=True)
    ]
    q, more, k, v = np.asarray(rows, np.float32).reshape(-1, 4, HEADS, DIM).swapaxes(0, 1)
    return np.concatenate((q, more), axis=1), k, v


def forward(step: pk.Step, spec: pk.KVSpec) -> NDArray[np.float32]:
    """Attention of the step's tokens in all layers, [layers, num_tokens, 2 * heads, dim]."""
    out = []
    for layer in range(spec.num_model_layers):
        own = spec.own_layer(layer)
        q, k, v = kv_of(own, step.tokens, step.positions)
        if spec.model_layer(own) == layer:
            step.write(layer, k, v)
        out.append(step.attend(layer, q))
    return np.stack(out)


def compute(cache: pk.KVCache, seq: pk.Sequence, most: int = 17) -> NDArray[np.float32]:
    """All tokens that are not computed yet, in chunks."""
    out = []
    while seq.num_computed < seq.num_tokens:
        with cache.step([seq], q_lens=[min(most, seq.num_tokens - seq.num_computed)]) as step:
            out.append(forward(step, cache.spec))
    return np.concatenate(out, axis=1)


def prompt(seed: int, num_tokens: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).astype(np.int32)


@pytest.fixture
def opened() -> Iterator[Callable[..., pk.KVCache]]:
    caches: list[pk.KVCache] = []

    def open_cache(spec: pk.KVSpec, blocks: int = 120, **options: Any) -> pk.KVCache:
        caches.append(pk.KVCache(spec, memory=pk.Blocks(blocks), **options))
        return caches[-1]

    yield open_cache
    for cache in caches:
        cache.check_integrity()
        cache.close()


@pytest.mark.parametrize("name", SPECS)
def test_attention_by_groups_is_that_of_a_cache_of_all_tokens(name: str, opened: Callable[..., pk.KVCache]) -> None:
    spec = SPECS[name]
    whole, short = opened(spec, 400), opened(spec, by_group=True)
    first = prompt(1, 70)
    prompts = [first, np.append(first, prompt(2, 9)), np.append(first[:40], prompt(3, 9)), first]
    for number, tokens in enumerate(prompts * 2):
        seqs = [cache.sequence(tokens) for cache in (whole, short)]
        outs = [compute(cache, seq, 13 + number) for cache, seq in zip((whole, short), seqs, strict=True)]
        for step in range(14):
            for cache, seq, at in zip((whole, short), seqs, (0, 1), strict=True):
                seq.append(step)
                outs[at] = np.concatenate((outs[at], compute(cache, seq)), axis=1)
        both = min(out.shape[1] for out in outs)
        assert both > 14
        np.testing.assert_allclose(outs[1][:, -both:], outs[0][:, -both:], atol=2e-5)
        for seq in seqs:
            seq.release()
        short.check_integrity()
    stats = short.stats()
    assert stats.hit_tokens["device"] > 300
    assert stats.hit_tokens["device"] + stats.lagging_tokens <= whole.stats().hit_tokens["device"]


def test_a_batch_with_forks_and_cut_drafts_attends_as_in_a_cache_of_all_tokens(
    opened: Callable[..., pk.KVCache],
) -> None:
    spec = SPECS["both"]
    results = []
    for by_group in (False, True):
        cache, out = opened(spec, 400, by_group=by_group), []
        seqs = [cache.sequence(prompt(seed, 30 + seed)) for seed in range(3)]
        out += [compute(cache, seq) for seq in seqs]
        seqs += seqs[0].fork(2)  # its last block is partly filled
        for turn in range(20):
            for number, seq in enumerate(seqs):
                seq.append(100 * number + turn)
            with cache.step(seqs, lookahead=3) as step:
                out.append(forward(step, spec))
        seqs[1].append([1, 2, 3, 4, 5])
        with cache.step([seqs[1]], lookahead=5) as step:
            out.append(forward(step, spec))
        computed = seqs[1].num_computed
        seqs[1].truncate(seqs[1].num_tokens - 4)
        assert seqs[1].num_computed in (computed - 4, (computed - 4) // SIZE * SIZE), "drafts do not cost the window"
        seqs[1].truncate(7)
        seqs[1].append([9] * 20)
        out.append(compute(cache, seqs[1])[:, -15:])
        cache.check_integrity()
        results.append(out)
    for whole, short in zip(*results, strict=True):
        both = min(whole.shape[1], short.shape[1])
        np.testing.assert_allclose(short[:, -both:], whole[:, -both:], atol=2e-5)


def test_results_stay_the_same_while_prompts_push_each_other_out(opened: Callable[..., pk.KVCache]) -> None:
    spec = SPECS["windows"]
    cache = opened(spec, 40, by_group=True)
    wanted = {seed: compute(other, other.sequence(prompt(seed, 50))) for seed in range(6) for other in [opened(spec)]}
    for turn in range(24):
        seed = (turn * turn) % 6
        with cache.sequence(prompt(seed, 50)) as seq:
            got = compute(cache, seq)
        np.testing.assert_allclose(got, wanted[seed][:, -got.shape[1] :], atol=2e-5)
        cache.check_integrity()
    assert cache.stats().hit_tokens["device"] > 0


def test_a_step_that_lacks_pages_alone_is_out_of_blocks_and_no_other_wait(opened: Callable[..., pk.KVCache]) -> None:
    spec, lacking = SPECS["windows"], 0
    for num_tokens in range(8, 120, 4):
        cache = opened(spec, 12, by_group=True)
        with cache.sequence(prompt(1, num_tokens)) as seq:
            try:
                compute(cache, seq, num_tokens)
            except pk.OutOfBlocks:
                lacking += cache.placement.pools[0].num_available >= -(-num_tokens // SIZE)
            assert seq.num_computed in (0, num_tokens)
    assert lacking > 0


def test_a_sequence_takes_no_more_than_its_next_token_reads(opened: Callable[..., pk.KVCache]) -> None:
    spec = pk.KVSpec.of([WINDOW] * 5 + [FULL], dtype="float32", block_size=SIZE)
    cache = opened(spec, by_group=True)
    with cache.sequence(prompt(1, 300)) as seq:
        compute(cache, seq, 20)
        first, pages = cache.table.pages(seq.row, 1)
        assert len(seq.blocks) == 75
        assert (first, len(pages)) == (73, 2), "of a window of 9 tokens two blocks, and 5 of 6 layers have it"
        with pytest.raises(pk.InvalidArgument, match="from 292 on, and start is 0"):
            seq.gather()
        k, v = seq.gather(292)
        for layer in range(6):
            _, k_layer, v_layer = kv_of(layer, seq.tokens[292:], np.arange(292, 300, dtype=np.int32))
            np.testing.assert_array_equal(k[layer], k_layer)
            np.testing.assert_array_equal(v[layer], v_layer)
    with pytest.raises(pk.OutOfBlocks), cache.sequence(prompt(2, 5000)) as seq, cache.step([seq]):
        pass
    cache.check_integrity()


def test_no_page_shows_another_namespaces_numbers(opened: Callable[..., pk.KVCache]) -> None:
    spec = SPECS["both"]
    cache = opened(spec, 30, by_group=True)
    for turn in range(8):
        with cache.sequence(prompt(turn, 61), pk.Namespace(tenant=str(turn % 2))) as seq:
            while seq.num_computed < seq.num_tokens:
                count = min(10, seq.num_tokens - seq.num_computed)
                with cache.step([seq], q_lens=[count], lookahead=6) as step:
                    forward(step, spec)
                    for layer in range(4) if turn else ():
                        tables = step.tables_of(layer)
                        page, offset = divmod(int(tables.slot_mapping[-1]), SIZE)
                        ahead = tables.block_tables[0][-(-int(tables.seq_lens[0]) // SIZE) :]
                        for side in cache.layer(layer):
                            assert not side[page, offset + 1 :].any()
                            assert not side[ahead[ahead >= 0]].any()
    cache.purge(pk.Namespace(tenant="1"))
    cache.check_integrity()
    with cache.sequence(prompt(7, 61), pk.Namespace(tenant="1")) as seq:
        assert not any(seq.hit_tokens.values())


def test_pins_priorities_and_quotas_hold_over_groups(opened: Callable[..., pk.KVCache]) -> None:
    spec = SPECS["windows"]
    cache = opened(spec, 40, by_group=True, pin_budget=pk.Blocks(20), event_words=1 << 14)
    tenant = pk.Namespace(tenant="a")
    cache.set_quota(tenant, pk.Blocks(10))
    for seed in range(2):
        with cache.sequence(prompt(seed, 41)) as seq:
            seq.retain(priority=80)
            compute(cache, seq)
    pin = cache.pin(prompt(0, 40))
    assert pin.num_tokens == 40
    for seed in range(2, 12):
        with cache.sequence(prompt(seed, 41), tenant if seed % 2 else None) as seq:
            compute(cache, seq)
        cache.check_integrity()
    for seed in (0, 1):
        with cache.sequence(np.append(prompt(seed, 41)[:40], 7)) as seq:
            assert seq.hit_tokens["device"] == 40
    pin.release()
    assert cache.events()


def test_a_mask_is_for_layers_that_see_everything(opened: Callable[..., pk.KVCache]) -> None:
    cache = opened(SPECS["windows"], by_group=True)
    seq = cache.sequence(prompt(1, 5))
    step = cache.step([seq]).__enter__()
    q, k, v = kv_of(0, step.tokens, step.positions)
    step.write(0, k, v)
    with pytest.raises(pk.UnsupportedVariant, match="layer 0"):
        step.attend(0, q, mask=np.full(4, 255, np.uint8), mask_indptr=np.array([0, 25]))
    with pytest.raises(pk.UnsupportedVariant, match="gather"):
        seq.export_blocks()
    with pytest.raises(pk.UnsupportedVariant, match="layer"):
        cache.pages(0)


class LaidOut(TieredStorage):
    """A storage of the caller's that can hold groups of layers; it notes its calls in `told`."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def lay_out(self, layout: GroupLayout) -> None:
        self.told.append(layout)
        super().__init__(layout=layout)

    def open(self, spec: pk.KVSpec, blocks: Sequence[int], disk: pk.Disk | None) -> list[int]:
        self.told.append(list(blocks))
        return super().open(spec, blocks, disk)


def test_a_storage_of_the_caller_s_is_told_the_layout_before_it_opens(opened: Callable[..., pk.KVCache]) -> None:
    storage, tokens = LaidOut(), prompt(4, 60)
    cache, plain = (opened(SPECS["windows"], **options) for options in ({"by_group": True, "storage": storage}, {}))
    layout, blocks = storage.told
    assert layout == layout_of(cache.spec, 120 * cache.spec.block_bytes)
    assert blocks == [120 * cache.spec.block_bytes // layout.extent_bytes, 0, 0]
    assert np.array_equal(compute(cache, cache.sequence(tokens)), compute(plain, plain.sequence(tokens)))
    uniform = LaidOut()
    opened(SPECS["windows"], storage=uniform)
    assert uniform.told == [[120, 0, 0]], "without groups there is no layout"


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"policy": "s3fifo"}, pk.UnsupportedVariant, "policy"),
        ({"storage": TieredStorage()}, pk.UnsupportedVariant, "storage"),
        ({"inclusive": (True,)}, pk.UnsupportedVariant, "inclusive"),
        ({"by_group": 1}, pk.WrongType, "by_group"),
        ({"device_memory": pk.Blocks(1)}, pk.InvalidArgument, "or more"),
        ({"spec": pk.KVSpec(2, 2, 8)}, pk.InvalidArgument, "see equally far"),
        ({"spec": pk.KVSpec(2, 2, 8, windows=(9, 9))}, pk.InvalidArgument, "none sees everything"),
        ({"spec": pk.KVSpec(6, 2, 8, windows=(None, 20, 40, 60, 80, 100))}, pk.InvalidArgument, "layer 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cache_by_groups_says_what_it_cannot_be(
    options: dict[str, Any], error: type[Exception], said: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"spec": SPECS["windows"], "device_memory": pk.Blocks(50), "by_group": True, **options}
    with pytest.raises(error, match=said):
        pk.KVCache(**given)
    assert not list(tmp_path.iterdir()), "it left something behind"
