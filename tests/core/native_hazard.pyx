# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Internals of the policy ``hazard`` for its tests: the model, and an audit of its memory."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

import numpy as np

from pagedkv._core.policies.hazard.victims cimport hazard_of
from pagedkv._core.policies.hazard.guard cimport Guard, guard_arrival, guard_open, guard_room
from pagedkv._core.policies.hazard.learner cimport Hazard
from pagedkv._core.policies.hazard.model cimport (
    NUM_BINS, NUM_FEATURES, NUM_WEIGHTS, Model, Sample, bin_edge, bin_of, model_chance, model_close, model_forget,
    model_index, model_learn, model_open,
)
from pagedkv._core.policies.hazard.history cimport NUM_STAGES, History, Past, history_at, history_child
from pagedkv._core.links cimport coldest, is_linked
from pagedkv._core.place cimport Fate
from pagedkv._core.placement cimport Placement
from pagedkv._core.radix_tree cimport Tree
from pagedkv._core.types cimport NIL

BINS, FEATURES, WEIGHTS = NUM_BINS, NUM_FEATURES, NUM_WEIGHTS


def edges():
    """Seconds at which the bins begin, and at which the last one ends."""
    return [bin_edge(k) for k in range(NUM_BINS + 1)]


def bin_at(double age):
    return bin_of(age)


cdef class NativeModel:
    """One model by itself."""

    cdef Model m

    def __cinit__(self):
        if model_open(&self.m) != 0:
            raise MemoryError

    def __dealloc__(self):
        model_close(&self.m)

    @property
    def tables(self):
        """Weights and squares, float32 [2, WEIGHTS]: a view."""
        return np.stack((np.asarray(<float[:NUM_WEIGHTS]>self.m.weights), np.asarray(<float[:NUM_WEIGHTS]>self.m.squares)))

    @tables.setter
    def tables(self, const float[:, ::1] given):
        cdef int32_t i
        for i in range(NUM_WEIGHTS):
            self.m.weights[i], self.m.squares[i] = given[0, i], given[1, i]

    def index(self, const uint8_t[::1] x):
        out = np.empty(NUM_BINS, np.float32)
        cdef float[::1] view = out
        model_index(&self.m, &x[0], &view[0])
        return out

    def chance(self, const uint8_t[::1] x, double age, double seconds):
        return model_chance(&self.m, &x[0], age, seconds)

    def learn(self, const uint8_t[::1] x, int first, int last, bint reused, float weight):
        cdef Sample s
        cdef int32_t f
        for f in range(NUM_FEATURES):
            s.x[f] = x[f]
        s.first, s.last, s.reused, s.kind, s.weight = <uint8_t>first, <uint8_t>last, reused, 0, weight
        model_learn(&self.m, &s)

    def forget(self):
        model_forget(&self.m)


cdef class NativeGuard:
    """The account by itself."""

    cdef Guard g

    def __cinit__(self, double slack, double stake, int64_t window):
        guard_open(&self.g, slack, stake, window)

    def arrival(self, int64_t accesses, int64_t lru_hits, int64_t hits):
        """What may be lost now."""
        guard_arrival(&self.g, accesses, lru_hits, hits)
        return guard_room(&self.g, 0)

    @property
    def behind(self):
        return self.g.behind

    @property
    def total(self):
        return self.g.total


def noted(Placement placement):
    """Samples that were noted and not yet learned, oldest first."""
    cdef Hazard* z = hazard_of(&placement.place)
    cdef Sample* s
    cdef int64_t i
    out = []
    for i in range(z.samples_head, z.samples_tail):
        s = &z.samples[i & 4095]
        out.append({"first": s.first, "last": s.last, "reused": bool(s.reused), "kind": s.kind})
    return out


def pasts(Placement placement):
    """What is remembered of each run, by its id."""
    cdef History* h = &hazard_of(&placement.place).history
    cdef Past* p
    out = {}
    for i in range(h.num_pasts):
        p = &h.pasts[i]
        if p.length > 0:
            out[i] = {
                "parent": p.parent, "depth": p.depth, "length": p.length, "lru": p.lru, "kept": p.kept, "uses": p.uses,
                "turn": p.turn, "tail": p.tail, "open": p.users == 0, "users": p.users, "born": p.born, "learned": p.learned,
                "output": p.output, "mean_gap": p.mean_gap, "x": [p.x[f] for f in range(NUM_FEATURES)],
            }
    return out


# Hashes of everything in the tree.
cdef object cached_hashes(Tree* t):
    return {t.nodes[n].chain[i] for n in range(t.num_nodes) if t.nodes[n].root != NIL for i in range(t.nodes[n].length)}


