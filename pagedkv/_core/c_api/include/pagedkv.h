/* pagedkv.h: pagedkv's core for C99 and C++11. No call of a step or a request runs Python or takes the GIL.
 *
 * The core decides which block holds which tokens, in which tier, and which blocks leave when room is short. It
 * works on block numbers and tokens, never on KV: the engine owns the memory and copies the bytes.
 * docs/own_memory.md builds an engine with these calls.
 *
 *     #include <Python.h>
 *     #include <pagedkv.h>                             compile with -I and what pagedkv.get_include() returns
 *     const pagedkv_api *kv = import_pagedkv();        once, with the GIL; NULL: a Python exception is set
 *     kv->table_open(table, ...);                      from now on, in any thread
 *
 * A file that does not import may leave out Python.h; it is given the `const pagedkv_api *` of one that does.
 *
 * Results. Functions that return int return PAGEDKV_OK or a negative code. After a code nothing has changed, and
 * output arguments hold unspecified values, unless the function says otherwise. `bad`, which may be NULL, is
 * set with a code that names an entry: to the first such entry's index. Counts and arrays: a negative count, or NULL
 * for an array of one entry or more, an output or a handle of an object, is PAGEDKV_E_ARGUMENT in every function.
 * Arrays belong to the caller; no call keeps a pointer to them.
 *
 * Threads. Every call may come from any thread, with the GIL or without it. A placement, its pools and its tables
 * share one mutex, which a call holds from its first look to its last change; so do Python's calls on the same
 * objects. A thread that holds the GIL and finds the mutex taken lets go of the GIL while it waits. A row and its
 * steps belong to one thread at a time. Functions marked (GIL) take the GIL themselves, so that the interpreter must
 * be initialized, and the thread that initialized it must let go of the GIL (PyEval_SaveThread) before another
 * thread makes such a call. A process that was forked off must not call anything.
 *
 * Numbers. A row, an owner, a namespace and a transfer are int64 handles: one that was given back is never valid
 * again. Namespace 0 always exists. Block ids are int32, from 0 to the pool's size - 1. Tiers: 0 the device, 1 host,
 * 2 disk.
 *
 * Not covered: groups of layers that do not see everything (PAGEDKV_E_UNSUPPORTED), rows that follow others within a
 * step, write-behind, remote claims, retention, quotas, pins and events. Python's calls on the same objects reach
 * all of these. */
#ifndef PAGEDKV_H
#define PAGEDKV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PAGEDKV_ABI_MAJOR 1 /* raised by what breaks compiled callers */
#define PAGEDKV_ABI_MINOR 0 /* raised by functions added at the end of pagedkv_api */

enum {
    PAGEDKV_OK = 0,
    PAGEDKV_E_ARGUMENT = -1,     /* never allowed: NULL, a negative count, an object of another kind */
    PAGEDKV_E_MEMORY = -2,       /* malloc failed */
    PAGEDKV_E_RANGE = -3,        /* an id, a tier, a namespace or a number of tokens that there is not */
    PAGEDKV_E_UNDERFLOW = -4,    /* a reference that the caller does not have */
    PAGEDKV_E_OVERFLOW = -5,     /* a reference count would pass 2**31 - 1 */
    PAGEDKV_E_STALE = -6,        /* a handle that was given back, or never given out */
    PAGEDKV_E_BLOCKS = -7,       /* too few blocks */
    PAGEDKV_E_DUPLICATE = -8,    /* the same row twice in one batch */
    PAGEDKV_E_STATE = -10,       /* not now: the function says when */
    PAGEDKV_E_ROOM = -11,        /* an array of the caller is too short */
    PAGEDKV_E_ROWS = -12,        /* all rows of the table are in use */
    PAGEDKV_E_UNSUPPORTED = -13  /* an object that this interface does not cover: one with groups of layers */
};

enum {
    PAGEDKV_NIL = -1,       /* pads block tables; no owner; no limit */
    PAGEDKV_MAX_TIERS = 4,
    PAGEDKV_MAX_RUN = 256   /* blocks of one transfer at most */
};

enum { /* how a transfer ended, for placement_complete */
    PAGEDKV_FAILED = 0,     /* tried, and its bytes did not arrive or were wrong */
    PAGEDKV_ARRIVED = 1,
    PAGEDKV_NOT_TRIED = 2   /* given up before anything was read or written */
};

typedef struct pagedkv_pool pagedkv_pool;           /* one tier's blocks, with reference counts */
typedef struct pagedkv_placement pagedkv_placement; /* a prefix tree and its pools: where each cached block lies */
typedef struct pagedkv_table pagedkv_table;         /* running sequences, as rows of tokens and blocks */

