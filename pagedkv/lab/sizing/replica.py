"""One copy of the weights on some GPUs: room for KV, a session's size, GPUs needed."""

from __future__ import annotations

from pagedkv.errors import InvalidArgument
from pagedkv.lab.sizing.models import Model
from pagedkv.lab.sizing.shape import KVFormat
from pagedkv.spec.sizes import format_size, whole_number


def session_bytes(
    model: Model, num_tokens: int, common: int, block_size: int, kv: KVFormat, gpus: int = 1
) -> tuple[int, int]:
    """Bytes of a session's own blocks, and of those that all share.

    The first `common` blocks, where still needed, are shared.

    `gpus` GPUs keep the KV between them: each an equal number of heads, and at least one.
    """
    own = shared = 0
    for group in model.groups:
        own += group.fixed_bytes
        heads = -(-group.num_kv_heads // gpus) * gpus
        each = group.token_bytes(kv) // group.num_kv_heads * heads * block_size
        kept = group.kept_blocks(num_tokens, block_size)
        own += each * len(range(max(kept.start, common), kept.stop))
        shared += each * len(range(kept.start, min(kept.stop, common)))
    return own, shared


class Memory:
    """Memory that a number of GPUs leaves for KV beside the weights.

    Parameters
    ----------
    gpu_bytes : memory of one.
    weights : bytes of one copy.
    share : of the memory (0..1) for weights and KV together.
    kv_share : for KV alone, the weights being in the rest; None: what `share` leaves.
    """

    def __init__(self, gpu_bytes: int, weights: int, share: float, kv_share: float | None) -> None:
        self._gpu_bytes, self.weights, self._share, self._kv_share = gpu_bytes, weights, share, kv_share

    def for_kv(self, gpus: int) -> int:
        """Bytes; negative where the weights do not fit."""
        memory = gpus * self._gpu_bytes
        if self._kv_share is None:
            return int(memory * self._share) - self.weights
        for_kv = int(memory * self._kv_share)
        return for_kv if self.weights <= memory - for_kv else memory - for_kv - self.weights


def gpus_per_replica(
    num_gpus: int, wanted: int | None, memory: Memory, model: Model, room: int, block_size: int, kv: KVFormat
) -> int:
    """GPUs per replica.

    As asked, if the weights fit; else the smallest power of two with room for the longest session too.
    """
    if wanted is not None:
        gpus = whole_number(wanted, "tensor_parallel", 1, num_gpus)
        if memory.for_kv(gpus) <= 0:
            raise InvalidArgument(
                f"{format_size(memory.weights)} of weights leave nothing for KV on {gpus} GPUs: more GPUs per replica, "
                f"fewer bits per weight, or another share of the memory"
            )
        return gpus
    gpus = 1
    while gpus <= num_gpus:
        if memory.for_kv(gpus) >= session_bytes(model, room, 0, block_size, kv, gpus)[0]:
            return gpus
        gpus *= 2
    raise InvalidArgument(
        f"{format_size(memory.weights)} of weights and a session of {room} tokens fit on no power of two up to "
        f"{num_gpus} GPUs: more or larger GPUs, fewer bits per weight, a smaller KV format or a smaller max_tokens"
    )
