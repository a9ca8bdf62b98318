# Groups of layers that see equally far back: pages, tails and points. The caller holds the cache's mutex.
#
# Group 0 sees everything; its blocks are the *spine*, which all other modules handle. A *short* group has a window or chunks,
# and needs of a prefix of k blocks its last need(k) blocks alone: the *tail* of that boundary. A prefix may be used if every
# group has its tail. A *page* is a short group's block. Its id stands in its run (Node.pages) as long as something holds it:
#     a row that is computed     the pages of its blocks [first, num_blocks); those the tree has, through its owner
#     an owner                   the pages of blocks [first, num_blocks) of its path, each in its hottest tier
#     a point                    its tail, in each tier where it has one, as a whole
#     a transfer                 the pages that it reads (tail_moves.pxd)
# A *point* stands at the end of a run. A request has ended or begun there, and another may go on from there. With its last holder
# a page is free, and the run has a *hole* there. Points are evicted like runs, coldest first and as a whole, and a run at whose
# end is neither a child nor an owner nor a point goes with it: nothing can be hit there any more.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Groups, Place
from pagedkv._core.radix_tree cimport Tree, node_pages
from pagedkv._core.types cimport NIL

cdef enum:
    ANY = -1            # the hottest tier that has the page
    POINTS = 0x0F       # of Fate.tails: a bit per tier where the point at the run's end has its tail
    MOVING = 0x10       # of the same, shifted by a tier: the boundary's tail is on its way from there

# The hottest tier that has a page of block i of run n; NIL: there is a hole.
cdef inline int32_t page_top(Tree* t, int32_t n, int32_t group, int32_t i) noexcept nogil:
    cdef int32_t tier
    for tier in range(t.num_tiers):
        if node_pages(t, n, tier, group)[i] != NIL:
            return tier
    return NIL

cdef inline bint has_point_in(Place* p, int32_t n, int32_t tier) noexcept nogil:
    return (p.fates[n].tails >> tier) & 1

# Blocks before the boundary behind k blocks that a short group needs.
cdef int32_t need(Groups* g, int32_t group, int32_t k) noexcept nogil
cdef enum What:
    HOLD                # for a row or an owner
    LET
    MARK                # for a point or a transfer
    UNMARK

# One thing to the pages of blocks [first, last) of the path to run n in `tier`, all of which are there.
cdef void to_pages(Place* p, int32_t n, int32_t tier, int32_t group, int32_t first, int32_t last, What what) noexcept nogil
# The same to one page, that of block i of run n.
cdef void to_page(Place* p, int32_t n, int32_t tier, int32_t group, int32_t i, What what) noexcept nogil
# The page of block i of run n has just come to be in `tier`: owners that held a colder one hold it from now on.
cdef void holds_rise(Place* p, int32_t n, int32_t tier, int32_t group, int32_t i) noexcept nogil
# Whether the tail of the boundary behind the first k blocks of the path to run n is there, in `tier` or in ANY.
cdef bint has_tail(Place* p, int32_t n, int32_t k, int32_t tier) noexcept nogil
# Of `num_blocks` at most, the leading blocks of the longest prefix that may be used; in *agreed all that the tree has.
cdef int32_t longest_usable(Place* p, int32_t root, const int32_t* tokens, int64_t num_blocks, int32_t* agreed) noexcept nogil
# Of `num_blocks` at most, the blocks of the longest prefix of the path to run n whose tail is there, in `tier` or in ANY.
cdef int32_t usable_of_path(Place* p, int32_t n, int32_t num_blocks, int32_t tier) noexcept nogil
# An owner's path ends with the blocks that it holds now: it holds their tail, too, and no other pages.
cdef void tail_own(Place* p, int32_t owner) noexcept nogil
# It holds pages as another owner of the same path does.
cdef void tail_share(Place* p, int32_t owner, int32_t other) noexcept nogil
# It lets go of its pages before block `first` of a group.
cdef void tail_shorten(Place* p, int32_t owner, int32_t group, int32_t first) noexcept nogil
# It lets go of all of them.
cdef void tail_disown(Place* p, int32_t owner) noexcept nogil
# The owner's path has been cut to its first num_blocks blocks, whose tail is there: it holds that, and nothing behind it.
cdef void tail_cut(Place* p, int32_t owner, int32_t old_node, int32_t old_blocks) noexcept nogil
# The tree takes a row's pages of the blocks from block `first` on, or gives it its own: pages[i] is that of block first + i. One
# reference each, the row's, passes to the owner.
cdef void pages_join(Place* p, int32_t owner, int32_t group, int32_t first, int32_t* pages) noexcept nogil
# A boundary at which a match ended.
cdef void point_touch(Place* p, int32_t n) noexcept nogil
# There is a point at the end of run n, whose tail is in `tier`, and it has it there from now on.
cdef void point_enter(Place* p, int32_t n, int32_t tier) noexcept nogil
# It lets go of its tail in `tier`, and is gone where that was the last one. The run stays.
cdef void point_leave(Place* p, int32_t n, int32_t tier) noexcept nogil
# Let go of the point at the end of run n, with its tails.
cdef void point_drop(Place* p, int32_t n) noexcept nogil
# The point that goes first from `tier`, NIL without one. `domain` -1: any.
cdef int32_t coldest_point(Place* p, int32_t tier, int32_t domain) noexcept nogil
# The class or the domain of run n is about to change, or has changed.
cdef bint point_unlink(Place* p, int32_t n) noexcept nogil
cdef void point_link(Place* p, int32_t n) noexcept nogil
# Extents that `tier` lacks for so many more blocks of each group; 0 or less: they can be had now.
cdef int64_t lacks_extents(Place* p, int32_t tier, const int64_t* more) noexcept nogil
# Whether so many can be had on the device once all that is cached there is evicted.
cdef bint could_have(Place* p, const int64_t* more) noexcept nogil