typedef struct pagedkv_options {
    int32_t block_size;                     /* tokens of a block, 1 to 256 */
    int32_t num_tiers;                      /* 1 to PAGEDKV_MAX_TIERS */
    int32_t blocks[PAGEDKV_MAX_TIERS];      /* of each tier's pool; pool i holds blocks 0 to blocks[i] - 1 */
    const char *policy;                     /* of eviction: "lru", "arc", "s3fifo", "hazard"; NULL: "lru" */
} pagedkv_options;

typedef struct pagedkv_counts { /* blocks */
    int64_t capacity;   /* that exist now: free + live + cached */
    int64_t max;        /* to which the pool may grow */
    int64_t free;
    int64_t live;       /* that a sequence, an owner or a transfer holds */
    int64_t cached;     /* that the tree alone holds: eviction frees them */
    int64_t available;  /* that pool_alloc could hand out now */
} pagedkv_counts;

typedef struct pagedkv_found { /* of a prefix that is now owned */
    int32_t num_blocks; /* whole blocks */
    int32_t num_cold;   /* of those, below the device */
    int64_t blocked;    /* the transfer in flight that ended the match early, or PAGEDKV_NIL */
} pagedkv_found;

typedef struct pagedkv_move { /* copy this block */
    int64_t transfer;   /* the run that it belongs to: all its blocks arrive, or none */
    int32_t src_block;
    int32_t dst_block;
    int32_t depth;      /* blocks of the prefix before this one */
    int8_t src_tier;
    int8_t dst_tier;
    int8_t reason;      /* 0: eviction or promotion; 1, 2: a copy to a closed tier */
    int8_t reserved;
} pagedkv_move;

typedef struct pagedkv_row {
    int32_t num_tokens;
    int32_t num_computed;   /* whose KV is written */
    int32_t num_blocks;
    int32_t num_committed;  /* of those, in the tree */
} pagedkv_row;

/* The arrays of a step of n rows. The caller sets the first part; table_step fills the arrays and the rest. */
typedef struct pagedkv_step {
    int32_t *block_tables;  /* [n][stride or width], padded with PAGEDKV_NIL */
    int64_t tables_room;    /* elements */
    int64_t stride;         /* columns of a row of block_tables; 0: `width` */
    int32_t *seq_lens;      /* [n], KV tokens with those of this step */
    int32_t *q_indptr;      /* [n + 1], where each row's new tokens begin in the next three */
    int32_t *positions;     /* [num_tokens] */
    int32_t *tokens;        /* [num_tokens] */
    int64_t *slot_mapping;  /* [num_tokens], where each one's KV goes: block * block_size + offset */
    int64_t tokens_room;    /* elements of each of the last three */
    int32_t *copies;        /* [num_copies][2], source and destination: blocks to copy before anything is written */
    int64_t copies_room;    /* pairs; 0 where no row was forked */

    int64_t number;         /* of this step, for table_commit and table_cancel */
    int64_t num_tokens;
    int64_t num_copies;
    int64_t num_new_blocks; /* that the step allocated; with PAGEDKV_E_BLOCKS those that it needs */
    int64_t width;          /* blocks of the widest row */
} pagedkv_step;

