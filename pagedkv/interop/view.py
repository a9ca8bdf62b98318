"""View: an array at an address, exported by every protocol that frameworks read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ExchangeRefused, WrongType
from pagedkv.interop._dlpack import IS_COPIED, READ_ONLY, make_capsule, ndarray_at
from pagedkv.interop.devices import CPU, CUDA, PINNED, device_code, run_after, stream_pointer
from pagedkv.interop.dtypes import CODES, bits_dtype, in_numpy, itemsize, numpy_dtype
from pagedkv.interop.memory import aligned_empty, compact_strides

DLPACK_VERSION = (1, 1)  # 1.0 brought the read-only flag, 1.1 the fp8 codes
NO_SYNC = -1  # DLPack: the consumer waits for the array by itself


class NotOffered(ExchangeRefused, AttributeError):
    """The array lacks this interface.

    An AttributeError, so that a consumer that probes for protocols tries the next one.
    """


class RawArray(NamedTuple):
    """An array as numbers, for C, TensorRT, NIXL and other consumers of pointers.

    Keeps nothing alive.

    Attributes
    ----------
    ptr : address of the first element.
    shape, strides : by axis, strides in bytes; None for compact (C order).
    dtype : ``"float16"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ...
    device : ``"cpu"``, ``"pinned"`` or ``"cuda:<number>"``.
    stream : pointer of the CUDA stream that the array's last work was launched on; None on a CPU, or if there is none.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    device: str = "cpu"
    stream: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """An array anywhere in memory.

    Speaks DLPack 1.x and older, ``__array_interface__`` and ``__cuda_array_interface__`` v3.

    Made by :func:`~pagedkv.interop.export` (ours, for others) and :func:`~pagedkv.interop.as_view` (others', for us).

    Attributes
    ----------
    ptr : address of the first element.
    shape, strides : by axis, strides in bytes.
    dtype : name of the element type, ``"bfloat16"`` and the fp8 types among them.
    device : ``"cpu"``, ``"pinned"`` (which others are told is ``"cpu"``) or ``"cuda:<number>"``.
    read_only : what others are told; DLPack before 1.0 cannot say it, so such a consumer is refused.
    harmless : its consumer is known not to write, and so is not refused; see :func:`~pagedkv.interop.fit`.
    stream : the CUDA stream that the array is ready on; None: CuPy's current one when it is handed over.
    owner : keeps the memory, until the view and all that was made of it are gone.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    read_only: bool = True
    harmless: bool = field(default=False, repr=False)
    stream: Any = field(default=None, repr=False)
    owner: Any = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, gaps between them not counted."""
        return self.size * self.itemsize

    @property
    def is_compact(self) -> bool:
        """Whether the elements lie one after the other in C order."""
        expected = compact_strides(self.shape, self.itemsize)
        pairs = zip(self.shape, self.strides, expected, strict=True)
        return not self.size or all(n == 1 or stride == wanted for n, stride, wanted in pairs)

    @property
    def alignment(self) -> int:
        """The largest power of two that divides the address."""
        return self.ptr & -self.ptr

    def raw(self) -> RawArray:
        """Pointer, shape, strides, dtype, device and stream.

        The view must outlive their use.
        """
        stream = stream_pointer(self.stream) if self._kind == CUDA else None
        return RawArray(self.ptr, self.shape, self.strides, self.dtype, self.device, stream)

    def numpy(self) -> NDArray[Any]:
        """The same memory as a NumPy array.

        bfloat16 and fp8 have the dtypes of ``ml_dtypes``, or where that is not installed are their bits.

        Raises
        ------
        ExchangeRefused
            It lies on a GPU.
        """
        if self._kind == CUDA:
            raise ExchangeRefused(f"the array lies on {self.device}: NumPy reads host memory; copy it there first")
        return ndarray_at(self.ptr, self.shape, self.strides, numpy_dtype(self.dtype), self.read_only, self)

    def copy(self) -> View:
        """A compact copy in memory of its own, at a multiple of 64 bytes, that may be written."""
        if self._kind == CUDA:
            from pagedkv.interop.cupy_arrays import copy_of

            return copy_of(self)
        array = aligned_empty(self.shape, self.dtype)
        array[...] = self.numpy()
        return View(array.ctypes.data, array.shape, array.strides, self.dtype, read_only=False, owner=array)

    # ---- DLPack

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's (type, id).

        Pinned memory is reported as CPU memory, as most consumers expect.
        """
        kind, number = device_code(self.device)
        return (CPU, 0) if kind == PINNED else (kind, number)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule, as the array API standard has it.

        Parameters
        ----------
        stream : the consumer's CUDA stream: 1 (default, also None), 2 (per thread), a pointer; -1: do not synchronise.
            Its later work then waits, on the device, for the array. Only None on a CPU.
        max_version : the newest DLPack that the consumer knows; None or below 1.0 gives a capsule of the old kind.
        dl_device : where it should be. Only where it is; pinned memory is CPU, or (3, 0) if asked for.
        copy : True gives a compact copy that may be written; False and None give the array itself.

        Raises
        ------
        ExchangeRefused (a BufferError)
            Read-only for a consumer that could not be told so; another device; a stream that cannot be one.
        """
        device = self._device_for(dl_device)
        if copy:
            copied = self.copy()
            return copied._capsule(stream, max_version, device, IS_COPIED)
        return self._capsule(stream, max_version, device, READ_ONLY if self.read_only else 0)

    def _capsule(
        self, stream: int | None, max_version: tuple[int, int] | None, device: tuple[int, int], flags: int
    ) -> Any:
        version = None
        if max_version is not None and max_version[0] >= 1:
            version = min((int(max_version[0]), int(max_version[1])), DLPACK_VERSION)
        if version is None and flags & READ_ONLY and not self.harmless:
            raise ExchangeRefused(
                "the array is read-only, and this consumer asks for DLPack before 1.0, which cannot say so: give it "
                "fit(view, <framework>) if that never writes, view.copy(), or an export with read_only=False"
            )
        size = self.itemsize
        strides = tuple([stride // size for stride in self.strides])
        if any(steps * size != stride for steps, stride in zip(strides, self.strides)):
            raise ExchangeRefused(f"DLPack counts strides in elements: {self.strides} bytes are no multiples of {size}")
        self._order(stream)
        address = self.ptr if self.size else 0  # DLPack: no elements, no address
        return make_capsule(self, address, self.shape, strides, CODES[self.dtype], device, flags, version)

    def _order(self, stream: int | None) -> None:
        """Make the consumer's stream wait for the array's."""
        kind, number = device_code(self.device)
        if kind != CUDA:
            if stream is not None:
                raise ExchangeRefused(f"stream = {stream!r:.40}: an array in host memory has none; pass None")
            return
        if stream == NO_SYNC:
            return
        if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int) or stream < 1):
            raise ExchangeRefused(
                f"stream = {stream!r:.40}: 1 is CUDA's default stream, 2 the per-thread one, -1 none; 0 is ambiguous"
            )
        run_after(1 if stream is None else stream, stream_pointer(self.stream), number)

    def _device_for(self, wanted: tuple[int, int] | None) -> tuple[int, int]:
        here = self.__dlpack_device__()
        offered = {here, device_code(self.device)}
        if wanted is not None and tuple(wanted) not in offered:
            raise ExchangeRefused(
                f"the array lies on {self.device}, DLPack device {here}, not on {tuple(wanted)}: copy it there"
            )
        return here if wanted is None else (int(wanted[0]), int(wanted[1]))

    # ---- older protocols

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA array interface, version 3; the consumer waits for ``stream``.

        Only on a GPU, and only for NumPy's dtypes.
        """
        if self._kind != CUDA:
            raise NotOffered("the array lies in host memory: it has no __cuda_array_interface__")
        return {**self._interface("__cuda_array_interface__"), "version": 3, "stream": stream_pointer(self.stream)}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, version 3. Only in host memory, only of NumPy's dtypes."""
        if self._kind == CUDA:
            raise NotOffered(f"the array lies on {self.device}: it has no __array_interface__")
        return {**self._interface("__array_interface__"), "version": 3}

    def _interface(self, name: str) -> dict[str, Any]:
        if not in_numpy(self.dtype):
            raise NotOffered(f"{name} has no type string for {self.dtype}: use DLPack")
        return {
            "shape": self.shape,
            "typestr": bits_dtype(self.dtype).str,
            "data": (self.ptr if self.size else 0, self.read_only),
            "strides": None if self.is_compact else self.strides,
        }

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """As :meth:`numpy`; so that ``np.asarray`` of a bfloat16 view is an array too."""
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise WrongType(f"the array has dtype {array.dtype}; {np.dtype(dtype)} would need a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def _kind(self) -> int:
        return device_code(self.device)[0]
