"""A store in files and objects: its calls, and caches that share a folder or a bucket."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import InvalidArgument, TierError, WrongType
from pagedkv.tiers.remote.objects import ObjectStore
from pagedkv.tiers.remote.store import MISSING, UNUSABLE, Unreachable
from tests.remote.servers import WATCHDOG_S, free_port
from tests.remote.test_sharing import PATIENT, SECRET, SPEC, prompt_of, remote_stats, run, wait_for

HEAD = bytes(range(128))
LIMIT_S = 60.0


def soon() -> float:
    return time.monotonic() + LIMIT_S


@contextlib.contextmanager
def moto() -> Iterator[tuple[str, dict[str, Any]]]:
    """A bucket's URL and options, of an S3 server on loopback."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
            until = time.monotonic() + LIMIT_S
            while True:
                try:
                    s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("bucket")
                    break
                except Exception:
                    assert time.monotonic() < until, "moto does not begin"
                    time.sleep(0.2)
            yield "s3://bucket/kv", options
        finally:
            process.kill()


@pytest.fixture(params=["folder", pytest.param("S3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    pytest.importorskip("fsspec")
    if request.param == "folder":
        yield f"file://{tmp_path}/kv", {}
    else:
        with moto() as found:
            yield found


def test_values_come_back_and_groups_are_removed(place: tuple[str, dict[str, Any]]) -> None:
    store = ObjectStore(*place)
    store.open(soon())
    rows = [np.random.default_rng(i).integers(0, 256, 1000, np.uint8) for i in range(5)]
    keys = [f"pagedkv:aa:{i:064x}" for i in range(3)] + [f"pagedkv:ab:{i:064x}" for i in range(2)]
    assert store.put(keys, [(HEAD, row) for row in rows], soon()) == [""] * 5
    asked = [*keys, f"pagedkv:ac:{0:064x}"]
    assert store.exists(asked, soon()) == [True] * 5 + [False]
    sizes: dict[int, int] = {}
    heads, back = np.zeros((6, 128), np.uint8), [np.zeros(1000, np.uint8) for _ in range(6)]
    store.get_into(asked, heads, back, soon(), sizes.__setitem__)
    assert sizes == {**dict.fromkeys(range(5), 1128), 5: MISSING}
    assert all(map(np.array_equal, back, rows))
    assert heads[0].tobytes() == HEAD
    store.get_into(keys[:1], heads, [np.zeros(999, np.uint8)], soon(), sizes.__setitem__)
    assert sizes[0] == UNUSABLE
    store.remove([keys[0], asked[5]], soon())
    assert store.remove_group("pagedkv:aa:", soon()) == 2
    assert store.exists(keys, soon()) == [False] * 3 + [True] * 2
    assert store.remove_group("pagedkv:zz:", soon()) == 0
    store.close()


def test_caches_share_a_folder_or_a_bucket(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    remote = pk.Objects(url, options=options, secret=SECRET, **PATIENT)  # type: ignore[arg-type]
    with pk.KVCache(SPEC, memory=pk.Blocks(60), remote=remote) as first:
        assert run(first, prompt_of(1))["remote"] == 0
        assert first.publish(prompt_of(1)) == 20
    with pk.KVCache(SPEC, memory=pk.Blocks(60), remote=remote) as second:
        assert run(second, prompt_of(1))["remote"] == 320
        assert second.publish(prompt_of(1)) == 20
        assert remote_stats(second)["written_blocks"] == 0
        second.purge(None)
        assert run(second, prompt_of(1))["remote"] == 0
        second.check_integrity()


def test_damaged_files_are_misses(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    remote = pk.Objects(f"file://{tmp_path}/kv", secret=SECRET, **PATIENT)  # type: ignore[arg-type]
    with pk.KVCache(SPEC, memory=pk.Blocks(60), remote=remote) as first:
        run(first, prompt_of(1))
        first.publish(prompt_of(1))
    files = sorted(path for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert len(files) == 20
    for number, path in enumerate(files):
        value = bytearray(path.read_bytes())
        value[(37 * number) % len(value)] ^= 1
        path.write_bytes(bytes(value))
    with pk.KVCache(SPEC, memory=pk.Blocks(60), remote=remote) as second:
        assert run(second, prompt_of(1))["remote"] == 0
        assert sum(remote_stats(second)["misses"].values()) == 20
        assert second.publish(prompt_of(1)) == 20


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "file").write_bytes(b"x")
    store = ObjectStore(f"file://{tmp_path}/file/kv", {})
    with pytest.raises((TierError, Unreachable)):
        store.open(soon())
    with pytest.raises((InvalidArgument, ImportError)):
        ObjectStore("nosuchscheme://x", {})
    for url, error in (("no url", InvalidArgument), (5, WrongType)):
        with pytest.raises(error):
            pk.Objects(url, secret=SECRET)  # type: ignore[arg-type]
    with pytest.raises(WrongType):
        pk.Objects("file:///x", secret=SECRET, options=[1])  # type: ignore[arg-type]
    assert "hidden" not in repr(pk.Objects("sftp://u:hidden@h/x", secret=SECRET, options={"secret": "hidden"}))


def test_a_call_ends_after_its_limit(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = ObjectStore(f"file://{tmp_path}/kv", {})
    for call in (store.exists, store.remove):
        with pytest.raises(Unreachable) as caught:
            call(["pagedkv:a:b"], time.monotonic() - 1)
        assert caught.value.kind == "timeout"


@pytest.mark.slow
def test_a_file_system_that_hangs_holds_up_neither_purge_nor_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    back = threading.Event()
    remote = pk.Objects(f"file://{tmp_path}/kv", secret=SECRET, lookup_s=0.2, read_s=0.2, write_s=0.5, purge_s=0.5)
    try:
        with pk.KVCache(SPEC, memory=pk.Blocks(60), remote=remote) as cache:
            file_system = cache._storage.remote._store._fs  # type: ignore[attr-defined]

            def hangs(*arguments: Any, **options: Any) -> Any:
                back.wait(WATCHDOG_S)
                raise OSError

            for call in ("exists", "cat_file", "pipe_file", "find", "rm_file"):
                monkeypatch.setattr(file_system, call, hangs, raising=False)
            numbers = itertools.count(1)
            wait_for(lambda: run(cache, prompt_of(next(numbers), 8)) and remote_stats(cache)["state"] == "off", "on")
            with pytest.raises(pk.TierError, match="remote store"):
                cache.purge(pk.Namespace(tenant="a"))
            cache.check_integrity()
        assert not back.is_set(), "the cache has closed because the watchdog let the calls go"
    finally:
        back.set()
