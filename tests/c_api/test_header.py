"""The header compiles as C99 and C++11, and an extension imports the functions through it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import pagedkv
from pagedkv import c_api
from pagedkv.core import BlockTable
from tests.core.helpers import single, sound

HEADER = Path(pagedkv.get_include(), "pagedkv.h")
CC = (sysconfig.get_config_var("CC") or "cc").split()[0]
CXX = (sysconfig.get_config_var("CXX") or "c++").split()[0]
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
PYTHON = ["-isystem", sysconfig.get_path("include")]  # whose own headers are not as strict
EXTENSION = """
#include <Python.h>
#include <pagedkv.h>

static const pagedkv_api *kv;

/* Serves a prompt with a table of Python's, without the GIL: the blocks that the tree took, or a code. */
static PyObject *serve(PyObject *self, PyObject *args) {
    PyObject *object, *buffer;
    Py_buffer view;
    pagedkv_table *table = NULL;
    int64_t row = 0, cached = 0, committed = 0;
    int code;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO", &object, &buffer) || PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    code = kv->table_of(object, &table);
    if (code == PAGEDKV_OK) {
        Py_BEGIN_ALLOW_THREADS
        const int64_t n = view.len / (int64_t)sizeof(int32_t);
        int32_t tables[64], lens[1], indptr[2], positions[64], tokens[64];
        int64_t slots[64];
        pagedkv_step step = {0};
        step.block_tables = tables, step.tables_room = 64, step.seq_lens = lens, step.q_indptr = indptr;
        step.positions = positions, step.tokens = tokens, step.slot_mapping = slots, step.tokens_room = 64;
        code = kv->table_open(table, 0, (const int32_t *)view.buf, n, 1, PAGEDKV_NIL, &row, &cached);
        if (code == PAGEDKV_OK) code = kv->table_step(table, &row, 1, NULL, 0, &step, NULL);
        if (code == PAGEDKV_OK) code = kv->table_commit(table, &row, 1, step.number, &committed, NULL);
        if (code == PAGEDKV_OK) code = kv->table_release(table, row, 0);
        Py_END_ALLOW_THREADS
        kv->table_delete(table);
    }
    PyBuffer_Release(&view);
    return Py_BuildValue("(isLL)", code, kv->describe(code), (long long)cached, (long long)committed);
}

