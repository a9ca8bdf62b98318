"""Builds the Cython core. Every ``.pyx`` under ``pagedkv/`` becomes one extension module.

``PAGEDKV_DEBUG=1`` compiles with bounds checks and assertions; otherwise both are off, and only the checks
that guard the caller's data (reference counts, handles) stay. ``PAGEDKV_SANITIZE=address,undefined`` (or
``thread``) compiles for the compiler's sanitizers, whose runtime must be preloaded into Python then.
``build_ext --only a.b,c.d`` limits a build to some modules.

Generated C goes to ``build/``, never beside the sources, so neither the sdist nor the wheel can pick it up.
"""

import os
import shutil
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import OptionError

DEBUG = os.environ.get("PAGEDKV_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("PAGEDKV_SANITIZE", "")
MODE = "-".join(["debug" if DEBUG else "release", *(name for name in SANITIZE.split(",") if name)])
ROOT = Path(__file__).parent
STAMP = Path("build", "mode")

MACROS = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if not DEBUG:
    MACROS.append(("CYTHON_WITHOUT_ASSERTIONS", "1"))
FLAGS = ["-O1", "-g"] if DEBUG else ["-O3", "-fno-math-errno"]
INSTRUMENT = [f"-fsanitize={SANITIZE}"] if SANITIZE else []
if SANITIZE:
    FLAGS = ["-O1", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", *INSTRUMENT]
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


PARTS = {  # C files of modules that share a folder with another
    "_gather.pyx": {"gather.c"},
    "_write.pyx": {"merge.c", "write.c"},
}
# GCC keeps the flags of floating-point errors right, which no code reads, and so has no vectors for loops with choices
FLAGS_OF = {"_write.pyx": ["-fno-trapping-math"]}


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
        yield Extension(
            ".".join(relative.with_suffix("").parts),
            [str(relative), *parts],
            depends=[str(STAMP), *headers],
            include_dirs=[numpy.get_include(), *map(str, shared)],
            define_macros=MACROS,
            extra_compile_args=FLAGS + FLAGS_OF.get(source.name, []),
            extra_link_args=INSTRUMENT,
        )


class BuildExt(build_ext):
    """``build_ext`` that cythonizes; ``--only`` limits it to the modules being worked on."""

    user_options = [*build_ext.user_options, ("only=", None, "comma-separated module names to build")]

    def initialize_options(self):
        super().initialize_options()
        self.only = None

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        if self.only:
            wanted = set(self.only.split(","))
            unknown = wanted - {extension.name for extension in self.extensions}
            if unknown:
                raise OptionError(f"--only names no module of this tree: {', '.join(sorted(unknown))}")
            self.extensions = [extension for extension in self.extensions if extension.name in wanted]

    def build_extensions(self):
        if not STAMP.exists() or STAMP.read_text() != MODE:  # a new date: every module is older than its mode
            STAMP.parent.mkdir(exist_ok=True)
            STAMP.write_text(MODE)
        directory = f"build/cython-{MODE}"
        made = cythonize(self.extensions, compiler_directives=DIRECTIVES, build_dir=directory, quiet=True)
        sources = {extension.name: extension.sources for extension in made}
        for extension in self.extensions:
            extension.sources = sources[extension.name]
        super().build_extensions()


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


setup(
    packages=find_packages(include=["pagedkv", "pagedkv.*"]),
    package_dir={"": "."},  # said aloud, so that an editable install is a plain path entry
    ext_modules=list(extensions()),
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
)
