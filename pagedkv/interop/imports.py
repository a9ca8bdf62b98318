"""Others', for us: any array as a view, a NumPy array or a CuPy array, without a copy.

Tried in this order: NumPy arrays themselves, DLPack, ``__cuda_array_interface__``, a :class:`RawArray` or a
tuple like it, ``__array_interface__`` and the buffer protocol. A protocol that an object has and that refuses is the
end: its reason is passed on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ExchangeRefused, InvalidArgument, LayoutMismatch, WrongType
from pagedkv.interop._dlpack import IS_COPIED, READ_ONLY, Taken, address_of, ndarray_at, take_capsule
from pagedkv.interop.devices import CPU, CUDA, PINNED, device_code, device_name, run_after, stream_pointer
from pagedkv.interop.dtypes import dtype_name, itemsize, name_of_code, numpy_dtype
from pagedkv.interop.memory import compact_strides
from pagedkv.interop.view import DLPACK_VERSION, RawArray, View

PROTOCOLS = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")


def exchanges(x: Any) -> bool:
    """Whether `x` speaks one of the protocols, or is a :class:`RawArray`."""
    return isinstance(x, RawArray) or any(hasattr(x, name) for name in PROTOCOLS)


def as_view(x: Any, *, writable: bool = False, stream: Any = None) -> View:
    """Any array as a view of its memory. Nothing is copied.

    Parameters
    ----------
    x : NumPy array, anything with DLPack (JAX, PyTorch, CuPy, MLX, ONNX Runtime, ...), ``__cuda_array_interface__``,
        ``__array_interface__`` or the buffer protocol, or a :class:`RawArray` or tuple
        ``(ptr, shape, strides, dtype[, device[, stream]])``.
    writable : it will be written. DLPack before 1.0 does not say whether it may be; then this is the caller's word.
    stream : CUDA stream whose later work waits for the array. Default: CuPy's current one. Not used for host memory.

    Raises
    ------
    WrongType
        Not an array, or elements that cannot be exchanged.
    ExchangeRefused (a BufferError)
        The array's owner refuses, or it is read-only and `writable` is True, or it lies where nothing here reaches.
    """
    if isinstance(x, View):
        view = x
    elif isinstance(x, np.ndarray):
        view = _of_numpy(x, x)
    elif hasattr(x, "__dlpack__"):
        view = _of_taken(*_take(x, writable, stream), stream)
    elif hasattr(x, "__cuda_array_interface__"):
        view = _of_cuda_interface(x, stream)
    elif isinstance(x, RawArray) or (type(x) is tuple and x and type(x[0]) is int):
        view = _of_raw(x, stream)
    else:
        view = _of_buffer(x)
    _check_writable(writable, view.read_only)
    return view


def as_argument(name: str, x: Any, *, writable: bool = False, stream: Any = None) -> Any:
    """Convert an argument that speaks an array protocol to NumPy or CuPy; pass others through.

    Raises
    ------
    LayoutMismatch
        It has a protocol, and its array cannot be had.
    """
    if x is None or _is_ours(x) or not exchanges(x):
        return x
    try:
        return as_array(x, writable=writable, stream=stream)
    except ExchangeRefused as refusal:
        raise LayoutMismatch(f"{name} cannot be read as an array: {refusal}") from refusal


def as_array(x: Any, *, writable: bool = False, stream: Any = None) -> Any:
    """Any array as a NumPy array, or as a CuPy array if it lies on a GPU. Nothing is copied.

    bfloat16 and fp8 have the dtypes of ``ml_dtypes``, or where that is not installed are their bits. Parameters and
    errors as :func:`as_view`.
    """
    if _is_ours(x):
        _check_writable(writable, isinstance(x, np.ndarray) and not x.flags.writeable)
        return x
    if hasattr(x, "__dlpack__") and not isinstance(x, View):
        taken, name, strides, read_only = _take(x, writable, stream)
        if taken.device[0] != CUDA:  # most arrays: no view between
            _check_writable(writable, read_only)
            return ndarray_at(taken.ptr, taken.shape, strides, numpy_dtype(name), read_only, taken)
        _check_writable(writable, read_only)
        view = _of_taken(taken, name, strides, read_only, stream)
    else:
        view = as_view(x, writable=writable, stream=stream)
    if device_code(view.device)[0] == CUDA:
        from pagedkv.interop.cupy_arrays import as_cupy

        return as_cupy(view)
    return view.numpy()


def _check_writable(wanted: bool, read_only: bool) -> None:
    if wanted and read_only:
        raise ExchangeRefused("the array is read-only, and it is to be written")


_OURS: set[type] = {np.ndarray}  # types whose arrays pass as they are


def _is_ours(x: Any) -> bool:
    kind = type(x)
    if kind in _OURS:
        return True
    if not isinstance(x, np.ndarray) and kind.__module__.partition(".")[0] != "cupy":
        return False
    _OURS.add(kind)
    return True


def _of_numpy(array: NDArray[Any], owner: Any) -> View:
    name = dtype_name(array.dtype)
    return View(address_of(array), array.shape, array.strides, name, "cpu", not array.flags.writeable, owner=owner)


def _take(x: Any, writable: bool, stream: Any) -> tuple[Taken, str, tuple[int, ...], bool]:
    """Consume a producer's capsule.

    Returns it with the dtype's name, strides in bytes, and whether it is read-only.
    """
    options: dict[str, Any] = {}
    if type(x).__name__.endswith("Tracer"):
        raise ExchangeRefused(
            f"a {type(x).__name__} stands for an array while JAX traces a function, and has no memory: make this call "
            f"outside of jit, grad and vmap"
        )
    try:
        kind, number = (int(part) for part in x.__dlpack_device__())
        device_name(kind, number)
        if kind == CUDA:
            options["stream"] = stream_pointer(stream)
        try:
            capsule = x.__dlpack__(max_version=DLPACK_VERSION, **options)
        except TypeError:  # a producer from before DLPack 1.0 does not know the argument
            capsule = x.__dlpack__(**options)
    except ExchangeRefused:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError, AttributeError) as refusal:
        raise ExchangeRefused(f"{type(x).__name__} does not hand its array over: {refusal}") from refusal
    taken = take_capsule(capsule)
    if writable and taken.version and taken.flags & IS_COPIED:
        raise ExchangeRefused(f"{type(x).__name__} hands over a copy, and what is written there would be lost")
    device_name(*taken.device)
    name = name_of_code(*taken.dtype)
    size, steps = itemsize(name), taken.strides
    strides = compact_strides(taken.shape, size) if steps is None else tuple([step * size for step in steps])
    return taken, name, strides, bool(taken.flags & READ_ONLY) if taken.version else not writable


def _of_taken(taken: Taken, name: str, strides: tuple[int, ...], read_only: bool, stream: Any) -> View:
    device = device_name(*taken.device)
    return View(taken.ptr, taken.shape, strides, name, device, read_only, stream=stream, owner=taken)


def _of_cuda_interface(x: Any, stream: Any) -> View:
    told = x.__cuda_array_interface__
    try:
        version, (ptr, read_only), shape = int(told["version"]), told["data"], tuple(told["shape"])
        name, strides = dtype_name(told["typestr"]), told.get("strides")
    except (KeyError, TypeError, ValueError) as problem:
        raise ExchangeRefused(f"__cuda_array_interface__ of {type(x).__name__} is malformed: {problem!r}") from problem
    if version < 2 or told.get("mask") is not None:
        raise ExchangeRefused(f"__cuda_array_interface__ version {version}, or with a mask, is not read: 2 and 3 are")
    from pagedkv.interop.cupy_arrays import device_of

    number = device_of(x, int(ptr))
    if told.get("stream") is not None:
        run_after(stream_pointer(stream), stream_pointer(int(told["stream"])), number)
    steps = compact_strides(shape, itemsize(name)) if strides is None else tuple(strides)
    return View(int(ptr), shape, steps, name, f"cuda:{number}", bool(read_only), stream=stream, owner=x)


def _of_buffer(x: Any) -> View:
    try:
        array = np.asarray(x if hasattr(x, "__array_interface__") else memoryview(x))
    except (TypeError, ValueError, BufferError) as problem:
        wanted = f"{', '.join(PROTOCOLS)}, a buffer or a RawArray"
        raise WrongType(f"{type(x).__name__} is not read as an array ({problem}): it needs {wanted}") from None
    return _of_numpy(array, array)


def _of_raw(x: Any, stream: Any) -> View:
    if not 4 <= len(x) <= 6:
        raise WrongType(f"a raw array is (ptr, shape, strides, dtype[, device[, stream]]), got {len(x)} items")
    ptr, shape, strides, dtype, device, ready = (*x, "cpu", None)[:6] if len(x) == 4 else (*x, None)[:6]
    name, (kind, number) = dtype_name(dtype), device_code(device)
    whole = [*shape, *(strides or ())]
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) for n in [ptr, *whole]):
        raise WrongType("pointer, shape and strides of a raw array are integers")
    if any(n < 0 for n in shape) or (strides is not None and len(strides) != len(shape)):
        raise InvalidArgument(f"a raw array of shape {tuple(shape)} and strides {strides}: they do not fit together")
    size = itemsize(name)
    steps = compact_strides(tuple(shape), size) if strides is None else tuple(int(n) for n in strides)
    if ptr <= 0 or ptr % size or any(step % size for step in steps):
        raise InvalidArgument(f"address {ptr:#x} and strides {steps} must be multiples of {size} bytes, address not 0")
    if kind == CUDA and ready is not None:
        run_after(stream_pointer(stream), stream_pointer(ready), number)
    elif kind in (CPU, PINNED) and ready is not None:
        raise WrongType("a raw array in host memory has no stream")
    return View(int(ptr), tuple(int(n) for n in shape), steps, name, device, False, stream=stream)
