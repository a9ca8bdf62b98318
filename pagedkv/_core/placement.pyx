"""What stays where: owners of prefixes, eviction, demotion, promotion, retention, quotas.

It decides and moves nothing.

The order of every request: own the matched prefix in whatever tiers it lies, then make room, then promote, then use.
The other way round, making room could evict what is about to be promoted.
"""
# Over 400 lines: the one Python face of owners, insertion, transfers and retention; most lines are its docstrings.

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset


import math

import numpy as np

from pagedkv._core.arrays cimport (
    blocks_input, bool_input, count_input, handle_input, i32, i64, int32_inplace, int32_input, int64_input, new_int32,
    tokens_input,
)
from pagedkv._core.block_pool cimport COUNT, TREE, BlockPool, Pool, pool_alloc, pool_available, pool_free
from pagedkv._core.events cimport EVENT_CLEARED, Ring, ring_close, ring_decode, ring_open, ring_put
from pagedkv._core.insertion cimport place_insert, place_restore, place_restore_forest
from pagedkv._core.owners cimport (
    owns_no_pages, place_acquire, place_arrive, place_blocks, place_own_run, place_owner, place_release, place_share,
    place_shorten, place_uncut, run_own,
)
from pagedkv._core.lock cimport read_hint
from pagedkv._core.links cimport links_close, links_open
from pagedkv._core.place cimport WRITE_NEVER, Fate, Groups, Place
from pagedkv._core.point_copies cimport lacks_point
from pagedkv._core.points cimport points_restore
from pagedkv._core.policies.registry cimport policy_named
from pagedkv._core.radix_tree cimport (
    CHAINS, SCANNED, RadixTree, Tree, is_remainder, node_ids, node_top, tree_child, tree_common, tree_named, tree_next,
    tree_partial, tree_remove,
)
from pagedkv._core.recency cimport domain_free, domain_new, is_owned, place_ensure
from pagedkv._core.sends cimport mark_sent, next_unsent, want_send
from pagedkv._core.retention cimport change_domain, expire_until, retain
from pagedkv._core.telling cimport events_hidden_below, tell_all
from pagedkv._core.group_room cimport is_leaving, make_room_for
from pagedkv._core.tail_moves cimport promote_tail, tail_cold, tail_rises
from pagedkv._core.tails cimport could_have, has_point_in, has_tail, lacks_extents, longest_usable, tail_disown
from pagedkv._core.transfers cimport (
    UNDER_WAY, drop_children, finish_as, is_not_taken, lacking, make_room, promote_run, quota_of, split, usage_of,
)
from pagedkv._core.types cimport (
    E_BLOCKS, E_MEMORY, MAX_GROUPS, MAX_RUN, MAX_TIERS, NIL, OK, Move, handle_generation, handle_slot, make_handle,
)
from pagedkv._core.write_behind cimport NO_BATCH, copy_asked, copy_wanted, want_reused
from pagedkv.errors import (
    DoubleRelease, InvalidArgument, OutOfBlocks, PinBudgetExceeded, StaleHandle, WrongType,
)

cnp.import_array()

DEFAULT_PRIORITY = 50
MOVE_DTYPE = np.dtype([
    ("transfer", "<i8"), ("group", "<i8"), ("src_tier", "i1"), ("dst_tier", "i1"), ("reason", "i1"), ("lane", "i1"),
    ("src_block", "<i4"), ("dst_block", "<i4"), ("node", "<i4"), ("depth", "<i4"),
])
WRITES = ("never", "evicted", "reused", "all")      # by their number as a Write
SENDS = ("never", "reused", "all")


# How many leading blocks of an owned path the namespace's quota admits on the device, after evicting its own cold ones.
cdef int32_t quota_depth(Place* p, int32_t owner) noexcept nogil:
    cdef int32_t n = p.owners[owner].node, depth = p.owners[owner].num_blocks
    cdef int64_t cold = 0, over, quota = quota_of(p, n, 0)
    if quota < 0:
        return depth
    while p.tree.nodes[n].length > 0:
        if node_top(p.tree, n) != 0 and p.fates[n].transfer < 0:
            cold += p.tree.nodes[n].length
        n = p.tree.nodes[n].parent
    n = p.owners[owner].node
    over = usage_of(p, n, 0)[0] + cold - quota
    if over > 0:
        make_room(p, 0, over, p.domain_of[p.tree.nodes[n].root])
        over = usage_of(p, n, 0)[0] + cold - quota
    while over > 0 and p.tree.nodes[n].length > 0:      # the deepest cold runs stay below
        if node_top(p.tree, n) != 0 and p.fates[n].transfer < 0:
            over -= p.tree.nodes[n].length
        depth = p.tree.nodes[n].depth
        n = p.tree.nodes[n].parent
    return depth


# Forgets a root that nothing needs; False if something does.
cdef bint place_forget(Place* p, int32_t root) noexcept nogil:
    cdef int32_t tier, d
    if root == 0 or place_ensure(p, 0) != OK or p.tree.nodes[root].first_child != NIL or p.fates[root].born != 0:
        return False
    d = p.domain_of[root]
    if not p.fates[root].failed:                    # of one that was dropped nothing of this counts any more
        if p.kind_of[root] != 0:
            return False
        for tier in range(p.num_tiers):
            if d > 0 and p.domains[d].quota[tier] >= 0:
                return False
    if p.events.words != NULL and p.fates[root].last_use > p.events.head:
        return False                                # whose events they are is asked when they are drained
    if p.policy.remembers != NULL and p.policy.remembers(p, root):
        return False
    if d > 0:
        domain_free(p, d)
    p.domain_of[root] = 0
    p.kind_of[root] = 0
    memset(&p.fates[root], 0, sizeof(Fate))
    tree_remove(p.tree, root)
    return True


# Whether the entries of each transfer follow one another: then they need no sorting.
cdef bint is_grouped(cnp.ndarray ids):
    cdef const int64_t* data = i64(ids)
    cdef int64_t i, groups = 0
    cdef bint ascends = True
    for i in range(cnp.PyArray_SIZE(ids)):
        groups += i == 0 or data[i] != data[i - 1]
        ascends = ascends and (i == 0 or data[i] >= data[i - 1])
    return ascends or len(np.unique(ids)) == groups


