# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The part of the driver that throws the dice, moves blocks between tiers and makes room."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy
from native_world cimport (
    MAX_KNOWN, MAX_OWNERS, MAX_ROWS, MAX_TOKENS, Flight, Text, World, mixed, text_copy, text_push,
)

import numpy as np

from pagedkv._core.block_pool cimport pool_available
from pagedkv._core.transfers cimport finish_as
from pagedkv._core.types cimport E_STALE, OK, Move, handle_slot

cnp.import_array()

cdef enum:
    PATIENCE = 4000         # rounds, of one transfer each, in which room must have been made: a copy may wait for its parent's


cdef class Moves(World):
    """Chance, prompts, and the transfers of a World."""

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
        self.roots[i] = handle_slot(self.placement.tree.namespace(b"abc"[name:name + 1]))
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
    # promoted may not be readable at all, unless the transfer was given up before it began.
    cdef int complete(self, int32_t which, bint ok) except -1:
        cdef int64_t transfer = self.flights[which].move.transfer
        cdef bint tried = ok or self.chance(60)
        cdef bint unreadable = tried and self.chance(50)
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
            if not ok and move.depth % 2 == 0:
                self.poison(move.dst_tier, move.dst_block)
            if not ok and unreadable and move.dst_tier == 0:
                self.poison(move.src_tier, move.src_block)
            self.num_flights -= 1
            self.flights[i] = self.flights[self.num_flights]
        if self.chance(50):
            self.placement.complete([transfer], [ok], [tried])
        else:
            self.placement.lock.acquire()
            code = finish_as(self.place, transfer, ok, tried)
            self.placement.lock.release()
            if code != OK:
                raise self.wrong(f"a transfer ended with {code}")
        if self.chance(2):
            self.placement.lock.acquire()
            code = finish_as(self.place, transfer, ok, tried)
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

    # What a cache does to get blocks. Where there is no room in the end, others hold all there is.
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

    # What a cache does when no caller waits: copies of what is wanted, or of anything.
    cdef int write_behind(self) except -1:
        cdef int32_t tier
        if self.chance(60):
            self.placement.copy_wanted(1 + self.below(8))
            return 0
        tier = self.below(self.num_tiers)
        if tier > 0 and self.place.closed[tier] and self.pools[tier] != NULL:
            self.placement.copy(self.placement.uncopied(tier)[0], tier, 1 + self.below(8))
        return 0

    cdef int reserve(self) except -1:
        cdef int32_t tier = self.below(self.num_tiers), n
        if self.pools[tier] != NULL:
            n = self.below(self.pools[tier].max_capacity + 2)
            if self.chance(60):
                self.placement.reserve(n, tier)
            else:
                self.make_room(n, tier)
        return 0
