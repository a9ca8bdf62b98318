"""How the work of a call is divided among CTAs.

What each schedule of schedule.cuh needs beside the attention kernel.

A schedule holds device arrays sized when it is made, plans with ``update`` where the division depends on the lengths,
and knows the grid. The lengths themselves are read on the device alone: a captured graph replays with others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument
from pagedkv.kernels.backend import Backend, Dim3
from pagedkv.kernels.batch import Batch
from pagedkv.kernels.config import AttentionConfig, Schedule, Tiling
from pagedkv.kernels.params import Params, fill
from pagedkv.kernels.variant import Variant, variant

PLAN, PREFILL_PLAN = variant("plan"), variant("prefill_plan")
RESERVED_BYTES = 1 << 10  # shared memory that a CTA takes beside its own; as much again for static variables
OVERHEAD_UNITS = 2  # kOverheadUnits of schedule.cuh
PARTITION_TOKENS = 512  # of the "partitioned" schedule, as in vLLM's V2
MIN_PART_KEYS = 1024  # of the "listed" schedule: a shorter part would not pay for its merge
MAX_INT32 = 2**31 - 1
ITEM_FIELDS = 5  # of WorkItem in schedule.cuh
PART_SLOTS_PER_SM = 4  # of the "listed" schedule: parts of divided row tiles that the workspace holds


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of the batches of a plan.

    As in :class:`pagedkv.kernels.attention.AttentionPlan`.
    """

    num_kv_heads: int
    max_sequences: int
    max_q_len: int
    max_tokens: int
    max_seq_len: int
    max_workspace_bytes: int = 0


