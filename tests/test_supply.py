"""What the package cannot do, read from its sources, and what a running cache does not do.

An audit hook watches the running cache.

No file of the package can unpickle, run text as a program, start a process or open a socket, by import, by call or by
the attribute that leads there. The few things that some file must do are allowed to that file alone, with the reason; a
row that nothing needs any more fails too. `test_import_arrows` reads imports and the plainest calls; this goes on.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import pytest

from tests.test_import_arrows import (
    FORBIDDEN_CALLS,
    FORBIDDEN_MODULES,
    OUR_SOCKETS,
    PACKAGE,
    called_name,
    literal,
    module_of,
)

FORBIDDEN = FORBIDDEN_MODULES | {
    *("asyncio", "selectors", "select", "socketserver", "telnetlib", "wsgiref", "webbrowser"),  # the network
    *("builtins", "codeop", "imp", "zipimport", "pkgutil", "timeit", "pdb", "bdb", "doctest"),  # code made of text
    *("dbm", "sqlite3", "plistlib", "jsonpickle", "yaml", "_ctypes", "cffi"),
}
FORBIDDEN_DOTTED = {
    *("logging.config", "logging.handlers"),  # eval and sockets; sockets
    *("numpy.ctypeslib", "numpy.f2py", "numpy.distutils"),
    *("concurrent.futures.process", "concurrent.futures.ProcessPoolExecutor"),
}
# names that must not be used at all, as a variable, an attribute or an imported name
FORBIDDEN_NAMES = {
    *("__builtins__", "__subclasses__", "__globals__", "__reduce_ex__", "pythonapi", "py_object"),
    *("posix_spawn", "posix_spawnp", "startfile", "fork", "forkpty", "vfork", "ProcessPoolExecutor"),
    *("create_connection", "create_server", "create_unix_connection", "create_unix_server", "open_connection"),
    *("create_datagram_endpoint", "connect_accepted_socket", "connect_read_pipe", "connect_write_pipe", "start_server"),
    *("subprocess_exec", "subprocess_shell", "create_subprocess_exec", "create_subprocess_shell"),  # an event loop's
}
OF_ASYNCIO = {"AbstractEventLoop", "CancelledError", "Future", "get_running_loop", "wait"}  # none reaches beyond a task
OF_SOCKETS = {
    *("_sock", "_socket", "_get_socket", "recv", "recv_into", "recvfrom", "recvmsg", "sendall", "sendto", "sendmsg"),
    *("settimeout", "setblocking", "setsockopt", "makefile", "getpeername"),
}
OUR_FORKS = {
    "pagedkv.cache.sequence": "fork: a second owner of a sequence's blocks, no process",
    "pagedkv.lab.show.demo": "forks a sequence",
    "pagedkv.scheduler.reporting": "forks a sequence",
    "pagedkv.scheduler.reopening": "forks a sequence",
}
OUR_LOADS = dict.fromkeys(
    ("pagedkv.adapters.llama_cpp", "pagedkv.adapters.mlx_lm", "pagedkv.adapters.onnx"),
    "PrefixStore.load: copies cached KV into arrays; it reads no file",
)
USED = {"eval", "exec", "__import__"}  # also without a call
OF_OS = {f"os.{name}" for name in FORBIDDEN_CALLS}
# calls of a plain name; attributes of the same name (re.compile, nvrtc.compile) are other things
FORBIDDEN_PLAIN = {"compile", "globals", "vars", "breakpoint", "input"}
FORBIDDEN_C = {
    *("system", "popen", "fork", "vfork", "execl", "execv", "execve", "execvp", "posix_spawn", "dlopen", "dlsym"),
    *("socket", "connect", "bind", "listen", "accept", "sendto", "recvfrom", "gethostbyname", "getaddrinfo"),
    *("open", "openat", "creat", "mkdir", "rename", "fopen"),  # files are opened in Python, where hooks see it
    *("strcpy", "strcat", "sprintf", "gets", "PyRun_String", "PyRun_SimpleString", "PyEval_EvalCode"),
}
C_HEADERS = {
    "Python.h", "stdint.h", "stddef.h", "string.h", "errno.h", "emmintrin.h", "immintrin.h",
    "math.h", "stdlib.h",  # stdlib.h declares system(), too, which is not called
    "pthread.h", "sched.h", "stdatomic.h",  # the core's mutex, the CPU kernels' threads
    "sys/uio.h", "fcntl.h",  # reads, and hints about the page cache; fcntl.h declares open(), which is not called
}  # fmt: skip
C_HEADERS |= {path.name for path in PACKAGE.rglob("*.h")}  # our own
C_MODULES = {"libc.errno", "libc.math", "libc.stdint", "libc.stdlib", "libc.string"}
C_MODULES |= {"posix.types", "posix.unistd", "cpython.list", "cpython.pythread"}
C_MODULES |= {"cpython.exc", "cpython.object", "cpython.pycapsule", "cpython.ref"}  # DLPack's capsules

MAKES_FILES = {
    *("mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile", "TemporaryDirectory"),
    *("write_text", "write_bytes", "touch", "mkdir", "makedirs", "symlink", "symlink_to", "hardlink_to", "mkfifo"),
    *("savefig", "tofile", "savetxt", "savez", "savez_compressed", "memmap", "posix_fallocate", "ftruncate"),
    *("pwrite", "pwritev", "sendfile", "copyfile", "copytree", "rmtree", "rmdir", "unlink", "chmod", "fchmod"),
}
MAKES_FILES_OF_OS = {"rename", "replace", "remove", "link", "truncate", "write", "fdopen", "chown"}

# what some file must be able to do -> which file, and why
MAY: dict[str, dict[str, str]] = {
    "native code": {
        "pagedkv.adapters.llama_context": "a pointer to a state's bytes, for llama-cpp-python's functions",
        "pagedkv.c_api": "the addresses of our own functions, for Numba and ctypes",
        "pagedkv.kernels.driver": "asks libcuda for its version and its errors' names",
        "pagedkv.kernels.nvrtc": "NVRTC compiles our own CUDA sources",
        "pagedkv.kernels.tensor_map": "lays out a descriptor for the CUDA driver",
    },
    "import by name": {
        "pagedkv.interop.devices": "CuPy, an extra",
        "pagedkv.interop.cupy_arrays": "CuPy, an extra",
        "pagedkv.kernels.cupy_backend": "CuPy, an extra",
        "pagedkv.kernels.precompile": "rich, an extra",
        "pagedkv.lab.replay.decompress": "Zstandard, of Python 3.14 or an extra",
        "pagedkv.lab.replay.plot": "matplotlib, an extra",
        "pagedkv.lab.replay.progress": "rich, an extra",
        "pagedkv.lab.replay.table": "rich, an extra",
        "pagedkv.lab.simulate.table": "rich, an extra",
        "pagedkv.tiers.device": "CuPy, an extra",
        "pagedkv.tools.store.show": "rich, an extra",
        "pagedkv": "our own room of events, from its first use on",
        "pagedkv.events.publisher": "msgspec, an extra",
        "pagedkv.observe.metrics": "prometheus_client, an extra",
        "pagedkv.lab.show.command": "rich, an extra",
    },
    "event loop": {
        "pagedkv.serving.async_scheduler": "submissions wait for an answer, and stopping for the end",
        "pagedkv.serving.mailbox": "a reader waits for its next tokens",
        "pagedkv.serving.stepper": "hands tokens to the loop that waits for them",
        "pagedkv.serving.stream": "a reader that is cancelled aborts its request",
    },
    "socket": {
        "pagedkv.tiers.remote.connection": "reads and writes a connection that redis-py has opened, an extra",
        "pagedkv.tiers.ranks.wire": OUR_SOCKETS["pagedkv.tiers.ranks.wire"],
    },
    "messages": {"pagedkv.events.sockets": "pyzmq, an extra: publishes KV events, and answers those who missed some"},
    "environment": {
        "pagedkv.adapters.llama_model": "a variable by which llama.cpp stores other numbers",
        "pagedkv.kernels.autotune": "whether kernels are tried on a device before one is taken",
        "pagedkv.kernels.jit": "where compiled kernels are kept",
        "pagedkv.cpu.threads": "how many threads, and which instructions",
        "pagedkv.tiers.device": "whether a move beside a captured graph that was not told of is refused",
        "pagedkv.tiers.remote.mooncake": "limits of Mooncake's client, where the process has set none",
    },
    "changes files": {
        "pagedkv.adapters.folders": "makes and removes the folders of models, in the directory of an adapter's disk",
        "pagedkv.adapters.probe": "the numeric fingerprint in such a folder",
        "pagedkv.cli": "sends what is left to print to /dev/null when the reader of stdout left",
        "pagedkv.kernels.jit": "keeps compiled kernels",
        "pagedkv.kernels.tuning": "keeps which kernel is right and fastest on a device",
        "pagedkv.kernels.cupy_backend": "hands a compiled kernel to CuPy in a private temporary folder",
        "pagedkv.lab.replay.report": "--json FILE",
        "pagedkv.lab.replay.plot": "--plot FILE",
        "pagedkv.lab.simulate.plot": "--plot FILE",
        "pagedkv.lab.traces.from_tokens": "the trace made from a log of tokens",
        "pagedkv.lab.traces.whole_lines": "the trace recorded of a live cache",
        "pagedkv.tiers.disk.growth": "the directory of a disk tier that grows",
        "pagedkv.lab.replay.engine_real": "a private temporary folder for the disk tier",
        "pagedkv.cache.learned": "what an eviction policy learned, beside the disk tier or where the caller says",
        "pagedkv.lab.recording.file": "Recorder.save(FILE)",
        "pagedkv.lab.show.command": "--html FILE",
        "pagedkv.lab.show.demo": "a private temporary folder for the disk tier",
        "pagedkv.tools.store.benchmark": "a plain file to compare a store with, in the directory that trial makes",
        "pagedkv.tools.store.trial": "a private temporary directory inside the one to be tried",
        "pagedkv.tiers.disk.directory": "makes the store's directory and files, all private, below one descriptor",
        "pagedkv.tiers.disk.store": "writes the superblock",
        "pagedkv.tiers.disk.file_system": "gives a file of the store all its bytes, where no call does",
        "pagedkv.tiers.ranks.wire": "the unix socket at which a cache waits for its ranks",
        "pagedkv.tiers.remote.objects": "the folder of an object store, by fsspec",
    },
}  # fmt: skip


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain that starts at a name, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def imported(node: ast.AST) -> list[str]:
    """Names that an import statement, or an import by name, brings in; absolute ones only."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and called_name(node) == "import_module":
        return [literal(node) or "?"]
    return []


