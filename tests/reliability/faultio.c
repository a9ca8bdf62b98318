/* faultio: the operating system's faults, for one directory, from inside the process.

   Preloaded (LD_PRELOAD), it stands before the libc functions through which a store reaches its files. A call is
   counted if its descriptor or path lies below `faultio.root`, or if it copies from this process's own memory
   (process_vm_readv). The n-th counted call then meets the fault planned for n: it fails, transfers half, or the
   process ends before or within it. With `logging` on, whatever changes files is written down with its bytes.

   Everything else passes through untouched, and so does everything while `root` is empty. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAIL = 1, TORN, SHORT, EXIT_BEFORE, EXIT_WITHIN };
enum { CREATE = 1, WRITE, CUT, GROW, SYNC, RENAME, UNLINK };
enum { MAX_FAULTS = 16, NAME_BYTES = 32, EXIT_CODE = 9 };

struct fault {
    int64_t first, last; /* counted calls that meet it, from 1 */
    int32_t action, number; /* number: the errno of FAIL and TORN */
};

struct {
    char root[PATH_MAX];
    _Atomic int64_t calls, fired;
    int64_t num_faults;
    struct fault faults[MAX_FAULTS];
    char last_call[NAME_BYTES]; /* the call that met the latest fault */
    int64_t logging, log_bytes;
    char *log;
} faultio;

struct entry { /* followed by the name and the data */
    int64_t kind, file, offset, name_bytes, data_bytes;
};

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t log_room;

static int below_path(const char *path)
{
    size_t length = strlen(faultio.root);
    return length && !strncmp(path, faultio.root, length) && (!path[length] || path[length] == '/');
}

static int below(int fd)
{
    char link[NAME_BYTES], path[PATH_MAX];
    int before = errno;
    if (!faultio.root[0] || fd < 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0)
        return 0;
    path[length] = 0;
    return below_path(path);
}

static int below_at(int fd, const char *path)
{
    return path[0] == '/' ? below_path(path) : below(fd);
}

/* Counts a call; the fault it meets, or NULL. */
static const struct fault *next(const char *name)
{
    int64_t call = atomic_fetch_add(&faultio.calls, 1) + 1;
    for (int64_t i = 0; i < faultio.num_faults; i++) {
        const struct fault *fault = &faultio.faults[i];
        if (call < fault->first || call > fault->last)
            continue;
        if (fault->action == EXIT_BEFORE)
            _exit(EXIT_CODE);
        atomic_fetch_add(&faultio.fired, 1);
        snprintf(faultio.last_call, sizeof faultio.last_call, "%s", name);
        return fault;
    }
    return NULL;
}

static int fails(const struct fault *fault)
{
    return fault && fault->action == FAIL;
}

static size_t allowed(const struct fault *fault, size_t count)
{
    return fault && count > 1 ? count / 2 : count;
}

static void finish(const struct fault *fault)
{
    if (fault && fault->action == EXIT_WITHIN)
        _exit(EXIT_CODE);
}

/* What a transfer answers that has moved as much as it was allowed to. */
static ssize_t moved(const struct fault *fault, ssize_t count)
{
    finish(fault);
    if (fault && fault->action == TORN) {
        errno = fault->number;
        return -1;
    }
    return count;
}

static int64_t number_of(int fd)
{
    struct statx info;
    return statx(fd, "", AT_EMPTY_PATH, STATX_INO, &info) ? 0 : (int64_t) info.stx_ino;
}

