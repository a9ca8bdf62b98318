"""A directory that is not exactly a disk tier of ours is refused with one error.

What failed leaves nothing behind.
"""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import LayoutMismatch, TierError
from pagedkv.tiers import DiskTier
from pagedkv.tiers.disk.directory import Directory

from .conftest import FINGERPRINT, NUM_BLOCKS, name_of


@pytest.fixture
def kv(tmp_path, open_tier, arena):
    """The path of a store that holds one block and was closed properly."""
    tier = open_tier()
    tier.write([1], [name_of(1)], arena, [1])
    tier.close()
    return tmp_path / "kv"


def test_everything_in_the_directory_is_private_and_nothing_is_sparse(kv):
    assert kv.stat().st_mode & 0o777 == 0o700
    assert sorted(p.name for p in kv.iterdir()) == [
        "KEY",
        "LOCK",
        "SUPER",
        "data.0000",
        "data.0001",
        "data.0002",
    ]
    for path in kv.iterdir():
        info = path.stat()
        assert info.st_mode & 0o777 == 0o600
        assert info.st_blocks * 512 >= info.st_size
    sizes = [(kv / f"data.{n:04d}").stat().st_size for n in range(3)]
    assert sizes == [5 * 8192, 5 * 8192, (NUM_BLOCKS - 10) * 8192]
    assert len((kv / "KEY").read_bytes()) == 32


def test_files_are_private_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        DiskTier(tmp_path / "kv", 2, 64, fingerprint=FINGERPRINT).close()
    finally:
        os.umask(old)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "kv").iterdir())


