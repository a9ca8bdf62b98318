"""The Python face of the policy ``hazard``.

Its clock, what becomes known of requests, its learning, its bound, its tables.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from numbers import Real

import numpy as np

from pagedkv._core.arrays cimport count_input, handle_input, return_input, seconds_input, session_input
from pagedkv._core.policies.hazard.candidates cimport Candidates
from pagedkv._core.policies.hazard.learner cimport (
    MAX_KINDS, Hazard, HazardCounters, hazard_bound, hazard_bytes, hazard_chance, hazard_clock, hazard_report, hazard_room,
    hazard_study,
)
from pagedkv._core.policies.hazard.model cimport NUM_WEIGHTS, Model, model_open
from pagedkv._core.policies.hazard.policy cimport HAZARD
from pagedkv._core.policies.hazard.victims cimport hazard_of
from pagedkv._core.policies.hazard.visits cimport visit_of
from pagedkv._core.owners cimport place_begin, place_depart, place_hint, place_owner
from pagedkv._core.place cimport NUM_CLASSES, Place
from pagedkv._core.placement cimport Placement
from pagedkv._core.radix_tree cimport node_top, tree_named
from pagedkv._core.recency cimport place_ensure
from pagedkv._core.types cimport NIL, OK
from pagedkv.errors import InvalidArgument, StaleHandle, WrongType

cnp.import_array()


MAX_TABLE = 100.0           # weights are logits
cdef enum:
    LOOKED_AT = 4096


@cython.final
cdef class HazardPolicy:
    """The Python face of a Placement's policy ``hazard``.

    Made by ``Placement.hazard``.

    Ages go by the caller's clock: ``tick``, or ``Placement.expire``. A request arrives with ``Placement.acquire``; when it is
    released its whole path waits for its next use. :meth:`depart` before that says what the request generated.
    """

    def __cinit__(self, Placement placement not None):
        if placement.place.policy != &HAZARD:
            raise InvalidArgument(f"this Placement has policy {placement.policy!r}, not 'hazard'")
        self.placement = placement

    def tick(self, now_ns):
        """Tell the time, in nanoseconds of the caller's own clock.

        A step back is counted and changes nothing.
        """
        cdef int64_t now = count_input(now_ns, "now_ns", 0, 2**63 - 1)
        self.placement.lock.acquire()
        hazard_clock(hazard_of(&self.placement.place), now)
        self.placement.lock.release()

    def begin(self, owner):
        """Tell the policy that a request is about to be scheduled.

        The LRU that it compares itself with makes room now too.

        Call it before ``Placement.reserve``. Without it, the first ``Placement.insert`` of the owner says so.

        Raises
        ------
        StaleHandle
        """
        cdef int64_t handle = handle_input(owner, "owner")
        cdef Place* p = &self.placement.place
        cdef int32_t slot
        self.placement.lock.acquire()
        slot = place_owner(p, handle)
        if slot >= 0:
            place_begin(p, slot)
        self.placement.lock.release()
        if slot < 0:
            raise StaleHandle(f"owner {handle:#x} was released, or never existed")

    def hint(self, owner, *, session=None, expected_return_s=None):
        """Pass the caller's hints about a request under way.

        Hints are learned from: what they say need not be true, only alike.

        Nothing happens where the owner stands for no request.

        Parameters
        ----------
        owner : int
        session : int, optional
            Whose request this is, 0 to 2**63 - 1: what the session's request before it used and this one does not was left
            behind. To be told at once, and the first time counts.
        expected_return_s : float, optional
            Seconds after the release until what this request used is asked for again; infinity: never. Until it is over.

        Raises
        ------
        WrongType, InvalidArgument, StaleHandle
        """
        cdef int64_t handle = handle_input(owner, "owner")
        cdef int64_t name = session_input(session)
        cdef double seconds = return_input(expected_return_s)
        cdef Place* p = &self.placement.place
        cdef int32_t slot
        self.placement.lock.acquire()
        slot = place_owner(p, handle)
        if slot >= 0:
            place_hint(p, slot, name, seconds)
        self.placement.lock.release()
        if slot < 0:
            raise StaleHandle(f"owner {handle:#x} was released, or never existed")

    def depart(self, owner, *, used=True, output_tokens=None, later=False):
        """A request is over; its owner is to be released next.

        Parameters
        ----------
        owner : int
        used : bool
            False where it computed nothing: an opening that was given up.
        output_tokens : int, optional
            How much it generated. More than 2**24 is clamped and counted.
        later : bool
            The output will be told to :meth:`report`.

        Returns
        -------
        int
            The visit's handle for :meth:`report`; -1 where there is nothing to report.
        """
        cdef int64_t handle = handle_input(owner, "owner"), visit = -1
        cdef int64_t output = -1 if output_tokens is None else count_input(output_tokens, "output_tokens", 0, 2**63 - 1)
        cdef bint was_used = bool(used), reported = bool(later)
        cdef Place* p = &self.placement.place
        cdef int32_t slot
        self.placement.lock.acquire()
        with nogil:
            slot = place_owner(p, handle)
            if slot >= 0:
                visit = place_depart(p, slot, was_used, output, reported)
        self.placement.lock.release()
        if slot < 0:
            raise StaleHandle(f"owner {handle:#x} was released, or never existed")
        return visit

    def report(self, visit, output_tokens):
        """How much a request generated, known only now. Once for each handle of :meth:`depart`.

        Of more than 65,536 that were never told, some are given up.

        Raises
        ------
        StaleHandle
            It was reported before or given up, or never existed.
        """
        cdef int64_t handle = handle_input(visit, "visit")
        cdef int64_t output = count_input(output_tokens, "output_tokens", 0, 2**63 - 1)
        cdef Hazard* z = hazard_of(&self.placement.place)
        cdef int32_t slot
        self.placement.lock.acquire()
        slot = visit_of(&z.visits, handle)
        if slot >= 0:
            hazard_report(z, slot, output)
        self.placement.lock.release()
        if slot < 0:
            raise StaleHandle(f"visit {handle:#x} was reported or given up, or never existed")

    def study(self, max_samples=64):
        """Learn from the noted samples, `max_samples` at most (about a microsecond each).

        Returns how many there were.

        To be called off the critical path: after a request was released, or from a thread.
        """
        cdef int64_t most = count_input(max_samples, "max_samples", 0, 2**31 - 1), done
        self.placement.lock.acquire()
        with nogil:
            done = hazard_study(hazard_of(&self.placement.place), most)
        self.placement.lock.release()
        return done

    def set_bound(self, *, slack=0.005, stake=1.0, window=10000):
        """How far hits may fall below plain LRU's.

        See docs/policies.md for what that costs and what it proves.

        Parameters
        ----------
        slack : float
            Share of the accesses of any `window` requests, 0 or more; of 1 and above nothing is left of the bound.
        stake : float
            Share of the gain over LRU in the last `window` requests that may be at risk too; 0: a strict bound; inf:
            no bound.
        window : int
            Requests, 100 at least.

        The gain so far is at stake no more: the account begins anew.
        """
        cdef int64_t requests = count_input(window, "window", 100, 2**40)
        for name, value in (("slack", slack), ("stake", stake)):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise WrongType(f"{name} must be a number, not {type(value).__name__}")
            if not value >= 0:
                raise InvalidArgument(f"{name} must be 0 or more, not {value}")
        cdef double share = min(slack, 1e9), at_stake = min(stake, 1e9)     # these may run code of the caller's
        self.placement.lock.acquire()
        hazard_bound(hazard_of(&self.placement.place), share, at_stake, requests)
        self.placement.lock.release()

    def set_kind(self, namespace, kind):
        """Requests of this namespace (a root) teach and ask table `kind`, 0 to 7.

        All begin with table 0.

        What was remembered before stays with the table it was learned under.
        """
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int32_t which = count_input(kind, "kind", 0, MAX_KINDS - 1), root
        cdef int code
        self.placement.lock.acquire()
        root = tree_named(self.placement.place.tree, named)
        code = place_ensure(&self.placement.place, 0)       # the root may be younger than the last request
        if code == OK and root != NIL:
            self.placement.place.kind_of[root] = <uint8_t>which
        self.placement.lock.release()
        if root == NIL:
            raise self.placement.tree.unnamed(named)
        if code != OK:
            raise MemoryError("no memory for another namespace")

    def tables(self, kind=0):
        """The learned table: float32 [2, NUM_WEIGHTS], the weights and AdaGrad's sums (a copy).

        None if nothing was yet.

        Numbers per bucket of ages, depths, gaps, counts and lengths; nothing of any prompt.
        """
        cdef Model* m = &hazard_of(&self.placement.place).models[count_input(kind, "kind", 0, MAX_KINDS - 1)]
        cdef cnp.ndarray out = np.empty((2, NUM_WEIGHTS), np.float32)
        cdef float* data = <float*>cnp.PyArray_DATA(out)
        cdef bint there
        self.placement.lock.acquire()
        there = m.weights != NULL
        if there:
            memcpy(data, m.weights, NUM_WEIGHTS * sizeof(float))
            memcpy(data + NUM_WEIGHTS, m.squares, NUM_WEIGHTS * sizeof(float))
        self.placement.lock.release()
        return out if there else None

    def load_tables(self, tables, kind=0):
        """Go on from learned weights, as :meth:`tables` gave them.

        Raises
        ------
        WrongType, InvalidArgument
            No float32 array of that shape, or numbers that no learning can have made. Nothing was changed.
        """
        cdef Model* m = &hazard_of(&self.placement.place).models[count_input(kind, "kind", 0, MAX_KINDS - 1)]
        cdef cnp.ndarray given
        cdef float* data
        cdef int code = OK
        if not isinstance(tables, np.ndarray) or tables.dtype != np.float32:
            raise WrongType(f"tables must be a float32 array, not {getattr(tables, 'dtype', type(tables).__name__)}")
        if tables.shape != (2, NUM_WEIGHTS):
            raise InvalidArgument(f"tables have the shape (2, {NUM_WEIGHTS}), not {tables.shape}: of another version?")
        if not np.isfinite(tables).all() or np.abs(tables[0]).max() > MAX_TABLE or tables[1].min() <= 0:
            raise InvalidArgument(f"weights lie within +-{MAX_TABLE}, sums of squares above 0: these tables are damaged")
        given = np.ascontiguousarray(tables)
        data = <float*>cnp.PyArray_DATA(given)
        self.placement.lock.acquire()
        if m.weights == NULL:
            code = model_open(m)
        if code == OK:
            memcpy(m.weights, data, NUM_WEIGHTS * sizeof(float))
            memcpy(m.squares, data + NUM_WEIGHTS, NUM_WEIGHTS * sizeof(float))
        self.placement.lock.release()
        if code != OK:
            raise MemoryError("no memory for the tables")

    def chance(self, node, seconds):
        """Chance that the run of a node (as named by a Move) is used within so many seconds.

        None where nothing is known.
        """
        cdef int32_t n = self.placement._node(node), end
        cdef double horizon = seconds_input(seconds, "seconds"), found
        cdef Place* p = &self.placement.place
        self.placement.lock.acquire()
        end = p.tree.nodes[n].depth + p.tree.nodes[n].length
        found = hazard_chance(hazard_of(p), p.fates[n].past, p.fates[n].past_generation, end, horizon)
        self.placement.lock.release()
        return None if found < 0 else found

    def likely(self, seconds, most=16, tier=1):
        """Ends of prefixes in `tier`, by the chance of use within so many seconds.

        Only prefixes whose hottest copy lies in that tier.

        Parameters
        ----------
        seconds : float
        most : int
            Of them at most. At most 4096 ends are looked at.
        tier : int

        Returns
        -------
        nodes : int32 [n]
            Likeliest first; for ``Placement.path_tokens``.
        chances : float64 [n]
        """
        cdef double horizon = seconds_input(seconds, "seconds"), chance
        cdef int32_t where = count_input(tier, "tier", 0, self.placement.place.num_tiers - 1), wanted, i, n, looked = 0
        cdef int64_t list_no
        cdef Place* p = &self.placement.place
        cdef Candidates* c
        cdef cnp.ndarray nodes = np.empty(LOOKED_AT, np.int32)
        cdef cnp.ndarray chances = np.empty(LOOKED_AT, np.float64)
        cdef int32_t* ids = <int32_t*>cnp.PyArray_DATA(nodes)
        cdef double* values = <double*>cnp.PyArray_DATA(chances)
        wanted = count_input(most, "most", 0, LOOKED_AT)
        self.placement.lock.acquire()
        with nogil:
            for list_no in range(p.num_domains * NUM_CLASSES):
                c = &hazard_of(p).candidates[where][list_no]
                for i in range(c.count):
                    n = c.nodes[i]
                    if looked == LOOKED_AT:
                        break
                    if node_top(p.tree, n) != where or p.tree.nodes[n].first_child != NIL:
                        continue
                    chance = hazard_chance(hazard_of(p), p.fates[n].past, p.fates[n].past_generation,
                                           p.tree.nodes[n].depth + p.tree.nodes[n].length, horizon)
                    if chance > 0:
                        ids[looked], values[looked] = n, chance
                        looked += 1
        self.placement.lock.release()
        order = np.argsort(-chances[:looked], kind="stable")[:wanted]
        return nodes[order], chances[order]

    def stats(self):
        """Counters and sizes.

        Returns
        -------
        dict
            ``lru_hits`` and ``hits`` (blocks that plain LRU would have hit, and that were matched, of what is remembered and
            not held by a request under way), ``lacking`` (blocks that
            LRU has and the cache has not), ``room`` (what the bound leaves), ``held_back`` (victims in LRU's order because
            of it), ``left_behind`` (runs that their session went on without), ``learned`` (samples),
            ``samples_lost``, ``visits_lost``, ``clock_steps_back``, ``outputs_clamped``,
            ``remembered_blocks``, ``remembered_runs``, ``bytes``.
        """
        cdef Hazard* z = hazard_of(&self.placement.place)
        cdef HazardCounters c
        cdef int64_t learned = 0, lacking, room, blocks, runs, size, i
        self.placement.lock.acquire()
        for i in range(MAX_KINDS):
            if z.models[i].weights != NULL:
                learned += z.models[i].learned
        c, lacking, room, size = z.counters, z.history.lacking, hazard_room(z), hazard_bytes(z)
        blocks, runs = z.history.num_blocks, z.history.num_live
        self.placement.lock.release()
        return {                                # after the lock: a dict may wake the collector, and it a finaliser
            "lru_hits": c.lru_hits, "hits": c.hits, "lacking": lacking, "room": room, "held_back": c.held_back,
            "left_behind": c.left_behind, "learned": learned, "samples_lost": c.samples_lost, "visits_lost": c.visits_lost,
            "clock_steps_back": c.clock_steps_back, "outputs_clamped": c.outputs_clamped,
            "remembered_blocks": blocks, "remembered_runs": runs, "bytes": size,
        }
