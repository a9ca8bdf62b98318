"""How large the problems are.

In full, quickly (does it run on this GPU), and tiny (no GPU at all).
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.attention.arena import LARGE_PERIOD, SMALL_PERIOD
from bench.attention.shapes import Model

Batch = tuple[str, tuple[int, ...]]  # name, keys of each sequence
Chunk = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, queries and keys of each sequence


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of everything.

    Parameters
    ----------
    models : of the core set; the second is used by the other sections.
    core : batches of the core set.
    paging : batches of the comparison of layouts.
    zipf : requests, longest and shortest of the skewed batch.
    block_sizes, blocks : of the sweep, and its batch.
    small : models and batches whose KV is at most 32 MiB.
    prefill : chunks.
    prefixes, requests, suffix : of the cascade.
    fp8 : models and the batch.
    moves, new_tokens : batch whose pool is copied and gathered, tokens that are written.
    ceiling_bytes : read by the ceilings.
    arena_bytes : of KV at most.
    period : elements after which random KV repeats itself.
    calls : of a graph.
    rounds : timed launches of each graph: at least, at most.
    copies : of KV at most.
    """

    models: tuple[Model, ...]
    core: tuple[Batch, ...]
    paging: tuple[Batch, ...]
    zipf: tuple[int, int, int]
    block_sizes: tuple[int, ...]
    blocks: Batch
    small: tuple[tuple[Model, Batch], ...]
    prefill: tuple[Chunk, ...]
    prefixes: tuple[int, ...]
    requests: tuple[int, ...]
    suffix: int
    fp8: tuple[tuple[Model, Batch], ...]
    moves: Batch
    new_tokens: int
    ceiling_bytes: int
    arena_bytes: int
    period: int
    calls: int
    rounds: tuple[int, int]
    copies: int

    @property
    def model(self) -> Model:
        """The model of all sections but the core set."""
        return self.models[min(1, len(self.models) - 1)]


def uniform(count: int, length: int) -> Batch:
    """``64x2K``: so many sequences of one length."""
    shown = f"{length // 1024}K" if length % 1024 == 0 else str(length)
    return f"{count}x{shown}", (length,) * count


def chunk(queries: int, keys: int) -> Chunk:
    """``512/8K``: one sequence, its last queries over all its keys."""
    shown = [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in (queries, keys)]
    return "/".join(shown), (queries,), (keys,)


M7B, M8B, M70B = Model("7B", 32, 32), Model("8B", 32, 8), Model("70B", 64, 8)
M70B_TP8 = Model("70B TP8", 8, 1)
CORE = (uniform(1, 32768), uniform(8, 8192), uniform(64, 2048), uniform(128, 4096))
MIXED: Chunk = ("2K chunk at 8K + 32 decodes at 4K", (2048,) + (1,) * 32, (8192,) + (4096,) * 32)

FULL = Scale(
    models=(M7B, M8B, M70B),
    core=CORE,
    paging=(uniform(8, 8192), uniform(64, 2048)),
    zipf=(64, 32768, 256),
    block_sizes=(1, 8, 16, 32, 64, 128),
    blocks=uniform(64, 2048),
    small=(
        (M8B, uniform(1, 1024)),
        (M8B, uniform(1, 8192)),
        (M8B, uniform(8, 1024)),
        (M70B, uniform(8, 1024)),
        (M7B, uniform(1, 2048)),
        (M70B_TP8, uniform(8, 8192)),
    ),
    prefill=(chunk(8192, 8192), chunk(512, 512), chunk(2048, 2048), chunk(2048, 32768), chunk(512, 8192), MIXED),
    prefixes=(32768, 8192),
    requests=(256, 64, 16),
    suffix=256,
    fp8=((M8B, uniform(64, 8192)), (M70B, uniform(64, 8192))),
    moves=uniform(64, 2048),
    new_tokens=16384,
    ceiling_bytes=4 << 30,
    arena_bytes=25 << 30,
    period=LARGE_PERIOD,
    calls=20,
    rounds=(5, 15),
    copies=64,
)

QUICK = Scale(
    models=(M7B, M8B),
    core=CORE[1:3],
    paging=(uniform(64, 2048),),
    zipf=(64, 8192, 256),
    block_sizes=(1, 16, 128),
    blocks=uniform(64, 2048),
    small=((M8B, uniform(8, 1024)),),
    prefill=(chunk(2048, 2048), MIXED),
    prefixes=(8192,),
    requests=(64,),
    suffix=256,
    fp8=((M8B, uniform(64, 2048)),),
    moves=uniform(64, 2048),
    new_tokens=4096,
    ceiling_bytes=2 << 30,
    arena_bytes=8 << 30,
    period=LARGE_PERIOD,
    calls=20,
    rounds=(5, 5),
    copies=16,
)

TINY_MODEL = Model("tiny", 2, 1, 64)
TINY = Scale(
    models=(TINY_MODEL,),
    core=(uniform(2, 40),),
    paging=(uniform(2, 20),),
    zipf=(3, 48, 5),
    block_sizes=(8, 16),
    blocks=uniform(2, 20),
    small=((TINY_MODEL, uniform(1, 20)),),
    prefill=(chunk(5, 20), ("3 chunk at 20 + 1 decode at 18", (3, 1), (20, 18))),
    prefixes=(32,),
    requests=(2,),
    suffix=5,
    fp8=((TINY_MODEL, uniform(2, 20)),),
    moves=uniform(2, 20),
    new_tokens=4,
    ceiling_bytes=1 << 18,
    arena_bytes=1 << 20,
    period=SMALL_PERIOD,
    calls=1,
    rounds=(1, 1),
    copies=2,
)
