"""Where mutants are made and tested.

The workshop puts one mistake into a copy of the sources and compiles it where need be.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.edits import edited
from tests.mutants.mutant import Mutant
from tests.mutants.prepared import ONE_THREAD, Prepared

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "pagedkv", "tests",
    "examples/policy_lfu",  # which tests of the core compile
    "kernels_cu",  # which the interpreter runs
    "bench",  # which tests of the static bar call
)  # fmt: skip
IGNORED = shutil.ignore_patterns("test_mutants.py", "build")  # a compiler writes into the files of build/
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
COMPILER = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
PYTESTS_OWN = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
LIMIT_S = 900.0  # of a test run in a copy: only tells a hang, on however busy a machine


@dataclass(frozen=True)
class Outcome:
    """How pytest ended on a copy: 0 all passed, 1 some failed.

    Anything else is a fault of the workshop.
    """

    exit_code: int
    output: str


def ids_of(root: Path, tests: Iterable[str]) -> list[str]:
    """Ids for pytest, from `root`, of tests that are known by name.

    Raises
    ------
    AssertionError
        No file of the suite, or more than one, has such a function.
    """
    sources = {path.relative_to(root): path.read_text() for path in sorted((root / "tests").rglob("test_*.py"))}
    ids = []
    for test in tests:
        found = [path for path, text in sources.items() if f"def {test.partition('[')[0]}(" in text]
        assert len(found) == 1, f"{test} is in {[str(path) for path in found]} instead of in one file"
        ids.append(f"{found[0]}::{test}")
    return ids


def trial(
    folder: Path, mutants: Iterable[Mutant], modules: Iterable[str], tests: Iterable[str], proof_count: int = 0
) -> Outcome:
    """Run tests on a mutated copy of the sources until one fails, and tidy up.

    Copies the sources into `folder`, applies the mutants and builds the modules.

    Parameters
    ----------
    folder : a directory that does not exist yet.
    modules : extension modules to build again; of the others the compiled files are copied.
    tests : names of tests.
    proof_count : cases of each proof among them; 0: as many as under pytest.
    """
    modules = sorted(modules)
    try:
        _copy(folder, modules)
        for mutant in mutants:
            path = folder / mutant.file
            text = edited(mutant.file, path.read_text(), mutant.edits)
            path.unlink()  # the source itself, by another name
            path.write_text(text)
            for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
                stale.unlink()
        if modules:
            _build(folder, modules)
        return _run_tests(folder, sorted(ids_of(folder, tests)), proof_count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unoptimised(folder: Path) -> Path:
    """A compiler for ``$CC``, made in `folder`, that optimises nothing."""
    compiler = folder / "unoptimised"
    compiler.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
    compiler.chmod(0o755)
    return compiler


def _copy(folder: Path, modules: list[str]) -> None:
    """Link all files that trials need, and bytecode, which takes long to compile."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED, copy_function=_link)
    for module in modules:
        package, _, name = module.rpartition(".")
        for compiled in (folder / package.replace(".", "/")).glob(f"{name}.*.so"):
            compiled.unlink()
    for name in FILES:
        if (ROOT / name).exists():
            _link(str(ROOT / name), str(folder / name))


def _link(source: str, link: str) -> None:
    """One file under two names where the file system can; nothing may write into it."""
    try:
        os.link(source, link)
    except OSError:
        shutil.copy2(source, link)


def _build(folder: Path, modules: list[str]) -> None:
    """Without optimisation, whatever setup.py asks for: compiling is most of a mutant's time."""
    command = ["setup.py", "-q", "build_ext", "--inplace", "--only", ",".join(modules)]
    done = _run(folder, command, CC=str(unoptimised(folder)))
    assert done.exit_code == 0, f"the mutant does not compile:\n{done.output}"


def _run_tests(folder: Path, tests: list[str], proof_count: int) -> Outcome:
    """One seed for hypothesis: a killer meets the same cases in every run."""
    options = ["-x", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    options += ["-p", "tests.mutants.leaving", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # Hypothesis is there
    command = ["-m", "pytest", *options, *tests]
    return _run(folder, command, **({"PAGEDKV_PROOF_COUNT": str(proof_count)} if proof_count else {}))


def _run(folder: Path, command: list[str], **changes: str) -> Outcome:
    """Run a command in the copy.

    Python finds the copy before any other pagedkv, also in processes that tests start.
    """
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(folder)} | changes
    for name in (*PYTESTS_OWN, "PYTHONSAFEPATH"):
        environment.pop(name, None)
    output = folder / "output"
    exit_code = _prepared().run(command, folder, environment, output, LIMIT_S)
    return Outcome(exit_code, output.read_text(errors="replace"))


@functools.cache
def _prepared() -> Prepared:
    """The server of this process, started when first needed."""
    return Prepared()
