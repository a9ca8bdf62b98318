"""A directory has one owner.

Deleting or replacing its LOCK lets no second one in, and stops the first from writing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from pagedkv.errors import TierError
from pagedkv.tiers.disk.directory import Directory

from .conftest import name_of

OPEN = """
import sys
from pagedkv.errors import TierError
from pagedkv.tiers.disk.directory import Directory
try:
    Directory(sys.argv[1]).close()
    print("open")
except TierError as problem:
    print(problem)
"""


def opened_elsewhere(path) -> str:
    """What another process says that opens the directory."""
    done = subprocess.run([sys.executable, "-c", OPEN, path], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def delete(kv):
    (kv / "LOCK").unlink()


def replace(kv):
    (kv / "LOCK").rename(kv / "aside")
    (kv / "LOCK").touch(0o600)
    (kv / "aside").unlink()


@pytest.fixture
def kv(tmp_path):
    return tmp_path / "kv"


def no_directory_locks(monkeypatch, number=errno.EBADF):
    """A file system that locks files and no directories, as network file systems do."""
    real = fcntl.flock

    def flock(fd, how):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("lose", [delete, replace])
def test_without_its_lock_a_directory_still_has_one_owner(open_tier, arena, kv, lose):
    tier = open_tier()
    tier.write([0], [name_of(0)], arena, [0])
    lose(kv)
    before = sorted(os.listdir(kv))
    with pytest.raises(TierError, match="is in use by unknown; close that one"):
        open_tier()
    assert "is in use by unknown" in opened_elsewhere(kv)
    assert sorted(os.listdir(kv)) == before, "a refused opener leaves nothing there"
    tier.close()
    assert len(list(open_tier().records())) == 1


@pytest.mark.parametrize("lose", [delete, replace])
def test_an_owner_without_its_lock_writes_no_more_and_says_so_once(open_tier, arena, kv, lose, caplog):
    tier = open_tier()
    assert tier.write([0], [name_of(0)], arena, [0]).all()
    lose(kv)
    caplog.clear()
    for _ in range(3):
        assert not tier.write([1], [name_of(1)], arena, [1]).any()
    assert tier.state == "read_only"
    assert tier.stats().writes_refused == 3
    assert tier.read([0], [name_of(0)], arena, [5]).all(), "what was stored is served: each read is checked"
    assert [record.getMessage() for record in caplog.records] == [
        f"disk tier {kv} is read-only now: its LOCK was deleted or replaced; close the cache and open it again"
    ]
    tier.close()
    again = open_tier()
    assert again.state == "ok"
    assert again.write([1], [name_of(1)], arena, [1]).all()
    assert again.flush()


@pytest.mark.parametrize("call", ["purge", "clear"])
def test_a_purge_without_the_lock_holds_in_the_process_and_says_that_it_is_not_durable(open_tier, arena, kv, call):
    tier = open_tier()
    tier.write([0], [name_of(0)], arena, [0])
    delete(kv)
    with pytest.raises(TierError, match="could not be written"):
        tier.clear() if call == "clear" else tier.purge(name_of(0).namespace)
    assert not tier.read([0], [name_of(0)], arena, [5]).any()
    assert tier.state == "read_only"


def test_a_lock_that_comes_back_does_not_make_the_owner_trust_it_again(open_tier, arena, kv):
    """Another process may have had the directory meanwhile, where directories cannot be locked."""
    tier = open_tier()
    os.link(kv / "LOCK", kv / "aside")
    delete(kv)
    assert not tier.write([1], [name_of(1)], arena, [1]).any()
    (kv / "aside").rename(kv / "LOCK")
    assert not tier.write([1], [name_of(1)], arena, [1]).any()


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP])
def test_where_directories_cannot_be_locked_the_first_owner_writes_no_more(
    open_tier, arena, kv, monkeypatch, number
):
    no_directory_locks(monkeypatch, number)
    tier = open_tier()
    tier.write([0], [name_of(0)], arena, [0])
    delete(kv)
    second = open_tier()
    assert second.write([1], [name_of(1)], arena, [1]).all()
    assert not tier.write([1], [name_of(2)], arena, [2]).any()
    assert second.read([1], [name_of(1)], arena, [5]).all()
    assert (arena[5] == arena[1]).all()


def test_a_lock_that_cannot_be_looked_at_is_no_lost_lock(open_tier, arena, monkeypatch):
    tier, real = open_tier(), os.stat

    def stat(path, *args, **kwargs):
        if path == "LOCK":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **kwargs)

    def fstat(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, failing in (("stat", stat), ("fstat", fstat)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            assert not tier._store.directory.lost_its_lock()
            assert tier.write([1], [name_of(1)], arena, [1]).all()


def test_a_directory_that_nobody_was_given_is_free_again(kv):
    Directory(kv)  # as where an interrupt comes before the caller has it
    Directory(kv).close()


def test_the_directory_is_free_for_others_after_a_close(open_tier, kv):
    open_tier().close()
    assert opened_elsewhere(kv) == "open"
    held = Directory(kv)
    with pytest.raises(TierError, match=f"in use by pid {os.getpid()}"):
        Directory(kv)
    held.close()
    Directory(kv).close()
