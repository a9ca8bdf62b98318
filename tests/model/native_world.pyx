# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The driver's own books, and the audit that compares them with the core's.

It recomputes contents, references and counts.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from pagedkv._core.block_pool cimport COUNT, TREE, BlockPool
from pagedkv._core.block_table cimport Row
from pagedkv._core.links cimport is_linked
from pagedkv._core.place cimport Owner, Transfer
from pagedkv._core.radix_tree cimport Node, node_ids, node_top, tree_next
from pagedkv._core.types cimport NIL, handle_slot, make_handle

cnp.import_array()


cdef uint64_t mixed(uint64_t before, uint64_t value) noexcept nogil:
    # The finaliser of splitmix64: every bit of both depends on every bit of the result.
    cdef uint64_t z = (before ^ (value + 1)) * <uint64_t>0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <uint64_t>0x94D049BB133111EB
    return z ^ (z >> 31)


cdef void text_push(Text* text, int32_t token) noexcept nogil:
    cdef int32_t n = text.num_tokens
    text.tokens[n] = token
    text.hashes[n] = mixed(text.hashes[n - 1] if n else text.salt, token)
    text.num_tokens = n + 1


cdef void text_copy(Text* to, const Text* text, int32_t num_tokens) noexcept nogil:
    to.root, to.salt, to.num_tokens = text.root, text.salt, num_tokens
    memcpy(to.tokens, text.tokens, num_tokens * sizeof(int32_t))
    memcpy(to.hashes, text.hashes, num_tokens * sizeof(uint64_t))