def forbidden_in(text: str, module: str) -> list[str]:
    """What no file may contain, of a Python source."""
    found = []
    for node in ast.walk(ast.parse(text)):
        for name in imported(node):
            parts = name.split(".")
            if name == "asyncio" and module in MAY["event loop"]:
                continue
            if name in ("socket", "selectors") and module in OUR_SOCKETS:
                continue
            if parts[0] in FORBIDDEN or name in FORBIDDEN_DOTTED or parts[-1] in FORBIDDEN_NAMES | FORBIDDEN_CALLS:
                found.append(f"imports {name}")
        if isinstance(node, ast.Call):
            name = called_name(node)
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_PLAIN:
                found.append(f"calls {node.func.id}")
            if name == "load" and module in OUR_LOADS and dotted(node.func).endswith("store.load"):
                continue
            if name == "load" and dotted(node.func) not in ("np.load", "numpy.load"):
                found.append(f"calls {dotted(node.func) or name}")
            if name == "load" and not any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                found.append("loads arrays without saying allow_pickle=False")
            if name == "getattr" and node.args and dotted(node.args[0]) in ("os", "sys", "builtins", "importlib"):
                found.append(f"takes an attribute of {dotted(node.args[0])} by a computed name")
        if isinstance(node, ast.Name | ast.Attribute):
            name, whole = (node.id if isinstance(node, ast.Name) else node.attr), dotted(node)
            ours = name == "fork" and module in OUR_FORKS
            if whole.startswith("asyncio.") and name not in OF_ASYNCIO:
                found.append(f"uses {whole}")
            if (name in FORBIDDEN_NAMES and not ours) or whole in USED or whole in OF_OS:
                found.append(f"uses {whole or name}")
    return sorted(set(found))


