"""KV events for routers: what became visible in, or left, which tier.

One ring of words; objects only when drained.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from dataclasses import dataclass

import numpy as np

from pagedkv._core.tier import Tier
from pagedkv._core.types cimport make_handle

_TIERS = tuple(Tier)
_KINDS = ("stored", "removed", "cleared", "resumable", "not_resumable")

cdef enum:
    HEADER = 12         # words of a record before its ids


@dataclass(frozen=True)
class KVEvent:
    """One change of the cached blocks.

    Attributes
    ----------
    kind : str
        ``"stored"`` (blocks became visible in a tier), ``"removed"`` (they left it), ``"cleared"`` (all left). Over groups of
        layers also ``"resumable"`` and ``"not_resumable"``: a request can go on behind one block, because the layers with a
        window or chunks have their last pages before that boundary in a tier; and not any more.
    tier : Tier or None
        None for ``"cleared"``.
    namespace : bytes or None
        Key of the namespace, None for ``"cleared"`` or a namespace since dropped.
    block_ids : tuple of int
        Ids in that tier, in prefix order. Partly filled blocks are never among them. Of a boundary the block before it, by its
        id in its hottest tier.
    parent_block_id : int or None
        Id in that tier of the block before the first, None at the start of a prefix or where the parent has
        no copy there.
    depth : int
        Blocks of the prefix before the first one.
    token_ids : tuple of int
        Tokens of the blocks; only with ``"stored"``.
    hashes : tuple of int
        One for each block, unsigned 64 bits: of the namespace's name and of all tokens up to the block's end, the same in
        every tier. Empty where the tree keeps none (``RadixTree(keep_names=True)`` does). It names a block for a router;
        who chooses tokens can make two blocks have the same one.
    parent_hash : int or None
        Of the block before the first, in whatever tier that is; None at the start of a prefix.
    """

    kind: str
    tier: Tier | None
    namespace: bytes | None
    block_ids: tuple
    parent_block_id: int | None
    depth: int
    token_ids: tuple
    hashes: tuple = ()
    parent_hash: int | None = None


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


cdef inline void put_two(Ring* r, uint64_t value) noexcept nogil:
    put(r, <int32_t><uint32_t>value)
    put(r, <int32_t>(value >> 32))


cdef void ring_put(Ring* r, int32_t kind, int32_t tier, int32_t root, int32_t generation, int32_t parent_block, int32_t depth,
                   const int32_t* ids, int32_t num_blocks, const uint64_t* hashes, uint64_t parent_hash,
                   const int32_t* tokens, int32_t num_tokens) noexcept nogil:
    cdef int32_t num_hashes = num_blocks if hashes != NULL else 0
    cdef int64_t size = HEADER + num_blocks + 2 * <int64_t>num_hashes + num_tokens
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
    put(r, generation)
    put(r, num_blocks)
    put(r, parent_block)
    put(r, depth)
    put(r, num_tokens)
    put(r, num_hashes)
    put_two(r, parent_hash)
    for i in range(num_blocks):
        put(r, ids[i])
    for i in range(num_hashes):
        put_two(r, hashes[i])
    for i in range(num_tokens):
        put(r, tokens[i])


cdef list ring_decode(object words, object names):
    cdef list out = []
    cdef Py_ssize_t at = 0, ids, hashes, tokens
    array = np.asarray(words)
    flat = array.tolist()
    while at < len(flat):
        header = flat[at:at + HEADER]
        size, kind, tier, parent, depth, num_hashes = header[0], header[1], header[2], header[6], header[7], header[9]
        ids = at + HEADER
        hashes = ids + <Py_ssize_t>header[5]
        tokens = hashes + 2 * <Py_ssize_t>num_hashes
        before = unsigned_of(array[at + HEADER - 2:ids])[0] if num_hashes and depth else None
        out.append(KVEvent(
            _KINDS[kind], _TIERS[tier] if kind != EVENT_CLEARED else None, names.get(make_handle(header[3], header[4])),
            tuple(flat[ids:hashes]), None if parent < 0 else parent, depth, tuple(flat[tokens:at + size]),
            tuple(unsigned_of(array[hashes:tokens])), before,
        ))
        at += size
    return out


# Numbers of two words each.
cdef list unsigned_of(object words):
    return words.copy().view(np.uint64).tolist()
