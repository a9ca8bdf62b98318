"""Parameter structs: Python's layout is the compiler's.

Filling a struct refuses values that do not belong to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagedkv.errors import CompileError, InvalidArgument
from pagedkv.kernels import params
from pagedkv.kernels.nvrtc import Nvrtc
from pagedkv.kernels.params import Params, address, fill, struct_dtype, struct_names
from pagedkv.kernels.source import sources_dir
from pagedkv.kernels.toolkits import installed_nvrtcs

TRICKY = """
struct alignas(64) Map { u64 opaque[16]; };  // as a tensor map
struct Small {
  int one;
};
struct Nested {
  int first;
  Small small[3];
  u64 wide;
};
struct TrickyParams {
  int before;
  Map map;            // at 64
  const float* data;
  int counts[3];
  Nested nested;
  float last;
};
"""


PLAN: dict[str, Any] = {
    "seq_lens": None,
    "q_indptr": None,
    "position_spans": None,
    "unit_indptr": None,
    "num_seqs": 2,
    "window": 0,
    "group_size": 4,
    "row_tile": 4,
    "tile_tokens": 64,
}


def plan(**changes: Any) -> Params:
    return fill("PlanParams", **{**PLAN, **changes})


def offsets(dtype: np.dtype[Any], prefix: str = "", base: int = 0) -> Iterator[tuple[str, int]]:
    """Every field of a struct and of the structs within it: its C name and its offset."""
    for name, (field, offset, *_) in (dtype.fields or {}).items():
        yield f"{prefix}{name}", base + offset
        if field.subdtype is None:
            yield from offsets(field, f"{prefix}{name}.", base + offset)


def layout_check(struct: str) -> str:
    """Assertions that the compiler's layout of a struct is NumPy's."""
    dtype = struct_dtype(struct)
    lines = [f'static_assert(sizeof({struct}) == {dtype.itemsize}, "sizeof {struct}");']
    for name, offset in offsets(dtype):
        # offsetof, as NVRTC 12 and 13 both spell it
        lines.append(f'static_assert(__INTADDR__(&(({struct}*)0)->{name}) == {offset}, "{struct}.{name}");')
    return "\n".join(lines)


def compile_checks(nvrtc: Nvrtc, text: str, checks: list[str]) -> None:
    source = "\n".join([text, *checks, 'extern "C" __global__ void nothing() {}'])
    nvrtc.compile(source, "layout.cu", ("-arch=compute_90", "-std=c++17", f"-I{sources_dir() / 'include'}"), "ptx")


@pytest.fixture(params=["12", "13"])
def nvrtc(request: pytest.FixtureRequest) -> Nvrtc:
    found = [one for one in installed_nvrtcs() if one.version[0] == int(request.param)]
    if not found:
        pytest.skip(f"no NVRTC {request.param} here")
    return found[0]


@pytest.fixture
def tricky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A header whose structs use everything the reader knows, in place of ours."""
    include = tmp_path / "include" / "pagedkv"
    include.mkdir(parents=True)
    (include / "tricky_params.cuh").write_text(TRICKY)
    monkeypatch.setattr(params, "sources_dir", lambda: tmp_path)
    params._structs.cache_clear()
    params._layout.cache_clear()
    params._form.cache_clear()
    yield TRICKY
    params._structs.cache_clear()
    params._layout.cache_clear()
    params._form.cache_clear()


def test_every_struct_is_laid_out_as_the_compiler_does(nvrtc: Nvrtc) -> None:
    headers = sorted((sources_dir() / "include" / "pagedkv").glob("*params.cuh"))
    text = "\n".join(f'#include "pagedkv/{path.name}"' for path in headers)
    assert {"AttentionParams", "PlanParams", "KvParams", "WriteKvParams"} <= set(struct_names())
    compile_checks(nvrtc, text, [layout_check(name) for name in struct_names()])


def test_arrays_alignment_and_structs_within_are_laid_out_as_the_compiler_does(nvrtc: Nvrtc, tricky: str) -> None:
    types = "typedef unsigned long long u64;\n"
    compile_checks(nvrtc, types + tricky, [layout_check(name) for name in struct_names()])
    fields = struct_dtype("TrickyParams").fields
    assert fields is not None
    assert fields["map"][1] == 64
    assert struct_dtype("TrickyParams").itemsize % 64 == 0