@cache
def abilities_in(text: str) -> Set[str]:
    """Which rows of `MAY` a Python source needs."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        names = imported(node)
        if any(name.split(".")[0] == "ctypes" for name in names):
            found.add("native code")
        if any(name.split(".")[0] == "asyncio" for name in names):
            found.add("event loop")
        if any(name.split(".")[0] in ("zmq", "pynng", "nng") for name in names):
            found.add("messages")
        if isinstance(node, ast.Call) and called_name(node) == "import_module":
            found.add("import by name")
        if isinstance(node, ast.Attribute) and node.attr in OF_SOCKETS:
            found.add("socket")
        if isinstance(node, ast.Constant) and node.value in OF_SOCKETS:  # getattr
            found.add("socket")
        if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.environb", "os.getenv", "os.putenv"):
            found.add("environment")
        if any(name in ("os.environ", "os.getenv", "os.putenv") for name in names):
            found.add("environment")
        if isinstance(node, ast.Call) and changes_files(node):
            found.add("changes files")
        if any(name.startswith("os.") and name[3:] in MAKES_FILES | MAKES_FILES_OF_OS for name in names):
            found.add("changes files")
    return found


def changes_files(call: ast.Call) -> bool:
    """Whether a call may make, change or delete a file.

    An ``open`` counts unless its mode says that it only reads.
    """
    name, whole = called_name(call), dotted(call.func)
    if name in MAKES_FILES or (name in MAKES_FILES_OF_OS and whole == f"os.{name}"):
        return True
    if whole == "os.open":
        flags = {dotted(part) for part in ast.walk(call) if isinstance(part, ast.Attribute)}
        return "os.O_RDONLY" not in flags or bool(flags & {"os.O_CREAT", "os.O_TRUNC"})
    if name == "open" and (whole == "open" or (call.args and isinstance(call.args[0], ast.Constant))):
        place = 1 if whole == "open" else 0  # Path.open has its mode first
        given = call.args[place : place + 1] + [k.value for k in call.keywords if k.arg == "mode"]
        return any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in given)
    return False


def c_problems(text: str) -> list[str]:
    """What no Cython or C source may contain."""
    bare = re.sub(r"\"\"\".*?\"\"\"|/\*.*?\*/|(?<!\w)#(?!include)[^\n]*", _without_prose, text, flags=re.DOTALL)
    found = [f"calls {name}" for name in FORBIDDEN_C if re.search(rf"(?<![\w.])(?<!def ){name}\s*\(", bare)]
    headers = re.findall(r"#\s*include\s*[<\"]([^>\"]+)[>\"]", text)
    headers += re.findall(r"cdef\s+extern\s+from\s+[\"']<?([^>\"']+)>?[\"']", text)
    found += [f"includes {name}" for name in headers if name not in C_HEADERS]
    modules = re.findall(r"^\s*from\s+((?:libc|posix|libcpp|cpython)[\w.]*)\s+cimport", text, re.MULTILINE)
    modules += re.findall(r"^\s*cimport\s+((?:libc|posix|libcpp|cpython)[\w.]*)", text, re.MULTILINE)
    found += [f"cimports {name}" for name in modules if name not in C_MODULES]
    return sorted(found)


def _without_prose(found: re.Match[str]) -> str:
    """Return a docstring or comment only if it is code.

    Prose may say what it likes; a literal block of C in a docstring's place is code.
    """
    return found[0] if "#include" in found[0] or "static " in found[0] else ""


PYTHON = sorted(path for kind in ("py", "pyi") for path in PACKAGE.rglob(f"*.{kind}"))
C = sorted(path for kind in ("pyx", "pxd", "pxi", "h", "c") for path in PACKAGE.rglob(f"*.{kind}"))


def name_of(path: Path) -> str:
    return module_of(path, PACKAGE)


def test_no_python_file_can_unpickle_run_text_start_a_process_or_open_a_socket() -> None:
    found = {str(path.relative_to(PACKAGE)): forbidden_in(path.read_text(), name_of(path)) for path in PYTHON}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_no_compiled_file_calls_or_includes_what_is_not_listed() -> None:
    found = {str(path.relative_to(PACKAGE)): c_problems(path.read_text()) for path in C}
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    "text",
    [
        *("connection._sock.close()", "getattr(connection, '_sock')", "there.sendall(data)", "x = there.recv_into"),
        *("wire._socket.send(data)", "connection._get_socket()"),
    ],
)
def test_the_check_finds_a_library_s_socket(text: str) -> None:
    assert "socket" in abilities_in(text)


def test_the_one_file_with_a_socket_sends_receives_and_limits_and_opens_none() -> None:
    tree = ast.parse((PACKAGE / "tiers" / "remote" / "connection.py").read_text())
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert all(dotted(node) == "self._socket" for node in attributes if node.attr == "_socket")
    for owner, allowed in (("_socket", {"recv_into", "send", "settimeout"}), ("_connection", {"disconnect"})):
        assert {node.attr for node in attributes if dotted(node.value) == f"self.{owner}"} == allowed


def test_the_one_file_that_opens_sockets_opens_unix_sockets_alone() -> None:
    used: list[str] = []
    for module in OUR_SOCKETS:
        tree = ast.parse((PACKAGE.parent / module.replace(".", "/")).with_suffix(".py").read_text())
        used += [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        opens = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and dotted(node.func) == "socket.socket"]
        assert opens
        assert all(list(map(dotted, node.args)) == ["socket.AF_UNIX", "socket.SOCK_STREAM"] for node in opens)
    ours = {name for name in used if name.startswith("socket.")}
    assert ours == {"socket.socket", "socket.socketpair", "socket.AF_UNIX", "socket.SOCK_STREAM"}
    assert forbidden_in("import socket", "pagedkv.tiers.remote.connection"), "the exception is for these files alone"


@pytest.mark.parametrize("ability", MAY)
def test_only_the_files_of_the_table_may_and_every_row_is_needed(ability: str) -> None:
    able = {name_of(path) for path in PYTHON if path.suffix == ".py" and ability in abilities_in(path.read_text())}
    assert able == set(MAY[ability]), ability


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import numpy.ctypeslib",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures as cf\ncf.ProcessPoolExecutor()",
        "import logging.handlers",
        "from logging import config",
        "import marshal as m",
        "import shelve",
        "def f():\n    import asyncio",
        "from os import system",
        "from os import execv as run",
        "import os\nrun = os.system",
        "import os\nos.posix_spawn('/bin/sh', [], {})",
        "import os\nos.fork()",
        "getattr(os, 'sys' + 'tem')('ls')",
        "f = eval",
        "map(exec, texts)",
        "compile(text, 'x', 'exec')",
        "__builtins__['eval']('1')",
        "().__class__.__base__.__subclasses__()",
        "import torch",
        "torch.load(path)",
        "np.load(path)",
        "numpy.load(path)",
        "joblib.load(path)",
        "import builtins",
        "importlib.import_module('subprocess')",
        "import ctypes\nctypes.pythonapi.PyRun_SimpleString(b'1')",
        "import yaml",
    ],
)
def test_the_check_finds_what_is_forbidden(text: str) -> None:
    assert forbidden_in(text, "pagedkv.x")


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio\nasyncio.open_connection('x', 80)",
        "import asyncio\nasyncio.create_subprocess_exec('ls')",
        "import asyncio\nasyncio.get_running_loop().create_connection(make)",
        "import asyncio\nasyncio.to_thread(work)",
        "from asyncio import start_server",
        "import asyncio.streams",
    ],
)
def test_what_may_use_an_event_loop_may_not_reach_beyond_its_tasks(text: str) -> None:
    assert forbidden_in(text, "pagedkv.serving.stream")
    assert not forbidden_in("import asyncio\nasyncio.get_running_loop().create_future()", "pagedkv.serving.stream")


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile('x')",
        "self.nvrtc.compile(source)",
        "np.load(path, allow_pickle=False)",
        "from concurrent.futures import ThreadPoolExecutor",
        "import logging",
        "evaluate(1)",
        "json.loads(text)",
        "getattr(self, name)",
        "os.register_at_fork(after_in_child=f)",
    ],
)
def test_the_check_lets_pass_what_is_harmless(text: str) -> None:
    assert not forbidden_in(text, "pagedkv.x")


@pytest.mark.parametrize(
    ("ability", "text"),
    [
        ("native code", "import ctypes.util"),
        ("native code", "from ctypes import CDLL"),
        ("import by name", "importlib.import_module('rich')"),
        ("environment", "os.environ['HOME']"),
        ("environment", "from os import getenv"),
        ("changes files", "open(path, 'w')"),
        ("changes files", "open(path, mode=how)"),
        ("changes files", "path.open('ab')"),
        ("changes files", "path.write_text('')"),
        ("changes files", "os.open(path, flags)"),
        ("changes files", "os.open(path, os.O_RDWR | os.O_CREAT)"),
        ("changes files", "os.open(path, os.O_RDONLY | os.O_CREAT)"),
        ("changes files", "os.rename(a, b)"),
        ("changes files", "from os import unlink"),
        ("changes files", "np.memmap(path)"),
        ("changes files", "tempfile.mkdtemp()"),
    ],
)
def test_the_check_sees_each_ability(ability: str, text: str) -> None:
    assert abilities_in(text) == {ability}


@pytest.mark.parametrize(
    "text",
    ["open(path)", "path.open('rb')", "os.open(path, os.O_RDONLY)", "table.open(tokens)", "text.replace('a', 'b')"],
)
def test_reading_is_no_change(text: str) -> None:
    assert not abilities_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "system(command)",
        "with nogil:\n    socket (AF_INET, SOCK_STREAM, 0)",
        'cdef extern from "<sys/socket.h>":\n    pass',
        'cdef extern from *:\n    """\n    #include <dlfcn.h>\n    """',
        "#include <dlfcn.h>",
        "from libc.stdio cimport printf",
        "from posix.fcntl cimport open",
        "cimport libc.signal",
        'cdef extern from *:\n    """\n    static void f(void) { dlopen("x", 1); }\n    """',
    ],
)
def test_the_check_of_compiled_sources_finds_what_is_not_listed(text: str) -> None:
    assert c_problems(text)