cdef class World:
    """A real Placement and BlockTable, and what their user knows of them."""

    def __cinit__(self, seed, placement, table, *_):
        cdef int32_t tier
        cdef BlockPool pool
        self.seed, self.placement, self.table, self.doing = seed, placement, table, "start"
        self.place = &self.placement.place
        self.tree = &self.placement.tree.tree
        self.num_tiers = self.place.num_tiers
        self.block_size = self.tree.block_size
        if self.num_tiers > TIERS or self.block_size > MAX_BLOCK or self.table.max_rows > MAX_ROWS:
            raise ValueError("a shape beyond what the driver keeps room for")
        for tier in range(self.num_tiers):
            if self.placement.pools[tier] is None:
                continue
            pool = self.placement.pools[tier]
            if pool.pool.max_capacity > MAX_POOL:
                raise ValueError("a pool beyond what the driver keeps room for")
            self.pools[tier] = &pool.pool
            self.memory[tier] = <uint64_t*>calloc(MAX_POOL * MAX_BLOCK, sizeof(uint64_t))
            if self.memory[tier] == NULL:
                raise MemoryError

    def __dealloc__(self):
        for tier in range(TIERS):
            free(self.memory[tier])
        free(self.ends)

    cdef int64_t named(self, int32_t root) noexcept nogil:
        return make_handle(root, self.tree.nodes[root].generation)

    cdef object wrong(self, object what):
        return AssertionError(f"seed {self.seed}, operation {self.operations} ({self.doing}): {what}")

    # ---- memory

    # What became free since the last look holds nothing any more, whatever owns it by now.
    cdef void sweep(self) noexcept nogil:
        cdef int32_t tier, block
        for tier in range(self.num_tiers):
            if self.pools[tier] == NULL:
                continue
            for block in range(self.pools[tier].fresh):
                if self.pools[tier].generations[block] != self.seen[tier][block] or self.pools[tier].refs[block] == 0:
                    self.seen[tier][block] = self.pools[tier].generations[block]
                    self.poison(tier, block)

    cdef void poison(self, int32_t tier, int32_t block) noexcept nogil:
        memset(self.memory[tier] + block * self.block_size, POISON, self.block_size * sizeof(uint64_t))

    cdef void write(self, int32_t block, const Text* text, int32_t first, int32_t count) noexcept nogil:
        memcpy(self.memory[0] + block * self.block_size, text.hashes + first, count * sizeof(uint64_t))

    cdef void copy(self, int32_t src_tier, int32_t src, int32_t dst_tier, int32_t dst) noexcept nogil:
        memcpy(self.memory[dst_tier] + dst * self.block_size, self.memory[src_tier] + src * self.block_size,
               self.block_size * sizeof(uint64_t))

    # The first `count` slots of a block must hold these.
    cdef int read(self, int32_t tier, int32_t block, const uint64_t* hashes, int32_t count, object whose) except -1:
        cdef int32_t i
        cdef uint64_t* slots = self.memory[tier] + block * self.block_size
        self.reads += count
        for i in range(count):
            if slots[i] != hashes[i]:
                held = "nothing" if slots[i] == POISON else "something else"
                raise self.wrong(f"{whose}: block {block} of tier {tier} holds {held} at slot {i}")
        return 0

    # Every copy, in every tier, of the path that ends with `node`, which must be the beginning of `text`.
    cdef int read_path(self, int32_t node, const Text* text, object whose) except -1:
        cdef int32_t tier, i, bs = self.block_size, depth, token
        cdef Node* n
        while self.tree.nodes[node].length > 0:
            n = &self.tree.nodes[node]
            depth = n.depth
            if (depth + n.length) * bs > text.num_tokens:
                raise self.wrong(f"{whose}: a path longer than its text")
            for token in range(n.length * bs):
                if n.tokens[token] != text.tokens[depth * bs + token]:
                    raise self.wrong(f"{whose}: a path of other tokens")
            if not self.place.fates[node].failed:
                for tier in range(self.num_tiers):
                    if (n.tiers >> tier) & 1 and not (self.place.fates[node].spoilt >> tier) & 1:
                        for i in range(n.length):
                            self.read(tier, node_ids(self.tree, node, tier)[i], text.hashes + (depth + i) * bs, bs, whose)
            node = n.parent
        return 0

    # ---- the audit

    # Whether a run in `tier` must stay because a hotter run continues it.
    cdef bint carries_hotter(self, int32_t node, int32_t tier) noexcept nogil:
        cdef int32_t n = tree_next(self.tree, node, node)
        while n != NIL:
            if node_top(self.tree, n) < tier:
                return True
            n = tree_next(self.tree, n, node)
        return False

    # With nothing in flight and no room: whatever has no owner must have given way. Below the device a run stays where
    # hotter ones continue it, for they would be lost with it; and one that could not be read where any do. In a closed tier
    # it stays while anything that hangs on it does.
    cdef int everything_is_held(self, int32_t tier) except -1:
        cdef int32_t k, n
        cdef bint stays
        for k in range(self.num_roots):
            n = tree_next(self.tree, self.roots[k], self.roots[k])
            while n != NIL:
                if (self.tree.nodes[n].tiers >> tier) & 1 and self.pools[tier].refs[
                        node_ids(self.tree, n, tier)[0]] == (TREE | 1):
                    stays = self.place.fates[n].failed and self.tree.nodes[n].first_child != NIL
                    if self.place.closed[tier] and self.place.fates[n].below[tier]:
                        n = tree_next(self.tree, n, self.roots[k])
                        continue
                    if node_top(self.tree, n) < tier or not (stays or self.carries_hotter(n, tier)):
                        raise self.wrong(f"no room in tier {tier}, though run {n} there has no owner")
                n = tree_next(self.tree, n, self.roots[k])
        return 0

    cdef int audit(self) except -1:
        memset(self.references, 0, sizeof(self.references))
        memset(self.in_tree, 0, sizeof(self.in_tree))
        self.audit_tree()
        self.audit_owners()
        self.audit_rows()
        self.audit_pools()
        return 0

    # Contents of every copy of every run, dropped namespaces included; what the tree, transfers and paths refer to.
    cdef int audit_tree(self) except -1:
        cdef Tree* t = self.tree
        cdef int32_t i, k, n, tier, block, bs = self.block_size, top
        cdef uint64_t h
        cdef uint64_t hashes[MAX_TOKENS]
        cdef uint64_t* grown
        cdef Owner* owner
        cdef Transfer* moving
        cdef bint alone
        cdef int64_t sizes[TIERS][2]
        memset(sizes, 0, sizeof(sizes))
        if self.ends_capacity < t.nodes_capacity:
            grown = <uint64_t*>realloc(self.ends, t.nodes_capacity * sizeof(uint64_t))
            if grown == NULL:
                raise MemoryError
            self.ends, self.ends_capacity = grown, t.nodes_capacity
        for k in range(self.num_roots):
            self.ends[self.roots[k]] = self.salts[k]
            n = tree_next(t, self.roots[k], self.roots[k])
            while n != NIL:
                h = self.ends[t.nodes[n].parent]
                for i in range(t.nodes[n].length * bs):
                    h = mixed(h, t.nodes[n].tokens[i])
                    hashes[i] = h
                self.ends[n] = h
                if t.nodes[n].tiers == 0:
                    raise self.wrong(f"node {n} is nowhere")
                for tier in range(self.num_tiers):
                    if not (t.nodes[n].tiers >> tier) & 1:
                        if is_linked(&self.place.links[tier], n):
                            raise self.wrong(f"node {n} is in an eviction list of tier {tier}, where it has no copy")
                    else:
                        sizes[tier][self.place.fates[n].queue[tier]] += t.nodes[n].length
                        alone = self.pools[tier].refs[node_ids(t, n, tier)[0]] == (TREE | 1)
                        if alone and self.place.fates[n].transfer < 0 and not is_linked(&self.place.links[tier], n):
                            raise self.wrong(f"node {n} has no owner, but is in no eviction list of tier {tier}")
                        if not alone and not self.place.policy.keeps_owned and is_linked(&self.place.links[tier], n):
                            raise self.wrong(f"node {n} is owned, but in an eviction list of tier {tier}")
                        for i in range(t.nodes[n].length):
                            block = node_ids(t, n, tier)[i]
                            if self.in_tree[tier][block]:
                                raise self.wrong(f"block {block} of tier {tier} stands twice in the tree")
                            self.in_tree[tier][block] = 1
                            self.references[tier][block] += 1
                            if not self.place.fates[n].failed and not (self.place.fates[n].spoilt >> tier) & 1:
                                self.read(tier, block, hashes + i * bs, bs, "the tree")
                n = tree_next(t, n, self.roots[k])
        for tier in range(self.num_tiers):
            if sizes[tier][0] != self.place.size[tier][0] or sizes[tier][1] != self.place.size[tier][1]:
                raise self.wrong(f"queues of tier {tier} of {self.place.size[tier]} blocks, not {sizes[tier]}")
        for k in range(self.place.owners_capacity):
            owner = &self.place.owners[k]
            n = owner.node
            while owner.live and t.nodes[n].length > 0:
                top = node_top(t, n)
                for i in range(t.nodes[n].length):
                    self.references[top][node_ids(t, n, top)[i]] += 1
                n = t.nodes[n].parent
        for k in range(self.place.transfers_capacity):
            moving = &self.place.transfers[k]
            if moving.node != NIL:
                for i in range(moving.num_blocks):
                    if not moving.copies:
                        self.references[moving.src][node_ids(t, moving.node, moving.src)[i]] += 1
                    self.references[moving.dst][moving.dst_ids[i]] += 1
        return 0

    # Our owners' paths are what we asked for; the pins are counted.
    cdef int audit_owners(self) except -1:
        cdef int32_t i, pinned = 0
        cdef Owner* owner
        for i in range(self.num_owners):
            owner = &self.place.owners[handle_slot(self.owners[i].handle)]
            if not owner.live or owner.num_blocks * self.block_size != self.owners[i].text.num_tokens:
                raise self.wrong(f"an owner of {owner.num_blocks} blocks, not {self.owners[i].text.num_tokens} tokens")
            self.read_path(owner.node, &self.owners[i].text, "an owner")
            pinned += self.owners[i].pinned
        if pinned != self.place.pinned_blocks:
            raise self.wrong(f"{self.place.pinned_blocks} blocks pinned, not {pinned}")
        if self.place.live_owners != self.num_owners + self.num_rows:
            raise self.wrong(f"{self.place.live_owners} owners")
        return 0

    # Every computed token of every row is where its table says; committed blocks are the owner's, others its own.
    cdef int audit_rows(self) except -1:
        cdef int32_t i, j, c, n, count, bs = self.block_size
        cdef Row* row
        cdef Holder* ours
        cdef int32_t* blocks
        for i in range(self.num_rows):
            ours = &self.rows[i]
            row = &self.table.rows[handle_slot(ours.handle)]
            blocks = self.table.table + <int64_t>handle_slot(ours.handle) * self.table.width
            if not row.live or (row.num_tokens, row.computed, row.scheduled) != (
                    ours.text.num_tokens, ours.computed, ours.scheduled):
                raise self.wrong(f"a row of {row.num_tokens} tokens, {row.computed} computed, {row.scheduled} scheduled, not "
                                 f"{ours.text.num_tokens}, {ours.computed}, {ours.scheduled}")
            for j in range(row.num_tokens):
                if row.tokens[j] != ours.text.tokens[j]:
                    raise self.wrong("a row of other tokens")
            if (row.num_owned * bs > row.computed or row.computed > row.num_blocks * bs
                    or self.place.owners[row.owner].num_blocks != row.num_owned):
                raise self.wrong(f"a row of {row.num_owned} committed blocks")
            n = self.place.owners[row.owner].node
            self.read_path(n, &ours.text, "a row's owner")
            while self.tree.nodes[n].length > 0:
                for j in range(self.tree.nodes[n].length):
                    if node_top(self.tree, n) != 0 or node_ids(self.tree, n, 0)[j] != blocks[self.tree.nodes[n].depth + j]:
                        raise self.wrong("a committed block is not the tree's")
                n = self.tree.nodes[n].parent
            for c in range(row.num_blocks):
                if <uint32_t>blocks[c] >= <uint32_t>self.pools[0].fresh:
                    raise self.wrong(f"block {blocks[c]} in a row")
                if c >= row.num_owned:
                    self.references[0][blocks[c]] += 1
                count = min(bs, row.computed - c * bs)
                if count > 0:
                    self.read(0, blocks[c], ours.text.hashes + c * bs, count, "a row")
        if self.table.num_live != self.num_rows:
            raise self.wrong(f"{self.table.num_live} rows")
        return 0

    # References are exactly those counted; every block is free, cached or live, and the sums agree.
    cdef int audit_pools(self) except -1:
        cdef int32_t tier, block, unused, cached, i, in_flight = 0
        cdef int64_t j
        cdef Pool* pool
        for i in range(self.num_held):
            self.references[0][self.held[i]] += 1
        for j in range(self.table.num_copied):
            self.references[0][self.table.copied[j].source] += 1
        for i in range(self.place.transfers_capacity):
            in_flight += self.place.transfers[i].node != NIL
        if in_flight != self.place.in_flight:
            raise self.wrong(f"{self.place.in_flight} transfers in flight, not {in_flight}")
        for tier in range(self.num_tiers):
            pool = self.pools[tier]
            if pool == NULL:
                continue
            unused = cached = 0
            for block in range(pool.fresh):
                if <int32_t>(pool.refs[block] & COUNT) != self.references[tier][block]:
                    raise self.wrong(f"block {block} of tier {tier}: {pool.refs[block] & COUNT} references, "
                                     f"not {self.references[tier][block]}")
                if (pool.refs[block] & TREE != 0) != self.in_tree[tier][block]:
                    raise self.wrong(f"block {block} of tier {tier}: marked wrongly as the tree's, or not marked")
                unused += self.references[tier][block] == 0
                cached += pool.refs[block] == (TREE | 1)
            for i in range(pool.num_stack):
                if pool.refs[pool.stack[i]] != 0:
                    raise self.wrong(f"block {pool.stack[i]} of tier {tier} is in use and on the free stack")
            if unused != pool.num_stack or cached != pool.num_cached:
                raise self.wrong(f"tier {tier}: {pool.num_stack} free and {pool.num_cached} cached, not {unused} and {cached}")
        return 0

    def check_integrity(self):
        """The library's own auditors."""
        try:
            self.placement.check_integrity()
            self.table.check_integrity()
        except AssertionError as error:
            raise self.wrong(error) from error
