"""Reports to the core about the requests of a block table's rows.

A policy learns from them, and the core writes closed tiers and sends by them: a prefix that a second request finds is
worth a copy.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.arrays cimport count_input, handle_input, i64, int64_input, return_input, session_input
from pagedkv._core.block_table cimport BlockTable, Row
from pagedkv._core.owners cimport place_arrive, place_begin, place_depart, place_hint
from pagedkv._core.place cimport WRITE_NEVER, Place
from pagedkv._core.types cimport E_STALE, NIL
from pagedkv.errors import InvalidArgument

cnp.import_array()


# Whether anything is decided by which requests come: by the policy, by writes to a closed tier, or by sends.
cdef bint asks(Place* p) noexcept nogil:
    cdef int32_t tier
    for tier in range(p.num_tiers):
        if p.closed[tier] and p.pools[tier] != NULL and p.writes[tier] != WRITE_NEVER:
            return True
    return p.policy.arrive != NULL or p.sends_when != WRITE_NEVER


def requests_of(BlockTable table not None):
    """The Requests of a table, None where nothing is decided by which requests come."""
    return Requests(table) if table.placement is not None and asks(&table.placement.place) else None


def check_return(expected_return_s):
    """Raise what :meth:`Requests.hint` would, for callers whose policy takes no hints."""
    return_input(expected_return_s)


@cython.final
cdef class Requests:
    """The requests of a table. Thread-safe.

    They are for a policy that learns of them, as ``hazard`` does, and for a tier that is written when a second request
    finds a run.

    Parameters
    ----------
    table : BlockTable over a Placement

    Attributes
    ----------
    learns : bool
        Whether the policy learns of them: only then do `begin`, `hint` and `depart` do anything.

    Raises
    ------
    InvalidArgument
        Nothing is decided by which requests come.
    """

    cdef readonly BlockTable table

    def __cinit__(self, BlockTable table not None):
        if table.placement is None or not asks(&table.placement.place):
            policy = None if table.placement is None else table.placement.policy
            raise InvalidArgument(f"policy {policy!r} learns nothing of requests: 'hazard' does")
        self.table = table

    @property
    def learns(self):
        """Whether the policy learns of requests."""
        return self.table.placement.place.policy.arrive != NULL

    def arrive(self, row, found=0, *, session=None, now_ns=-1):
        """A row that was opened with an `owner` stands for a request, which has just come.

        Once, before anything is appended. Without an `owner`, ``BlockTable.open`` has done it. Forks stand for the same
        request; it is over when the last of them is released.

        Parameters
        ----------
        row : int
        found : int
            Blocks of the prompt that were cached, where that is more than the `owner` holds: what was not worth its loading
            is a hit to the policy, as it would be to LRU.
        session : as in :meth:`hint`.
        now_ns : int
            The caller's clock, as in ``Placement.expire``; -1: time stands still.

        Raises
        ------
        WrongType, InvalidArgument
        StaleHandle
            The row was released.
        """
        cdef BlockTable t = self.table
        cdef int64_t handle = handle_input(row, "row"), blocks = count_input(found, "found", 0, 2**31 - 1), size
        cdef int64_t name = session_input(session), now = count_input(now_ns, "now_ns", -1, 2**63 - 1)
        cdef int32_t r
        cdef Row* row_
        t.lock.acquire()
        r = t.row_of(handle)
        if now >= 0 and t.placement.place.policy.clock != NULL:
            t.placement.place.policy.clock(&t.placement.place, now)
        if r >= 0 and t.rows[r].owner != NIL:
            row_ = &t.rows[r]
            size = max(row_.num_owned, (row_.num_tokens - 1) // t.block_size)     # one token is left to compute
            with nogil:
                place_arrive(&t.placement.place, row_.owner, row_.tokens, size * t.block_size, blocks)
                if name >= 0:
                    place_hint(&t.placement.place, row_.owner, name, -1)
        t.lock.release()
        if r < 0:
            t.raise_(E_STALE, [handle], 0)

    def begin(self, rows):
        """Tell the policy that these rows' requests (int64 [n]) are about to be scheduled.

        Call before making room for a step; see ``HazardPolicy.begin``.

        To be called before room is made for a step. A row that was released is passed over: the step will refuse it.
        """
        cdef BlockTable t = self.table
        cdef cnp.ndarray handles = int64_input(rows, "rows")
        cdef const int64_t* h = i64(handles)
        cdef int64_t i, n = cnp.PyArray_SIZE(handles)
        cdef int32_t r
        t.lock.acquire()
        with nogil:
            for i in range(n):
                r = t.row_of(h[i])
                if r >= 0 and t.rows[r].owner != NIL:
                    place_begin(&t.placement.place, t.rows[r].owner)
        t.lock.release()

    def hint(self, row, *, session=None, expected_return_s=None):
        """Pass the caller's hints about a row's request, as in ``HazardPolicy.hint``.

        For any of its forks.

        Raises
        ------
        WrongType, InvalidArgument, StaleHandle
        """
        cdef BlockTable t = self.table
        cdef int64_t handle = handle_input(row, "row")
        cdef int64_t name = session_input(session)
        cdef double seconds = return_input(expected_return_s)
        cdef int32_t r, kin
        t.lock.acquire()
        r = kin = t.row_of(handle)
        while r >= 0:                           # one of a request's rows carries its visit
            if t.rows[kin].owner != NIL:
                place_hint(&t.placement.place, t.rows[kin].owner, name, seconds)
            kin = t.rows[kin].next_kin
            if kin == r:
                break
        t.lock.release()
        if r < 0:
            t.raise_(E_STALE, [handle], 0)

    def depart(self, row):
        """End a row's request, and report its output to ``HazardPolicy.report``.

        Release the row next.

        Without this, releasing it says that what was appended to its prompt is what it generated.

        Returns
        -------
        int
            The visit's handle; -1 where there is nothing to report: a fork goes on with the request.

        Raises
        ------
        StaleHandle
            The row was released.
        """
        cdef BlockTable t = self.table
        cdef int64_t handle = handle_input(row, "row"), visit = -1
        cdef int32_t r
        t.lock.acquire()
        r = t.row_of(handle)
        if r >= 0 and t.rows[r].owner != NIL and t.rows[r].next_kin == r:
            with nogil:
                visit = place_depart(&t.placement.place, t.rows[r].owner, t.rows[r].used, -1, True)
        t.lock.release()
        if r < 0:
            t.raise_(E_STALE, [handle], 0)
        return visit
