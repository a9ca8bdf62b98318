"""DLPack capsules, made and consumed, and NumPy arrays at given addresses.

The Python callers decide what the numbers mean; this module counts memory and owners.

A capsule that we make owns a reference to what keeps its memory. The consumer renames the capsule and calls the deleter
once, from any thread; a capsule that was never consumed calls it itself. ``Taken`` holds a capsule that we consume, and
calls the producer's deleter when it is freed.
"""

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_Fetch, PyErr_Restore
from cpython.object cimport PyObject
from cpython.pycapsule cimport (
    PyCapsule_CheckExact,
    PyCapsule_GetPointer,
    PyCapsule_IsValid,
    PyCapsule_New,
    PyCapsule_SetName,
)
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

import numpy as np

from pagedkv.errors import ExchangeRefused, WrongType

cnp.import_array()

READ_ONLY = 1
IS_COPIED = 2
MAX_NDIM = 64

cdef extern from "Python.h":
    int Py_IsInitialized() nogil

cdef enum:
    MAX_AXES = 32                    # what every NumPy has; since 2.0 it has 64

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides                 # in elements
    uint64_t byte_offset

cdef struct Legacy:                  # DLManagedTensor
    DLTensor tensor
    void *owner
    void (*deleter)(Legacy *) noexcept nogil

cdef struct Versioned:               # DLManagedTensorVersioned
    uint32_t major
    uint32_t minor
    void *owner
    void (*deleter)(Versioned *) noexcept nogil
    uint64_t flags
    DLTensor tensor

cdef const char *LEGACY = b"dltensor"
cdef const char *LEGACY_USED = b"used_dltensor"
cdef const char *VERSIONED = b"dltensor_versioned"
cdef const char *VERSIONED_USED = b"used_dltensor_versioned"


cdef void let_go(void *owner) noexcept nogil:
    if Py_IsInitialized():           # a consumer that outlives the interpreter: the memory ends with the process
        with gil:
            Py_XDECREF(<PyObject*>owner)


cdef void delete_legacy(Legacy *managed) noexcept nogil:
    let_go(managed.owner)
    free(managed)


cdef void delete_versioned(Versioned *managed) noexcept nogil:
    let_go(managed.owner)
    free(managed)


cdef void end_legacy(object capsule) noexcept:
    cdef Legacy *managed
    cdef PyObject *kind
    cdef PyObject *value
    cdef PyObject *trace
    if not PyCapsule_IsValid(capsule, LEGACY):
        return                       # consumed: the consumer calls the deleter
    PyErr_Fetch(&kind, &value, &trace)
    managed = <Legacy*>PyCapsule_GetPointer(capsule, LEGACY)
    managed.deleter(managed)
    PyErr_Restore(kind, value, trace)


cdef void end_versioned(object capsule) noexcept:
    cdef Versioned *managed
    cdef PyObject *kind
    cdef PyObject *value
    cdef PyObject *trace
    if not PyCapsule_IsValid(capsule, VERSIONED):
        return
    PyErr_Fetch(&kind, &value, &trace)
    managed = <Versioned*>PyCapsule_GetPointer(capsule, VERSIONED)
    managed.deleter(managed)
    PyErr_Restore(kind, value, trace)


cdef void fill(DLTensor *tensor, int64_t *axes, uint64_t ptr, tuple shape, tuple strides, tuple dtype,
               tuple device) except *:
    cdef int32_t i, ndim = <int32_t>len(shape)
    tensor.data = <void*>ptr
    tensor.device.device_type, tensor.device.device_id = device
    tensor.ndim = ndim
    tensor.dtype.code, tensor.dtype.bits = dtype
    tensor.dtype.lanes = 1
    tensor.shape, tensor.strides = axes, axes + ndim
    tensor.byte_offset = 0
    for i in range(ndim):
        axes[i] = shape[i]
        axes[ndim + i] = strides[i]


def make_capsule(owner, uint64_t ptr, tuple shape, tuple strides, tuple dtype, tuple device, uint64_t flags=0,
                 version=None):
    """A capsule over memory that `owner` keeps.

    Parameters
    ----------
    owner : kept until the consumer's (or the capsule's) end.
    ptr : address of the first element.
    shape, strides : int by axis, strides in elements.
    dtype : (code, bits) of one element.
    device : (type, id).
    flags : ``READ_ONLY``, ``IS_COPIED``; only a versioned capsule carries them.
    version : (major, minor) for a versioned capsule; None for one as before DLPack 1.0.

    Raises
    ------
    MemoryError
    """
    cdef Py_ssize_t ndim = len(shape), axes = 2 * ndim * sizeof(int64_t)
    cdef Legacy *legacy
    cdef Versioned *versioned
    if version is None:
        legacy = <Legacy*>malloc(sizeof(Legacy) + axes)
        if legacy == NULL:
            raise MemoryError
        try:
            fill(&legacy.tensor, <int64_t*>(legacy + 1), ptr, shape, strides, dtype, device)
            legacy.owner, legacy.deleter = <void*>owner, delete_legacy
            capsule = PyCapsule_New(legacy, LEGACY, end_legacy)
        except BaseException:
            free(legacy)
            raise
    else:
        versioned = <Versioned*>malloc(sizeof(Versioned) + axes)
        if versioned == NULL:
            raise MemoryError
        try:
            fill(&versioned.tensor, <int64_t*>(versioned + 1), ptr, shape, strides, dtype, device)
            versioned.major, versioned.minor = version
            versioned.flags = flags
            versioned.owner, versioned.deleter = <void*>owner, delete_versioned
            capsule = PyCapsule_New(versioned, VERSIONED, end_versioned)
        except BaseException:
            free(versioned)
            raise
    Py_INCREF(owner)                 # the capsule's own reference, given back by the deleter
    return capsule


