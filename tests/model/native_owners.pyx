# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The part of the driver that owns prefixes and manages namespaces.

Where the core can be called without Python, a coin decides by which way.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy
from native_moves cimport Moves
from native_world cimport MAX_OWNERS, MAX_ROOTS, MAX_TOKENS, Holder, Text, text_push

import numpy as np

from pagedkv._core.block_pool cimport pool_alloc, pool_available, pool_free, pool_incref
from pagedkv._core.insertion cimport place_insert
from pagedkv._core.owners cimport place_acquire, place_blocks, place_owner, place_release, place_share, place_shorten
from pagedkv._core.radix_tree cimport node_top
from pagedkv._core.types cimport E_STALE, OK, handle_slot, make_handle

from pagedkv.errors import OutOfBlocks, PinBudgetExceeded

cnp.import_array()


cdef class Owners(Moves):
    """Random operations on owners, held blocks and namespaces."""

    cdef int32_t blocks_below(self, int64_t handle) noexcept nogil:
        cdef int32_t n = self.place.owners[handle_slot(handle)].node, cold = 0
        while self.tree.nodes[n].length > 0:
            if node_top(self.tree, n) != 0:
                cold += self.tree.nodes[n].length
            n = self.tree.nodes[n].parent
        return cold

    # What a match gave must hold this text.
    cdef int32_t read_match(self, const Text* text, cnp.ndarray tiers, cnp.ndarray blocks) except -1:
        cdef int32_t i, n = <int32_t>cnp.PyArray_DIM(blocks, 0)
        cdef const unsigned char* t = <unsigned char*>cnp.PyArray_DATA(tiers)
        cdef const int32_t* b = <int32_t*>cnp.PyArray_DATA(blocks)
        for i in range(n):
            self.read(t[i], b[i], text.hashes + i * self.block_size, self.block_size, "a match")
            self.count("hit " + str(t[i]))
        return n

    # Owns the longest cached prefix; the handle. Nothing is matched that `match` does not see, and all of it, unless
    # a transfer is in the way.
    cdef int64_t acquire(self, const Text* text, int64_t limit) except -1:
        cdef cnp.ndarray tokens = self.array(text.tokens, text.num_tokens)
        cdef int32_t slot, matched
        cdef int64_t handle
        tiers, blocks, _ = self.placement.match(tokens, self.named(text.root))
        matched = self.read_match(text, tiers, blocks)
        if 0 <= limit < matched:
            matched = <int32_t>limit
        if self.chance(50):
            handle, _ = self.placement.acquire(tokens, self.named(text.root), None if limit < 0 else limit)
        else:
            self.placement.lock.acquire()
            slot = place_acquire(self.place, text.root, text.tokens, text.num_tokens, limit)
            handle = make_handle(slot, self.place.owners[slot].generation)
            self.placement.lock.release()
        slot = handle_slot(handle)
        if self.place.owners[slot].blocked >= 0:
            self.count("blocked")
        elif self.place.owners[slot].num_blocks != matched:
            raise self.wrong(f"{self.place.owners[slot].num_blocks} blocks owned of {matched} that match")
        if self.place.owners[slot].num_blocks > matched:
            raise self.wrong("more is owned than matches")
        return handle

    cdef int do_acquire(self, bint whole) except -1:
        cdef Holder* ours
        if self.num_owners >= self.max_owners:
            self.release(self.below(self.num_owners))
        ours = &self.owners[self.num_owners]
        self.prompt(&ours.text)
        ours.handle = self.acquire(&ours.text, -1 if self.chance(80) else self.below(5))
        ours.pinned = 0
        ours.text.num_tokens = self.place.owners[handle_slot(ours.handle)].num_blocks * self.block_size
        self.num_owners += 1
        if whole:
            self.bring_up(ours)
        return 0

    # Room, promotion, settling; sometimes not to the end.
    cdef int bring_up(self, Holder* ours) except -1:
        cdef int32_t room, started
        if self.chance(90):
            self.make_room(self.blocks_below(ours.handle), 0)
        room = pool_available(self.pools[0])
        try:
            started = self.placement.promote(ours.handle)
            if started:
                self.count("promotions", started)
        except OutOfBlocks:
            self.count("promotion refused")
            if room >= self.blocks_below(ours.handle):
                raise self.wrong("a promotion was refused for want of blocks that were there") from None
        if self.chance(40):
            self.finish_all(self.trust)
        if self.chance(60):
            ours.text.num_tokens = self.placement.settle(ours.handle) * self.block_size
            if self.blocks_below(ours.handle):
                raise self.wrong("settled, but not on the device")
        return 0

    # New blocks behind an owner's path, perhaps of tokens that are cached already, perhaps one that others share.
    cdef int insert(self, Holder* ours) except -1:
        cdef int32_t i, bs = self.block_size, n = 1 + self.below(3), first = ours.text.num_tokens, done, bad, slot
        cdef cnp.ndarray ids
        cdef int32_t* blocks
        cdef int32_t path[MAX_TOKENS]
        if first + n * bs > self.longest + bs:
            return 0
        if self.chance(80):
            self.make_room(n, 0)
        if pool_available(self.pools[0]) < n:
            return 0
        ids = np.empty(n, np.int32)
        blocks = <int32_t*>cnp.PyArray_DATA(ids)
        self.placement.lock.acquire()
        pool_alloc(self.pools[0], n, blocks)
        self.placement.lock.release()
        self.sweep()
        for i in range(n * bs):
            text_push(&ours.text, self.below(2))
        for i in range(n):
            self.write(blocks[i], &ours.text, first + i * bs, bs)
        if self.chance(10):
            pool_incref(self.pools[0], blocks + n - 1, 1, &bad)
            self.held[self.num_held] = blocks[n - 1]
            self.num_held += 1
        slot = handle_slot(ours.handle)
        if self.chance(50):
            done = self.placement.insert(ours.handle, self.array(ours.text.tokens + first, n * bs), ids)
        else:
            self.placement.lock.acquire()
            done = place_insert(self.place, slot, ours.text.tokens + first, blocks, n)
            self.placement.lock.release()
        if done < n:
            self.count("insertion ended early")
            if pool_free(self.pools[0], blocks + done, n - done, &bad) != OK:
                raise self.wrong("what was not inserted is not the caller's")
        ours.text.num_tokens = first + done * bs
        if self.blocks_below(ours.handle) == 0:
            place_blocks(self.place, slot, path)
            for i in range(done):
                if path[first // bs + i] != blocks[i]:
                    raise self.wrong("an inserted block is not the owner's")
        if done:
            self.know(&ours.text, ours.text.num_tokens)
        return 0

    cdef int release(self, int32_t who) except -1:
        cdef int64_t handle = self.owners[who].handle
        if self.chance(50):
            self.placement.release(handle)
        else:
            self.placement.lock.acquire()
            place_release(self.place, handle_slot(handle))
            self.placement.lock.release()
        if place_owner(self.place, handle) != E_STALE:
            raise self.wrong("a released owner is live")
        self.num_owners -= 1
        if who != self.num_owners:
            memcpy(&self.owners[who], &self.owners[self.num_owners], sizeof(Holder))
        return 0

    cdef int share(self) except -1:
        cdef int32_t who = self.below(self.num_owners), slot
        cdef Holder* ours
        if 0 < self.num_owners < MAX_OWNERS:
            ours = &self.owners[self.num_owners]
            memcpy(ours, &self.owners[who], sizeof(Holder))
            ours.pinned = 0
            if self.chance(50):
                ours.handle = self.placement.share(self.owners[who].handle)
            else:
                self.placement.lock.acquire()
                slot = place_share(self.place, handle_slot(self.owners[who].handle))
                ours.handle = make_handle(slot, self.place.owners[slot].generation)
                self.placement.lock.release()
            self.num_owners += 1
        return 0

    cdef int pin(self, Holder* ours) except -1:
        cdef int64_t blocks = ours.text.num_tokens // self.block_size
        cdef bint room = self.place.pinned_blocks - ours.pinned + blocks <= self.place.pin_budget
        try:
            self.placement.pin(ours.handle)
            if not room:
                raise self.wrong("pinned beyond the budget")
            ours.pinned = <int32_t>blocks
            self.count("pinned", blocks)
        except PinBudgetExceeded:
            if room:
                raise self.wrong("a pin was refused though the budget has room") from None
            self.count("pin refused")
        return 0

    cdef int shorten(self, Holder* ours) except -1:
        cdef int32_t keep = self.below(ours.text.num_tokens // self.block_size + 1)
        cdef int code
        self.placement.lock.acquire()
        code = place_shorten(self.place, handle_slot(ours.handle), keep)
        self.placement.lock.release()
        if code == OK:
            ours.text.num_tokens = keep * self.block_size
            self.count("shortened")
        else:
            self.count("shortening refused")
        return 0

    # ---- blocks that the driver holds by itself, as a sequence's unfinished tail does

    cdef int hold(self) except -1:
        cdef int32_t n = self.below(3)
        if self.num_held + n > 8 or self.chance(40):
            return self.let_go()
        if pool_available(self.pools[0]) >= n:
            ids = self.placement.pools[0].alloc(n)
            self.sweep()
            for block in ids.tolist():
                if self.references[0][block]:
                    raise self.wrong(f"block {block} was handed out twice")
                self.held[self.num_held] = block
                self.num_held += 1
        return 0

    cdef int let_go(self) except -1:
        cdef int32_t bad
        if pool_free(self.pools[0], self.held, self.num_held, &bad) != OK:
            raise self.wrong(f"held block {self.held[bad]} is not ours")
        self.num_held = 0
        return 0

    cdef int look(self) except -1:
        cdef Text text
        cdef int32_t n
        self.prompt(&text)
        tiers, blocks, common = self.placement.match(self.array(text.tokens, text.num_tokens), self.named(text.root), partial=True)
        n = self.read_match(&text, tiers, blocks)
        if n * self.block_size + common > text.num_tokens:
            raise self.wrong("more agrees than was asked for")
        return 0

    cdef int retain(self) except -1:
        cdef int32_t priority = self.below(101), until = self.now + self.below(60) if self.chance(60) else 0
        if self.num_owners and self.chance(50):
            self.placement.set_retention(self.owners[self.below(self.num_owners)].handle, priority, until)
        elif self.num_rows:
            self.table.retain(self.rows[self.below(self.num_rows)].handle, priority, until)
        return 0

    cdef int quota(self) except -1:
        cdef int32_t tier = self.below(self.num_tiers)
        if self.pools[tier] != NULL:
            self.placement.set_quota(
                self.named(self.roots[self.names[self.below(3)]]),
                self.below(self.pools[tier].max_capacity + 1) if self.chance(60) else None, tier)
        return 0

    cdef int drop(self) except -1:
        cdef int32_t name = self.below(3)
        if self.num_roots < MAX_ROOTS and self.chance(30):
            self.placement.drop_namespace(self.named(self.roots[self.names[name]]))
            self.new_root(name)
            self.count("namespaces dropped")
        return 0
