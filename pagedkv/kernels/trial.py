"""Tries a kernel on this device: its results beside decode_simt's, and its time.

The check is a small ragged batch of random numbers with the caller's own config, so that the checked variant is the one
that will run: on all CTAs, and on few, of which each comes back for more. The time is that of a batch of zeros, too
large for the L2 of the device.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.kernels.backend import Backend
from pagedkv.kernels.batch import Batch, Options
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.dtypes import ITEMSIZES

NAN = {"float16": np.nan, "bfloat16": 0x7FC0, "float32": np.nan, "float8_e4m3": 0x7F, "float8_e5m2": 0x7F, "int8": 127}
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-3}  # of a row's largest output; of lse absolute
LEAST_OUTPUT = 1 / 64  # a row's largest output counts as this at least: outputs of nearly 0 have no digits
SEQ_LENS = (0, 1, 37, 300)  # 0: a row of a graph's batch without a sequence
DIVIDED_LEN = 2200  # of the last one where prefill may divide keys: more than two of its shortest parts
CHECKED_ROWS = 130  # of its queries and the heads of a group: more than a row tile, and few where heads are many
CHECKED_HEADS, TIMED_HEADS = 2, 8
ALL_CTAS, FEW_CTAS = 2**31 - 1, 2  # few: they take several items each, and their rings of tiles wrap around
CHECKED_RUNS = (  # CTAs, whether log-sum-exps are asked for, and how blocks lie
    (ALL_CTAS, True, "HND"),  # as in a cache on a GPU
    (ALL_CTAS, False, "HND"),
    (ALL_CTAS, True, "NHD"),  # as in a caller's own pool, or a cache with a remote store
    (FEW_CTAS, True, "HND"),
)
TIMED_BYTES, MOST_TIMED_BYTES = 64 << 20, 512 << 20  # of K and V together
TIMED_L2S = 4  # as many times the L2
FREE_SHARE, LEAST_TIMED_BYTES = 4, 16 << 20  # a quarter of the free memory at most, where that is not still less
TIMED_KEYS = 2048  # of one sequence at most
TIMED_TOKENS = 2048  # queries of all sequences at most: prefill, which computes for longer, has fewer sequences
TIMED_RUNS = 20

Make = Callable[..., Any]  # num_kv_heads, max_sequences, max_q_len, max_tokens -> a plan


class TimedBackend(Backend, Protocol):
    """A backend whose device is known by name and can be timed.

    Attributes
    ----------
    device_name, driver, compiler : such as "NVIDIA H100 80GB HBM3", "12.8" and "12.9", NVRTC's.
    l2_bytes : of the cache that all multiprocessors share.
    """

    device_name: str
    driver: str
    compiler: str
    l2_bytes: int

    def free_bytes(self) -> int:
        """Device memory that is free."""

    def time_us(self, launch: Callable[[Any], None], runs: int, most_s: float) -> float:
        """Device microseconds of a run, given launches on a stream; waits for them.

        After a second run it knows how many there is time for: none, or up to some series of `runs`.
        """


def is_timed(backend: Any) -> bool:
    """Whether a backend can try kernels."""
    needed = ("device_name", "driver", "compiler", "l2_bytes", "free_bytes", "time_us")
    return all(hasattr(backend, name) for name in needed)


class Budget:
    """Seconds that a trial may take, without those in pauses.

    Parameters
    ----------
    seconds : from now.
    clock : seconds; it never goes back.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds

    @property
    def left(self) -> float:
        """Seconds; negative once they are over."""
        return self._end - self._clock()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens within does not count."""
        begin = self._clock()
        try:
            yield
        finally:
            self._end += self._clock() - begin


@dataclass(slots=True)
class Problem:
    """One call's arrays on the device."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    batch: Batch
    options: Options
    scales: dict[str, Any] = field(default_factory=dict)

    def launch(self, plan: Any) -> Callable[[Any], None]:
        """What launches the kernel of a plan on a stream; all that Python works out is done here."""
        made = plan.layer_launch(
            self.q, self.k, self.v, self.out, self.batch, self.options, lse=self.lse, **self.scales
        )
        scales = (self.scales.get(name) for name in ("k_scale", "v_scale"))
        arrays = (self.q, self.out, self.lse, self.k, self.v, *scales, self.options.sinks)
        return lambda stream: made(arrays, stream)


