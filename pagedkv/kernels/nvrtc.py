"""NVRTC through ctypes: CUDA source in, cubin or PTX out. Needs no GPU and no driver.

Library and headers come from NVIDIA's pip packages (the extras ``cuda12`` and ``cuda13``) or a CUDA toolkit;
toolkits.py finds them. NVRTC has no include path of its own: ``cuda_fp16.h`` and its like lie in the runtime's package.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedkv import extras
from pagedkv.errors import CompileError, KernelsUnavailable


def cure() -> str:
    """How to install a compiler and its headers."""
    return f"{extras.command('cuda12')}, or the packages of the extra [cuda13]"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of one NVRTC compilation.

    ``code`` is a cubin or PTX without the closing zero byte, ``log`` the compiler's messages.
    """

    code: bytes
    log: str


class Nvrtc:
    """One NVRTC library with the folder of CUDA headers that belongs to it.

    Parameters
    ----------
    library : path of ``libnvrtc.so``.
    include : folder that holds ``cuda_fp16.h``.
    """

    def __init__(self, library: str | Path, include: str | Path) -> None:
        self.library, self.include = Path(library), Path(include)
        try:
            self._lib = ctypes.CDLL(str(library))
        except OSError as error:
            raise KernelsUnavailable(f"NVRTC at {library} cannot be loaded ({error}): {cure()}") from error
        if not (self.include / "cuda_fp16.h").exists():
            raise KernelsUnavailable(f"no cuda_fp16.h in {include}: {cure()}")
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        self._lib.nvrtcDestroyProgram.argtypes = [ctypes.c_void_p]

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor version, such as (12, 9)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities this NVRTC compiles for, such as (75, 80, 86, 89, 90)."""
        count = ctypes.c_int()
        self._lib.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._lib.nvrtcGetSupportedArchs(archs)
        return tuple(archs)

    @property
    def library_bytes(self) -> int:
        """Size of the library: tells patch releases apart, which NVRTC's own version does not."""
        return self.library.stat().st_size

    @property
    def header_version(self) -> tuple[int, int] | None:
        """CUDA version of the headers, such as (12, 9); None where they do not say."""
        path = self.include / "cuda_runtime_api.h"
        if not path.exists():
            return None
        found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", path.read_text(errors="replace"))
        return (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found else None

    def compile(self, source: str, name: str, options: Sequence[str], kind: str = "cubin") -> Compiled:
        """Compile one translation unit.

        Parameters
        ----------
        source, name : the text, and what messages call it.
        options : NVRTC options; ``-arch=`` among them.
        kind : ``"cubin"`` or ``"ptx"``.

        Raises
        ------
        CompileError
            The compiler refused; the message holds its log.
        """
        program = ctypes.c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None), name
        )
        try:
            given = [option.encode() for option in (*options, f"-I{self.include}")]
            status = self._lib.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                reason = self._lib.nvrtcGetErrorString(status).decode()
                raise CompileError(name, tuple(options), f"{reason}\n{log}")
            code = self._read(program, "PTX" if kind == "ptx" else "CUBIN")
            return Compiled(code.rstrip(b"\0") if kind == "ptx" else code, log)
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, text), what)
        return text.raw

    def _check(self, status: int, name: str) -> None:
        if status:
            raise CompileError(name, (), self._lib.nvrtcGetErrorString(status).decode())


def default_nvrtc() -> Nvrtc:
    """The newest NVRTC of this environment.

    Raises
    ------
    KernelsUnavailable
        There is none; the message has the pip command that cures it.
    """
    from pagedkv.kernels.toolkits import nvrtc_for  # which builds on this file

    return nvrtc_for()
