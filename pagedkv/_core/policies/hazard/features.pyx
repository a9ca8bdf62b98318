"""The features of the policy ``hazard``.

How what is known of a run becomes what its model learns from. Numbers only.
"""

from libc.math cimport log2
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagedkv._core.policies.hazard.history cimport Past
from pagedkv._core.policies.hazard.visits cimport Visit


cdef inline int32_t octave(int64_t x, int32_t most) noexcept nogil:        # 0, 1, 2-3, 4-7, ... -> 0, 1, 2, 3, ...
    cdef int32_t b = 0
    while x > 0 and b < most:
        x >>= 1
        b += 1
    return b


cdef inline int32_t gap_bucket(double gap) noexcept nogil:
    cdef int32_t b = 1
    cdef double edge = 2
    if gap < 0:
        return 0
    while gap >= edge and b < 11:
        edge *= 2.0 if edge < 8 else 1.8
        b += 1
    return b


cdef inline int32_t few(int64_t x, int32_t limit, int32_t most) noexcept nogil:    # exact below limit
    return <int32_t>x if x < limit else min(limit - 2 + octave(x >> 1, 12), most)


cdef int32_t output_bucket(double output) noexcept nogil:
    return NO_OUTPUT if output < 0 else 1 + min(<int32_t>(1.5 * log2(1 + output)), 18)


cdef int32_t expected_bucket(double seconds) noexcept nogil:
    if seconds > 1e300:
        return 1
    return 2 + (min(<int32_t>log2(seconds), 12) if seconds >= 2 else 0) if seconds < 1e9 else 14


cdef void set_output(uint8_t* x, int32_t bucket) noexcept nogil:
    x[2] = <uint8_t>bucket
    x[9] = <uint8_t>(min(bucket, 15) * 8 + x[0] % 8)
    x[12] = <uint8_t>(min(bucket >> 1, 9) * 12 + x[5])


cdef void describe(Past* p, Visit* v, int32_t num_blocks) noexcept nogil:
    cdef int32_t end = p.depth + p.length, distance = num_blocks - end, turn = few(v.turn, 5, 7)
    cdef int32_t parent_gap = gap_bucket(v.parent_gap), depth = octave(end - 1, 10), uses = few(p.uses, 5, 9)
    cdef int32_t mean_gap = gap_bucket(p.mean_gap)
    cdef int32_t far = distance if distance < 2 else min(2 + octave(distance >> 1, 5), 7)
    p.x[0] = <uint8_t>(far * 8 + turn)
    p.x[1] = <uint8_t>depth
    p.x[3] = <uint8_t>octave(v.num_blocks - v.known, 9)
    p.x[4] = <uint8_t>uses
    p.x[5] = <uint8_t>mean_gap
    p.x[6] = <uint8_t>parent_gap
    p.x[7] = <uint8_t>(0 if v.parent_output < 0 else 1 + min(<int32_t>log2(1 + v.parent_output), 12))
    p.x[8] = <uint8_t>gap_bucket(p.least_gap)
    p.x[10] = <uint8_t>(mean_gap * 10 + min(parent_gap, 9))
    p.x[11] = <uint8_t>(uses * 12 + depth)
    p.x[13] = <uint8_t>(min(far, 3) * 12 + gap_bucket(p.last_gap))
    p.x[LEFT] = NOT_LEFT if v.session else 0
    p.x[EXPECTED] = <uint8_t>(v.expected * 8 + far) if v.expected else 0
    set_output(p.x, output_bucket(p.output))


cdef void set_left(uint8_t* x) noexcept nogil:
    x[LEFT] = 1 + x[0] // 8


cdef bint is_told(const uint8_t* x) noexcept nogil:
    return x[OUTPUT] != NO_OUTPUT or x[EXPECTED] != 0


cdef void leave_out_told(uint8_t* x) noexcept nogil:
    set_output(x, NO_OUTPUT)
    x[EXPECTED] = 0
