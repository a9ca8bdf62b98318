# The state that decides what stays where: one Fate per tree node, one set of recency lists per tier.
#
# Who owns a run's copies (the reference counts in the pools, nothing else):
#     every copy in every tier         1 by the tree                (marked TREE)
#     the copy in the hottest tier    +1 for each owner whose path passes through the node
#     the source of a transfer        +1 by the transfer, while it is in flight
#     the destination of a transfer    1 by the transfer; it is no copy of the node until the transfer has succeeded
# A transfer that copies (to a colder tier, where the run stays as hot as it was) has no reference on its source: `copying`
# keeps the run from being evicted, dropped, merged or extended, and it may be matched, owned, promoted and cut meanwhile.
# A tier may be closed: a run has a copy there only where its parent has one, so that what a crash leaves there is found
# again. A copy comes after its parent's, and stays while `below` counts a child's.
# The coldest tier may lie beside the others: nothing is demoted or copied to it. Its ids are claims, grafted after a lookup
# in a store that others share. A run with a claim has no other copy; a promotion spends the claim. Claims do not keep the
# run that they continue.
# Order: an owner holds its whole path, so counts never rise going down. A node is linked into a tier's recency lists
# when the tree alone owns its copy there (with s3fifo: always). Within a list a parent is hotter than its children in
# that tier, so the cold end is a leaf; `kids` is checked all the same, because other policies order otherwise.
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagedkv._core.block_pool cimport Pool
from pagedkv._core.events cimport Ring
from pagedkv._core.links cimport Links
from pagedkv._core.radix_tree cimport Tree
from pagedkv._core.types cimport MAX_GROUPS, MAX_TIERS, Move
from pagedkv.threads.pthread cimport pthread_cond_t

cdef struct Place

cdef enum:
    POLICY_VERSION = 4      # raised with every change of Policy, Place, Fate or what a policy may call

# An eviction policy: which run of a recency list goes first, and what it learns to know it. A function that is NULL has
# nothing to do; `victim` is always there. All are called under the cache's mutex, without the GIL.
cdef struct Policy:
    int32_t version         # POLICY_VERSION and sizeof(Policy) of the headers that it was compiled with
    int64_t size
    bint needs_chain        # knows evicted blocks again by the hash of their prefix: RadixTree(keep_chain=True)
    bint keeps_owned        # its lists are queues: a run keeps its place while it is owned
    bint joins_requests     # blocks of one request may lengthen a run of another's
    bint has_history        # remembers blocks that are evicted, as many as `open` is told
    # The run to evict from list `list_no` of `tier`; NIL: none that may go. `may_go` (policies/choosing.pxd) says which may;
    # any other answer is passed over, and the coldest that may go takes its place. *limit, how many of its blocks may go at
    # most, is preset to all.
    # A policy with two queues has the second in list_no + 1. `childless`: only runs that nothing in any tier continues.
    int32_t (*victim)(Place* p, int32_t tier, int32_t list_no, bint childless, int32_t* limit) noexcept nogil
    # State of its own, in p.state, before anything is cached. `history`: blocks to remember, -1 for its default. A Code.
    int (*open)(Place* p, int64_t history) noexcept nogil
    void (*close)(Place* p) noexcept nogil                              # also where `open` failed or was never called
    int (*grow)(Place* p, int32_t nodes) noexcept nogil                 # room for nodes p.fates_capacity .. nodes - 1. A Code
    int (*grow_domains)(Place* p, int32_t domain) noexcept nogil        # room for the lists of one domain more. A Code
    # What it learns: a hit on a run; a miss of blocks that follow `chain`; an eviction of `count` blocks of a run from a tier.
    void (*on_hit)(Place* p, int32_t n) noexcept nogil
    void (*on_miss)(Place* p, uint64_t chain, const int32_t* tokens, int64_t num_blocks) noexcept nogil
    void (*on_evict)(Place* p, int32_t tier, int32_t n, int32_t first, int32_t count) noexcept nogil
    void (*on_lost)(Place* p, int32_t n, int32_t count) noexcept nogil  # a run's last blocks leave every tier
    # The queue that a block with this prefix hash is inserted into. `use_up`: what is remembered of it counts no more.
    int32_t (*queue_of)(Place* p, int32_t tier, uint64_t chain, bint use_up) noexcept nogil
    # A run that is in its recency list and may become a victim; that is none any more; whose children became fewer or colder;
    # whose end is another one now.
    void (*on_link)(Place* p, int32_t tier, int32_t n) noexcept nogil
    void (*on_unlink)(Place* p, int32_t tier, int32_t n) noexcept nogil
    void (*on_child_left)(Place* p, int32_t n) noexcept nogil
    void (*on_end_moved)(Place* p, int32_t n) noexcept nogil
    # What it learns of requests; owners.pxd says when. Without `arrive` there are no others.
    void (*arrive)(Place* p, int32_t owner, const int32_t* tokens, int64_t num_tokens, int64_t found) noexcept nogil
    void (*begin)(Place* p, int32_t owner) noexcept nogil
    void (*hint)(Place* p, int32_t owner, int64_t session, double seconds) noexcept nogil
    int64_t (*depart)(Place* p, int32_t owner, bint used, int64_t output, bint later) noexcept nogil
    void (*clock)(Place* p, int64_t now_ns) noexcept nogil
    bint (*remembers)(Place* p, int32_t root) noexcept nogil            # something of this namespace
    void (*on_purge)(Place* p, int32_t root) noexcept nogil             # the namespace was dropped
    void (*on_clear)(Place* p) noexcept nogil                           # every block without an owner was dropped

