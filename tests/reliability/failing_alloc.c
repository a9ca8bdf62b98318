/* failing_alloc: one allocation that fails, chosen by its number, in the thread that asked for it.

   Preloaded (LD_PRELOAD), it stands before malloc, calloc, realloc and the aligned allocators of the GNU C library. While
   a thread is armed, its allocations are counted from 1; those from `first` to `last` fail with ENOMEM, and all others
   pass through. Other threads never meet a failure. Python's own allocations come this way with PYTHONMALLOC=malloc. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

struct armed {
    int64_t on, seen, first, last, failed;
    const void *caller; /* where the latest failure returned to */
};

/* In the static block of each thread, so that reaching it allocates nothing. */
static __thread __attribute__((tls_model("initial-exec"))) struct armed armed;

#define DEPTH 14 /* frames that are looked at for a spared library */

static uintptr_t spared_first, spared_end;

/* Whether this allocation was asked for by the library that is spared, or by the interpreter on its behalf. */
static int is_spared(void)
{
    if (!spared_end)
        return 0;
    void *frames[DEPTH];
    armed.on = 0; /* backtrace may allocate */
    int count = backtrace(frames, DEPTH), spared = 0;
    armed.on = 1;
    for (int i = 0; i < count; i++)
        spared |= (uintptr_t)frames[i] >= spared_first && (uintptr_t)frames[i] < spared_end;
    return spared;
}

/* Counts an allocation; whether it is one that fails. */
static int fails(const void *caller)
{
    if (!armed.on)
        return 0;
    armed.seen++;
    if (armed.seen < armed.first || armed.seen > armed.last)
        return 0;
    if (is_spared()) { /* the next one instead */
        armed.first++;
        armed.last++;
        return 0;
    }
    armed.failed++;
    armed.caller = caller;
    errno = ENOMEM;
    return 1;
}

#define FAILS fails(__builtin_return_address(0))

void *malloc(size_t size)
{
    return FAILS ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return FAILS ? NULL : __libc_calloc(count, size);
}

/* Of realloc(data, 0), which frees, the outcome is no failure to meet. */
void *realloc(void *data, size_t size)
{
    return size && FAILS ? NULL : __libc_realloc(data, size);
}

void *memalign(size_t alignment, size_t size)
{
    return FAILS ? NULL : __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return FAILS ? NULL : __libc_memalign(alignment, size);
}

int posix_memalign(void **data, size_t alignment, size_t size)
{
    if (FAILS)
        return ENOMEM;
    void *got = __libc_memalign(alignment, size);
    if (!got)
        return ENOMEM;
    *data = got;
    return 0;
}

/* In this thread, the allocations from number `first` to number `last` from now on fail (first = 0: none). */
void failing_alloc_arm(int64_t first, int64_t last)
{
    armed = (struct armed) {.on = 1, .seen = 0, .first = first, .last = first ? last : -1};
}

/* From now on no allocation fails that code at addresses from `first` up to `end` asked for. */
void failing_alloc_spare(uintptr_t first, uintptr_t end)
{
    void *frame;
    backtrace(&frame, 1); /* loads what it needs */
    spared_first = first;
    spared_end = end;
}

/* No more of them fail; how many allocations were seen. */
int64_t failing_alloc_disarm(void)
{
    armed.on = 0;
    return armed.seen;
}

/* How many failed since this thread was armed last. */
int64_t failing_alloc_failed(void)
{
    return armed.failed;
}

/* The file of the program or library that asked for the one that failed last, or NULL. */
const char *failing_alloc_where(void)
{
    Dl_info info;
    return armed.failed && dladdr(armed.caller, &info) ? info.dli_fname : NULL;
}
