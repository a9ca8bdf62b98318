"""Reads ``.npz`` traces.

Arrival, lengths, and each path as a reference to an earlier one plus new blocks.

Nothing is unpickled, and no array is allocated before its header has been held against the bytes there.
"""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TraceFormatError
from pagedkv.lab.replay import fields
from pagedkv.lab.replay.trace import (
    MAX_BLOCK_SIZE,
    MAX_REQUESTS,
    MAX_SESSION,
    MAX_TIME_MS,
    MAX_TOKENS,
    Trace,
    from_segments,
)

FEW_ACCESSES = 1 << 24  # 64 MiB of int32 paths: what any file may ask for
MAX_ACCESSES_PER_BYTE = 2048  # of the columns as stored; recorded traces have 3 to 130, those in blocks of 16 about 500
MAX_DEFLATE_RATIO = 1032  # zlib's own bound: one bit can stand for at most 258 bytes in pairs
# What zipfile, zlib and numpy's header parser raise on damaged bytes (RuntimeError: encrypted members).
UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    MemoryError,
)
COLUMNS = ("t_ms", "input_tokens", "output_tokens", "ref", "lcp", "nblk")
SESSION = "session"  # a column that may be there


def read_npz(path: Path) -> Trace:
    """Read one ``.npz`` trace.

    Raises
    ------
    TraceFormatError : not an npz, truncated, a field missing, of the wrong dtype or with impossible numbers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {Path(info.filename).stem: info for info in archive.infolist() if info.filename.endswith(".npy")}
            size = path.stat().st_size
            block_size = _scalar(path, "block_size", _member(archive, members, "block_size", path, size))
            names = (*COLUMNS, SESSION) if SESSION in members else COLUMNS
            column = {name: _column(path, name, _member(archive, members, name, path, size)) for name in names}
            stored = sum(members[name].compress_size for name in names)
    except TraceFormatError:
        raise
    except UNREADABLE as error:
        raise TraceFormatError(path, "", f"not an npz file, or a truncated one ({_line(error)})") from None
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise TraceFormatError(path, "field block_size", f"{block_size} is not in 1..{MAX_BLOCK_SIZE}")
    _check(path, block_size, column)
    _check_amount(path, int(column["nblk"].sum()), stored)
    return from_segments(
        path.name,
        fields.file_sha256(path),
        block_size,
        column["t_ms"],
        column["input_tokens"].astype(np.int32),
        column["output_tokens"].astype(np.int32),
        column["ref"],
        column["lcp"],
        column["nblk"],
        column.get(SESSION),
    )


def _check(path: Path, block_size: int, column: dict[str, NDArray[np.int64]]) -> None:
    tokens, ref, lcp, nblk = (column[name] for name in ("input_tokens", "ref", "lcp", "nblk"))
    n = len(nblk)
    for name, values in column.items():
        if len(values) != n:
            raise TraceFormatError(path, f"field {name}", f"has {len(values)} entries, nblk has {n}")
    if SESSION in column:
        fields.bounded(path, SESSION, column[SESSION], -1, MAX_SESSION)
    fields.bounded(path, "t_ms", column["t_ms"], 0, MAX_TIME_MS)
    fields.bounded(path, "input_tokens", tokens, 0, MAX_TOKENS)
    fields.bounded(path, "output_tokens", column["output_tokens"], 0, MAX_TOKENS)
    fields.bounded(path, "nblk", nblk, 0, MAX_TOKENS)
    whole = tokens // block_size
    fields.first_bad(
        path,
        "nblk",
        nblk,
        (nblk < whole) | (nblk > -(-tokens // block_size)),
        f"{{value}} blocks of {block_size} do not match input_tokens there",
    )
    here = np.arange(n)
    fields.first_bad(path, "ref", ref, ref < -1, "{value} is below -1")
    fields.first_bad(path, "ref", ref, ref >= here, "{value} points at this or a later request")
    fields.bounded(path, "lcp", lcp, 0, MAX_TOKENS)
    fields.first_bad(path, "lcp", lcp, lcp > nblk, "{value} is longer than the request's own path")
    fields.first_bad(path, "lcp", lcp, (ref < 0) & (lcp > 0), "{value} blocks shared with no request (ref is -1)")
    shared = np.where(ref >= 0, nblk[np.maximum(ref, 0)], 0) if n else lcp
    fields.first_bad(path, "lcp", lcp, lcp > shared, "{value} is longer than the path it refers to")
    fields.totals(path, "field nblk", n, int(nblk.sum()))


def _check_amount(path: Path, num_accesses: int, stored_bytes: int) -> None:
    """Refuse files that expand beyond what their size can mean.

    A few bytes can name any number of blocks, as each path may refer to an earlier one.
    """
    if num_accesses > max(FEW_ACCESSES, MAX_ACCESSES_PER_BYTE * stored_bytes):
        raise TraceFormatError(
            path,
            "field nblk",
            f"{num_accesses} block accesses in columns of {stored_bytes} bytes, more than {MAX_ACCESSES_PER_BYTE} for "
            f"each byte; if they are meant, save the trace without compression (numpy.savez)",
        )


def _member(
    archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str, path: Path, file_bytes: int
) -> NDArray[np.generic]:
    where = f"field {name}"
    if name not in members:
        raise TraceFormatError(path, where, "is missing")
    info = members[name]
    try:
        with archive.open(info) as stream:
            major, _ = np.lib.format.read_magic(stream)
            header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = header(stream)
            if dtype.kind not in "iu":
                raise TraceFormatError(path, where, f"must hold integers, not {dtype}")
            if fortran_order and len(shape) > 1:
                raise TraceFormatError(path, where, "must be one-dimensional")
            count = 1
            for extent in shape:
                count *= extent
            there = info.compress_size * (1 if info.compress_type == zipfile.ZIP_STORED else MAX_DEFLATE_RATIO)
            if not 0 <= count <= MAX_REQUESTS or info.compress_size > file_bytes or count * dtype.itemsize > there:
                raise TraceFormatError(path, where, f"claims shape {shape}, which cannot be in this file")
            data = stream.read(count * dtype.itemsize + 1)
    except TraceFormatError:
        raise
    except UNREADABLE as error:
        raise TraceFormatError(path, where, f"cannot be read ({_line(error)})") from None
    if len(data) != count * dtype.itemsize:
        raise TraceFormatError(path, where, f"holds {len(data)} bytes where its header says {count * dtype.itemsize}")
    return np.frombuffer(data, dtype).reshape(shape)


def _column(path: Path, name: str, array: NDArray[np.generic]) -> NDArray[np.int64]:
    if array.ndim != 1:
        raise TraceFormatError(path, f"field {name}", f"must be one-dimensional, has shape {array.shape}")
    if array.dtype.kind == "u" and len(array) and int(array.max()) > np.iinfo(np.int64).max:
        raise TraceFormatError(path, f"field {name}[{int(array.argmax())}]", f"{array.max()} is absurd")
    return array.astype(np.int64)


def _scalar(path: Path, name: str, array: NDArray[np.generic]) -> int:
    if array.size != 1:
        raise TraceFormatError(path, f"field {name}", f"must be one number, has shape {array.shape}")
    return int(array.reshape(())[()])


def _line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0]
