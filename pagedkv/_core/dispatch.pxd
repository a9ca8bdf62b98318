# Who has a move, from the core's decision to its end; every move is in exactly one of these places:
#
#     the core's list of decided moves      until a Dispatch takes it
#     a Taken                               until `finish`, or until the Taken dies, which finishes it as given up
#
# Callers never hold a move: they decide, and wait. The taker is a thread that receives no signals.
cimport numpy as cnp
from libc.stdint cimport int64_t

from pagedkv._core.lock cimport Lock
from pagedkv._core.placement cimport Placement
from pagedkv.threads.pthread cimport pthread_cond_t

cdef class Taken:
    cdef Placement placement
    cdef Dispatch dispatch
    cdef readonly cnp.ndarray moves     # MOVE_DTYPE [n], in the order they were decided

cdef class Dispatch:
    cdef Placement placement
    cdef Lock lock
    cdef pthread_cond_t decided         # the core has moves, or there is something else to look at
    cdef pthread_cond_t ended           # transfers are over and told of
    cdef int64_t announced              # transfers that are over and told of so far
    cdef int64_t held_up                # prefetches, sends and lookups under way
    cdef int64_t telling                # transfers that are over, and of which hooks are being told
    cdef int64_t late                   # device blocks that late reads may still fill, for no one
    cdef long long late_until           # of the monotonic clock: a read that takes longer hangs
    cdef bint woken
    cdef bint closed
    cdef int64_t late_now(self) noexcept nogil
    cdef void let_step_end(self, int64_t ns) noexcept nogil
    cdef void give_up_moves(self, cnp.ndarray moves, bint keep, bint announce) noexcept
