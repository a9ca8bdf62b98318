"""What the policy hazard has learned survives a restart.

A file that cannot be read or written costs what was learned and nothing else.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import struct
import threading

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache import learned
from pagedkv.cache.learned import HEADER, MAGIC, VERSION, pack, unpack
from pagedkv.cli import main

from .conftest import BLOCK, SPEC, Toy, prompt
from .test_cost_model import Clock
from .test_hazard import AGENTS, teach

FILES = ("tables_read", "tables_refused", "tables_written", "table_write_failures")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_toy(open_cache, clock):
    def open_it(device=16, **options):
        return Toy(open_cache(device, **{"policy": "hazard", "clock": clock, **options}))

    return open_it


def files(toy: Toy) -> tuple[int, ...]:
    """Files read, refused, written and not written."""
    return tuple(toy.cache.stats().hazard[name] for name in FILES)


def tables(toy: Toy, kind: int = 0) -> np.ndarray:
    found = toy.cache.placement.hazard.tables(kind)
    assert found is not None
    return found


@pytest.fixture
def taught(open_toy, clock, tmp_path):
    """A directory with the tables of a cache that has learned, and these tables."""
    toy = open_toy(disk=40)
    teach(toy, clock)
    toy.cache.close()
    return tmp_path / "kv" / "learned.default", tables(toy)


# ---- where it goes, and back


def test_a_disk_tier_keeps_it_through_a_restart(open_toy, taught):
    path, before = taught
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(path.parent)) == ["KEY", "LOCK", "SUPER", "data.0000", "learned.default"]
    toy = open_toy(disk=40)
    assert np.array_equal(tables(toy), before)
    assert files(toy) == (1, 0, 0, 0)


def test_a_directory_of_the_callers_is_made_and_takes_precedence(open_toy, clock, tmp_path):
    toy = open_toy(disk=40, policy=pk.Hazard(learned=tmp_path / "mine"))
    teach(toy, clock)
    assert toy.cache.save_learned() == 1
    assert os.listdir(tmp_path / "mine") == ["learned.default"]
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    assert "learned.default" not in os.listdir(tmp_path / "kv")
    again = open_toy(policy=pk.Hazard(learned=str(tmp_path / "mine")))
    assert np.array_equal(tables(again), tables(toy))


def test_a_directory_stays_where_it_was_when_the_cache_was_opened(open_toy, clock, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toy = open_toy(policy=pk.Hazard(learned="mine"))
    teach(toy, clock)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert toy.cache.save_learned() == 1
    assert (tmp_path / "mine" / "learned.default").exists()


def test_each_kind_has_a_file_which_is_read_when_the_kind_is_named(open_toy, clock, tmp_path):
    toy = open_toy(policy=pk.Hazard(learned=tmp_path))
    toy.cache.set_kind(AGENTS, "agents")
    teach(toy, clock, namespace=AGENTS)
    assert toy.cache.save_learned() == 1
    teach(toy, clock)
    assert toy.cache.save_learned() == 2
    assert sorted(os.listdir(tmp_path)) == ["learned.agents", "learned.default"]
    again = open_toy(policy=pk.Hazard(learned=tmp_path))
    for name in ("others", "agents"):
        again.cache.set_kind(AGENTS, name)
    assert files(again) == (2, 0, 0, 0)
    assert np.array_equal(tables(again, 2), tables(toy, 1))
    assert np.array_equal(tables(again, 0), tables(toy, 0))


def test_nothing_new_is_not_written_again(open_toy, clock, tmp_path):
    toy = open_toy(policy=pk.Hazard(learned=tmp_path))
    assert toy.cache.save_learned() == 0
    assert os.listdir(tmp_path) == []
    teach(toy, clock)
    assert [toy.cache.save_learned() for _ in range(3)] == [1, 0, 0]
    toy.cache.close()
    assert files(toy) == (0, 0, 1, 0)


def test_without_a_disk_or_a_directory_nothing_is_written(open_toy, clock):
    toy = open_toy()
    teach(toy, clock)
    assert toy.cache.save_learned() == 0
    assert files(toy) == (0, 0, 0, 0)


# ---- files that cannot be used


def edited(change):
    def edit(path):
        data = bytearray(path.read_bytes())
        path.write_bytes(bytes(change(data)))

    return edit


def signed(data: bytes) -> bytes:
    return data + learned.hashlib.blake2b(data, digest_size=learned.SUM_BYTES).digest()


def flipped(at):
    def change(data):
        data[at] ^= 1
        return data

    return edited(change)


def replaced(make):
    def edit(path):
        path.unlink()
        make(path)

    return edit


NEXT = VERSION + 1
NUMBERS = np.ones((2, 47126), np.float32)
OTHER_BLOCKS = f"it was learned with blocks of {BLOCK * 2} tokens, here they have {BLOCK}"
DAMAGE = {
    "empty": (edited(lambda data: b""), "0 bytes: cut short"),
    "a header alone": (edited(lambda data: data[: HEADER.size]), "cut short"),
    "cut": (edited(lambda data: data[:-1]), "checksum"),
    "longer": (edited(lambda data: data + b"x"), "checksum"),
    "a bit of the tables": (flipped(5000), "checksum"),
    "a bit of the sum": (flipped(-1), "checksum"),
    "a bit of the magic": (flipped(0), "no file of learned tables"),
    "another version": (edited(lambda data: MAGIC + struct.pack("<I", NEXT) + data[20:]), f"version {NEXT}"),
    "blocks of another size": (edited(lambda data: pack(NUMBERS, 2 * BLOCK)), OTHER_BLOCKS),
    "other bins": (edited(lambda data: pack(NUMBERS[:, :-5], BLOCK)), "have the shape"),
    "not a number": (edited(lambda data: pack(NUMBERS * np.float32(np.nan), BLOCK)), "damaged"),
    "a size that is none": (
        edited(lambda data: signed(HEADER.pack(MAGIC, VERSION, BLOCK, 2**31, 2**31))), "which are not",
    ),
    "noise": (edited(lambda data: np.random.default_rng(0).bytes(5000)), "no file of learned tables"),
    "a directory": (replaced(lambda path: path.mkdir()), "no plain file"),
    "a pipe": (replaced(os.mkfifo), "no plain file"),
    "a link": (replaced(lambda path: path.symlink_to("SUPER")), "symbolic links"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_file_that_cannot_be_used_is_left_alone_counted_and_said_once(open_toy, taught, name, caplog):
    path, _ = taught
    damage, words = DAMAGE[name]
    damage(path)
    with caplog.at_level(logging.WARNING, "pagedkv"):
        toy = open_toy(disk=40)
    assert [record.name for record in caplog.records] == ["pagedkv.learned"]
    assert str(path) in caplog.text
    assert words in caplog.text
    assert files(toy) == (0, 1, 0, 0)
    assert toy.cache.placement.hazard.tables() is None
    for start in (1, 1, 2, 1):
        toy.use(prompt(start))


def test_what_was_damaged_is_written_anew(open_toy, taught, clock):
    path, _ = taught
    path.write_bytes(b"?")
    toy = open_toy(disk=40)
    teach(toy, clock)
    toy.cache.close()
    assert np.array_equal(unpack(path.read_bytes(), BLOCK), tables(toy))


# ---- files that cannot be written


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half(fd, data, write=os.write):
    if len(data) < 1000:
        no_space()
    return write(fd, data[: len(data) // 2])


@pytest.mark.parametrize(
    ("call", "fails"), [("write", no_space), ("write", half), ("fsync", no_space), ("rename", no_space)]
)
def test_a_disk_that_takes_no_more_costs_the_file_alone(open_toy, taught, clock, monkeypatch, caplog, call, fails):
    path, before = taught
    toy = open_toy(disk=40)
    teach(toy, clock)

    class Failing:
        """The module `os` for the files of learned tables alone."""

        def __getattr__(self, name):
            return fails if name == call else getattr(os, name)

    monkeypatch.setattr(learned, "os", Failing())
    with caplog.at_level(logging.WARNING, "pagedkv"):
        assert [toy.cache.save_learned() for _ in range(3)] == [0, 0, 0]
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert files(toy) == (1, 0, 0, 3)
    for start in (1, 2, 1):
        toy.use(prompt(start))
    toy.cache.close()
    assert "learned.default.new" not in os.listdir(path.parent)
    assert np.array_equal(unpack(path.read_bytes(), BLOCK), before)


def test_a_file_size_limit_costs_the_file_alone(open_toy, taught, clock):
    toy = open_toy(disk=40)
    teach(toy, clock)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert toy.cache.save_learned() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(toy) == (1, 0, 0, 1)
    assert toy.cache.save_learned() == 1


def test_what_a_crash_left_is_replaced(open_toy, taught, clock):
    path, _ = taught
    path.with_name("learned.default.new").write_bytes(b"half a file")
    toy = open_toy(disk=40)
    teach(toy, clock)
    assert toy.cache.save_learned() == 1
    assert not path.with_name("learned.default.new").exists()


def test_a_store_that_was_deleted_meanwhile_is_not_made_again(open_toy, taught, clock):
    path, _ = taught
    toy = open_toy(disk=40)
    teach(toy, clock)
    shutil.rmtree(path.parent)
    toy.cache.close()
    assert not path.parent.exists()
    assert files(toy)[3] == 1


def test_what_could_not_be_used_is_kept_when_it_is_replaced(open_toy, taught, clock):
    path, _ = taught
    path.write_bytes(b"of another program")
    toy = open_toy(policy=pk.Hazard(learned=path.parent))
    teach(toy, clock)
    for _ in range(2):
        teach(toy, clock)
        assert toy.cache.save_learned() == 1
    assert path.with_name(path.name + ".old").read_bytes() == b"of another program"
    assert unpack(path.read_bytes(), BLOCK).shape == NUMBERS.shape


def test_a_directory_is_made_with_those_above_it_by_the_first_write(open_toy, clock, tmp_path):
    toy = open_toy(policy=pk.Hazard(learned=tmp_path / "a/b"))
    teach(toy, clock)
    assert not (tmp_path / "a").exists()
    assert toy.cache.save_learned() == 1
    assert (tmp_path / "a/b/learned.default").exists()
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("below", ["", "/c"])
def test_a_directory_that_cannot_be_costs_the_files_alone(open_toy, clock, tmp_path, below):
    """No caller can open a cache with one; a good directory may become one later."""
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(pk.InvalidArgument, match=r"learned: .*file is no directory"):
        open_toy(policy=pk.Hazard(learned=f"{tmp_path}/file{below}"))
    toy = open_toy(policy=pk.Hazard(learned=f"{tmp_path}/b{below}"))
    teach(toy, clock)
    (tmp_path / "b").write_text("no directory")
    assert toy.cache.save_learned() == 0
    assert files(toy) == (0, 0, 0, 1)
    assert toy.use(prompt(1)) == {"device": 3 * BLOCK}


def test_a_disk_that_does_not_answer_holds_nobody_up(open_toy, taught, clock, monkeypatch):
    path, before = taught
    toy = open_toy(disk=40)
    teach(toy, clock)
    answer = threading.Event()

    class Hanging:
        def __getattr__(self, name):
            if name == "fsync":
                return lambda fd: answer.wait(60)
            return getattr(os, name)

    monkeypatch.setattr(learned, "os", Hanging())
    monkeypatch.setattr(learned, "HANG_S", 0.05)
    try:
        toy.cache.close()
        assert files(toy) == (1, 0, 0, 1)
        assert np.array_equal(unpack(path.read_bytes(), BLOCK), before)
    finally:
        answer.set()


def test_a_disk_tier_that_takes_no_writes_is_not_asked(open_toy, taught, clock, monkeypatch):
    path, before = taught
    toy = open_toy(disk=40)
    teach(toy, clock)
    monkeypatch.setattr(pk.tiers.DiskTier, "state", property(lambda tier: "read_only"))
    assert toy.cache.save_learned() == 0
    assert files(toy) == (1, 0, 0, 1)
    assert np.array_equal(unpack(path.read_bytes(), BLOCK), before)


# ---- the disk tier and its tools beside it


def test_a_new_store_is_made_beside_it(open_toy, taught):
    path, before = taught
    for other in path.parent.iterdir():
        if other != path:
            other.unlink()
    assert np.array_equal(tables(open_toy(disk=40)), before)


def test_a_reset_store_keeps_what_was_learned(open_toy, taught):
    path, before = taught
    (path.parent / "KEY").write_bytes(bytes(32))
    toy = open_toy(disk=pk.Disk(str(path.parent), pk.Blocks(40), on_mismatch="reset"))
    assert np.array_equal(tables(toy), before)


def test_inspect_names_it_and_verify_finds_nothing_wrong(taught, capsys):
    path, _ = taught
    assert main(["inspect", str(path.parent)]) == 0
    assert "learned tables   default" in capsys.readouterr().out
    assert main(["verify", str(path.parent)]) == 0
    assert main(["verify", "--repair", str(path.parent)]) == 0
    assert path.exists()


@pytest.mark.parametrize("path", [5, b"kv", "", "a\0b", None.__class__, ["kv"]], ids=repr)
def test_a_path_that_is_none_is_refused_before_anything_is_made(path):
    with pytest.raises((pk.WrongType, pk.InvalidArgument), match="learned must"):
        pk.KVCache(SPEC, pk.Blocks(8), policy=pk.Hazard(learned=path))
