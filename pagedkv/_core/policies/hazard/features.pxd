# What the model is told of a run: small integers, logarithms of what they count. Reads visits and pasts; changes nothing
# but the features themselves.
#
#      0 distance to the end of the path x turn    4 uses             8 least gap              12 output x mean gap
#      1 depth of its end                          5 mean gap         9 output x turn          13 distance x last gap
#      2 output                                    6 parent's gap    10 mean x parent's gap    14 left behind: 1 + distance
#      3 new blocks of the prompt                  7 its output      11 uses x depth           15 expected return x distance
#
# A gap is a time between two uses; the parent is the request whose prefix was gone on with. 14 and 15 are hints: 0 where
# the caller gave none, and then no part of the model.
from libc.stdint cimport int32_t, uint8_t

from pagedkv._core.policies.hazard.history cimport Past
from pagedkv._core.policies.hazard.visits cimport Visit

cdef enum:
    OUTPUT = 2
    LEFT = 14
    EXPECTED = 15
    NOT_LEFT = 9                # of LEFT: it has a session, which has not gone on without it
    NO_OUTPUT = 0               # where the output is not known

cdef int32_t output_bucket(double output) noexcept nogil                # tokens; < 0: not known
cdef int32_t expected_bucket(double seconds) noexcept nogil             # infinity: never again
cdef void set_output(uint8_t* x, int32_t bucket) noexcept nogil
# The features of past p as a part of a visit's path of num_blocks blocks.
cdef void describe(Past* p, Visit* v, int32_t num_blocks) noexcept nogil
cdef void set_left(uint8_t* x) noexcept nogil                           # its session has gone on without it
cdef bint is_told(const uint8_t* x) noexcept nogil          # something is in it that is not always known: output or return
cdef void leave_out_told(uint8_t* x) noexcept nogil
