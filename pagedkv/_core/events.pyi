from dataclasses import dataclass

TIER_NAMES: tuple[str, ...]

@dataclass(frozen=True)
class KVEvent:
    kind: str
    tier: str
    namespace: bytes | None
    block_ids: tuple[int, ...]
    parent_block_id: int | None
    depth: int
    token_ids: tuple[int, ...]
