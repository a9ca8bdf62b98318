"""The policy ``hazard``.

Expected hits per block-second, learned online from every reuse, evicted blocks' included.

Admission is mandatory, so that after a request the cache is the same whether its blocks were hit or missed: keeping a block
is worth exactly its next hit, and costs block-seconds. See model for the index, history for what is remembered.
"""
# Over 400 lines: the calls of one request, from its arrival to what it taught; its parts lie beside it.

from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy

from pagedkv._core.policies.hazard.features cimport (
    describe, expected_bucket, is_told, leave_out_told, output_bucket, set_left, set_output,
)
from pagedkv._core.policies.hazard.guard cimport guard_arrival, guard_open
from pagedkv._core.policies.hazard.model cimport (
    NUM_BINS, NUM_FEATURES, NUM_WEIGHTS, Model, Sample, bin_edge, bin_edges, bin_of, model_chance, model_close, model_forget,
    model_index, model_learn, model_open,
)
from pagedkv._core.policies.hazard.history cimport (
    NUM_STAGES, History, Past, history_at, history_bytes, history_child, history_close, history_common, history_ensure,
    history_forget, history_hold, history_join, history_keep, history_let_go, history_lru_clear, history_lru_fit,
    history_lru_set, history_new, history_open, history_purge, history_split, history_stage, history_touch,
    history_wait,
)
from pagedkv._core.links cimport coldest, is_linked, unlink
from pagedkv._core.policies.hazard.sessions cimport Session, session_find, session_note, sessions_bytes, sessions_close
from pagedkv._core.types cimport NIL, OK
from pagedkv._core.policies.hazard.visits cimport Visit, visit_end, visit_new, visits_close, visits_open

cdef enum:
    NUM_SAMPLES = 4096          # noted and not yet learned, at most
    FRESH = 200                 # arrivals for which a computed index counts as new
    FORGET_EVERY = 256          # arrivals
    RUN_WEIGHT = 64             # blocks beyond which a longer run counts for no more
    MAX_OUTPUT = 1 << 24        # tokens; what is reported beyond is clamped

cdef double NS = 1e-9
cdef float MAX_WEIGHT = 4.0


# ---- open, close, clock

cdef Hazard* hazard_open(int64_t capacity, int64_t max_history) noexcept nogil:
    cdef Hazard* z = <Hazard*>calloc(1, sizeof(Hazard))
    if z == NULL:
        return NULL
    z.models = <Model*>calloc(MAX_KINDS, sizeof(Model))
    z.samples = <Sample*>malloc(NUM_SAMPLES * sizeof(Sample))
    visits_open(&z.visits)
    z.edges = bin_edges()
    z.looked_at = -1
    z.seed = 0x9E3779B97F4A7C15
    guard_open(&z.guard, 0.005, 1.0, 10000)
    if z.models == NULL or z.samples == NULL or history_open(&z.history, max_history, capacity) != OK:
        hazard_close(z)
        return NULL
    return z


cdef void hazard_close(Hazard* z) noexcept nogil:
    cdef int32_t i
    if z == NULL:
        return
    if z.models != NULL:
        for i in range(MAX_KINDS):
            model_close(&z.models[i])
    history_close(&z.history)
    visits_close(&z.visits)
    sessions_close(&z.sessions)
    free(z.models)
    free(z.samples)
    free(z.keys)
    free(z.path)
    free(z)


cdef void hazard_clock(Hazard* z, int64_t now_ns) noexcept nogil:
    cdef double now = now_ns * NS
    if now < z.now:
        z.counters.clock_steps_back += 1
    else:
        z.now = now


cdef uint64_t hazard_random(Hazard* z) noexcept nogil:
    z.seed ^= z.seed << 13
    z.seed ^= z.seed >> 7
    z.seed ^= z.seed << 17
    return z.seed >> 16


cdef uint64_t* hazard_keys(Hazard* z, int64_t num_blocks) noexcept nogil:
    cdef uint64_t* grown
    if num_blocks > z.keys_capacity:
        grown = <uint64_t*>realloc(z.keys, 2 * num_blocks * sizeof(uint64_t))
        if grown == NULL:
            z.counters.visits_lost += 1
            return NULL
        z.keys, z.keys_capacity = grown, 2 * num_blocks
    return z.keys


cdef bint path_room(Hazard* z, int64_t n) noexcept nogil:
    cdef int32_t* grown
    if n > z.path_capacity:
        grown = <int32_t*>realloc(z.path, 2 * n * sizeof(int32_t))
        if grown == NULL:
            return False
        z.path, z.path_capacity = grown, 2 * n
    return True


