"""The time of a step: a roofline over data-sheet numbers.

Compute or memory traffic, whichever takes longer.

A step of n tokens over sequences whose contexts are c_i after it, q_i of them new, takes

    max(flops / (peak * compute_efficiency), bytes / (bandwidth * memory_efficiency)) + overhead

    flops = 2 * weights * n + 4 * layers * heads * head_dim * sum(q_i * (c_i - (q_i - 1) / 2))
    bytes = weight bytes + KV bytes per token * sum(c_i)

Layers with a window or chunks attend to and read the tokens alone that they see (layers.py). In a mixture of experts
`weights` are those that a token meets, and of the weight bytes the experts that none of n tokens meets are not read:
each of E experts is met by a token with the chance k / E, whatever the others meet.

Several GPUs are one tensor-parallel group: memory, bandwidth and compute add up, times `parallel_efficiency` for more
than one. The efficiencies and the overhead are assumptions, and in every report; bandwidths and peaks are the vendors'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.admission import Mode
from pagedkv.errors import InvalidArgument
from pagedkv.lab.simulate.layers import ShortLayers
from pagedkv.lab.simulate.links import TIERS, TierSize
from pagedkv.lab.simulate.served import MODELS, ServedModel
from pagedkv.lab.sizing.machines import GPUS, Gpu
from pagedkv.lab.sizing.shape import token_bytes
from pagedkv.spec.sizes import format_size

MAX_GPUS = 4096
Numbers: TypeAlias = NDArray[np.float64]
Work: TypeAlias = float | NDArray[np.float64]  # of a step, or of each of several
_GPUS = re.compile(r"(?:(\d{1,4})[xX])?([A-Za-z0-9-]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The cost of a step in numbers.

    Attributes
    ----------
    token_flops, key_flops : of a new token; of a new token and a token that it attends to.
    weight_bytes, token_bytes : read in each step; read of each token of context.
    flops_per_s, bytes_per_s : as far as they are reached.
    overhead_s : of a step.
    short : layers with a window or chunks, which are not among those of `key_flops` and `token_bytes`.
    expert_bytes : of `weight_bytes` those that a step reads only if a token meets them.
    missed : the share of the experts that a token does not meet.
    """

    token_flops: int
    key_flops: int
    weight_bytes: int
    token_bytes: int
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float
    short: tuple[ShortLayers, ...] = ()
    expert_bytes: int = 0
    missed: float = 0.0

    def step_s(self, q_lens: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> float:
        """Seconds of a step: new tokens of each sequence, and its tokens with them.

        Both int32 [num_seqs].
        """
        q, context = q_lens.astype(np.int64), seq_lens.astype(np.int64)
        twice = int(q @ (2 * context - q + 1))  # q tokens attend to (context - q + 1) .. context others
        return self.seconds(int(q.sum()), twice / 2, int(context.sum()), *self.short_work(q, context))

    def short_work(self, q: NDArray[np.int64], context: NDArray[np.int64]) -> tuple[Work, Work]:
        """Flops and bytes of layers with a window or chunks.

        Of a step, `q` and `context` int64 [num_seqs]; or of several with the same `q`, `context` int64 [num_steps,
        num_seqs].
        """
        flops: Work = 0.0
        read: Work = 0.0
        for layers in self.short:
            flops = flops + layers.key_flops * layers.keys(q, context).sum(axis=-1).astype(np.float64)
            read = read + layers.token_bytes * layers.tokens(q, context).sum(axis=-1).astype(np.float64)
        return flops, read

    def seconds(self, num_tokens: int, keys: float, context: int, flops: Work = 0.0, read: Work = 0.0) -> float:
        """Seconds of a step, from its totals.

        New tokens, pairs of a new token and one that it attends to, and tokens read; beside them `short_work`.
        """
        compute = (self.token_flops * float(num_tokens) + self.key_flops * keys + flops) / self.flops_per_s
        moved = (self._weights_read(num_tokens) + self.token_bytes * float(context) + read) / self.bytes_per_s
        return float(max(compute, moved)) + self.overhead_s

    def run_s(
        self, num_tokens: int, keys: Numbers, context: Numbers, flops: Work = 0.0, read: Work = 0.0
    ) -> Numbers:
        """As `seconds`, of several steps of `num_tokens` each; float64 [num_steps]."""
        compute = (self.token_flops * float(num_tokens) + self.key_flops * keys + flops) / self.flops_per_s
        moved = (self._weights_read(num_tokens) + self.token_bytes * context + read) / self.bytes_per_s
        seconds: Numbers = np.maximum(compute, moved) + self.overhead_s
        return seconds

    def _weights_read(self, num_tokens: int) -> float:
        return self.weight_bytes - self.expert_bytes * self.missed**num_tokens


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine and the model on it.

    Attributes
    ----------
    gpu, num_gpus, model
    tiers : tiers under the device, hottest first.
    memory_share : of the GPUs' memory that weights and KV may fill.
    compute_efficiency, memory_efficiency, parallel_efficiency : 0..1, of the data sheet's numbers.
    overhead_s : of a step, besides.
    disk_admission, disk_write : which blocks are written to the disk, and when, as ``pagedkv.Disk(admission=)`` and
        ``write=``.
    disk_write_budget : bytes a day; None for no limit.
    moves : where the tiers' rates were measured, for the report.
    """

    gpu: Gpu = GPUS["h100"]
    num_gpus: int = 1
    model: ServedModel = field(default_factory=lambda: MODELS["llama-3-8b"])
    tiers: tuple[TierSize, ...] = ()
    memory_share: float = 0.9
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    parallel_efficiency: float = 0.9
    overhead_s: float = 0.002
    disk_admission: Mode | None = None
    disk_write: Literal["reused", "evicted", "all", "never"] | None = None
    disk_write_budget: int | None = None
    moves: Mapping[str, object] = field(default_factory=dict)

    @property
    def gpus(self) -> str:
        """Such as ``4xH100``."""
        return f"{self.num_gpus}x{self.gpu.name.upper()}"

    @property
    def kv_bytes(self) -> int:
        """Device memory left for KV.

        Raises
        ------
        InvalidArgument
            The weights do not leave any.
        """
        room = int(self.num_gpus * self.gpu.memory_bytes * self.memory_share)
        if room <= self.model.weight_bytes:
            raise InvalidArgument(
                f"{self.model.name} has {format_size(self.model.weight_bytes)} of weights, and "
                f"{self.gpus} have {format_size(room)} for them and the KV: take more GPUs"
            )
        return room - self.model.weight_bytes

    def blocks(self, block_size: int) -> list[int]:
        """Blocks of device, host and disk; 0 where there is no such tier."""
        block_bytes = block_size * self.model.kv_bytes_per_token
        below = {tier.name: tier.num_bytes // block_bytes for tier in self.tiers}
        return [self.kv_bytes // block_bytes, *(below.get(name, 0) for name in TIERS)]

    def step_s(self, q_lens: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> float:
        """Seconds of a step: new tokens of each sequence, and its tokens with them.

        Both int32 [num_seqs].
        """
        return self.roofline().step_s(q_lens, seq_lens)

    def roofline(self) -> Roofline:
        """What steps cost, with all that does not change between them worked out."""
        shape, model = self.model.shape, self.model
        share = self.num_gpus * (self.parallel_efficiency if self.num_gpus > 1 else 1.0)
        of_key = 4 * shape.num_qo_heads * shape.head_dim  # in a layer
        short = tuple(
            ShortLayers(group.num_layers * of_key, token_bytes((group,)), group.window, group.chunk)
            for group in model.short_groups
        )
        count, used = model.experts
        return Roofline(
            2 * shape.matmul_weights, of_key * sum(group.num_layers for group in model.far_groups), model.weight_bytes,
            token_bytes(model.far_groups), self.gpu.flops_per_s * share * self.compute_efficiency,
            self.gpu.read_bytes_per_s * share * self.memory_efficiency, self.overhead_s,
            short, model.expert_bytes, (count - used) / count,
        )  # fmt: skip

    def assumptions(self) -> dict[str, object]:
        """Every number that a result hangs on, for the report."""
        return {
            "gpus": self.gpus, "memory_bytes": self.gpu.memory_bytes,
            "bandwidth_bytes_per_s": self.gpu.read_bytes_per_s, "flops": self.gpu.flops_per_s,
            "model": self.model.name, "weight_bytes": self.model.weight_bytes,
            "kv_bytes_per_token": self.model.kv_bytes_per_token, **self._uneven(),
            "memory_share": self.memory_share, "compute_efficiency": self.compute_efficiency,
            "memory_efficiency": self.memory_efficiency, "parallel_efficiency": self.parallel_efficiency,
            "overhead_s": self.overhead_s, "disk_admission": self.disk_admission,
            "disk_write": self.disk_write, "disk_write_budget": self.disk_write_budget, "moves": dict(self.moves),
            "tiers": {
                tier.name: {
                    "bytes": tier.num_bytes, "up_bytes_per_s": tier.rates.up, "down_bytes_per_s": tier.rates.down,
                }
                for tier in self.tiers
            },
        }  # fmt: skip

    def _uneven(self) -> dict[str, object]:
        """Windows, chunks and experts of the model, where it has them."""
        found: dict[str, object] = {}
        if self.model.short_groups:
            found["layers"] = [
                {"layers": group.num_layers, "window": group.window, "chunk": group.chunk}
                for group in self.model.sizes.groups
            ]
        if self.model.expert_bytes:
            found |= {"expert_bytes": self.model.expert_bytes, "experts": list(self.model.experts)}
        return found


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """``"H100"`` or ``"4xH100"``: which, and how many.

    ``"A100"`` is enough where one name only begins so.

    Raises
    ------
    InvalidArgument
    """
    found = _GPUS.fullmatch(text)
    wanted = "" if found is None else found[2].lower()
    alike = [gpu for name, gpu in GPUS.items() if name == wanted or name.startswith(f"{wanted}-")]
    if found is None or len(alike) != 1:
        raise InvalidArgument(f"--gpus: {text[:40]!r} is none of {', '.join(GPUS)}, nor such as 4xH100")
    number = int(found[1] or 1)
    if not 1 <= number <= MAX_GPUS:
        raise InvalidArgument(f"--gpus: {number} GPUs; 1 to {MAX_GPUS} are possible")
    return alike[0], number
