# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Random operations on the real core at native speed; after each one everything is audited.

The same seed gives the same operations.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy
from native_owners cimport Owners
from native_world cimport MAX_ROWS, Holder, text_push

import numpy as np

from pagedkv._core.block_pool cimport pool_available
from pagedkv._core.types cimport handle_slot

from pagedkv.errors import InvalidArgument, OutOfBlocks, PagedKVError

cnp.import_array()

NAMES = (
    "acquire", "bring up", "insert", "release", "share", "pin", "shorten", "reserve", "take", "complete", "finish", "hold",
    "look", "open", "extend", "step", "fork", "truncate", "end", "retain", "expire", "quota", "drop", "race", "clear",
)

cdef class NativeDriver(Owners):
    """One cache and its users.

    Parameters
    ----------
    seed : int
    placement : Placement over 1 to 3 tiers of at most 256 blocks, of at most 4 tokens each
    table : BlockTable over it, of at most 6 rows
    weights : sequence of int, one per name in NAMES
        How often each operation is done.
    """

    cdef int32_t limits[25]         # cumulative weights

    def __init__(self, seed, placement, table, weights):
        cdef int32_t i, total = 0
        for i in range(25):
            total += weights[i]
            self.limits[i] = total

    def run(self, num_ops, integrity_every=4096):
        """Do so many more operations."""
        cdef int64_t every = integrity_every
        for _ in range(num_ops):
            self.one(self.choose())
            self.sweep()
            self.audit()
            self.operations += 1
            if self.operations % 16 == 0:
                self.follow_changes()
            if self.operations % every == 0:
                self.check_integrity()

    def close(self):
        """Finish, release and clear everything: nothing may be left in any tier."""
        self.doing = "close"
        self.end_step()
        self.table.copies_done()
        self.finish_all(100)
        self.check_integrity()
        while self.num_rows:
            self.end_row(0)
        while self.num_owners:
            self.release(0)
        self.let_go()
        self.placement.clear()
        self.sweep()
        self.audit()
        self.check_integrity()
        for tier in range(self.num_tiers):
            if self.pools[tier] != NULL and self.pools[tier].num_stack != self.pools[tier].fresh:
                raise self.wrong(f"a leak in tier {tier}")

    cdef int32_t choose(self) noexcept nogil:
        cdef int32_t i = 0, at = self.below(self.limits[24])
        while self.limits[i] <= at:
            i += 1
        return i

    # ---- one operation

    cdef int one(self, int32_t kind) except -1:
        self.doing = NAMES[kind]
        if kind == 0:
            self.do_acquire(self.chance(50))
        elif kind == 1:
            if self.num_owners:
                self.bring_up(&self.owners[self.below(self.num_owners)])
        elif kind == 2:
            if self.num_owners:
                self.insert(&self.owners[self.below(self.num_owners)])
        elif kind == 3:
            if self.num_owners:
                self.release(self.below(self.num_owners))
        elif kind == 4:
            self.share()
        elif kind == 5:
            if self.num_owners:
                self.pin(&self.owners[self.below(self.num_owners)])
        elif kind == 6:
            if self.num_owners:
                self.shorten(&self.owners[self.below(self.num_owners)])
        elif kind == 7:
            self.reserve()
        elif kind == 8:
            self.take()
        elif kind == 9:
            self.take()
            if self.num_flights:
                self.complete(self.below(self.num_flights), self.chance(self.trust))
        elif kind == 10:
            self.finish_all(self.trust)
        elif kind == 11:
            self.hold()
        elif kind == 12:
            self.look()
        elif kind == 13:
            self.open_row(self.chance(70))
        elif kind == 14:
            self.extend()
        elif kind == 15:
            self.step()
        elif kind == 16:
            self.fork()
        elif kind == 17:
            if self.num_rows:
                self.truncate(self.below(self.num_rows))
        elif kind == 18:
            if self.num_rows:
                self.end_row(self.below(self.num_rows))
        elif kind == 19:
            self.retain()
        elif kind == 20:
            self.now += self.below(40)
            self.placement.expire(self.now)
        elif kind == 21:
            self.quota()
        elif kind == 22:
            self.drop()
        elif kind == 23:
            self.race()
        elif self.chance(20):
            self.placement.clear()
        return 0

    # ---- rows

    # What a cache does with a prompt, or the table alone with what is on the device.
    cdef int open_row(self, bint promoted) except -1:
        cdef Holder* ours
        cdef int64_t limit, handle, cached, owner
        cdef int64_t other = -1
        cdef int32_t bs = self.block_size, i
        cdef cnp.ndarray tokens
        if self.num_rows >= self.max_rows:
            return self.end_row(self.below(self.num_rows))
        ours = &self.rows[self.num_rows]
        self.prompt(&ours.text)
        tokens = self.array(ours.text.tokens, ours.text.num_tokens)
        ours.scheduled = ours.in_step = ours.pinned = 0
        if not promoted:
            handle, cached = self.table.open(tokens, ours.text.root, leave=self.below(3))
        else:
            limit = max(ours.text.num_tokens - 1, 0) // bs
            owner = self.acquire(&ours.text, limit)
            self.make_room(self.blocks_below(owner), 0)
            try:
                self.placement.promote(owner)
            except OutOfBlocks:
                self.count("promotion refused")
            if self.chance(90):
                self.finish_all(self.trust)
            cached = self.placement.settle(owner) * bs
            block = common = -1
            if ours.text.num_tokens - 1 > cached and self.chance(80):
                other, block, common = self.placement.partial(owner, tokens[cached:ours.text.num_tokens - 1])
            handle, i = self.table.open(tokens, ours.text.root, owner=owner)
            if i != cached:
                raise self.wrong(f"{i} tokens cached of {cached} that were settled")
        if cached % bs or cached > ours.text.num_tokens:
            raise self.wrong(f"{cached} tokens cached")
        ours.handle, ours.computed = handle, <int32_t>cached
        self.num_rows += 1
        self.sweep()
        if other >= 0:
            self.reuse_part(ours, block, common)
            self.placement.release(other)
        return 0

    # The front of a block that agrees in its first tokens is copied into a block of our own.
    cdef int reuse_part(self, Holder* ours, int32_t block, int32_t common) except -1:
        cdef int32_t target
        self.read(0, block, ours.text.hashes + ours.computed, common, "a part of a block")
        target = self.table.seed(ours.handle, common)
        self.sweep()
        if target >= 0:
            self.copy(0, block, 0, target)
            ours.computed += common
            self.count("partial hits")
        return 0

    cdef int end_row(self, int32_t who) except -1:
        self.table.release(self.rows[who].handle)
        self.num_rows -= 1
        if who != self.num_rows:
            memcpy(&self.rows[who], &self.rows[self.num_rows], sizeof(Holder))
        return 0

    cdef int extend(self) except -1:
        cdef int32_t i, n, first
        cdef Holder* ours
        if self.num_rows == 0:
            return 0
        if self.chance(60):
            handles = np.array([self.rows[i].handle for i in range(self.num_rows)], np.int64)
            tokens = np.array([self.below(2) for i in range(self.num_rows)], np.int32)
            self.table.append(handles, tokens)
            for i in range(self.num_rows):
                text_push(&self.rows[i].text, tokens[i])
        else:
            ours = &self.rows[self.below(self.num_rows)]
            first, n = ours.text.num_tokens, self.below(3 * self.block_size)
            for i in range(n):
                text_push(&ours.text, self.below(2))
            self.table.extend(ours.handle, self.array(ours.text.tokens + first, n))
        for i in range(self.num_rows):
            if self.rows[i].text.num_tokens > self.longest + 32:
                return self.end_row(i)
        return 0

    # ---- steps

    # Rows that are in no step, some of them, in any order.
    cdef list idle_rows(self):
        cdef int32_t i, j
        cdef list out = [i for i in range(self.num_rows) if not self.rows[i].in_step]
        for i in range(len(out) - 1, 0, -1):
            j = self.below(i + 1)
            out[i], out[j] = out[j], out[i]
        return out[:1 + self.below(4)]

    cdef bint any_in_step(self) noexcept nogil:
        cdef int32_t i
        for i in range(self.num_rows):
            if self.rows[i].in_step:
                return True
        return False

    # Begins a step, unless one is under way: then that one is ended.
    cdef int step(self) except -1:
        cdef int32_t i, needed, ahead = self.below(3) if self.chance(20) else 0
        cdef bint enough
        if self.any_in_step():
            return self.end_step()
        chosen = self.idle_rows()
        if not chosen:
            return self.open_row(True)
        handles = np.array([self.rows[i].handle for i in chosen], np.int64)
        lens = None
        if self.chance(25):
            lens = np.array([self.below(self.rows[i].text.num_tokens - self.rows[i].computed + 1) for i in chosen], np.int32)
        needed = self.table.blocks_needed(handles, lens, ahead)
        enough = self.chance(10) or self.make_room(needed, 0)
        try:
            arrays = self.table.step(handles, lens, ahead)
        except OutOfBlocks:
            if pool_available(self.pools[0]) >= needed or (self.num_tiers == 1 and self.pools[0].num_cached):
                raise self.wrong("a step was refused for want of blocks that were there") from None
            self.count("step refused")
            return self.end_row(self.below(self.num_rows))
        self.count("steps")
        for i, who in enumerate(chosen):
            self.rows[<int32_t>who].scheduled = (
                self.rows[<int32_t>who].text.num_tokens - self.rows[<int32_t>who].computed if lens is None else lens[i])
        self.begun(chosen, arrays)
        return self.end_step() if self.chance(70) else 0

    # The arrays of a step are those of its rows; copies on write are made; new slots are nobody else's.
    cdef int begun(self, list chosen, object arrays) except -1:
        cdef cnp.ndarray tables = arrays.block_tables, lens = arrays.seq_lens, indptr = arrays.q_indptr
        cdef cnp.ndarray positions = arrays.positions, tokens = arrays.tokens, slots = arrays.slot_mapping
        cdef cnp.ndarray copies = arrays.copies
        cdef const int32_t* table
        cdef const int32_t* own
        cdef const int32_t* pairs = <int32_t*>cnp.PyArray_DATA(copies)
        cdef int64_t* to = <int64_t*>cnp.PyArray_DATA(slots)
        cdef int32_t i, j, r, at = 0, bs = self.block_size, w = <int32_t>cnp.PyArray_DIM(tables, 1), position
        cdef Holder* ours
        self.sweep()
        for i in range(<int32_t>cnp.PyArray_DIM(copies, 0)):
            self.copy(0, pairs[2 * i], 0, pairs[2 * i + 1])
            self.count("copies on write")
        if self.chance(70):
            self.table.copies_done()
            self.sweep()
        for i in range(len(chosen)):
            ours = &self.rows[<int32_t>chosen[i]]
            r = handle_slot(ours.handle)
            own = self.table.table + <int64_t>r * self.table.width
            table = <int32_t*>cnp.PyArray_DATA(tables) + <int64_t>i * w
            for j in range(w):
                if table[j] != (own[j] if j < self.table.rows[r].num_blocks else -1):
                    raise self.wrong(f"block {table[j]} in the table of a step")
            if (<int32_t*>cnp.PyArray_DATA(lens))[i] != ours.computed + ours.scheduled:
                raise self.wrong("length of a sequence")
            if (<int32_t*>cnp.PyArray_DATA(indptr))[i] != at:
                raise self.wrong("offset of a sequence's queries")
            for j in range(ours.scheduled):
                position = ours.computed + j
                if ((<int32_t*>cnp.PyArray_DATA(positions))[at] != position
                        or (<int32_t*>cnp.PyArray_DATA(tokens))[at] != ours.text.tokens[position]
                        or to[at] != <int64_t>own[position // bs] * bs + position % bs):
                    raise self.wrong(f"position, token or slot of query {at}")
                ours.slots[j] = to[at]
                at += 1
            ours.in_step = True
        if cnp.PyArray_DIM(slots, 0) != at or (<int32_t*>cnp.PyArray_DATA(indptr))[len(chosen)] != at:
            raise self.wrong("number of queries")
        return 0

    # Writes what was scheduled, then commits, gives up, or commits and goes on to the next token.
    cdef int end_step(self) except -1:
        cdef int32_t i, j, block
        cdef Holder* ours
        cdef bint room
        chosen = [i for i in range(self.num_rows) if self.rows[i].in_step]
        if not chosen:
            return 0
        for i in chosen:
            ours = &self.rows[i]
            for j in range(ours.scheduled):
                block = <int32_t>(ours.slots[j] // self.block_size)
                if self.pools[0].refs[block] != 1:
                    raise self.wrong(f"a step writes into block {block}, which somebody else reads")
                self.memory[0][ours.slots[j]] = ours.text.hashes[ours.computed + j]
        handles = np.array([self.rows[i].handle for i in chosen], np.int64)
        for i in chosen:
            self.rows[i].in_step = False
        self.table.copies_done()
        if self.chance(10):
            self.table.cancel(handles)
            self.count("steps cancelled")
            for i in chosen:
                self.rows[i].scheduled = 0
            return 0
        if self.chance(30) and self.doing != "close":
            return self.advance(chosen, handles)
        self.table.commit(handles)
        self.computed(chosen)
        return 0

    cdef int computed(self, list chosen) except -1:
        cdef int32_t i
        for i in chosen:
            self.rows[i].computed += self.rows[i].scheduled
            if self.rows[i].scheduled:
                self.know(&self.rows[i].text, self.rows[i].computed)
            self.rows[i].scheduled = 0
        self.sweep()
        return 0

    cdef int advance(self, list chosen, object handles) except -1:
        cdef int32_t i
        tokens = np.array([self.below(2) for i in chosen], np.int32)
        self.make_room(len(chosen), 0)
        try:
            arrays = self.table.advance(handles, tokens)
        except OutOfBlocks:
            self.count("advance refused")
            return self.computed(chosen)
        self.count("advanced")
        self.computed(chosen)
        for i, token in zip(chosen, tokens):
            text_push(&self.rows[i].text, token)
            self.rows[i].scheduled = self.rows[i].text.num_tokens - self.rows[i].computed
        return self.begun(chosen, arrays)

    # ---- forks and cuts

    cdef int fork(self) except -1:
        cdef int32_t i, who = self.below(self.num_rows), n = 1 + self.below(2)
        if self.num_rows == 0 or self.num_rows + n > MAX_ROWS:
            return 0
        try:
            forks = self.table.fork(self.rows[who].handle, n)
        except InvalidArgument:
            if self.rows[who].scheduled == 0:
                raise
            return 0
        if self.rows[who].scheduled:
            raise self.wrong("a row was forked in a step")
        self.count("forks", n)
        for i in range(n):
            memcpy(&self.rows[self.num_rows], &self.rows[who], sizeof(Holder))
            self.rows[self.num_rows].handle = forks[i]
            self.rows[self.num_rows].in_step = False
            self.num_rows += 1
        return 0

    # A committed block that is cut is given up whole; a step under way is forgotten.
    cdef int truncate(self, int32_t who) except -1:
        cdef int32_t keep, whole
        cdef Holder* ours = &self.rows[who]
        keep = ours.text.num_tokens - self.below(min(ours.text.num_tokens, 3 * self.block_size) + 1)
        if self.chance(20):
            keep = self.below(ours.text.num_tokens + 1)
        whole = keep // self.block_size
        if self.table.rows[handle_slot(ours.handle)].num_owned <= whole:
            whole = keep
        else:
            whole *= self.block_size
        try:
            self.table.truncate(ours.handle, keep)
        except PagedKVError as error:
            if type(error) is not PagedKVError:
                raise
            self.count("truncation refused")            # the run it would cut is being moved
            return 0
        ours.text.num_tokens = keep
        ours.computed = min(ours.computed, whole)
        ours.scheduled = 0
        ours.in_step = False
        return 0

    # Somebody wants, and cuts, what is just being demoted.
    cdef int race(self) except -1:
        self.placement.reserve(self.below(self.pools[0].max_capacity + 1))
        if self.chance(50):
            self.do_acquire(False)
            if self.chance(50):
                self.shorten(&self.owners[self.num_owners - 1])
        elif self.num_rows < self.max_rows:
            self.open_row(False)
            if self.chance(50):
                self.truncate(self.num_rows - 1)
        return 0