cdef enum:
    EXPIRED = 0             # retention class of blocks whose time to live is over: first to go
    NUM_CLASSES = 102       # EXPIRED, then priority 0..100
    NUM_LISTS = 204         # per domain: a class has two queues (T1/T2 of ARC, small/main of S3-FIFO; others use the first)

cdef enum:
    TAKEN_OVER = 2          # by a row: no handle names the owner any more

cdef enum Write:            # when runs are written to a closed tier
    WRITE_NEVER = 0
    WRITE_EVICTED = 1       # to make room
    WRITE_REUSED = 2        # and when a second request finds them
    WRITE_ALL = 3           # and when they are committed

cdef struct Fate:           # of a root only: last_use, born, failed and kids mean something
    int64_t last_use        # clock of the last release or insertion; of a root, the event ring's end after its last event
    int64_t expires         # caller's clock in nanoseconds, 0 = never
    int64_t transfer        # id of the transfer in flight, -1 none
    int64_t copying         # id of the transfer that copies it to a colder tier, -1 none
    int64_t born            # serial of the owner that inserted the run; of a root, how many owners its namespace has
    int32_t kids[MAX_TIERS]   # children by their `top`
    int32_t below[MAX_TIERS]  # children with a copy in the tier, and those on their way down to it
    int8_t top              # hottest tier; while being demoted, the tier it goes to
    uint8_t klass
    uint8_t frequency
    uint8_t failed          # a copy could not be read: matched never again, replaced or dropped
    uint8_t queue[MAX_TIERS]
    uint8_t matched         # some request has found it since it was committed
    uint8_t wanted          # bit per tier: it stands in the ring of runs to be copied
    uint8_t spoilt          # bit per tier: its copy there could not be read, and stays because others hang on it
    uint8_t tails           # of the boundary at its end: where its point has its tail, from where one moves (tails.pxd)
    int32_t sent            # its leading blocks that were sent to the store of claims, or came from there
    int32_t past            # the policy's own, NIL at first; with hazard what is remembered of its last block
    int32_t past_generation
    int64_t point           # clock of the last use of the point at the run's end; 0: there is none

cdef struct Owner:
    int32_t node            # deepest node of the owned path; a root when the path is empty
    int32_t node_generation
    int32_t num_blocks
    int32_t generation
    int64_t serial
    int64_t blocked         # transfer that ended the match early, -1 none
    uint8_t live            # 0, 1, or TAKEN_OVER
    int32_t pinned          # blocks counted against the pin budget
    uint8_t klass
    int64_t expires
    int32_t visit           # the policy's name for the request that it stands for, NIL if none
    int32_t first[MAX_GROUPS]   # of a short group: it holds the pages of blocks [first, num_blocks) of its path
    int32_t agreed          # blocks that the tree had of its prompt, usable or not, when it was matched

cdef struct Transfer:
    int64_t id
    int64_t group           # as in Move
    int32_t node            # NIL when the slot is free
    int32_t generation
    int32_t num_blocks
    bint is_tail            # of the boundary at the end of `node`: tail_moves.pxd
    int64_t number          # counts transfers in the order they were decided
    int64_t until           # monotonic ns by which a promotion should have arrived, 0 = no deadline
    int8_t src
    int8_t dst
    bint promotes
    bint copies             # then `num_blocks` may be those of several nodes by now, the deepest of which is `node`
    bint void               # its source was found bad
    int32_t* dst_ids        # [num_blocks], owned; of a tail by group, its blocks in order, NIL for those that stay where they are
    int64_t clock           # of a tail: its point, when it began
    int32_t frees[MAX_GROUPS]   # of a tail: pages that its source has more once it has left

cdef struct Domain:         # a namespace with a quota is evicted from its own lists; all others share domain 0
    int32_t root
    int32_t quota[MAX_TIERS]    # blocks, -1 = none
    int64_t usage[MAX_TIERS]    # blocks that are there or on their way there; what is being demoted from there has left
    uint64_t mask[MAX_TIERS][4]  # bit per list: may be non-empty

cdef struct Wanted:         # a run to be copied, with what its tier lacks of its path
    int32_t node
    int32_t generation
    int32_t tier
    int32_t left            # blocks that its tier lacked of its path when some of them were started; 0: none were

cdef struct Expiry:
    int64_t expires
    int32_t depth
    int32_t node
    int32_t generation

