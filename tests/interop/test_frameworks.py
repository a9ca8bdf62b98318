"""What `fit` says of each framework is true of the framework itself.

The framework has the same address where `fit` says so, and refuses or copies where it does not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import ExchangeRefused, InvalidArgument
from pagedkv.interop import View, as_view, empty, export, fit
from pagedkv.interop.dtypes import CODES, bits_dtype
from pagedkv.interop.needs import FRAMEWORKS


@dataclass
class Side:
    """A framework: how it takes a view, where its array then lies, and what it holds."""

    take: Callable[[View], Any]
    address: Callable[[Any], int]
    values: Callable[[Any], Any]


def _numpy(_: pytest.FixtureRequest) -> Side:
    return Side(View.numpy, lambda a: a.ctypes.data, np.asarray)


def _numba(_: pytest.FixtureRequest) -> Side:
    numba = pytest.importorskip("numba")

    def take(view: View) -> Any:
        array = view.numpy()
        numba.typeof(array)  # raises for dtypes that it has not
        return array

    return Side(take, numba.njit(lambda a: a.ctypes.data), numba.njit(lambda a: a))


def _jax(request: pytest.FixtureRequest) -> Side:
    jax = request.getfixturevalue("jax")
    return Side(lambda view: jax.dlpack.from_dlpack(view, copy=False), lambda a: a.unsafe_buffer_pointer(), np.asarray)


def _torch(request: pytest.FixtureRequest) -> Side:
    torch = request.getfixturevalue("torch")
    return Side(torch.from_dlpack, lambda a: a.data_ptr(), lambda a: as_view(a).numpy())


def _onnxruntime(request: pytest.FixtureRequest) -> Side:
    ort = request.getfixturevalue("ort")
    from pagedkv.interop.onnxruntime import _where

    def take(view: View) -> Any:
        _, _, element, shape, address = _where(view)
        session = _identity(element, len(shape))
        binding = session.io_binding()
        binding.bind_input("x", "cpu", 0, element, shape, address)
        out = np.empty(shape, bits_dtype(view.dtype))
        binding.bind_output("y", "cpu", 0, element, shape, out.ctypes.data)
        session.run_with_iobinding(binding)
        return address, out.view(view.numpy().dtype)

    def _identity(element: Any, ndim: int) -> Any:
        from onnx import helper

        code = element if isinstance(element, int) else helper.np_dtype_to_tensor_dtype(np.dtype(element))
        x, y = (helper.make_tensor_value_info(name, code, [None] * ndim) for name in "xy")
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
        return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    return Side(take, lambda pair: pair[0], lambda pair: pair[1])


def _mlx(request: pytest.FixtureRequest) -> Side:
    mx = request.getfixturevalue("mx")
    return Side(mx.from_dlpack, lambda a: as_view(a).ptr, lambda a: as_view(a).numpy())


def _tinygrad(request: pytest.FixtureRequest) -> Side:
    pytest.importorskip("tinygrad", reason="tinygrad is not installed; the test extra names it (Python 3.11 and later)")
    from tinygrad import dtypes
    from tinygrad.device import Buffer

    names = {"float8_e4m3fn": "fp8e4m3", "float8_e5m2": "fp8e5m2"}

    def take(view: View) -> Any:
        memory = memoryview(view.numpy().view(bits_dtype(view.dtype))).cast("B")
        dtype = getattr(dtypes, names.get(view.dtype, view.dtype))
        return Buffer("PYTHON", view.size, dtype, opaque=memory), view

    return Side(
        take,
        lambda pair: np.frombuffer(pair[0].as_memoryview(force_zero_copy=True), np.uint8).ctypes.data,
        lambda pair: np.frombuffer(pair[0].as_memoryview(force_zero_copy=True), pair[1].numpy().dtype).reshape(
            pair[1].shape
        ),
    )


SIDES = {
    "numpy": _numpy, "numba": _numba, "jax": _jax, "torch": _torch, "onnxruntime": _onnxruntime, "mlx": _mlx,
    "tinygrad": _tinygrad,
}  # fmt: skip


def test_every_framework_of_the_table_is_tested():
    assert SIDES.keys() == FRAMEWORKS.keys()


@pytest.fixture(params=FRAMEWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def side(name: str, request: pytest.FixtureRequest) -> Side:
    return SIDES[name](request)


def filled(shape: tuple[int, ...], dtype: str, alignment: int = 64) -> View:
    """An aligned array of small whole numbers."""
    view = empty(shape, dtype, alignment=alignment)
    view.numpy()[...] = np.arange(view.size).reshape(shape) % 2
    return view


def same(found: Any, view: View) -> bool:
    """Whether an array has the view's shape and bits."""
    found = np.asarray(found)
    return found.shape == view.shape and found.tobytes() == view.numpy().tobytes()