static PyMethodDef functions[] = {{"serve", serve, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "engine", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_engine(void) {
    kv = import_pagedkv();
    return kv != NULL ? PyModule_Create(&module) : NULL;
}
"""


def run(command: list[str], cwd: Path) -> None:
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}"


def needs(compiler: str) -> str:
    """The compiler; the test is skipped without it, or without Python's headers."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no compiler {compiler}")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no Python.h")
    return compiler


def engine(folder: Path, include: str = pagedkv.get_include()) -> ModuleType:
    """The extension above, compiled against the header in `include` and imported."""
    (folder / "engine.c").write_text(EXTENSION)
    command = [needs(CC), "-std=c99", *STRICT, "-O1", "-fPIC", "-shared", f"-I{include}", *PYTHON, "engine.c"]
    run([*command, "-o", "engine.so"], folder)
    spec = importlib.util.spec_from_file_location("engine", folder / "engine.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


UNITS = [(CC, "c99", "c"), (CXX, "c++11", "cpp"), (CXX, "c++20", "cpp")]


@pytest.mark.parametrize("python", [False, True], ids=["alone", "with Python.h"])
@pytest.mark.parametrize(("compiler", "standard", "name"), UNITS)
def test_the_header_compiles_without_a_warning(
    compiler: str, standard: str, name: str, python: bool, tmp_path: Path
) -> None:
    source = tmp_path / f"unit.{name}"
    includes = "#include <Python.h>\n" if python else ""
    uses = "import_pagedkv()" if python else "pagedkv_checked(NULL)"
    function = f"const pagedkv_api *found(void);\nconst pagedkv_api *found(void) {{ return {uses}; }}\n"
    source.write_text(f"{includes}#include <pagedkv.h>\n#include <pagedkv.h>\n{function}")
    command = [needs(compiler), f"-std={standard}", *STRICT, "-c", f"-I{pagedkv.get_include()}", *PYTHON, source.name]
    run(command, tmp_path)


def test_a_compiled_extension_serves_a_prompt_without_the_gil(tmp_path: Path) -> None:
    table = BlockTable(single(4, 16)[2], 2)
    prompt = np.arange(10, dtype=np.int32)
    compiled = engine(tmp_path)
    assert compiled.serve(table, prompt) == (0, "no error", 0, 2)
    assert compiled.serve(table, prompt) == (0, "no error", 8, 0)
    assert compiled.serve(table.placement, prompt)[0] == c_api.constants()["PAGEDKV_E_ARGUMENT"]
    assert table.num_rows == 0
    sound(table)


@pytest.mark.parametrize(("major", "minor"), [(0, 0), (2, 0), (1, 1), (1, 77)])
def test_an_extension_for_another_abi_is_refused_by_name(major: int, minor: int, tmp_path: Path) -> None:
    text = HEADER.read_text()
    for name, value in (("MAJOR", major), ("MINOR", minor)):
        text = re.sub(rf"(PAGEDKV_ABI_{name}) \d+", rf"\1 {value}", text)
    (tmp_path / "pagedkv.h").write_text(text)
    with pytest.raises(ImportError, match=rf"ABI {major}\.{minor}, and the installed pagedkv has 1\.0: compile it"):
        engine(tmp_path, str(tmp_path))


def test_the_header_has_the_cores_codes_and_limits() -> None:
    types = Path(pagedkv.__file__).with_name("_core") / "types.pxd"
    core = {name: int(value) for name, value in re.findall(r"^    (\w+) = (-?\d+)", types.read_text(), re.MULTILINE)}
    known = c_api.constants()
    names = "OK E_MEMORY E_RANGE E_UNDERFLOW E_OVERFLOW E_STALE E_BLOCKS E_DUPLICATE E_STATE NIL MAX_TIERS MAX_RUN"
    for name in names.split():
        assert known[f"PAGEDKV_{name}"] == core[name], name
    codes = [value for name, value in known.items() if name.startswith("PAGEDKV_E_")]
    assert len(set(codes)) == len(codes)


def test_the_calls_that_are_found_by_name_are_the_structs() -> None:
    import ctypes

    names, size = c_api.names(), ctypes.c_size_t.from_address(c_api.ADDRESS + 8).value
    assert size == 16 + 8 * len(names)
    assert (names[0], names[-1], len(set(names))) == ("describe", "table_blocks", len(names))
    addresses = {ctypes.cast(c_api.function(name), ctypes.c_void_p).value for name in names}
    assert len(addresses) == len(names)


@pytest.mark.parametrize("name", ["options", "counts", "found", "move", "row", "step"])
def test_a_struct_has_the_compilers_layout(name: str, tmp_path: Path) -> None:
    layout: Any = c_api.struct(f"pagedkv_{name}")
    lines = [f"size_t size = sizeof(pagedkv_{name});"]
    for field in layout.names:
        kind, offset = layout.fields[field][:2]
        lines += [f"typedef char {field}_at[offsetof(pagedkv_{name}, {field}) == {offset} ? 1 : -1];",
                  f"typedef char {field}_of[sizeof(((pagedkv_{name} *)0)->{field}) == {kind.itemsize} ? 1 : -1];"]
    lines.append(f"typedef char all[sizeof(pagedkv_{name}) == {layout.itemsize} ? 1 : -1];")
    (tmp_path / "unit.c").write_text("#include <pagedkv.h>\n" + "\n".join(lines) + "\n")
    run([needs(CC), "-std=c99", "-c", f"-I{pagedkv.get_include()}", "unit.c"], tmp_path)


def test_a_name_that_the_header_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(pagedkv.InvalidArgument, match="no call 'table_stop': it has describe, pool_new"):
        c_api.function("table_stop")
    for name in ("pagedkv_table", "pagedkv_api", "stat"):
        with pytest.raises(pagedkv.InvalidArgument, match="whose fields a caller may see"):
            c_api.struct(name)


def test_importing_the_package_does_not_load_the_functions() -> None:
    code = "import sys, pagedkv; pagedkv.get_include(); print([m for m in sys.modules if 'c_api.' in m])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
