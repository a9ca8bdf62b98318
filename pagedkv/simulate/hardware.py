"""What a step costs: a roofline over data-sheet numbers. Compute or memory traffic, whichever takes longer.

A step of n tokens over sequences whose contexts are c_i after it, q_i of them new, takes

    max(flops / (peak * compute_efficiency), bytes / (bandwidth * memory_efficiency)) + overhead

    flops = 2 * weights * n + 4 * layers * heads * head_dim * sum(q_i * (c_i - (q_i - 1) / 2))
    bytes = weight bytes + KV bytes per token * sum(c_i)

Several GPUs are one tensor-parallel group: memory, bandwidth and compute add up, times `parallel_efficiency` for more
than one. The efficiencies and the overhead are assumptions, and in every report; bandwidths and peaks are the vendors'.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedkv.admission import Mode
from pagedkv.errors import InvalidArgument
from pagedkv.replay.weights import LLAMA_3_8B, ModelShape
from pagedkv.sizes import format_size, parse_size
from pagedkv.sizing.machines import GPUS, Gpu

TIERS = ("host", "disk")
LATENCY_S = {"host": 20e-6, "disk": 100e-6}
MAX_GPUS = 4096
_GPUS = re.compile(r"(?:(\d{1,4})[xX])?([A-Za-z0-9-]+)", re.ASCII)
_TIER = re.compile(r"([a-z]+)=([^@]+)@([^@]+)/s", re.ASCII)


@dataclass(frozen=True, slots=True)
class Model:
    """A model in 16-bit weights and KV.

    Attributes
    ----------
    shape : ModelShape
    vocabulary : tokens; an input and an output embedding of them count as weights.
    """

    shape: ModelShape
    vocabulary: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return 2 * (self.shape.matmul_weights + 2 * self.vocabulary * self.shape.hidden_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 4 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier under the device: its size and bandwidth, in bytes and bytes/s."""

    name: str
    num_bytes: int
    bytes_per_s: float


MODELS = {
    "llama-3-8b": Model(LLAMA_3_8B, 128_256),
    "llama-13b": Model(ModelShape("LLaMA-13B", 40, 40, 40, 128, 5120, 13_824), 32_000),
    "llama-3-70b": Model(ModelShape("Llama-3-70B", 80, 64, 8, 128, 8192, 28_672), 128_256),
}


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
    disk_admission : what is written to the disk, as ``pagedkv.Disk(admission=)``.
    """

    gpu: Gpu = GPUS["h100"]
    num_gpus: int = 1
    model: Model = field(default_factory=lambda: MODELS["llama-3-8b"])
    tiers: tuple[TierSize, ...] = ()
    memory_share: float = 0.9
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    parallel_efficiency: float = 0.9
    overhead_s: float = 0.002
    disk_admission: Mode = "cost"

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
                f"{self.model.shape.name} has {format_size(self.model.weight_bytes)} of weights, and "
                f"{self.gpus} have {format_size(room)} for them and the KV: take more GPUs"
            )
        return room - self.model.weight_bytes

    def blocks(self, block_size: int) -> list[int]:
        """Blocks of device, host and disk; 0 where there is no such tier."""
        block_bytes = block_size * self.model.kv_bytes_per_token
        below = {tier.name: tier.num_bytes // block_bytes for tier in self.tiers}
        return [self.kv_bytes // block_bytes, *(below.get(name, 0) for name in TIERS)]

    def step_s(self, q_lens: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> float:
        """Seconds of a step: new tokens of each sequence, and its tokens with them; both int32 [num_seqs]."""
        shape = self.model.shape
        q, context = q_lens.astype(np.float64), seq_lens.astype(np.float64)
        keys = float(q @ (context - (q - 1) / 2))
        flops = 2 * shape.matmul_weights * float(q.sum())
        flops += 4 * shape.num_layers * shape.num_qo_heads * shape.head_dim * keys
        num_bytes = self.model.weight_bytes + self.model.kv_bytes_per_token * float(context.sum())
        share = self.num_gpus * (self.parallel_efficiency if self.num_gpus > 1 else 1.0)
        compute = flops / (self.gpu.flops_per_s * share * self.compute_efficiency)
        return max(compute, num_bytes / (self.gpu.read_bytes_per_s * share * self.memory_efficiency)) + self.overhead_s

    def assumptions(self) -> dict[str, object]:
        """Every number that a result hangs on, for the report."""
        return {
            "gpus": self.gpus, "memory_bytes": self.gpu.memory_bytes,
            "bandwidth_bytes_per_s": self.gpu.read_bytes_per_s, "flops": self.gpu.flops_per_s,
            "model": self.model.shape.name, "weight_bytes": self.model.weight_bytes,
            "kv_bytes_per_token": self.model.kv_bytes_per_token,
            "memory_share": self.memory_share, "compute_efficiency": self.compute_efficiency,
            "memory_efficiency": self.memory_efficiency, "parallel_efficiency": self.parallel_efficiency,
            "overhead_s": self.overhead_s, "disk_admission": self.disk_admission,
            "tiers": {tier.name: {"bytes": tier.num_bytes, "bytes_per_s": tier.bytes_per_s} for tier in self.tiers},
        }  # fmt: skip


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """``"H100"`` or ``"4xH100"``: which, and how many. ``"A100"`` is enough where one name only begins so.

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


def parse_tiers(text: str) -> tuple[TierSize, ...]:
    """``"host=256GiB@50GB/s,disk=4TB@6GB/s"``, or ``"none"``.

    Raises
    ------
    InvalidArgument
    """
    if text == "none":
        return ()
    tiers: list[TierSize] = []
    for part in text.split(","):
        found = _TIER.fullmatch(part.strip())
        if found is None or found[1] not in TIERS:
            raise InvalidArgument(f"--tiers: {part.strip()[:60]!r} is not such as host=256GiB@50GB/s or disk=4TB@6GB/s")
        if found[1] in [tier.name for tier in tiers]:
            raise InvalidArgument(f"--tiers: {found[1]} is named twice")
        try:
            size, rate = parse_size(found[2]), parse_size(found[3])
        except InvalidArgument as problem:
            raise InvalidArgument(f"--tiers: {found[1]}: {problem}") from None
        if not size or not rate:
            raise InvalidArgument(f"--tiers: {found[1]}: neither its size nor its bandwidth can be 0")
        tiers.append(TierSize(found[1], size, float(rate)))
    return tuple(sorted(tiers, key=lambda tier: TIERS.index(tier.name)))