def test_a_second_opener_is_refused_here_and_in_another_process(open_tier, tmp_path):
    tier = open_tier()
    with pytest.raises(TierError, match=f"in use by pid {os.getpid()}"):
        open_tier()
    script = f"""
        from pagedkv.errors import TierError
        from pagedkv.tiers import DiskTier
        try:
            DiskTier({str(tmp_path / "kv")!r}, 1, 1, fingerprint=bytes(32))
        except TierError as problem:
            print(problem)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"in use by pid {os.getpid()}" in done.stdout
    tier.close()
    open_tier()


def test_missing_folders_are_made_and_only_the_last_is_private(open_tier, tmp_path):
    open_tier(path=tmp_path / "missing" / "too" / "kv")
    assert stat.S_IMODE((tmp_path / "missing" / "too" / "kv").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "missing").stat().st_mode) & 0o500 == 0o500


def test_a_folder_that_cannot_be_made_is_named(open_tier, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TierError, match=r"cannot open disk tier .*file/kv: Not a directory"):
        open_tier(path=tmp_path / "file" / "kv")


def test_a_path_that_is_no_directory_is_refused(open_tier, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierError, match="not a directory"):
        open_tier(path=tmp_path / "file")


def test_a_link_to_a_directory_is_refused(open_tier, kv, tmp_path):
    (tmp_path / "link").symlink_to(kv)
    with pytest.raises(TierError, match="links are not followed"):
        open_tier(path=tmp_path / "link")


@pytest.mark.parametrize("name", ["", "KEY", "SUPER", "LOCK", "data.0001"])
def test_a_directory_or_file_open_to_others_is_refused(open_tier, kv, name):
    (kv / name).chmod(0o750 if not name else 0o640)
    with pytest.raises(TierError, match="open to other users"):
        open_tier()
    (kv / name).chmod(0o700 if not name else 0o600)
    assert len(list(open_tier().records())) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "KEY", "data.0000"])
def test_a_directory_or_file_of_another_user_is_refused(open_tier, kv, name):
    os.chown(kv / name, 12345, -1)
    with pytest.raises(TierError, match="belongs to user 12345"):
        open_tier()


@pytest.mark.parametrize("name", ["KEY", "SUPER", "LOCK", "data.0001"])
def test_a_file_that_is_a_link_a_pipe_or_a_directory_is_refused(open_tier, kv, tmp_path, name):
    (kv / name).rename(tmp_path / "real")
    (kv / name).symlink_to(tmp_path / "real")
    with pytest.raises(TierError):
        open_tier()
    (kv / name).unlink()
    os.mkfifo(kv / name, 0o600)
    if name != "LOCK":  # a pipe can be locked as well as a file
        with pytest.raises(TierError):
            open_tier()
    (kv / name).unlink()
    (kv / name).mkdir()
    with pytest.raises(TierError):
        open_tier()
    (kv / name).rmdir()
    (tmp_path / "real").rename(kv / name)
    assert len(list(open_tier().records())) == 1


@pytest.mark.parametrize("name", ["KEY", "data.0001"])
def test_a_missing_file_is_refused(open_tier, kv, name):
    (kv / name).unlink()
    with pytest.raises(TierError, match=name):
        open_tier()


@pytest.mark.parametrize("change", [-1, -8192, 1])
def test_a_segment_of_the_wrong_size_is_refused(open_tier, kv, change):
    os.truncate(kv / "data.0001", (kv / "data.0001").stat().st_size + change)
    with pytest.raises(TierError, match=r"data\.0001 .* instead of 40960"):
        open_tier()


@pytest.mark.parametrize("secret", [b"", b"x" * 31, b"x" * 33, b"x" * 32])
def test_another_key_is_refused(open_tier, kv, secret):
    (kv / "KEY").write_bytes(secret)
    with pytest.raises(TierError, match="KEY"):
        open_tier()


def test_one_damaged_superblock_is_survived_and_two_are_refused(open_tier, kv):
    good = (kv / "SUPER").read_bytes()
    assert len(good) == 8192
    for damaged in (0, 4096):
        data = bytearray(good)
        data[damaged + 100] ^= 1
        (kv / "SUPER").write_bytes(data)
        tier = open_tier()
        assert len(list(tier.records())) == 1
        tier.close()
    for data in (bytes(8192), b"", good[:100], bytes(b ^ 1 for b in good)):
        (kv / "SUPER").write_bytes(data)
        with pytest.raises(TierError, match="both copies of SUPER are damaged"):
            open_tier()


@pytest.mark.parametrize(("major", "incompat"), [(2, 0), (0, 0), (1, 1)])
def test_an_unknown_version_or_feature_is_refused(open_tier, kv, major, incompat):
    from dataclasses import replace

    from pagedkv.tiers.disk.format import PAGE
    from pagedkv.tiers.disk.superblock import pack_super, parse_super

    data = (kv / "SUPER").read_bytes()
    copies = [parse_super(data[:PAGE]), parse_super(data[PAGE:])]
    newest = max((c for c in copies if c is not None), key=lambda c: c.seqno)
    later = replace(newest, seqno=newest.seqno + 1, major=major, incompat=incompat)
    with open(kv / "SUPER", "r+b") as file:
        file.seek(later.seqno % 2 * PAGE)
        file.write(pack_super(later))
    with pytest.raises(LayoutMismatch, match=f"format {major}"):
        open_tier()


def test_a_directory_with_something_else_in_it_is_not_taken_over(open_tier, tmp_path):
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv" / "thesis.tex").write_text("years of work")
    with pytest.raises(TierError, match=r"thesis\.tex"):
        open_tier()
    assert (tmp_path / "kv" / "thesis.tex").read_text() == "years of work"
    assert os.listdir(tmp_path / "kv") == ["thesis.tex"]


def test_an_interrupted_start_is_started_over(open_tier, kv):
    (kv / "SUPER").rename(kv / "SUPER.new")
    tier = open_tier()
    assert tier.was_clean
    assert not list(tier.records())


def test_too_little_space_is_an_error_that_names_the_sizes_and_leaves_nothing(tmp_path):
    with pytest.raises(TierError, match=r"needs \d+ bytes .* \d+ are free"):
        DiskTier(tmp_path / "kv", 2**30, 1 << 30, fingerprint=FINGERPRINT)
    assert not (tmp_path / "kv").exists()


def test_a_disk_that_fills_up_meanwhile_is_the_same_error(tmp_path, monkeypatch):
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierError, match=r"cannot allocate \d+ bytes .*No space left.*\d+ bytes are free"):
        DiskTier(tmp_path / "kv", 4, 4096, fingerprint=FINGERPRINT)
    assert not (tmp_path / "kv").exists()


def test_a_failed_start_in_an_existing_directory_leaves_it_empty(tmp_path, monkeypatch):
    (tmp_path / "kv").mkdir(mode=0o700)
    monkeypatch.setattr(Directory, "free_bytes", lambda self: 10)
    with pytest.raises(TierError, match="10 are free"):
        DiskTier(tmp_path / "kv", 4, 4096, fingerprint=FINGERPRINT)
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["LOCK"]
    monkeypatch.undo()
    DiskTier(tmp_path / "kv", 4, 4096, fingerprint=FINGERPRINT).close()


def test_a_file_size_limit_is_an_error_and_no_signal(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(TierError, match="limit of 1048576"):
            DiskTier(tmp_path / "kv", 40, 1 << 20, fingerprint=FINGERPRINT)
        tier = DiskTier(tmp_path / "kv", 40, 60_000, fingerprint=FINGERPRINT, segment_bytes=1 << 20)
        tier.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(list((tmp_path / "kv").glob("data.*"))) == 3


def test_opening_and_closing_leaks_no_descriptor(open_tier, arena, tmp_path):
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    open_tier(read_path="mapping").close()
    before = descriptors()
    for _ in range(5):
        open_tier(read_path="mapping").close()
        with pytest.raises(LayoutMismatch):
            open_tier(num_blocks=3)
        (tmp_path / "kv" / "KEY").chmod(0o644)
        with pytest.raises(TierError):
            open_tier()
        (tmp_path / "kv" / "KEY").chmod(0o600)
        with pytest.raises(TierError):
            DiskTier(tmp_path / "big", 2**30, 1 << 30, fingerprint=FINGERPRINT)
    assert descriptors() == before
    tier = open_tier()
    assert tier.write(np.arange(2), [name_of(0), name_of(1)], arena, [0, 1]).all()
