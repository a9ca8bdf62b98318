# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The part of the driver that runs sequences: rows of the block table and their steps."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy
from native_owners cimport Owners
from native_world cimport MAX_ROWS, Holder, text_push

import numpy as np

from pagedkv._core.block_pool cimport pool_available
from pagedkv._core.block_table cimport Row
from pagedkv._core.radix_tree cimport Tree
from pagedkv._core.types cimport handle_slot

from pagedkv.errors import InvalidArgument, OutOfBlocks

cnp.import_array()


cdef class Rows(Owners):
    """Random operations on sequences."""

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
            handle, cached = self.table.open(tokens, self.named(ours.text.root), leave=self.below(3))
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
            handle, i = self.table.open(tokens, self.named(ours.text.root), owner=owner)
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
        if self.chance(90):
            self.make_room(needed, 0)
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

    # The arrays of a step are those of its rows; copies on write are made; new slots belong to no other row.
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
        chosen = [i for i in range(self.num_rows) if self.rows[i].in_step]
        if not chosen:
            return 0
        for i in chosen:
            ours = &self.rows[i]
            for j in range(ours.scheduled):
                block = <int32_t>(ours.slots[j] // self.block_size)
                if self.pools[0].refs[block] != 1:
                    raise self.wrong(f"a step writes into block {block}, which others read")
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
        self.table.commit(handles)
        self.computed(chosen)
        self.table.append(handles, tokens)
        for i, token in zip(chosen, tokens):
            text_push(&self.rows[i].text, token)
        self.make_room(len(chosen), 0)
        try:
            arrays = self.table.step(handles)
        except OutOfBlocks:
            self.count("advance refused")
            return 0
        self.count("advanced")
        for i in chosen:
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

    # A committed block that is cut is given up whole, and so is a run that is being moved; a step under way is forgotten.
    cdef int truncate(self, int32_t who) except -1:
        cdef int32_t keep, whole, n
        cdef Holder* ours = &self.rows[who]
        cdef Row* row = &self.table.rows[handle_slot(ours.handle)]
        cdef Tree* tree = self.place.tree
        keep = ours.text.num_tokens - self.below(min(ours.text.num_tokens, 3 * self.block_size) + 1)
        if self.chance(20):
            keep = self.below(ours.text.num_tokens + 1)
        whole = keep // self.block_size
        if row.num_owned <= whole:
            whole = keep
        else:
            n = self.place.owners[row.owner].node
            while tree.nodes[n].length > 0 and tree.nodes[n].depth >= whole:
                n = tree.nodes[n].parent
            if tree.nodes[n].depth + tree.nodes[n].length > whole and self.place.fates[n].transfer >= 0:
                self.count("truncated into a run in flight")
                whole = tree.nodes[n].depth
            whole *= self.block_size
        self.table.truncate(ours.handle, keep)
        ours.text.num_tokens = keep
        ours.computed = min(ours.computed, whole)
        ours.scheduled = 0
        ours.in_step = False
        return 0
