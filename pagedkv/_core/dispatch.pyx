"""From a decided move to its end.

The mover's dispatcher takes and finishes, callers decide and wait.

A caller that is interrupted has nothing of a move to lose: it never had one. See dispatch.pxd for who has what.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy

import numpy as np

from pagedkv._core.arrays cimport bool_input, i64, int64_input
from pagedkv._core.block_pool cimport Pool
from pagedkv._core.lock cimport read_hint, write_hint
from pagedkv._core.place cimport Place, pool_in
from pagedkv._core.placement import MOVE_DTYPE as _MOVE_DTYPE
from pagedkv._core.transfers cimport finish_as, leaving_device, read_for_nobody
from pagedkv._core.types cimport NIL, OK, Move, handle_slot
from pagedkv._core.write_behind cimport copy_wanted
from pagedkv.threads.pthread cimport (
    cond_init_monotonic, cond_wait_ns, now_ns, pthread_cond_broadcast, pthread_cond_destroy, pthread_cond_signal,
)
from pagedkv.errors import InvalidArgument, WrongType

cnp.import_array()

NOTHING, ENDED, NOT_YET, CLOSED = range(4)
LONGEST_S = 1e6

cdef enum:
    BEHIND_BLOCKS = 64      # copied at a time while no caller waits: what a crash may cost of them
    BEHIND_NS = 2_000_000   # from the wish for copies to their decision: the caller's step ends, and waits for no GIL


@cython.final
@cython.no_gc_clear
cdef class Taken:
    """Moves that were taken from the core.

    When it dies, what was not finished is given up: its destinations are free again.

    Attributes
    ----------
    moves : structured array [n]
        As ``Placement.take_moves`` gives them.
    """

    def __dealloc__(self):
        if self.moves is not None and self.dispatch.lock.may_be_taken():
            self.dispatch.give_up_moves(self.moves, False, True)


@cython.final
@cython.no_gc_clear
cdef class Dispatch:
    """Hands a Placement's decided moves to one thread.

    It tells waiting callers when transfers are over.

    Parameters
    ----------
    placement : Placement
        One Dispatch at a time.
    """

    def __cinit__(self, placement):
        if not isinstance(placement, Placement):
            raise WrongType(f"placement is {type(placement).__name__}: a Placement is needed")
        self.placement = placement
        self.lock = self.placement.lock
        if self.placement.place.decided != NULL:
            raise InvalidArgument("this placement has a Dispatch already")
        cond_init_monotonic(&self.decided)
        cond_init_monotonic(&self.ended)
        self.placement.place.decided = &self.decided

    def __dealloc__(self):
        if self.placement is None or self.placement.place.decided != &self.decided:
            return
        self.placement.place.decided = NULL
        if not self.lock.may_be_taken():            # a thread that was stopped may wait there for good
            return
        pthread_cond_destroy(&self.decided)
        pthread_cond_destroy(&self.ended)

    # ---- the dispatcher's thread

    def take(self, double timeout_s=0.0):
        """Moves decided since the last call, a Taken.

        None after `timeout_s`, after `wake`, or with something to send. Where no caller has decided any, copies are decided here
        that closed tiers want (write-behind): a few at a time, none while others are under way, none ahead of a read.
        """
        cdef Place* p = &self.placement.place
        cdef int64_t n
        cdef Taken taken
        cdef cnp.ndarray moves
        cdef long long ns = <long long>(max(0.0, min(timeout_s, LONGEST_S)) * 1e9)
        self.lock.acquire()
        with nogil:
            if p.num_moves == 0:
                copy_wanted(p, BEHIND_BLOCKS)
            if p.num_moves == 0 and ns > 0 and not self.woken and not self.closed and not p.send_news:
                cond_wait_ns(&self.decided, &self.lock.mutex, ns)
                if p.num_wanted > 0:
                    self.let_step_end(min(ns, BEHIND_NS))
                if p.num_moves == 0:
                    copy_wanted(p, BEHIND_BLOCKS)
            self.woken = p.send_news = False
            n = p.num_moves
        self.lock.release()
        taken = Taken.__new__(Taken)
        taken.placement, taken.dispatch = self.placement, self
        while n > 0:
            moves = np.empty(n, _MOVE_DTYPE)
            self.lock.acquire()
            if n == p.num_moves:                    # or a transfer might be cut in two
                memcpy(cnp.PyArray_DATA(moves), p.moves, n * sizeof(Move))
                p.num_moves = 0
                self.lock.release()
                taken.moves = moves                 # nothing can raise since they left the core
                return taken
            n = p.num_moves
            self.lock.release()
        return None

    # Waits so long unless there is something else to do. The caller holds the mutex.
    cdef void let_step_end(self, int64_t ns) noexcept nogil:
        cdef int64_t until = now_ns() + ns
        while self.placement.place.num_moves == 0 and not self.woken and not self.closed and now_ns() < until:
            cond_wait_ns(&self.decided, &self.lock.mutex, max(1, until - now_ns()))

    def finish(self, transfers, ok, tried, *, bint announce=True):
        """Say how transfers ended, as ``Placement.complete``.

        Those that are over already are passed over.

        Parameters
        ----------
        transfers : int64 [n]
        ok, tried : bool [n]
        announce : bool
            False: callers that wait go on waiting until :meth:`announce`.
        """
        cdef cnp.ndarray ids = int64_input(transfers, "transfers")
        cdef cnp.ndarray flags = bool_input(ok, "ok")
        cdef cnp.ndarray begun = bool_input(tried, "tried")
        cdef int64_t i, n = cnp.PyArray_SIZE(ids), over = 0
        if cnp.PyArray_SIZE(flags) != n or cnp.PyArray_SIZE(begun) != n:
            raise InvalidArgument(f"{n} transfers but {len(flags)} outcomes and {len(begun)} of tried")
        cdef const int64_t* data = i64(ids)
        cdef const uint8_t* good = <const uint8_t*>cnp.PyArray_DATA(flags)
        cdef const uint8_t* begin = <const uint8_t*>cnp.PyArray_DATA(begun)
        self.lock.acquire()
        with nogil:
            for i in range(n):
                over += finish_as(&self.placement.place, data[i], good[i] != 0, begin[i] != 0) == OK
            if announce:
                write_hint(&self.announced, self.announced + over)
                pthread_cond_broadcast(&self.ended)
            else:
                self.telling += over
        self.lock.release()

    def announce(self):
        """The hooks have seen the finished moves: callers go on."""
        self.lock.acquire()
        write_hint(&self.announced, self.announced + self.telling)
        self.telling = 0
        pthread_cond_broadcast(&self.ended)
        self.lock.release()

    def give_up(self, moves, *, bint keep=False, bint announce=True):
        """Finish the rest of these moves as failed and not tried.

        Parameters
        ----------
        moves : structured array [n]
            As a Taken's.
        keep : bool
            Their destinations are never given to others: a thread may still write there.
        announce : bool
            As for :meth:`finish`.
        """
        if not isinstance(moves, np.ndarray) or moves.dtype != _MOVE_DTYPE or moves.ndim != 1:
            raise WrongType("moves must be an array of MOVE_DTYPE")
        self.give_up_moves(np.ascontiguousarray(moves), keep, announce)

    cdef void give_up_moves(self, cnp.ndarray moves, bint keep, bint announce) noexcept:
        cdef Place* p = &self.placement.place
        cdef const Move* at = <const Move*>cnp.PyArray_DATA(moves)
        cdef int64_t i, n = cnp.PyArray_SIZE(moves), last = -1, over = 0
        cdef Pool* pool
        self.lock.acquire()
        with nogil:
            for i in range(n):
                pool = pool_in(p, at[i].dst_tier, at[i].lane) if keep else NULL
                if pool != NULL:
                    pool.refs[at[i].dst_block] += 1
            for i in range(n):
                if at[i].transfer != last:
                    last = at[i].transfer
                    over += finish_as(p, last, False, False) == OK
            if announce:
                write_hint(&self.announced, self.announced + over)
                pthread_cond_broadcast(&self.ended)
            else:
                self.telling += over
        self.lock.release()

    def until(self, int64_t transfer):
        """When a promotion should have arrived, in monotonic nanoseconds; 0: whenever that is."""
        cdef Place* p = &self.placement.place
        cdef int32_t slot = handle_slot(transfer)
        cdef int64_t ns = 0
        self.lock.acquire()
        if 0 <= slot < p.transfers_capacity and p.transfers[slot].id == transfer:
            ns = p.transfers[slot].until
        self.lock.release()
        return ns

    @property
    def num_decided(self):
        """Moves that were decided and not taken."""
        cdef int64_t count
        self.lock.acquire()
        count = self.placement.place.num_moves
        self.lock.release()
        return count

    def room_made(self):
        """Blocks have become free otherwise than by the end of a transfer.

        Callers that wait look again.
        """
        self.lock.acquire()
        write_hint(&self.announced, self.announced + 1)
        pthread_cond_broadcast(&self.ended)
        self.lock.release()

    def hold_late(self, int64_t blocks, double within_s=0.0):
        """Count device blocks that a late read may still fill: callers that lack room wait for it.

        Parameters
        ----------
        blocks : more of them; 0 or negative: as many less, and callers that wait look again.
        within_s : seconds after which none is waited for any more.
        """
        self.lock.acquire()
        self.late += blocks
        if blocks > 0:
            self.late_until = max(self.late_until, now_ns() + <long long>(within_s * 1e9))
        else:
            write_hint(&self.announced, self.announced + 1)
            pthread_cond_broadcast(&self.ended)
        self.lock.release()

    # The blocks of late reads that do not hang; none once this is closed. The caller holds the mutex.
    cdef int64_t late_now(self) noexcept nogil:
        return self.late if self.late > 0 and not self.closed and now_ns() < self.late_until else 0

    def wake(self):
        """Have :meth:`take` return."""
        self.lock.acquire()
        self.woken = True
        pthread_cond_signal(&self.decided)
        self.lock.release()

    def close(self):
        """No thread takes moves any more.

        Those that are decided are given up, and callers that wait are told.
        """
        cdef Taken taken
        self.lock.acquire()
        self.closed = True
        pthread_cond_broadcast(&self.decided)
        pthread_cond_broadcast(&self.ended)
        self.lock.release()
        taken = self.take()
        del taken

    # ---- callers

    @property
    def num_announced(self):
        """Transfers that are over and told of so far: what :meth:`wait` compares with.

        Without the lock, so perhaps of a moment ago: then `wait` returns the sooner.
        """
        return read_hint(&self.announced)

    @property
    def num_started(self):
        """Transfers decided so far."""
        cdef int64_t count
        self.lock.acquire()
        count = self.placement.place.num_started
        self.lock.release()
        return count

    @property
    def num_coming(self):
        """Device blocks that can soon be had.

        Those that are being demoted, and one for each holder of :meth:`hold_up`; none that are being promoted.
        """
        cdef int64_t found
        self.lock.acquire()
        found = leaving_device(&self.placement.place) + self.held_up + self.telling
        self.lock.release()
        return found

    @property
    def num_unowned(self):
        """Device blocks that are being read for no owner any more, also by late reads.

        They can be had once that is over.
        """
        cdef int64_t found
        self.lock.acquire()
        with nogil:
            found = self.late_now() + read_for_nobody(&self.placement.place)
        self.lock.release()
        return found

    def wait(self, int64_t seen, double timeout_s, bint others=True):
        """Wait for the end of a transfer.

        Parameters
        ----------
        seen : `num_announced` of before the caller looked whether it has to wait.
        timeout_s : at most.
        others : bool
            What :meth:`hold_up` told of counts as a transfer under way.

        Returns
        -------
        int
            ENDED: one has ended since `seen`. NOTHING: none is under way or late. NOT_YET. CLOSED: some are, and none takes them.
        """
        cdef Place* p = &self.placement.place
        cdef int said
        cdef bint comes
        cdef long long ns = <long long>(max(0.0, min(timeout_s, LONGEST_S)) * 1e9)
        self.lock.acquire()
        with nogil:
            comes = p.in_flight or self.telling or (others and self.held_up) or self.late_now() > 0
            if self.announced == seen and ns > 0 and comes and not (self.closed and p.in_flight):
                cond_wait_ns(&self.ended, &self.lock.mutex, ns)
                comes = p.in_flight or self.telling or (others and self.held_up) or self.late_now() > 0
            if self.announced != seen:
                said = 1
            elif not comes:
                said = 0
            else:
                said = 3 if self.closed and p.in_flight else 2
        self.lock.release()
        return said

    def hold_up(self, int change):
        """Count a short holder of blocks that is not a transfer: 1 begins, -1 ends."""
        self.lock.acquire()
        self.held_up += change
        if change < 0:
            write_hint(&self.announced, self.announced + 1)
            pthread_cond_broadcast(&self.ended)
        self.lock.release()

    def is_telling(self):
        """Whether transfers are over of which hooks are being told just now."""
        cdef bint telling
        self.lock.acquire()
        telling = self.telling > 0
        self.lock.release()
        return telling

    def under_way(self, int64_t first, int64_t last):
        """Unfinished transfers that were decided as numbers ``[first, last)`` of `num_started`."""
        cdef Place* p = &self.placement.place
        cdef int64_t found = 0
        cdef int32_t i
        self.lock.acquire()
        with nogil:
            for i in range(p.transfers_capacity):
                found += p.transfers[i].node != NIL and first <= p.transfers[i].number < last
        self.lock.release()
        return found