LAYOUTS: dict[str, Callable[[], View]] = {
    "compact": lambda: filled((4, 6), "float32"),
    "transposed": lambda: export(filled((4, 6), "float32").numpy().T, read_only=False),
    "gaps": lambda: export(filled((8, 6), "float32").numpy()[::2], read_only=False),
    "inner gaps": lambda: export(filled((4, 12), "float32").numpy()[:, ::2], read_only=False),
    "backwards": lambda: export(filled((4, 6), "float32").numpy()[::-1], read_only=False),
    "at 16 bytes": lambda: export(filled((7, 4), "float32").numpy()[1:], read_only=False),
    "at 4 bytes": lambda: export(filled((9,), "float32").numpy()[1:], read_only=False),
    "at 1 byte": lambda: export(filled((33,), "uint8").numpy()[1:].view(np.float32), read_only=False),
    "read-only": lambda: export(filled((4, 6), "float32")),
    "without axes": lambda: filled((), "float32"),
}
TAKEN = {
    "numpy": set(LAYOUTS) - {"at 1 byte"},
    "numba": set(LAYOUTS) - {"at 1 byte"},
    "jax": {"compact", "transposed", "read-only", "without axes"},
    "onnxruntime": {"compact", "at 16 bytes", "at 4 bytes", "read-only", "without axes"},
    "torch": {"compact", "transposed", "gaps", "inner gaps", "at 16 bytes", "at 4 bytes", "without axes"},
    "tinygrad": {"compact", "at 16 bytes", "at 4 bytes", "without axes"},
    "mlx": set(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_shared_refused_or_copied_when_asked(name: str, side: Side, layout: str):
    view = LAYOUTS[layout]()
    if layout in TAKEN[name]:
        fitted = fit(view, name)
        assert fitted.ptr == view.ptr
        taken = side.take(fitted)
        assert side.address(taken) == view.ptr
        assert same(side.values(taken), view)
        assert fit(view, name, copy=True).ptr == view.ptr  # no copy where none is needed
        return
    with pytest.raises(ExchangeRefused, match=f"{name} does not take this array as it is"):
        fit(view, name)
    copied = fit(view, name, copy=True)
    assert copied.ptr != view.ptr
    assert same(copied.numpy(), view)
    taken = side.take(copied)
    assert (side.address(taken) == copied.ptr) == (name != "mlx")
    assert same(side.values(taken), view)


@pytest.mark.parametrize("dtype", CODES)
def test_a_dtype_is_taken_or_refused_by_name(name: str, side: Side, dtype: str):
    view = filled((4, 8), dtype)
    try:
        fitted = fit(view, name, copy=True)
    except ExchangeRefused:
        with pytest.raises(ExchangeRefused, match=dtype):
            fit(view, name)
        try:
            itemsize = np.asarray(side.values(side.take(view))).itemsize
        except Exception:  # an error of the framework's own, of whatever type
            return
        assert itemsize < view.itemsize, f"{name} takes {dtype} after all"  # narrowed without a word
        return
    taken = side.take(fitted)
    assert (side.address(taken) == view.ptr) == (name != "mlx")
    assert same(side.values(taken), view)


def test_all_that_is_wrong_is_named_at_once():
    view = export(filled((9, 5), "float32").numpy()[1::2, ::-1])
    with pytest.raises(ExchangeRefused) as refusal:
        fit(view, "torch")
    assert "read-only" in str(refusal.value)
    assert "backwards" in str(refusal.value)
    with pytest.raises(ExchangeRefused) as refusal:
        fit(view, "jax")
    assert "64 bytes" in str(refusal.value)
    assert "gaps" in str(refusal.value)


def test_frameworks_that_are_not_known_are_refused_by_name():
    with pytest.raises(InvalidArgument, match="tensorflow"):
        fit(np.ones(3), "tensorflow")


def test_frameworks_that_never_write_get_read_only_arrays_without_being_told():
    view = export(filled((4,), "float32"))
    with pytest.raises(ExchangeRefused):
        view.__dlpack__()
    assert fit(view, "jax").__dlpack__() is not None
    assert fit(view, "jax").read_only
    with pytest.raises(ExchangeRefused):  # the promise is about one consumer: it does not travel
        export(fit(view, "jax")).__dlpack__()


def test_asking_for_a_framework_does_not_import_it():
    script = (
        "import sys; from pagedkv.interop import empty, fit; from pagedkv.interop.needs import FRAMEWORKS\n"
        "[fit(empty((4,), 'float32'), name, copy=True) for name in FRAMEWORKS]\n"
        "print(sorted(set(FRAMEWORKS) & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ran.stdout == "['numpy']\n", ran.stderr