cdef void hazard_bound(Hazard* z, double slack, double stake, int64_t window) noexcept nogil:
    cdef int32_t i
    guard_open(&z.guard, slack, stake, window)
    for i in range(z.history.num_pasts):
        z.history.pasts[i].rated = -1       # arrivals are counted from here


cdef Model* model_for(Hazard* z, int32_t kind) noexcept nogil:
    cdef Model* m = &z.models[kind]
    if m.weights == NULL and model_open(m) != OK:
        return NULL
    return m


# ---- what happened, noted for later

cdef float weight_of(Hazard* z, int32_t length) noexcept nogil:
    cdef double weight = sqrt(min(length, RUN_WEIGHT)) * z.weight_count / z.weight_sum if z.weight_count else 1
    return <float>weight if weight < MAX_WEIGHT else MAX_WEIGHT


cdef void note(Hazard* z, Past* p, int32_t last, bint reused) noexcept nogil:
    cdef Sample* s
    if z.samples_tail - z.samples_head == NUM_SAMPLES:
        z.counters.samples_lost += 1
        return
    s = &z.samples[z.samples_tail & (NUM_SAMPLES - 1)]
    memcpy(s.x, p.x, NUM_FEATURES)
    s.kind = p.kind
    s.first, s.last, s.reused = min(p.learned, <uint8_t>(last - 1)), <uint8_t>last, reused
    s.weight = weight_of(z, p.length)
    z.samples_tail += 1


# Past p is used again now. A part of a past teaches nothing: its features are those of its end.
cdef void close_past(Hazard* z, int32_t q, bint whole) noexcept nogil:
    cdef Past* p = &z.history.pasts[q]
    cdef double gap = z.now - p.born
    if p.users > 0:
        return
    if whole and gap < bin_edge(NUM_BINS):
        note(z, p, bin_of(gap) + 1, True)
    p.uses += 1
    p.last_gap = <float>gap
    p.mean_gap = <float>(gap if p.mean_gap < 0 else 0.7 * p.mean_gap + 0.3 * gap)
    if p.least_gap < 0 or gap < p.least_gap:
        p.least_gap = <float>gap
    if is_linked(&z.history.ages, q):
        unlink(&z.history.ages, q)


# ---- a request comes, and goes

# Follows the path in z.keys through what is remembered, cutting the past that it leaves; the pasts go into z.path.
cdef int32_t follow(Hazard* z, int32_t num_blocks, int32_t* count, bint* cut) noexcept nogil:
    cdef History* h = &z.history
    cdef int32_t at = 0, parent = NIL, q, k
    count[0], cut[0] = 0, False
    while at < num_blocks and not cut[0]:
        q = history_child(h, parent, z.keys[at])
        if q == NIL:
            break
        k = history_common(h, q, z.keys + at, num_blocks - at)
        if k < h.pasts[q].length:
            cut[0] = True
            q = history_split(h, q, k) if history_ensure(h, 1) == OK else NIL
        if q == NIL or not path_room(z, count[0] + 4):
            break
        z.path[count[0]] = q
        count[0] += 1
        at += k
        parent = q
    return at


cdef int32_t hazard_arrive(Hazard* z, int32_t num_blocks, int32_t hits, int32_t kept) noexcept nogil:
    cdef History* h = &z.history
    cdef int32_t slot = visit_new(&z.visits, hazard_random(z)), count, i, lru_hits = 0
    cdef bint cut
    cdef Past* last
    cdef Past* p
    cdef Visit* v
    if slot == NIL:
        z.counters.visits_lost += 1
        return NIL
    v = &z.visits.at[slot]
    v.num_blocks = num_blocks
    v.known = follow(z, num_blocks, &count, &cut)
    v.parent_gap = v.parent_output = v.mean_gap = v.least_gap = -1
    v.turn = v.extends = 0
    v.end = NIL
    if count > 0:
        last = &h.pasts[z.path[count - 1]]
        v.parent_gap = <float>(z.now - last.born)
        v.parent_output = last.output
        v.extends = last.tail <= 1
        v.turn = last.turn + v.extends
        v.end, v.end_generation = z.path[count - 1], last.generation
    for i in range(count):
        p = &h.pasts[z.path[i]]
        if p.depth == lru_hits:                 # what is being computed is as far, whatever the policy
            lru_hits += p.lru if p.users == 0 else max(p.had, min(hits - p.depth, p.length))
        close_past(z, z.path[i], not cut or i < count - 1)
    if count > 0 and v.extends:
        v.mean_gap, v.least_gap = last.mean_gap, last.least_gap
    for i in range(count - 1, -1, -1):
        history_hold(h, z.path[i])
    v.missing = num_blocks - max(v.known, hits)     # what others compute just now needs room once
    if hits >= num_blocks:                      # nothing will tell when LRU would have made room
        hazard_take(z, slot)
    hits = min(hits, v.known)                   # what was never let go of is no merit: LRU has it too
    lru_hits = max(lru_hits, min(kept, hits))
    z.counters.lru_hits += lru_hits
    z.counters.hits += hits
    guard_arrival(&z.guard, num_blocks, lru_hits, hits)
    if z.guard.arrivals % FORGET_EVERY == 0:
        for i in range(MAX_KINDS):
            if z.models[i].weights != NULL:
                model_forget(&z.models[i])
    return slot


