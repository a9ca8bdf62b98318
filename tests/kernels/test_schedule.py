"""The even split: its oracle keeps the promises, and the kernels do what the oracle does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.kernels import decode_simt
from pagedkv.kernels.attention import AttentionPlan, Batch, Options
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.config import AttentionConfig
from tests.kernels.even_split import LEAST_UNITS, Part, key_tiles, parts, row_tiles, unit_indptr
from tests.mutants.kernels import mutated

TILE = 64
lengths = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 5)), max_size=8)
# What decode_simt does instead of attention: it writes its segments down, [num_ctas, RECORDS, FIELDS], as its output.
RECORDS, FIELDS = 600, 12
RECORD = """
  int* record = static_cast<int*>(p.o) + static_cast<i64>(blockIdx.x) * p.o_token_stride;
  while (schedule.next(segment)) {
    if (threadIdx.x == 0) {
      const int fields[] = {1, segment.seq, segment.kv_head, segment.row_begin, segment.num_rows, segment.begin,
                            segment.end, segment.slot, segment.first_cta, segment.last_cta, segment.q_first,
                            segment.q_len};
      for (int i = 0; i < 12; ++i) record[i] = fields[i];
    }
    record += 12;
  }
"""


@given(lengths, st.integers(0, 200), st.sampled_from([1, 3, 8]), st.integers(1, 3), st.integers(1, 40))
def test_every_tile_of_every_row_tile_is_computed_once_by_neighbouring_ctas(
    batch: list[tuple[int, int]], window: int, group_size: int, num_kv_heads: int, num_ctas: int
) -> None:
    seq_lens, q_lens = [seq_len for seq_len, _ in batch], [q_len for _, q_len in batch]
    found = list(parts(seq_lens, q_lens, window, group_size, 8, TILE, num_kv_heads, num_ctas))
    covered: Counter[tuple[int, ...]] = Counter()
    contributors: dict[tuple[int, int, int], list[Part]] = {}
    for part in found:
        contributors.setdefault((part.seq, part.kv_head, part.row_tile), []).append(part)
        covered.update((part.seq, part.kv_head, part.row_tile, tile) for tile in range(part.tile_begin, part.tile_end))
    wanted = {
        (seq, head, rows, tile)
        for seq, (seq_len, q_len) in enumerate(batch)
        for head in range(num_kv_heads)
        for rows in range(row_tiles(q_len, group_size, 8))
        for tile in key_tiles(seq_len, q_len, window, TILE)
    }
    assert covered == Counter(wanted)
    assert len(contributors) == sum(num_kv_heads * row_tiles(q_len, group_size, 8) for q_len in q_lens)
    for shares in contributors.values():
        assert [part.cta for part in shares] == list(range(shares[0].first_cta, shares[0].last_cta + 1))
    slots = [part.slot for part in found if part.slot >= 0]
    assert len(slots) == len(set(slots)), "two parts in one slot"
    partial_firsts = Counter(part.first_cta for part in found if part.slot >= 0 and part.cta == part.first_cta)
    assert max(partial_firsts.values(), default=1) == 1, "two row tiles count their arrivals in one place"
    total = unit_indptr(seq_lens, q_lens, window, group_size, 8, TILE)[-1] * num_kv_heads
    work = Counter()
    for part in found:
        work[part.cta] += part.tile_end - part.tile_begin
    assert max(work.values(), default=0) <= -(-total // max(min(num_ctas, total // LEAST_UNITS), 1))


@pytest.mark.parametrize("num_seqs", [1, 37, 1024, 1500])
@pytest.mark.parametrize(("window", "ragged"), [(0, False), (100, True)])
def test_the_plan_kernel_sums_units_as_the_oracle(backend: Backend, num_seqs: int, window: int, ragged: bool) -> None:
    rng = np.random.default_rng(num_seqs)
    seq_lens = rng.integers(0, 3000, num_seqs).astype(np.int32)
    q_lens = rng.integers(0, 4, num_seqs) if ragged else np.ones(num_seqs, int)
    plan, batch = _plan(backend, seq_lens, q_lens if ragged else None, window, group_size=3, num_kv_heads=1)
    plan.update(batch, window)
    indptr = backend.to_host(plan.division.arrays["unit_indptr"])
    assert indptr.tolist() == unit_indptr(seq_lens, q_lens, window, 3, plan.tiling.row_tile, TILE)


@pytest.mark.parametrize(
    ("seq_lens", "q_lens", "window", "num_kv_heads"),
    [
        ((5,), (1,), 0, 1),  # fewer units than CTAs
        ((200,), (1,), 0, 1),
        ((0, 0, 300, 0), (1, 0, 1, 1), 0, 2),
        ((640, 64, 65, 63, 1), (1, 1, 1, 1, 1), 0, 2),
        ((300, 130), (5, 3), 0, 1),
        ((300, 130, 20), (5, 3, 1), 40, 2),
        ((64 * 40,), (1,), 0, 1),
        (tuple(seq % 131 for seq in range(0, 4000, 37)), (1, 0, 1, 1) * 27 + (1,), 0, 1),
        ((3, 0, 65, 1) * 275, (1,) * 1100, 0, 1),  # more sequences than two reads of a warp find
    ],
)
@pytest.mark.parametrize("num_sms", [1, 4])
def test_the_kernels_segments_are_those_of_the_oracle(
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    seq_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    window: int,
    num_kv_heads: int,
    num_sms: int,
) -> None:
    monkeypatch.setattr(backend, "num_sms", num_sms)
    plan, batch = _plan(backend, np.array(seq_lens, np.int32), q_lens, window, group_size=3, num_kv_heads=num_kv_heads)
    with mutated("decode_simt", (("  while (schedule.next(segment)) attend(p, segment, warp);\n", RECORD),)):
        records = _records(backend, plan, batch, window)
    row_tile = plan.tiling.row_tile
    expected = []
    num_ctas = num_sms * plan.tiling.ctas_per_sm
    for part in parts(seq_lens, q_lens, window, 3, row_tile, TILE, num_kv_heads, num_ctas):
        seq_len, q_len = seq_lens[part.seq], q_lens[part.seq]
        rows = range(part.row_tile * row_tile, min((part.row_tile + 1) * row_tile, q_len * 3))
        first, last = (seq_len - q_len + row // 3 for row in (rows[0], rows[-1]))
        begin = max(part.tile_begin * TILE, max(first + 1 - window, 0) if window else 0)
        end = min(part.tile_end * TILE, last + 1)
        place = (part.slot, part.first_cta, part.last_cta) if part.slot >= 0 else (-1,)
        expected.append(
            (part.cta, part.seq, part.kv_head, rows[0], len(rows), (begin, end) if begin < end else None, place)
        )
    assert records == expected


def _plan(
    backend: Backend, seq_lens: np.ndarray, q_lens: Any, window: int, group_size: int, num_kv_heads: int
) -> tuple[AttentionPlan, Batch]:
    config = AttentionConfig(64, 64, group_size, window=window > 0)
    limits = {"num_kv_heads": num_kv_heads, "max_sequences": len(seq_lens), "max_q_len": 5}
    plan = AttentionPlan(backend, config, decode_simt.tiling(config), "even", **limits)
    indptr = None if q_lens is None else np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    batch = Batch(backend.asarray(seq_lens), q_indptr=None if indptr is None else backend.asarray(indptr))
    return plan, batch


def _records(backend: Backend, plan: AttentionPlan, batch: Batch, window: int) -> list[tuple[Any, ...]]:
    """Return a record of every segment that the kernel walks.

    (cta, seq, kv_head, first row, rows, keys or None, place).
    """
    num_ctas = backend.num_sms * plan.tiling.ctas_per_sm
    batch.block_tables = backend.zeros((len(batch.seq_lens), 1), np.int32)
    kv = backend.zeros((1, 16, plan.limits.num_kv_heads, 64), np.float16)
    plan._main = replace(
        plan._main, macros=(*plan._main.macros, ("RECORDING", "1"))
    )  # a cache must not take it for the kernel
    q = backend.zeros((1, plan.limits.num_kv_heads * 3, 64), np.float16)
    # The stride from one "token" of this output to the next is one CTA's records, in elements of its dtype.
    out = backend.zeros((num_ctas, RECORDS, FIELDS), np.int32)
    plan.update(batch, window)
    plan.run(q, kv, kv, out, batch, Options(1.0, window=window))
    found = []
    for cta, rows in enumerate(backend.to_host(out).tolist()):
        for used, seq, head, row, count, begin, end, slot, first, last, _, _ in rows:
            if used:
                place = (slot, first, last) if slot >= 0 else (-1,)
                found.append((cta, seq, head, row, count, (begin, end) if begin < end else None, place))
    return found


def test_more_units_than_32_bits_number_are_refused_before_anything_is_launched() -> None:
    from pagedkv.errors import InvalidArgument
    from pagedkv.kernels.recorder import Recorder
    from pagedkv.kernels.select import make_plan
    from tests.kernels.cases import Case

    recorder, config = Recorder((9, 0)), Case(head_dim=64, group_size=4).config
    sizes = {"num_kv_heads": 32, "max_sequences": 8, "max_q_len": 1 << 17, "max_tokens": 1 << 20}
    plan = make_plan(recorder, config, kernel="decode_simt", **sizes)
    plan.division.check(8, 1 << 17, 1 << 12)
    with pytest.raises(InvalidArgument, match="32 bits"):
        plan.division.check(8, 1 << 20, 1 << 17)
    make_plan(recorder, config, kernel="decode_simt", schedule="whole", **sizes).division.check(8, 1 << 20, 1 << 17)
