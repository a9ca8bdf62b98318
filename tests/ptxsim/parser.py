"""PTX text to a Module. Knows the grammar that NVRTC emits, inline PTX with its own scopes included."""

from __future__ import annotations

import re
import struct
from bisect import bisect_right

from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.syntax import (
    Addr,
    Function,
    Imm,
    Instruction,
    Module,
    Operand,
    Pair,
    Reg,
    Special,
    Sym,
    Variable,
    Vec,
)

_COMMENT = re.compile(r'"[^"]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_SPACE = re.compile(r"\s*")
_BRACE = re.compile(r"[{}]")
_BRACKET = re.compile(r"[\[({]")
_STATEMENT = re.compile(
    r"\s*(?:(?P<directive>\.)|(?P<label>[%$A-Za-z_][\w$]*)\s*:(?!:)|(?P<instruction>[@a-z][^;]*);"
    r"|(?P<open>\{)|(?P<close>\})|(?P<empty>;))"
)
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[fFdD][0-9a-fA-F]+|\d+\.\d*(?:[eE][-+]?\d+)?|\d+)U?$")
_REG_DECL = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(param|local|shared|global|const)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.ptr\s*(?:\.\w+\s*)*?(?:\.align\s+\d+\s+)?)?\.(\w+)\s+([\w$%]+)((?:\s*\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$",
    re.DOTALL,
)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*?inlined_at\s+(\d+)\s+(\d+))?")
_HEADER = re.compile(r"((?:\.(?:visible|weak|extern|common|noreturn)\s+)*)\.(entry|func)\b")
_SPECIALS = re.compile(
    r"%(?:n?tid|n?ctaid|n?clusterid|cluster_n?ctaid|cluster_n?ctarank|is_explicit_cluster|laneid|n?warpid|n?smid|gridid|"
    r"clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?|dynamic_smem_size|total_smem_size|aggr_smem_size|lanemask_\w+|"
    r"envreg\d+|pm\d+)(?:\.[xyz])?$"
)
BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


_opcodes: dict[str, tuple[str, tuple[str, ...]]] = {}  # opcode texts taken apart


def parse(text: str) -> Module:
    """Parse a PTX module.

    Raises
    ------
    UnsupportedPtx
        A directive or operand that the grammar here does not know.
    """
    return _Parser(text).module


def size_of(kind: str) -> int:
    """Bytes of a fundamental type: ``f32`` -> 4, ``pred`` -> 1."""
    if kind == "pred":
        return 1
    found = re.match(r"[a-z]+(\d+)(x2|x4)?", kind)
    if found is None or found[1] not in BYTES:
        raise UnsupportedPtx(f"type {kind!r}")
    return BYTES[found[1]] * {None: 1, "x2": 2, "x4": 4}[found[2]]


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators that stand outside all brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    tail = text[start:].strip()
    return [*parts, tail] if tail or parts else []


def closing_brace(text: str, start: int) -> int:
    """Where the braces that open at ``start`` close."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.start()
    raise UnsupportedPtx("braces that do not close")


class _Scope:
    """Names of registers declared in one pair of braces."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.names: dict[str, str] = {}
        self.prefixes: dict[str, str] = {}
        self.labels: dict[str, str] = {}