typedef struct pagedkv_api {
    int32_t abi_major;
    int32_t abi_minor;
    size_t size;            /* of this struct in the library */

    /* The meaning of a code, a constant text. */
    const char *(*describe)(int code);

    /* ---- objects. Each handle that a call hands out is given back once with its `_delete`, when no call uses it
     * any more. A table keeps its placement, and a placement its pools. NULL may be deleted. `object` is the address of
     * a Python object, which is borrowed; the handle holds a reference of its own. E_STATE: a signal handler of Python
     * raised within the call. */

    /* (GIL) A fixed pool of num_blocks, or one that grows by `chunk` blocks up to max_blocks. max_blocks =
     * num_blocks: fixed. E_ARGUMENT (chunk < 1 or max_blocks < num_blocks, too), E_MEMORY. */
    int (*pool_new)(int32_t num_blocks, int32_t max_blocks, int32_t chunk, pagedkv_pool **pool);
    /* (GIL) A pagedkv.core.BlockPool. E_ARGUMENT: another object. E_UNSUPPORTED: a pool of an ExtentPool. */
    int (*pool_of)(void *object, pagedkv_pool **pool);
    void (*pool_delete)(pagedkv_pool *pool); /* (GIL) */
    /* (GIL) An empty tree with a pool for each tier. For other options make the object in Python, and use placement_of.
     * E_ARGUMENT: an option out of range, or a policy without that name. E_MEMORY. */
    int (*placement_new)(const pagedkv_options *options, pagedkv_placement **placement);
    /* (GIL) A pagedkv.core.Placement. Not a KVCache's, whose threads take its moves. E_ARGUMENT, E_UNSUPPORTED. */
    int (*placement_of)(void *object, pagedkv_placement **placement);
    void (*placement_delete)(pagedkv_placement *placement); /* (GIL) */
    /* (GIL) The pool of a tier. E_RANGE: there is none. */
    int (*placement_pool)(pagedkv_placement *placement, int32_t tier, pagedkv_pool **pool);
    /* (GIL) The namespace with this name, made at its first use: what one namespace caches, no other finds. An empty
     * name is namespace 0. E_MEMORY. */
    int (*placement_namespace)(pagedkv_placement *placement, const void *name, size_t size, int64_t *ns);
    /* (GIL) A table of max_rows rows over a placement. E_ARGUMENT (max_rows beyond 1 to 2**24, too), E_MEMORY. */
    int (*table_new)(pagedkv_placement *placement, int32_t max_rows, pagedkv_table **table);
    /* (GIL) A pagedkv.core.BlockTable. E_ARGUMENT, E_UNSUPPORTED. */
    int (*table_of)(void *object, pagedkv_table **table);
    /* (GIL) Release its rows first, or their blocks stay in use. */
    void (*table_delete)(pagedkv_table *table);

    /* ---- blocks */

    /* Takes n blocks with one reference each, the caller's: ids [n]. Evicts nothing. E_BLOCKS. */
    int (*pool_alloc)(pagedkv_pool *pool, int32_t n, int32_t *ids);
    /* One more reference on each of ids [n]. E_RANGE: never handed out. E_UNDERFLOW: free, or the tree's.
     * E_OVERFLOW. */
    int (*pool_share)(pagedkv_pool *pool, const int32_t *ids, int32_t n, int32_t *bad);
    /* Gives back one reference for each entry of ids [n]; a block without references is free. An id may stand there
     * as often as the caller has references. E_RANGE. E_UNDERFLOW: there is none left, or the tree has it. */
    int (*pool_free)(pagedkv_pool *pool, const int32_t *ids, int32_t n, int32_t *bad);
    int (*pool_counts)(pagedkv_pool *pool, pagedkv_counts *counts);

    /* ---- prefixes. An owner holds a cached prefix: eviction passes it over until placement_release, or until
     * table_open has taken the owner over. `ns` that no call handed out: E_RANGE. */

    /* Looks up the longest cached prefix of tokens [n], 2**30 at most, in whole blocks: its ids in blocks [num], and
     * each one's hottest tier in tiers [num]. Owns nothing: the answer may be over at once. E_ROOM: `room` elements
     * are too few for *num. E_MEMORY. */
    int (*placement_match)(pagedkv_placement *placement, int64_t ns, const int32_t *tokens, int64_t n, int32_t *blocks,
                           uint8_t *tiers, int64_t room, int64_t *num);
    /* Owns the longest cached prefix of tokens [n], 2**30 at most, and of it max_blocks blocks at most (PAGEDKV_NIL:
     * no limit), in whatever tiers it lies. A request that computes its last token asks for (n - 1) / block_size.
     * `found` may be NULL. E_RANGE, E_MEMORY. */
    int (*placement_acquire)(pagedkv_placement *placement, int64_t ns, const int32_t *tokens, int64_t n,
                             int64_t max_blocks, int64_t *owner, pagedkv_found *found);
    /* Decides moves that bring the owned blocks below the device up to it. Reserve room for them first. *started:
     * transfers. E_STALE. E_BLOCKS: the device has fewer than *needed blocks available. E_MEMORY: *started transfers
     * have begun. */
    int (*placement_promote)(pagedkv_placement *placement, int64_t owner, int32_t *started, int64_t *needed);
    /* Keeps the front of the owned prefix that is on the device, *num_blocks blocks, and lets go of the rest.
     * E_STALE. */
    int (*placement_settle)(pagedkv_placement *placement, int64_t owner, int32_t *num_blocks);
    /* The owned blocks, as placement_match has them. E_STALE, E_ROOM. */
    int (*placement_path)(pagedkv_placement *placement, int64_t owner, int32_t *blocks, uint8_t *tiers, int64_t room,
                          int64_t *num);
    int (*placement_release)(pagedkv_placement *placement, int64_t owner); /* E_STALE */
    /* Makes room for n blocks in a tier, by dropping or by moves. *missing: blocks that are still too few. If not 0,
     * take and complete the moves and ask again; if nothing is in flight then, sequences hold everything. E_RANGE:
     * no such tier. E_MEMORY: earlier decisions stand. */
    int (*placement_reserve)(pagedkv_placement *placement, int32_t tier, int32_t n, int64_t *missing);
    /* Hands out decided moves, *num of them, in whole transfers, as many as `room` has room for; ask again until
     * *num is 0. Source and destination stay reserved until the transfer is completed: copies may run in other
     * threads. E_ROOM: the next transfer has *num blocks. PAGEDKV_MAX_RUN are always enough. */
    int (*placement_take_moves)(pagedkv_placement *placement, pagedkv_move *moves, int32_t room, int32_t *num);
    /* Says how transfers ended: for each entry of transfers [n] one of PAGEDKV_ARRIVED, _FAILED, _NOT_TRIED in
     * outcomes [n]. Name a transfer once, or once for each of its blocks; of several entries all must have arrived.
     * Every transfer that was handed out must be completed, and no other one. With a closed tier, several calls
     * come in the order of the decisions. E_STALE: a transfer is not in flight. E_STATE: it was not handed out yet. E_MEMORY.
     * *bad (may be NULL): the entry. Nothing has changed then. */
    int (*placement_complete)(pagedkv_placement *placement, const int64_t *transfers, const uint8_t *outcomes,
                              int32_t n, int32_t *bad);
    int (*placement_in_flight)(pagedkv_placement *placement, int64_t *num); /* transfers decided and not completed */
    /* Takes n blocks of the device, evicting others where that needs no move: over one tier. E_BLOCKS,
     * E_MEMORY: blocks that it evicted stay evicted. */
    int (*placement_allocate)(pagedkv_placement *placement, int32_t n, int32_t *ids);
    /* For engines without a table: the KV of tokens [n * block_size], which follow the owned prefix, is in blocks
     * [n], of which the caller holds one reference each. The references of the first *done entries pass to the
     * owner, and an entry is rewritten where the tree has the block already; the rest stay the caller's. E_STALE.
     * E_STATE: a block is free, the tree's, or stands there twice. */
    int (*placement_insert)(pagedkv_placement *placement, int64_t owner, const int32_t *tokens, int32_t *blocks,
                            int32_t n, int32_t *done, int32_t *bad);

    /* ---- rows */

    /* A new sequence that begins with tokens [n], 2**30 at most. With `owner` the row takes the owner over, whose
     * prefix must be settled and of these tokens; with PAGEDKV_NIL it owns the longest prefix on the device. `leave`
     * tokens at least are left to compute, in whole blocks; 1 leaves one to sample from. *num_cached: leading tokens
     * whose KV is there. E_RANGE, E_ROWS, E_STALE: the owner; E_STATE: it owns no settled prefix of these tokens in
     * `ns`. E_MEMORY. */
    int (*table_open)(pagedkv_table *table, int64_t ns, const int32_t *tokens, int64_t n, int32_t leave, int64_t owner,
                      int64_t *row, int64_t *num_cached);
    /* Appends one token to each of rows [n]: tokens [n]. E_STALE, E_DUPLICATE, E_MEMORY. */
    int (*table_append)(pagedkv_table *table, const int64_t *rows, const int32_t *tokens, int32_t n, int32_t *bad);
    /* Appends tokens [n] to a row: a further turn, or a draft. E_STALE, E_MEMORY. */
    int (*table_extend)(pagedkv_table *table, int64_t row, const int32_t *tokens, int64_t n);
    /* Blocks that table_step would allocate for the same rows, to be reserved before it. Codes as there. */
    int (*table_blocks_needed)(pagedkv_table *table, const int64_t *rows, int32_t n, const int32_t *q_lens,
                               int32_t lookahead, int64_t *blocks, int32_t *bad);
    /* Plans a step: q_lens [n] tokens of each of rows [n] (NULL: all that are not computed), with blocks for
     * `lookahead`, at most 2**20, more. Allocates the blocks, and fills the arrays of `step`. A step that is neither
     * committed nor cancelled is over when its rows are stepped again. E_STALE, E_DUPLICATE, E_RANGE: a q_len below
     * 0 or beyond the tokens left to compute. E_ROOM: the step has num_tokens, num_copies and width. E_BLOCKS: it needs
     * num_new_blocks; over one tier all that could be evicted for it was, over several reserve first. E_MEMORY. */
    int (*table_step)(pagedkv_table *table, const int64_t *rows, int32_t n, const int32_t *q_lens, int32_t lookahead,
                      pagedkv_step *step, int32_t *bad);
    /* The copies of a step, pairs [n][2], were made: their sources may be let go of. NULL and 0: all steps' so far. */
    int (*table_copies_done)(pagedkv_table *table, const int32_t *copies, int32_t n);
    /* The KV of the step's tokens of rows [n] is written: full blocks are cached from now on. *committed: blocks
     * that the tree took or already had. `number`: of the step; 0: whatever step each row is in. E_STALE: a row was
     * released, or the step is over for it. E_STATE: a row follows another one (by Python), which is not committed.
     * E_DUPLICATE. E_MEMORY: only with rows that follow others; the others are committed. */
    int (*table_commit)(pagedkv_table *table, const int64_t *rows, int32_t n, int64_t number, int64_t *committed,
                        int32_t *bad);
    /* The step's tokens of rows [n] were not written. Rows that are in another step than `number`, or were released,
     * are passed over; number 0: whatever step each row is in. */
    int (*table_cancel)(pagedkv_table *table, const int64_t *rows, int32_t n, int64_t number);
    /* n more rows with the same tokens and blocks: forks [n]. Full blocks are shared; the next step that writes into
     * a shared, partly filled one lists a copy. E_STALE, E_ROWS, E_OVERFLOW, E_MEMORY. E_STATE: it is in a step. */
    int (*table_fork)(pagedkv_table *table, int64_t row, int32_t n, int64_t *forks);
    /* Keeps the first num_tokens tokens of a row, and gives back blocks beyond them. A committed block that is cut
     * has to be computed again. The row's step is over. E_STALE. E_RANGE: the row has fewer. E_MEMORY: its step is
     * over, too. */
    int (*table_truncate)(pagedkv_table *table, int64_t row, int32_t num_tokens);
    /* Ends a row: its committed blocks stay cached, its others are free. keep_remainder not 0: the tree keeps the
     * last, partly filled block, too, for Python's partial hits. E_STALE. */
    int (*table_release)(pagedkv_table *table, int64_t row, int keep_remainder);
    int (*table_row)(pagedkv_table *table, int64_t row, pagedkv_row *state); /* E_STALE */
    /* The row's tokens, or its block ids: *num elements. E_STALE. E_ROOM: `room` is less than *num. */
    int (*table_tokens)(pagedkv_table *table, int64_t row, int32_t *tokens, int64_t room, int64_t *num);
    int (*table_blocks)(pagedkv_table *table, int64_t row, int32_t *blocks, int64_t room, int64_t *num);
} pagedkv_api;

