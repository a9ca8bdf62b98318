# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The part of the driver that owns prefixes, moves blocks and manages namespaces.

Where the core can be called without Python, a coin decides by which way.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy
from native_world cimport (
    MAX_KNOWN, MAX_OWNERS, MAX_ROOTS, MAX_ROWS, MAX_TOKENS, Flight, Holder, Text, World, mixed, text_copy, text_push,
)

import numpy as np

from pagedkv._core.block_pool cimport pool_alloc, pool_available, pool_free, pool_incref
from pagedkv._core.insertion cimport place_insert
from pagedkv._core.owners cimport (
    place_acquire, place_blocks, place_owner, place_release, place_share, place_shorten,
)
from pagedkv._core.radix_tree cimport node_top
from pagedkv._core.transfers cimport finish
from pagedkv._core.types cimport E_STALE, OK, Move, handle_slot, make_handle

from pagedkv.errors import OutOfBlocks, PinBudgetExceeded

cnp.import_array()

cdef enum:
    PATIENCE = 400          # rounds in which room must have been made


cdef class Owners(World):
    """Random operations on owners, moves and namespaces of a World."""

    def __cinit__(self, seed, placement, table, *_):
        cdef int32_t i
        self.state = mixed(seed, 7)
        self.seen_events = {}
        for i in range(3):
            self.new_root(i)
        self.longest = min(MAX_TOKENS - 64, (2 + self.below(self.pools[0].max_capacity + 2)) * self.block_size)
        self.max_owners, self.max_rows = 1 + self.below(MAX_OWNERS), 1 + self.below(MAX_ROWS)
        self.trust = (50, 80, 95, 100)[self.below(4)]

    # ---- chance

    cdef int32_t below(self, int32_t n) noexcept nogil:
        self.state += <uint64_t>0x9E3779B97F4A7C15
        return <int32_t>((mixed(self.state, 0) >> 33) % <uint64_t>n) if n > 0 else 0

    cdef bint chance(self, int32_t percent) noexcept nogil:
        return self.below(100) < percent

    cdef void count(self, object event, int64_t n=1):
        self.seen_events[event] = self.seen_events.get(event, 0) + n

    cdef cnp.ndarray array(self, const int32_t* tokens, int32_t n):
        cdef cnp.ndarray out = np.empty(n, np.int32)
        memcpy(cnp.PyArray_DATA(out), tokens, n * sizeof(int32_t))
        return out

    cdef int new_root(self, int32_t name) except -1:
        cdef int32_t i = self.num_roots
        self.roots[i] = self.placement.tree.namespace(b"abc"[name:name + 1])
        self.salts[i] = mixed(self.seed, 1000 + i)
        self.names[name] = i
        self.num_roots += 1
        return 0

    # Often a prefix that was computed lately, in its namespace or another one, with something else behind it.
    cdef void prompt(self, Text* text) noexcept nogil:
        cdef int32_t i, root = self.names[self.below(3)]
        cdef Text* model
        text.num_tokens = 0
        if self.chance(3):
            root = self.below(self.num_roots)           # perhaps one that was dropped
        text.root, text.salt = self.roots[root], self.salts[root]
        if self.num_known and self.chance(85):
            model = &self.known[self.below(self.num_known)]
            for i in range(model.num_tokens if self.chance(60) else self.below(model.num_tokens + 1)):
                text_push(text, model.tokens[i])
        for _ in range(self.below(3 * self.block_size if self.chance(80) else self.longest)):
            if text.num_tokens < self.longest:
                text_push(text, self.below(2))

    cdef void know(self, const Text* text, int32_t num_tokens) noexcept nogil:
        cdef int32_t i = self.num_known if self.num_known < MAX_KNOWN else self.below(MAX_KNOWN)
        text_copy(&self.known[i], text, num_tokens)
        if i == self.num_known:
            self.num_known += 1

    # ---- moves

    # Takes the moves that were decided; the bytes of some transfers arrive at once.
    cdef int take(self) except -1:
        cdef cnp.ndarray moves = self.placement.take_moves()
        cdef Move* data = <Move*>cnp.PyArray_DATA(moves)
        cdef int64_t i, n = cnp.PyArray_DIM(moves, 0)
        cdef Flight* flight
        cdef bint early = False
        self.sweep()
        for i in range(n):
            if i == 0 or data[i].transfer != data[i - 1].transfer:
                early = self.chance(50)
            flight = &self.flights[self.num_flights]
            flight.move, flight.copied = data[i], early
            if early:
                self.copy(data[i].src_tier, data[i].src_block, data[i].dst_tier, data[i].dst_block)
            self.num_flights += 1
        return 0

    # Ends the transfer that a move belongs to. One that fails leaves half of its bytes, and what could not be
    # promoted may not be readable at all.
    cdef int complete(self, int32_t which, bint ok) except -1:
        cdef int64_t transfer = self.flights[which].move.transfer
        cdef bint unreadable = self.chance(50)
        cdef int32_t i = 0
        cdef int code
        cdef Move* move
        while i < self.num_flights:
            move = &self.flights[i].move
            if move.transfer != transfer:
                i += 1
                continue
            if ok and not self.flights[i].copied:
                self.copy(move.src_tier, move.src_block, move.dst_tier, move.dst_block)
            if not ok and move.index % 2 == 0:
                self.poison(move.dst_tier, move.dst_block)
            if not ok and unreadable and move.dst_tier == 0:
                self.poison(move.src_tier, move.src_block)
            self.num_flights -= 1
            self.flights[i] = self.flights[self.num_flights]
        if self.chance(50):
            self.placement.complete([transfer], [ok])
        else:
            self.placement.lock.acquire()
            code = finish(self.place, transfer, ok)
            self.placement.lock.release()
            if code != OK:
                raise self.wrong(f"a transfer ended with {code}")
        if self.chance(2):
            self.placement.lock.acquire()
            code = finish(self.place, transfer, ok)
            self.placement.lock.release()
            if code != E_STALE:
                raise self.wrong(f"a transfer that was over ended again with {code}")
        self.sweep()
        return 0

    cdef int finish_all(self, int32_t trust) except -1:
        self.take()
        while self.num_flights:
            self.complete(self.below(self.num_flights), self.chance(trust))
            self.take()
        return 0

    # What a cache does to get blocks. Where there is no room in the end, everybody else holds all there is.
    cdef bint make_room(self, int32_t num_blocks, int32_t tier) except -1:
        cdef int32_t rounds
        for rounds in range(PATIENCE):
            if self.placement.reserve(num_blocks, tier) == 0:
                self.take()
                if pool_available(self.pools[tier]) < num_blocks:
                    raise self.wrong(f"room was promised in tier {tier}")
                return True
            self.take()
            if self.num_flights == 0:
                self.everything_is_held(tier)
                self.count("no room")
                return False
            self.complete(self.below(self.num_flights), rounds > PATIENCE // 2 or self.chance(self.trust))
        raise self.wrong(f"room in tier {tier} is never made")

    cdef int reserve(self) except -1:
        cdef int32_t tier = self.below(self.num_tiers), n
        if self.pools[tier] != NULL:
            n = self.below(self.pools[tier].max_capacity + 2)
            if self.chance(60):
                self.placement.reserve(n, tier)
            else:
                self.make_room(n, tier)
        return 0

    # ---- owners

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
        tiers, blocks, _ = self.placement.match(tokens, text.root)
        matched = self.read_match(text, tiers, blocks)
        if 0 <= limit < matched:
            matched = <int32_t>limit
        if self.chance(50):
            handle, _ = self.placement.acquire(tokens, text.root, None if limit < 0 else limit)
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

    # New blocks behind an owner's path, perhaps of tokens that are cached already, perhaps one that somebody shares.
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
        tiers, blocks, common = self.placement.match(self.array(text.tokens, text.num_tokens), text.root, partial=True)
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
                self.roots[self.names[self.below(3)]],
                self.below(self.pools[tier].max_capacity + 1) if self.chance(60) else None, tier)
        return 0

    cdef int drop(self) except -1:
        cdef int32_t name = self.below(3)
        if self.num_roots < MAX_ROOTS and self.chance(30):
            self.placement.drop_namespace(self.roots[self.names[name]])
            self.new_root(name)
            self.count("namespaces dropped")
        return 0