class _Parser:
    def __init__(self, text: str) -> None:
        blank = _COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0]), text)
        self.text = blank
        self.newlines = [found.start() for found in re.finditer("\n", blank)]
        self.module = Module()
        for found in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', blank):
            self.module.files[int(found[1])] = found[2].rsplit("/", 1)[-1]
        self.position = 0
        self._top_level()

    def _skip_space(self) -> None:
        found = _SPACE.match(self.text, self.position)
        assert found is not None
        self.position = found.end()

    def _until(self, char: str) -> str:
        """Text up to a character outside quotes, which is consumed."""
        end = self.text.index(char, self.position)
        quote = self.text.find('"', self.position, end)
        while quote != -1:
            after = self.text.index('"', quote + 1) + 1
            end = self.text.index(char, after)
            quote = self.text.find('"', after, end)
        taken = self.text[self.position : end]
        self.position = end + 1
        return taken

    def _braced(self) -> str:
        """The text of a braced block that starts here, without its braces."""
        start = self.position
        self.position = closing_brace(self.text, start) + 1
        return self.text[start + 1 : self.position - 1]

    def _top_level(self) -> None:
        while True:
            self._skip_space()
            if self.position >= len(self.text):
                return
            header = _HEADER.match(self.text, self.position)
            rest = self.text[self.position : self.position + 24]
            if header:
                self._function(header[2] == "entry", header.end())
            elif rest.startswith(".section"):
                self.position = self.text.index("{", self.position)
                self._braced()
            elif rest.startswith((".version", ".target", ".address_size", ".file", ".loc")):
                line = self._until("\n")
                if line.startswith(".target"):
                    self.module.target = line.split()[1].rstrip(",")
            elif rest.startswith((".pragma", ".alias")):
                self._until(";")
            else:
                variable = _variable(self._until(";"))
                self.module.variables[variable.name] = variable

    def _function(self, entry: bool, start: int) -> None:
        body = self.text.index("{", start)
        end = self.text.find(";", start)
        declared_only = end != -1 and end < body
        head = self.text[start : end if declared_only else body]
        groups = re.match(r"\s*(\(.*?\))?\s*([\w$]+)\s*(\(.*?\))?(.*)", head, re.DOTALL)
        if groups is None:
            raise UnsupportedPtx(f"function header {head!r}")
        function = Function(groups[2], entry)
        function.results = [_variable(part) for part in split_top((groups[1] or "()")[1:-1])]
        function.params = [_variable(part) for part in split_top((groups[3] or "()")[1:-1])]
        threads = re.search(r"\.maxntid\s+([\d,\s]+)", groups[4])
        if threads:
            function.max_threads = 1
            for part in threads[1].split(","):
                function.max_threads *= int(part)
        if declared_only:
            self.position = end + 1
            self.module.functions.setdefault(function.name, function)
            return
        self.position = body
        _Body(self, function).read()
        self.module.functions[function.name] = function


class _Body:
    """Reads the statements of one function."""

    def __init__(self, parser: _Parser, function: Function) -> None:
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
            found = _LOC.match(p._until("\n"))
            if found and found[2] != "0":
                files = p.module.files
                self.source = f"{files.get(int(found[1]), '?')}:{found[2]}"
                if found[3]:
                    self.source += f" (inlined at {files.get(int(found[3]), '?')}:{found[4]})"
        elif rest.startswith(".reg"):
            self._registers(p._until(";"))
        elif rest.startswith(".pragma"):
            p._until(";")
        elif rest.startswith(".branchtargets"):
            names = split_top(p._until(";").split(None, 1)[1])
            self.function.branch_targets[self.pending_label or ""] = tuple(self._label(name) for name in names)
        elif rest.startswith(".callprototype"):
            raise UnsupportedPtx("an indirect call (.callprototype)")
        else:
            variable = _variable(p._until(";"))
            if variable.name in self.function.locals:  # call parameters reuse their names in later scopes
                known = self.function.locals[variable.name]
                size = None if variable.size is None else max(variable.size, known.size or 0)
                variable = Variable(variable.name, variable.space, size, max(variable.align, known.align))
            self.function.locals[variable.name] = variable

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


def _variable(text: str) -> Variable:
    """One variable's declaration: kernel parameter, shared array, local depot, module-level constant."""
    flat = " ".join(text.split())
    found = _VARIABLE.match(flat)
    if found is None:
        raise UnsupportedPtx(f"declaration {flat!r}")
    space, align, kind, name, dims, initial = found.groups()
    element = size_of(kind)
    size: int | None = element
    for dim in re.findall(r"\[\s*(\d*)\s*\]", dims):
        size = None if dim == "" or size is None else size * int(dim)
    return Variable(name, space, size, int(align or element), _initial(initial, kind, element) if initial else b"")


def _initial(text: str, kind: str, element: int) -> bytes:
    out = b""
    for item in text.strip().strip("{}").replace("{", "").replace("}", "").split(","):
        value = item.strip()
        if value[:2] in ("0f", "0F", "0d", "0D"):
            out += int(value[2:], 16).to_bytes(element, "little")
        elif kind[0] == "f":
            out += struct.pack({4: "<f", 8: "<d"}[element], float(value))
        else:
            try:
                out += (int(value, 0) & ((1 << 8 * element) - 1)).to_bytes(element, "little")
            except ValueError:
                raise UnsupportedPtx(f"initial value {value!r}") from None
    return out