/* `api` if a caller that was compiled with this header can call it, else NULL. */
static inline const pagedkv_api *pagedkv_checked(const void *api) {
    const pagedkv_api *found = (const pagedkv_api *)api;
    if (found == NULL || found->abi_major != PAGEDKV_ABI_MAJOR || found->abi_minor < PAGEDKV_ABI_MINOR)
        return NULL;
    return found;
}

#ifdef Py_PYTHON_H
#define PAGEDKV_MODULE "pagedkv._core.c_api.api"

/* The functions, for the life of the process. Needs the GIL. NULL: ImportError, or another exception of the import,
 * is set. */
static inline const pagedkv_api *import_pagedkv(void) {
    const pagedkv_api *found = NULL;
    const void *api;
    PyObject *module = PyImport_ImportModule(PAGEDKV_MODULE);
    PyObject *capsule = module != NULL ? PyObject_GetAttrString(module, "CAPSULE") : NULL;
    if (capsule != NULL && (api = PyCapsule_GetPointer(capsule, PAGEDKV_MODULE ".CAPSULE")) != NULL) {
        found = pagedkv_checked(api);
        if (found == NULL)
            PyErr_Format(PyExc_ImportError,
                         "this module was compiled with the pagedkv.h of ABI %d.%d, and the installed pagedkv has "
                         "%d.%d: compile it again with the header at pagedkv.get_include(), or install the pagedkv "
                         "that it was made for",
                         PAGEDKV_ABI_MAJOR, PAGEDKV_ABI_MINOR, (int)((const pagedkv_api *)api)->abi_major,
                         (int)((const pagedkv_api *)api)->abi_minor);
    }
    Py_XDECREF(capsule);
    Py_XDECREF(module);
    return found; /* the module, which has the functions, is never unloaded */
}
#endif

#ifdef __cplusplus
}
#endif

#endif
