"""The sources of the kernels.

One entry per .cu, inline PTX in its own headers, and translation units that hold all they include.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagedkv.errors import KernelsUnavailable
from pagedkv.kernels import source
from pagedkv.kernels.source import kernel_names, source_hash, sources_dir, translation_unit

HEADERS = sorted((sources_dir() / "include" / "pagedkv").glob("*.cuh"))
KERNELS = sorted(sources_dir().glob("*.cu"))
ENTRY = re.compile(
    r'extern\s+"C"\s+__global__\s+__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*void\s+(\w+)\s*\(([^)]*)\)'
)


def code_of(path: Path) -> str:
    """A source without comments and without the text of its strings."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r'"(?:\\.|[^"\\])*"', '""', text.replace('extern "C"', "extern_C"))


def test_there_are_kernels_and_headers() -> None:
    assert {"decode_simt", "plan", "write_kv"} <= set(kernel_names())
    assert [path.stem for path in KERNELS] == kernel_names()


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_a_cu_has_one_entry_of_its_own_name_with_bounded_threads_and_one_struct_by_value(path: Path) -> None:
    text = re.sub(r"//[^\n]*", "", path.read_text())
    entries = ENTRY.findall(text)
    assert [name for name, _ in entries] == [path.stem]
    assert text.count("__global__") == 1
    assert text.count('extern "C"') == 1
    assert re.fullmatch(r"const __grid_constant__ \w+Params \w+", entries[0][1].strip()), entries[0][1]


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.stem)
def test_a_header_has_no_entry_and_is_included_once(path: Path) -> None:
    text = path.read_text()
    assert "__global__" not in code_of(path)
    assert text.count("#pragma once") == 1


@pytest.mark.parametrize("path", KERNELS + HEADERS, ids=lambda path: path.name)
def test_inline_ptx_stands_in_the_ptx_headers_and_nowhere_else(path: Path) -> None:
    if not path.name.startswith("ptx"):
        assert not re.search(r"\b(asm|__asm__|__asm)\b", code_of(path))


@pytest.mark.parametrize("path", KERNELS + HEADERS, ids=lambda path: path.name)
def test_a_source_says_its_purpose_first_and_includes_only_our_headers_and_three_of_cudas(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("// ")
    allowed = {"cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"}
    for how, name in re.findall(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', text, re.MULTILINE):
        assert name in allowed if how == "<" else (sources_dir() / "include" / name).exists(), name
    assert not re.search(r"\bstd::", code_of(path))


@pytest.mark.parametrize("kernel", kernel_names())
def test_a_translation_unit_holds_each_header_once_and_includes_nothing_of_ours(kernel: str) -> None:
    text = translation_unit(kernel)
    assert not re.search(r'#\s*include\s+"', text)
    assert "#pragma once" not in text
    opened = re.findall(r'#line 1 "([\w.]+)"', text)
    assert len(opened) == len(set(opened))
    assert opened[0] == f"{kernel}.cu"
    assert "base.cuh" in opened


def test_line_marks_name_the_line_of_the_file() -> None:
    files = {path.name: path.read_text().splitlines() for path in KERNELS + HEADERS}
    for kernel in kernel_names():
        name, number, seen = "", 0, 0
        for line in translation_unit(kernel).split("\n"):
            mark = re.fullmatch(r'#line (\d+) "([\w.]+)"', line)
            if mark:
                number, name = int(mark[1]), mark[2]
                continue
            original = files[name][number - 1]
            assert line == original or (line == "" and original.strip().startswith(("#pragma once", "#include")))
            number, seen = number + 1, seen + 1
        assert seen > 10


def test_the_hash_changes_with_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = tmp_path / "include" / "pagedkv"
    include.mkdir(parents=True)
    (tmp_path / "tiny.cu").write_text('// A kernel.\n#include "pagedkv/tiny.cuh"\n')
    (include / "tiny.cuh").write_text("#pragma once\nint one;\n")
    monkeypatch.setattr(source, "sources_dir", lambda: tmp_path)
    translation_unit.cache_clear()
    first = source_hash("tiny")
    assert source_hash("tiny") == first
    (include / "tiny.cuh").write_text("#pragma once\nint two;\n")
    translation_unit.cache_clear()
    assert source_hash("tiny") != first
    translation_unit.cache_clear()


def test_an_unknown_kernel_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(KernelsUnavailable, match=r"no kernel 'frobnicate'; there are .*plan"):
        translation_unit("frobnicate")


def test_an_installation_without_sources_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "__file__", str(tmp_path / "pagedkv" / "kernels" / "source.py"))
    sources_dir.cache_clear()
    try:
        with pytest.raises(KernelsUnavailable, match=r"kernels_cu.*install pagedkv again"):
            sources_dir()
        (tmp_path / "pagedkv" / "kernels_cu" / "include" / "pagedkv").mkdir(parents=True)
        assert sources_dir() == tmp_path / "pagedkv" / "kernels_cu"
    finally:
        sources_dir.cache_clear()
