"""The instructions of one kernel, read from what NVIDIA's nvdisasm writes."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.sass.errors import SassError

_LABEL = re.compile(r"^\s*(\.L\w+):")
_LINE = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Za-z0-9_.]*)\s*(?P<operands>.*?)\s*;"
)
_PLACE = re.compile(r"`\(\s*([^)]+?)\s*\)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes
    ----------
    opcode : with all its suffixes, such as ``LDS.128``.
    operands : the text behind it.
    guard : the predicate that it depends on, such as ``@!P0``; empty if it always runs.
    """

    opcode: str
    operands: str = ""
    guard: str = ""

    @property
    def base(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.partition(".")[0]

    @property
    def parts(self) -> frozenset[str]:
        """The opcode's suffixes."""
        return frozenset(self.opcode.split(".")[1:])

    @property
    def target(self) -> str | None:
        """The label that the operands name."""
        found = _PLACE.search(self.operands)
        return found[1] if found else None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's instructions by address, and the index behind each label."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(text: str) -> Kernel:
    """Read the output of ``nvdisasm -c`` for a cubin with one kernel.

    Raises
    ------
    SassError
        The text has no instructions, or those of several kernels.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    sections = []
    for line in text.splitlines():
        if section := _SECTION.match(line):
            sections.append(section[1])
        elif label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            guard = (found["guard"] or "").strip()
            instructions.append(Instruction(found["opcode"], found["operands"], guard))
    if len(sections) > 1:
        raise SassError(f"the disassembly has the kernels {', '.join(sections)}: one at a time")
    if not instructions:
        raise SassError("the text has no instructions: it must be what `nvdisasm -c` writes for a cubin")
    return Kernel(tuple(instructions), labels)


def disassembler() -> str | None:
    """NVIDIA's nvdisasm, from pip or from PATH; None if there is none."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [str(path) for root in roots for path in Path(root).glob("*/bin/nvdisasm")]
    return max(found, default=None) or shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> str:
    """What nvdisasm writes for a cubin.

    Raises
    ------
    SassError
        nvdisasm is not installed, or refuses the cubin.
    """
    program = disassembler()
    if program is None:
        raise SassError("nvdisasm is not installed: pip install 'nvidia-cuda-nvdisasm>=13,<14'")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        made = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=False)
    if made.returncode:
        raise SassError(f"nvdisasm ended with {made.returncode}: {made.stderr.strip()[-500:]}")
    return made.stdout
