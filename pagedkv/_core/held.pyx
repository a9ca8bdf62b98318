"""Owners and rows as objects that release their blocks.

By ``with``, by `release`, or when they die.

An exception can come between any two lines of Python, also just after a function has returned a handle and before the
handle is stored. These objects exist before what they hold does, so it is never without a holder.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc

from pagedkv._core.arrays cimport count_input
from pagedkv._core.block_table cimport BlockTable
from pagedkv._core.dispatch cimport Dispatch
from pagedkv._core.owners cimport place_owner, place_release
from pagedkv._core.placement cimport Found, Placement

from pagedkv.errors import StaleHandle


@cython.final
@cython.no_gc_clear
cdef class Hold:
    """An owner of a cached prefix.

    Attributes
    ----------
    handle : int
        For the calls of Placement; -1 once it was released.
    num_blocks : int
        Blocks that it owned when it was made.
    num_cold : int
        Of those, the ones below the device. Where there are none, none can come to be while it is held.
    cold_tail : bool
        Whether pages of short groups of layers that it needs lie below the device.
    partial_tier : int
        Tier of the block behind it that a partial hit would copy from, -1 where there is none, or one tier alone.
    partial_tokens : int
        Its first tokens that are the next ones of the prompt.
    blocked : int
        Id of the transfer in flight that ended the match early, or -1: wait for it, release, own again.
    """

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.release()

    def release(self):
        """Let go. Nothing happens if it was let go of, or a row took it over."""
        cdef int64_t handle = self.handle
        cdef int32_t slot
        self.handle = -1
        if handle < 0 or not self.placement.lock.is_ours():
            return
        self.placement.lock.acquire()
        slot = place_owner(&self.placement.place, handle)
        if slot >= 0:
            place_release(&self.placement.place, slot)
        self.placement.lock.release()

    def __dealloc__(self):
        if self.placement is not None and self.placement.lock.may_be_taken():
            self.release()


@cython.final
@cython.no_gc_clear
cdef class HeldRow:
    """A row of a block table.

    Attributes
    ----------
    handle : int
        For the calls of BlockTable; -1 once it was released.
    """

    def release(self, bint keep_remainder=False):
        """End the row, as ``BlockTable.release``; whether it was there to be ended."""
        cdef int64_t handle = self.handle
        cdef int32_t r
        self.handle = -1
        if handle < 0 or not self.table.lock.is_ours():
            return False
        self.table.lock.acquire()
        with nogil:
            r = self.table.row_of(handle)
            if r >= 0:
                if keep_remainder:
                    self.table.keep_remainder(r)
                self.table.end_row(r)
        self.table.lock.release()
        return r >= 0

    def __dealloc__(self):
        if self.table is not None and self.table.lock.may_be_taken():
            self.release()


@cython.final
@cython.no_gc_clear
cdef class Holder:
    """Counts as a short holder of blocks that is not a transfer, from its making to its end.

    Callers without room wait for it. It ends with the object at the latest, so an interrupted caller leaves none.

    Parameters
    ----------
    dispatch : Dispatch
    """

    def __init__(self, Dispatch dispatch not None):
        self.dispatch = dispatch
        dispatch.hold_up(1)
        self.counts = True

    def end(self):
        """It holds nothing any more. Twice is fine."""
        if self.counts:
            self.counts = False
            self.dispatch.hold_up(-1)

    def __dealloc__(self):
        if self.counts and self.dispatch.lock.may_be_taken():
            self.end()


def own(Placement placement not None, tokens, namespace=0, max_blocks=None):
    """A Hold of the longest cached prefix of `tokens`.

    As ``Placement.acquire(..., request=False)``.
    """
    cdef Hold hold = Hold.__new__(Hold)
    cdef Found found
    hold.handle = hold.blocked = hold.partial_tier = -1
    hold.placement = placement
    hold.handle = placement.acquire_into(tokens, namespace, max_blocks, False, &found)
    hold.num_blocks, hold.num_cold, hold.blocked = found.num_blocks, found.num_cold, found.blocked
    hold.cold_tail, hold.partial_tier, hold.partial_tokens = found.cold_tail, found.partial_tier, found.partial_tokens
    return hold


def own_unsent(Placement placement not None, most):
    """A Hold of the next path with blocks to be sent to the store behind the claims.

    Parameters
    ----------
    most : int
        Blocks to be sent, at most, but for runs that cannot be cut while they move.

    Returns
    -------
    hold : Hold or None
        Its blocks from `first` on lie on the device, and count as sent; see ``Placement.not_sent``.
    first : int
    node : int
        Of the last one, for calls of Placement as long as it is held.
    """
    cdef Hold hold = Hold.__new__(Hold)
    cdef int32_t first = 0, node = -1, num_blocks = 0, limit = count_input(most, "most", 1, 2**31 - 1)
    hold.handle = hold.blocked = hold.partial_tier = -1
    hold.placement = placement
    hold.handle = placement.unsent_into(limit, &first, &node, &num_blocks)
    hold.num_blocks = num_blocks
    return (hold, first, node) if hold.handle >= 0 else (None, 0, -1)


def own_partial(Placement placement not None, Hold owner not None, tokens, bint below=False):
    """A cached block that begins with `tokens`, as ``Placement.partial``.

    `tokens` follow what `owner` holds.

    Returns
    -------
    hold : Hold or None
        Of the path that ends with the block, to be released once the block's bytes are copied.
    block, common : int
        The block, and how many tokens agree. -1 and 0 without one.
    """
    cdef Hold hold = Hold.__new__(Hold)
    cdef int32_t block = -1, common = 0
    hold.handle = hold.blocked = hold.partial_tier = -1
    hold.placement = placement
    hold.handle = placement.partial_into(owner.handle, tokens, below, &block, &common)
    return (hold, block, common) if hold.handle >= 0 else (None, -1, 0)


def open_row(BlockTable table not None, tokens, namespace, Hold owner):
    """A HeldRow for a new sequence, as ``BlockTable.open``.

    Takes `owner` over, unless it raises.
    """
    cdef HeldRow row = HeldRow.__new__(HeldRow)
    cdef int64_t computed
    if owner.handle < 0:
        raise StaleHandle("what is held was let go of")
    row.handle = -1
    row.table = table
    row.handle = table.open_into(tokens, namespace, owner.handle, 1, &computed)
    owner.handle = -1
    return row


def fork_row(BlockTable table not None, HeldRow row not None, n):
    """`n` HeldRows, as ``BlockTable.fork``."""
    cdef list rows = []
    cdef HeldRow fork
    cdef int32_t i, count = table.count_forks(n)
    cdef int64_t* handles
    for _ in range(count):
        fork = HeldRow.__new__(HeldRow)
        fork.handle = -1
        fork.table = table
        rows.append(fork)
    handles = <int64_t*>malloc((count + 1) * sizeof(int64_t))
    if handles == NULL:
        raise MemoryError("no memory for forks")
    try:
        table.fork_into(row.handle, count, handles)
        for i in range(count):
            fork = rows[i]
            fork.handle = handles[i]
    finally:
        free(handles)
    return rows