static void note(int64_t kind, int fd, int64_t offset, const char *name, const void *data, size_t count)
{
    if (!faultio.logging)
        return;
    const char *base = strrchr(name, '/') ? strrchr(name, '/') + 1 : name;
    struct entry entry = {kind, fd < 0 ? 0 : number_of(fd), offset, (int64_t) strlen(base), (int64_t) count};
    size_t wanted = sizeof entry + strlen(base) + count;
    pthread_mutex_lock(&log_lock);
    while (faultio.log_bytes + (int64_t) wanted > log_room) {
        log_room = log_room ? 2 * log_room : 1 << 20;
        if (!(faultio.log = realloc(faultio.log, log_room)))
            abort();
    }
    char *at = faultio.log + faultio.log_bytes;
    memcpy(at, &entry, sizeof entry);
    memcpy(at + sizeof entry, base, strlen(base));
    if (count)
        memcpy(at + sizeof entry + strlen(base), data, count);
    faultio.log_bytes += (int64_t) wanted;
    pthread_mutex_unlock(&log_lock);
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) \
        *(void **) &real = dlsym(RTLD_NEXT, #name)

#define FAIL_WITH(answer) \
    do { \
        errno = fault->number; \
        return answer; \
    } while (0)

/* A call that answers 0 or -1 and moves no data; `noted` runs after a success. */
#define PLAIN(name, parameters, arguments, watched, noted) \
    int name parameters \
    { \
        static int (*real) parameters; \
        if (!real) \
            *(void **) &real = dlsym(RTLD_NEXT, #name); \
        if (!(watched)) \
            return real arguments; \
        const struct fault *fault = next(#name); \
        if (fails(fault)) \
            FAIL_WITH(-1); \
        int result = real arguments; \
        if (!result) \
            noted; \
        finish(fault); \
        return result; \
    }

#define NOTHING (void) 0

PLAIN(fsync, (int fd), (fd), below(fd), note(SYNC, fd, 0, "", NULL, 0))
PLAIN(fdatasync, (int fd), (fd), below(fd), note(SYNC, fd, 0, "", NULL, 0))
PLAIN(ftruncate, (int fd, off_t size), (fd, size), below(fd), note(CUT, fd, size, "", NULL, 0))
PLAIN(flock, (int fd, int how), (fd, how), below(fd), NOTHING)
PLAIN(fstat, (int fd, struct stat *info), (fd, info), below(fd), NOTHING)
PLAIN(lstat, (const char *path, struct stat *info), (path, info), below_path(path), NOTHING)
PLAIN(fstatat, (int dir, const char *path, struct stat *info, int how), (dir, path, info, how), below_at(dir, path),
      NOTHING)
PLAIN(fstatvfs, (int fd, struct statvfs *info), (fd, info), below(fd), NOTHING)
PLAIN(mkdir, (const char *path, mode_t mode), (path, mode), below_path(path), NOTHING)
PLAIN(rmdir, (const char *path), (path), below_path(path), NOTHING)
PLAIN(unlink, (const char *path), (path), below_path(path), note(UNLINK, -1, 0, path, NULL, 0))
PLAIN(unlinkat, (int dir, const char *path, int how), (dir, path, how), below_at(dir, path),
      note(UNLINK, -1, 0, path, NULL, 0))
PLAIN(rename, (const char *from, const char *to), (from, to), below_path(from),
      note(RENAME, -1, 0, from, to, strlen(to)))
PLAIN(renameat, (int from_dir, const char *from, int to_dir, const char *to), (from_dir, from, to_dir, to),
      below_at(from_dir, from), note(RENAME, -1, 0, from, to, strlen(to)))

/* The descriptor is gone whatever close answers. */
int close(int fd)
{
    REAL(int, close, int);
    if (!below(fd))
        return real(fd);
    const struct fault *fault = next("close");
    int result = real(fd);
    finish(fault);
    if (fails(fault))
        FAIL_WITH(-1);
    return result;
}

/* These two answer with an error's number and leave errno alone. */
int posix_fallocate(int fd, off_t offset, off_t count)
{
    REAL(int, posix_fallocate, int, off_t, off_t);
    if (!below(fd))
        return real(fd, offset, count);
    const struct fault *fault = next("posix_fallocate");
    if (fails(fault))
        return fault->number;
    int result = real(fd, offset, count);
    if (!result)
        note(GROW, fd, offset + count, "", NULL, 0);
    finish(fault);
    return result;
}

int posix_fadvise(int fd, off_t offset, off_t count, int advice)
{
    REAL(int, posix_fadvise, int, off_t, off_t, int);
    const struct fault *fault = below(fd) ? next("posix_fadvise") : NULL;
    int result = fails(fault) ? fault->number : real(fd, offset, count, advice);
    finish(fault);
    return result;
}

int openat(int dir, const char *path, int flags, ...)
{
    REAL(int, openat, int, const char *, int, ...);
    mode_t mode = 0;
    if (flags & (O_CREAT | __O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    if (!below_at(dir, path))
        return real(dir, path, flags, mode);
    const struct fault *fault = next("openat");
    if (fails(fault))
        FAIL_WITH(-1);
    int fd = real(dir, path, flags, mode);
    if (fd >= 0 && flags & O_CREAT)
        note(CREATE, fd, 0, path, NULL, 0);
    finish(fault);
    return fd;
}

int open(const char *path, int flags, ...)
{
    mode_t mode = 0;
    if (flags & (O_CREAT | __O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    return openat(AT_FDCWD, path, flags, mode);
}

DIR *fdopendir(int fd)
{
    REAL(DIR *, fdopendir, int);
    const struct fault *fault = below(fd) ? next("fdopendir") : NULL;
    if (fails(fault))
        FAIL_WITH(NULL);
    DIR *result = real(fd);
    finish(fault);
    return result;
}

void *mmap(void *at, size_t count, int protection, int flags, int fd, off_t offset)
{
    REAL(void *, mmap, void *, size_t, int, int, int, off_t);
    const struct fault *fault = below(fd) ? next("mmap") : NULL;
    if (fails(fault))
        FAIL_WITH(MAP_FAILED);
    void *result = real(at, count, protection, flags, fd, offset);
    finish(fault);
    return result;
}

ssize_t pread(int fd, void *data, size_t count, off_t offset)
{
    REAL(ssize_t, pread, int, void *, size_t, off_t);
    const struct fault *fault = below(fd) ? next("pread") : NULL;
    if (fails(fault))
        FAIL_WITH(-1);
    return moved(fault, real(fd, data, allowed(fault, count), offset));
}

ssize_t preadv(int fd, const struct iovec *parts, int num_parts, off_t offset)
{
    REAL(ssize_t, preadv, int, const struct iovec *, int, off_t);
    const struct fault *fault = below(fd) ? next("preadv") : NULL;
    if (fails(fault))
        FAIL_WITH(-1);
    if (!fault)
        return real(fd, parts, num_parts, offset);
    struct iovec first = {parts[0].iov_base, allowed(fault, parts[0].iov_len)};
    return moved(fault, real(fd, &first, 1, offset));
}

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long num_local, const struct iovec *remote,
                         unsigned long num_remote, unsigned long flags)
{
    REAL(ssize_t, process_vm_readv, pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
         unsigned long);
    const struct fault *fault = faultio.root[0] ? next("process_vm_readv") : NULL;
    if (fails(fault))
        FAIL_WITH(-1);
    if (!fault)
        return real(pid, local, num_local, remote, num_remote, flags);
    struct iovec first = {remote[0].iov_base, allowed(fault, remote[0].iov_len)};
    return moved(fault, real(pid, local, num_local, &first, 1, flags));
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t offset)
{
    REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
    if (!below(fd))
        return real(fd, data, count, offset);
    const struct fault *fault = next("pwrite");
    if (fails(fault))
        FAIL_WITH(-1);
    ssize_t put = real(fd, data, allowed(fault, count), offset);
    if (put > 0)
        note(WRITE, fd, offset, "", data, (size_t) put);
    return moved(fault, put);
}

/* On 64-bit Linux, the only place this is for, both spellings are one function. */
#define ALSO(name, alias_name) extern __typeof(name) alias_name __attribute__((alias(#name)))
_Static_assert(sizeof(off_t) == 8, "64-bit Linux only");
ALSO(open, open64);
ALSO(openat, openat64);
ALSO(ftruncate, ftruncate64);
ALSO(posix_fallocate, posix_fallocate64);
ALSO(posix_fadvise, posix_fadvise64);
ALSO(mmap, mmap64);
ALSO(pread, pread64);
ALSO(preadv, preadv64);
ALSO(pwrite, pwrite64);
int fstat64(int, struct stat64 *) __attribute__((alias("fstat")));
int lstat64(const char *, struct stat64 *) __attribute__((alias("lstat")));
int fstatat64(int, const char *, struct stat64 *, int) __attribute__((alias("fstatat")));
int fstatvfs64(int, struct statvfs64 *) __attribute__((alias("fstatvfs")));
