"""The compile cache.

What it compiles once, what a key covers, and what it does with damaged files and bad folders.
"""

from __future__ import annotations

import os
import stat
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagedkv.errors import CompileError, KernelsUnavailable
from pagedkv.kernels import jit, precompile, source
from pagedkv.kernels.jit import CompileCache, default_folder
from pagedkv.kernels.nvrtc import Compiled, Nvrtc, default_nvrtc
from pagedkv.kernels.precompile import precompile as precompile_all
from pagedkv.kernels.variant import variant

PLAN = variant("plan")


class FakeNvrtc:
    """Compiles nothing, counts, and says what it was given; the real headers are not needed."""

    def __init__(self, include: Path, version: tuple[int, int] = (12, 9), library_bytes: int = 1) -> None:
        self.include, self.version, self.library_bytes = include, version, library_bytes
        self.calls: list[tuple[str, tuple[str, ...], str]] = []
        self.problem: Exception | None = None
        self.wait = threading.Event()
        self.wait.set()

    def architectures(self) -> tuple[int, ...]:
        return (80, 90)

    def compile(self, text: str, name: str, options: Sequence[str], kind: str = "cubin") -> Compiled:
        self.calls.append((name, tuple(options), kind))
        self.wait.wait()
        if self.problem is not None:
            raise self.problem
        return Compiled(f"{kind} of {name} with {' '.join(options)} and {len(text)} letters".encode(), "a log")


@pytest.fixture
def nvrtc(tmp_path: Path) -> FakeNvrtc:
    include = tmp_path / "include"
    include.mkdir()
    (include / "cuda_fp16.h").write_text("// version 1")
    return FakeNvrtc(include)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "some" / "where"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_variant_is_compiled_once_per_process(nvrtc: FakeNvrtc, folder: Path) -> None:
    cache = CompileCache(nvrtc, folder)  # type: ignore[arg-type]
    first, second = cache.get(PLAN, "sm_90"), cache.get(variant("plan"), "sm_90")
    assert first is second
    assert len(nvrtc.calls) == 1
    assert nvrtc.calls[0] == ("plan.cu", PLAN.options("sm_90"), "cubin")
    assert (first.origin, first.log) == ("compiled", "a log")


