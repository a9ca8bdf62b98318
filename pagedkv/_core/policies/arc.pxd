# The policy "arc": T1 seen once, T2 seen again, ghosts adapt T1's share.
from pagedkv._core.place cimport Policy

cdef Policy ARC