@cython.final
@cython.no_gc_clear      # what dies in the same circle may still have to let go of what is in here
cdef class Placement:
    """Decides which blocks of a tree stay on which tier, for whom, and what goes first.

    Parameters
    ----------
    tree : RadixTree
        An empty tree with ``num_tiers >= len(pools)``, and ``keep_chain=True`` for policies that
        :func:`pagedkv.core.policy_needs_chain` names: ``arc``, ``s3fifo`` and ``hazard``.
    pools : sequence of BlockPool or None
        By tier: device, host, disk, remote. None where a tier is absent; the device must be there.
    policy : str
        ``"lru"``, ``"arc"``, ``"s3fifo"``, ``"hazard"`` (see :attr:`hazard`), or one of another package's; see
        :func:`pagedkv.core.policies`.
    demotion : str
        ``"leaf_first"`` (the coldest leaf's last blocks go first) or ``"oldest_first"`` (of the coldest
        private branch, the
        blocks nearest the root: a suspended sequence keeps its recent blocks close). What is lost is lost leaf-first.
    inclusive : sequence of bool
        By tier: keep the clean copy there when a block is promoted. Default: only on disk, which saves writes.
    closed : sequence of bool
        By tier: a run has a copy there only where what it hangs on has one, so that all of it is found again after a
        crash. What is demoted there takes with it what is missing of its prefix, and a copy stays while
        others hang on it, whatever `inclusive` says. Only the coldest tier that is not beside the others, and not the
        device. Default: disk and remote.
    beside : sequence of bool
        By tier: no block is demoted or copied there. It holds claims, which :meth:`graft` adds and a promotion spends.
        Only the coldest tier, and not the device. Default: none.
    write : str
        When runs are written to closed tiers: ``"never"``; ``"evicted"``, to make room; ``"reused"``, and when a second
        request finds them; ``"all"``, and when they are committed. See :meth:`copy_wanted`.
    send : str
        When runs are handed out to be sent to the store of the tier beside the others (:func:`own_unsent`): ``"never"``;
        ``"reused"``, when a second request finds them; ``"all"``, and when they are committed.
    pin_budget : int
        Blocks that :meth:`pin` may hold at most.
    event_words : int
        Size of the event ring in int32 words; 0 turns events off.
    history_blocks : int, optional
        For ``hazard``: blocks, cached or not, that are remembered. Default: 16 times the blocks of all
        tiers, at least 65,536; beyond 4 million, twice the blocks of all tiers.
    groups : sequence of (pools, window, chunk), optional
        The groups of layers that do not see everything, three at most: where their pages come from in each tier (a BlockPool, or
        a sequence as long as `pools`), and the blocks of their window or of a chunk, the other one 0. The pools of a tier
        are one :class:`ExtentPool`'s, in its order, that in `pools` the first. With the policy ``lru``, ``"leaf_first"``, and
        without claims.
    point_every : int
        Blocks between boundaries of a prefix that stay usable beside those where a request began or ended. 0: none.

    Notes
    -----
    Pools and tree share this object's mutex from now on. Every call is O(blocks touched); no Python object is
    kept per block.
    """

    def __cinit__(self, tree, pools, *, policy="lru", demotion="leaf_first", inclusive=None, closed=None, beside=None,
                  write="evicted", send="never", pin_budget=0, event_words=0, history_blocks=None, groups=None,
                  point_every=0):
        cdef int32_t tier, coldest
        cdef int64_t history = -1
        cdef BlockPool pool
        if not isinstance(tree, RadixTree):
            raise WrongType(f"tree is {type(tree).__name__}: a RadixTree is needed")
        self.tree = tree
        try:
            self.pools = tuple(pools)
            flags = tuple(inclusive) if inclusive is not None else None
            besides = tuple(beside) if beside is not None else (False,) * len(self.pools)
            last = len(self.pools) - 1
            coldest = last - (len(besides) > last > 0 and bool(besides[last]))
            closing = (tuple(closed) if closed is not None
                       else tuple(tier == coldest >= 2 for tier in range(len(self.pools))))
        except TypeError:
            raise WrongType("pools, inclusive, closed and beside are sequences, one entry per tier") from None
        if not self.pools or not isinstance(self.pools[0], BlockPool):
            raise WrongType("pools[0], the device's, must be a BlockPool")
        if len(self.pools) > self.tree.tree.num_tiers:
            raise InvalidArgument(f"{len(self.pools)} pools for a tree with num_tiers = {self.tree.tree.num_tiers}")
        self.place.policy = policy_named(policy)
        if not isinstance(demotion, str) or demotion not in ("leaf_first", "oldest_first"):
            raise InvalidArgument(f"demotion {demotion!r} is not known: 'leaf_first' or 'oldest_first'")
        if self.place.policy.needs_chain and not self.tree.tree.keep_chain:
            raise InvalidArgument(f"policy {policy!r} needs RadixTree(..., keep_chain=True) to know evicted blocks again")
        if self.tree.attached or self.tree.tree.num_blocks:
            raise InvalidArgument("the tree already holds blocks or belongs to another Placement")
        if len(besides) != len(self.pools) or any(besides[:max(last, 1)]):
            raise InvalidArgument(f"beside has {len(besides)} entries for {len(self.pools)} tiers, all False but the last: "
                                  f"only the coldest tier can lie beside the others, and not the device")
        if flags is None:
            flags = (False, False, True, True)[:coldest + 1] + (False,) * (last - coldest)
        if len(flags) != len(self.pools):
            raise InvalidArgument(f"inclusive has {len(flags)} entries for {len(self.pools)} tiers")
        if last > coldest and flags[last]:
            raise InvalidArgument("a tier beside the others is not inclusive: a promotion spends its claims")
        if len(closing) != len(self.pools) or any(closing[:max(coldest, 1)] + closing[coldest + 1:]):
            raise InvalidArgument(f"closed has {len(closing)} entries for {len(self.pools)} tiers, all False but the coldest: "
                                  f"only the coldest tier can be closed, and neither the device nor a tier of claims")
        if not isinstance(write, str) or write not in WRITES:
            raise InvalidArgument(f"write {write!r} is not known: one of {WRITES}")
        if not isinstance(send, str) or send not in SENDS:
            raise InvalidArgument(f"send {send!r} is not known: one of {SENDS}")
        self.place.sends_when = WRITES.index(send)
        self.policy_name = policy
        self.place.oldest_first = demotion == "oldest_first"
        self.place.pin_budget = blocks_input(pin_budget, "pin_budget", 0, 2**31 - 1)
        self.place.free_owner = self.place.free_transfer = self.place.free_domain = NIL
        self.place.num_tiers = len(self.pools)
        self.place.coldest = coldest
        self.place.batch = NO_BATCH
        self.place.tree = &self.tree.tree
        words = count_input(event_words, "event_words", 0, 2**31)
        for tier in range(self.place.num_tiers):
            if self.pools[tier] is None:
                continue
            if not isinstance(self.pools[tier], BlockPool):
                raise WrongType(f"pools[{tier}] is {type(self.pools[tier]).__name__}: a BlockPool or None is needed")
            if any(self.pools[tier] is other for other in self.pools[:tier]):
                raise InvalidArgument(f"pools[{tier}] stands for two tiers")
            pool = self.pools[tier]
            if pool.attached or (pool.pool.num_own if pool.shared is not None else pool.pool.fresh - pool.pool.num_stack):
                raise InvalidArgument(f"pools[{tier}] already has blocks in use or belongs to another Placement")
            self.place.pools[tier] = &pool.pool
            self.place.inclusive[tier] = bool(flags[tier])
            self.place.closed[tier] = bool(closing[tier])
            self.place.beside[tier] = bool(besides[tier])
            self.place.writes[tier] = WRITES.index(write)
        if groups is not None:
            self._open_groups(groups, count_input(point_every, "point_every", 0, 2**31 - 1))
        if history_blocks is not None:
            history = blocks_input(history_blocks, "history_blocks", 1, 2**40)
            if not self.place.policy.has_history:
                raise InvalidArgument(f"history_blocks is for policies that remember evicted blocks, not {policy!r}")
        if self.place.policy.open != NULL and self.place.policy.open(&self.place, history) != OK:
            raise MemoryError(f"no memory for the policy {policy}")
        if words and ring_open(&self.place.events, words) != 0:
            raise MemoryError("no memory for the event ring")
        if place_ensure(&self.place, 16) != OK or domain_new(&self.place, NIL) < 0:
            raise MemoryError("no memory for an empty placement")
        self.lock = self.tree.lock
        self.tree.attached = True
        for pool_object in self.pools + (self.short_pools or ()):
            if pool_object is not None:
                pool = pool_object
                pool.lock = self.lock
                pool.attached = True

    cdef int _open_groups(self, groups, int32_t point_every) except -1:
        cdef Groups* g = &self.groups
        cdef BlockPool pool
        cdef int32_t tier, number = 1, every = 1
        cdef bint alone = False
        shared = []
        for each in self.pools:
            shared.append(None if each is None else (<BlockPool>each).shared)
            alone = alone or (each is not None and (<BlockPool>each).shared is None)
        if (self.policy_name != "lru" or self.place.oldest_first or alone or any(
                self.place.beside[tier] for tier in range(self.place.num_tiers))):
            raise InvalidArgument("groups of layers need the policy 'lru', demotion 'leaf_first', no tier beside the others, "
                                  "and in each of them pools of one ExtentPool")
        pools = []
        for entry, window, chunk in groups:
            given = (entry,) if isinstance(entry, BlockPool) else tuple(entry)
            if len(given) != self.place.num_tiers:
                raise InvalidArgument(f"group {number} has pools for {len(given)} tiers, and there are {self.place.num_tiers}")
            for tier, each in enumerate(given):
                if shared[tier] is None and each is None:
                    continue
                if (shared[tier] is None or not isinstance(each, BlockPool) or number >= len(shared[tier].pools)
                        or each is not shared[tier].pools[number]):
                    raise InvalidArgument(f"the pool of group {number} is not number {number} of the ExtentPool of pools[{tier}]")
                pool = each
                if pool.attached:
                    raise InvalidArgument(f"the pool of group {number} in tier {tier} belongs to another Placement")
                g.pools[tier][number] = &pool.pool
                pools.append(pool)
            g.window[number] = count_input(window, "window", 0, 2**31 - 1)
            g.chunk[number] = count_input(chunk, "chunk", 0, 2**31 - 1)
            if g.window[number] and g.chunk[number]:
                raise InvalidArgument(f"group {number} has a window and a chunk: it has one of them")
            if g.window[number]:
                every = 0
            elif g.chunk[number]:
                every = math.lcm(every, g.chunk[number])
            number += 1
        for tier, each in enumerate(shared):
            if each is None:
                continue
            if len(each.pools) != number:
                raise InvalidArgument(f"the ExtentPool of tier {tier} has {len(each.pools)} pools, and {number} groups are given")
            pool = self.pools[tier]
            g.pools[tier][0] = &pool.pool
            if not links_open(&g.points[tier], 1):
                raise MemoryError("no memory for points")
        g.num, g.point_every = number, point_every
        g.free_every = every if every < 2**31 else 0
        self.short_pools = tuple(pools)
        self.tree.tree.num_short = number - 1
        self.place.groups = g
        return 0

    def __dealloc__(self):
        cdef int32_t i
        for i in range(MAX_TIERS):
            links_close(&self.groups.points[i])
        if self.place.policy != NULL and self.place.policy.close != NULL:
            self.place.policy.close(&self.place)
        free(self.place.kind_of)
        free(self.place.fates)
        free(self.place.domain_of)
        for i in range(MAX_TIERS):
            free(self.place.links[i].prev)
            free(self.place.links[i].next)
            free(self.place.links[i].ends)
        for i in range(self.place.transfers_capacity):
            if self.place.transfers[i].node != NIL:
                free(self.place.transfers[i].dst_ids)
        free(self.place.transfers)
        free(self.place.owners)
        free(self.place.moves)
        free(self.place.domains)
        free(self.place.expiries)
        free(self.place.wanted)
        free(self.place.sends)
        ring_close(&self.place.events)

    @property
    def event_words(self):
        """Room of the event ring in int32 words; 0: events are off."""
        return self.place.events.capacity if self.place.events.words != NULL else 0

    @property
    def tells_time(self):
        """Whether the policy has a clock: call :meth:`expire` as time passes."""
        return self.place.policy.clock != NULL

    @property
    def hazard(self):
        """The face of the policy ``hazard`` (a ``HazardPolicy``), None with another policy."""
        from pagedkv._core.policies.hazard.face import HazardPolicy

        return HazardPolicy(self) if self.policy_name == "hazard" else None

    @property
    def num_locked(self):
        """Times that this core's mutex was taken so far: what calls cost beside their own work."""
        return read_hint(&self.lock.taken)

    @property
    def policy(self):
        """Name of the eviction policy."""
        return self.policy_name

    def match(self, tokens, namespace=0, *, partial=False):
        """Look up the longest cached prefix without owning or touching it.

        Requests are matched by :meth:`acquire`.

        Returns
        -------
        tiers : ndarray of uint8 [n]
            Hottest tier of each matched block.
        blocks : ndarray of int32 [n]
            Its id there.
        common : int
            With ``partial=True``: how many leading tokens of the next, unmatched block equal some cached
            block's. 0 otherwise.
        """
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef Tree* t = &self.tree.tree
        cdef int64_t size = cnp.PyArray_SIZE(array), total = size // t.block_size, done = 0
        cdef cnp.ndarray blocks = new_int32(total)
        cdef cnp.ndarray tiers = np.empty(total, np.uint8)
        cdef const int32_t* data = i32(array)
        cdef int32_t* ids = i32(blocks)
        cdef uint8_t* tops = <uint8_t*>cnp.PyArray_DATA(tiers)
        cdef int32_t root, n = NIL, k = 0, common = 0
        cdef int32_t where[2]
        cdef bint want_partial = bool(partial) and self.place.groups == NULL
        self.lock.acquire()
        with nogil:
            root = tree_named(t, named)
            if root != NIL:
                done = self.match_in(root, data, total, ids, tops, &n, &k)
            if n != NIL and want_partial and size > done * t.block_size:
                common = tree_partial(t, n, k if n != root else 0, data + done * t.block_size,
                                      <int32_t>min(size - done * t.block_size, <int64_t>t.block_size), SCANNED, where)
        self.lock.release()
        if root == NIL:
            raise self.tree.unnamed(named)
        return tiers[:done], blocks[:done], common

    def partial(self, owner, tokens, *, below=False):
        """A cached block that begins with `tokens`, for copy-on-write reuse.

        Parameters
        ----------
        owner : int
        tokens : int32 [n]
            Tokens that follow the owned prefix.
        below : bool
            Instead of one on the device, one below it, which the second owner can promote.

        Returns
        -------
        (other, block, common) : (int, int, int)
            A second owner, of the path that ends with `block` (its id in its hottest tier), to be released once its
            bytes are copied; `common` leading tokens agree. ``(-1, -1, 0)`` where the block that agrees in most tokens
            is not such a one, or none agrees. Of many continuations the 256 youngest are looked at, and every remainder
            all of whose tokens come next.
        """
        cdef int32_t block = NIL, common = 0
        cdef int64_t other = self.partial_into(self._handle(owner), tokens, bool(below), &block, &common)
        return other, block, common

    # As `partial`: the other owner, -1 without one.
    cdef int64_t partial_into(self, int64_t handle, tokens, bint below, int32_t* at, int32_t* agree) except? -1:
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef int32_t size = <int32_t>min(cnp.PyArray_SIZE(array), <Py_ssize_t>self.tree.tree.block_size)
        cdef int32_t slot, n, child, common = 0, other = NIL
        cdef int32_t where[2]
        cdef Place* p = &self.place
        cdef int64_t second = -1
        cdef bint is_kept = False
        self.lock.acquire()
        slot = place_owner(p, handle)
        if slot >= 0 and size > 0 and p.groups == NULL:      # a short group may have a hole where the spine has a block
            n = p.owners[slot].node
            common = tree_partial(p.tree, n, p.tree.nodes[n].length, i32(array), size, SCANNED, where)
            if common > 0:
                child = where[0]
                is_kept = is_remainder(p.tree, child)
                if ((node_top(p.tree, child) > 0) == below and p.fates[child].transfer < 0 and not p.fates[child].failed):
                    if p.tree.nodes[child].length > 1:
                        child = split(p, child, 1)
                    if child != NIL:
                        other = place_share(p, slot)
            if other >= 0:
                run_own(p, child)
                if is_kept:
                    want_reused(p, child)
                p.owners[other].node = child
                p.owners[other].num_blocks += 1
                at[0] = node_ids(p.tree, child, node_top(p.tree, child))[0]
                agree[0] = common
                second = make_handle(other, p.owners[other].generation)
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        return second

    def acquire(self, tokens, namespace=0, max_blocks=None, *, request=True):
        """Own the longest cached prefix of `tokens`, in whatever tiers it lies.

        Parameters
        ----------
        request : bool
            False for owners that stand for no request (a look, a pin, a prefetch): the policy ``hazard`` learns nothing then.

        Returns
        -------
        owner : int
            Handle for :meth:`promote`, :meth:`insert`, :meth:`release`; to be released exactly once.
        num_blocks : int
            Whole blocks matched.
        """
        cdef Found found
        cdef int64_t handle = self.acquire_into(tokens, namespace, max_blocks, bool(request), &found)
        return handle, found.num_blocks

    # As `acquire`: the owner.
    cdef int64_t acquire_into(self, tokens, namespace, max_blocks, bint comes, Found* found) except? -1:
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int64_t limit = -1 if max_blocks is None else blocks_input(max_blocks, "max_blocks", 0, 2**31 - 1)
        cdef const int32_t* data = i32(array)
        cdef int64_t size = cnp.PyArray_SIZE(array)
        cdef int32_t slot = E_MEMORY, root
        cdef int64_t handle = -1
        self.lock.acquire()
        with nogil:
            root = tree_named(&self.tree.tree, named)
            if root != NIL:
                slot = self.acquire_in(root, data, size, limit, comes, found)
            if slot >= 0:
                handle = make_handle(slot, self.place.owners[slot].generation)
        self.lock.release()
        if root == NIL:
            raise self.tree.unnamed(named)
        if slot < 0:
            raise MemoryError("no memory to own another prefix")
        return handle

    # Finds the block that a partial hit on these tokens, which come behind run n, would copy from.
    cdef void _find_partial(self, int32_t n, const int32_t* tokens, int64_t num_tokens, Found* found) noexcept nogil:
        cdef Tree* t = &self.tree.tree
        cdef int32_t where[2]
        found.partial_tier, found.partial_tokens = NIL, 0
        if self.place.num_tiers > 1 and self.place.groups == NULL:
            found.partial_tokens = tree_partial(t, n, t.nodes[n].length, tokens,
                                                <int32_t>min(num_tokens, <int64_t>t.block_size), SCANNED, where)
        if found.partial_tokens > 0:
            found.partial_tier = node_top(t, where[0])

    # ---- shared by Python's calls and those of C (c_api), under the lock

    # The longest cached prefix of whole blocks, `total` at most: each one's id and hottest tier. *at, *k: it ends with the
    # first k blocks of this run, or at the root.
    cdef int64_t match_in(self, int32_t root, const int32_t* data, int64_t total, int32_t* ids, uint8_t* tops, int32_t* at,
                          int32_t* k) noexcept nogil:
        cdef Tree* t = &self.tree.tree
        cdef int32_t child, n = root, length
        cdef int64_t done = 0
        if root < self.place.fates_capacity and self.place.fates[root].failed:
            return 0
        if self.place.groups != NULL:
            total = longest_usable(&self.place, root, data, total, k)
        length = 0
        while done < total:
            child = tree_child(t, n, data + done * t.block_size)
            if child == NIL or self.place.fates[child].failed or is_remainder(t, child):
                break
            if self.place.groups != NULL:                       # they were compared
                length = <int32_t>min(<int64_t>t.nodes[child].length, total - done)
            else:
                length = tree_common(t, child, data + done * t.block_size, total - done)
            memcpy(ids + done, node_ids(t, child, node_top(t, child)), length * sizeof(int32_t))
            memset(tops + done, node_top(t, child), length)
            n = child
            done += length
            if length < t.nodes[n].length:
                break
        at[0], k[0] = n, length
        return done

    # As `acquire`: the owner's slot, or E_MEMORY.
    cdef int32_t acquire_in(self, int32_t root, const int32_t* data, int64_t size, int64_t limit, bint comes,
                            Found* found) noexcept nogil:
        cdef Tree* t = &self.tree.tree
        cdef int32_t slot = place_acquire(&self.place, root, data, size, limit), n
        if slot < 0:
            return slot
        found.num_blocks = self.place.owners[slot].num_blocks
        found.blocked = self.place.owners[slot].blocked
        found.num_cold = 0
        n = self.place.owners[slot].node
        self._find_partial(n, data + <int64_t>found.num_blocks * t.block_size,
                           size - <int64_t>found.num_blocks * t.block_size, found)
        while t.nodes[n].length > 0:
            if node_top(t, n) != 0:
                found.num_cold += t.nodes[n].length
            n = t.nodes[n].parent
        found.cold_tail = (self.place.groups != NULL
                           and not has_tail(&self.place, self.place.owners[slot].node, found.num_blocks, 0))
        if comes:
            if limit >= 0:                          # nothing beyond could have been hit, by any policy
                size = min(size, limit * t.block_size)
            place_arrive(&self.place, slot, data, size, 0)
        return slot

    # As `insert`. *bad: the entry that cannot be inserted, -1 where there is none.
    cdef int32_t insert_in(self, int32_t slot, const int32_t* data, int32_t* given, int32_t num_blocks,
                           int32_t* bad) noexcept nogil:
        cdef Pool* pool = self.place.pools[0]
        cdef int32_t i, done = 0
        bad[0] = -1
        for i in range(num_blocks):         # free, the tree's, or the same id twice: what passed has the TREE bit till the end
            if <uint32_t>given[i] >= <uint32_t>pool.fresh or pool.refs[given[i]] - 1 >= COUNT:
                bad[0] = i
                break
            pool.refs[given[i]] |= TREE
        for i in range(bad[0] if bad[0] >= 0 else num_blocks):
            pool.refs[given[i]] &= COUNT
        if bad[0] < 0:
            if self.place.groups != NULL:
                tail_disown(&self.place, slot)
            done = place_insert(&self.place, slot, data, given, num_blocks)
            if self.place.groups != NULL:
                owns_no_pages(&self.place, slot)
        return done

    # Hottest tier of each owned block.
    cdef void tiers_in(self, int32_t slot, uint8_t* tiers) noexcept nogil:
        cdef Tree* t = &self.tree.tree
        cdef int32_t n = self.place.owners[slot].node
        while t.nodes[n].length > 0:
            memset(tiers + t.nodes[n].depth, node_top(t, n), t.nodes[n].length)
            n = t.nodes[n].parent

    def blocked_by(self, owner):
        """Id of the transfer in flight that ended this owner's match early, or -1.

        Wait for it, release, acquire again.
        """
        cdef int64_t handle = self._handle(owner)
        self.lock.acquire()
        cdef int32_t slot = place_owner(&self.place, handle)
        cdef int64_t blocked = self.place.owners[slot].blocked if slot >= 0 else -1
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        return blocked

    def share(self, owner):
        """A second owner of the same path."""
        cdef int64_t handle = self._handle(owner), other = -1
        cdef int32_t slot, shared = -1
        self.lock.acquire()
        slot = place_owner(&self.place, handle)
        if slot >= 0:
            shared = place_share(&self.place, slot)
            if shared >= 0:
                other = make_handle(shared, self.place.owners[shared].generation)
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        if shared < 0:
            raise MemoryError("no memory to own another prefix")
        try:
            return other
        except BaseException:                       # no memory for the number: no caller could release it
            self.lock.acquire()
            place_release(&self.place, shared)
            self.lock.release()
            raise

    def tiers_of(self, owner):
        """Hottest tier of each owned block, uint8 [num_blocks]."""
        return self._path(owner, True)

    def blocks_of(self, owner):
        """Id of each owned block in its hottest tier, int32 [num_blocks]."""
        return self._path(owner, False)

    cdef object _path(self, owner, bint tiers):
        cdef int64_t handle = self._handle(owner)
        cdef int32_t slot, num_blocks
        cdef Place* p = &self.place
        cdef cnp.ndarray out
        while True:
            self.lock.acquire()
            slot = place_owner(p, handle)
            num_blocks = p.owners[slot].num_blocks if slot >= 0 else 0
            self.lock.release()
            if slot < 0:
                raise self._stale(handle)
            out = np.empty(num_blocks, np.uint8) if tiers else new_int32(num_blocks)
            self.lock.acquire()
            slot = place_owner(p, handle)
            if slot >= 0 and p.owners[slot].num_blocks == num_blocks:
                if not tiers:
                    place_blocks(p, slot, i32(out))
                else:
                    self.tiers_in(slot, <uint8_t*>cnp.PyArray_DATA(out))
                self.lock.release()
                return out
            self.lock.release()

    def insert(self, owner, tokens, blocks):
        """Insert device blocks that hold the KV of `tokens`.

        They follow the owned prefix.

        Parameters
        ----------
        owner : int
            Its path is extended by what was inserted.
        tokens : int32 [num_blocks * block_size]
        blocks : int32 [num_blocks], writeable
            One reference on each, the caller's, passes to the owner. Where the tree has the prefix
            already, the owner adopts
            the tree's block, the caller's is released, and the entry is rewritten.

        Returns
        -------
        int
            Leading blocks inserted or adopted. The rest stay the caller's (a quota, or a run just in flight).
        """
        if self.place.groups != NULL:
            raise InvalidArgument("over groups of layers blocks join the tree with their pages: insert them with a BlockTable, "
                                  "or with Boundaries")
        return self.insert_spine(owner, tokens, blocks)

    cdef int32_t insert_spine(self, owner, tokens, blocks) except -1:
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef cnp.ndarray ids = int32_inplace(blocks, "blocks")
        cdef int32_t num_blocks = <int32_t>cnp.PyArray_SIZE(ids), slot, done = 0
        cdef const int32_t* data = i32(array)
        cdef int32_t* given = i32(ids)
        cdef int64_t handle = self._handle(owner)
        cdef int32_t bad = -1
        if cnp.PyArray_SIZE(array) != <int64_t>num_blocks * self.tree.tree.block_size:
            raise InvalidArgument(f"{num_blocks} blocks hold {num_blocks * self.tree.tree.block_size} tokens, not {len(array)}")
        self.lock.acquire()
        with nogil:
            slot = place_owner(&self.place, handle)
            if slot >= 0:
                done = self.insert_in(slot, data, given, num_blocks, &bad)
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        if bad >= 0:
            raise InvalidArgument(
                f"block {ids[bad]} (entry {bad}) is free, already the tree's, or stands twice in blocks: nothing was changed")
        return done

    def release(self, owner):
        """Let go of an owner's path.

        Blocks that the tree alone owns then become evictable, deepest coldest.

        Raises
        ------
        DoubleRelease
            The owner was released before.
        """
        cdef int64_t handle = self._handle(owner)
        cdef int32_t slot
        self.lock.acquire()
        with nogil:
            slot = place_owner(&self.place, handle)
            if slot >= 0:
                place_release(&self.place, slot)
        self.lock.release()
        if slot < 0:
            raise DoubleRelease(f"owner {handle:#x} was released before, or never existed: nothing was changed")

    def reserve(self, n, tier=0):
        """Make room for `n` blocks in `tier`.

        Returns
        -------
        int
            Blocks still missing. If not 0, and :meth:`take_moves` or transfers already in flight have something to do, do
            it, :meth:`complete` it and ask again; otherwise everything else is held and the request cannot be met now.

        Raises
        ------
        MemoryError
            Room could be made, but there was no memory to do it with. What was decided before stands.
        """
        cdef int64_t wanted = blocks_input(n, "n", 0, 2**31 - 1)
        cdef int32_t where = count_input(tier, "tier", 0, self.place.num_tiers - 1)
        cdef int64_t short
        if self.place.pools[where] == NULL:
            raise InvalidArgument(f"there is no tier {where}")
        self.lock.acquire()
        short = max(0, wanted - pool_available(self.place.pools[where]))
        if short > 0:
            with nogil:
                short = self.reserve_in(where, wanted)
        self.lock.release()
        if short == E_MEMORY:
            raise MemoryError(f"no memory to make room for {wanted} blocks")
        return short

    # Makes room for `wanted` blocks that a tier does not have available: how many are still missing, 0 or more; E_MEMORY.
    cdef int64_t reserve_in(self, int32_t tier, int64_t wanted) noexcept nogil:
        cdef int64_t more[MAX_GROUPS]
        cdef int64_t short = wanted - pool_available(self.place.pools[tier])
        self.place.no_memory = False
        if self.place.groups != NULL:
            memset(more, 0, sizeof(more))
            more[0] = wanted
            make_room_for(&self.place, tier, more)
        elif short > self.place.pending[tier]:
            make_room(&self.place, tier, short - self.place.pending[tier], -1)
        short = wanted - pool_available(self.place.pools[tier])
        if self.place.no_memory and short > self.place.pending[tier]:
            return E_MEMORY
        return short if short > 0 else 0

    def reserve_pages(self, more, tier=0):
        """Make room for so many more blocks of each group of layers in `tier`.

        Parameters
        ----------
        more : int64 [num_groups]
        tier : int

        Returns
        -------
        bool
            Whether they can be had now. If not, and :meth:`take_moves` or transfers already in flight have something to do,
            do it, :meth:`complete` it and ask again; otherwise everything else is held.

        Raises
        ------
        InvalidArgument
            Not over groups of layers, not a number for each, or no such tier.
        MemoryError
            Room could be made, but there was no memory to do it with. Earlier decisions stand.
        """
        cdef cnp.ndarray wanted = self._for_groups(more)
        cdef int32_t where = count_input(tier, "tier", 0, self.place.num_tiers - 1)
        cdef const int64_t* numbers = i64(wanted)
        cdef bint found, no_memory
        self.lock.acquire()
        self.place.no_memory = False
        with nogil:
            found = make_room_for(&self.place, where, numbers)
        no_memory = self.place.no_memory and not found and not is_leaving(&self.place, where)
        self.lock.release()
        if no_memory:
            raise MemoryError("no memory to make room for pages")
        return found

    cdef object _for_groups(self, more):
        cdef cnp.ndarray wanted = int64_input(more, "more")
        if self.place.groups == NULL or cnp.PyArray_SIZE(wanted) != self.place.groups.num:
            raise InvalidArgument(f"{len(wanted)} numbers, for "
                                  f"{0 if self.place.groups == NULL else self.place.groups.num} groups of layers")
        return wanted

    def cold_pages(self, owner):
        """Blocks that a promotion of the owned path would bring to the device, by group.

        Those of group 0, and of the others the tail of the path's end; none that is on its way already.

        Returns
        -------
        ndarray of int64 [num_groups]
        """
        cdef int64_t handle = self._handle(owner)
        cdef Place* p = &self.place
        cdef cnp.ndarray out = np.zeros(1 if p.groups == NULL else p.groups.num, np.int64)
        cdef int64_t more[MAX_GROUPS]
        cdef int32_t slot
        memset(more, 0, sizeof(more))
        self.lock.acquire()
        slot = place_owner(p, handle)
        if slot >= 0:
            self._count_cold(slot, more)
            memcpy(i64(out), more, cnp.PyArray_SIZE(out) * sizeof(int64_t))
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        return out

    cdef void _count_cold(self, int32_t slot, int64_t* more) noexcept nogil:
        cdef Place* p = &self.place
        cdef int32_t n = p.owners[slot].node
        if p.groups != NULL:
            tail_cold(p, n, more)
        more[0] = 0
        while p.tree.nodes[n].length > 0:
            if node_top(p.tree, n) != 0 and p.fates[n].transfer < 0 and not p.fates[n].failed:
                more[0] += p.tree.nodes[n].length
            n = p.tree.nodes[n].parent

    def allocate(self, n):
        """Take `n` device blocks with one reference each, evicting others if that needs no move.

        Over one tier that is :meth:`reserve` and ``pools[0].alloc`` in one call. Over several, make room with
        `reserve` first:
        demotions take time.

        Returns
        -------
        ndarray of int32 [n]

        Raises
        ------
        OutOfBlocks
        """
        cdef int64_t wanted = blocks_input(n, "n", 0, 2**31 - 1)
        cdef Pool* pool = self.place.pools[0]
        if wanted > pool.max_capacity:
            raise self.out_of_blocks(wanted)
        cdef cnp.ndarray out = new_int32(wanted)
        cdef int32_t* ids = i32(out)
        cdef int code
        self.lock.acquire()
        with nogil:
            code = self.allocate_in(<int32_t>wanted, ids)
        self.lock.release()
        if code == E_MEMORY:
            raise MemoryError(f"no memory to make room for {wanted} blocks")
        if code != OK:
            raise self.out_of_blocks(wanted)
        return out

    # As `allocate`. Evictions stand after a Code.
    cdef int allocate_in(self, int32_t wanted, int32_t* ids) noexcept nogil:
        cdef Pool* pool = self.place.pools[0]
        cdef int code
        self.place.no_memory = False
        if wanted > pool_available(pool) and self.place.num_tiers == 1:
            make_room(&self.place, 0, wanted - pool_available(pool), -1)
        code = pool_alloc(pool, wanted, ids)
        return E_MEMORY if code != OK and self.place.no_memory else code

    def could_have(self, more):
        """Whether eviction can make room for so many more blocks of each group.

        Parameters
        ----------
        more : int64 [num_groups]

        Raises
        ------
        InvalidArgument
            Not over groups of layers, or not a number for each.
        """
        cdef cnp.ndarray wanted = self._for_groups(more)
        cdef bint found
        self.lock.acquire()
        found = could_have(&self.place, i64(wanted))
        self.lock.release()
        return found

    @property
    def num_groups(self):
        """Groups of layers, 1 where every layer keeps every block."""
        return 1 if self.place.groups == NULL else self.place.groups.num

    @property
    def reaches(self):
        """By group, the most blocks that it needs before a boundary: a tuple.

        None for the group that sees everything.
        """
        cdef int32_t group
        out = [None]
        if self.place.groups != NULL:
            for group in range(1, self.place.groups.num):
                out.append(max(self.place.groups.window[group], self.place.groups.chunk[group]))
        return tuple(out)

    def out_of_blocks(self, asked, tier=0):
        """The OutOfBlocks error for a request of `asked` blocks that `reserve` could not meet."""
        counts = self.pools[tier].counts()
        return OutOfBlocks(asked, counts["free"] + counts["max"] - counts["capacity"], counts["cached"], counts["live"],
                           ("device", "host", "disk", "remote")[tier])

    def promote(self, owner, until_ns=0):
        """Start bringing the owned blocks that lie below the device up to it.

        Reserve room for them first.

        A namespace with a quota on the device promotes no more than that admits, from the front.

        Parameters
        ----------
        owner : int
        until_ns : int
            When they should have arrived, by the monotonic clock in nanoseconds, for the thread that carries them out; 0:
            whenever that is.

        Returns
        -------
        int
            Transfers started (see :meth:`take_moves`).

        Raises
        ------
        OutOfBlocks
            The device has fewer free blocks than are needed. Nothing was started.
        """
        cdef int64_t handle = self._handle(owner)
        cdef int64_t needed = 0, until = count_input(until_ns, "until_ns", 0, 2**63 - 1)
        cdef int32_t slot, started = 0
        cdef int code = OK
        self.lock.acquire()
        slot = place_owner(&self.place, handle)
        if slot >= 0:
            code = self.promote_in(slot, until, &started, &needed)
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        if code == E_BLOCKS:
            raise self.out_of_blocks(needed)
        if code == E_MEMORY:
            raise MemoryError("no memory to start a transfer")
        return started

    # As `promote`: *started transfers begun, also with E_MEMORY; E_BLOCKS: *needed blocks must be available.
    cdef int promote_in(self, int32_t slot, int64_t until, int32_t* started, int64_t* needed) noexcept nogil:
        cdef Place* p = &self.place
        cdef int64_t more[MAX_GROUPS]
        cdef int32_t n, depth, tails
        cdef int code = OK
        self._count_cold(slot, more)
        needed[0] = more[0]
        if more[0] > pool_available(p.pools[0]) or (p.groups != NULL and lacks_extents(p, 0, more) > 0):
            return E_BLOCKS
        depth = quota_depth(p, slot)
        n = p.owners[slot].node
        while p.tree.nodes[n].length > 0 and code == OK:
            if (node_top(p.tree, n) != 0 and p.fates[n].transfer < 0 and not p.fates[n].failed
                    and p.tree.nodes[n].depth + p.tree.nodes[n].length <= depth):
                code = promote_run(p, n)
                if code == OK:
                    p.transfers[handle_slot(p.fates[n].transfer)].until = until
                    started[0] += 1
            n = p.tree.nodes[n].parent
        if p.groups != NULL and code == OK and depth == p.owners[slot].num_blocks:
            tails = promote_tail(p, p.owners[slot].node, until)
            if tails < 0:
                return tails
            started[0] += tails
        return code

    def is_moving(self, owner):
        """Whether a promotion of the owned path is in flight."""
        cdef int64_t handle = self._handle(owner)
        cdef int32_t slot, n
        cdef bint moving = False
        cdef Place* p = &self.place
        self.lock.acquire()
        slot = place_owner(p, handle)
        if slot >= 0:
            n = p.owners[slot].node
            moving = p.groups != NULL and tail_rises(p, n)
            while p.tree.nodes[n].length > 0:
                moving = moving or (p.fates[n].transfer >= 0 and node_top(p.tree, n) != 0)
                n = p.tree.nodes[n].parent
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        return moving

    def shorten(self, owner, num_blocks):
        """Release all but the first `num_blocks` of the owned path.

        As far as no run in flight would have to be cut.

        Returns
        -------
        int
            Blocks of the path now.
        """
        cdef int64_t handle = self._handle(owner)
        cdef int32_t keep = blocks_input(num_blocks, "num_blocks", 0, 2**31 - 1), slot, left = 0
        cdef int code = OK
        self.lock.acquire()
        slot = place_owner(&self.place, handle)
        if slot >= 0:
            if keep < self.place.owners[slot].num_blocks:
                with nogil:
                    code = place_shorten(&self.place, slot, keep)
            left = self.place.owners[slot].num_blocks
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        if code == E_MEMORY:
            raise MemoryError("no memory to cut a run")
        return left

    def settle(self, owner):
        """Keep the front of the owned path that is on the device; release the rest.

        Returns
        -------
        int
            Blocks of the path, all on the device now.
        """
        cdef int64_t handle = self._handle(owner)
        cdef int32_t slot, keep = 0
        self.lock.acquire()
        slot = place_owner(&self.place, handle)
        if slot >= 0:
            with nogil:
                keep = self.settle_in(slot)
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        return keep

    cdef int32_t settle_in(self, int32_t slot) noexcept nogil:
        cdef Place* p = &self.place
        cdef int32_t keep = p.owners[slot].num_blocks, n = p.owners[slot].node
        while p.tree.nodes[n].length > 0:
            if node_top(p.tree, n) != 0 or p.fates[n].failed:
                keep = p.tree.nodes[n].depth
            n = p.tree.nodes[n].parent
        if p.groups != NULL:
            keep = place_uncut(p, slot, keep)       # amid a run perhaps, which cannot be cut while it moves
        if keep < p.owners[slot].num_blocks:
            place_shorten(p, slot, keep)
        return keep

    def take_moves(self):
        """Moves decided since the last call, as an array of MOVE_DTYPE.

        Source and destination stay owned until `complete`.
        """
        cdef int64_t n
        cdef cnp.ndarray out
        while True:
            self.lock.acquire()
            n = self.place.num_moves
            self.lock.release()
            out = np.empty(n, MOVE_DTYPE)
            self.lock.acquire()
            if n == self.place.num_moves:           # or a transfer might be cut in two
                if n:                               # the array is made with the first move
                    memcpy(cnp.PyArray_DATA(out), self.place.moves, n * sizeof(Move))
                self.place.num_moves = 0
                self.lock.release()
                return out
            self.lock.release()

    def complete(self, transfers, ok, tried=None):
        """Say how transfers ended.

        A transfer moves a whole run: :meth:`take_moves` has a row for each of its blocks, all with the transfer's number.
        Complete it in one call, once all its blocks have moved or failed, either by its number once or with an entry for
        each of its rows, as in ``complete(moves["transfer"], arrived)``. With a closed tier they end in the order in which
        they were decided; of several calls, the one for what a block hangs on comes first.

        Parameters
        ----------
        transfers : int64 [n]
        ok : bool [n]
            Of several entries for one transfer all must be True, or the whole run has failed.
        tried : bool [n], optional
            False: a failed transfer was given up before anything of it was read or written (no entry of it was tried). A
            promotion then keeps its colder copy, which can be hit again; one that was tried and failed is never matched
            again. A demotion loses its blocks either way, and is counted as refused. Default: all were tried.

        Raises
        ------
        StaleHandle
            A transfer is not in flight, or :meth:`take_moves` never gave it out. Those before it have been completed.
        """
        cdef cnp.ndarray ids = int64_input(transfers, "transfers")
        cdef cnp.ndarray flags = bool_input(ok, "ok")
        cdef cnp.ndarray begun = np.ones(len(ids), np.bool_) if tried is None else bool_input(tried, "tried")
        cdef int64_t i = 0, last, n = cnp.PyArray_SIZE(ids), bad = -1
        cdef bint good, begin
        if cnp.PyArray_SIZE(flags) != n or cnp.PyArray_SIZE(begun) != n:
            raise InvalidArgument(f"{n} transfers but {len(flags)} outcomes and {len(begun)} of tried")
        order = None
        if self.place.closed[self.place.coldest]:
            order = np.argsort(self.when_decided(ids), kind="stable")   # what a block hangs on arrives before it
        elif not is_grouped(ids):
            order = np.argsort(ids, kind="stable")
        if order is not None:
            ids, flags, begun = ids[order], flags[order], begun[order]
        cdef const int64_t* data = i64(ids)
        cdef const uint8_t* arrived = <const uint8_t*>cnp.PyArray_DATA(flags)
        cdef const uint8_t* attempted = <const uint8_t*>cnp.PyArray_DATA(begun)
        self.lock.acquire()
        with nogil:
            while i < n:
                last = i
                good, begin = arrived[i] != 0, attempted[i] != 0
                while last + 1 < n and data[last + 1] == data[i]:
                    last += 1
                    good, begin = good and arrived[last] != 0, begin or attempted[last] != 0
                if is_not_taken(&self.place, data[i]) or finish_as(&self.place, data[i], good, begin) != OK:
                    bad = i
                    break
                i = last + 1
        self.lock.release()
        if bad >= 0:
            raise StaleHandle(
                f"transfer {ids[bad]:#x} (entry {bad if order is None else order[bad]}) is not in flight: it was completed "
                f"before, or take_moves never gave it out; a transfer is a run of blocks: complete it in one call, when all "
                f"of them have moved"
            )

    # Of each transfer, when it was decided, int64 [n]; after all others where it is not in flight.
    cdef object when_decided(self, ids):
        cdef cnp.ndarray found = np.full(len(ids), 2**62, np.int64)
        cdef const int64_t* data = i64(ids)
        cdef int64_t* numbers = i64(found)
        cdef int64_t i, n = cnp.PyArray_SIZE(ids)
        cdef Place* p = &self.place
        cdef int32_t slot
        self.lock.acquire()
        for i in range(n):
            slot = handle_slot(data[i])
            if 0 <= slot < p.transfers_capacity and p.transfers[slot].node != NIL and p.transfers[slot].id == data[i]:
                numbers[i] = p.transfers[slot].number
        self.lock.release()
        return found

    # ---- write-behind

    def copy_wanted(self, most):
        """Start copies of runs that a closed tier should have by its rule, oldest wish first.

        Nothing is started while copies are under way or something is read from a closed tier.

        Parameters
        ----------
        most : int
            Blocks at most.

        Returns
        -------
        int
            Blocks to be copied: moves with reason 1 (see :meth:`take_moves`).
        """
        cdef int32_t limit = count_input(most, "most", 1, 2**31 - 1)
        cdef int64_t started = 0
        self.lock.acquire()
        with nogil:
            started = copy_wanted(&self.place, limit)
        self.lock.release()
        return started

    def uncopied(self, tier):
        """Runs that are cached in hotter tiers and not in `tier`, or whose point is not there.

        Returns
        -------
        nodes : int64 [n]
            For :meth:`copy`. What was used last comes first, and of a path what is nearer the root: each beginning of this
            list is closed.
        blocks : int32 [n]
            Of each run.
        """
        cdef int32_t where = count_input(tier, "tier", 1, self.place.num_tiers - 1), n, room
        cdef Place* p = &self.place
        cdef int64_t found
        cdef cnp.ndarray nodes, blocks, used
        while True:
            self.lock.acquire()
            room = p.tree.num_live
            self.lock.release()
            nodes, used = np.empty(room, np.int64), np.empty(room, np.int64)
            blocks = new_int32(room)
            depths = new_int32(room)
            found = 0
            self.lock.acquire()
            if p.tree.num_live <= room:
                for n in range(p.tree.num_nodes):
                    if (p.tree.nodes[n].root != NIL and p.tree.nodes[n].length > 0 and n < p.fates_capacity
                            and ((not (p.tree.nodes[n].tiers >> where) & 1 and node_top(p.tree, n) < where)
                                 or (p.groups != NULL and lacks_point(p, n, where)))):
                        i64(nodes)[found] = make_handle(n, p.tree.nodes[n].generation)
                        i64(used)[found] = (2**62 if is_owned(p, n, node_top(p.tree, n)) else p.fates[n].last_use)
                        i32(blocks)[found] = p.tree.nodes[n].length
                        i32(depths)[found] = p.tree.nodes[n].depth
                        found += 1
                self.lock.release()
                order = np.lexsort((depths[:found], -used[:found]))
                return nodes[:found][order], blocks[:found][order]
            self.lock.release()

    def resumable(self, tier):
        """Blocks of group 0 in `tier`, a closed one, with which the next process could go on.

        Returns
        -------
        int
            Without groups of layers all that are cached or live there.
        """
        cdef int32_t where = count_input(tier, "tier", 0, self.place.num_tiers - 1), n, at, end, room
        cdef Place* p = &self.place
        cdef int64_t found = 0
        cdef uint8_t* leads
        if p.pools[where] == NULL:
            raise InvalidArgument(f"there is no tier {where}")
        if p.groups == NULL:
            counts = self.pools[where].counts()
            return counts["cached"] + counts["live"]
        self.lock.acquire()
        room = p.tree.num_nodes
        leads = <uint8_t*>calloc(max(room, 1), 1)
        for n in range(room if leads != NULL else 0):
            if p.tree.nodes[n].root == NIL or not (p.tree.nodes[n].tiers >> where) & 1:
                continue
            end = p.tree.nodes[n].depth + p.tree.nodes[n].length
            if has_point_in(p, n, where):
                leads[n] = 1
            elif leads[n] == 0 and p.groups.free_every and end % p.groups.free_every < p.tree.nodes[n].length:
                leads[n] = 2                        # up to the last boundary where nothing is needed
            at = p.tree.nodes[n].parent
            while leads[n] and p.tree.nodes[at].length > 0 and leads[at] != 1:
                leads[at] = 1
                at = p.tree.nodes[at].parent
        for n in range(room if leads != NULL else 0):
            end = p.tree.nodes[n].depth + p.tree.nodes[n].length
            if leads[n] == 1:
                found += p.tree.nodes[n].length
            elif leads[n] == 2:
                found += p.tree.nodes[n].length - end % p.groups.free_every
        self.lock.release()
        if leads == NULL:
            raise MemoryError(f"no memory to look at {room} runs")
        free(leads)
        return found

    def copy(self, nodes, tier, most=2**31 - 1):
        """Start to copy a closed tier's missing blocks of the prefixes that end with these runs.

        They take the place of blocks used before.

        Parameters
        ----------
        nodes : int64 [n]
            Of :meth:`uncopied`, in its order.
        most : int
            Blocks at most.

        Returns
        -------
        blocks : int
            To be copied: moves with reason 2.
        done : int
            Leading runs that need not be asked for again: they are there or on their way, are gone, or find no room.

        Raises
        ------
        WrongType, InvalidArgument
            The tier is not closed, too: while room is made, an open one may lose the beginning of a prefix to a colder tier.
        """
        cdef cnp.ndarray handles = int64_input(nodes, "nodes")
        cdef int64_t started = 0, now, done = 0, count = cnp.PyArray_SIZE(handles)
        cdef const int64_t* h = i64(handles)
        cdef int32_t where = count_input(tier, "tier", 1, self.place.num_tiers - 1), n
        cdef int32_t limit = count_input(most, "most", 1, 2**31 - 1)
        cdef Place* p = &self.place
        if p.pools[where] == NULL:
            raise InvalidArgument(f"there is no tier {where}")
        if not p.closed[where]:
            raise InvalidArgument(f"tier {where} is not closed: blocks are copied to closed tiers, and demoted to the others")
        self.lock.acquire()
        with nogil:
            p.batch = p.num_started
            while done < count and started < limit and p.writes[where] != WRITE_NEVER:
                n = handle_slot(h[done])
                now = 0
                if (0 <= n < p.tree.num_nodes and p.tree.nodes[n].root != NIL and p.tree.nodes[n].length > 0
                        and p.tree.nodes[n].generation == handle_generation(h[done])):
                    now = copy_asked(p, n, where, <int32_t>(limit - started))
                if now == UNDER_WAY:
                    break
                if now > 0:
                    started += now
                if not (now > 0 and lacking(p, n, where) > 0):
                    done += 1
            p.batch = NO_BATCH
        self.lock.release()
        return started, done

    # ---- sends

    # As own_unsent of held.pyx: the new owner, -1 without one.
    cdef int64_t unsent_into(self, int32_t most, int32_t* first, int32_t* node, int32_t* num_blocks) except? -1:
        cdef int32_t slot = NIL, n
        cdef int64_t handle = -1
        cdef Place* p = &self.place
        self.lock.acquire()
        with nogil:
            n = next_unsent(p, first)
            if n >= 0:
                slot = place_own_run(p, n)
                if slot < 0:
                    want_send(p, n, WRITE_NEVER)      # again, once there is memory
            if slot >= 0:
                if p.owners[slot].num_blocks > first[0] + most:
                    place_shorten(p, slot, first[0] + most)     # or all of it, where a run cannot be cut
                    want_send(p, n, WRITE_NEVER)      # the rest
                node[0] = p.owners[slot].node
                num_blocks[0] = p.owners[slot].num_blocks
                mark_sent(p, node[0], first[0], True)
                handle = make_handle(slot, p.owners[slot].generation)
        self.lock.release()
        if slot == E_MEMORY:
            raise MemoryError("no memory to own a prefix that is to be sent")
        return handle

    def node_of(self, owner):
        """The node that ends an owned path, good as long as it is owned; -1 for an empty path."""
        cdef int64_t handle = self._handle(owner)
        cdef int32_t slot, n = NIL
        self.lock.acquire()
        slot = place_owner(&self.place, handle)
        if slot >= 0 and self.place.owners[slot].num_blocks > 0:
            n = self.place.owners[slot].node
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        return n

    def not_sent(self, owner, first):
        """Blocks of an owned path, from block `first` on, were not sent.

        The next commit or use hands them out again.
        """
        cdef int64_t handle = self._handle(owner)
        cdef int32_t begin = count_input(first, "first", 0, 2**31 - 1), slot
        self.lock.acquire()
        slot = place_owner(&self.place, handle)
        if slot >= 0:
            mark_sent(&self.place, self.place.owners[slot].node, begin, False)
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)

    @property
    def num_unsent(self):
        """Paths that wait to be sent."""
        cdef int64_t count
        self.lock.acquire()
        count = self.place.num_sends
        self.lock.release()
        return count

    @property
    def num_in_flight(self):
        """Transfers started and not yet completed."""
        cdef int64_t count
        self.lock.acquire()
        count = self.place.in_flight
        self.lock.release()
        return count

    def set_retention(self, owner, priority=DEFAULT_PRIORITY, expires_ns=0):
        """Set the owned path's priority, 0..100 (higher stays longer), and its end.

        The end is in ns of the caller's clock; 0 means never.

        After `expires_ns` the blocks are the first to go. A prefix that others share keeps the higher values.
        """
        cdef int64_t handle = self._handle(owner)
        cdef int32_t klass = count_input(priority, "priority", 0, 100) + 1
        cdef int64_t until = count_input(expires_ns, "expires_ns", 0, 2**63 - 1)
        self.lock.acquire()
        cdef int32_t slot = place_owner(&self.place, handle)
        if slot >= 0:
            with nogil:
                retain(&self.place, slot, klass, until)
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)

    def expire(self, now_ns):
        """Let times to live pass that end at or before `now_ns`. Returns the blocks concerned."""
        cdef int64_t now = count_input(now_ns, "now_ns", 0, 2**63 - 1)
        cdef int64_t blocks
        self.lock.acquire()
        with nogil:
            if self.place.policy.clock != NULL:
                self.place.policy.clock(&self.place, now)
            blocks = expire_until(&self.place, now)
        self.lock.release()
        return blocks

    def pin(self, owner):
        """Count this owner's blocks against the pin budget; until released they stay.

        Raises
        ------
        PinBudgetExceeded
            The budget has no room for them. Nothing was changed.
        """
        cdef int64_t handle = self._handle(owner)
        cdef int64_t wanted = 0, left = 0
        cdef Place* p = &self.place
        self.lock.acquire()
        cdef int32_t slot = place_owner(p, handle)
        if slot >= 0:
            wanted = p.owners[slot].num_blocks
            left = p.pin_budget - p.pinned_blocks + p.owners[slot].pinned
            if wanted <= left:
                p.pinned_blocks += wanted - p.owners[slot].pinned
                p.owners[slot].pinned = <int32_t>wanted
        self.lock.release()
        if slot < 0:
            raise self._stale(handle)
        if wanted > left:
            raise PinBudgetExceeded(f"pinning {wanted} blocks, but {left} of the pin budget of {p.pin_budget} are left: release "
                                    f"other pins, or open the cache with a larger pin_budget")

    def set_quota(self, namespace, blocks, tier=0):
        """A namespace may hold at most `blocks` cached blocks in `tier` (None lifts the quota).

        It is evicted from its own.
        """
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int32_t where = count_input(tier, "tier", 0, self.place.num_tiers - 1)
        cdef int32_t limit = -1 if blocks is None else blocks_input(blocks, "blocks", 0, 2**31 - 1)
        cdef Place* p = &self.place
        cdef int32_t root, d = 0
        self.lock.acquire()
        with nogil:
            root = tree_named(p.tree, named)
            if root != NIL:
                d = p.domain_of[root] if place_ensure(p, 0) == OK else E_MEMORY
            if d == 0 and root != NIL and limit >= 0:
                d = domain_new(p, root)
                if d > 0:
                    change_domain(p, root, d)
            if d > 0:
                p.domains[d].quota[where] = limit
                if limit >= 0 and p.domains[d].usage[where] > limit:
                    make_room(p, where, p.domains[d].usage[where] - limit, d)
        self.lock.release()
        if root == NIL:
            raise self.tree.unnamed(named)
        if d < 0:
            raise MemoryError("no memory for a quota")

    def drop_namespace(self, namespace):
        """Forget the cached blocks of a namespace.

        What is not in use goes now, the rest when its owners let go. It never matches again. Its number stays until
        :meth:`forget`.

        Returns
        -------
        int
            Blocks dropped now.
        """
        cdef int64_t named = handle_input(namespace, "namespace"), before, dropped = 0
        cdef int32_t root
        cdef Place* p = &self.place
        cdef int code = OK
        handle = named
        self.lock.acquire()
        code = place_ensure(p, 0)
        self.lock.release()
        if code != OK:
            raise MemoryError("no memory to drop a namespace")
        self.tree.unname(handle)                    # from here on nothing can fail
        self.lock.acquire()
        with nogil:
            root = tree_named(p.tree, named)
            if root != NIL:
                before = p.tree.num_blocks
                drop_children(p, root)
                events_hidden_below(p, root)
                if p.policy.on_purge != NULL:
                    p.policy.on_purge(p, root)
                p.fates[root].failed = 1            # a root that has failed matches nothing and takes nothing, for good
                dropped = before - p.tree.num_blocks
        self.tree.purges += root != NIL
        self.lock.release()
        if root == NIL:
            raise self.tree.unnamed(named)
        return dropped

    def forget(self, namespace):
        """Forget a namespace that nothing needs.

        Its name and its number, and so the memory of both.

        What needs it is a block in any tier, an owner (so a row, a pin), a transfer in flight, a quota or a kind that
        was set for it (unless it was dropped), events of it that were not drained, and what the policy ``hazard``
        remembers of it. The default namespace, 0, is never forgotten. `namespace` names nothing afterwards: every
        call refuses it. Asking ``tree.namespace`` for the same key again makes it anew, with another number.

        Returns
        -------
        bool
            Whether it is forgotten now. Also if it was before.
        """
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int32_t root
        cdef bint gone
        handle = named
        self.lock.acquire()
        root = tree_named(self.place.tree, named)
        gone = root == NIL or place_forget(&self.place, root)
        self.lock.release()
        if gone:                                    # no other thread has run since the lock was released: the GIL is held
            self.tree.unname(handle)
            self.tree.names.pop(handle, None)
        return gone

    def moving_in(self, namespace):
        """Transfers in flight of a namespace. Of one that was forgotten there are none."""
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int32_t root, i, found = 0
        cdef Place* p = &self.place
        self.lock.acquire()
        root = tree_named(p.tree, named)
        for i in range(p.transfers_capacity):
            if root != NIL and p.transfers[i].node != NIL and p.tree.nodes[p.transfers[i].node].root == root:
                found += 1
        self.lock.release()
        return found

    def prospects(self, node):
        """What speaks for keeping the run of a node in flight.

        Returns
        -------
        (depth, continued, matched) : (int, bool, bool)
            Blocks of the prefix before it; whether other runs continue it; whether a request has found it, or computed it
            again, since it was committed.
        """
        cdef int32_t n = self._node(node)
        self.lock.acquire()
        cdef int32_t depth = self.tree.tree.nodes[n].depth
        cdef bint continued = self.tree.tree.nodes[n].first_child != NIL, matched = self.place.fates[n].matched
        self.lock.release()
        return depth, continued, matched

    def blocks_in(self, namespace, tier=0):
        """Ids int32 [n] of the blocks that a namespace has in `tier`."""
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int32_t where = count_input(tier, "tier", 0, self.place.num_tiers - 1), n, root
        cdef Tree* t = &self.tree.tree
        cdef int64_t total, done
        cdef cnp.ndarray out
        while True:
            self.lock.acquire()
            total = t.num_blocks
            self.lock.release()
            out = new_int32(total)
            done = 0
            self.lock.acquire()
            root = tree_named(t, named)
            if root == NIL:
                self.lock.release()
                raise self.tree.unnamed(named)
            if t.num_blocks <= total:
                n = tree_next(t, root, root)
                while n != NIL:
                    if (t.nodes[n].tiers >> where) & 1:
                        memcpy(i32(out) + done, node_ids(t, n, where), t.nodes[n].length * sizeof(int32_t))
                        done += t.nodes[n].length
                    n = tree_next(t, n, root)
                self.lock.release()
                return out[:done]
            self.lock.release()

    def clear(self):
        """Drop everything without an owner, in all tiers and namespaces.

        Returns the blocks dropped.
        """
        cdef Place* p = &self.place
        cdef int64_t before
        cdef int32_t n
        self.lock.acquire()
        before = p.tree.num_blocks
        for n in range(p.tree.num_nodes):
            if p.tree.nodes[n].root == n:
                drop_children(p, n)
        if p.policy.on_clear != NULL:
            p.policy.on_clear(p)
        if p.tree.num_blocks == 0:
            ring_put(&p.events, EVENT_CLEARED, 0, NIL, 0, NIL, 0, NULL, 0, NULL, 0, NULL, 0)
        before -= p.tree.num_blocks
        self.lock.release()
        return before

    def path_tokens(self, node):
        """Tokens int32 of the whole prefix that ends with a node in flight (as named by a Move)."""
        cdef int32_t n = self._node(node), length
        self.lock.acquire()
        length = self.tree.tree.nodes[n].length
        self.lock.release()
        return self.tree.path_tokens_of(n, length)

    def depth_of(self, node):
        """Blocks of the prefix before the run of a node in flight."""
        cdef int32_t n = self._node(node)
        self.lock.acquire()
        cdef int32_t depth = self.tree.tree.nodes[n].depth
        self.lock.release()
        return depth

    def anchor(self, node, depth, chain=0):
        """The deepest known chain key before block `depth` on the path to a node.

        The node is owned or in flight.

        ``(blocks up to it, key)``, ``(0, None)`` if none. `chain` is 0 for the disk's secret, 1 for the remote store's.
        """
        cdef int32_t which = count_input(chain, "chain", 0, CHAINS - 1)
        cdef int32_t n = self._node(node), most = count_input(depth, "depth", 0, 2**31 - 1)
        cdef Tree* t = &self.tree.tree
        cdef unsigned char found[32]
        cdef int32_t known = 0
        self.lock.acquire()
        while t.nodes[n].length > 0 and (t.nodes[n].keys[which] == NULL or t.nodes[n].depth > most):
            n = t.nodes[n].parent
        if t.nodes[n].length > 0:
            memcpy(found, t.nodes[n].keys[which], 32)
            known = t.nodes[n].depth
        self.lock.release()
        return (known, (<char*>found)[:32]) if known > 0 else (0, None)

    def remember_keys(self, node, depth, keys, chain=0):
        """Keep chain keys for later anchors.

        ``keys[i]`` (32 bytes) names block ``depth + i`` of the path to `node`.
        """
        cdef int32_t which = count_input(chain, "chain", 0, CHAINS - 1)
        cdef int32_t n = self._node(node)
        cdef Tree* t = &self.tree.tree
        cdef int32_t first = count_input(depth, "depth", 0, 2**31 - 1), count = len(keys), i
        cdef const unsigned char[::1] flat = b"".join(keys)
        if flat.shape[0] != 32 * count:
            raise InvalidArgument("a chain key has 32 bytes")
        self.lock.acquire()
        while t.nodes[n].length > 0 and t.nodes[n].depth > first:
            i = t.nodes[n].depth - first - 1
            if t.nodes[n].keys[which] == NULL and i < count:
                t.nodes[n].keys[which] = <uint8_t*>malloc(32)
                if t.nodes[n].keys[which] != NULL:
                    memcpy(t.nodes[n].keys[which], &flat[32 * i], 32)
            n = t.nodes[n].parent
        self.lock.release()

    def restore(self, tokens, blocks, namespace=0, tier=2):
        """Take blocks found again in a colder tier (a reopened store) into the tree.

        Parameters
        ----------
        tokens : int32 [num_blocks * block_size]
            A whole prefix from its start.
        blocks : int32 [num_blocks]
            Its ids in `tier`'s pool, with one reference each, which passes to the tree for blocks the
            tree did not have;
            the rest stay the caller's.

        Returns
        -------
        int
            Leading blocks that are in the tree now.
        """
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef cnp.ndarray ids = int32_input(blocks, "blocks")
        cdef int32_t where = count_input(tier, "tier", 1, self.place.num_tiers - 1), root
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef int32_t n = <int32_t>cnp.PyArray_SIZE(ids), done = 0, first = 0
        cdef const int32_t* data = i32(array)
        cdef const int32_t* given = i32(ids)
        if self.place.pools[where] == NULL:
            raise InvalidArgument(f"there is no tier {where}")
        if cnp.PyArray_SIZE(array) != <int64_t>n * self.tree.tree.block_size:
            raise InvalidArgument(f"{n} blocks hold {n * self.tree.tree.block_size} tokens, not {len(array)}")
        self.lock.acquire()
        with nogil:
            root = tree_named(&self.tree.tree, named)
            if root != NIL:
                done = place_restore(&self.place, root, data, given, n, where, MAX_RUN, &first)
        self.lock.release()
        if root == NIL:
            raise self.tree.unnamed(named)
        if done < 0:
            raise InvalidArgument(f"a block that the tree does not have yet (entry {-done - 1}) must be the caller's alone: "
                                  f"nothing was changed")
        return done

    def graft(self, tokens, keys, table, namespace=0, tier=3, piece=MAX_RUN):
        """Take blocks that a lookup has found in a shared store into the tree, as claims.

        The ids of the claims are taken from `tier`'s pool here, as many as it has: an interrupted caller has none to
        give back.

        Parameters
        ----------
        tokens : int32 [num_blocks * block_size]
            A whole prefix from its start.
        keys : uint8 [n, width], C-contiguous
            Names of its last n blocks, the ones that were found. The caller owns those before them.
        table : uint8 [at least the most blocks of the pool, width], C-contiguous
            The key of a claim is written into its row before the tree has the claim.
        namespace, tier : as for :meth:`restore`.
        piece : int
            Blocks of a run at most. A promotion brings a whole run or nothing of it.

        Returns
        -------
        int
            Leading blocks that are in the tree now.

        Raises
        ------
        InvalidArgument, StaleHandle, MemoryError
        """
        cdef const uint8_t[:, ::1] names = keys
        cdef uint8_t[:, ::1] rows = table
        cdef int32_t where = count_input(tier, "tier", 1, self.place.num_tiers - 1), root
        cdef int32_t longest = count_input(piece, "piece", 1, 2**31 - 1)
        cdef int64_t named = handle_input(namespace, "namespace")
        cdef cnp.ndarray array = tokens_input(tokens)
        cdef int64_t total = cnp.PyArray_SIZE(array) // self.tree.tree.block_size
        cdef int64_t found = total - names.shape[0]
        cdef Pool* pool = self.place.pools[where]
        if pool == NULL:
            raise InvalidArgument(f"there is no tier {where}")
        if total * self.tree.tree.block_size != cnp.PyArray_SIZE(array) or found < 0:
            raise InvalidArgument(f"{len(array)} tokens are no whole blocks, or fewer than the {len(keys)} keys")
        if rows.shape[0] < pool.max_capacity or rows.shape[1] != names.shape[1]:
            raise InvalidArgument(f"table must be uint8 [{pool.max_capacity}, {names.shape[1]}]")
        cdef cnp.ndarray ids = np.zeros(total, np.int32)
        cdef int32_t* given = <int32_t*>i32(ids)
        cdef const int32_t* data = i32(array)
        cdef int32_t done = 0, first = 0, count = 0, i, bad = 0
        self.lock.acquire()
        with nogil:
            root = tree_named(&self.tree.tree, named)
            if root != NIL:
                count = min(<int32_t>names.shape[0], pool_available(pool))
                if pool_alloc(pool, count, given + found) != OK:
                    count = 0
                for i in range(count):
                    memcpy(&rows[given[found + i], 0], &names[i, 0], rows.shape[1])
                done = place_restore(&self.place, root, data, given, <int32_t>found + count, where, longest, &first)
                first = max(0, min(first, done) - <int32_t>found)   # of the claims, the tree's are [first, last)
                i = max(first, done - <int32_t>found)
                pool_free(pool, given + found, first, &bad)
                pool_free(pool, given + found + i, count - i, &bad)
        self.lock.release()
        if root == NIL:
            raise self.tree.unnamed(named)
        return max(done, 0)

    def restore_forest(self, tokens, blocks, first, parents, namespaces, tier=2, pages=(), points=()):
        """Take the runs of a reopened store into the tree, in time linear in their blocks.

        Parameters
        ----------
        tokens : int32 [num_blocks * block_size]
        blocks : int32 [num_blocks]
            Ids in `tier`'s pool, each once, with one reference each, which passes to the tree for the blocks it takes.
        first : int64 [num_runs + 1]
            Run s is blocks ``[first[s], first[s + 1])``, one at least.
        parents : int32 [num_runs]
            The run that run s continues, an earlier one; -1 for a run that begins a prefix.
        namespaces : int64 [num_runs]
            Of the runs that begin a prefix; the others' are not read.
        pages : sequence of int32 [num_blocks], one for each short group
            The page of each block, -1 without one, each once, with one reference each, which passes to the tree for the
            runs it takes as a whole. A page that is in the tail of no point is free then.
        points : bool [num_runs]
            With `pages`: runs at whose end a request may go on. Those without their whole tail are passed over.

        Returns
        -------
        ndarray of int32 [num_runs]
            Leading blocks of each run that are in the tree now: all of them, but for a run whose place in the tree is taken
            or whose parent is not there. The rest stay the caller's. An earlier run is hotter than a later one.
        """
        cdef cnp.ndarray words = tokens_input(tokens)
        cdef cnp.ndarray ids = int32_input(blocks, "blocks")
        cdef cnp.ndarray edges = int64_input(first, "first")
        cdef cnp.ndarray above = int32_input(parents, "parents")
        cdef cnp.ndarray named = int64_input(namespaces, "namespaces")
        cdef int32_t where = count_input(tier, "tier", 1, self.place.num_tiers - 1), n = <int32_t>cnp.PyArray_SIZE(above)
        cdef int64_t bad
        cdef int32_t* of_group[MAX_GROUPS]
        if self.place.pools[where] == NULL:
            raise InvalidArgument(f"there is no tier {where}")
        given_pages = self._pages_input(pages, len(ids), where, of_group)       # alive as long as of_group is used
        cdef cnp.ndarray marked = bool_input(points if given_pages else np.zeros(n, np.bool_), "points")
        cdef const uint8_t* ends_in_point = <const uint8_t*>cnp.PyArray_DATA(marked)
        if len(marked) != n:
            raise InvalidArgument(f"{n} runs end in a point or not, not {len(marked)}")
        if cnp.PyArray_SIZE(words) != cnp.PyArray_SIZE(ids) * <int64_t>self.tree.tree.block_size:
            raise InvalidArgument(f"{len(ids)} blocks hold {len(ids) * self.tree.tree.block_size} tokens, not {len(words)}")
        if cnp.PyArray_SIZE(edges) != n + 1 or cnp.PyArray_SIZE(named) != n:
            raise InvalidArgument(f"{n} runs have {n + 1} edges and {n} namespaces, not {len(edges)} and {len(named)}")
        if edges[0] != 0 or edges[n] != len(ids) or (n and np.diff(edges).min() < 1):
            raise InvalidArgument("first must rise from 0 to the number of blocks, by one at least for each run")
        if n and (above.min() < -1 or (above >= np.arange(n)).any()):
            raise InvalidArgument("a run continues an earlier one, or -1")
        cdef cnp.ndarray roots = new_int32(n)
        cdef cnp.ndarray tails = new_int32(n)
        cdef cnp.ndarray done = new_int32(n)
        cdef const int32_t* data = i32(words)
        cdef const int32_t* given = i32(ids)
        cdef const int32_t* up = i32(above)
        cdef const int64_t* names = i64(named)
        cdef int32_t* of = i32(roots)
        cdef int32_t i, unknown = -1
        cdef const int64_t* at = i64(edges)
        cdef int32_t* last = i32(tails)
        cdef int32_t* kept = i32(done)
        self.lock.acquire()
        with nogil:
            bad = 0
            for i in range(n):
                of[i] = tree_named(&self.tree.tree, names[i]) if up[i] < 0 else NIL
                if up[i] < 0 and of[i] == NIL and unknown < 0:
                    unknown = i
            if unknown < 0:
                bad = place_restore_forest(&self.place, of, up, at, n, data, given, where, last, kept)
                if bad >= 0 and self.place.groups != NULL:
                    points_restore(&self.place, at, last, kept, n, where, of_group, ends_in_point)
        self.lock.release()
        if unknown >= 0:
            raise self.tree.unnamed(names[unknown])
        if bad < 0:
            raise InvalidArgument(f"a block (entry {-bad - 1}) must be the caller's alone and stand there once: "
                                  f"nothing was changed")
        return done

    # The pages of a forest's blocks, each the caller's alone, by short group: arrays, and in *out their data.
    cdef tuple _pages_input(self, pages, int64_t num_blocks, int32_t tier, int32_t** out):
        cdef int32_t group, num = 1 if self.place.groups == NULL else self.place.groups.num
        cdef cnp.ndarray given
        cdef int64_t i, bad = -1
        cdef Pool* pool
        cdef int32_t* ids
        kept = tuple(pages)
        if len(kept) != num - 1:
            raise InvalidArgument(f"{num - 1} short groups have pages, not {len(kept)}")
        arrays = []
        for group in range(1, num):
            given = np.array(int32_input(kept[group - 1], "pages"))
            if len(given) != num_blocks:
                raise InvalidArgument(f"{num_blocks} blocks have a page of group {group} or none, not {len(given)}")
            arrays.append(given)
            pool, ids = self.place.groups.pools[tier][group], i32(given)
            there = given[given >= 0]
            if len(np.unique(there)) != len(there):
                raise InvalidArgument(f"a page of group {group} is named twice")
            self.lock.acquire()
            for i in range(num_blocks):
                if ids[i] != NIL and (<uint32_t>ids[i] >= <uint32_t>pool.fresh or pool.refs[ids[i]] != 1):
                    bad = i
            self.lock.release()
            if bad >= 0:
                raise InvalidArgument(f"page {given[bad]} of group {group} (entry {bad}) must be the caller's alone")
            out[group - 1] = ids
        return tuple(arrays)

    def root_of(self, node):
        """Namespace of a node in flight."""
        cdef int32_t n = self._node(node)
        cdef Tree* t = &self.tree.tree
        cdef int64_t handle
        self.lock.acquire()
        handle = make_handle(t.nodes[n].root, t.nodes[t.nodes[n].root].generation) if t.nodes[n].root != NIL else -1
        self.lock.release()
        if handle < 0:
            raise StaleHandle(f"node {n} is not in the tree")
        return handle

    def drain_events(self):
        """Events since the last call, oldest first, as :class:`KVEvent` objects."""
        return self.take_events()[0]

    def take_events(self):
        """Events since the last call, and how many were lost until then.

        Returns
        -------
        (events, num_lost) : (list of KVEvent, int)
            Where `num_lost` is that of the call before, nothing is missing between the two calls' events.
        """
        cdef Ring* r = &self.place.events
        cdef int64_t i, size, total, room, begin, end, lost
        cdef cnp.ndarray words
        while True:
            self.lock.acquire()
            room = r.tail - r.head
            self.lock.release()
            words = new_int32(room)
            total = 0
            self.lock.acquire()
            begin = end = r.head
            lost = r.num_lost
            while end < r.tail:                     # whole records, as far as the array reaches
                size = r.words[end & (r.capacity - 1)]
                if total + size > room:
                    break
                for i in range(size):
                    i32(words)[total + i] = r.words[(end + i) & (r.capacity - 1)]
                end += size
                total += size
            self.lock.release()
            events = ring_decode(words[:total], self._names())
            self.lock.acquire()
            if r.head == begin:                     # no other thread took them, and none was written over
                r.head = end
                self.lock.release()
                return events, lost
            self.lock.release()

    def snapshot_events(self):
        """Tell all cached blocks as if they were stored now, in place of the events that wait.

        Parents come before what continues them, so a reader that starts anew knows all that :meth:`take_events` goes on
        from. The mutex is held while the tree is copied: about as long as its tokens take to copy.

        Returns
        -------
        (events, num_lost) : (list of KVEvent, int)
        """
        cdef Ring* r = &self.place.events
        cdef Ring told
        cdef int64_t room = 64, lost, missing
        cdef cnp.ndarray words
        if r.words == NULL:
            raise InvalidArgument("events are off: open the cache with event_words")
        while True:
            if ring_open(&told, room) != 0:
                raise MemoryError("no memory for a snapshot of the cache")
            self.lock.acquire()
            with nogil:
                tell_all(&self.place, &told)
                missing = told.num_lost
                lost = r.num_lost
                if missing == 0:
                    r.head = r.tail
                room = (self.place.tree.num_blocks * self.place.num_tiers * (self.place.tree.block_size + 3)
                        + 32 * <int64_t>self.place.tree.num_live * self.place.num_tiers)    # a run, and the point at its end
            self.lock.release()
            if missing == 0:
                break
            ring_close(&told)
        try:
            words = new_int32(told.tail)
            memcpy(i32(words), told.words, told.tail * sizeof(int32_t))
        finally:
            ring_close(&told)
        return ring_decode(words, self._names()), lost

    # Names of the namespaces, but for those that were dropped, by handle.
    cdef object _names(self):
        return {named: key for key, named in list(self.tree.namespaces.items())}

    def stats(self):
        """Counters since the start (blocks, unless they say otherwise), and the content now."""
        cdef Place p
        self.lock.acquire()
        p = self.place
        self.lock.release()
        c = p.counters
        names = ("device", "host", "disk", "remote")[:p.num_tiers]

        def by_tier(values):
            return {name: values[i] for i, name in enumerate(names)}

        return {
            "acquired": c.acquired, "hit_blocks": by_tier(c.hit_blocks), "inserted": c.inserted, "adopted": c.adopted,
            "promoted": by_tier(c.promoted), "demoted": by_tier(c.demoted), "dropped": by_tier(c.dropped),
            "trimmed": by_tier(c.trimmed), "failed_promotions": c.failed_promotions, "failed_demotions": c.failed_demotions,
            "late_promotions": c.late_promotions, "refused_demotions": c.refused_demotions,
            "copied": by_tier(c.copied), "failed_copies": c.failed_copies, "refused_copies": c.refused_copies,
            "wanted": p.num_wanted, "sends_wanted": p.num_sends, "sends_dropped": p.sends_dropped,
            "blocked_matches": c.blocked_matches, "refused_by_quota": c.refused_by_quota,
            "expired": c.expired, "lagging": c.lagging, "points": self.groups.num_points,
            "owners": p.live_owners, "in_flight": p.in_flight, "pinned_blocks": p.pinned_blocks,
            "events_lost": p.events.num_lost, "cached_blocks": self.tree.num_blocks,
        }

    def check_integrity(self):
        """Recompute every reference, list and count from scratch.

        AssertionError names the counts that do not agree.

        For every block: references == 1 if the tree has it + owners whose path has it in its hottest tier + 1
        while it is a
        transfer's source. Others may hold more (sequences, callers), never less.
        """
        from pagedkv._core.audit import placement_problems

        for pool in self.pools:
            if pool is not None:
                pool.check_integrity()
        self.tree.check_integrity()
        self.lock.acquire()
        cdef int room = place_ensure(&self.place, 0)
        self.lock.release()
        if room != OK:
            raise MemoryError("no memory for the audit")
        problems = placement_problems(self)
        if problems:
            raise AssertionError("; ".join(problems[:8]))

    def dump(self):
        """Nodes with their fate, for tests and recordings: id -> dict.

        Over groups of layers also ``pages``, of each ``(tier, group)`` the page of each block, -1 for a hole, and ``point``,
        the tiers where the boundary at the node's end has its tail.
        """
        from pagedkv._core.audit import placement_dump

        return placement_dump(self)

    cdef int32_t _node(self, node) except -1:
        cdef int32_t n = count_input(node, "node", 0, 2**31 - 1)
        self.lock.acquire()                         # another thread may be moving the nodes
        cdef bint there = (n < self.tree.tree.num_nodes and self.tree.tree.nodes[n].root != NIL
                           and self.tree.tree.nodes[n].length > 0)
        self.lock.release()
        if not there:
            raise StaleHandle(f"node {n} is not in the tree")
        return n

    cdef int64_t _handle(self, owner) except? -1:
        return handle_input(owner, "owner")

    cdef object _stale(self, int64_t handle):
        return StaleHandle(f"owner {handle:#x} was released, or never existed")
