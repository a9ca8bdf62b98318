"""Which room may import which, read from the sources; and what none may import.

A file of the package belongs to the room that its path names, and may import its own room, what ``ARROWS`` gives that
room (tests/arrows.py), and nothing else of ours.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arrows import ARROWS, LEAVES, WINGS, in_docs

FORBIDDEN_MODULES = {
    *("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "copyreg"),
    *(
        "socket",
        "_socket",
        "socketserver",
        "ssl",
        "http",
        "urllib",
        "ftplib",
        "smtplib",
        "xmlrpc",
        "requests",
    ),
    *("subprocess", "_posixsubprocess", "multiprocessing", "pty", "code", "runpy", "torch"),
}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "system", "popen", "forkpty"}
OUR_METHODS = {  # of other libraries' objects, with such a name; no text is run
    "pagedkv": ".import_module",  # its own modules, when a name of theirs is first used
    "pagedkv.tiers.remote.glide": ".exec",  # the client sends a batch of commands
    "pagedkv.adapters.llama_context": ".eval",  # a llama_cpp.Llama computes tokens
    "pagedkv.adapters.mlx_layers": ".eval",  # mlx.core.eval computes arrays
}
OUR_SOCKETS = {"pagedkv.tiers.ranks.wire": "unix sockets, over which a cache commands its tensor-parallel ranks"}
FORBIDDEN_CALLS |= {f"{name}{how}" for name in ("exec", "spawn") for how in ("v", "ve", "vp", "vpe", "l", "le", "lp")}


def package_dir() -> Path:
    spec = importlib.util.find_spec("pagedkv")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def room_of(module: str) -> str:
    """Room of a dotted module of ours; of the package itself, ``__init__``."""
    parts = module.split(".")
    if ".".join(parts[1:3]) in LEAVES:
        return ".".join(parts[1:3])
    return ".".join(parts[1:3] if parts[1:2] and parts[1] in WINGS else parts[1:2]) or "__init__"


def module_of(path: Path, package: Path) -> str:
    """Dotted name of a source file; a package's ``__init__.py`` is the package."""
    parts = list(path.relative_to(package.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_imports(text: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names a Python source imports, at any depth; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*up, base] if base else up)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) == "import_module" and literal(node):
            yield literal(node)


def called_name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def literal(call: ast.Call) -> str:
    """The only argument of a call, when it is text that stands there; else nothing."""
    if len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value)
    return ""


_FROM = re.compile(r"^\s*from\s+([.\w]+)\s+c?import\s+\(?\s*([\w*]*)", re.MULTILINE)
_IMPORT = re.compile(r"^\s*c?import\s+(.+)$", re.MULTILINE)


def cython_imports(text: str) -> Iterator[str]:
    """Return the names that a Cython source imports or cimports.

    Relative ones are refused, to keep this reader simple.
    """
    text = re.sub(r'("""|\'\'\').*?\1', "", text, flags=re.DOTALL)
    text = re.sub(r"#.*", "", text)
    for found in _FROM.finditer(text):
        assert not found[1].startswith("."), f"write {found[0].strip()!r} with its full name"
        yield f"{found[1]}.{found[2]}" if found[2] else found[1]
    for found in _IMPORT.finditer(text):
        yield from (name.split()[0] for name in found[1].split(",") if name.strip())