cdef struct Counters:
    int64_t acquired
    int64_t hit_blocks[MAX_TIERS]
    int64_t inserted
    int64_t adopted
    int64_t promoted[MAX_TIERS]     # blocks, by the tier they came from
    int64_t demoted[MAX_TIERS]      # blocks, by the tier they came from
    int64_t dropped[MAX_TIERS]      # blocks lost, by the tier that held them last
    int64_t trimmed[MAX_TIERS]      # redundant copies given up
    int64_t failed_promotions       # blocks
    int64_t failed_demotions
    int64_t late_promotions         # given up before they began: the colder copy stays
    int64_t refused_demotions       # never begun: not worth their writing
    int64_t copied[MAX_TIERS]       # blocks, by the tier they were copied to
    int64_t failed_copies
    int64_t refused_copies
    int64_t blocked_matches
    int64_t refused_by_quota
    int64_t expired
    int64_t lagging                 # blocks that the tree had of a prompt behind the longest prefix that could be used

cdef struct Groups:                 # of layers that see equally far back (tails.pxd)
    int32_t num                     # with the one that sees everything, number 0
    Pool* pools[MAX_TIERS][MAX_GROUPS]
    int32_t window[MAX_GROUPS]      # blocks that are needed before a boundary, of a short group; 0 where it has chunks
    int32_t chunk[MAX_GROUPS]       # blocks of a chunk; 0 where it has a window
    int32_t free_every              # boundaries where no short group needs anything: every so many blocks; 0: there are none
    int32_t point_every             # boundaries that become points as they are passed: every so many blocks; 0: none
    int64_t num_points
    Links points[MAX_TIERS]         # by node: from cold to hot, a list for each class of each domain
    int64_t pending[MAX_TIERS][MAX_GROUPS]  # pages of short groups that transfers in flight will free

cdef struct Place:
    Tree* tree
    Pool* pools[MAX_TIERS]          # NULL where there is no such tier
    int32_t num_tiers
    const Policy* policy
    void* state                     # the policy's own
    bint oldest_first
    bint inclusive[MAX_TIERS]       # keep the copy there when it is promoted to the device
    bint closed[MAX_TIERS]
    bint beside[MAX_TIERS]          # of claims
    int32_t coldest                 # of the tiers that are not beside
    uint8_t sends_when              # a Write: when runs are sent to the store behind the tier of claims
    uint8_t writes[MAX_TIERS]       # a Write, of closed tiers
    int64_t clock
    int64_t serial
    Fate* fates                     # [fates_capacity], by node
    int32_t fates_capacity
    Links links[MAX_TIERS]
    int32_t* domain_of              # [fates_capacity], by root node
    Domain* domains
    int32_t num_domains
    int32_t free_domain             # list through `root`: of namespaces that were forgotten
    int64_t size[MAX_TIERS][2]      # resident blocks by queue
    uint8_t* kind_of                # [fates_capacity], by root: which model its requests teach
    Owner* owners
    int32_t num_owners
    int32_t owners_capacity
    int32_t free_owner              # list through `node`
    int32_t live_owners
    Transfer* transfers
    int32_t transfers_capacity
    int32_t free_transfer           # list through `num_blocks`
    int32_t in_flight
    int32_t num_copying             # of those in flight, the ones that copy
    int32_t num_reading[MAX_TIERS]  # promotions in flight, by the tier they come from
    Wanted* wanted                  # ring
    int64_t wanted_capacity
    int64_t wanted_head
    int64_t num_wanted
    Wanted* sends                   # ring, of runs to be sent
    int64_t sends_capacity
    int64_t sends_head
    int64_t num_sends
    int64_t sends_dropped           # wishes that came to nothing
    bint send_news                  # a wish came since the dispatcher looked
    int64_t num_started             # transfers decided so far
    int64_t batch                   # the first transfer of the decision under way: what it decides ends in its order
    int64_t pending[MAX_TIERS]      # blocks that transfers in flight will free
    bint no_memory                  # room could not be made for want of memory, since a caller cleared this
    pthread_cond_t* decided         # a Dispatch's, told of every new move; NULL without one
    Move* moves                     # decided, not yet taken
    int64_t num_moves
    int64_t moves_capacity
    Expiry* expiries                # binary heap
    int64_t num_expiries
    int64_t expiries_capacity
    bint has_remainders             # or had some: partly filled blocks
    Groups* groups                  # NULL: all layers see everything, or keep all of it all the same
    int64_t pin_budget
    int64_t pinned_blocks
    Ring events
    Counters counters

# The pool of a tier, of the group of layers that a move's `lane` names; NULL: there is none.
cdef inline Pool* pool_in(Place* p, int32_t tier, int32_t lane) noexcept nogil:
    if tier < 0 or tier >= MAX_TIERS or lane < 0 or (lane > 0 and (p.groups == NULL or lane >= p.groups.num)):
        return NULL
    return p.groups.pools[tier][lane] if lane > 0 else p.pools[tier]
