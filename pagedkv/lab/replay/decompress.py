"""Streams the bytes of a trace file: plain, gzip, or Zstandard (an extra before 3.14)."""

from __future__ import annotations

import hashlib
import importlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from pagedkv import extras
from pagedkv.errors import TraceFormatError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
CHUNK_BYTES = 1 << 16
PIECE_BYTES = 1 << 10  # of compressed input at a time: a zstd block of 4 bytes can stand for 128 KiB


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def decompressed(path: Path, sha256: hashlib._Hash) -> Iterator[bytes]:
    """Yield the file's content in pieces; ``sha256`` is fed the file's own (compressed) bytes.

    Raises
    ------
    TraceFormatError : empty, truncated or damaged, or not in the compression its name says.
    ImportError : ``.zst`` without a Zstandard module.
    """
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        if not magic:
            raise TraceFormatError(path, "", "the file is empty")
        make: Callable[[], _Decompressor] | None = None
        if magic.startswith(GZIP_MAGIC):
            make = _gzip
        elif magic == ZSTD_MAGIC:
            make = _zstd()
        elif path.suffix in (".gz", ".zst"):
            raise TraceFormatError(path, "", f"is not a {path.suffix} file, whatever its name says")
        chunks = _hashed(iter(lambda: file.read(CHUNK_BYTES), b""), sha256)
        yield from chunks if make is None else _members(path, chunks, make)


def _hashed(chunks: Iterator[bytes], sha256: hashlib._Hash) -> Iterator[bytes]:
    for chunk in chunks:
        sha256.update(chunk)
        yield chunk


def _members(path: Path, chunks: Iterator[bytes], make: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """Decompress all gzip members or zstd frames of a file.

    A file may hold several, one after the other; the last must be whole.
    """
    current, started = make(), False
    for chunk in chunks:
        for at in range(0, len(chunk), PIECE_BYTES):
            data = chunk[at : at + PIECE_BYTES]
            while data:
                try:
                    out = current.decompress(data)
                except Exception as error:  # zlib.error, ZstdError of two modules, EOFError: all mean damaged input
                    raise TraceFormatError(path, "", f"damaged compressed data ({error})") from None
                started = True
                yield out
                data = b""
                if current.eof:
                    data = current.unused_data
                    current, started = make(), False
    if started:
        raise TraceFormatError(path, "", "the compressed data ends too early: the file is truncated")


def _gzip() -> _Decompressor:
    return zlib.decompressobj(wbits=31)


def _zstd() -> Callable[[], _Decompressor]:
    try:
        module = importlib.import_module("compression.zstd")  # Python 3.14
        make: Callable[[], _Decompressor] = module.ZstdDecompressor
    except ImportError:
        try:
            module = importlib.import_module("zstandard")
        except ImportError:
            raise ImportError(f"reading .zst needs Python 3.14 or: {extras.command('bench')}") from None
        decompressor = module.ZstdDecompressor()
        make = decompressor.decompressobj
    return make
