from pagedkv._core.placement cimport Placement

cdef class HazardPolicy:
    cdef readonly Placement placement