# As far as there is room beside what others hold: of what comes last so many blocks too few.
cdef void hazard_take(Hazard* z, int32_t visit) noexcept nogil:
    cdef History* h = &z.history
    cdef Visit* v = &z.visits.at[visit]
    cdef int32_t end = v.end if v.end != NIL and h.pasts[v.end].generation == v.end_generation else NIL, q = end
    cdef int64_t too_few, cut
    if v.taken:
        return
    v.taken = 1
    v.reserved = v.missing
    h.lru_reserved += v.reserved
    while q != NIL:
        history_lru_set(h, q, h.pasts[q].length)
        q = h.pasts[q].parent
    too_few = history_lru_fit(h)
    cut = min(max(too_few, <int64_t>0), v.reserved)
    v.reserved -= cut
    h.lru_reserved -= cut
    too_few -= cut
    q = end
    while too_few > 0 and q != NIL and h.pasts[q].users == 1:
        cut = min(too_few, <int64_t>h.pasts[q].lru)
        history_lru_set(h, q, h.pasts[q].lru - <int32_t>cut)
        too_few -= cut
        q = h.pasts[q].parent


# A visit releases what it referred to on arrival. Without other users that is as before, but for what the arrival taught.
cdef void let_go(Hazard* z, Visit* v) noexcept nogil:
    cdef int32_t q = v.end
    cdef Past* p
    z.history.lru_reserved -= v.reserved
    v.reserved = 0
    if q == NIL or z.history.pasts[q].generation != v.end_generation:
        return
    while q != NIL:
        p = &z.history.pasts[q]
        history_let_go(&z.history, q)
        if p.users == 0:
            p.learned = <uint8_t>(bin_of(z.now - p.born) + 1)
            history_stage(&z.history, q, stage_after(p.learned))
        q = p.parent


cdef int32_t hazard_depart(
    Hazard* z, int32_t visit, int32_t root, int32_t kind, int32_t num_blocks, bint used, int64_t output, bint later
) noexcept nogil:
    cdef History* h = &z.history
    cdef Visit* v = &z.visits.at[visit]
    cdef int32_t count, at, i, kept = 0, q, length, end = num_blocks
    cdef bint cut
    let_go(z, v)
    if not used or num_blocks == 0:
        visit_end(&z.visits, visit)
        return 0
    at = follow(z, num_blocks, &count, &cut)
    if at < num_blocks and history_child(h, z.path[count - 1] if count else NIL, z.keys[at]) != NIL:
        z.counters.visits_lost += 1     # it could not be followed for want of memory: nothing is remembered twice
        end = at
    while at < end:                     # the new part, and its last block by itself
        length = end - at - 1 if end - at > 1 else 1
        q = NIL
        if path_room(z, count + 4) and history_ensure(h, 1) == OK:
            q = history_new(h, root, z.path[count - 1] if count else NIL, z.keys + at, length)
        if q == NIL:
            z.counters.visits_lost += 1
            break
        h.pasts[q].turn = v.turn
        h.pasts[q].mean_gap, h.pasts[q].least_gap = v.mean_gap, v.least_gap
        h.pasts[q].uses = 1
        h.pasts[q].kind = <uint8_t>kind
        z.path[count] = q
        count += 1
        at += length
    if count == 0:
        visit_end(&z.visits, visit)
        return 0
    h.pasts[z.path[count - 1]].turn = v.turn
    for i in range(count):              # join what nothing tells apart any more
        q = z.path[i]
        if (i < count - 1 and h.pasts[q].users == 0 and h.pasts[q].depth + h.pasts[q].length != v.known
                and h.pasts[z.path[i + 1]].depth + h.pasts[z.path[i + 1]].length <= v.known
                and h.pasts[z.path[i + 1]].next_sibling == NIL and h.pasts[q].first_child == z.path[i + 1]
                and history_join(h, q)):
            continue
        z.path[kept] = q
        kept += 1
    v.end, v.end_generation, v.departed = z.path[kept - 1], h.pasts[z.path[kept - 1]].generation, 1
    for i in range(kept - 1, -1, -1):   # deepest first, so that the beginning is hottest
        q = z.path[i]
        settle_past(z, q, v, num_blocks, output)
    if v.session:
        go_on(z, v.session)             # one that came meanwhile and is over already
        session_note(&z.sessions, v.session, v.serial, v.end, v.end_generation)
    history_lru_fit(h)
    history_forget(h)
    if not later:
        visit_end(&z.visits, visit)
    return kept


