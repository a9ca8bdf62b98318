"""The correctness matrix: every kernel against float64.

It covers dtypes, shapes, lengths, variants, layouts and schedules.

For each kernel there is a set of cases in which every pair of values occurs. The quick run takes one case in SLICE, the
slow run the others; ``-m full`` takes a set in which every three values occur.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from allpairspy import AllPairs

from pagedkv.kernels import schedules
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.select import KERNELS, Kernel
from tests.kernels.cases import Case, assert_close, problem, run
from tests.slices import one_in

KV_TYPES = {
    "f32": {"q_dtype": "float32", "kv_dtype": "float32"},
    "f16": {"q_dtype": "float16", "kv_dtype": "float16"},
    "bf16": {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"},
    "e4m3": {"q_dtype": "bfloat16", "kv_dtype": "float8_e4m3", "scale_mode": "tensor"},
    "e5m2": {"q_dtype": "float16", "kv_dtype": "float8_e5m2", "scale_mode": "head"},
    "i8": {"q_dtype": "bfloat16", "kv_dtype": "int8", "scale_mode": "token_head"},
}
HEAD_DIMS = [64, 80, 96, 128, 256]
GROUP_SIZES = [1, 2, 3, 4, 7, 8, 16]
LATENT_DIMS, LATENT_GROUPS = [(576, 512), (320, 256)], [1, 7, 16, 32, 128]  # of kernels for V within K
PLACES = [
    *((layout, size) for layout in ("NHD", "HND") for size in (1, 8, 16, 32, 64, 128)),
    ("NHD", 0),  # contiguous
]
LENGTHS = [(0,), (1,), (15,), (16,), (17,), (255,), (1000,), (0, 33, 1, 70)]
VARIANTS = {
    "plain": {},
    "all keys": {"causal": False},
    "window": {"window": 20},
    "soft cap": {"soft_cap": 3.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "mask": {"mask": True, "causal": False},
    "everything": {"window": 40, "soft_cap": 5.0, "alibi": True, "sinks": True, "mask": True},
}
SLICE = 60
PARTS = 12  # tests of a kernel's triples: all in one met pytest's limit of 20 minutes on a busy machine
Q_LENS = [None, 2, 5, 40]  # None: decode, without q_indptr
IN_PARTS = "in parts"  # the listed schedule, dividing row tiles of more than one key tile


def values_of(kernel: Kernel) -> list[list[Any]]:
    """What each parameter of a case can be for a kernel."""
    if kernel.name.startswith("decode_mla"):  # values that it never takes would make the search for pairs long
        wide = kernel.name == "decode_mla_wgmma"
        types = ["f16", "bf16"] if wide else [name for name in KV_TYPES if name != "i8"]
        places = [place for place in PLACES if place[1] >= (8 if wide else 1)]
        groups = [33, 64, 128] if wide else LATENT_GROUPS
        return [types, LATENT_DIMS, groups, places, LENGTHS, list(VARIANTS), Q_LENS[:-1], list(kernel.schedules)]
    divided = [IN_PARTS] if "listed" in kernel.schedules else []
    how = [*kernel.schedules, *divided]
    return [list(KV_TYPES), HEAD_DIMS, GROUP_SIZES, PLACES, LENGTHS, list(VARIANTS), Q_LENS, how]


def dims_of(value: Any) -> dict[str, Any]:
    """Fields of a case: one head dim, or those of latents."""
    if isinstance(value, int):
        return {"head_dim": value}
    return {"head_dim": value[0], "head_dim_v": value[1], "v_in_k": True}


def case_of(row: list[Any]) -> Case:
    """Make a case of a row of the matrix.

    Queries beyond a sequence's keys are cut, and one KV head is enough where there are many rows.
    """
    kv_type, head_dim, group_size, (layout, block_size), lens, variant, q_len, _ = row
    q_lens = None if q_len is None else tuple(min(q_len, length) if length else 1 for length in lens)
    heads = 1 if not isinstance(head_dim, int) or group_size * (q_len or 1) > 16 or sum(lens) > 300 else 2
    return Case(
        lens, q_lens, **dims_of(head_dim), group_size=group_size, num_kv_heads=heads, block_size=block_size,
        layout=layout,         **KV_TYPES[kv_type], **VARIANTS[variant],
    )  # fmt: skip


def fits(kernel: Kernel, row: list[Any]) -> bool:
    """Whether a case (or the beginning of one, while it is made) is the kernel's."""
    kv_type, head_dim = row[0], row[1] if len(row) > 1 else values_of(kernel)[1][0]
    types = {name: value for name, value in KV_TYPES[kv_type].items() if name != "scale_mode"}
    size = row[3][1] if len(row) > 3 else 16
    group_size = row[2] if len(row) > 2 else values_of(kernel)[2][0]
    case = Case(**dims_of(head_dim), group_size=group_size, block_size=size, **types)
    if kernel.unsupported(case.config, (9, 0)) is not None:
        return False
    rows = (row[6] or 1) * row[2] if len(row) > 6 else 0
    if rows and ((row[6] == 40 and (row[4] == (1000,) or row[2] > 8)) or (rows > 128 and row[4] == (1000,))):
        return False  # 40 queries of many heads over 1,000 keys: the interpreter's time, nothing new
    return len(row) < len(values_of(kernel)) or kernel.unsupported(case_of(row).config, (9, 0)) is None


