"""What is not exactly a store of ours is refused, and nothing is touched.

The error says which file and what to do.

`on_mismatch="reset"` puts an empty store in the place of a damaged or another one, and of nothing else.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import LayoutMismatch, TierError
from pagedkv.tiers import DiskTier
from pagedkv.tiers.disk.format import PAGE
from pagedkv.tiers.disk.superblock import Superblock, pack_super, parse_super
from tests.reliability.header_mutator import SUPER_FIELDS, WIDTHS, page_sum

from .conftest import NUM_BLOCKS, name_of

ALL = np.arange(NUM_BLOCKS, dtype=np.int32)
NAMES = [name_of(number) for number in range(NUM_BLOCKS)]
REMEDY = re.compile(r"chmod \d00|use a|delete|put it back|name a|make it|on_mismatch|close that one")
FILES = ("LOCK", "KEY", "SUPER", "data.0000", "data.0002")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def kv(tmp_path, open_tier, arena):
    """The path of a full store that was closed properly."""
    tier = open_tier()
    assert tier.write(ALL, NAMES, arena, ALL).all()
    tier.close()
    return tmp_path / "kv"


def everything(path: Path) -> dict[str, object]:
    """All there is to a directory but the times and what LOCK says, which is for humans."""

    def of(file: Path) -> object:
        info = os.lstat(file)
        content: object = None
        if stat.S_ISREG(info.st_mode) and file.name != "LOCK":
            content = file.read_bytes()
        elif stat.S_ISLNK(info.st_mode):
            content = os.readlink(file)
        elif stat.S_ISDIR(info.st_mode):
            content = {inner.name: of(inner) for inner in sorted(file.iterdir())}
        return info.st_mode, info.st_uid, info.st_ino, content

    return {"": of(path)}


def newest(kv: Path) -> Superblock:
    data = (kv / "SUPER").read_bytes()
    copies = [parse_super(data[:PAGE]), parse_super(data[PAGE:])]
    return max((copy for copy in copies if copy is not None), key=lambda copy: copy.seqno)


def rewrite(kv: Path, **changes: object) -> None:
    """Both copies of the superblock, intact but for the changes."""
    (kv / "SUPER").write_bytes(pack_super(replace(newest(kv), **changes)) * 2)


def chown(path: Path) -> None:
    os.chown(path, 12345, -1)


def to_link(path: Path) -> None:
    real = path.parent.parent / "real"
    path.rename(real)
    path.symlink_to(real)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


def cut(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


@dataclass(frozen=True)
class Case:
    """One thing that is wrong.

    Attributes
    ----------
    spoil : makes it so, given the store's path.
    names : what the error must name.
    resets : whether `on_mismatch="reset"` may help.
    """

    spoil: Callable[[Path], object]
    names: str
    resets: bool = False


CASES = {
    "directory open to a group": Case(lambda kv: kv.chmod(0o750), "kv"),
    "directory others may search": Case(lambda kv: kv.chmod(0o701), "kv"),
    "directory a link": Case(lambda kv: (kv.rename(kv.parent / "real"), kv.symlink_to(kv.parent / "real")), "kv"),
    "directory a link to nothing": Case(lambda kv: (kv.rename(kv.parent / "real"), kv.symlink_to("nowhere")), "kv"),
    "directory a file": Case(lambda kv: (kv.rename(kv.parent / "real"), kv.write_bytes(b"text")), "kv"),
    "directory a pipe": Case(lambda kv: (kv.rename(kv.parent / "real"), os.mkfifo(kv)), "kv"),
    "both superblocks damaged": Case(lambda kv: (kv / "SUPER").write_bytes(bytes(2 * PAGE)), "SUPER", True),
    "SUPER empty": Case(lambda kv: (kv / "SUPER").write_bytes(b""), "SUPER", True),
    "SUPER foreign": Case(lambda kv: (kv / "SUPER").write_bytes(b"PGKVSB\r\n" * 1024), "SUPER", True),
    "KEY of another store": Case(lambda kv: (kv / "KEY").write_bytes(b"k" * 32), "KEY", True),
    **{
        f"KEY of {size} bytes": Case(lambda kv, size=size: (kv / "KEY").write_bytes(b"k" * size), "KEY", True)
        for size in (0, 31, 33, 4096)
    },
    **{f"{name} missing": Case(lambda kv, name=name: (kv / name).unlink(), name, True) for name in FILES[1:]},
    **{
        f"data.0000 changed by {by}": Case(lambda kv, by=by: cut(kv / "data.0000", by), r"data\.0000", True)
        for by in (-PAGE, -512, -1, 1, 512, PAGE, 5 * 2 * PAGE)
    },
    **{
        f"{name} open to others": Case(lambda kv, name=name: (kv / name).chmod(0o640), name) for name in FILES
    },
    **{f"{name} a link": Case(lambda kv, name=name: to_link(kv / name), name) for name in FILES},
    **{f"{name} a directory": Case(lambda kv, name=name: to_directory(kv / name), name) for name in FILES},
    **{f"{name} a pipe": Case(lambda kv, name=name: to_pipe(kv / name), name) for name in FILES},
    **{
        f"format {major} and features {incompat:#x}": Case(
            lambda kv, major=major, incompat=incompat: rewrite(kv, major=major, incompat=incompat), "format", True
        )
        for major, incompat in ((0, 0), (2, 0), (65535, 0), (1, 1), (1, 1 << 63), (2, 1))
    },
    "another fingerprint": Case(lambda kv: rewrite(kv, fingerprint=bytes(32)), "fingerprint", True),
}  # fmt: skip
GIVEN_AWAY = {name or "directory": Case(lambda kv, name=name: chown(kv / name), name or "kv") for name in ("", *FILES)}
TABLE = [
    *(pytest.param(case, id=name) for name, case in CASES.items()),
    *(pytest.param(case, id=f"{name} of another user", marks=needs_root) for name, case in GIVEN_AWAY.items()),
]


@pytest.mark.parametrize("case", TABLE)
def test_it_is_refused_with_a_name_and_a_remedy_and_left_as_it_was(open_tier, kv, tmp_path, case):
    case.spoil(kv)
    before = everything(tmp_path)
    with pytest.raises((TierError, LayoutMismatch), match=case.names) as refusal:
        open_tier()
    assert REMEDY.search(str(refusal.value)), f"says nothing to be done: {refusal.value}"
    assert everything(tmp_path) == before


@pytest.mark.parametrize("case", TABLE)
def test_a_reset_starts_anew_where_a_store_of_ours_is_damaged_and_nowhere_else(open_tier, kv, tmp_path, case):
    old = newest(kv)
    case.spoil(kv)
    before = everything(tmp_path)
    if not case.resets:
        with pytest.raises((TierError, LayoutMismatch), match=case.names):
            open_tier(on_mismatch="reset")
        assert everything(tmp_path) == before
        return
    tier = open_tier(on_mismatch="reset")
    assert not list(tier.records())
    assert not tier.read(ALL, NAMES, np.zeros((NUM_BLOCKS, tier.block_bytes), np.uint8), ALL).any()
    tier.close()
    assert newest(kv).uuid != old.uuid
    again = open_tier()
    assert not list(again.records())


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": b"f" * 32}, {"num_blocks": NUM_BLOCKS - 1},
        {"block_bytes": 1004}, {"block_tokens": 5}, {"shards": 2}, {"segment_bytes": 1 << 20},
    ],
    ids=str,
)  # fmt: skip
def test_a_store_of_another_layout_is_refused_or_replaced_and_its_bytes_are_never_read_as_others(
    open_tier, kv, tmp_path, changes
):
    before = everything(tmp_path)
    with pytest.raises(LayoutMismatch, match="on_mismatch"):
        open_tier(**changes)
    assert everything(tmp_path) == before
    tier = open_tier(on_mismatch="reset", **changes)
    assert not list(tier.records())
    tier.close()
    if "num_blocks" in changes:  # a store of fewer blocks grows
        assert not list(open_tier().records())
        return
    with pytest.raises(LayoutMismatch):
        open_tier()


@pytest.mark.parametrize("value", [0, 2**31, 2**32 - 1, 2**62, 2**64 - 1])
@pytest.mark.parametrize(
    "name", ["num_blocks", "block_bytes", "header_bytes", "slot_bytes", "segment_slots", "block_tokens", "shards"]
)
def test_absurd_sizes_with_a_right_sum_are_refused_before_any_memory_is_taken(open_tier, kv, tmp_path, name, value):
    at, code = SUPER_FIELDS[name]
    page = bytearray((kv / "SUPER").read_bytes()[:PAGE])
    struct.pack_into("<" + code, page, at, value % (1 << WIDTHS[code]))
    struct.pack_into("<Q", page, PAGE - 8, page_sum(page, 0))
    (kv / "SUPER").write_bytes(page * 2)
    before = everything(tmp_path)
    tracemalloc.start()
    with pytest.raises(LayoutMismatch) as refusal:
        open_tier()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert REMEDY.search(str(refusal.value))
    assert everything(tmp_path) == before


def test_a_reset_leaves_a_store_alone_that_can_be_opened(open_tier, kv, arena):
    tier = open_tier(on_mismatch="reset")
    found = np.zeros_like(arena)
    assert tier.read(ALL, NAMES, found, ALL).all()
    np.testing.assert_array_equal(found, arena)


def test_a_store_in_use_is_refused_and_not_reset(open_tier, kv, arena):
    tier = open_tier()
    for how in ("refuse", "reset"):
        with pytest.raises(TierError, match=f"in use by pid {os.getpid()}.*close that one"):
            open_tier(on_mismatch=how)
    assert tier.read(ALL, NAMES, np.zeros_like(arena), ALL).all()


@pytest.mark.parametrize("how", ["refuse", "reset"])
def test_a_directory_with_foreign_files_is_never_taken_over(open_tier, tmp_path, how):
    (tmp_path / "kv").mkdir(mode=0o700)
    for name in ("thesis.tex", "data.1", "KEYS", "super"):
        (tmp_path / "kv" / name).write_text("years of work")
        before = (tmp_path / "kv" / name).read_text()
        with pytest.raises(TierError, match=re.escape(name)) as refusal:
            open_tier(on_mismatch=how)
        assert REMEDY.search(str(refusal.value))
        assert (tmp_path / "kv" / name).read_text() == before
        (tmp_path / "kv" / name).unlink()


def opened_or_refused(open_tier: Callable[..., DiskTier]) -> tuple[DiskTier | None, str]:
    """The tier, or what the refusal says."""
    try:
        return open_tier(), ""
    except TierError as problem:
        return None, str(problem)


@pytest.mark.parametrize("name", ["KEY", "SUPER", "data.0000", "data.0002"])
def test_a_file_cut_anywhere_is_refused_or_survived(open_tier, kv, tmp_path, arena, name):
    whole = (kv / name).read_bytes()
    survived = 0
    for size in range(0, len(whole), 512 if len(whole) > 512 else 1):
        os.truncate(kv / name, size)
        before = everything(tmp_path)
        tier, refusal = opened_or_refused(open_tier)
        if tier is None:
            assert name in refusal
            assert REMEDY.search(refusal)
            assert everything(tmp_path) == before
        else:
            survived += 1
            assert tier.read(ALL, NAMES, np.zeros_like(arena), ALL).all()
            tier.close()
        (kv / name).write_bytes(whole)
    assert survived == (8 if name == "SUPER" else 0)  # the first copy is whole from its 4096th byte on


@pytest.mark.parametrize("name", ["KEY", "SUPER", "data.0000", "data.0002"])
@pytest.mark.parametrize("garbage", [b"\0", b"\xff" * 511, b"\n" * 4096])
def test_a_file_with_something_behind_it_is_refused_or_served_without_it(open_tier, kv, arena, name, garbage):
    with open(kv / name, "ab") as file:
        file.write(garbage)
    tier, refusal = opened_or_refused(open_tier)
    if tier is None:
        assert name in refusal
    else:
        assert name == "SUPER"
        found = np.zeros_like(arena)
        assert tier.read(ALL, NAMES, found, ALL).all()
        np.testing.assert_array_equal(found, arena)
