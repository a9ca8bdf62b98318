# The policy "hazard" of a Placement.
from pagedkv._core.place cimport Policy

cdef Policy HAZARD
