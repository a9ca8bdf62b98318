# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Random operations on the real core at native speed; after each one everything is audited.

The same seed gives the same operations.
"""

from libc.stdint cimport int32_t, int64_t
from native_rows cimport Rows

NAMES = (
    "acquire", "bring up", "insert", "release", "share", "pin", "shorten", "reserve", "take", "complete", "finish", "hold",
    "look", "open", "extend", "step", "fork", "truncate", "end", "retain", "expire", "quota", "drop", "race", "copy",
    "clear",
)


cdef class NativeDriver(Rows):
    """One cache and its users.

    Parameters
    ----------
    seed : int
    placement : Placement over 1 to 3 tiers of at most 256 blocks, of at most 4 tokens each
    table : BlockTable over it, of at most 6 rows
    weights : sequence of int, one per name in NAMES
        How often each operation is done.
    """

    cdef int32_t limits[26]         # cumulative weights

    def __init__(self, seed, placement, table, weights):
        cdef int32_t i, total = 0
        for i in range(26):
            total += weights[i]
            self.limits[i] = total

    def run(self, num_ops, integrity_every=4096):
        """Do so many more operations."""
        cdef int64_t every = integrity_every
        for _ in range(num_ops):
            self.one(self.choose())
            self.sweep()
            self.audit()
            self.operations += 1
            if self.operations % every == 0:
                self.check_integrity()

    def close(self):
        """Finish, release and clear everything: nothing may be left in any tier."""
        self.doing = "close"
        self.end_step()
        self.table.copies_done()
        self.finish_all(100)
        self.check_integrity()
        while self.num_rows:
            self.end_row(0)
        while self.num_owners:
            self.release(0)
        self.let_go()
        self.placement.clear()
        self.sweep()
        self.audit()
        self.check_integrity()
        for tier in range(self.num_tiers):
            if self.pools[tier] != NULL and self.pools[tier].num_stack != self.pools[tier].fresh:
                raise self.wrong(f"a leak in tier {tier}")

    def check(self):
        """What is done after every operation: everything is audited."""
        self.sweep()
        self.audit()

    def spoil(self):
        """Make one slot of a cached device block wrong; False where nothing is cached there."""
        cdef int32_t block
        for block in range(self.pools[0].fresh):
            if self.in_tree[0][block]:
                self.memory[0][block * self.block_size] ^= 1
                return True
        return False

    cdef int32_t choose(self) noexcept nogil:
        cdef int32_t i = 0, at = self.below(self.limits[25])
        while self.limits[i] <= at:
            i += 1
        return i

    # ---- one operation

    cdef int one(self, int32_t kind) except -1:
        self.doing = NAMES[kind]
        if kind == 0:
            self.do_acquire(self.chance(50))
        elif kind == 1:
            if self.num_owners:
                self.bring_up(&self.owners[self.below(self.num_owners)])
        elif kind == 2:
            if self.num_owners:
                self.insert(&self.owners[self.below(self.num_owners)])
        elif kind == 3:
            if self.num_owners:
                self.release(self.below(self.num_owners))
        elif kind == 4:
            self.share()
        elif kind == 5:
            if self.num_owners:
                self.pin(&self.owners[self.below(self.num_owners)])
        elif kind == 6:
            if self.num_owners:
                self.shorten(&self.owners[self.below(self.num_owners)])
        elif kind == 7:
            self.reserve()
        elif kind == 8:
            self.take()
        elif kind == 9:
            self.take()
            if self.num_flights:
                self.complete(self.below(self.num_flights), self.chance(self.trust))
        elif kind == 10:
            self.finish_all(self.trust)
        elif kind == 11:
            self.hold()
        elif kind == 12:
            self.look()
        elif kind == 13:
            self.open_row(self.chance(70))
        elif kind == 14:
            self.extend()
        elif kind == 15:
            self.step()
        elif kind == 16:
            self.fork()
        elif kind == 17:
            if self.num_rows:
                self.truncate(self.below(self.num_rows))
        elif kind == 18:
            if self.num_rows:
                self.end_row(self.below(self.num_rows))
        elif kind == 19:
            self.retain()
        elif kind == 20:
            self.now += self.below(40)
            self.placement.expire(self.now)
        elif kind == 21:
            self.quota()
        elif kind == 22:
            self.drop()
        elif kind == 23:
            self.race()
        elif kind == 24:
            self.write_behind()
        elif self.chance(20):
            self.placement.clear()
        return 0

    # An owner or a row wants, and cuts, what is just being demoted.
    cdef int race(self) except -1:
        self.placement.reserve(self.below(self.pools[0].max_capacity + 1))
        if self.chance(50):
            self.do_acquire(False)
            if self.chance(50):
                self.shorten(&self.owners[self.num_owners - 1])
        elif self.num_rows < self.max_rows:
            self.open_row(False)
            if self.chance(50):
                self.truncate(self.num_rows - 1)
        return 0
