"""Which NVRTC: all that are installed, and the one that suits a driver.

NVIDIA's pip packages lie beside each other, CUDA 12's and CUDA 13's, so an environment may hold both. A driver loads
the output of an NVRTC of its own major version or an older one, not of a newer one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from pagedkv import extras
from pagedkv.errors import KernelsUnavailable
from pagedkv.kernels.nvrtc import Nvrtc, cure

# Below site-packages/nvidia: the folder of libnvrtc.so, and of the headers that belong to it.
_PIP_LAYOUTS = (("cu*/lib", "../include"), ("cuda_nvrtc/lib", "../../cuda_runtime/include"))


@functools.lru_cache(maxsize=1)
def installed_nvrtcs() -> tuple[Nvrtc, ...]:
    """Every NVRTC that loads and has its headers, newest first.

    Those of pip, or else the one that cuda-pathfinder finds.
    """
    found = _usable(_from_pip()) or _usable(_from_pathfinder())
    return tuple(sorted(found, key=lambda nvrtc: nvrtc.version, reverse=True))


def nvrtc_for(driver: tuple[int, int] | None = None) -> Nvrtc:
    """The newest NVRTC whose cubins a driver loads.

    Parameters
    ----------
    driver : CUDA version that the driver is for, such as (12, 8); None: any NVRTC.

    Raises
    ------
    KernelsUnavailable
        There is none; the message has the pip command that cures it.
    """
    every = installed_nvrtcs()
    if not every:
        raise KernelsUnavailable(f"{_why_none()}: {cure()}")
    fitting = [nvrtc for nvrtc in every if driver is None or nvrtc.version[0] <= driver[0]]
    if not fitting:
        have = ", ".join(f"{major}.{minor}" for major, minor in (nvrtc.version for nvrtc in every))
        assert driver is not None
        raise KernelsUnavailable(
            f"the driver is for CUDA {driver[0]}.{driver[1]} and cannot load what NVRTC {have} compiles: "
            f"{extras.command(f'cuda{driver[0]}') + ', or ' if driver[0] >= 12 else ''}update the driver"
        )
    return fitting[0]


def _usable(candidates: Iterable[tuple[Path, Path]]) -> list[Nvrtc]:
    found = []
    for library, include in candidates:
        with contextlib.suppress(KernelsUnavailable):  # damaged, or its headers are missing
            found.append(Nvrtc(library, include))
    return found


def _from_pip() -> Iterator[tuple[Path, Path]]:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        for lib, include in _PIP_LAYOUTS:
            for folder in sorted(Path(root).glob(lib)):
                for library in sorted(folder.glob("libnvrtc.so.*")):
                    yield library, (folder / include).resolve()


def _from_pathfinder() -> Iterator[tuple[Path, Path]]:
    """A toolkit of conda or of the system, where CUDA_PATH or the loader finds it."""
    try:
        from cuda import pathfinder
    except ImportError:
        return
    try:
        library = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
        include = pathfinder.find_nvidia_header_directory("cudart")
    except Exception:  # several kinds, all of which mean that there is none
        return
    if library is not None and include is not None:
        yield Path(library), Path(include)


def _why_none() -> str:
    """The missing libraries, for an environment without a usable NVRTC."""
    library = next((library for library, _ in (*_from_pip(), *_from_pathfinder())), None)
    if library is not None:
        return f"NVRTC at {library} cannot be loaded, or its headers (cuda_fp16.h) are missing"
    if importlib.util.find_spec("nvidia") is None and not _has_pathfinder():
        return "the CUDA kernels need NVRTC and the CUDA headers, which are not installed"
    return "NVRTC or the CUDA headers (cuda_fp16.h) were not found"


def _has_pathfinder() -> bool:
    try:
        return importlib.util.find_spec("cuda.pathfinder") is not None
    except ImportError:
        return False
