"""Batched copies and file transfers of many blocks, with one GIL release per call.

Knows addresses, descriptors and offsets only; Python decides the meaning of the bytes. Nothing here touches
a file mapping with a plain load: ``mapping_read`` asks the kernel to copy, so a truncated file or a media
error is an outcome and never SIGBUS.

An outcome is the number of bytes transferred (short at the end of a file), or ``-errno``.
"""

from libc.errno cimport EINTR, EIO, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from posix.types cimport off_t, pid_t
from posix.unistd cimport getpid, pwrite

from pagedkv.errors import InvalidArgument

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t preadv(int fd, const iovec *iov, int iovcnt, off_t offset)

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <string.h>

    /* Hints about cached pages of a file; their failure changes nothing but the amount of memory in use. */
    static void drop_pages(int fd, off_t offset, off_t count)
    {
    #ifdef POSIX_FADV_DONTNEED
        (void) posix_fadvise(fd, offset, count, POSIX_FADV_DONTNEED);
    #endif
    }

    static void start_writing(int fd, off_t offset, off_t count)
    {
    #ifdef SYNC_FILE_RANGE_WRITE
        (void) sync_file_range(fd, offset, count, SYNC_FILE_RANGE_WRITE);
    #endif
    }

    /* Bytes of this process that the kernel copies, so that a page without a file behind it is an error and no signal. */
    #include <sys/uio.h>
    static ssize_t read_mapped(pid_t here, const struct iovec *to, int parts, void *from, size_t count)
    {
    #ifdef __linux__
        const struct iovec source = {from, count};
        return process_vm_readv(here, to, (unsigned long) parts, &source, 1, 0);
    #else
        (void) here, (void) to, (void) parts, (void) from, (void) count;
        errno = ENOSYS;
        return -1;
    #endif
    }
    #if defined(__SSE2__)
    #include <emmintrin.h>

    /* Copies past the caches: four pages abreast, so that four DRAM rows stay open, and stores that fetch no
       line they overwrite. 1.5x memcpy for blocks of 64 KiB to 2 MiB once the batch is larger than L2. */
    static void stream_copy(void *to_row, const void *from_row, size_t count)
    {
        const size_t page = 4096, group = 4 * page, ahead = 512;
        const char *src = (const char *) from_row;
        char *dst = (char *) to_row;
        size_t done = 0, at, k;
        if (((size_t) dst & 15) == 0) {
            for (; done + group <= count; done += group) {
                for (at = done; at < done + page; at += 64) {
                    for (k = 0; k < 4; k++)
                        _mm_prefetch(src + at + k * page + ahead, _MM_HINT_T0);
                    for (k = 0; k < 4; k++) {
                        const __m128i *from = (const __m128i *) (src + at + k * page);
                        __m128i *to = (__m128i *) (dst + at + k * page);
                        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
                        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
                        _mm_stream_si128(to, a);
                        _mm_stream_si128(to + 1, b);
                        _mm_stream_si128(to + 2, c);
                        _mm_stream_si128(to + 3, d);
                    }
                }
            }
            _mm_sfence();
        }
        memcpy(dst + done, src + done, count - done);
    }
    #else
    static void stream_copy(void *to_row, const void *from_row, size_t count)
    {
        memcpy(to_row, from_row, count);
    }
    #endif
    """
    ssize_t read_mapped(pid_t here, const iovec *to, int parts, void *source, size_t count) nogil
    void stream_copy(void *dst, const void *src, size_t count) nogil
    void *memcpy(void *dst, const void *src, size_t count) nogil
    void drop_pages(int fd, off_t offset, off_t count) nogil
    void start_writing(int fd, off_t offset, off_t count) nogil

cdef extern from "_sums.h" nogil:
    int sum_level()
    uint64_t sum_long(const void *data, size_t count, uint64_t seed, int level)

cdef struct Shards:
    size_t count  # sums per block, 0 for none
    size_t width  # bytes that each covers; all of a block if count is 0
    size_t group  # shards moved by one system call

cdef int64_t MIN_SUMMED_C = 240
MIN_SUMMED = MIN_SUMMED_C  # the sums here are of more bytes than this; fewer are padded by sum_of of format.py
SUM_LEVEL = sum_level()
cdef int SUM_LEVEL_C = SUM_LEVEL
cdef int MAPPED = -1  # instead of a descriptor: the place is an address
cdef size_t GROUP_BYTES = 256 << 10  # moved before it is summed: stays in L2, so that a sum reads no DRAM
cdef Py_ssize_t STREAM_BYTES = 4 << 20  # batches from here on leave the caches alone


def copy_blocks(const uint8_t[:, :] src, const int32_t[::1] src_blocks,
                uint8_t[:, :] dst, const int32_t[::1] dst_blocks) -> None:
    """Copy rows `src_blocks` of `src` to rows `dst_blocks` of `dst`, in that order.

    Both are [*, block_bytes], the bytes of a row side by side; rows may lie apart.

    Raises
    ------
    InvalidArgument
        Lengths differ or a row does not exist; nothing has been copied then.
    """
    cdef Py_ssize_t count = src_blocks.shape[0], block_bytes = src.shape[1], i
    if dst_blocks.shape[0] != count:
        raise InvalidArgument(f"{count} source blocks but {dst_blocks.shape[0]} destination blocks")
    if dst.shape[1] != block_bytes:
        raise InvalidArgument(f"source blocks have {block_bytes} bytes, destination blocks {dst.shape[1]}")
    check_rows(src_blocks, src.shape[0], src.strides[1], "source")
    check_rows(dst_blocks, dst.shape[0], dst.strides[1], "destination")
    with nogil:
        for i in range(count):
            if count * block_bytes >= STREAM_BYTES:
                stream_copy(&dst[dst_blocks[i], 0], &src[src_blocks[i], 0], block_bytes)
            else:
                memcpy(&dst[dst_blocks[i], 0], &src[src_blocks[i], 0], block_bytes)


def file_read(const int32_t[::1] fds, const int64_t[::1] offsets, uint8_t[:, ::1] headers,
              uint8_t[:, :] rows, const int32_t[::1] indices, int64_t[::1] outcomes,
              const uint64_t[::1] seeds, uint64_t[:, ::1] sums, *, whole: bool = False) -> None:
    """Read n slots from files, headers and payloads.

    Slot i's header goes into row i of `headers` [>= n, header_bytes], the bytes behind it into row `indices[i]` of
    `rows` [*, payload_bytes]; `outcomes[i]` says how far that went.

    Row i of `sums` [n, shards] becomes the sums of the payload's equal shards, each seeded with
    ``seeds[i] ^ shard``; shards may be 0, for none, and a shard must have more than `MIN_SUMMED` bytes.
    `whole` asks for a slot in one call, rather than in pieces that are summed while they are in the cache. A
    descriptor opened with O_DIRECT needs it: its bytes come from the device.
    """
    cdef Py_ssize_t count = fds.shape[0], i
    check_batch(count, offsets.shape[0], indices.shape[0], outcomes.shape[0])
    check_headers(headers, count)
    check_rows(indices, rows.shape[0], rows.strides[1], "destination")
    cdef Shards shards = shards_of(rows.shape[1], count, seeds, sums)
    if whole:
        shards.group = max(<size_t> 1, shards.count)
    with nogil:
        for i in range(count):
            outcomes[i] = read_slot(fds[i], offsets[i], &headers[i, 0], headers.shape[1],
                                    &rows[indices[i], 0], shards, seeds[i], sums_at(sums, i))


def mapping_read(const int64_t[::1] addresses, uint8_t[:, ::1] headers, uint8_t[:, :] rows,
                 const int32_t[::1] indices, int64_t[::1] outcomes,
                 const uint64_t[::1] seeds, uint64_t[:, ::1] sums) -> None:
    """As `file_read`, from addresses in a file mapping.

    A missing page is -EFAULT or a short outcome.
    """
    cdef Py_ssize_t count = addresses.shape[0], i
    check_batch(count, count, indices.shape[0], outcomes.shape[0])
    check_headers(headers, count)
    check_rows(indices, rows.shape[0], rows.strides[1], "destination")
    cdef Shards shards = shards_of(rows.shape[1], count, seeds, sums)
    with nogil:
        for i in range(count):
            outcomes[i] = read_slot(MAPPED, addresses[i], &headers[i, 0], headers.shape[1],
                                    &rows[indices[i], 0], shards, seeds[i], sums_at(sums, i))


def file_write(const int32_t[::1] fds, const int64_t[::1] offsets, const uint8_t[:, :] rows,
               const int32_t[::1] indices, int64_t[::1] outcomes,
               const uint64_t[::1] seeds, uint64_t[:, ::1] sums) -> None:
    """Write row `indices[i]` of `rows` [*, row_bytes] at `offsets[i]` of `fds[i]`.

    Sums as `file_read`.
    """
    cdef Py_ssize_t count = fds.shape[0], i
    check_batch(count, offsets.shape[0], indices.shape[0], outcomes.shape[0])
    check_rows(indices, rows.shape[0], rows.strides[1], "source")
    cdef Shards shards = shards_of(rows.shape[1], count, seeds, sums)
    with nogil:
        for i in range(count):
            outcomes[i] = write_row(fds[i], offsets[i], &rows[indices[i], 0], shards, seeds[i],
                                    sums_at(sums, i))


def headers_read(const int32_t[::1] fds, const int64_t[::1] offsets, uint8_t[:, ::1] headers,
                 int64_t[::1] outcomes, const uint64_t[::1] seeds, uint64_t[::1] sums) -> None:
    """Read n headers alone into `headers` [n, header_bytes].

    ``sums[i]`` is over all bytes but the last eight.
    """
    cdef Py_ssize_t count = fds.shape[0], i
    cdef int64_t wanted = headers.shape[1]
    check_batch(count, offsets.shape[0], seeds.shape[0], outcomes.shape[0])
    check_headers(headers, count)
    if sums.shape[0] != count or wanted <= MIN_SUMMED_C + 8:
        raise InvalidArgument(f"{count} headers of {wanted} bytes and {sums.shape[0]} sums")
    with nogil:
        for i in range(count):
            outcomes[i] = read_until(fds[i], offsets[i], &headers[i, 0], wanted, NULL, 0, wanted)
            if outcomes[i] == wanted:
                sums[i] = sum_long(&headers[i, 0], wanted - 8, seeds[i], SUM_LEVEL_C)


def drop_cached(const int32_t[::1] fds, const int64_t[::1] offsets, int64_t num_bytes) -> None:
    """Let the page cache forget `num_bytes` at each place; pages that are not written yet stay."""
    cdef Py_ssize_t count = fds.shape[0], i
    check_batch(count, offsets.shape[0], count, count)
    with nogil:
        for i in range(count):
            drop_pages(fds[i], offsets[i], num_bytes)


def start_writeback(const int32_t[::1] fds, const int64_t[::1] offsets, int64_t num_bytes) -> None:
    """Let the kernel begin to write the dirty pages at each place; does not wait for it."""
    cdef Py_ssize_t count = fds.shape[0], i
    check_batch(count, offsets.shape[0], count, count)
    with nogil:
        for i in range(count):
            start_writing(fds[i], offsets[i], num_bytes)


def sum_bytes(const uint8_t[::1] data, seed: int, level: int) -> int:
    """One sum: `level` 0 is plain C, 1 AVX2, 2 AVX-512; not above `SUM_LEVEL`."""
    if data.shape[0] <= MIN_SUMMED or not 0 <= level <= SUM_LEVEL:
        raise InvalidArgument(f"{data.shape[0]} bytes at level {level}: "
                              f"at least {MIN_SUMMED + 1}, at most {SUM_LEVEL}")
    return sum_long(&data[0], data.shape[0], seed, level)


cdef Shards shards_of(Py_ssize_t row_bytes, Py_ssize_t count, const uint64_t[::1] seeds,
                      uint64_t[:, ::1] sums) except *:
    cdef Shards shards
    shards.count = sums.shape[1]
    shards.width = row_bytes // shards.count if shards.count else row_bytes
    if seeds.shape[0] != count or sums.shape[0] != count:
        raise InvalidArgument(f"{count} blocks, but {seeds.shape[0]} seeds and {sums.shape[0]} rows of sums")
    if shards.count and (row_bytes % shards.count or shards.width <= MIN_SUMMED):
        raise InvalidArgument(f"{row_bytes} bytes do not make {shards.count} equal shards "
                              f"over {MIN_SUMMED} bytes")
    shards.group = max(<size_t> 1, GROUP_BYTES // shards.width) if shards.count else 1
    return shards


cdef inline uint64_t *sums_at(uint64_t[:, ::1] sums, Py_ssize_t row) noexcept nogil:
    return &sums[row, 0] if sums.shape[1] else NULL


cdef int check_rows(const int32_t[::1] indices, Py_ssize_t num_rows, Py_ssize_t apart, str what) except -1:
    cdef Py_ssize_t i
    if apart != 1:
        raise InvalidArgument(f"the bytes of a {what} block must lie side by side")
    for i in range(indices.shape[0]):
        if indices[i] < 0 or indices[i] >= num_rows:
            raise InvalidArgument(f"{what} block {indices[i]} is not in [0, {num_rows})")
    return 0


cdef int check_batch(Py_ssize_t count, Py_ssize_t offsets, Py_ssize_t indices, Py_ssize_t outcomes) except -1:
    if offsets != count or indices != count or outcomes != count:
        raise InvalidArgument(f"batch arrays differ in length: {count}, {offsets}, {indices}, {outcomes}")
    return 0


cdef int check_headers(uint8_t[:, ::1] headers, Py_ssize_t count) except -1:
    if headers.shape[0] < count or headers.shape[1] == 0:
        raise InvalidArgument(f"{count} blocks need {count} headers, not {headers.shape[0]}")
    return 0


cdef int64_t read_slot(int fd, int64_t place, uint8_t *header, size_t header_bytes, uint8_t *payload,
                       Shards shards, uint64_t seed, uint64_t *sums) noexcept nogil:
    """Header and payload, a group of shards at a time, each summed while it is in the cache."""
    cdef size_t total = header_bytes + shards.width * max(<size_t> 1, shards.count), done = 0, until
    cdef size_t first = 0, last
    cdef int64_t got
    while True:
        last = min(first + shards.group, max(<size_t> 1, shards.count))
        until = header_bytes + last * shards.width
        got = read_until(fd, place, header, header_bytes, payload, done, until)
        if got < 0:
            return got
        done = got
        if done < until:
            return done
        sum_shards(payload, shards, first, last, seed, sums)
        if done == total:
            return done
        first = last


cdef int64_t read_until(int fd, int64_t place, uint8_t *header, size_t header_bytes, uint8_t *payload,
                        size_t done, size_t until) noexcept nogil:
    """Continue at byte `done` of a slot; returns the bytes there now, or -errno.

    That is `until`, unless the source ends earlier.
    """
    cdef iovec local[2]
    cdef int parts
    cdef ssize_t got
    while done < until:
        parts = 0
        if done < header_bytes:
            local[parts].iov_base, local[parts].iov_len = header + done, header_bytes - done
            parts += 1
            if until > header_bytes:
                local[parts].iov_base, local[parts].iov_len = payload, until - header_bytes
                parts += 1
        else:
            local[parts].iov_base, local[parts].iov_len = payload + (done - header_bytes), until - done
            parts += 1
        if fd == MAPPED:
            got = read_mapped(getpid(), local, parts, <void *> (<size_t> place + done), until - done)
        else:
            got = preadv(fd, local, parts, place + <off_t> done)
        if got < 0 and errno == EINTR:
            continue
        if got < 0:
            return -(errno or EIO)
        if got == 0:
            break
        done += got
    return done


cdef int64_t write_row(int fd, off_t offset, const uint8_t *data, Shards shards, uint64_t seed,
                       uint64_t *sums) noexcept nogil:
    """A row, a group of shards at a time, each summed just before it is written."""
    cdef size_t done = 0, until, first = 0, last, count = max(<size_t> 1, shards.count)
    cdef ssize_t put
    while first < count:
        last = min(first + shards.group, count)
        until = last * shards.width
        sum_shards(data, shards, first, last, seed, sums)
        while done < until:
            put = pwrite(fd, data + done, until - done, offset + <off_t> done)
            if put < 0 and errno == EINTR:
                continue
            if put < 0:
                return -(errno or EIO)
            if put == 0:
                return -EIO
            done += put
        first = last
    return done


cdef void sum_shards(const uint8_t *data, Shards shards, size_t first, size_t last, uint64_t seed,
                     uint64_t *sums) noexcept nogil:
    cdef size_t i
    if sums == NULL:
        return
    for i in range(first, last):
        sums[i] = sum_long(data + i * shards.width, shards.width, seed ^ i, SUM_LEVEL_C)
