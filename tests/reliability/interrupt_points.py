"""Where an exception can arrive in the caller's thread.

At every line, call and return of the library's Python code.

A point is the beginning of a line, the return of a Python function, or the moment after a call when its result stands
on the stack and in no variable yet. There CPython delivers signals. Left out: the way from the body of a `with` or a
`try` to its end (the line event of a `with` line after its body; a call that is the last of a body that is returned
from; a `try` that begins inside a `with`). No signal can arrive there, and a tracer that raises there would skip
``__exit__`` or ``finally``. So is the end of a generator that is dropped half way: what it raises is dropped, too.
"""

from __future__ import annotations

import ast
import dis
import linecache
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pagedkv as pk
from pagedkv.core import BlockPool, BlockTable, Placement, RadixTree
from tests.reliability.interrupt_kinds import PENDING, deliver

LIBRARY = str(Path(pk.__file__).parent) + "/"
WINGS = {"cache", "lab", "observe", "spec", "threads", "tools"}  # folders whose modules and folders are rooms
CORE_CALLS = {
    name for kind in (BlockPool, BlockTable, Placement, RadixTree) for name in dir(kind) if not name.startswith("_")
} | {"BlockPool", "BlockTable", "Placement", "RadixTree"}  # fmt: skip


def room_of(file: str) -> str:
    """The room of a file of the library: a folder, or a module of its top level or of a wing."""
    parts = file.split("/")
    return parts[len(parts) > 1 and parts[0] in WINGS].removesuffix(".py").removesuffix(".pyx").lstrip("_")


@dataclass(frozen=True)
class Point:
    """A moment in the library.

    Attributes
    ----------
    event : line, return or call.
    signals : whether CPython 3.11 looks for signals there.
    callee : what has just been called, where that is known.
    stack : functions that it is inside of, from the inside out.
    """

    file: str
    line: int
    function: str
    event: str
    signals: bool
    callee: str = ""
    stack: tuple[str, ...] = ()

    @property
    def returns(self) -> bool:
        """Whether a call that the library's caller made is over, but for its `return`."""
        text = linecache.getline(LIBRARY + self.file, self.line).split()
        is_outermost = len(self.stack) > 1 and self.stack[1] == "call"  # of a scene
        return is_outermost and len(text) == 2 and text[0] == "return"

    @property
    def rooms(self) -> tuple[str, ...]:
        """The library's room, and `core` where that has just answered."""
        first = room_of(self.file)
        return (first, "core") if self.callee in CORE_CALLS else (first,)

    def __str__(self) -> str:
        after = f" of {self.callee}" if self.callee else ""
        inside = "".join(f" < {name}" for name in self.stack[1:5])
        no = "" if self.signals else ", no signal"
        return f"{self.file}:{self.line} ({self.function}{inside}, {self.event}{after}{no})"


@dataclass(frozen=True)
class Places:
    """Places in a code object.

    Instructions after a call with what was called, ends of `with` lines, beginnings of loops.
    """

    after_call: dict[int, str]
    with_ends: dict[int, int]
    exits: frozenset[int]  # where the end of a `with` begins, on whatever line the compiler says; and gaps in a `with`
    loops: frozenset[int]


@cache
def places(code: CodeType) -> Places:
    """Found once for each code object."""
    after_call: dict[int, str] = {}
    handler = -1
    with_ends: dict[int, int] = {}
    loops, line, called = set(), code.co_firstlineno, None
    handlers = _handlers(code)
    for instruction in dis.get_instructions(code):
        if instruction.starts_line is not None:
            line = int(instruction.starts_line)
        if called is not None:
            if _handler(handlers, instruction.offset) == handler:
                after_call[instruction.offset] = called
            called = None
        if instruction.opname.startswith("CALL") and instruction.opname != "CALL_INTRINSIC_1":
            called, handler = _callee(code, instruction), _handler(handlers, instruction.offset)
        elif instruction.opname in ("BEFORE_WITH", "SETUP_WITH"):
            with_ends[line] = instruction.offset
        elif instruction.opname.startswith(("JUMP_BACKWARD", "JUMP_ABSOLUTE")):
            loops.add(int(instruction.argval))
    return Places(after_call, with_ends, _exits(code) | _gaps(code, handlers), frozenset(loops))


def _gaps(code: CodeType, handlers: list[tuple[int, int, int]]) -> frozenset[int]:
    """Return NOPs that the compiler left out of every range of a handler.

    They stand where a `try` begins inside a `with`.
    """
    instructions = list(dis.get_instructions(code))
    return frozenset(
        here.offset
        for before, here, after in zip(instructions, instructions[1:], instructions[2:], strict=False)
        if here.opname == "NOP"
        and _handler(handlers, here.offset) < 0 <= min(_handler(handlers, at.offset) for at in (before, after))
    )