def forbidden_calls(text: str) -> Iterator[str]:
    """Calls in a Python source that run text, start programs, or unpickle arrays."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = called_name(node)
            if name in FORBIDDEN_CALLS or (name == "import_module" and not literal(node)):
                yield name if isinstance(node.func, ast.Name) else f".{name}"
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not off:
                    yield "allow_pickle"


def problems(path: str, text: str, package: Path) -> list[str]:
    """What is wrong with one source file."""
    file = Path(path)
    module = module_of(file, package)
    room = room_of(module)
    if file.suffix in (".py", ".pyi"):
        imports = set(python_imports(text, module, file.stem == "__init__"))
        calls = set(forbidden_calls(text)) - {OUR_METHODS.get(module)}
    else:
        imports = set(cython_imports(text))
        calls = {name for name in FORBIDDEN_CALLS if re.search(rf"\b{name}\s*\(", text)}
    found = [f"{module} calls {name}" for name in sorted(calls)]
    USED.setdefault(room, set()).update(room_of(name) for name in imports if name.split(".")[0] == "pagedkv")
    if room not in ARROWS:
        return [*found, f"{module}: the room {room} is not in ARROWS"]
    for name in sorted(imports):
        top = name.split(".")[0]
        if top in FORBIDDEN_MODULES and not (top == "socket" and module in OUR_SOCKETS):
            found.append(f"{module} imports {name}")
        known = ARROWS[room] | {room}
        if top == "pagedkv" and room_of(name) not in known | {leaf for leaf in LEAVES if leaf.split(".")[0] in known}:
            found.append(f"{module} imports {name}: no arrow from {room} to {room_of(name)}")
    return found


USED: dict[str, set[str]] = {}  # rooms that a room's files import, of the files read so far
PACKAGE = package_dir()
SOURCES = sorted(path for kind in ("py", "pyi", "pyx", "pxd", "pxi") for path in PACKAGE.rglob(f"*.{kind}"))


def test_every_file_imports_only_along_the_arrows_and_every_arrow_is_used() -> None:
    found = {str(path.relative_to(PACKAGE)): problems(str(path), path.read_text(), PACKAGE) for path in SOURCES}
    assert not {name: wrong for name, wrong in found.items() if wrong}
    idle = {room: known - USED.get(room, set()) for room, known in ARROWS.items()}
    assert {room: sorted(known) for room, known in idle.items() if known} == {}


def test_every_file_that_may_call_such_a_method_does() -> None:
    sources = {module_of(path, PACKAGE): path for path in SOURCES if path.suffix == ".py"}
    for module, method in OUR_METHODS.items():
        assert method in set(forbidden_calls(sources[module].read_text()))


@pytest.mark.checkout
def test_the_page_has_the_same_arrows() -> None:
    page = Path(__file__).parent.parent / "docs" / "architecture.md"
    assert in_docs() in page.read_text(), "python -m tests.arrows"


def test_core_tiers_and_kernels_do_not_know_each_other() -> None:
    apart = {"_core", "tiers", "kernels"}
    for room in apart:
        assert not ARROWS[room] & apart


def test_only_the_conductors_know_the_cache() -> None:
    knowing = {room for room, known in ARROWS.items() if "cache.cache" in known}
    lab = {"lab.replay", "lab.simulate", "lab.recording", "lab.show", "lab.traces"}
    assert knowing == {"scheduler", "events", "adapters.model_cache", "__init__", *lab}


def test_the_arrows_have_no_circle() -> None:
    remaining = {room: set(known) for room, known in ARROWS.items()}
    while remaining:
        leaves = {room for room, known in remaining.items() if not known & remaining.keys()}
        assert leaves, f"a circle among {sorted(remaining)}"
        remaining = {room: known for room, known in remaining.items() if room not in leaves}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("reference/x.py", "from pagedkv.errors import PagedKVError"),
        ("reference/x.py", "def f():\n    import pagedkv"),
        ("reference/x.py", "from .. import errors"),
        ("tiers/x.py", "from pagedkv._core.types import Move"),
        ("tiers/deep/x.py", "from ..._core import types"),
        ("tiers/__init__.py", "from .._core import types"),
        ("tiers/x.py", "from pagedkv.cache import cache"),
        ("_core/x.py", "from pagedkv.spec.kv_spec import KVSpec"),
        ("_core/x.pyx", "from pagedkv.tiers.disk._io cimport read"),
        ("_core/x.pyx", "cimport numpy, pagedkv.tiers.disk._io"),
        ("_core/x.pyx", "if True:\n    from pagedkv.cache.cache import (\n        KVCache,\n    )"),
        ("spec/kv_spec.py", "from pagedkv.cache.cache import KVCache"),
        ("errors.py", "import pagedkv.spec.sizes"),
        ("errors.py", "from pagedkv._core.block_pool import BlockPool"),
        ("_core/tier.py", "from pagedkv.errors import X"),
        ("garden/x.py", ""),
        ("cache/cache.py", "import pickle"),
        ("cache/cache.py", "from multiprocessing.shared_memory import SharedMemory"),
        ("cache/cache.py", "def f():\n    from torch.utils import dlpack"),
        ("tiers/x.pyx", "import socket"),
        ("cache/cache.py", "eval('1')"),
        ("cache/cache.py", "client.exec(batch)"),
        ("tiers/remote/glide.py", "exec(text)"),
        ("tiers/remote/glide.py", "client.eval(text)"),
        ("cache/cache.py", "importlib.import_module('torch.utils')"),
        ("cache/cache.py", "import_module(name)"),
        ("tiers/x.py", "importlib.import_module('.cache', 'pagedkv')"),
        ("cache/cache.py", "os.system('ls')"),
        ("cache/cache.py", "np.load(path, allow_pickle=True)"),
        ("cache/cache.py", "np.load(path, allow_pickle=flag)"),
        ("_core/x.pyx", "exec (text)"),
    ],
)
def test_the_check_itself_finds_what_is_forbidden(path: str, text: str) -> None:
    assert problems(str(PACKAGE / path), text, PACKAGE)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "tiers/x.py",
            "from pagedkv.spec.budgets import Disk\nfrom . import base\nfrom .base import OpenTier\nimport numpy",
        ),
        ("tiers/__init__.py", "from .base import OpenTier"),
        (
            "_core/x.pyx",
            "from pagedkv.errors import X\nfrom pagedkv._core.types cimport NIL\ncimport numpy as cnp",
        ),
        ("_core/x.pyx", '"""import socket"""\n# import pickle\n'),
        ("cache/cache.py", "np.load(path, allow_pickle=False)"),
        ("cache/cache.py", "importlib.import_module('cupy')"),
        ("tiers/remote/glide.py", "client.exec(batch)"),
    ],
)
def test_the_check_itself_lets_pass_what_is_allowed(path: str, text: str) -> None:
    assert not problems(str(PACKAGE / path), text, PACKAGE)
