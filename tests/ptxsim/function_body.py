"""The statements of one PTX function.

Scopes, registers, labels, instructions and their operands.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.ptxsim.declarations import closing_brace, split_top, variable
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.syntax import Addr, Function, Imm, Instruction, Operand, Pair, Reg, Special, Sym, Variable, Vec

if TYPE_CHECKING:
    from tests.ptxsim.parser import ModuleParser

_BRACKET = re.compile(r"[\[({]")
_STATEMENT = re.compile(
    r"\s*(?:(?P<directive>\.)|(?P<label>[%$A-Za-z_][\w$]*)\s*:(?!:)|(?P<instruction>[@a-z][^;]*);"
    r"|(?P<open>\{)|(?P<close>\})|(?P<empty>;))"
)
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[fFdD][0-9a-fA-F]+|\d+\.\d*(?:[eE][-+]?\d+)?|\d+)U?$")
_REG_DECL = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*?inlined_at\s+(\d+)\s+(\d+))?")
_SPECIALS = re.compile(
    r"%(?:n?tid|n?ctaid|n?clusterid|cluster_n?ctaid|cluster_n?ctarank|is_explicit_cluster|laneid|n?warpid|n?smid|gridid|"
    r"clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?|dynamic_smem_size|total_smem_size|aggr_smem_size|lanemask_\w+|"
    r"envreg\d+|pm\d+)(?:\.[xyz])?$"
)
_opcodes: dict[str, tuple[str, tuple[str, ...]]] = {}  # opcode texts taken apart


@dataclass(slots=True)
class _Scope:
    """Names of registers and labels declared in one pair of braces.

    Prefixes are those of ``%r<100>``.
    """

    number: int
    names: dict[str, str] = field(default_factory=dict)
    prefixes: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


class BodyParser:
    """Reads the statements of one function."""

    def __init__(self, parser: ModuleParser, function: Function) -> None:
        self.parser, self.function = parser, function
        self.scopes: list[_Scope] = []
        self.scope_count = 0
        self.source = ""
        self.pending_label: str | None = None
        self.known: dict[str, Operand] = {}  # operands already read in the outermost scope

    def read(self) -> None:
        """From the opening brace to its closing one."""
        p = self.parser
        match = _STATEMENT.match
        while True:
            found = match(p.text, p.position)
            if found is None:
                raise UnsupportedPtx(f"statement {p.text[p.position : p.position + 60]!r}")
            kind = found.lastgroup
            if kind == "instruction":
                p.position = found.end()
                self._instruction(found["instruction"], bisect_right(p.newlines, found.start("instruction")) + 1)
            elif kind == "directive":
                p.position = found.start("directive")
                self._directive()
            elif kind == "label":
                p.position = found.end()
                label = found["label"]
                name = self.scopes[-1].labels.get(label, label)
                self.function.labels[name] = len(self.function.code)
                self.pending_label = name
            else:
                p.position = found.end()
                if kind == "open":
                    self._open_scope()
                elif kind == "close":
                    self.scopes.pop()
                    if not self.scopes:
                        return

    def _open_scope(self) -> None:
        """Labels are looked up before they are defined, so a scope's own ones are collected first."""
        scope = _Scope(self.scope_count)
        if self.scope_count:
            start, text = self.parser.position - 1, self.parser.text
            end = closing_brace(text, start)
            for statement in re.finditer(r"(?:^|[;{}\n])\s*([%$A-Za-z_][\w$]*)\s*:(?!:)", text[start:end]):
                scope.labels[statement[1]] = f"{statement[1]}@{scope.number}"
        self.scope_count += 1
        self.scopes.append(scope)

    def _directive(self) -> None:
        p = self.parser
        rest = p.text[p.position : p.position + 20]
        if rest[:4] == ".loc" and rest[4].isspace():
            found = _LOC.match(p.until("\n"))
            if found and found[2] != "0":
                files = p.module.files
                self.source = f"{files.get(int(found[1]), '?')}:{found[2]}"
                if found[3]:
                    self.source += f" (inlined at {files.get(int(found[3]), '?')}:{found[4]})"
        elif rest.startswith(".reg"):
            self._registers(p.until(";"))
        elif rest.startswith(".pragma"):
            p.until(";")
        elif rest.startswith(".branchtargets"):
            names = split_top(p.until(";").split(None, 1)[1])
            self.function.branch_targets[self.pending_label or ""] = tuple(self._label(name) for name in names)
        elif rest.startswith(".callprototype"):
            raise UnsupportedPtx("an indirect call (.callprototype)")
        else:
            one = variable(p.until(";"))
            if one.name in self.function.locals:  # call parameters reuse their names in later scopes
                known = self.function.locals[one.name]
                size = None if one.size is None else max(one.size, known.size or 0)
                one = Variable(one.name, one.space, size, max(one.align, known.align))
            self.function.locals[one.name] = one

    def _registers(self, statement: str) -> None:
        found = _REG_DECL.match(statement)
        if found is None or found[1] in ("v2", "v4"):
            raise UnsupportedPtx(statement)
        scope = self.scopes[-1]
        for name in split_top(found[2]):
            many = re.match(r"([\w$%]+)<(\d+)>", name)
            if many:
                scope.prefixes[many[1]] = found[1]
            else:
                unique = name if scope.number == 0 else f"{name}@{scope.number}"
                scope.names[name] = unique
                self.function.registers[unique] = found[1]

    def _label(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope.labels:
                return scope.labels[name]
        return name

    def _register(self, name: str) -> str | None:
        """The unique name of a register, or None when no such register was declared."""
        base = name.rstrip("0123456789")
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
            if base != name and base in scope.prefixes:
                unique = name if scope.number == 0 else f"{name}@{scope.number}"
                self.function.registers[unique] = scope.prefixes[base]
                return unique
        return None

    def _instruction(self, text: str, line: int) -> None:
        rest, guard = text, None
        if text[0] == "@":
            name, rest = text[1:].split(None, 1)
            negated = name[0] == "!"
            unique = self._register(name.lstrip("!"))
            if unique is None:
                raise UnsupportedPtx(f"guard of {text!r}")
            guard = Reg(unique, negated)
        opcode, *tails = rest.split(None, 1)
        split = _opcodes.get(opcode)
        if split is None:
            name, *mods = opcode.split(".")
            split = _opcodes[opcode] = (name, tuple(mod for mod in mods if mod))
        operands: list[Operand] = []
        if tails:
            tail = tails[0]
            known = self.known if len(self.scopes) == 1 else {}
            for part in split_top(tail) if _BRACKET.search(tail) else tail.split(","):
                name = part.strip()
                operand = known.get(name)
                if operand is None:
                    operand = known[name] = self._operand(name)
                operands.append(operand)
        self.function.code.append(Instruction(split[0], split[1], tuple(operands), guard, text, line, self.source))

    def _operand(self, text: str) -> Operand:
        if text[0] in "{(":
            return Vec(tuple(self._operand(part) for part in split_top(text[1:-1])))
        if text[0] == "[":
            return self._address(text[1:-1])
        if "|" in text:
            first, second = (self._operand(part.strip()) for part in text.split("|"))
            return Pair(first, second)
        if text == "_":
            return Reg("_")
        if _NUMBER.match(text):
            return Imm(text.rstrip("U"))
        negated = text[0] == "!"
        name = text.lstrip("!").strip()
        unique = self._register(name)
        if unique is not None:
            return Reg(unique, negated)
        if _SPECIALS.match(name):
            return Special(name)
        symbol = re.match(r"([\w$%]+)\s*(?:([+-])\s*(\w+))?$", name)
        if symbol is None or symbol[1].startswith("%"):
            raise UnsupportedPtx(f"operand {text!r}")
        offset = int(symbol[3], 0) * (-1 if symbol[2] == "-" else 1) if symbol[3] else 0
        return Sym(self._label(symbol[1]), offset)

    def _address(self, text: str) -> Addr:
        parts = split_top(text)
        coords: tuple[Operand, ...] = ()
        if len(parts) > 1:
            coordinate = self._operand(parts[1])
            coords = coordinate.items if isinstance(coordinate, Vec) else (coordinate,)
        found = re.match(r"([\w$%]+)\s*(?:\+\s*(-?\w+)|-\s*(\w+))?$", parts[0])
        if found is None:
            raise UnsupportedPtx(f"address [{text}]")
        offset = int(found[2], 0) if found[2] else -int(found[3], 0) if found[3] else 0
        base = self._operand(found[1])
        if not isinstance(base, Reg | Sym | Imm):
            raise UnsupportedPtx(f"address [{text}]")
        return Addr(base, offset, coords)
