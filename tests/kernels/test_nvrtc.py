"""NVRTC through ctypes.

What it returns, what a refusal says, and what the error says where something is missing.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import CompileError, InvalidArgument, KernelsUnavailable, WrongType
from pagedkv.kernels import toolkits
from pagedkv.kernels.jit import CompileCache, default_folder
from pagedkv.kernels.nvrtc import Nvrtc, default_nvrtc
from pagedkv.kernels.precompile import architecture, checked_pair, precompile
from pagedkv.kernels.shipped import shipped
from pagedkv.kernels.toolkits import installed_nvrtcs, nvrtc_for
from pagedkv.kernels.variant import variant

SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.f; }'


@pytest.fixture
def nvrtc() -> Nvrtc:
    try:
        return default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def nothing_remembered() -> object:
    """What is found here is looked for anew, now and afterwards."""
    installed_nvrtcs.cache_clear()
    yield
    installed_nvrtcs.cache_clear()


def test_a_kernel_becomes_ptx_and_a_cubin(nvrtc: Nvrtc) -> None:
    ptx = nvrtc.compile(SOURCE, "twice.cu", ("-arch=compute_90",), "ptx").code
    assert b".entry twice" in ptx
    assert not ptx.endswith(b"\0")
    assert nvrtc.compile(SOURCE, "twice.cu", ("-arch=sm_90",)).code.startswith(b"\x7fELF")


def test_the_same_source_becomes_the_same_cubin(nvrtc: Nvrtc) -> None:
    first, second = (nvrtc.compile(SOURCE, "twice.cu", ("-arch=sm_90",)).code for _ in range(2))
    assert first == second


def test_the_cuda_headers_are_found(nvrtc: Nvrtc) -> None:
    source = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <cuda_fp8.h>\n" + SOURCE
    assert nvrtc.compile(source, "twice.cu", ("-arch=sm_90",)).code
    assert nvrtc.header_version is not None
    assert nvrtc.header_version[0] == nvrtc.version[0]


def test_a_source_that_does_not_compile_raises_with_the_compilers_log(nvrtc: Nvrtc) -> None:
    with pytest.raises(CompileError, match=r"twice\.cu\(1\): error: identifier \"y\" is undefined") as caught:
        nvrtc.compile(SOURCE.replace("x[", "y["), "twice.cu", ("-arch=sm_90", "-DCOLOUR=3"))
    assert "-DCOLOUR=3" in str(caught.value)
    assert caught.value.name == "twice.cu"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_option_that_does_not_exist_raises_with_the_compilers_log(nvrtc: Nvrtc) -> None:
    with pytest.raises(CompileError, match="-frobnicate"):
        nvrtc.compile(SOURCE, "twice.cu", ("-frobnicate",))


def test_a_warning_is_in_the_log(nvrtc: Nvrtc) -> None:
    compiled = nvrtc.compile(SOURCE.replace("{ x", "{ int unused; x"), "twice.cu", ("-arch=sm_90",))
    assert "unused" in compiled.log


def test_every_installed_nvrtc_is_found_newest_first() -> None:
    versions = [nvrtc.version for nvrtc in installed_nvrtcs()]
    assert versions == sorted(versions, reverse=True)
    assert len(set(versions)) == len(versions)


def test_a_driver_gets_the_newest_nvrtc_of_its_own_or_an_older_major_version(monkeypatch: pytest.MonkeyPatch) -> None:
    every = tuple(SimpleNamespace(version=version) for version in ((13, 5), (12, 9), (12, 4)))
    monkeypatch.setattr(toolkits, "installed_nvrtcs", lambda: every)
    assert nvrtc_for(None).version == (13, 5)
    assert nvrtc_for((14, 0)).version == (13, 5)
    assert nvrtc_for((13, 0)).version == (13, 5)
    assert nvrtc_for((12, 2)).version == (12, 9)
    with pytest.raises(KernelsUnavailable, match=r"CUDA 11\.8 .* NVRTC 13\.5, 12\.9, 12\.4 .*: update the driver$"):
        nvrtc_for((11, 8))


def test_precompiling_takes_the_nvrtc_for_the_named_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    every = tuple(SimpleNamespace(version=version) for version in ((13, 5), (12, 9)))
    monkeypatch.setattr(toolkits, "installed_nvrtcs", lambda: every)
    taken: list[object] = []
    monkeypatch.setattr(
        CompileCache, "precompile", lambda self, *_, **options: taken.append((self.nvrtc.version, self.folder))
    )
    precompile([], (9, 0), driver=(12, 2))
    precompile([], (9, 0), driver=(13, 0))
    assert taken == [((12, 9), default_folder()), ((13, 5), default_folder())]
    with pytest.raises(KernelsUnavailable, match=r"driver is for CUDA 11\.8 .* NVRTC 13\.5, 12\.9"):
        precompile([], (9, 0), driver=(11, 8))
    with pytest.raises(InvalidArgument, match="cache= or driver=, not both"):
        precompile([], (9, 0), driver=(12, 2), cache=CompileCache(every[0], None))  # type: ignore[arg-type]
    with pytest.raises(WrongType, match=r"driver must be a pair of whole numbers, such as \(12, 8\), got 12"):
        precompile([], (9, 0), driver=12)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [shipped, lambda given: precompile([], given)], ids=["shipped", "precompile"])
@pytest.mark.parametrize("given", ["9.0", "90", b"90", 90, 9.0, (9,), (9, 0, 0), (9.0, 0), (True, 0), None, [[9], [0]]])
def test_a_capability_that_is_no_pair_of_numbers_is_named(call: Callable[[Any], object], given: object) -> None:
    with pytest.raises(WrongType, match=r"capability must be a pair of whole numbers, such as \(9, 0\), got "):
        call(given)
    with pytest.raises(InvalidArgument, match=r"capability must not be negative, got \(-9, 0\)"):
        call((-9, 0))


def test_a_list_is_a_capability_too() -> None:
    assert checked_pair([9, np.int64(0)], "capability", "(9, 0)") == (9, 0)


def test_without_nvrtc_the_error_has_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, nothing_remembered: None
) -> None:
    monkeypatch.setattr(toolkits.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(KernelsUnavailable, match=r"NVRTC and the CUDA headers.*pip install .* extra \[cuda12\]"):
        default_nvrtc()


def test_nvrtc_without_its_headers_is_an_error_that_names_the_header(
    monkeypatch: pytest.MonkeyPatch, nvrtc: Nvrtc, nothing_remembered: None, tmp_path: Path
) -> None:
    with pytest.raises(KernelsUnavailable, match=r"no cuda_fp16\.h in .*pip install"):
        Nvrtc(nvrtc.library, tmp_path)
    monkeypatch.setattr(toolkits, "_from_pip", lambda: iter([(nvrtc.library, tmp_path)]))
    monkeypatch.setattr(toolkits, "_from_pathfinder", lambda: iter(()))
    with pytest.raises(KernelsUnavailable, match=r"cuda_fp16\.h\) are missing: pip install"):
        default_nvrtc()


def test_a_damaged_library_is_an_error_that_names_it(tmp_path: Path) -> None:
    library = tmp_path / "libnvrtc.so.12"
    library.write_bytes(b"\x7fELF, and no more")
    with pytest.raises(KernelsUnavailable, match=rf"{library} cannot be loaded .*pip install"):
        Nvrtc(library, tmp_path)


def test_a_toolkit_outside_pip_is_found_by_pathfinder(
    monkeypatch: pytest.MonkeyPatch, nvrtc: Nvrtc, nothing_remembered: None
) -> None:
    finder = ModuleType("cuda.pathfinder")
    finder.load_nvidia_dynamic_lib = lambda name: SimpleNamespace(abs_path=str(nvrtc.library))  # type: ignore[attr-defined]
    finder.find_nvidia_header_directory = lambda name: str(nvrtc.include)  # type: ignore[attr-defined]
    package = ModuleType("cuda")
    package.pathfinder = finder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", finder)
    monkeypatch.setattr(toolkits, "_from_pip", lambda: iter(()))
    assert default_nvrtc().version == nvrtc.version


@pytest.mark.parametrize(
    ("capability", "features", "expected"),
    [
        ((9, 0), "", "sm_90"),
        ((9, 0), "a", "sm_90a"),
        ((8, 6), "", "sm_86"),
        ((8, 8), "", "sm_86"),
        ((12, 1), "", "sm_120"),
    ],
)
def test_a_device_gets_code_of_its_own_or_an_earlier_minor_version(
    capability: tuple[int, int], features: str, expected: str
) -> None:
    known = SimpleNamespace(version=(12, 9), architectures=lambda: (75, 80, 86, 90, 100, 120))
    assert architecture(variant("plan", arch_features=features), capability, known) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("capability", "features"), [((13, 0), ""), ((10, 3), "a")])
def test_a_device_that_nvrtc_does_not_know_is_an_error_with_the_command(
    capability: tuple[int, int], features: str
) -> None:
    known = SimpleNamespace(version=(12, 9), architectures=lambda: (75, 80, 86, 90, 100, 120))
    with pytest.raises(KernelsUnavailable, match=r"NVRTC 12\.9 does not compile for compute capability .*pip install"):
        architecture(variant("plan", arch_features=features), capability, known)  # type: ignore[arg-type]


def test_a_device_too_old_for_an_nvrtc_is_not_told_to_take_a_newer_one() -> None:
    of_13, of_12 = (
        SimpleNamespace(version=version, architectures=lambda: (75, 80, 90)) for version in ((13, 5), (12, 9))
    )
    with pytest.raises(KernelsUnavailable, match=r"NVRTC 13\.5 .* 7\.0 .*CUDA 12's may: pip install .*\[cuda12\]"):
        architecture(variant("plan"), (7, 0), of_13)  # type: ignore[arg-type]
    with pytest.raises(KernelsUnavailable, match=r"NVRTC 12\.9 .* 7\.0 .*too old for every NVRTC that pagedkv"):
        architecture(variant("plan"), (7, 0), of_12)  # type: ignore[arg-type]
