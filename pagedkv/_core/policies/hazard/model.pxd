# When will this run be asked for again? An additive logistic model of the hazard in each of 22 bins of age, learned online, and
# the Gittins index made of it. Numbers only: no tree, no blocks, no prompt.
#
#     logit hazard(x, k) = base[k] + sum over f of (level[f][x[f]] + shape[f][x[f]][k])
#
# for a run with the features x (one small integer per feature) in bin k: the chance that it is used in that bin if it
# was not used before. Untrained, hazards fall with age, so that the index orders by age alone: least recently used.
from libc.stdint cimport int32_t, int64_t, uint8_t

cdef enum:
    NUM_FEATURES = 16
    ALWAYS = 14                 # features that every run has; of the others, hints, a 0 is no part of the sum
    NUM_BUCKETS = 128           # values of a feature
    NUM_BINS = 22
    NUM_WEIGHTS = 47126         # NUM_BINS + NUM_FEATURES * NUM_BUCKETS * (1 + NUM_BINS)

cdef struct Sample:             # what happened to a run between two ages: it lived through bins [first, last), and
    uint8_t x[NUM_FEATURES]
    uint8_t first
    uint8_t last
    uint8_t reused              # 1: was used in the last of them
    uint8_t kind                # of namespace: which model learns it
    float weight

cdef struct Model:
    float* weights              # [NUM_WEIGHTS], owned: base, level, shape
    float* squares              # [NUM_WEIGHTS], owned: AdaGrad's sums of squared gradients
    int64_t learned             # samples so far

cdef int model_open(Model* m) noexcept nogil         # OK or E_MEMORY
cdef void model_close(Model* m) noexcept nogil
cdef void model_reset(Model* m) noexcept nogil       # as if nothing had ever been learned
# The index at the beginning of each bin: hits per second of holding a block, over the best time to hold it.
cdef void model_index(Model* m, const uint8_t* x, float* index) noexcept nogil
cdef void model_learn(Model* m, const Sample* s) noexcept nogil
cdef void model_forget(Model* m) noexcept nogil      # once in a while: older gradients count less from now on
cdef double bin_edge(int32_t k) noexcept nogil       # seconds at which bin k begins; bin_edge(NUM_BINS): the last one's end
cdef const double* bin_edges() noexcept nogil        # [NUM_BINS + 1]
cdef int32_t bin_of(double age) noexcept nogil       # 0..NUM_BINS - 1; later ages are in the last
# Chance that a run of this age is used again within `seconds`.
cdef double model_chance(Model* m, const uint8_t* x, double age, double seconds) noexcept nogil
