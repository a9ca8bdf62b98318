"""The threads of the CPU kernels, for the other modules here.

They are a part of `_attend`, so that a process has them once.
"""

ctypedef void (*work_t)(void *argument, long item, int worker) noexcept nogil

cdef void run_shared(work_t work, void *argument, long items, int threads) noexcept nogil
