"""The .npz reader.

It reads good traces exactly; for every kind of damage, the error names the field.
"""

from __future__ import annotations

import contextlib
import io
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import TraceFormatError
from pagedkv.lab.replay import load_trace
from pagedkv.lab.replay.trace_npz import FEW_ACCESSES


def save(folder: Path, fields: dict[str, Any]) -> Path:
    path = folder / "trace.npz"
    np.savez_compressed(path, **fields)
    return path


def test_paths_are_rebuilt_from_references(tmp_path: Path, npz_fields: dict[str, Any]) -> None:
    trace = load_trace(save(tmp_path, npz_fields))
    assert [trace.path(i).tolist() for i in range(3)] == [[0, 1, 2], [0, 1, 3, 4], [5]]
    assert trace.parents.tolist() == [-1, 0, 1, 1, 3, -1]
    assert trace.depths.tolist() == [0, 1, 2, 2, 3, 0]
    assert trace.seen_before().tolist() == [0, 2, 0]
    assert (trace.block_size, trace.num_accesses, trace.num_unique) == (512, 8, 6)


def test_a_trace_is_read_only(tmp_path: Path, npz_fields: dict[str, Any]) -> None:
    trace = load_trace(save(tmp_path, npz_fields))
    with pytest.raises(ValueError, match="read-only"):
        trace.paths[0] = 7


def test_the_head_of_a_trace_is_a_trace(tmp_path: Path, npz_fields: dict[str, Any]) -> None:
    head = load_trace(save(tmp_path, npz_fields)).head(2)
    assert (head.num_requests, head.num_accesses, head.num_unique) == (2, 7, 5)


def test_sessions_are_read_where_there_are_any(tmp_path: Path, npz_fields: dict[str, Any]) -> None:
    assert load_trace(save(tmp_path, npz_fields)).sessions.tolist() == [-1, -1, -1]
    npz_fields["session"] = np.array([4, -1, 4])
    trace = load_trace(save(tmp_path, npz_fields))
    assert (trace.sessions.tolist(), trace.head(2).sessions.tolist()) == ([4, -1, 4], [4, -1])
    del npz_fields["session"]
    assert load_trace(save(tmp_path, npz_fields)).sessions.tolist() == [-1, -1, -1]


