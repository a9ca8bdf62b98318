# The caller holds the cache's mutex.
from libc.stdint cimport int32_t, int64_t

from pagedkv._core.place cimport Place

cdef enum:
    DEFAULT_CLASS = 51      # priority 50, after EXPIRED

cdef void expiry_push(Place* p, int32_t n) noexcept nogil
cdef int64_t expire_until(Place* p, int64_t now) noexcept nogil
cdef void set_class(Place* p, int32_t n, int32_t klass) noexcept nogil
cdef void retain(Place* p, int32_t owner, int32_t klass, int64_t expires) noexcept nogil
# Moves a namespace from the shared lists to those of its own domain.
cdef void change_domain(Place* p, int32_t root, int32_t domain) noexcept nogil
