"""The hazard model of the policy ``hazard``, and its Gittins index.

The index: an independent run costs block-seconds while it is held and pays one hit if it is used. Among such stopping
problems the optimal rule holds those with the largest ratio of expected hits to expected time held, over the best moment
to stop (Gittins, J. R. Stat. Soc. B 1979). Each run's ratio at every age comes out of one pass over a convex hull: with
the points (time held, hits) cumulated over age, the index at age k is the largest slope from point k to a later one.

Learning is AdaGrad (Duchi et al., JMLR 2011) on the logistic loss, one bin of one run at a time.
"""

from libc.math cimport exp, expf, log, pow, sqrtf
from libc.stdint cimport int32_t, uint8_t
from libc.stdlib cimport free, malloc

from pagedkv._core.types cimport E_MEMORY, OK

cdef enum:
    LEVELS = 22                 # NUM_BINS: where `level` begins in the weights
    SHAPES = 2070               # LEVELS + NUM_FEATURES * NUM_BUCKETS: where `shape` begins

cdef double[23] EDGES           # seconds
EDGES[:] = [0, 1, 2, 3, 6, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 1200, 2400, 4800, 9600, 19200]
cdef float RATE = 0.06          # of learning, for base and level
cdef float SHAPE_RATE = 0.03
cdef float FIRST_SQUARE = 1.0   # AdaGrad's sums begin with it
cdef float LEAST_SQUARE = 1e-6      # below it nothing is learned any slower, and far below floats lose their digits
cdef float FORGET = 0.95        # factor on AdaGrad's sums at each model_forget
cdef double PRIOR = 0.3         # untrained hazard: (PRIOR / (age + PRIOR_S)) per second
cdef double PRIOR_S = 10.0


cdef double bin_edge(int32_t k) noexcept nogil:
    return EDGES[k]


cdef const double* bin_edges() noexcept nogil:
    return EDGES


cdef int32_t bin_of(double age) noexcept nogil:
    cdef int32_t k = 0
    while k < NUM_BINS - 1 and EDGES[k + 1] <= age:
        k += 1
    return k


cdef int model_open(Model* m) noexcept nogil:
    m.weights = <float*>malloc(NUM_WEIGHTS * sizeof(float))
    m.squares = <float*>malloc(NUM_WEIGHTS * sizeof(float))
    if m.weights == NULL or m.squares == NULL:
        model_close(m)
        return E_MEMORY
    model_reset(m)
    return OK


cdef void model_close(Model* m) noexcept nogil:
    free(m.weights)
    free(m.squares)
    m.weights = m.squares = NULL


cdef void model_reset(Model* m) noexcept nogil:
    cdef int32_t i
    cdef double h
    for i in range(NUM_WEIGHTS):
        m.weights[i] = 0
        m.squares[i] = FIRST_SQUARE
    for i in range(NUM_BINS):
        h = 1 - pow((EDGES[i] + PRIOR_S) / (EDGES[i + 1] + PRIOR_S), PRIOR)
        m.weights[i] = <float>log(h / (1 - h))
    m.learned = 0


cdef inline int32_t level_of(int32_t f, int32_t bucket) noexcept nogil:
    return LEVELS + f * NUM_BUCKETS + bucket


cdef inline int32_t shape_of(int32_t f, int32_t bucket) noexcept nogil:
    return SHAPES + (f * NUM_BUCKETS + bucket) * NUM_BINS


# Hazards of bins [first, last) into out[first .. last - 1].
cdef void hazards(Model* m, const uint8_t* x, int32_t first, int32_t last, float* out) noexcept nogil:
    cdef int32_t f, k
    cdef float level = 0
    cdef const float* shape
    for k in range(first, last):
        out[k] = m.weights[k]
    for f in range(NUM_FEATURES):
        if f >= ALWAYS and x[f] == 0:
            continue
        level += m.weights[level_of(f, x[f])]
        shape = m.weights + shape_of(f, x[f])
        for k in range(first, last):
            out[k] += shape[k]
    for k in range(first, last):
        out[k] = 1 / (1 + expf(-(out[k] + level)))


cdef void model_index(Model* m, const uint8_t* x, float* index) noexcept nogil:
    cdef float[NUM_BINS] h
    cdef double[NUM_BINS + 1] time, hits    # from each bin on, of a run as young as can be: sums of like size, to lose nothing
    cdef int32_t[NUM_BINS + 1] hull     # the upper hull of the points after k, nearest last
    cdef double alive = 1
    cdef int32_t k, top = 0, a, b
    hazards(m, x, 0, NUM_BINS, h)
    for k in range(NUM_BINS):
        hits[k] = alive * h[k]
        time[k] = alive * (EDGES[k + 1] - EDGES[k]) * (1 - 0.5 * h[k])
        alive *= 1 - h[k]
        if alive < 1e-200:
            alive = 1e-200
    hits[NUM_BINS] = time[NUM_BINS] = 0
    for k in range(NUM_BINS - 1, -1, -1):
        hits[k] += hits[k + 1]
        time[k] += time[k + 1]
    hull[0] = NUM_BINS
    for k in range(NUM_BINS - 1, -1, -1):
        while top > 0:                  # the tangent from k: pop what lies below the line to the point behind it
            a, b = hull[top], hull[top - 1]
            if (hits[k] - hits[a]) * (time[k] - time[b]) > (hits[k] - hits[b]) * (time[k] - time[a]):
                break
            top -= 1
        a = hull[top]
        index[k] = <float>((hits[k] - hits[a]) / (time[k] - time[a]))
        top += 1
        hull[top] = k


cdef void model_learn(Model* m, const Sample* s) noexcept nogil:
    cdef float[NUM_BINS] g
    cdef float sum = 0, squares = 0
    cdef float* w
    cdef float* q
    cdef int32_t f, k, first = s.first, last = s.last
    if last <= first:
        return
    hazards(m, s.x, first, last, g)
    if s.reused:
        g[last - 1] -= 1
    for k in range(first, last):
        g[k] *= s.weight
        sum += g[k]
        squares += g[k] * g[k]
        m.squares[k] += g[k] * g[k]
        m.weights[k] -= RATE * g[k] / sqrtf(m.squares[k])
    for f in range(NUM_FEATURES):
        if f >= ALWAYS and s.x[f] == 0:
            continue
        k = level_of(f, s.x[f])
        m.squares[k] += squares
        m.weights[k] -= RATE * sum / sqrtf(m.squares[k])
        w = m.weights + shape_of(f, s.x[f])
        q = m.squares + shape_of(f, s.x[f])
        for k in range(first, last):
            q[k] += g[k] * g[k]
            w[k] -= SHAPE_RATE * g[k] / sqrtf(q[k])
    m.learned += 1


cdef void model_forget(Model* m) noexcept nogil:
    cdef int32_t i
    for i in range(NUM_WEIGHTS):
        m.squares[i] = max(m.squares[i] * FORGET, LEAST_SQUARE)


cdef double model_chance(Model* m, const uint8_t* x, double age, double seconds) noexcept nogil:
    cdef float[NUM_BINS] h
    cdef double alive = 1, share, start, end
    cdef int32_t k
    hazards(m, x, 0, NUM_BINS, h)
    for k in range(bin_of(age), NUM_BINS):
        start = age if age > EDGES[k] else EDGES[k]
        end = age + seconds if age + seconds < EDGES[k + 1] else EDGES[k + 1]
        if end <= start:
            break
        share = (end - start) / (EDGES[k + 1] - EDGES[k])
        alive *= exp(share * log(1 - h[k] if h[k] < 1 else 1e-30))
    return 1 - alive
