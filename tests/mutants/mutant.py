"""A mutant: a small mistake in a copy of the source, and the tests that must notice it.

A mutant that no test notices is a guard that nothing holds up: write the test, keep the mutant. A mutant whose text is
no longer found once in its file is stale: fit it to the new source.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutants.edits import Edits


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes
    ----------
    name : str
        A sentence that says what goes wrong.
    file : str
        The source file, from the root of the repository; of a ``.pyx``, only that module is built again, so a mutant
        changes what functions do and never the layout of a struct.
    edits : tuple of (str, str)
        Texts that occur exactly once in the file, and what stands there instead.
    killers : tuple of str
        Tests of which one at least must fail, by the names of their functions, in whatever file of ``tests/`` they are;
        ``name[case]`` is one case alone; ``test_the_proof_holds[name]`` is a proof of ``tests/reliability``.
    proof_count : int
        Cases of a proof among the killers; 0: as many as under pytest.
    quick : bool
        Whether the quick run tries it too; the slow run tries all others.
    """

    name: str
    file: str
    edits: Edits
    killers: tuple[str, ...]
    proof_count: int = 0
    quick: bool = False

    @property
    def module(self) -> str | None:
        """Name of the extension module to build, or None for Python files."""
        if self.file.startswith("pagedkv/cpu/") and self.file.endswith((".c", ".h")):
            return "pagedkv.cpu._attend"
        return self.file.removesuffix(".pyx").replace("/", ".") if self.file.endswith(".pyx") else None
