"""KV events for routers: what became visible in, or left, which tier.

One ring of words; objects only when drained.
"""

from libc.stdlib cimport free, malloc

from dataclasses import dataclass

import numpy as np

from pagedkv._core.tier import Tier

_TIERS = tuple(Tier)
_KINDS = ("stored", "removed", "cleared")


@dataclass(frozen=True)
class KVEvent:
    """One change of the cached blocks.

    Attributes
    ----------
    kind : str
        ``"stored"`` (blocks became visible in a tier), ``"removed"`` (they left it), ``"cleared"`` (all left).
    tier : Tier or None
        None for ``"cleared"``.
    namespace : bytes or None
        Key of the namespace, None for ``"cleared"`` or a namespace since dropped.
    block_ids : tuple of int
        Ids in that tier, in prefix order.
    parent_block_id : int or None
        Id in that tier of the block before the first, None at the start of a prefix or where the parent has
        no copy there.
    depth : int
        Blocks of the prefix before the first one.
    token_ids : tuple of int
        Tokens of the blocks; empty for removals.
    """

    kind: str
    tier: Tier | None
    namespace: bytes | None
    block_ids: tuple
    parent_block_id: int | None
    depth: int
    token_ids: tuple


cdef int ring_open(Ring* r, int64_t capacity) noexcept nogil:
    cdef int64_t size = 64
    while size < capacity:
        size *= 2
    r.words = <int32_t*>malloc(size * sizeof(int32_t))
    r.capacity = size
    r.head = r.tail = r.num_lost = 0
    return 0 if r.words != NULL else -1


cdef void ring_close(Ring* r) noexcept nogil:
    free(r.words)
    r.words = NULL


cdef inline void put(Ring* r, int32_t word) noexcept nogil:
    r.words[r.tail & (r.capacity - 1)] = word
    r.tail += 1


cdef void ring_put(Ring* r, int32_t kind, int32_t tier, int32_t root, int32_t parent_block, int32_t depth,
                   const int32_t* ids, int32_t num_blocks, const int32_t* tokens, int32_t num_tokens) noexcept nogil:
    cdef int64_t size = 8 + num_blocks + num_tokens
    cdef int32_t i
    if r.words == NULL:
        return
    if size > r.capacity:
        r.num_lost += 1
        return
    while r.tail + size - r.head > r.capacity:
        r.head += r.words[r.head & (r.capacity - 1)]
        r.num_lost += 1
    put(r, <int32_t>size)
    put(r, kind)
    put(r, tier)
    put(r, root)
    put(r, num_blocks)
    put(r, parent_block)
    put(r, depth)
    put(r, num_tokens)
    for i in range(num_blocks):
        put(r, ids[i])
    for i in range(num_tokens):
        put(r, tokens[i])


cdef list ring_decode(object words, dict names):
    cdef list out = []
    cdef Py_ssize_t at = 0
    flat = np.asarray(words).tolist()
    while at < len(flat):
        header = flat[at:at + 8]
        size, kind, tier, root = header[0], header[1], header[2], header[3]
        num_blocks, parent, depth = header[4], header[5], header[6]
        ids = tuple(flat[at + 8:at + 8 + num_blocks])
        tokens = tuple(flat[at + 8 + num_blocks:at + size])
        out.append(KVEvent(_KINDS[kind], _TIERS[tier] if kind != EVENT_CLEARED else None, names.get(root), ids,
                           None if parent < 0 else parent, depth, tokens))
        at += size
    return out
