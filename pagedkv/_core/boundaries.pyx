"""Prefixes over groups of layers for a caller without a BlockTable, such as a replay.

The blocks of group 0 come first, and then the boundaries at which requests may go on, with the pages that they need.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memset

import numpy as np

from pagedkv._core.arrays cimport blocks_input, i32, i64, int32_input, tokens_input
from pagedkv._core.block_pool cimport COUNT, Pool
from pagedkv._core.owners cimport place_owner, place_release, place_retrace
from pagedkv._core.place cimport Place
from pagedkv._core.placement cimport Placement
from pagedkv._core.points cimport point_at, point_give, point_lacks
from pagedkv._core.tails cimport point_touch
from pagedkv._core.types cimport E_RANGE, E_STALE, MAX_GROUPS, NIL, OK
from pagedkv.errors import DoubleRelease, InvalidArgument

cnp.import_array()


@cython.final
cdef class Boundaries:
    """Prefixes and points in a Placement over groups of layers. Thread-safe.

    For a caller with rows of its own.

    Parameters
    ----------
    placement : Placement

    Raises
    ------
    InvalidArgument
        It is not over groups of layers.
    """

    cdef readonly Placement placement

    def __cinit__(self, Placement placement not None):
        if placement.place.groups == NULL:
            raise InvalidArgument("every layer keeps every block there: Placement.insert is all that is needed")
        self.placement = placement

    def agreed(self, owner):
        """Blocks of its prompt that the tree had when an owner was acquired, whether usable or not."""
        cdef int64_t handle = self.placement._handle(owner)
        cdef int32_t slot, found = 0
        self.placement.lock.acquire()
        slot = place_owner(&self.placement.place, handle)
        if slot >= 0:
            found = self.placement.place.owners[slot].agreed
        self.placement.lock.release()
        if slot < 0:
            raise self.placement._stale(handle)
        return found

    def retrace(self, owner, tokens):
        """Own more blocks of the tree, whose tokens the caller computes again.

        They end where the device has no more. The owner holds its path alone from now on, and no pages of short groups.

        Parameters
        ----------
        owner : int
        tokens : int32 [num_blocks * block_size]
            They follow the owned path.

        Returns
        -------
        int
            Blocks more.
        """
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef int32_t blocks = <int32_t>(cnp.PyArray_SIZE(array) // self.placement.tree.tree.block_size)
        cdef const int32_t* data = i32(array)
        cdef int64_t handle = self.placement._handle(owner)
        cdef int32_t slot, done = 0
        self.placement.lock.acquire()
        with nogil:
            slot = place_owner(&self.placement.place, handle)
            if slot >= 0:
                done = place_retrace(&self.placement.place, slot, data, blocks)
        self.placement.lock.release()
        if slot < 0:
            raise self.placement._stale(handle)
        return done

    def insert(self, owner, tokens, blocks):
        """Insert blocks of group 0 as :meth:`Placement.insert`.

        The short groups have holes there until :meth:`keep`.

        The owner holds its path alone from now on, and no pages of short groups.
        """
        return self.placement.insert_spine(owner, tokens, blocks)

    def lacking(self, owner, num_blocks):
        """Pages that the device lacks for the boundary behind `num_blocks` blocks of a path.

        Returns
        -------
        ndarray of int64 [num_groups]
            0 for the group that sees everything.

        Raises
        ------
        InvalidArgument
            The path is shorter.
        """
        cdef int32_t k = blocks_input(num_blocks, "num_blocks", 0, 2**31 - 1)
        cdef int64_t more[MAX_GROUPS]
        cdef int code = self.lacking_into(self.placement._handle(owner), k, more)
        cdef cnp.ndarray out = np.empty(self.placement.place.groups.num, np.int64)
        cdef int32_t group
        if code != OK:
            raise self.refused(code, owner, k)
        for group in range(self.placement.place.groups.num):
            i64(out)[group] = more[group]
        return out

    cdef int lacking_into(self, int64_t handle, int32_t num_blocks, int64_t* more) noexcept:
        cdef Place* p = &self.placement.place
        cdef int32_t slot
        cdef int code = OK
        memset(more, 0, MAX_GROUPS * sizeof(int64_t))
        self.placement.lock.acquire()
        slot = place_owner(p, handle)
        if slot < 0:
            code = E_STALE
        elif num_blocks > p.owners[slot].num_blocks:
            code = E_RANGE
        else:
            point_lacks(p, slot, num_blocks, more)
        self.placement.lock.release()
        return code

    def is_point(self, owner, num_blocks):
        """Whether there is a point behind `num_blocks` blocks of a path, in whatever tier."""
        cdef int32_t k = blocks_input(num_blocks, "num_blocks", 0, 2**31 - 1), slot
        cdef int64_t handle = self.placement._handle(owner)
        cdef bint found = False
        self.placement.lock.acquire()
        slot = place_owner(&self.placement.place, handle)
        if slot >= 0:
            found = point_at(&self.placement.place, slot, k) != NIL
        self.placement.lock.release()
        if slot < 0:
            raise self.placement._stale(handle)
        return found

    def keep(self, owner, num_blocks, pages):
        """Make the boundary behind the first `num_blocks` blocks of an owned path a point.

        A request that goes on from there finds it until the point is evicted. Points that are made or kept later go later.

        Parameters
        ----------
        owner : int
        num_blocks : int
        pages : sequence of int32 arrays
            By short group, as many pages of the device as :meth:`lacking` says, each with one reference, the caller's, which
            passes to the tree.

        Returns
        -------
        bool
            False: there was no memory for it, and the pages are free.

        Raises
        ------
        InvalidArgument
            The path is shorter, there are more pages than lack or fewer, or one of them is free, in use or named twice.
            Nothing was changed.
        """
        cdef int32_t k = blocks_input(num_blocks, "num_blocks", 0, 2**31 - 1), slot, group, bad = -1
        cdef Place* p = &self.placement.place
        cdef int64_t handle = self.placement._handle(owner)
        cdef int64_t more[MAX_GROUPS]
        cdef int32_t* given[MAX_GROUPS]
        cdef int64_t counts[MAX_GROUPS]
        cdef cnp.ndarray array
        cdef bint made = False
        cdef int code = OK
        kept = tuple(int32_input(each, "pages") for each in pages)
        if len(kept) != p.groups.num - 1:
            raise InvalidArgument(f"pages of {len(kept)} groups, and {p.groups.num - 1} short ones exist")
        for group in range(1, p.groups.num):
            array = kept[group - 1]
            given[group - 1], counts[group] = i32(array), cnp.PyArray_SIZE(array)
        memset(more, 0, sizeof(more))
        self.placement.lock.acquire()
        with nogil:
            slot = place_owner(p, handle)
            if slot < 0:
                code = E_STALE
            elif k > p.owners[slot].num_blocks:
                code = E_RANGE
            else:
                point_lacks(p, slot, k, more)
                for group in range(1, p.groups.num):
                    if more[group] != counts[group]:
                        bad = group
                    elif bad < 0 and not are_new(p.groups.pools[0][group], given[group - 1], <int32_t>counts[group]):
                        bad = MAX_GROUPS + group
                if bad < 0:
                    made = point_give(p, slot, k, given)
        self.placement.lock.release()
        if code != OK:
            raise self.refused(code, owner, k)
        if bad >= MAX_GROUPS:
            raise InvalidArgument(f"pages of group {bad - MAX_GROUPS}: one of them is free, in use, or stands there twice")
        if bad >= 0:
            raise InvalidArgument(f"{counts[bad]} pages of group {bad}, and the boundary behind {k} blocks lacks {more[bad]}")
        return made

    def release(self, owner, boundaries):
        """Release as :meth:`Placement.release`, and use these points once more, in this order.

        So the request's blocks that no point keeps are evicted first, and the last boundary named here last.

        Parameters
        ----------
        owner : int
        boundaries : int32 [n]
            Numbers of blocks; where there is no point nothing happens.

        Raises
        ------
        DoubleRelease
            The owner was released before.
        """
        cdef cnp.ndarray array = int32_input(boundaries, "boundaries")
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(array), i, slot
        cdef cnp.ndarray nodes = np.empty((2, n), np.int32)     # and their generations
        cdef int32_t* node = i32(nodes)
        cdef const int32_t* at = i32(array)
        cdef Place* p = &self.placement.place
        cdef int64_t handle = self.placement._handle(owner)
        self.placement.lock.acquire()
        with nogil:
            slot = place_owner(p, handle)
            if slot >= 0:
                for i in range(n):
                    node[i] = point_at(p, slot, at[i])
                    node[n + i] = p.tree.nodes[node[i]].generation if node[i] != NIL else 0
                place_release(p, slot)
                for i in range(n):
                    if node[i] != NIL and p.tree.nodes[node[i]].generation == node[n + i]:
                        point_touch(p, node[i])
        self.placement.lock.release()
        if slot < 0:
            raise DoubleRelease(f"owner {handle:#x} was released before, or never existed: nothing was changed")

    cdef object refused(self, int code, owner, int32_t num_blocks):
        if code == E_STALE:
            return self.placement._stale(self.placement._handle(owner))
        blocks = len(self.placement.blocks_of(owner))
        return InvalidArgument(f"there is no boundary behind {num_blocks} blocks of a path of {blocks}")


# Whether each of these pages has one reference, a caller's, and stands there once.
cdef bint are_new(Pool* pool, const int32_t* pages, int32_t n) noexcept nogil:
    cdef int32_t i, last = n
    for i in range(n):
        if <uint32_t>pages[i] >= <uint32_t>pool.fresh or pool.refs[pages[i]] != 1:
            last = i
            break
        pool.refs[pages[i]] = COUNT                     # the same page twice shows
    for i in range(last):
        pool.refs[pages[i]] = 1
    return last == n