cdef void settle_past(Hazard* z, int32_t q, Visit* v, int32_t num_blocks, int64_t output) noexcept nogil:
    cdef Past* p = &z.history.pasts[q]
    p.visit = v.serial
    p.tail = num_blocks - p.depth - p.length
    p.output = clamped(z, output)
    p.rated = -1
    describe(p, v, num_blocks)
    z.weight_sum += sqrt(min(p.length, RUN_WEIGHT))
    z.weight_count += 1
    history_keep(&z.history, q, p.length)
    history_touch(&z.history, q)
    if p.users == 0:
        history_wait(&z.history, q, z.now)


cdef float clamped(Hazard* z, int64_t output) noexcept nogil:
    if output > MAX_OUTPUT:
        z.counters.outputs_clamped += 1
        return MAX_OUTPUT
    return <float>output if output >= 0 else -1


cdef void hazard_report(Hazard* z, int32_t visit, int64_t output) noexcept nogil:
    cdef Visit* v = &z.visits.at[visit]
    cdef int32_t q = v.end
    cdef float tokens = clamped(z, output)
    cdef Past* p
    if q != NIL and z.history.pasts[q].generation == v.end_generation:
        while q != NIL:
            p = &z.history.pasts[q]
            if p.visit == v.serial:
                p.output = tokens
                if p.users == 0:
                    set_output(p.x, output_bucket(tokens))
                    p.rated = -1
            q = p.parent
    visit_end(&z.visits, visit)


# ---- hints

# A session goes on: what its last request used and nothing has used since was left behind. That it was not used up to now is
# learned as it was, and from now on it is something else.
cdef void go_on(Hazard* z, uint64_t session) noexcept nogil:
    cdef Session* s = session_find(&z.sessions, session)
    cdef int32_t q, bin
    cdef Past* p
    if s == NULL or s.end == NIL or z.history.pasts[s.end].generation != s.generation:
        return
    q, s.end = s.end, NIL
    while q != NIL:
        p = &z.history.pasts[q]
        if p.visit == s.serial and p.users == 0:
            bin = bin_of(z.now - p.born)
            if bin > p.learned:
                note(z, p, bin, False)
                p.learned = <uint8_t>bin
            set_left(p.x)
            z.counters.left_behind += 1
            p.rated = -1
        q = p.parent


cdef void hazard_session(Hazard* z, int32_t visit, uint64_t session) noexcept nogil:
    if z.visits.at[visit].session == 0:
        z.visits.at[visit].session = session
        go_on(z, session)


cdef void hazard_expect(Hazard* z, int32_t visit, double seconds) noexcept nogil:
    z.visits.at[visit].expected = <uint8_t>expected_bucket(seconds)


# ---- learning

cdef inline int32_t stage_end(int32_t stage) noexcept nogil:        # the bin before which a stage ends
    return 2 * (stage + 1)


