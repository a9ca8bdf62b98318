# The policy "lru": the coldest leaf goes first.
from pagedkv._core.place cimport Policy

cdef Policy LRU
