"""Copies and file transfers of many blocks in one call, with the GIL released once per call.

Knows addresses, descriptors and offsets only; what the bytes mean is decided in Python. Nothing here touches
a file mapping with a plain load: ``mapping_read`` asks the kernel to copy, so a truncated file or a media
error is an outcome and never SIGBUS.

An outcome is the number of bytes transferred (short at the end of a file), or ``-errno``.
"""

from libc.errno cimport EFAULT, EINTR, EIO, errno
from libc.stdint cimport int32_t, int64_t, uint8_t
from posix.types cimport off_t, pid_t
from posix.unistd cimport getpid, pwrite

from pagedkv.errors import InvalidArgument

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t preadv(int fd, const iovec *iov, int iovcnt, off_t offset)
    ssize_t process_vm_readv(pid_t pid, const iovec *local, unsigned long num_local,
                             const iovec *remote, unsigned long num_remote, unsigned long flags)

cdef extern from *:
    """
    #include <string.h>
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
    void stream_copy(void *dst, const void *src, size_t count) nogil
    void *memcpy(void *dst, const void *src, size_t count) nogil

cdef Py_ssize_t STREAM_BYTES = 4 << 20  # batches from here on leave the caches alone


def copy_blocks(const uint8_t[:, ::1] src, const int32_t[::1] src_blocks,
                uint8_t[:, ::1] dst, const int32_t[::1] dst_blocks) -> None:
    """Copy rows `src_blocks` of `src` [*, block_bytes] onto rows `dst_blocks` of `dst`, in that order.

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
    check_rows(src_blocks, src.shape[0], "source")
    check_rows(dst_blocks, dst.shape[0], "destination")
    with nogil:
        for i in range(count):
            if count * block_bytes >= STREAM_BYTES:
                stream_copy(&dst[dst_blocks[i], 0], &src[src_blocks[i], 0], block_bytes)
            else:
                memcpy(&dst[dst_blocks[i], 0], &src[src_blocks[i], 0], block_bytes)


def file_read(const int32_t[::1] fds, const int64_t[::1] offsets, uint8_t[:, ::1] headers,
              uint8_t[:, ::1] rows, const int32_t[::1] indices, int64_t[::1] outcomes) -> None:
    """Read n slots from files: slot i's header into row i of `headers` [>= n, header_bytes], the bytes
    behind it into row `indices[i]` of `rows` [*, payload_bytes]; `outcomes[i]` says how far that went."""
    cdef Py_ssize_t count = fds.shape[0], i
    check_batch(count, offsets.shape[0], indices.shape[0], outcomes.shape[0])
    check_headers(headers, count)
    check_rows(indices, rows.shape[0], "destination")
    with nogil:
        for i in range(count):
            outcomes[i] = read_fully(fds[i], offsets[i], &headers[i, 0], headers.shape[1],
                                     &rows[indices[i], 0], rows.shape[1])


def mapping_read(const int64_t[::1] addresses, uint8_t[:, ::1] headers, uint8_t[:, ::1] rows,
                 const int32_t[::1] indices, int64_t[::1] outcomes) -> None:
    """As `file_read`, from addresses in a file mapping. What is gone is -EFAULT or a short outcome."""
    cdef Py_ssize_t count = addresses.shape[0], i
    cdef pid_t pid = getpid()
    check_batch(count, count, indices.shape[0], outcomes.shape[0])
    check_headers(headers, count)
    check_rows(indices, rows.shape[0], "destination")
    with nogil:
        for i in range(count):
            outcomes[i] = read_mapped(pid, addresses[i], &headers[i, 0], headers.shape[1],
                                      &rows[indices[i], 0], rows.shape[1])


def file_write(const int32_t[::1] fds, const int64_t[::1] offsets, const uint8_t[:, ::1] rows,
               const int32_t[::1] indices, int64_t[::1] outcomes) -> None:
    """Write row `indices[i]` of `rows` [*, row_bytes] at `offsets[i]` of `fds[i]`, n of them."""
    cdef Py_ssize_t count = fds.shape[0], i
    check_batch(count, offsets.shape[0], indices.shape[0], outcomes.shape[0])
    check_rows(indices, rows.shape[0], "source")
    with nogil:
        for i in range(count):
            outcomes[i] = write_fully(fds[i], offsets[i], &rows[indices[i], 0], rows.shape[1])


cdef int check_rows(const int32_t[::1] indices, Py_ssize_t num_rows, str what) except -1:
    cdef Py_ssize_t i
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


cdef int64_t read_fully(int fd, off_t offset, uint8_t *header, size_t header_bytes,
                        uint8_t *payload, size_t payload_bytes) noexcept nogil:
    cdef size_t total = header_bytes + payload_bytes, done = 0
    cdef iovec parts[2]
    cdef ssize_t got
    while done < total:
        if done < header_bytes:
            parts[0].iov_base, parts[0].iov_len = header + done, header_bytes - done
            parts[1].iov_base, parts[1].iov_len = payload, payload_bytes
            got = preadv(fd, parts, 2, offset + <off_t> done)
        else:
            parts[0].iov_base, parts[0].iov_len = payload + (done - header_bytes), total - done
            got = preadv(fd, parts, 1, offset + <off_t> done)
        if got < 0 and errno == EINTR:
            continue
        if got < 0:
            return -(errno or EIO)
        if got == 0:
            break
        done += got
    return done


cdef int64_t read_mapped(pid_t pid, int64_t address, uint8_t *header, size_t header_bytes,
                         uint8_t *payload, size_t payload_bytes) noexcept nogil:
    cdef size_t total = header_bytes + payload_bytes, done = 0
    cdef iovec local[2]
    cdef iovec remote
    cdef ssize_t got
    while done < total:
        if done < header_bytes:
            local[0].iov_base, local[0].iov_len = header + done, header_bytes - done
            local[1].iov_base, local[1].iov_len = payload, payload_bytes
        else:
            local[0].iov_base, local[0].iov_len = payload + (done - header_bytes), total - done
        remote.iov_base, remote.iov_len = <void *> (<size_t> address + done), total - done
        got = process_vm_readv(pid, local, 2 if done < header_bytes else 1, &remote, 1, 0)
        if got < 0 and errno == EINTR:
            continue
        if got < 0:
            return done if done and errno == EFAULT else -(errno or EIO)
        if got == 0:
            break
        done += got
    return done


cdef int64_t write_fully(int fd, off_t offset, const uint8_t *data, size_t total) noexcept nogil:
    cdef size_t done = 0
    cdef ssize_t put
    while done < total:
        put = pwrite(fd, data + done, total - done, offset + <off_t> done)
        if put < 0 and errno == EINTR:
            continue
        if put < 0:
            return -(errno or EIO)
        if put == 0:
            return -EIO
        done += put
    return done
