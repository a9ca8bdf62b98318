"""Mistakes put into a kernel's source, in this process, to see that its tests notice them.

A mutant is a text of the translation unit, which must stand there once, and what stands there instead. The kernel is
compiled again and run by a backend of its own; the check must fail then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagedkv.errors import CompileError
from pagedkv.kernels import source
from pagedkv.kernels.backend import Backend
from tests.mutants.edits import Edits, edited
from tests.ptxsim.errors import UnsupportedPtx

Check = Callable[[Backend], None]


@dataclass(frozen=True)
class KernelMutant:
    """One mistake.

    Attributes
    ----------
    name : a sentence that says what goes wrong.
    kernel : whose translation unit is changed.
    edits : texts that stand there exactly once, and what replaces each.
    check : a test as a function of the backend; it passes on the true kernel.
    """

    name: str
    kernel: str
    edits: Edits
    check: Check

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


@contextmanager
def mutated(kernel: str, edits: Edits) -> Iterator[None]:
    """Within it, the kernel's translation unit has the edits.

    Raises
    ------
    AssertionError
        A text does not stand there exactly once: the mutant is stale.
    """
    text = edited(kernel, source.translation_unit(kernel), edits)
    real = source._expand

    def expand(path: Path, seen: set[Path]) -> str:
        return text if path.suffix == ".cu" and path.stem == kernel else real(path, seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "_expand", expand)
        source.translation_unit.cache_clear()
        try:
            yield
        finally:
            source.translation_unit.cache_clear()


def assert_killed(mutant: KernelMutant, make_backend: Callable[[], Backend]) -> None:
    """Raise AssertionError if the check passes in spite of the mistake.

    Also if the mistake does not compile or run.

    Parameters
    ----------
    make_backend : a backend that has compiled nothing yet.
    """
    with mutated(mutant.kernel, mutant.edits):
        try:
            mutant.check(make_backend())
        except (CompileError, UnsupportedPtx) as error:
            raise AssertionError(f"{mutant.name}: {error}") from error
        except Exception:  # a wrong result, or an error of the simulator: noticed either way
            return
    raise AssertionError(f"nothing noticed that {mutant.name}")