class Whole:
    """One CTA per row tile of the longest sequence: nothing to plan, no workspace.

    Base class of the other schedules.

    Attributes
    ----------
    num_ctas : of a grid that does not follow the batch; else 0.
    """

    num_ctas = 0

    def __init__(self, backend: Backend, config: AttentionConfig, tiling: Tiling, limits: Limits) -> None:
        self.backend, self.config, self.tiling, self.limits = backend, config, tiling, limits
        self.row_tiles = -(-limits.max_q_len * config.group_size // tiling.row_tile)
        self.arrays: dict[str, Any] = {}  # fields of ScheduleParams
        self.scratch: dict[str, Any] = {}  # what only the planning kernel sees
        self.counters: list[Any] = []  # arrays that are zero before and after every launch

    @property
    def workspace_bytes(self) -> int:
        """Device memory held."""
        return sum(array.nbytes for array in (*self.arrays.values(), *self.scratch.values()))

    def helpers(self) -> list[Variant]:
        """Kernels launched beside the attention kernel."""
        return []

    def fields(self) -> dict[str, Any]:
        """ScheduleParams of a launch."""
        names = ("unit_indptr", "partial_o", "partial_ml", "arrivals", "work_list", "num_items", "next_item")
        return {**dict.fromkeys(names), "partition_tokens": 0, "num_partitions": 0, "part_slots": 0, **self.arrays}

    def check(self, num_seqs: int, num_tokens: int, num_keys: int) -> None:
        """Raise InvalidArgument where sequences of `num_keys` keys exceed the schedule's numbering."""

    def update(self, batch: Batch, window: int, stream: Any) -> None:
        """Divide the work by the lengths that are on the device."""

    def grid(self, num_seqs: int, num_tokens: int) -> Dim3:
        """Grid of the attention kernel."""
        return num_seqs, self.limits.num_kv_heads, self.row_tiles

    def narrow(self, most: int) -> None:
        """Let so many CTAs of a constant grid share the work that is divided already."""
        self.num_ctas = min(self.num_ctas, most)

    def finish(self, params: Params, num_seqs: int, stream: Any) -> None:
        """Launch what follows the attention kernel."""

    def _resident_ctas(self) -> int:
        """CTAs that the device runs at once."""
        tiling = self.tiling
        fitting = (self.backend.shared_limit + RESERVED_BYTES) // (tiling.shared_bytes + 2 * RESERVED_BYTES)
        return self.backend.num_sms * min(tiling.ctas_per_sm, max(fitting, 1))

    def _hold(
        self, name: str, shape: tuple[int, ...], dtype: Any, *, zeros: bool = False, scratch: bool = False
    ) -> None:
        """Allocate an array of the workspace.

        Raises
        ------
        InvalidArgument
            The workspace would exceed ``max_workspace_bytes``.
        """
        needed = self.workspace_bytes + math.prod(shape) * np.dtype(dtype).itemsize
        limit = self.limits.max_workspace_bytes
        if limit and needed > limit:
            raise InvalidArgument(
                f"the workspace of {self.tiling.kernel} needs {needed} bytes or more, and max_workspace_bytes is "
                f"{limit}: raise it, lower max_sequences or max_tokens, or take the schedule 'whole', which needs none"
            )
        made = (self.backend.zeros if zeros else self.backend.empty)(shape, dtype)
        (self.scratch if scratch else self.arrays)[name] = made
        if zeros:
            self.counters.append(made)

    def _hold_parts(self, slots: int) -> None:
        rows = (slots, self.tiling.row_tile)
        self._hold("partial_o", (*rows, self.config.head_dim_v), np.float32)
        self._hold("partial_ml", (*rows, 2), np.float32)


class Partitioned(Whole):
    """One CTA per partition of PARTITION_TOKENS keys of a row tile.

    A second kernel merges the partitions.
    """

    def __init__(self, backend: Backend, config: AttentionConfig, tiling: Tiling, limits: Limits) -> None:
        super().__init__(backend, config, tiling, limits)
        self.num_partitions = max(1, -(-limits.max_seq_len // PARTITION_TOKENS))
        self._hold_parts(limits.max_sequences * limits.num_kv_heads * self.row_tiles * self.num_partitions)
        self._reduce = tiling.variant(config, "whole", "decode_reduce")

    def helpers(self) -> list[Variant]:
        return [self._reduce]

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "partition_tokens": PARTITION_TOKENS, "num_partitions": self.num_partitions}

    def grid(self, num_seqs: int, num_tokens: int) -> Dim3:
        return num_seqs, self.limits.num_kv_heads, self.row_tiles * self.num_partitions

    def finish(self, params: Params, num_seqs: int, stream: Any) -> None:
        grid = super().grid(num_seqs, 0)
        self.backend.launch(self._reduce, grid, (128, 1, 1), params, stream=stream)


class Even(Whole):
    """A constant grid in which every CTA takes an equal slice of all units.

    ``plan`` sums the sequences' units.
    """

    def __init__(self, backend: Backend, config: AttentionConfig, tiling: Tiling, limits: Limits) -> None:
        super().__init__(backend, config, tiling, limits)
        self.num_ctas = self._resident_ctas()  # all at once: equal slices
        self._hold("unit_indptr", (limits.max_sequences + 1,), np.int32)
        self._hold("arrivals", (self.num_ctas,), np.uint32, zeros=True)
        self._hold_parts(2 * self.num_ctas)

    def helpers(self) -> list[Variant]:
        return [PLAN]

    def check(self, num_seqs: int, num_tokens: int, num_keys: int) -> None:
        row_tiles = num_tokens * self.config.group_size // self.tiling.row_tile + num_seqs
        tiles = -(-num_keys // self.tiling.tile_tokens) + 1 + OVERHEAD_UNITS
        units = row_tiles * tiles * self.limits.num_kv_heads
        if units >= 2**32:
            raise InvalidArgument(
                f"{num_tokens} queries over up to {num_keys} keys may be {units} units of work, and the schedule "
                f"'even' numbers them with 32 bits: split the batch, or take a prefill kernel or the schedule 'whole'"
            )

    def update(self, batch: Batch, window: int, stream: Any) -> None:
        params = fill(
            "PlanParams",
            seq_lens=batch.seq_lens,
            q_indptr=batch.q_indptr,
            position_spans=batch.position_spans,
            unit_indptr=self.arrays["unit_indptr"],
            num_seqs=len(batch.seq_lens),
            window=window if self.config.window else 0,
            group_size=self.config.group_size,
            row_tile=self.tiling.row_tile,
            tile_tokens=self.tiling.tile_tokens,
        )
        self.backend.launch(PLAN, (1, 1, 1), (1024, 1, 1), params, stream=stream)

    def grid(self, num_seqs: int, num_tokens: int) -> Dim3:
        return self.num_ctas, 1, 1


class Listed(Whole):
    """CTAs take row tiles from a list, longest first, which ``prefill_plan`` makes.

    Where few row tiles have many keys, ``prefill_plan`` cuts the keys of a row tile into parts, and the last CTA to
    end one of them merges all.
    """

    def __init__(self, backend: Backend, config: AttentionConfig, tiling: Tiling, limits: Limits) -> None:
        super().__init__(backend, config, tiling, limits)
        tokens = limits.max_tokens or limits.max_sequences * limits.max_q_len
        self.max_tiles = self._tiles(limits.max_sequences, tokens)
        self.num_ctas = self._resident_ctas()
        self.part_slots = min(PART_SLOTS_PER_SM * backend.num_sms, self._slots_that_fit()) // limits.num_kv_heads
        self.min_part_tiles = max(MIN_PART_KEYS // tiling.tile_tokens, 1)
        slots = self.part_slots * limits.num_kv_heads
        self._hold("work_list", (self.max_tiles + self.part_slots, ITEM_FIELDS), np.int32)
        self._hold("num_items", (1,), np.int32)
        self._hold("next_item", (1,), np.uint32, zeros=True)
        self._hold("arrivals", (slots,), np.uint32, zeros=True)
        self._hold("order", (limits.max_sequences,), np.int32, scratch=True)
        self._hold("tile_indptr", (limits.max_sequences + 1,), np.int32, scratch=True)
        self._hold_parts(slots)

    def _slots_that_fit(self) -> int:
        """Parts that the allowed workspace holds beside the list of whole row tiles."""
        limit, limits = self.limits.max_workspace_bytes, self.limits
        if not limit:
            return MAX_INT32
        whole = 4 * (self.max_tiles * ITEM_FIELDS + 2 + 2 * limits.max_sequences + 1)
        item = 4 * ITEM_FIELDS  # in the list, for all KV heads
        return max(limit - whole, 0) // (4 + 4 * self.tiling.row_tile * (self.config.head_dim_v + 2) + item)

    def _tiles(self, num_seqs: int, num_tokens: int) -> int:
        """Row tiles of so many queries at most, however the sequences share them."""
        return num_tokens * self.config.group_size // self.tiling.row_tile + num_seqs

    def helpers(self) -> list[Variant]:
        return [PREFILL_PLAN]

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "part_slots": self.part_slots}

    def update(self, batch: Batch, window: int, stream: Any) -> None:
        params = fill(
            "WorkListParams",
            seq_lens=batch.seq_lens,
            q_indptr=batch.q_indptr,
            position_spans=batch.position_spans,
            work_list=self.arrays["work_list"],
            num_items=self.arrays["num_items"],
            **self.scratch,
            num_seqs=len(batch.seq_lens),
            max_tiles=self.max_tiles,
            group_size=self.config.group_size,
            row_tile=self.tiling.row_tile,
            tile_tokens=self.tiling.tile_tokens,
            causal=int(self.config.causal),
            window=window if self.config.window else 0,
            num_kv_heads=self.limits.num_kv_heads,
            num_ctas=self.num_ctas,
            part_slots=self.part_slots,
            min_part_tiles=self.min_part_tiles,
        )
        self.backend.launch(PREFILL_PLAN, (1, 1, 1), (1024, 1, 1), params, stream=stream)

    def grid(self, num_seqs: int, num_tokens: int) -> Dim3:
        if self.tiling.persistent:
            return self.num_ctas, 1, 1
        return (self._tiles(num_seqs, num_tokens) + self.part_slots) * self.limits.num_kv_heads, 1, 1


DIVISIONS: dict[Schedule, type[Whole]] = {"whole": Whole, "partitioned": Partitioned, "even": Even, "listed": Listed}