@cython.final
cdef class Taken:
    """The memory of a capsule that was consumed: kept until this ends.

    Attributes
    ----------
    ptr : address of the first element.
    shape, strides : int by axis, strides in elements; None where the producer left them out (compact).
    dtype : (code, bits, lanes).
    device : (type, id).
    flags : of a versioned capsule; 0 otherwise.
    version : (major, minor); None for a capsule as before DLPack 1.0.
    """

    cdef Legacy *legacy
    cdef Versioned *versioned
    cdef readonly object ptr
    cdef readonly tuple shape
    cdef readonly tuple strides
    cdef readonly tuple dtype
    cdef readonly tuple device
    cdef readonly object flags
    cdef readonly tuple version

    def __dealloc__(self):
        if self.legacy != NULL and self.legacy.deleter != NULL:
            self.legacy.deleter(self.legacy)
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)

    cdef void read(self, DLTensor *tensor) except *:
        cdef int32_t i, ndim = tensor.ndim
        if ndim < 0 or ndim > MAX_NDIM:
            raise ExchangeRefused(f"the capsule's array has {ndim} axes")
        self.ptr = <uint64_t>tensor.data + tensor.byte_offset
        shape, strides = [], []
        for i in range(ndim):
            shape.append(tensor.shape[i])
            if tensor.strides != NULL:
                strides.append(tensor.strides[i])
        self.shape = tuple(shape)
        self.strides = None if tensor.strides == NULL else tuple(strides)
        self.dtype = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
        self.device = (tensor.device.device_type, tensor.device.device_id)


def take_capsule(capsule):
    """Consume a capsule: its memory is the returned object's to keep.

    Raises
    ------
    WrongType
        No DLPack capsule, or one that was consumed before. It is as it was.
    ExchangeRefused
        A capsule of another major version, whose fields cannot be known. It was let go of.
    """
    cdef Taken taken = Taken.__new__(Taken)
    if not PyCapsule_CheckExact(capsule):
        raise WrongType(f"__dlpack__ gave {type(capsule).__name__}, not a capsule")
    if PyCapsule_IsValid(capsule, VERSIONED):
        taken.versioned = <Versioned*>PyCapsule_GetPointer(capsule, VERSIONED)
        PyCapsule_SetName(capsule, VERSIONED_USED)
        taken.version = (taken.versioned.major, taken.versioned.minor)
        taken.flags = 0
        if taken.versioned.major != 1:
            raise ExchangeRefused(f"the capsule speaks DLPack {taken.version[0]}.{taken.version[1]}; 1.x is understood")
        taken.flags = taken.versioned.flags
        taken.read(&taken.versioned.tensor)
    elif PyCapsule_IsValid(capsule, LEGACY):
        taken.legacy = <Legacy*>PyCapsule_GetPointer(capsule, LEGACY)
        PyCapsule_SetName(capsule, LEGACY_USED)
        taken.version, taken.flags = None, 0
        taken.read(&taken.legacy.tensor)
    else:
        raise WrongType("the capsule is not one of DLPack's, or it was consumed before")
    return taken


def address_of(cnp.ndarray array):
    """Address of an array's first element."""
    return <uint64_t>cnp.PyArray_DATA(array)


def ndarray_at(uint64_t ptr, tuple shape, tuple strides, dtype, bint read_only, owner):
    """A NumPy array over memory that `owner` keeps; the caller answers for the numbers.

    Parameters
    ----------
    ptr : address of the first element; anything where there are no elements.
    shape, strides : int by axis, strides in bytes.
    dtype : of NumPy or ``ml_dtypes``.
    """
    cdef cnp.npy_intp dims[MAX_AXES]
    cdef cnp.npy_intp steps[MAX_AXES]
    cdef int i, ndim = <int>len(shape)
    cdef cnp.ndarray array
    cdef int flags = 0 if read_only else cnp.NPY_ARRAY_WRITEABLE
    if ndim > MAX_AXES or len(strides) != ndim:
        raise ExchangeRefused(f"an array of {ndim} axes and {len(strides)} strides: NumPy has at most {MAX_AXES} axes")
    for i in range(ndim):
        dims[i], steps[i] = shape[i], strides[i]
        if dims[i] == 0:
            return np.empty(shape, dtype)
    array = cnp.PyArray_New(np.ndarray, ndim, dims, dtype.num, steps, <void*>ptr, 0, flags, None)
    cnp.set_array_base(array, owner)
    cnp.PyArray_UpdateFlags(array, cnp.NPY_ARRAY_C_CONTIGUOUS | cnp.NPY_ARRAY_F_CONTIGUOUS | cnp.NPY_ARRAY_ALIGNED)
    return array
