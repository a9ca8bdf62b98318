"""The parts of a parsed PTX module: operands, instructions, variables, functions."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reg:
    """A register; ``name`` is unique in its function (scopes are renamed). ``_`` is the sink."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal as written: ``42``, ``-1``, ``0x1F``, ``0f3F800000``, ``0d...``, ``0.5``."""

    text: str


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable, function or label, with an offset (``name+16``)."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Addr:
    """``[base+offset]``; ``coords`` are a tensor's coordinates (``[map, {x, y}]``)."""

    base: Reg | Sym | Imm
    offset: int = 0
    coords: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """``{a, b}`` or a call's ``(a, b)``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``: two destinations."""

    first: Operand
    second: Operand


Operand = Reg | Special | Imm | Sym | Addr | Vec | Pair


@dataclass(slots=True)
class Instruction:
    """One instruction.

    Attributes
    ----------
    opcode, mods : ``add`` and ``("rn", "f32")`` of ``add.rn.f32``; ``::`` qualifiers stay whole.
    operands : in PTX order, destination first.
    guard : predicate register, or None.
    text : the statement as written.
    line : line of the PTX text.
    source : ``file:line`` of the CUDA source, with the place it was inlined at.
    """

    opcode: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    text: str
    line: int
    source: str

    @property
    def type(self) -> str:
        """The last type among the modifiers: ``f32`` of ``add.rn.f32``."""
        return self.mods[-1]

    def __str__(self) -> str:
        """On one line."""
        return " ".join(self.text.split())

    def has(self, mod: str) -> bool:
        """Whether the modifier is there."""
        return mod in self.mods


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in memory.

    State space, bytes (None for ``extern .shared x[]``), alignment, and initial bytes.
    """

    name: str
    space: str
    size: int | None
    align: int
    initial: bytes = b""


@dataclass(slots=True)
class Function:
    """An entry or a device function.

    Attributes
    ----------
    code : instructions.
    labels : index into ``code`` for each label.
    registers : type of each register (``b32``, ``pred``, ...).
    params, results : variables of space ``param``.
    locals : its own shared, local and call-parameter variables.
    branch_targets : label lists of ``.branchtargets``.
    """

    name: str
    entry: bool
    params: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    locals: dict[str, Variable] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    max_threads: int | None = None


@dataclass(slots=True)
class Module:
    """A PTX text: its functions, module-level variables and the names of the source files."""

    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
