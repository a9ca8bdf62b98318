from dataclasses import dataclass

from pagedkv._core.tier import Tier

@dataclass(frozen=True)
class KVEvent:
    kind: str
    tier: Tier | None
    namespace: bytes | None
    block_ids: tuple[int, ...]
    parent_block_id: int | None
    depth: int
    token_ids: tuple[int, ...]
    hashes: tuple[int, ...] = ()
    parent_hash: int | None = None