def results(
    backend: Backend,
    config: AttentionConfig,
    make: Make,
    max_q_len: int,
    budget: Budget,
    runs: Sequence[tuple[int, bool, str]] = CHECKED_RUNS[:1],
) -> list[NDArray[np.float32]]:
    """Outputs and log-sum-exps of the small batch, [num_tokens, num_qo_heads, head_dim_v + 1].

    One for each of `runs`: so many CTAs of a constant grid at most, ever fewer. Beside outputs of a run without
    log-sum-exps stand those of the first one.
    """
    lens = SEQ_LENS if max_q_len == 1 else (*SEQ_LENS[:-1], DIVIDED_LEN)
    most = max(-(-CHECKED_ROWS // config.group_size), 5)  # queries of the last one
    q_lens = [min(max_q_len, longest) for longest in (1, 1, 5, most)]
    plan = make(num_kv_heads=CHECKED_HEADS, max_sequences=len(q_lens), max_q_len=max(q_lens), max_tokens=sum(q_lens))
    with budget.paused():
        backend.prepare(plan.variants())
    problems = {layout: small_problem(backend, config, lens, q_lens, layout) for *_, layout in runs}
    backend.synchronize()
    plan.update(problems["HND"].batch, problems["HND"].options.window)
    found: list[NDArray[np.float32]] = []
    for num_ctas, with_lse, layout in runs:
        problem = problems[layout]
        lse = backend.zeros(problem.lse.shape, problem.lse.dtype) if with_lse else None
        problem = replace(problem, out=backend.zeros(problem.out.shape, problem.out.dtype), lse=lse)
        plan.division.narrow(num_ctas)
        problem.launch(plan)(None)
        sums = found[0][..., -1] if problem.lse is None else backend.to_host(problem.lse)
        o = _as_float32(backend.to_host(problem.out), config.q_dtype)
        found.append(np.concatenate([o, sums[..., None]], axis=2))
    return found


def difference(found: NDArray[np.float32], expected: NDArray[np.float32], dtype: str) -> str:
    """How two results differ beyond rounding; empty if they do not.

    Each row of outputs has a limit of its own: outputs of many keys are small, and so is the mark of a wrong tile.
    """
    bound = TOLERANCES[dtype]
    outputs = np.abs(expected[..., :-1])
    rows = np.where(np.isfinite(outputs), outputs, 0).max(axis=-1, keepdims=True)
    for name, ours, theirs, limit in (
        ("output", found[..., :-1], expected[..., :-1], bound * np.maximum(rows, LEAST_OUTPUT)),
        ("log-sum-exp", found[..., -1], expected[..., -1], bound),
    ):
        with np.errstate(invalid="ignore"):  # two equal infinities; a NaN is not <=
            same = (ours == theirs) | (np.abs(ours - theirs) <= limit)
        if not same.all():
            at = tuple(int(index) for index in np.argwhere(~same)[0])
            return f"{name}{list(at)} is {ours[at]:.6g}, and decode_simt has {theirs[at]:.6g}"
    return ""


def microseconds(
    backend: TimedBackend, config: AttentionConfig, make: Make, max_q_len: int, budget: Budget, share: float
) -> float:
    """Device time of the larger batch, measured within a share of the seconds that are left."""
    size, dims = timed_bytes(backend), config.head_dim + config.head_dim_v
    kv_dims = config.head_dim if config.v_in_k else dims
    keys = max(size // (TIMED_HEADS * kv_dims * ITEMSIZES[config.kv_dtype]), 1)
    tokens = size // (TIMED_HEADS * config.group_size * dims * ITEMSIZES[config.q_dtype])  # queries, with outputs
    tokens, length = max(min(tokens, TIMED_TOKENS), 1), min(keys, TIMED_KEYS)
    q_len = min(max_q_len, length, tokens)
    num_seqs = min(keys // length, tokens // q_len)
    problem = zero_problem(backend, config, num_seqs, length, q_len)
    plan = make(num_kv_heads=TIMED_HEADS, max_sequences=num_seqs, max_q_len=q_len, max_tokens=num_seqs * q_len)
    with budget.paused():
        backend.prepare(plan.variants())
    backend.synchronize()
    plan.update(problem.batch, problem.options.window)
    backend.synchronize()  # the timed runs are on another stream
    return backend.time_us(problem.launch(plan), TIMED_RUNS, share * max(budget.left, 0.0))


def timed_bytes(backend: TimedBackend) -> int:
    """K and V to be timed, too large for the L2 unless memory is short."""
    wanted = min(max(TIMED_BYTES, TIMED_L2S * backend.l2_bytes), MOST_TIMED_BYTES)
    return min(wanted, max(backend.free_bytes() // FREE_SHARE, LEAST_TIMED_BYTES))


def small_problem(
    backend: Backend, config: AttentionConfig, seq_lens: Sequence[int], q_lens: Sequence[int], layout: str = "HND"
) -> Problem:
    """A ragged batch of random numbers, whose blocks lie in no order.

    Behind the last key of a sequence, and in a block of none, lie NaN. The numbers are the same in both layouts.
    """
    rng = np.random.default_rng(0)
    heads, lens = CHECKED_HEADS, np.array(seq_lens, np.int32)
    indptr = np.cumsum([0, *q_lens]).astype(np.int32)
    qo_heads, size = heads * config.group_size, config.block_size
    if size:
        counts = -(-lens // size)
        order = rng.permutation(int(counts.sum()) + 1).astype(np.int32)
        tables = np.full((len(lens), int(counts.max())), -1, np.int32)
        for seq, end in enumerate(np.cumsum(counts)):
            tables[seq, : counts[seq]] = order[end - counts[seq] : end]
        rows: tuple[int, ...] = (len(order), size, heads)
        places = {"block_tables": backend.asarray(tables)}
        unused = np.ones((len(order), size), np.bool_)
        for table, length in zip(tables, lens, strict=True):
            used = np.arange(length)
            unused[table[used // size], used % size] = False
    else:
        rows = (int(lens.sum()), heads)
        places = {"kv_indptr": backend.asarray(np.cumsum([0, *lens]).astype(np.int32))}

    def numbers(dim: int) -> Any:
        values = _random(rng, (*rows, dim), config.kv_dtype)
        if not size:
            return backend.asarray(values)
        values[unused] = NAN[config.kv_dtype]
        if layout == "NHD":
            return backend.asarray(values)
        return backend.asarray(np.ascontiguousarray(values.swapaxes(1, 2))).swapaxes(1, 2)

    k, v = _kv(config, numbers)
    scales = {}
    if config.scale_mode != "none":
        form = {"tensor": (1,), "head": (heads,), "token_head": rows}[config.scale_mode]
        low, high = (0.01, 0.02) if config.kv_dtype == "int8" else (0.5, 1.0)  # so that values are about 1 in size
        k_scale, v_scale = (rng.uniform(low, high, form).astype(np.float32) for _ in range(2))
        if size and config.scale_mode == "token_head":
            k_scale[unused] = v_scale[unused] = np.nan
        k_scale, v_scale = backend.asarray(k_scale), backend.asarray(v_scale)
        scales = {"k_scale": k_scale, "v_scale": k_scale if config.v_in_k else v_scale}
    masks = {}
    if config.mask:
        begins = np.cumsum([0, *(-(-n * length // 8) for n, length in zip(q_lens, seq_lens, strict=True))])
        bits = rng.integers(0, 256, (2, int(begins[-1])), np.uint8)
        bits = bits[0] | bits[1]
        for begin, length in zip(begins, seq_lens, strict=False):  # the first query: nothing, or but few keys
            bits[begin : begin + length // 8 + (length < 64)] = 0
        masks = {"mask": backend.asarray(bits), "mask_indptr": backend.asarray(begins.astype(np.int64))}
    q = backend.asarray(_random(rng, (int(indptr[-1]), qo_heads, config.head_dim), config.q_dtype))
    positions = _positions(backend, lens, indptr) if config.positions else {}
    batch = Batch(backend.asarray(lens), q_indptr=backend.asarray(indptr), **places, **masks, **positions)
    out = backend.zeros((int(indptr[-1]), qo_heads, config.head_dim_v), q.dtype)
    lse = backend.zeros((int(indptr[-1]), qo_heads), np.float32)
    options = _options(backend, config, qo_heads, rng)
    return Problem(q, k, v, out, lse, batch, options, scales)


def zero_problem(backend: Backend, config: AttentionConfig, num_seqs: int, length: int, q_len: int) -> Problem:
    """Sequences of one length whose numbers are all 0."""
    heads, size = TIMED_HEADS, config.block_size
    qo_heads, tokens = heads * config.group_size, num_seqs * q_len
    if size:
        width = -(-length // size)
        rows: tuple[int, ...] = (num_seqs * width, size, heads)
        tables = np.random.default_rng(0).permutation(num_seqs * width).astype(np.int32).reshape(num_seqs, width)
        places = {"block_tables": backend.asarray(tables)}
    else:
        rows = (num_seqs * length, heads)
        places = {"kv_indptr": backend.asarray((np.arange(num_seqs + 1) * length).astype(np.int32))}

    def zeros(dim: int) -> Any:
        carrier = _carrier(config.kv_dtype)
        if not size:
            return backend.zeros((*rows, dim), carrier)
        return backend.zeros((rows[0], heads, size, dim), carrier).swapaxes(1, 2)

    k, v = _kv(config, zeros)
    form = {"none": (), "tensor": (1,), "head": (heads,), "token_head": rows}[config.scale_mode]
    scales = {name: backend.zeros(form, np.float32) for name in ("k_scale", "v_scale")} if form else {}
    masks = {}
    if config.mask:
        each = -(-q_len * length // 8)
        begins = (np.arange(num_seqs + 1) * each).astype(np.int64)
        ones = np.full(num_seqs * each, 255, np.uint8)
        masks = {"mask": backend.asarray(ones), "mask_indptr": backend.asarray(begins)}
    lens, indptr = np.full(num_seqs, length, np.int32), (np.arange(num_seqs + 1) * q_len).astype(np.int32)
    q, out = (
        backend.zeros((tokens, qo_heads, d), _carrier(config.q_dtype)) for d in (config.head_dim, config.head_dim_v)
    )
    positions = _positions(backend, lens, indptr) if config.positions else {}
    batch = Batch(backend.asarray(lens), q_indptr=backend.asarray(indptr), **places, **masks, **positions)
    options = _options(backend, config, qo_heads, np.random.default_rng(0))
    return Problem(q, k, v, out, backend.zeros((tokens, qo_heads), np.float32), batch, options, scales)


def _positions(backend: Backend, lens: NDArray[np.int32], indptr: NDArray[np.int32]) -> dict[str, Any]:
    """Where queries stand: each sequence's behind its keys, one after the other."""
    q_lens = np.diff(indptr)
    positions = np.repeat(lens, q_lens) + np.arange(indptr[-1]) - np.repeat(indptr[:-1], q_lens)
    spans = np.stack([lens, lens + q_lens - 1], axis=1)
    return {
        "q_positions": backend.asarray(positions.astype(np.int32)),
        "position_spans": backend.asarray(spans.astype(np.int32)),
    }


def _kv(config: AttentionConfig, made: Callable[[int], Any]) -> tuple[Any, Any]:
    """K and V, given what makes one whose rows are so wide; of latents V is a part of K."""
    k = made(config.head_dim)
    return k, k[..., : config.head_dim_v] if config.v_in_k else made(config.head_dim_v)


def _options(backend: Backend, config: AttentionConfig, qo_heads: int, rng: np.random.Generator) -> Options:
    most_sink = math.log(2 * SEQ_LENS[-1])  # which weighs as much as all keys of a long sequence
    slopes, sinks = (rng.uniform(0.01, most, qo_heads).astype(np.float32) for most in (1, most_sink))
    return Options(
        1 / math.sqrt(config.head_dim),
        window=29 if config.window else 0,
        soft_cap=5.0 if config.soft_cap else 0.0,
        alibi_slopes=backend.asarray(slopes) if config.alibi else None,
        sinks=backend.asarray(sinks) if config.sinks else None,
    )


def _carrier(dtype: str) -> Any:
    """A NumPy dtype of the same size in which arrays of this one may come."""
    return {"bfloat16": np.uint16, "float8_e4m3": np.uint8, "float8_e5m2": np.uint8}.get(dtype, dtype)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Finite random numbers of a dtype, about 1 in size where it has no scale."""
    if dtype == "int8":
        return rng.integers(-127, 128, shape, np.int8)
    if dtype.startswith("float8"):  # exponents around that of 1, any sign and mantissa
        low, high = (0x28, 0x40) if dtype == "float8_e4m3" else (0x34, 0x40)
        signed: NDArray[Any] = rng.integers(low, high, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
        return signed
    values = rng.standard_normal(shape).astype(np.float32)
    held: NDArray[Any] = (
        (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)
    )
    return held


def _as_float32(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    found: NDArray[np.float32] = array.astype(np.float32)
    return found
