"""Faults of the operating system on demand.

The test compiles faultio, preloads it into a worker process, and tells it what to do.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tests.reliability.proof import Tally, Tick

SOURCE = Path(__file__).with_name("faultio.c")
MAX_FAULTS = 16
EXIT_CODE = 9
ALWAYS = 1 << 62
_ENTRY = struct.Struct("<5q")

Inside = Callable[[int, int, Tick], Tally]


class Action(IntEnum):
    """What happens to a call."""

    FAIL = 1  # it does nothing, and fails
    TORN = 2  # half of it happens, and it fails
    SHORT = 3  # half of it happens, and it says so; nothing is wrong with a call that moves no data
    EXIT_BEFORE = 4  # the process ends
    EXIT_WITHIN = 5  # half of it happens, and the process ends


class Change(IntEnum):
    """What a call did to a file."""

    CREATE = 1
    WRITE = 2
    CUT = 3  # or lengthened; `offset` is the new size
    GROW = 4  # to `offset` at least
    SYNC = 5
    RENAME = 6
    UNLINK = 7


@dataclass(frozen=True)
class Entry:
    """One change of a file or a name.

    `file` is an inode's number; `name` has no directory; the data of a RENAME is the new name.
    """

    kind: Change
    file: int
    offset: int
    name: str
    data: bytes


class Fault(ctypes.Structure):
    """Counted calls `first` to `last` (from 1) meet `action`.

    An action that fails a call sets the errno `number`.
    """

    _fields_ = [
        ("first", ctypes.c_int64), ("last", ctypes.c_int64), ("action", ctypes.c_int32), ("number", ctypes.c_int32),
    ]  # fmt: skip


class _Control(ctypes.Structure):
    _fields_ = [
        ("root", ctypes.c_char * 4096), ("calls", ctypes.c_int64), ("fired", ctypes.c_int64),
        ("num_faults", ctypes.c_int64), ("faults", Fault * MAX_FAULTS), ("last_call", ctypes.c_char * 32),
        ("logging", ctypes.c_int64), ("log_bytes", ctypes.c_int64), ("log", ctypes.c_void_p),
    ]  # fmt: skip


class Faults:
    """The faults of the directory `root` in this process, which has to have faultio preloaded."""

    def __init__(self, root: Path) -> None:
        self._root = os.fsencode(root.resolve())
        self._control = _Control.in_dll(ctypes.CDLL(None), "faultio")

    def plan(self, *faults: Fault) -> None:
        """Count calls from 1 again; these faults will meet them."""
        control = self._control
        control.root = self._root
        control.calls = control.fired = 0
        for index, fault in enumerate(faults):
            control.faults[index] = fault
        control.num_faults = len(faults)

    def off(self) -> None:
        """No call is counted, meets a fault or is logged any more. What was counted stays."""
        self._control.root = b""
        self._control.logging = 0

    def log(self) -> None:
        """Start a log of what changes files."""
        self._control.logging, self._control.log_bytes = 1, 0

    @property
    def calls(self) -> int:
        """Calls counted since `plan`."""
        return int(self._control.calls)

    @property
    def fired(self) -> int:
        """How many of them met a fault."""
        return int(self._control.fired)

    @property
    def last_call(self) -> str:
        """The name of the last one that met a fault."""
        return bytes(self._control.last_call).decode()

    @property
    def log_bytes(self) -> int:
        """Length of the log; positions in it are told by `entries`."""
        return int(self._control.log_bytes)

    def entries(self) -> Iterator[tuple[int, Entry]]:
        """The log: entries, each with the position behind it."""
        data = ctypes.string_at(self._control.log or 0, self.log_bytes) if self.log_bytes else b""
        at = 0
        while at < len(data):
            kind, file, offset, name_bytes, data_bytes = _ENTRY.unpack_from(data, at)
            middle = at + _ENTRY.size + name_bytes
            name = data[at + _ENTRY.size : middle].decode()
            at = middle + data_bytes
            yield at, Entry(Change(kind), file, offset, name, data[middle:at])


def preloaded(inside: Inside, count: int, seed: int, tick: Tick) -> Tally:
    """Run `inside`, a function of a module, in a worker that has faultio preloaded.

    Skipped where faultio cannot be compiled.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Tally(skipped=("everything: no C compiler (cc, gcc or clang) to build the fault injector with",))
    with tempfile.TemporaryDirectory(prefix="pagedkv-faultio-") as place:
        library = Path(place) / "faultio.so"
        built = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-lpthread"],
            capture_output=True, text=True,
        )  # fmt: skip
        if built.returncode:
            return Tally(skipped=(f"everything: the fault injector does not compile here: {built.stderr[-500:]}",))
        others = os.environ.get("LD_PRELOAD", "")
        return in_worker(inside, count, seed, tick, {"LD_PRELOAD": f"{others} {library}".strip()})


def in_worker(
    inside: Inside, count: int, seed: int, tick: Tick, changes: Mapping[str, str], before: Sequence[str] = ()
) -> Tally:
    """Run `inside` in a process of its own, in a changed environment.

    The process starts under the command `before`.

    A worker that dies is one wrong case; its tally is lost with it.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    command = [
        *before, sys.executable, "-m", "tests.reliability.worker", inside.__module__, inside.__name__, str(count),
        str(seed),
    ]  # fmt: skip
    environment = os.environ | changes | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = 0
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                told = json.loads(line)
                if isinstance(told, int):
                    done += told
                    tick(told)
                else:
                    return Tally(**told | {"skipped": tuple(told["skipped"])})
        errors.seek(0)
        last_words = errors.read()[-2000:]
    why = f"signal {signal.Signals(-worker.returncode).name}" if worker.returncode < 0 else "an error"
    return Tally(done, 1, first_wrong=f"the worker of seed {seed} ended by {why} after {done} cases: {last_words}")