# A run whose end counts as kept must lead to the past that says so, or its eviction would not be noticed.
cdef object run_problems(Placement placement, History* h, object live):
    cdef Tree* t = &placement.tree.tree
    cdef Fate* f
    cdef int32_t n, q, p
    wrong = []
    kept = {h.pasts[p].keys[i]: p for p in live for i in range(h.pasts[p].kept)}
    for n in range(t.num_nodes):
        if t.nodes[n].root != NIL and t.nodes[n].length > 0 and t.nodes[n].chain[t.nodes[n].length - 1] in kept:
            f, q = &placement.place.fates[n], NIL
            if 0 <= f.past < h.num_pasts and h.pasts[f.past].generation == f.past_generation:
                q = history_at(h, f.past, t.nodes[n].depth + t.nodes[n].length - 1)
            if q != kept[t.nodes[n].chain[t.nodes[n].length - 1]]:
                wrong.append(f"run {n}: leads to past {q}, ends in {kept[t.nodes[n].chain[t.nodes[n].length - 1]]}")
    return wrong


cdef object past_problems(History* h, int32_t p, object cached, bint exactly):
    cdef Past* past = &h.pasts[p]
    cdef Past* up = &h.pasts[past.parent] if past.parent != NIL else NULL
    cdef int32_t child, i, before = NIL
    wrong = []
    if history_child(h, past.parent, past.keys[0]) != p:
        wrong.append("not found by its first block")
    if past.length > past.capacity or past.depth != (up.depth + up.length if up != NULL else 0):
        wrong.append("length or depth")
    if up != NULL and up.root != past.root:
        wrong.append("another namespace than its parent")
    if not 0 <= past.lru <= past.length or not 0 <= past.kept <= past.length:
        wrong.append("lru or kept beyond its length")
    if up != NULL and ((past.lru > 0 and up.lru < up.length) or (past.kept > 0 and up.kept < up.length)):
        wrong.append("lru or kept is no prefix")
    if is_linked(&h.recency, p) != (past.lru > 0 and past.users == 0) or is_linked(&h.ages, p) != (past.users == 0):
        wrong.append("in a list it does not belong to, or in none")
    child = past.first_child
    while child != NIL:
        if h.pasts[child].parent != p or h.pasts[child].prev_sibling != before or h.pasts[child].length == 0:
            wrong.append(f"child {child}")
        before, child = child, h.pasts[child].next_sibling
    there = [past.keys[i] in cached for i in range(past.length)]
    if not all(there[:past.kept]) or (exactly and any(there[past.kept:])):
        wrong.append(f"kept is {past.kept}, really {there}")
    return [f"past {p}: {problem}" for problem in wrong]


def history_problems(Placement placement, bint exactly=True):
    """Every disagreement in what is remembered, as text.

    What counts as cached always is. `exactly`: and the other way round, all that was cached having been asked for by
    requests that are over.
    """
    cdef History* h = &hazard_of(&placement.place).history
    cdef int32_t p, stage
    cdef Past* past
    cached = cached_hashes(&placement.tree.tree)
    live = [p for p in range(h.num_pasts) if h.pasts[p].length > 0]
    wrong = [problem for p in live for problem in past_problems(h, p, cached, exactly)]
    wrong += run_problems(placement, h, live)
    sums = {"num_live": len(live), "used": len(live), "num_blocks": 0, "lru_blocks": 0, "lacking": 0}
    for p in live:
        past = &h.pasts[p]
        sums["num_blocks"] += past.length
        sums["lru_blocks"] += past.lru
        sums["lacking"] += 0 if past.users else max(0, past.lru - past.kept)
    said = {"num_live": h.num_live, "used": h.used, "num_blocks": h.num_blocks, "lru_blocks": h.lru_blocks,
            "lacking": h.lacking}
    wrong += [f"{name}: {said[name]}, really {sums[name]}" for name in sums if said[name] != sums[name]]
    if exactly and any(h.pasts[p].users for p in live):
        wrong.append("held without a holder")
    if any(h.pasts[p].users < 0 or (h.pasts[p].parent != NIL and h.pasts[p].users > h.pasts[h.pasts[p].parent].users) for p in live):
        wrong.append("held by more than its parent, or by fewer than none")
    if exactly and h.lru_reserved:
        wrong.append(f"{h.lru_reserved} blocks reserved for no request")
    seen = []
    for stage in range(NUM_STAGES):
        p = coldest(&h.ages, stage)
        while p >= 0:
            seen.append(p)
            if h.pasts[p].stage != stage:
                wrong.append(f"past {p}: stage {h.pasts[p].stage} in the list of {stage}")
            p = h.ages.next[p]
    if sorted(seen) != [p for p in live if h.pasts[p].users == 0]:
        wrong.append("the ages' lists hold others than those that wait")
    colder = set()
    p = coldest(&h.recency, 0)
    while p >= 0:
        if h.pasts[p].parent in colder:
            wrong.append(f"past {p}: hotter than its parent")
        colder.add(p)
        p = h.recency.next[p]
    if sorted(colder) != [p for p in live if h.pasts[p].lru and h.pasts[p].users == 0]:
        wrong.append("LRU's list holds others than LRU has")
    return wrong