def _exits(code: CodeType) -> frozenset[int]:
    """Return where ``__exit__(None, None, None)`` of a `with` begins.

    Python looks for no signal between there and the call.
    """
    if "BEFORE_WITH" not in {instruction.opname for instruction in dis.get_instructions(code)}:
        return frozenset()
    found, nones = set(), []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_CONST" and instruction.argval is None:
            nones.append(instruction.offset)
        elif len(nones) >= 3 and instruction.opname in ("CALL", "PRECALL"):
            found.add(nones[-3])
            nones = []
        elif instruction.opname != "CACHE":
            nones = []
    for instruction in reversed(list(dis.get_instructions(code))):  # and what does nothing but go there
        leads_on = instruction.opname == "NOP" and instruction.offset + 2 in found
        if leads_on or (instruction.opname == "JUMP_FORWARD" and instruction.argval in found):
            found.add(instruction.offset)
    return frozenset(found)


def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    """Return ranges of instructions (first, end) and where their exceptions go.

    There are none before Python 3.11.
    """
    parse = getattr(dis, "_parse_exception_table", None)
    return [] if parse is None else [(entry.start, entry.end, entry.target) for entry in parse(code)]


def _handler(handlers: list[tuple[int, int, int]], offset: int) -> int:
    return next((target for start, end, target in handlers if start <= offset < end), -1)


def _callee(code: CodeType, instruction: dis.Instruction) -> str:
    """Return the last name of what an instruction calls.

    "" where Python does not know the place in the text (before 3.11).
    """
    at = getattr(instruction, "positions", None)
    if at is None or at.lineno is None or at.end_lineno is None:
        return ""
    lines = [linecache.getline(code.co_filename, number) for number in range(at.lineno, at.end_lineno + 1)]
    lines[-1] = lines[-1].encode()[: at.end_col_offset].decode()
    lines[0] = lines[0].encode()[at.col_offset :].decode()
    try:
        call = ast.parse("".join(lines).strip(), mode="eval").body
    except SyntaxError:
        return ""
    function = call.func if isinstance(call, ast.Call) else None
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


class Tracer:
    """Counts the points that the calling thread passes, and raises at one of them.

    It raises at number `target`; 0 is nowhere.

    Attributes
    ----------
    passed : points so far.
    point : where it raised; None if it did not.
    rooms : points by room, where `target` is 0.
    """

    def __init__(self, target: int = 0, problem: BaseException | None = None) -> None:
        self._target, self._problem = target, problem
        self.passed = 0
        self.point: Point | None = None
        self.rooms: dict[str, int] = {}
        self._closing: FrameType | None = None  # of a generator that is dropped half way

    def run(self, call: Callable[[], object]) -> None:
        """Call it, traced."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        frame.f_trace_opcodes = True
        return self._within

    def _within(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            if arg[0] is GeneratorExit:
                self._closing = frame
            return self._within
        if event == "return" and frame is self._closing:
            return self._within
        found = places(frame.f_code)
        if event == "opcode":
            if frame.f_lasti not in found.after_call:
                return self._within
        elif event == "line":
            end = found.with_ends.get(frame.f_lineno)
            if (end is not None and frame.f_lasti > end) or frame.f_lasti in found.exits:
                return self._within
        self.passed += 1
        if not self._target:
            for room in self._point(frame, event, found).rooms:
                self.rooms[room] = self.rooms.get(room, 0) + 1
        elif self.passed == self._target:
            self.point = self._point(frame, event, found)
            assert self._problem is not None
            PENDING.append(self._problem)
            deliver(signal.SIGUSR1, frame)
        return self._within

    def _point(self, frame: FrameType, event: str, found: Places) -> Point:
        at, code = frame.f_lasti, frame.f_code
        callee = found.after_call.get(at, "") if event == "opcode" else ""
        signals = at in found.after_call or at in found.loops
        if event == "line" and not signals:
            signals = not any(offset < at for offset in found.after_call) and frame.f_lineno <= _first_line(code)
        name = {"opcode": "call"}.get(event, event)
        file = code.co_filename.removeprefix(LIBRARY)
        stack: list[str] = []
        outer: FrameType | None = frame if self._target else None
        while outer is not None:
            stack.append(outer.f_code.co_name)
            outer = outer.f_back
        return Point(file, frame.f_lineno, code.co_name, name, signals and event != "return", callee, tuple(stack))


@cache
def _first_line(code: CodeType) -> int:
    """Return the line of the first statement.

    Python delivers signals that came during the call before that line.
    """
    lines = [line for _, line in dis.findlinestarts(code) if line != code.co_firstlineno]
    return min(lines, default=code.co_firstlineno)
