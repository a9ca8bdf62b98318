"""From user input to a Trace: a file, one that the package brings, or a synthetic one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from pagedkv.errors import InvalidArgument, TraceFormatError
from pagedkv.lab.replay.synthetic import synthetic
from pagedkv.lab.replay.trace import MAX_BLOCK_SIZE, Trace
from pagedkv.lab.replay.trace_jsonl import read_jsonl
from pagedkv.lab.replay.trace_npz import read_npz

SYNTHETIC = "synthetic:"
DATA = Path(__file__).with_name("data")
PACKAGED = {"mooncake:conversation": "mooncake_conversation.npz"}  # data/NOTICE says where it is from
DEFAULT_TRACE = "mooncake:conversation"


def load_trace(source: str | os.PathLike[str], *, block_size: int | None = None) -> Trace:
    """Read a trace file or generate a synthetic trace.

    Parameters
    ----------
    source : path of a ``.npz`` or ``.jsonl[.gz|.zst]`` file, or ``synthetic:NAME[:SEED[:REQUESTS]]``, or
        ``mooncake:conversation``: the real trace that the package brings.
    block_size : tokens per block of a ``.jsonl`` file that does not say (default 512).

    Raises
    ------
    TraceFormatError : the file cannot be read as a trace; names the line or field.
    InvalidArgument : unknown synthetic trace, or a block size where the trace brings its own.
    ImportError : ``.zst`` without a Zstandard module.
    """
    text = os.fspath(source)
    if block_size is not None and not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise InvalidArgument(f"block size {block_size} is not in 1..{MAX_BLOCK_SIZE}")
    if text.startswith(SYNTHETIC):
        _own_block_size(text, block_size)
        return synthetic(text.removeprefix(SYNTHETIC))
    if text in PACKAGED:
        _own_block_size(text, block_size)
        return replace(read_npz(DATA / PACKAGED[text]), name=text)
    path = Path(text)
    try:
        if not path.exists():
            raise TraceFormatError(text, "", "there is no such file")
        if not path.is_file():
            raise TraceFormatError(text, "", "is not a file")
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        if is_zip or path.suffix == ".npz":
            _own_block_size(text, block_size)
            return read_npz(path)
        return read_jsonl(path, block_size=block_size)
    except (OSError, ValueError) as error:
        if isinstance(error, TraceFormatError | InvalidArgument):
            raise
        raise TraceFormatError(text, "", (getattr(error, "strerror", None) or str(error)).splitlines()[0]) from None


def _own_block_size(text: str, block_size: int | None) -> None:
    if block_size is not None:
        raise InvalidArgument(f"--block-size is for .jsonl traces; {text} brings its own")
