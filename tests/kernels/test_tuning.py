"""The file of verdicts: shared by processes, made again where it cannot be believed."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.kernels import autotune, tuning
from pagedkv.kernels.tuning import Verdict, Verdicts
from tests.kernels.timed import CONFIG, Timed, again, chosen, tuning_folder
from tests.ptxsim.fixture import interpreted_backend
from tests.slices import one_in

backend = interpreted_backend()  # skips where there is no NVRTC
folder = tuning_folder()
ONE, TWO, THREE = "one [decode_mma, decode_tma]", "two [decode_mma]", "three [decode_mma]"
RIGHT = Verdict("decode_mma", {"decode_mma": 9.0})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: "\x00" + text,
        lambda text: text.replace('"us"', '"ms"'),
        lambda text: text.replace('"kernel": "decode_tma"', '"kernel": 3'),
        lambda text: text.replace('"kernel": "decode_tma"', '"kernel": "magic"'),
        lambda text: text.replace('"kernel": "decode_tma"', '"kernel": "decode_mla"'),
        lambda text: text.replace('"decode_tma"', '"prefill_wgmma"'),
        lambda text: text.replace('"wrong": {}', '"wrong": {"decode_tma": "spoilt"}'),
        lambda text: text.replace("15.0", "NaN"),
        lambda text: text.replace("15.0", "-1"),
        lambda text: text.replace("15.0", "1" + 400 * "0"),
    ],
    ids=[
        "cut", "empty", "a list", "nested", "a byte", "a field", "a type", "no kernel", "not tried", "no candidate",
        "taken and wrong", "NaN", "negative", "no float",
    ],
)  # fmt: skip
def test_a_damaged_file_is_made_again(
    damage: Callable[[str], str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    chosen(device)
    (path,) = folder.glob("tuning-*.json")
    whole = path.read_text()
    assert damage(whole) != whole
    path.write_text(damage(whole))
    again(monkeypatch)
    device.tried.clear()
    assert chosen(device) == "decode_tma"
    assert device.tried
    assert caplog.text.count("are damaged (") == 1
    assert path.read_text() == whole


@pytest.mark.parametrize(
    ("field", "value"),
    one_in(3, map(pytest.param, ("driver", "compiler", "sources", "version"), ("13.0", "13.5", "0" * 32, 0))),
)
def test_a_file_of_another_driver_or_source_is_made_again(
    field: str, value: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    chosen(device)
    (path,) = folder.glob("tuning-*.json")
    whole = path.read_text()
    path.write_text(json.dumps({**json.loads(whole), field: value}))
    again(monkeypatch)
    device.us = {"decode_mma": 10.0, "decode_tma": 15.0}
    assert chosen(device) == "decode_mma"
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert f"are of another {field}: they are made again" in told[0]
    assert json.loads(path.read_text())[field] == json.loads(whole)[field]


def test_a_verdict_is_of_one_compiler_and_of_what_chooses_tilings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    device = Timed({"decode_mma": 20.0, "decode_tma": 15.0})
    device.computes = False
    chosen(device)
    device.tried.clear()
    device.compiler = "13.1"
    chosen(device)
    assert device.tried
    kept = [json.loads(path.read_bytes())["compiler"] for path in folder.glob("tuning-*.json")]
    assert sorted(kept) == ["12.9", "13.1"], "two environments may share a home"
    before = tuning.sources_digest()
    copy = tmp_path_factory.mktemp("kernels")
    for module in Path(tuning.__file__).parent.glob("*.py"):
        (copy / module.name).write_bytes(module.read_bytes())
    monkeypatch.setattr(tuning, "__file__", str(copy / "tuning.py"))
    (copy / ".#autotune.py").symlink_to("user@machine")  # an editor's lock
    assert tuning.sources_digest() == before
    with (copy / "decode_tma.py").open("a") as file:
        file.write("MAX_STAGES = 3\n")
    assert tuning.sources_digest() != before


def test_verdicts_of_two_processes_are_both_kept_and_the_newer_one_of_a_config(folder: Path) -> None:
    first, second = (Verdicts(folder, "a device", "12.8", "12.9") for _ in range(2))
    first.put(ONE, Verdict("decode_simt", late=("decode_mma", "decode_tma")))
    wrong = Verdict("decode_mma", {"decode_mma": 9.0}, {"decode_tma": "output[0] is nan"})
    second.put(ONE, wrong)
    first.put(TWO, RIGHT)
    assert Verdicts(folder, "a device", "12.8", "12.9").all() == {ONE: wrong, TWO: RIGHT}
    assert first.get(ONE) == wrong


def test_no_process_takes_back_what_another_found_wrong(folder: Path) -> None:
    first, second = (Verdicts(folder, "a device", "12.8", "12.9") for _ in range(2))
    wrong = Verdict("decode_simt", {}, {"decode_mma": "output[0] is nan"})
    first.put(TWO, wrong)
    second.put(TWO, RIGHT)
    first.put(THREE, RIGHT)
    assert first.get(TWO) == second.get(TWO) == Verdicts(folder, "a device", "12.8", "12.9").get(TWO) == wrong


def test_a_pipe_in_the_place_of_the_file_is_replaced(folder: Path) -> None:
    first = Verdicts(folder, "a device", "12.8", "12.9")
    assert first.path is not None
    os.mkfifo(first.path)
    first.put(TWO, RIGHT)
    assert Verdicts(folder, "a device", "12.8", "12.9").all() == {TWO: RIGHT}


def test_an_error_of_a_signals_handler_is_no_damage_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Verdicts(folder, "a device", "12.8", "12.9").put(ONE, RIGHT)

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("the program's own limit")

    def interrupted(path: Path) -> bytes:
        signal.raise_signal(signal.SIGUSR1)
        pytest.fail("the handler raises")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", interrupted)
            with pytest.raises(TimeoutError, match="own limit"):
                Verdicts(folder, "a device", "12.8", "12.9").all()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert Verdicts(folder, "a device", "12.8", "12.9").all() == {ONE: RIGHT}


def test_a_kernel_that_either_of_two_processes_found_wrong_is_taken_by_none(folder: Path) -> None:
    first, second = (Verdicts(folder, "a device", "12.8", "12.9") for _ in range(2))
    first.put(ONE, Verdict("decode_tma", {"decode_tma": 9.0}, {"decode_mma": "output[0] is nan"}))
    left = second.put(ONE, Verdict("decode_mma", {"decode_mma": 8.0}, {"decode_tma": "output[1] is nan"}))
    assert left == second.get(ONE) == Verdict("decode_simt", {}, left.wrong)
    assert set(left.wrong) == {"decode_mma", "decode_tma"}


def test_a_kernel_that_another_process_found_wrong_stays_wrong_though_it_was_right_here(folder: Path) -> None:
    first, second = (Verdicts(folder, "a device", "12.8", "12.9") for _ in range(2))
    first.put(ONE, Verdict("decode_mma", {"decode_mma": 9.0}, {"decode_tma": "output[0] is nan"}))
    left = second.put(ONE, Verdict("decode_mma", {"decode_mma": 8.0, "decode_tma": 8.5}))
    assert left == Verdict("decode_mma", {"decode_mma": 8.0}, {"decode_tma": "output[0] is nan"})


@pytest.mark.parametrize(
    ("own", "kernel"),
    [
        (Verdict("decode_simt", late=("decode_mma", "decode_tma")), "decode_tma"),  # it had no time at all
        (Verdict("decode_mma", {"decode_mma": 21.0}, late=("decode_tma",)), "decode_tma"),
        (Verdict("decode_mma", {"decode_mma": 10.2}, late=("decode_tma",)), "decode_mma"),  # not clearly slower
    ],
)
def test_a_kernel_that_another_process_had_time_for_is_taken_by_its_time(
    folder: Path, own: Verdict, kernel: str
) -> None:
    first, second = (Verdicts(folder, "a device", "12.8", "12.9") for _ in range(2))
    first.put(ONE, Verdict("decode_tma", {"decode_mma": 20.0, "decode_tma": 10.0}))
    left = second.put(ONE, own)
    assert left == Verdict(kernel, {"decode_mma": 20.0, "decode_tma": 10.0} | own.us)
    assert Verdicts(folder, "a device", "12.8", "12.9").final(ONE) == left


def test_a_verdict_that_was_not_put_is_not_taken_for_this_process_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Verdict("decode_mma", {"decode_mma": 9.0}, late=("decode_tma",))
    Verdicts(folder, "a device", "12.8", "12.9").put(ONE, late)
    verdicts = Verdicts(folder, "a device", "12.8", "12.9")
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "_read", lambda: 1 / 0)  # as a signal's handler within
        with pytest.raises(ZeroDivisionError):
            verdicts.put(ONE, Verdict("decode_tma", {"decode_tma": 8.0}))
    assert verdicts.get(ONE) == late
    assert verdicts.final(ONE) is None  # the kernel that was late is still to be tried


def test_the_trial_itself_takes_no_kernel_that_another_process_found_wrong_meanwhile(folder: Path) -> None:
    device = Timed({"decode_mma": 1.0, "decode_tma": 2.0})
    verdicts = autotune.verdicts_of(device)
    assert verdicts.all() == {}
    key = autotune.text_of(CONFIG, 1, ["decode_mma", "decode_tma"])
    other = Verdict("decode_tma", {"decode_tma": 2.0}, {"decode_mma": "output[0] is nan"})
    Verdicts(folder, device.device_name, device.driver, device.compiler).put(key, other)
    with pytest.warns(RuntimeWarning, match="decode_mma is wrong"):
        assert chosen(device) == "decode_tma"


def test_a_verdict_that_was_forgotten_does_not_come_back(folder: Path) -> None:
    first, second = (Verdicts(folder, "a device", "12.8", "12.9") for _ in range(2))
    first.put(ONE, Verdict("decode_mma", {"decode_mma": 9.0}, {"decode_tma": "output[0] is nan"}))
    second.forget()
    second.put(TWO, RIGHT)
    first.put(THREE, RIGHT)
    assert Verdicts(folder, "a device", "12.8", "12.9").all() == {TWO: RIGHT, THREE: RIGHT}


def test_a_file_of_verdicts_is_whole_at_any_moment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = Verdicts(folder, "a device", "12.8", "12.9")
    verdicts.put(ONE, RIGHT)
    assert verdicts.path is not None
    whole, seen = verdicts.path.read_bytes(), []
    replace = os.replace

    def replacing(source: str, target: Path) -> None:
        seen.append(target.read_bytes())
        replace(source, target)

    monkeypatch.setattr(os, "replace", replacing)
    verdicts.put(TWO, RIGHT)
    assert seen == [whole]
    assert set(json.loads(verdicts.path.read_bytes())["verdicts"]) == {ONE, TWO}
    assert [path.name for path in folder.iterdir()] == [verdicts.path.name]