def test_another_process_finds_it_on_disk(nvrtc: FakeNvrtc, folder: Path) -> None:
    first = CompileCache(nvrtc, folder).get(PLAN, "sm_90")  # type: ignore[arg-type]
    second = CompileCache(nvrtc, folder).get(PLAN, "sm_90")  # type: ignore[arg-type]
    assert len(nvrtc.calls) == 1
    assert (second.origin, second.code, second.path) == ("disk", first.code, first.path)
    assert first.path is not None
    assert first.path.read_bytes() == first.code
    assert files(folder) == [first.path.name]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_source_that_changes_under_way_is_compiled_anew(
    nvrtc: FakeNvrtc, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(nvrtc, folder)  # type: ignore[arg-type]
    first = cache.get(PLAN, "sm_90")
    text = source.translation_unit("plan")
    monkeypatch.setattr(jit, "translation_unit", lambda kernel: text + "// changed")
    assert cache.get(PLAN, "sm_90").code != first.code
    monkeypatch.setattr(jit, "translation_unit", lambda kernel: text)
    assert cache.get(PLAN, "sm_90") is first
    assert len(files(folder)) == 2


def test_ptx_and_cubins_of_all_architectures_lie_side_by_side(nvrtc: FakeNvrtc, folder: Path) -> None:
    cache = CompileCache(nvrtc, folder)  # type: ignore[arg-type]
    asked = [
        ("sm_80", "cubin"),
        ("sm_90", "cubin"),
        ("sm_90a", "cubin"),
        ("compute_90", "ptx"),
        ("compute_90", "cubin"),
    ]
    codes = {cache.get(PLAN, arch, kind).code for arch, kind in asked}  # type: ignore[arg-type]
    assert len(codes) == len(files(folder)) == len(nvrtc.calls) == 5
    assert sum(name.endswith(".ptx") for name in files(folder)) == 1


def test_the_key_covers_everything_that_goes_into_the_compiler(
    nvrtc: FakeNvrtc, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(
        given: FakeNvrtc = nvrtc,
        one: object = PLAN,
        arch: str = "sm_90",
        kind: str = "cubin",
        extra: Sequence[str] = (),
    ) -> str:
        return CompileCache(given, folder, extra).key(one, arch, kind)  # type: ignore[arg-type]

    keys = [
        key(),
        key(arch="sm_90a"),
        key(kind="ptx"),
        key(one=variant("plan", DEBUG=True)),
        key(one=variant("plan", DEBUG=False)),
        key(one=variant("decode_reduce")),
        key(extra=("--ptxas-options=-v",)),
        key(FakeNvrtc(nvrtc.include, (13, 0))),
        key(FakeNvrtc(nvrtc.include, library_bytes=2)),
    ]
    text = source.translation_unit("plan")
    monkeypatch.setattr(jit, "translation_unit", lambda kernel: text + "\n// changed")
    keys.append(key())
    monkeypatch.setattr(jit, "translation_unit", lambda kernel: text)
    assert key() == keys[0]
    (nvrtc.include / "cuda_fp16.h").write_text("// version 2")
    jit._header_digest.cache_clear()
    keys.append(key())
    monkeypatch.setattr(jit, "__version__", "99")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_the_translation_unit_that_is_hashed_holds_every_header() -> None:
    text = source.translation_unit("decode_simt")
    for header in ("base.cuh", "schedule.cuh", "variants.cuh", "state.cuh"):
        assert text.count(f'#line 1 "{header}"') == 1


@pytest.mark.parametrize("damage", ["cut short", "one bit", "emptied", "longer"])
def test_a_damaged_file_is_compiled_again_and_replaced(nvrtc: FakeNvrtc, folder: Path, damage: str) -> None:
    good = CompileCache(nvrtc, folder).get(PLAN, "sm_90")  # type: ignore[arg-type]
    assert good.path is not None
    code = bytearray(good.code)
    code[7] ^= 1
    wrong = {"cut short": good.code[:-5], "one bit": bytes(code), "emptied": b"", "longer": good.code + b"\0"}
    good.path.write_bytes(wrong[damage])
    again = CompileCache(nvrtc, folder).get(PLAN, "sm_90")  # type: ignore[arg-type]
    assert (again.origin, again.code) == ("compiled", good.code)
    assert good.path.read_bytes() == good.code
    assert files(folder) == [good.path.name]


def test_a_file_under_another_checksum_is_not_loaded(nvrtc: FakeNvrtc, folder: Path) -> None:
    good = CompileCache(nvrtc, folder).get(PLAN, "sm_90")  # type: ignore[arg-type]
    assert good.path is not None
    key = CompileCache(nvrtc, folder).key(PLAN, "sm_90")  # type: ignore[arg-type]
    good.path.rename(folder / f"plan-{key}-{'0' * 32}.cubin")
    again = CompileCache(nvrtc, folder).get(PLAN, "sm_90")  # type: ignore[arg-type]
    assert again.origin == "compiled"
    assert files(folder) == [good.path.name]


def test_what_cannot_be_read_is_compiled(nvrtc: FakeNvrtc, folder: Path) -> None:
    good = CompileCache(nvrtc, folder).get(PLAN, "sm_90")  # type: ignore[arg-type]
    assert good.path is not None
    good.path.unlink()
    good.path.mkdir()
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        again = CompileCache(nvrtc, folder).get(PLAN, "sm_90")  # type: ignore[arg-type]
    assert (again.origin, again.path, again.code) == ("compiled", None, good.code)


def test_a_folder_that_cannot_be_written_costs_one_warning_and_the_disk(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    cache = CompileCache(nvrtc, in_the_way / "cache")  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match=r"cannot be kept in .*file/cache .*PAGEDKV_CACHE_DIR"):
        first = cache.get(PLAN, "sm_90")
    assert (first.path, first.origin) == (None, "compiled")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(PLAN, "sm_90") is first
        assert cache.get(PLAN, "sm_80").path is None
    assert len(nvrtc.calls) == 2


def test_a_failed_write_leaves_nothing_behind(nvrtc: FakeNvrtc, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        CompileCache(nvrtc, folder).get(PLAN, "sm_90")  # type: ignore[arg-type]
    assert files(folder) == []


def test_without_a_folder_nothing_is_written(nvrtc: FakeNvrtc) -> None:
    binary = CompileCache(nvrtc, None).get(PLAN, "sm_90")  # type: ignore[arg-type]
    assert binary.path is None


def test_threads_that_ask_at_once_share_one_compilation(nvrtc: FakeNvrtc, folder: Path) -> None:
    cache = CompileCache(nvrtc, folder)  # type: ignore[arg-type]
    nvrtc.wait.clear()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(cache.get, PLAN, "sm_90") for _ in range(8)]
        nvrtc.wait.set()
        assert len({id(future.result()) for future in futures}) == 1
    assert len(nvrtc.calls) == 1


def test_a_refusal_is_not_remembered(nvrtc: FakeNvrtc, folder: Path) -> None:
    cache = CompileCache(nvrtc, folder)  # type: ignore[arg-type]
    nvrtc.problem = CompileError("plan.cu", (), "out of memory")
    with pytest.raises(CompileError, match="out of memory"):
        cache.get(PLAN, "sm_90")
    nvrtc.problem = None
    assert cache.get(PLAN, "sm_90").origin == "compiled"


def test_an_unknown_kernel_is_an_error_that_names_the_known_ones(nvrtc: FakeNvrtc) -> None:
    with pytest.raises(KernelsUnavailable, match=r"no kernel 'frobnicate'.*decode_simt"):
        CompileCache(nvrtc, None).get(variant("frobnicate"), "sm_90")  # type: ignore[arg-type]


def test_precompiling_compiles_each_variant_once_and_keeps_their_order(nvrtc: FakeNvrtc, folder: Path) -> None:
    cache = CompileCache(nvrtc, folder)  # type: ignore[arg-type]
    wanted = [variant("plan", NUMBER=number % 5) for number in range(12)]
    told: list[tuple[int, int]] = []
    found = cache.precompile(wanted, lambda one: "sm_90", threads=3, progress=lambda *where: told.append(where))
    assert [binary.code for binary in found] == [cache.get(one, "sm_90").code for one in wanted]
    assert len(nvrtc.calls) == 5
    assert told == [(done, 12) for done in range(1, 13)]


def test_precompiling_goes_on_where_its_progress_callback_raises(
    nvrtc: FakeNvrtc, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(done: int, total: int) -> None:
        raise OSError("no terminal")

    cache = CompileCache(nvrtc, folder)  # type: ignore[arg-type]
    wanted = [variant("plan", NUMBER=number) for number in range(4)]
    assert len(cache.precompile(wanted, lambda one: "sm_90", threads=1, progress=fail)) == 4
    assert [record.name for record in caplog.records] == ["pagedkv.callbacks"]


def test_precompiling_stops_at_the_first_refusal(nvrtc: FakeNvrtc, folder: Path) -> None:
    cache = CompileCache(nvrtc, folder)  # type: ignore[arg-type]
    nvrtc.problem = CompileError("plan.cu", (), "no")
    with pytest.raises(CompileError):
        cache.precompile([variant("plan", NUMBER=number) for number in range(500)], lambda one: "sm_90", threads=1)
    assert len(nvrtc.calls) < 500


@pytest.mark.parametrize("rich", [True, False])
def test_a_bar_is_shown_only_where_rich_is_installed(
    nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch, rich: bool
) -> None:
    bars: list[object] = []

    class Bar:
        def __init__(self, total: int) -> None:
            bars.append(total)

        def __call__(self, done: int, total: int) -> None:
            bars.append(done)

        def stop(self) -> None:
            bars.append("stopped")

    monkeypatch.setattr(precompile, "_Bar", Bar)
    monkeypatch.setattr(precompile.importlib.util, "find_spec", lambda name: name if rich else None)
    cache = CompileCache(nvrtc, None)  # type: ignore[arg-type]
    found = precompile_all([PLAN, variant("plan", DEBUG=1)], (9, 0), threads=1, progress=True, cache=cache)
    assert len(found) == 2
    assert bars == ([2, 1, 2, "stopped"] if rich else [])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PAGEDKV_CACHE_DIR": "/given", "XDG_CACHE_HOME": "/xdg"}, "/given"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/pagedkv/kernels"),
        ({"PAGEDKV_CACHE_DIR": "", "XDG_CACHE_HOME": "relative"}, "/home/of/user/.cache/pagedkv/kernels"),
        ({}, "/home/of/user/.cache/pagedkv/kernels"),
    ],
)
def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    monkeypatch.setenv("HOME", "/home/of/user")
    for name in ("PAGEDKV_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_folder() == Path(expected)


def test_the_real_compiler_is_asked_once_for_a_real_kernel(folder: Path) -> None:
    try:
        real: Nvrtc = default_nvrtc()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    first = CompileCache(real, folder).get(PLAN, "sm_90")
    second = CompileCache(real, folder).get(PLAN, "sm_90")
    assert (first.origin, second.origin) == ("compiled", "disk")
    assert second.code == first.code
    assert second.code.startswith(b"\x7fELF")