@pytest.mark.parametrize(
    "text", ['"""bind (a name)"""', "self.connect()", "# system(1)\n", "from libc.string cimport memcpy"]
)
def test_the_check_of_compiled_sources_lets_pass_what_is_harmless(text: str) -> None:
    assert not c_problems(text)


AUDITED = r"""
import json, os, sys
os.umask(0)
import numpy as np
import pagedkv as pk

seen = []
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WATCHED = "socket. subprocess. os. shutil. tempfile. pickle. ctypes. pty. exec compile urllib.".split()
HARMLESS = {"os.listdir", "os.scandir", "os.putenv", "os.getxattr"}

def hook(event, args):
    if event == "open":
        if not isinstance(args[2], int) or args[2] & WRITES:
            seen.append(["open", os.fspath(args[0]) if not isinstance(args[0], int) else args[0]])
    elif event.startswith(tuple(WATCHED)) and event not in HARMLESS:
        seen.append([event, str(args[0]) if args else ""])

spec = pk.KVSpec(2, 2, 4, "float32", 4, model="toy")

def work(store):
    hits = 0
    with pk.KVCache(spec, pk.Blocks(6), pk.Blocks(4), pk.Disk(store, pk.Blocks(64))) as cache:
        tenants = [None, pk.Namespace(tenant="a"), pk.Namespace(tenant="b")]
        for turn in range(2):
            for n in range(6):
                with cache.sequence(range(100 * n, 100 * n + 17), tenants[n % 3]) as seq:
                    if seq.num_computed < 17:
                        with cache.step([seq]) as step:
                            for layer in range(2):
                                kv = np.zeros((len(step.tokens), 2, 4), np.float32)
                                step.write(layer, kv, kv)
                    hits += seq.hit_tokens.get("disk", 0)
        cache.prefetch(range(17)).wait()
        cache.purge(tenants[1])
        cache.stats(), cache.explain(range(17)), cache.check_integrity()
    return hits

work(sys.argv[2])  # what is imported when it is first used is imported now
sys.addaudithook(hook)
hits = work(sys.argv[1]) + work(sys.argv[1])
print(json.dumps({"seen": seen, "hits": hits}))
"""


