"""Device functions put in place of their calls, so that what runs is one piece of code."""

from __future__ import annotations

from dataclasses import replace

from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.syntax import Addr, Function, Imm, Instruction, Module, Operand, Pair, Reg, Special, Sym, Vec

_NO_RETURN = {"__assertfail", "__trap"}


class Inliner:
    """Puts called functions in place of their calls.

    Each call gets a copy with its own registers and labels.
    """

    def __init__(self, module: Module, entry: Function) -> None:
        self.module, self.entry = module, entry
        self.calls = 0
        self.out = Function(entry.name, True, entry.params, registers=dict(entry.registers), locals=dict(entry.locals))

    def run(self) -> Function:
        """The entry with everything inlined."""
        self._copy(self.entry, "", {}, (self.entry.name,), "")
        return self.out

    def _copy(
        self, function: Function, suffix: str, rename: dict[str, str], stack: tuple[str, ...], end_label: str
    ) -> None:
        at: dict[int, list[str]] = {}
        for label, position in function.labels.items():
            at.setdefault(position, []).append(label + suffix)
        for name, targets in function.branch_targets.items():
            self.out.branch_targets[name + suffix] = tuple(target + suffix for target in targets)
        for position, ins in enumerate(function.code):
            for label in at.get(position, []):
                self.out.labels[label] = len(self.out.code)
            if ins.opcode == "call":
                self._call(ins, function, suffix, rename, stack)
            elif ins.opcode == "ret" and suffix:
                jump = replace(ins, opcode="bra", mods=(), operands=(Sym(end_label),))
                self.out.code.append(self._renamed(jump, suffix, rename, {end_label}))
            else:
                self.out.code.append(self._renamed(ins, suffix, rename, set()) if suffix else ins)
        for label in at.get(len(function.code), []):
            self.out.labels[label] = len(self.out.code)

    def _call(
        self, ins: Instruction, caller: Function, suffix: str, rename: dict[str, str], stack: tuple[str, ...]
    ) -> None:
        operands = list(ins.operands)
        results = operands.pop(0) if isinstance(operands[0], Vec) else Vec(())
        target = operands.pop(0)
        arguments = operands.pop(0) if operands else Vec(())
        if not isinstance(target, Sym) or target.name not in self.module.functions or not isinstance(arguments, Vec):
            raise UnsupportedPtx(f"an indirect call at {ins.source}: {ins}")
        callee = self.module.functions[target.name]
        if target.name in _NO_RETURN:
            self.out.code.append(self._renamed(replace(ins, opcode="trap", operands=()), suffix, rename, set()))
            return
        if target.name == "vprintf":
            return
        if not callee.code:
            raise UnsupportedPtx(f"call of {target.name}, which has no body")
        if target.name in stack:
            raise UnsupportedPtx(f"recursion in {target.name}")
        self.calls += 1
        inner = f"~{self.calls}"
        inner_rename = {}
        for formal, actual in zip((*callee.results, *callee.params), (*results.items, *arguments.items), strict=True):
            assert isinstance(actual, Sym)
            inner_rename[formal.name] = rename.get(
                actual.name, actual.name + (suffix if actual.name in caller.locals else "")
            )
        for name, kind in callee.registers.items():
            self.out.registers[name + inner] = kind
        for name, variable in callee.locals.items():
            self.out.locals[name + inner] = replace(variable, name=name + inner)
            inner_rename[name] = name + inner
        end_label = f"${target.name}_end{inner}"
        self._copy(callee, inner, inner_rename, (*stack, target.name), end_label)
        self.out.labels[end_label] = len(self.out.code)
        # A label needs an instruction to stand at; the block cutter accepts the end of the code too.

    def _renamed(self, ins: Instruction, suffix: str, rename: dict[str, str], keep: set[str]) -> Instruction:
        def operand(op: Operand) -> Operand:
            if isinstance(op, Reg):
                return op if op.name == "_" else Reg(op.name + suffix, op.negated)
            if isinstance(op, Sym):
                if op.name in keep:
                    return op
                if op.name in rename:
                    return Sym(rename[op.name], op.offset)
                known = op.name in self.module.variables or op.name in self.entry.locals
                return op if known else Sym(op.name + suffix, op.offset)
            if isinstance(op, Addr):
                base = operand(op.base)
                assert isinstance(base, Reg | Sym | Imm)
                return Addr(base, op.offset, tuple(operand(c) for c in op.coords))
            if isinstance(op, Vec):
                return Vec(tuple(operand(item) for item in op.items))
            if isinstance(op, Pair):
                return Pair(operand(op.first), operand(op.second))
            assert isinstance(op, Imm | Special)
            return op

        guard = Reg(ins.guard.name + suffix, ins.guard.negated) if ins.guard and suffix else ins.guard
        return replace(ins, operands=tuple(operand(op) for op in ins.operands), guard=guard)