def rows_of(kernel: Kernel, strength: int) -> Iterator[Any]:
    values = values_of(kernel)
    values[0] = [kv_type for kv_type in values[0] if fits(kernel, [kv_type])]
    for row in AllPairs(values, filter_func=lambda row: fits(kernel, row), n=strength):
        shown = "-".join(str(value).replace(" ", "") for value in row)
        yield pytest.param(kernel, row, id=f"{kernel.name}-{shown}")


def lacking(backend: Backend, kernel: Kernel, row: list[Any]) -> str | None:
    """Why a device cannot compute a row, as rows are those of an H100; None if it can."""
    return kernel.unsupported(case_of(row).config, backend.capability)


def check_row(backend: Backend, kernel: Kernel, row: list[Any]) -> None:
    case = case_of(row)
    given, longest = problem(case), max(case.q_lens or (1,))
    schedule = "listed" if row[-1] == IN_PARTS else row[-1]
    with pytest.MonkeyPatch.context() as patch:
        if row[-1] == IN_PARTS:
            patch.setattr(schedules, "MIN_PART_KEYS", 1)
        plan = kernel.plan(
            backend, case.config, kernel.tiling(case.config, longest, backend.capability), schedule,
            num_kv_heads=case.num_kv_heads,
            max_sequences=len(case.seq_lens), max_q_len=longest, max_tokens=len(given.q),
            max_seq_len=max(max(case.seq_lens), 1),
        )  # fmt: skip
    assert_close(given, *run(backend, given, plan=plan))


@pytest.mark.parametrize(("kernel", "row"), [case for kernel in KERNELS for case in one_in(SLICE, rows_of(kernel, 2))])
def test_every_pair_of_values_is_right(backend: Backend, kernel: Kernel, row: list[Any]) -> None:
    reason = lacking(backend, kernel, row)
    if reason is not None:
        pytest.skip(reason)
    check_row(backend, kernel, row)


def test_rows_that_another_gpu_lacks_are_not_launched_there() -> None:
    rows = {kernel.name: next(rows_of(kernel, 2)).values[1] for kernel in KERNELS}
    for capability, number in (((9, 0), 7), ((10, 0), 5), ((8, 0), 4), ((12, 0), 3)):
        device: Any = SimpleNamespace(capability=capability)
        assert [lacking(device, kernel, rows[kernel.name]) for kernel in KERNELS].count(None) == number


@functools.cache
def triples(kernel: Kernel) -> list[Any]:
    """Rows in which every three values occur, found once for all parts."""
    return list(rows_of(kernel, 3))


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_three_values_are_right(backend: Backend, kernel: Kernel, part: int) -> None:
    for case in triples(kernel)[part::PARTS]:
        if lacking(backend, *case.values) is None:
            check_row(backend, *case.values)