def test_a_cache_with_a_disk_tier_touches_its_directory_and_nothing_else(tmp_path: Path) -> None:
    """Store files are opened below a descriptor, so their names come without their folder.

    The baits stay empty.
    """
    baits = [tmp_path / name for name in ("here", "home", "tmp")]
    for bait in baits:
        bait.mkdir()
    store = tmp_path / "kv"
    environment = os.environ | {"HOME": str(baits[1]), "TMPDIR": str(baits[2]), "XDG_CACHE_HOME": str(baits[1])}
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "-c", AUDITED, str(store), str(tmp_path / "before")]
    done = subprocess.run(command, cwd=baits[0], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hits"] > 0, "the disk tier served nothing, so this run says nothing"
    allowed = {("os.mkdir", str(store)), ("os.rename", "SUPER.new")}
    names = re.compile(r"LOCK|KEY|SUPER|SUPER\.new|data\.\d{4,}")
    opened = [name for event, name in found["seen"] if event == "open"]
    assert {"LOCK", "KEY", "SUPER", "data.0000"} <= set(opened)
    assert not [name for name in opened if not names.fullmatch(str(name))]
    for event, name in found["seen"]:
        cut_down = event == "os.truncate" and name.isdecimal()  # of a descriptor, LOCK's
        assert event == "open" or (event, name) in allowed or cut_down, (event, name)
    for bait in baits:
        assert not list(bait.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "here", "home", "kv", "tmp"]


def test_umask_zero_leaves_the_store_private(tmp_path: Path) -> None:
    store = tmp_path / "kv"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", AUDITED, str(store), str(tmp_path / "before")]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=300)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in store.iterdir()}
    assert {"LOCK", "KEY", "SUPER", "data.0000"} <= modes.keys()
    assert set(modes.values()) == {0o600}
    assert store.stat().st_mode & 0o7777 == 0o700


def named_tests(text: str) -> Iterator[tuple[str, str]]:
    """File and test that a page names, as ``tests/x.py::test_y`` or ``tests/x.py``."""
    yield from re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)


@pytest.mark.checkout
@pytest.mark.parametrize("page", ["SECURITY.md", "docs/disk.md"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    root = Path(__file__).parents[1]
    named = list(named_tests((root / page).read_text(encoding="utf-8")))
    assert named, f"{page} names no test"
    for path, test in named:
        assert (root / path).is_file(), f"{page} names {path}"
        assert not test or f"def {test}(" in (root / path).read_text(encoding="utf-8"), f"{page} names {path}::{test}"
