"""PTX text to a Module.

It knows the grammar that NVRTC emits, inline PTX with its own scopes included.
"""

from __future__ import annotations

import re

from tests.ptxsim.declarations import closing_brace, split_top, variable
from tests.ptxsim.errors import UnsupportedPtx
from tests.ptxsim.function_body import BodyParser
from tests.ptxsim.syntax import Function, Module

_COMMENT = re.compile(r'"[^"]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_SPACE = re.compile(r"\s*")
_HEADER = re.compile(r"((?:\.(?:visible|weak|extern|common|noreturn)\s+)*)\.(entry|func)\b")


def parse(text: str) -> Module:
    """Parse a PTX module.

    Raises
    ------
    UnsupportedPtx
        A directive or operand that the grammar here does not know.
    """
    return ModuleParser(text).module


class ModuleParser:
    """Reads a module from its first line to its last."""

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

    def until(self, char: str) -> str:
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
                line = self.until("\n")
                if line.startswith(".target"):
                    self.module.target = line.split()[1].rstrip(",")
            elif rest.startswith((".pragma", ".alias")):
                self.until(";")
            else:
                one = variable(self.until(";"))
                self.module.variables[one.name] = one

    def _function(self, entry: bool, start: int) -> None:
        body = self.text.index("{", start)
        end = self.text.find(";", start)
        declared_only = end != -1 and end < body
        head = self.text[start : end if declared_only else body]
        groups = re.match(r"\s*(\(.*?\))?\s*([\w$]+)\s*(\(.*?\))?(.*)", head, re.DOTALL)
        if groups is None:
            raise UnsupportedPtx(f"function header {head!r}")
        function = Function(groups[2], entry)
        function.results = [variable(part) for part in split_top((groups[1] or "()")[1:-1])]
        function.params = [variable(part) for part in split_top((groups[3] or "()")[1:-1])]
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
        BodyParser(self, function).read()
        self.module.functions[function.name] = function
