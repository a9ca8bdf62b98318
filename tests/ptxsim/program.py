"""A kernel made ready to run.

Its device functions are inlined, its code is cut into blocks, its variables are placed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.ptxsim.declarations import size_of
from tests.ptxsim.inline import Inliner
from tests.ptxsim.memory import SHARED_START
from tests.ptxsim.syntax import (
    Function,
    Imm,
    Instruction,
    Module,
    Operand,
    Pair,
    Reg,
    Variable,
    Vec,
)

# An instruction after which lanes may stand elsewhere, or wait.
TERMINATORS = {"bra", "brx", "ret", "exit", "bar", "barrier", "trap", "brkpt"}


@dataclass(slots=True)
class Block:
    """Straight-line code: its instructions and its terminator.

    It has no terminator if the next block simply follows.
    """

    body: list[Instruction] = field(default_factory=list)
    end: Instruction | None = None


@dataclass(slots=True)
class Program:
    """What a launch needs of one kernel.

    Attributes
    ----------
    blocks, labels : code, and the block each label starts.
    symbols : where variables lie: offsets in their own space.
    static_shared : bytes of static shared memory; dynamic shared memory begins after it.
    local_size : bytes of local memory per thread.
    global_variables : module variables in global or constant memory, to be placed by the machine.
    params, param_size : the kernel's parameters and their offsets.
    granule_global, granule_shared : smallest access, in bytes.
    uses_fine_clocks, uses_fences : which clocks its races need (see clocks).
    constants : literals of the registers that nothing but one ``mov`` of a literal writes.
    """

    name: str
    function: Function
    blocks: list[Block]
    labels: dict[str, int]
    symbols: dict[str, int]
    static_shared: int
    local_size: int
    global_variables: list[Variable]
    param_offsets: dict[str, int]
    param_size: int
    granule_global: int
    granule_shared: int
    uses_fine_clocks: bool
    uses_fences: bool
    constants: dict[str, str]


def is_terminator(ins: Instruction) -> bool:
    """Whether a block ends with it. ``bar.warp.sync`` is an ordinary instruction."""
    if ins.opcode in ("bar", "barrier"):
        return "warp" not in ins.mods
    if ins.opcode == "mbarrier":
        return "try_wait" in ins.mods
    return ins.opcode in TERMINATORS


def build(module: Module, name: str) -> Program:
    """Make a program of an entry.

    Raises
    ------
    KeyError
        The module has no such entry.
    UnsupportedPtx
        It uses what the simulator does not model.
    """
    function = module.functions[name]
    flat = Inliner(module, function).run()
    blocks, labels = _cut(flat)
    local_size, symbols = 0, {}
    static = SHARED_START
    dynamic: list[str] = []
    for variable in [*module.variables.values(), *flat.locals.values()]:
        if variable.space == "shared":
            if variable.size is None:
                dynamic.append(variable.name)
                continue
            static = -(-static // variable.align) * variable.align
            symbols[variable.name] = static
            static += variable.size
        elif variable.space in ("local", "param"):  # call parameters are passed through local memory
            local_size = -(-local_size // variable.align) * variable.align
            symbols[variable.name] = local_size
            local_size += variable.size or 0
    for symbol in dynamic:
        align = module.variables[symbol].align
        static = -(-static // align) * align
    symbols.update(dict.fromkeys(dynamic, static))
    offsets, end = {}, 0
    for param in function.params:
        end = -(-end // param.align) * param.align
        offsets[param.name] = end
        end += param.size or 0
    granule_global, granule_shared = _granules(flat)
    return Program(
        name=name,
        function=flat,
        blocks=blocks,
        labels=labels,
        symbols=symbols,
        static_shared=static - SHARED_START,
        local_size=local_size,
        global_variables=[v for v in module.variables.values() if v.space in ("global", "const")],
        param_offsets=offsets,
        param_size=end,
        granule_global=granule_global,
        granule_shared=granule_shared,
        uses_fine_clocks=any(_orders_some_threads(ins) for ins in flat.code),
        uses_fences=any(_fences(ins) for ins in flat.code),
        constants=_constants(flat),
    )


def _orders_some_threads(ins: Instruction) -> bool:
    """Whether an instruction orders some threads of a CTA but not all.

    Named barriers, mbarriers and engines do.
    """
    if ins.opcode in ("bar", "barrier") and "warp" not in ins.mods:
        return len(ins.operands) > 1 or "arrive" in ins.mods
    return ins.opcode in ("mbarrier", "wgmma") or ins.has("bulk")


def _fences(ins: Instruction) -> bool:
    """Whether an instruction can order CTAs."""
    return ins.opcode in ("membar", "fence") or bool({"release", "acquire", "acq_rel"} & set(ins.mods))


def _constants(function: Function) -> dict[str, str]:
    """Registers that hold one literal wherever they are read."""
    writes: dict[str, int] = {}
    literals: dict[str, str] = {}
    for ins in function.code:
        for name in _registers(ins.operands[0]) if ins.operands else ():
            writes[name] = writes.get(name, 0) + 1
        if ins.opcode == "mov" and ins.guard is None and isinstance(ins.operands[0], Reg):
            source = ins.operands[1]
            if isinstance(source, Imm):
                literals[ins.operands[0].name] = source.text
    return {name: text for name, text in literals.items() if writes[name] == 1}


def _registers(operand: Operand) -> list[str]:
    """Registers that an instruction writes, if this is its first operand."""
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Vec):
        return [name for item in operand.items for name in _registers(item)]
    if isinstance(operand, Pair):
        return _registers(operand.first) + _registers(operand.second)
    return []


def _granules(function: Function) -> tuple[int, int]:
    """Smallest access to global and to shared memory; a generic one counts for both."""
    smallest = {"global": 16, "shared": 16}
    for ins in function.code:
        width = 16
        spaces = [
            space for space in ("global", "shared") if any(m == space or m.startswith(space + "::") for m in ins.mods)
        ]
        if ins.opcode in ("ld", "st", "ldu", "atom", "red"):
            if "param" in ins.mods or "local" in ins.mods or "const" in ins.mods:
                continue
            vector = 1
            for mod in ins.mods:
                vector = int(mod[1]) if mod in ("v2", "v4", "v8") else vector
            width = size_of(ins.type) * (vector if ins.opcode not in ("atom", "red") else 1)
        elif ins.opcode == "cp" and "ca" in ins.mods:
            size = ins.operands[2]
            width = int(size.text, 0) if isinstance(size, Imm) else 4
            spaces = ["global", "shared"]
        elif ins.opcode == "mbarrier":
            width, spaces = 8, ["shared"]
        else:
            continue
        for space in spaces or ("global", "shared"):
            smallest[space] = min(smallest[space], width)
    return smallest["global"], smallest["shared"]


def _cut(function: Function) -> tuple[list[Block], dict[str, int]]:
    starts: dict[int, list[str]] = {}
    for label, position in function.labels.items():
        starts.setdefault(position, []).append(label)
    blocks, labels = [Block()], {}
    fresh = True
    for position, ins in enumerate(function.code):
        if position in starts:
            if not fresh:
                blocks.append(Block())
            labels.update(dict.fromkeys(starts[position], len(blocks) - 1))
        fresh = False
        if is_terminator(ins):
            blocks[-1].end = ins
            blocks.append(Block())
            fresh = True
        else:
            blocks[-1].body.append(ins)
    for label in starts.get(len(function.code), []):
        labels[label] = len(blocks) - 1
    return blocks, labels
