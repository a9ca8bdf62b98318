"""The sdist and the wheel that a user downloads.

The tests build both once, from a copy of the tree, and open them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath

import pytest
from packaging.metadata import Metadata

from tests.mutants.workshop import unoptimised

ROOT = Path(__file__).parents[2]
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
EXTRAS = {
    *("cuda12", "cuda13", "cpu", "examples", "bench", "metrics", "objects", "seal", "server", "test", "dev", "valkey"),
    *("events", "mooncake", "valkey-cluster"),
}

pytestmark = [pytest.mark.slow, pytest.mark.checkout]


@dataclass(frozen=True, repr=False)
class Distribution:
    """The two archives: their paths, and the names inside (the sdist's without its top folder)."""

    wheel: Path
    wheel_names: frozenset[str]
    sdist_names: frozenset[str]

    def read(self, suffix: str) -> bytes:
        """Content of the one file of the wheel whose name ends with ``suffix``."""
        (name,) = (name for name in self.wheel_names if name.endswith(suffix))
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """Build the sdist from a copy of the tree, and the wheel from that sdist.

    ``python -m build`` does the same, but optimises.
    """
    folder = tmp_path_factory.mktemp("build")
    copy, out = folder / "copy", folder / "out"
    shutil.copytree(ROOT, copy, ignore=NOT_SOURCES)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    environment = os.environ | {"CC": str(unoptimised(folder))}
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        wheel_names = frozenset(archive.namelist())
    with tarfile.open(sdist) as archive:
        sdist_names = frozenset(m.name.partition("/")[2] for m in archive.getmembers() if m.isfile())
    return Distribution(wheel, wheel_names, sdist_names)


def sources(pattern: str) -> list[str]:
    """Names, relative to the repository, of the package's files that match."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "pagedkv").rglob(pattern))


def test_every_pyx_ships_compiled_with_its_stub(built: Distribution) -> None:
    assert sources("*.pyx"), "no Cython sources found: is this the repository?"
    for source in sources("*.pyx"):
        stem = source.removesuffix(".pyx")
        modules = {stem + suffix for suffix in EXTENSION_SUFFIXES}
        assert modules & built.wheel_names, f"{source}: no compiled module"
        assert stem + ".pyi" in built.wheel_names, f"{source}: no stub beside it"


def test_every_module_declaration_and_stub_ships(built: Distribution) -> None:
    wanted = {*sources("*.py"), *sources("*.pxd"), *sources("*.pyi"), "pagedkv/py.typed"}
    wanted |= {f"pagedkv/lab/show/page.{kind}" for kind in ("html", "css", "js")}
    wanted.add("pagedkv/_core/c_api/include/pagedkv.h")
    wanted |= {f"pagedkv/lab/replay/data/{name}" for name in ("mooncake_conversation.npz", "NOTICE", "LICENSE")}
    assert wanted <= built.wheel_names, f"missing: {sorted(wanted - built.wheel_names)}"


def test_wheel_and_sdist_carry_the_cuda_sources_and_no_others(built: Distribution) -> None:
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels_cu").rglob("*") if path.is_file()}
    assert {"kernels_cu/plan.cu", "kernels_cu/include/pagedkv/base.cuh"} <= wanted
    assert {name for name in built.sdist_names if name.startswith("kernels_cu/")} == wanted
    shipped = {name for name in built.wheel_names if name.startswith("pagedkv/kernels_cu/")}
    assert shipped == {f"pagedkv/{name}" for name in wanted}


def test_the_wheel_carries_no_generated_c_and_nothing_from_beside_the_package(built: Distribution) -> None:
    tops = {PurePosixPath(name).parts[0] for name in built.wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pagedkv"}
    for name in built.wheel_names:
        assert PurePosixPath(name).suffix not in {".c", ".cpp", ".pyx", ".o"}, name


def test_the_sdist_carries_sources_and_nothing_built(built: Distribution) -> None:
    wanted = {*sources("*.py"), *sources("*.pyx"), *sources("*.pxd"), *sources("*.pyi")}
    wanted |= {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "pagedkv/py.typed"}
    wanted |= {"kernels_cu/README.md", "tests/packaging/test_wheel.py", ".ci/run"}
    wanted.add("pagedkv/_core/c_api/include/pagedkv.h")
    assert wanted <= built.sdist_names, f"missing: {sorted(wanted - built.sdist_names)}"
    generated = {source.removesuffix(".pyx") + ".c" for source in sources("*.pyx")}
    for name in built.sdist_names:
        assert name not in generated
        assert not name.startswith("build/")
        assert PurePosixPath(name).suffix not in {".so", ".o", ".pyc"}, name


def test_the_base_install_asks_for_numpy_alone(built: Distribution) -> None:
    metadata = Metadata.from_email(built.read(".dist-info/METADATA"))
    requirements = metadata.requires_dist or []
    assert {r.name for r in requirements if r.marker is None} == {"numpy"}
    assert set(metadata.provides_extra or []) == EXTRAS
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE", "pagedkv/lab/replay/data/NOTICE"]
    assert b"pagedkv = pagedkv.cli:main" in built.read(".dist-info/entry_points.txt")


IMPORTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
import os, pagedkv, pagedkv.core, pagedkv.cli
assert os.path.exists(os.path.join(pagedkv.get_include(), "pagedkv.h"))
from pagedkv.kernels.source import kernel_names, source_hash, sources_dir
hashes = {name: source_hash(name) for name in kernel_names()}
tops = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(json.dumps({"file": pagedkv.__file__, "tops": sorted(tops), "cuda": str(sources_dir()), "hashes": hashes}))
"""


def test_the_installed_wheel_imports_finds_its_cuda_sources_and_pulls_in_no_extra(
    built: Distribution, tmp_path: Path
) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(target)
    command = [sys.executable, "-c", IMPORTS, str(target)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert Path(report["file"]).is_relative_to(target), "the copy under test was not the one imported"
    assert Path(report["cuda"]) == target / "pagedkv" / "kernels_cu"
    kernels = {PurePosixPath(name).stem for name in built.wheel_names if name.endswith(".cu")}
    assert kernels == report["hashes"].keys()
    own = ("cython_runtime", "_cython")  # the latter is pagedkv._cython, which Cython enters without its package, too
    compiled = {name for name in report["tops"] if name in own or name.startswith("_cython_")}
    assert set(report["tops"]) - compiled <= {"pagedkv", "numpy"}  # what Cython registers of itself is no package