BAD: list[tuple[str, Any, str]] = [
    ("t_ms", np.array([0, -5, 9]), r"t_ms\[1\].*below 0"),
    ("t_ms", np.array([0, 5, 2**62]), r"t_ms\[2\].*absurd"),
    ("t_ms", np.array([0, 5, 2**64 - 1], np.uint64), r"t_ms\[2\].*absurd"),
    ("t_ms", np.array([0.0, 5.0, 9.0]), r"t_ms.*integers, not float64"),
    ("t_ms", np.array(["0", "5", "9"]), r"t_ms.*integers"),
    ("t_ms", np.array([[0, 5, 9]]), r"t_ms.*one-dimensional"),
    ("t_ms", np.array([0, 5]), r"t_ms: has 2 entries, nblk has 3"),
    ("input_tokens", np.array([1500, -1, 512]), r"input_tokens\[1\].*below 0"),
    ("input_tokens", np.array([1500, 10**12, 512]), r"input_tokens\[1\].*absurd"),
    ("output_tokens", np.array([1, 2, -3]), r"output_tokens\[2\].*below 0"),
    ("nblk", np.array([3, 9, 1]), r"nblk\[1\]: 9 blocks of 512 do not match"),
    ("nblk", np.array([3, -4, 1]), r"nblk\[1\].*below 0"),
    ("nblk", np.array([3, 2**40, 1]), r"nblk\[1\].*absurd"),
    ("ref", np.array([-1, 1, -1]), r"ref\[1\].*this or a later request"),
    ("ref", np.array([2, 0, -1]), r"ref\[0\].*this or a later request"),
    ("ref", np.array([-1, -2, -1]), r"ref\[1\].*below -1"),
    ("lcp", np.array([0, 5, 0]), r"lcp\[1\].*own path"),
    ("lcp", np.array([0, 4, 0]), r"lcp\[1\].*refers to"),
    ("lcp", np.array([0, 2, 1]), r"lcp\[2\].*ref is -1"),
    ("lcp", np.array([0, -1, 0]), r"lcp\[1\].*below 0"),
    ("session", np.array([3, -2, 4]), r"session\[1\]: -2 is below -1"),
    ("session", np.array([3, 4, 2**63 - 1]), r"session\[2\].*absurd"),
    ("session", np.array([3, 4]), r"session: has 2 entries"),
    ("session", np.array([3.0, 4.0, 5.0]), r"session.*integers"),
    ("block_size", np.array(0), r"block_size.*0 is not in"),
    ("block_size", np.array(-512), r"block_size.*-512 is not in"),
    ("block_size", np.array([512, 512]), r"block_size.*one number"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_an_impossible_number_is_an_error_that_names_field_and_place(
    field: str, value: Any, message: str, tmp_path: Path, npz_fields: dict[str, Any]
) -> None:
    with pytest.raises(TraceFormatError, match=message):
        load_trace(save(tmp_path, npz_fields | {field: value}))


@pytest.mark.parametrize("field", ["t_ms", "input_tokens", "output_tokens", "ref", "lcp", "nblk", "block_size"])
def test_a_missing_field_is_named(field: str, tmp_path: Path, npz_fields: dict[str, Any]) -> None:
    del npz_fields[field]
    with pytest.raises(TraceFormatError, match=f"field {field}: is missing"):
        load_trace(save(tmp_path, npz_fields))


def test_pickled_objects_are_never_loaded(tmp_path: Path, npz_fields: dict[str, Any]) -> None:
    npz_fields["nblk"] = np.array([3, None, 1], object)
    with pytest.raises(TraceFormatError, match="nblk: must hold integers, not object"):
        load_trace(save(tmp_path, npz_fields))


def test_a_trace_without_requests_or_blocks_is_refused(tmp_path: Path, npz_fields: dict[str, Any]) -> None:
    none = {name: value if name == "block_size" else value[:0] for name, value in npz_fields.items()}
    with pytest.raises(TraceFormatError, match="no requests"):
        load_trace(save(tmp_path, none))
    empty = npz_fields | {name: np.zeros(3, np.int32) for name in ("input_tokens", "lcp", "nblk")}
    with pytest.raises(TraceFormatError, match="no request has a block"):
        load_trace(save(tmp_path, empty))


def test_every_truncation_is_an_error_and_never_a_shorter_trace(tmp_path: Path, npz_fields: dict[str, Any]) -> None:
    whole = save(tmp_path, npz_fields).read_bytes()
    cut = tmp_path / "cut.npz"
    for length in range(0, len(whole), 37):
        cut.write_bytes(whole[:length])
        with pytest.raises(TraceFormatError):
            load_trace(cut)


def test_flipped_bytes_give_the_same_trace_or_an_error(tmp_path: Path, npz_fields: dict[str, Any]) -> None:
    good = save(tmp_path, npz_fields)
    whole, paths = good.read_bytes(), load_trace(good).paths.tolist()
    bad = tmp_path / "bad.npz"
    for at in range(0, len(whole), 11):
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with contextlib.suppress(TraceFormatError):
            assert load_trace(bad).paths.tolist() == paths


@pytest.mark.parametrize("shape", [(10**12,), (-3,), (2**70,)])
def test_a_header_that_claims_more_than_the_file_holds_allocates_nothing(
    shape: tuple[int], tmp_path: Path, npz_fields: dict[str, Any]
) -> None:
    path = save(tmp_path, {name: value for name, value in npz_fields.items() if name != "nblk"})
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "<i8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("nblk.npy", member.getvalue() + b"\0" * 24)
    with pytest.raises(TraceFormatError, match="nblk: claims shape"):
        load_trace(path)


def test_a_file_that_is_no_npz_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(b"timestamp, input_length\n")
    with pytest.raises(TraceFormatError, match="not an npz"):
        load_trace(path)
    with pytest.raises(TraceFormatError, match="no such file"):
        load_trace(tmp_path / "absent.npz")
    with pytest.raises(TraceFormatError, match="is not a file"):
        load_trace(tmp_path)


def lightweight(requests: int, blocks: int) -> dict[str, Any]:
    """A trace of a few bytes for each request, all of which refer to the first one's path."""
    return {
        "block_size": np.int64(512), "t_ms": np.zeros(requests, np.int64),
        "input_tokens": np.full(requests, 512 * blocks), "output_tokens": np.ones(requests, np.int64),
        "ref": np.r_[-1, np.zeros(requests - 1, np.int64)], "lcp": np.r_[0, np.full(requests - 1, blocks)],
        "nblk": np.full(requests, blocks),
    }  # fmt: skip


def test_a_small_file_that_names_very_many_blocks_is_refused_before_they_take_memory(tmp_path: Path) -> None:
    path = save(tmp_path, lightweight(2_000, 20_000))  # 160 MB of paths
    assert path.stat().st_size < 4096
    tracemalloc.start()
    with pytest.raises(TraceFormatError, match=r"field nblk: 40000000 block accesses in columns of \d+ bytes.*savez"):
        load_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_what_any_file_may_name_and_what_is_saved_uncompressed_is_read(tmp_path: Path) -> None:
    assert load_trace(save(tmp_path, lightweight(100, 20_000))).num_accesses == 2_000_000
    np.savez(tmp_path / "plain.npz", **lightweight(1_000, 20_000))
    assert load_trace(tmp_path / "plain.npz").num_accesses == 20_000_000 > FEW_ACCESSES