def test_the_check_of_layouts_notices_a_wrong_offset(nvrtc: Nvrtc, tricky: str) -> None:
    wrong = layout_check("Nested").replace("== 16", "== 12")
    with pytest.raises(CompileError, match=r"Nested\.wide"):
        compile_checks(nvrtc, "typedef unsigned long long u64;\n" + tricky, [wrong])


def test_arrays_become_addresses_and_stay_alive_with_the_params() -> None:
    lens, indptr = np.array([3, 4], np.int32), np.zeros(3, np.int32)
    filled = plan(seq_lens=lens, unit_indptr=indptr)
    assert isinstance(filled, Params)
    assert filled.record.shape == (1,)
    assert filled.record["seq_lens"][0] == lens.ctypes.data
    assert filled.record["q_indptr"][0] == 0
    assert filled.record["num_seqs"][0] == 2
    assert [id(array) for array in filled.arrays] == [id(lens), id(indptr)]


def test_an_array_of_16_bit_floats_that_numpy_does_not_know_is_an_address_too() -> None:
    lens = np.zeros(2, ml_dtypes.bfloat16)
    assert plan(seq_lens=lens).record["seq_lens"][0] == lens.ctypes.data


def test_a_missing_and_an_unknown_field_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"PlanParams: missing \['window'\], unknown \['windows'\]"):
        fill("PlanParams", **{name.replace("window", "windows"): value for name, value in PLAN.items()})
    with pytest.raises(InvalidArgument, match=r"KvParams: missing \['block_size'"):
        fill("AttentionParams", **dict.fromkeys(struct_dtype("AttentionParams").names or ()) | {"kv": {}})


@pytest.mark.parametrize(
    ("field", "value"), [("num_seqs", 2**31), ("window", 1.5), ("seq_lens", -1), ("row_tile", "4")]
)
def test_a_value_that_does_not_fit_its_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"PlanParams: a value does not fit .*{field} = {value}"):
        plan(**{field: value})


def test_opaque_bytes_fill_a_struct_of_their_size(tricky: str) -> None:
    content = np.frombuffer(bytes(range(128)), "V128")
    nested = {"first": 1, "small": np.zeros(3, "V4"), "wide": 2**63}
    filled = fill("TrickyParams", before=1, map=content, data=None, counts=[1, 2, 3], nested=nested, last=0.5)
    raw = filled.record.tobytes()
    assert raw[64:192] == bytes(range(128))
    assert filled.record["counts"][0].tolist() == [1, 2, 3]
    assert filled.record["nested"]["wide"][0] == 2**63


def test_an_element_of_its_dtype_fills_a_struct_within(tricky: str) -> None:
    nested = np.zeros(1, struct_dtype("Nested"))
    nested["small"]["one"] = [[1, 2, 3]]
    fields = {"before": 1, "map": {"opaque": range(16)}, "data": None, "counts": 7, "last": 1}
    filled = fill("TrickyParams", nested=nested[0], **fields).record[0]
    assert filled["nested"]["small"]["one"].tolist() == [1, 2, 3]
    assert filled["map"]["opaque"].tolist() == list(range(16))
    assert filled["counts"].tolist() == [7, 7, 7]
    with pytest.raises(InvalidArgument, match=r"TrickyParams\.map takes 128 bytes, got 64"):
        fill("TrickyParams", nested=nested[0], **{**fields, "map": np.zeros(1, "V64")})
    with pytest.raises(InvalidArgument, match="Nested: missing"):
        fill("TrickyParams", nested={"first": 1}, **fields)


def test_addresses_of_nothing_of_numpy_and_of_cupy_arrays() -> None:
    class Pointer:
        ptr = 0x7F0000001000

    class OnDevice:
        data = Pointer()

    array = np.arange(4)
    assert address(None) == 0
    assert address(array[1:]) == array.ctypes.data + 8
    assert address(OnDevice()) == 0x7F0000001000


def test_a_field_that_cannot_be_read_is_an_error_that_shows_it(tricky: str, tmp_path: Path) -> None:
    (tmp_path / "include" / "pagedkv" / "bad_params.cuh").write_text("struct BadParams { int a, b; };")
    params._structs.cache_clear()
    with pytest.raises(AssertionError, match=r"BadParams: cannot read 'int a, b'"):
        struct_dtype("BadParams")