cdef inline int32_t stage_after(int32_t learned) noexcept nogil:
    return min(learned // 2, NUM_STAGES - 1)


cdef void learn_one(Hazard* z, const Sample* s) noexcept nogil:
    cdef Model* m = model_for(z, s.kind)
    cdef Sample without
    if m == NULL:
        return
    if m.learned & 1 or not is_told(s.x):
        model_learn(m, s)
    else:                               # every other time: what holds where that is not known
        without = s[0]
        leave_out_told(without.x)
        model_learn(m, &without)


cdef int64_t hazard_study(Hazard* z, int64_t budget) noexcept nogil:
    cdef int64_t left = budget
    cdef int32_t stage, q
    cdef Past* p
    while left > 0 and z.samples_head < z.samples_tail:
        learn_one(z, &z.samples[z.samples_head & (NUM_SAMPLES - 1)])
        z.samples_head += 1
        left -= 1
    for stage in range(NUM_STAGES - 1):     # what has lived through a stage without being used
        while left > 0:
            q = coldest(&z.history.ages, stage)
            if q < 0:
                break
            p = &z.history.pasts[q]
            if z.now - p.born < bin_edge(stage_end(stage)):
                break
            if p.learned < stage_end(stage):
                if z.samples_head == z.samples_tail:
                    note(z, p, stage_end(stage), False)
                    learn_one(z, &z.samples[z.samples_head & (NUM_SAMPLES - 1)])
                    z.samples_head += 1
                p.learned = <uint8_t>stage_end(stage)
                left -= 1
            history_stage(&z.history, q, stage + 1)
    return budget - left


# ---- what a run is worth

cdef inline int32_t past_of(Hazard* z, int32_t past, int32_t generation, int32_t depth) noexcept nogil:
    if past < 0 or past >= z.history.num_pasts or z.history.pasts[past].generation != generation:
        return NIL
    return history_at(&z.history, past, depth - 1)


cdef double hazard_rate(Hazard* z, int32_t past, int32_t generation, int32_t depth) noexcept nogil:
    cdef int32_t q = past_of(z, past, generation, depth), k
    cdef Past* p
    cdef Model* m
    cdef double age
    if q == NIL:
        return -1
    p = &z.history.pasts[q]
    if p.rated < 0 or z.guard.arrivals - p.rated > FRESH:
        m = model_for(z, p.kind)
        if m == NULL:
            return -1
        model_index(m, p.x, p.index)
        p.rated = z.guard.arrivals
    age = z.now - p.born
    k = p.bin
    while k < NUM_BINS - 1 and z.edges[k + 1] <= age:
        k += 1
    p.bin = <uint8_t>k
    if k == NUM_BINS - 1:
        return p.index[k]
    return p.index[k] + (age - z.edges[k]) / (z.edges[k + 1] - z.edges[k]) * (p.index[k + 1] - p.index[k])


cdef double hazard_chance(Hazard* z, int32_t past, int32_t generation, int32_t depth, double seconds) noexcept nogil:
    cdef int32_t q = past_of(z, past, generation, depth)
    cdef Model* m
    if q == NIL:
        return -1
    m = model_for(z, z.history.pasts[q].kind)
    return model_chance(m, z.history.pasts[q].x, z.now - z.history.pasts[q].born, seconds) if m != NULL else -1


cdef int32_t hazard_lru_depth(Hazard* z, int32_t past, int32_t generation, int32_t depth) noexcept nogil:
    cdef int32_t q = past_of(z, past, generation, depth)
    if q == NIL:
        return 0
    return min(z.history.pasts[q].depth + z.history.pasts[q].lru, depth)


cdef int32_t hazard_span(Hazard* z, int32_t past, int32_t generation, int32_t depth) noexcept nogil:
    cdef int32_t q = past_of(z, past, generation, depth)
    return depth - z.history.pasts[q].depth if q != NIL else depth


cdef void hazard_follow(Hazard* z, int32_t* past, int32_t* generation, int32_t depth) noexcept nogil:
    past[0] = past_of(z, past[0], generation[0], depth)
    if past[0] != NIL:
        generation[0] = z.history.pasts[past[0]].generation


cdef void hazard_lost(Hazard* z, int32_t past, int32_t generation, int32_t depth, int32_t count) noexcept nogil:
    cdef int32_t q = past_of(z, past, generation, depth), start
    cdef Past* p
    while q != NIL and count > 0:
        p = &z.history.pasts[q]
        start = max(depth - count, p.depth)
        if p.kept > start - p.depth:
            history_keep(&z.history, q, start - p.depth)
        count -= depth - start
        depth = start
        q = p.parent


cdef void hazard_purged(Hazard* z, int32_t root) noexcept nogil:
    history_purge(&z.history, root)


cdef void hazard_cleared(Hazard* z) noexcept nogil:
    history_lru_clear(&z.history)


cdef int64_t hazard_bytes(Hazard* z) noexcept nogil:
    cdef int64_t total = sizeof(Hazard) + MAX_KINDS * sizeof(Model) + NUM_SAMPLES * sizeof(Sample)
    cdef int32_t i
    for i in range(MAX_KINDS):
        total += 2 * NUM_WEIGHTS * sizeof(float) if z.models[i].weights != NULL else 0
    total += z.visits.count * sizeof(Visit) + sessions_bytes(&z.sessions) + z.keys_capacity * 8 + z.path_capacity * 4
    return total + history_bytes(&z.history)
