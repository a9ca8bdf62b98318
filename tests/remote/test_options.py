"""The options of a remote store: bad values are refused with the remedy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.errors import InvalidArgument, WrongType

SECRET = b"a secret of ours"
URL = "unix:///run/kv.sock"
SPEC = pk.KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=16, model="toy@1")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"secret": b"short"}, InvalidArgument), ({"secret": b"x" * 65}, InvalidArgument), ({"secret": 5}, WrongType),
        ({"write": "evicted"}, InvalidArgument), ({"claims": 0}, InvalidArgument), ({"claims": "64"}, WrongType),
        ({"shard": (1, 1)}, InvalidArgument), ({"shard": (-1, 2)}, InvalidArgument), ({"shard": 1}, WrongType),
        ({"prefix": "a:b"}, InvalidArgument), ({"prefix": ""}, InvalidArgument), ({"lookup_s": 0}, InvalidArgument),
        ({"read_s": float("nan")}, InvalidArgument), ({"write_s": "1"}, WrongType),
        ({"max_queued": "0B"}, InvalidArgument), ({"max_queued": 64}, WrongType),
        ({"min_blocks": 0}, InvalidArgument), ({"seal": 1}, WrongType),
        ({"ttl_s": 0}, InvalidArgument), ({"ttl_s": 1.5}, WrongType), ({"required": None}, WrongType),
        ({"ca_file": 3}, WrongType), ({"insecure": "no"}, WrongType),
        ({"cluster": 3}, WrongType), ({"cluster": True}, InvalidArgument),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_used_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        pk.Valkey(URL, **{"secret": SECRET, **options})
    assert next(iter(options)).split("_")[0] in str(caught.value)


@pytest.mark.parametrize("url", ["", "host:6379", "http://host", "valkey://", "unix:// x", 5])
def test_a_url_that_is_none_is_refused_and_not_repeated(url: Any) -> None:
    with pytest.raises((InvalidArgument, WrongType)) as caught:
        pk.Valkey(url, secret=SECRET)
    assert "begin with" in str(caught.value) or "must be a string" in str(caught.value)


@pytest.mark.parametrize(
    "host", ["kv.example:6379", "10.0.0.1", "user:pw@10.0.0.1:1", "127.0.0.1.example", "[::2]:6379"]
)
def test_a_plain_url_to_another_machine_is_refused(host: str) -> None:
    with pytest.raises(InvalidArgument, match="insecure=True") as caught:
        pk.Valkey(f"valkey://{host}/0", secret=SECRET)
    assert "pw" not in str(caught.value)
    pk.Valkey(f"valkey://{host}/0", secret=SECRET, seal=True)
    pk.Valkey(f"valkey://{host}/0", secret=SECRET, insecure=True)
    pk.Valkey(f"valkeys://{host}/0", secret=SECRET)


def test_a_plain_cluster_is_refused_also_on_this_machine_for_its_nodes_may_be_elsewhere() -> None:
    with pytest.raises(InvalidArgument, match="nodes may be anywhere"):
        pk.Valkey("valkey://127.0.0.1:6379", secret=SECRET, cluster=True)
    for how in ({"seal": True}, {"insecure": True}):
        pk.Valkey("valkey://127.0.0.1:6379", secret=SECRET, cluster=True, **how)
    pk.Valkey("valkeys://127.0.0.1:6379", secret=SECRET, cluster=True)


@pytest.mark.parametrize("host", ["127.0.0.1:6379", "localhost", "[::1]:6379", "user:pw@127.0.0.1:1"])
def test_loopback_needs_no_word(host: str) -> None:
    assert pk.Valkey(f"redis://{host}/0", secret=SECRET).is_loopback


def test_a_secret_file_open_to_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0" * 64 + b"\n")
    path.chmod(0o600)
    store = pk.Valkey(URL, secret=path)
    assert store.secret_bytes() == b"0" * 64
    for mode in (0o640, 0o604, 0o620, 0o666):
        path.chmod(mode)
        with pytest.raises(InvalidArgument, match="chmod 600"):
            store.secret_bytes()


def test_a_secret_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0" * 64)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as if this process were another user's
    if os.getuid() == 0:  # a file of root is fine, so it must belong to a third one
        os.chown(path, 12345, -1)
    with pytest.raises(InvalidArgument, match="another user"):
        pk.Valkey(URL, secret=path).secret_bytes()


def test_a_secret_file_that_is_none_is_refused(tmp_path: Path) -> None:
    link, short, long = tmp_path / "link", tmp_path / "short", tmp_path / "long"
    short.write_bytes(b"x" * 15)
    long.write_bytes(b"x" * 66)
    for path in (short, long):
        path.chmod(0o600)
    link.symlink_to(short)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, said in ((short, "15 bytes"), (long, "66 bytes"), (link, "cannot be read"), (tmp_path, "is no file"),
                       (tmp_path / "pipe", "is no file"), (tmp_path / "gone", "cannot be read")):  # fmt: skip
        with pytest.raises(InvalidArgument, match=said):
            pk.Valkey(URL, secret=path).secret_bytes()


def test_nothing_secret_is_shown() -> None:
    store = pk.Valkey("valkey://user:pa55w0rd@127.0.0.1:6379/0", secret=SECRET)
    assert repr(store) == "Valkey('valkey://127.0.0.1:6379', secret=...)"
    assert store.where == "valkey://127.0.0.1:6379"
    assert "pa55w0rd" not in f"{store} {store!r}"


@pytest.mark.parametrize(
    "url",
    [
        "unix:///run/kv.sock?password=a@b", "valkey://evil:6379/0?x=@127.0.0.1",
        "valkey://evil/@127.0.0.1", "redis://127.0.0.1#@evil", "valkey://user:pa/ss@127.0.0.1", "valkey://h:6379/x",
    ],
)  # fmt: skip
def test_a_url_that_two_readers_could_read_differently_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pk.Valkey(url, secret=SECRET)
    assert "evil" not in str(caught.value)
    assert "password=" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("ftp://u:pw@host/x", {}),
        ("s3://bucket/x", {"endpoint_url": "http://10.0.0.1:9000"}),
        ("s3://bucket/x", {"client_kwargs": {"endpoint_url": "http://minio:9000"}}),
        ("webhdfs://host:50070/x", {}),
        ("s3://bucket/x", {"endpoints": ["https://a", "http://127.0.0.1.example"]}),
    ],
)
def test_objects_over_a_plain_network_are_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="insecure=True") as caught:
        pk.Objects(url, options=options, secret=SECRET)
    assert "pw" not in str(caught.value)
    assert pk.Objects(url, options=options, secret=SECRET, insecure=True).is_open
    pk.Objects(url, options=options, secret=SECRET, seal=True)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("file:///mnt/kv", {}), ("s3://bucket/x", {}), ("s3://bucket/x", {"endpoint_url": "https://minio:9000"}),
        ("s3://bucket/x", {"client_kwargs": {"endpoint_url": "http://127.0.0.1:9000/"}}),
        ("sftp://user@host/x", {"password": "http"}),
    ],
)  # fmt: skip
def test_objects_that_do_not_cross_a_network_in_the_open_need_no_word(url: str, options: dict[str, Any]) -> None:
    assert not pk.Objects(url, options=options, secret=SECRET).is_open


def test_a_cache_without_a_named_model_is_refused() -> None:
    unnamed = pk.KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=16)
    with pytest.raises(InvalidArgument, match="model"):
        pk.KVCache(unnamed, memory=pk.Blocks(4), remote=pk.Valkey(URL, secret=SECRET))
    with pytest.raises(WrongType, match="Valkey"):
        pk.KVCache(SPEC, memory=pk.Blocks(4), remote=URL)  # type: ignore[arg-type]
