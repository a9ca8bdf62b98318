"""A request trace: which request asked for which prefix, when.

One immutable object for every file format.

A block id names a whole prefix: equal id <=> equal prefix, so every id has one parent and one depth. Ids are
dense and numbered by first appearance: a path is a run of ids seen before, then consecutive new ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, WrongType

Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]

MAX_REQUESTS = 1 << 25
MAX_ACCESSES = 1 << 29  # int32 paths and next uses: 4 GiB at this size
MAX_TOKENS = 100_000_000  # in one request
MAX_BLOCK_SIZE = 1 << 20
MAX_TIME_MS = 10**15
MAX_SESSION = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in arrival order, each with the path of block ids of its prompt.

    Attributes
    ----------
    name : base name of the file, or ``synthetic:...``.
    sha256 : hex digest of the file's bytes; of the arrays for a synthetic trace.
    block_size : tokens per block.
    t_ms : int64 [num_requests], arrival in milliseconds.
    input_tokens, output_tokens : int32 [num_requests].
    offsets : int64 [num_requests + 1]; request i owns ``paths[offsets[i]:offsets[i + 1]]``.
    paths : int32 [num_accesses], block ids, root first.
    parents : int32 [num_unique], the id before this one in every path; -1 at depth 0.
    depths : int32 [num_unique].
    sessions : int64 [num_requests], whose request each one is; -1 where the file does not say.
    """

    name: str
    sha256: str
    block_size: int
    t_ms: Int64
    input_tokens: Int32
    output_tokens: Int32
    offsets: Int64
    paths: Int32
    parents: Int32
    depths: Int32
    sessions: Int64

    @property
    def num_requests(self) -> int:
        return len(self.t_ms)

    @property
    def num_accesses(self) -> int:
        return len(self.paths)

    @property
    def num_unique(self) -> int:
        return len(self.parents)

    @property
    def num_steps_back(self) -> int:
        """Requests whose time stamp lies before an earlier one; it counts as that one."""
        return int(np.count_nonzero(self.t_ms < np.maximum.accumulate(self.t_ms)))

    def path(self, i: int) -> Int32:
        """Block ids of request ``i``: an int32 view, read-only."""
        return self.paths[self.offsets[i] : self.offsets[i + 1]]

    def seen_before(self) -> Int32:
        """Leading blocks of each request that an infinite cache would hit: int32 [num_requests]."""
        lengths = np.diff(self.offsets)
        last = np.full(self.num_requests, -1, np.int64)
        filled = lengths > 0
        last[filled] = self.paths[self.offsets[1:][filled] - 1]
        known = np.maximum.accumulate(np.concatenate(([-1], last)))[:-1]  # ids <= known[i] were seen before request i
        fresh = np.maximum(last - known, 0)
        return (lengths - fresh).astype(np.int32)

    def head(self, num_requests: int) -> Trace:
        """The first ``num_requests`` requests as a trace; the digest stays that of the file.

        Raises
        ------
        InvalidArgument : not in 1..num_requests of this trace, or no blocks there.
        """
        if not 1 <= num_requests <= self.num_requests:
            raise InvalidArgument(f"asked for the first {num_requests} requests; the trace has {self.num_requests}")
        offsets = self.offsets[: num_requests + 1]
        paths = self.paths[: offsets[-1]]
        if not len(paths):
            raise InvalidArgument(f"the first {num_requests} requests of {self.name} have no blocks")
        unique = int(paths.max()) + 1
        n = num_requests
        return Trace(
            self.name,
            self.sha256,
            self.block_size,
            self.t_ms[:n],
            self.input_tokens[:n],
            self.output_tokens[:n],
            offsets,
            paths,
            self.parents[:unique],
            self.depths[:unique],
            self.sessions[:n],
        )


def from_segments(
    name: str,
    sha256: str,
    block_size: int,
    t_ms: Int64,
    input_tokens: Int32,
    output_tokens: Int32,
    ref: Int64,
    lcp: Int64,
    num_blocks: Int64,
    sessions: Int64 | None = None,
) -> Trace:
    """Build a trace from "``lcp`` blocks of request ``ref``, then new ones".

    All int64 [num_requests].

    ``sessions`` are named by numbers from 0; -1, or None for all: not known.

    The caller has checked ``ref < i``, ``lcp <= num_blocks[ref]``, ``lcp <= num_blocks`` and the totals.
    """
    n = len(num_blocks)
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(num_blocks, out=offsets[1:])
    unique = int((num_blocks - lcp).sum())
    paths = np.empty(int(offsets[-1]), np.int32)
    parents, depths = np.empty(unique, np.int32), np.empty(unique, np.int32)
    at, new = offsets.tolist(), 0
    for i, (r, shared, blocks) in enumerate(zip(ref.tolist(), lcp.tolist(), num_blocks.tolist(), strict=True)):
        a = at[i]
        if shared:
            paths[a : a + shared] = paths[at[r] : at[r] + shared]
        fresh = blocks - shared
        if fresh:
            end = new + fresh
            paths[a + shared : a + blocks] = np.arange(new, end, dtype=np.int32)
            parents[new:end] = np.arange(new - 1, end - 1, dtype=np.int32)
            parents[new] = paths[a + shared - 1] if shared else -1
            depths[new:end] = np.arange(shared, blocks, dtype=np.int32)
            new = end
    if sessions is None:
        sessions = np.full(n, -1, np.int64)
    return freeze(
        Trace(name, sha256, block_size, t_ms, input_tokens, output_tokens, offsets, paths, parents, depths, sessions)
    )


def freeze(trace: Trace) -> Trace:
    """Make the arrays read-only: a trace is shared by every policy that replays it."""
    for array in _arrays(trace):
        array.flags.writeable = False
    return trace


def digest(block_size: int, *arrays: NDArray[np.generic]) -> str:
    """Digest of a trace made in memory.

    sha256 over the block size and the arrays' little-endian bytes.
    """
    h = hashlib.sha256(str(block_size).encode())
    for array in arrays:
        h.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
    return h.hexdigest()


def _arrays(trace: Trace) -> tuple[NDArray[np.generic], ...]:
    return (
        trace.t_ms,
        trace.input_tokens,
        trace.output_tokens,
        trace.offsets,
        trace.paths,
        trace.parents,
        trace.depths,
        trace.sessions,
    )


def require_trace(trace: object) -> Trace:
    """The argument itself, or a WrongType that names its type."""
    if not isinstance(trace, Trace):
        raise WrongType(f"a Trace or the name of one is needed, not {type(trace).__name__}")
    return trace
