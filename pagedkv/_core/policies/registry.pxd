# Eviction policies by name.
from pagedkv._core.place cimport Policy

# `policy` is found by this name from now on. It and what it points to must live as long as the process.
cdef object register_policy(str name, const Policy* policy)
# The policy of this name; InvalidArgument where there is none.
cdef const Policy* policy_named(object name) except NULL
