"""Builds the Cython core. Every ``.pyx`` under ``pagedkv/`` becomes one extension module.

``PAGEDKV_DEBUG=1`` compiles with bounds checks and assertions; otherwise both are off, and only the checks
that guard the caller's data (reference counts, handles) stay. ``PAGEDKV_SYMBOLS=1`` keeps debug information and
symbols in an optimised build, which has neither otherwise. ``PAGEDKV_SANITIZE=address,undefined`` (or
``thread``) compiles for the compiler's sanitizers, whose runtime must be preloaded into Python then.
``build_ext --only a.b,c.d`` limits a build to some modules.

Cython and the C compiler use every core there is (``build_ext -j 1``: one). Each module is named when its C is made and
when it is compiled; with ``-v`` the compiler's commands are as well.

Generated C goes to ``build/``, never beside the sources, so neither the sdist nor the wheel can pick it up.
"""

import itertools
import logging
import os
import shutil
import sys
import time
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, OptionError

DEBUG = os.environ.get("PAGEDKV_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("PAGEDKV_SANITIZE", "")
SYMBOLS = DEBUG or bool(SANITIZE) or os.environ.get("PAGEDKV_SYMBOLS", "") not in ("", "0")
KIND = "debug" if DEBUG else "symbols" if SYMBOLS and not SANITIZE else "release"
MODE = "-".join([KIND, *(name for name in SANITIZE.split(",") if name)])
ROOT = Path(__file__).parent
STAMP = Path("build", "mode")

MACROS = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if not DEBUG:
    MACROS.append(("CYTHON_WITHOUT_ASSERTIONS", "1"))
# Loops over numbers and rows gain from -O3. What else Cython writes does not, and is a quarter smaller and faster to
# compile with -O2
LOOPS = {
    "pagedkv._core.block_table", "pagedkv._core.insertion", "pagedkv.cpu._attend", "pagedkv.cpu._gather",
    "pagedkv.cpu._write", "pagedkv.tiers.disk._io",
}  # fmt: skip
LINKED = ["-Wl,-x", "-Wl,-dead_strip"] if sys.platform == "darwin" else ["-Wl,--strip-all", "-Wl,--gc-sections"]
STRIP = [] if SYMBOLS else LINKED
# No exception passes through C, and no debugger walks code without symbols: tables for unwinding are 3 % of a wheel
LEAN = [] if SYMBOLS else ["-ffunction-sections", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables"]
INSTRUMENT = [f"-fsanitize={SANITIZE}"] if SANITIZE else []
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": DEBUG,
    "embedsignature": True,
    "embedsignature.format": "python",
    "binding": True,
}


SHARED = "pagedkv._cython"  # code that all Cython modules need, such as memoryviews: once, not in each


PARTS = {  # C files of modules that share a folder with another
    "_gather.pyx": {"gather.c"},
    "_write.pyx": {"merge.c", "write.c"},
}
# GCC keeps the flags of floating-point errors right, which no code reads, and so has no vectors for loops with choices
FLAGS_OF = {"pagedkv.cpu._write": ["-fno-trapping-math"]}


def flags_of(name):
    """How a module is compiled by GCC or Clang; both know all of these."""
    if SANITIZE:
        return ["-O1", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", *INSTRUMENT]
    if DEBUG:
        return ["-O1", "-g"]
    level = "-O3" if name in LOOPS else "-O2"
    return [level, "-g" if SYMBOLS else "-g0", "-fno-math-errno", *LEAN, *FLAGS_OF.get(name, [])]


def parts_of(source):
    """C files compiled into a module: its own, or those beside it that no other owns."""
    others = set().union(*PARTS.values())
    mine = PARTS.get(source.name, {part.name for part in source.parent.glob("*.c")} - others)
    return [str(source.relative_to(ROOT).with_name(part)) for part in sorted(mine)]


def extensions():
    for source in sorted((ROOT / "pagedkv").rglob("*.pyx")):
        relative = source.relative_to(ROOT)
        parts = parts_of(source)
        shared = [folder for folder in [source.parent / "include"] if folder.is_dir()]  # headers that ship, too
        headers = [str(h.relative_to(ROOT)) for folder in [source.parent, *shared] for h in folder.glob("*.h")]
        yield extension(".".join(relative.with_suffix("").parts), [str(relative), *parts], headers, shared)
    yield extension(SHARED, [SHARED.replace(".", "/") + ".c"], [], [])  # Cython writes it into build/


def extension(name, sources, headers, folders):
    return Extension(
        name,
        sources,
        depends=[str(STAMP), *headers],
        include_dirs=[numpy.get_include(), *map(str, folders)],
        define_macros=MACROS,
        extra_compile_args=flags_of(name),
        extra_link_args=INSTRUMENT + STRIP,
    )


def cores():
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BuildExt(build_ext):
    """``build_ext`` that cythonizes; ``--only`` limits it to the modules being worked on."""

    user_options = [*build_ext.user_options, ("only=", None, "comma-separated module names to build")]

    def initialize_options(self):
        super().initialize_options()
        self.only = None

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or cores()
        if self.only:
            wanted = set(self.only.split(","))
            unknown = wanted - {extension.name for extension in self.extensions}
            if unknown:
                raise OptionError(f"--only names no module of this tree: {', '.join(sorted(unknown))}")
            self.extensions = [extension for extension in self.extensions if extension.name in wanted]

    def get_source_files(self):
        """Of the sdist: the shared module's C is made by Cython, and is no file of the tree."""
        return [name for name in super().get_source_files() if Path(name).exists()]

    def build_extensions(self):
        if self.compiler.compiler_type == "msvc":
            raise CompileError("the C kernels need GCC or Clang: on Windows, build_ext --compiler=mingw32")
        if not STAMP.exists() or STAMP.read_text() != MODE:  # a new date: every module is older than its mode
            STAMP.parent.mkdir(exist_ok=True)
            STAMP.write_text(MODE)
        began = time.monotonic()
        self._write_c()
        self._number = itertools.count(1)
        self.extensions.sort(key=weight, reverse=True)  # the longest first, so that no core waits for it at the end
        if not self.debug and self.verbose < 2:
            logging.disable(logging.INFO)  # the compiler's commands
        try:
            super().build_extensions()
        finally:
            logging.disable(logging.NOTSET)
        self._say(f"{len(self.extensions)} modules ({MODE}) after {time.monotonic() - began:.0f} s")

    def _write_c(self):
        made = cythonize(
            self.extensions,
            compiler_directives=DIRECTIVES,
            build_dir=f"build/cython-{MODE}",
            shared_utility_qualified_name=SHARED,
            nthreads=self.parallel if self.parallel > 1 else 0,
            quiet=not self.verbose,
        )
        sources = {extension.name: extension.sources for extension in made}
        for extension in self.extensions:
            extension.sources = sources[extension.name]

    def build_extension(self, ext):
        self._say(f"[{next(self._number):2}/{len(self.extensions)}] compiling {ext.name}")
        super().build_extension(ext)

    def _say(self, text):
        if self.verbose:
            print(text, flush=True)


def weight(extension):
    """About how long a module takes to compile."""
    return sum(Path(source).stat().st_size for source in extension.sources) * (5 if extension.name in LOOPS else 1)


class BuildPy(build_py):
    """``build_py`` that ships the neighbouring ``kernels_cu/`` as ``pagedkv/kernels_cu/``.

    A mapped package would do the same, but turns an editable install from a path entry into an import hook,
    which Cython's ``cimport`` and type checkers cannot see through.
    """

    def run(self):
        super().run()
        if not self.editable_mode:
            shipped = Path(self.build_lib, "pagedkv", "kernels_cu")
            shutil.rmtree(shipped, ignore_errors=True)  # of an earlier build
            shutil.copytree(ROOT / "kernels_cu", shipped, dirs_exist_ok=True)


if __name__ == "__main__":  # Cython's processes may import this file
    setup(
        packages=find_packages(include=["pagedkv", "pagedkv.*"]),
        package_dir={"": "."},  # said aloud, so that an editable install is a plain path entry
        ext_modules=list(extensions()),
        cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    )
