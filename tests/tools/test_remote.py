"""``doctor --remote``, ``inspect --remote``: a store is tried, counted and left clean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cli import main
from pagedkv.spec.sizes import format_size
from pagedkv.tiers.remote.valkey import facts_of, group_of, version_of
from pagedkv.tools import remote
from tests.remote.servers import cluster, free_port, server

SECRET = b"a secret of ours"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    monkeypatch.setattr(remote, "MEASURED_BYTES", 1 << 20)
    monkeypatch.setattr(remote, "SIZES", (64 << 10, 128 << 10))


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in report["checks"]}


def test_a_good_server_is_measured_and_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography", minversion="46")
    with server() as running:
        running.client().set("pagedkv:other", b"x")
        code, report = doctor(capsys, "--remote", running.unix)
        assert running.client().keys("*") == [b"pagedkv:other"]
    assert code == 0
    found = statuses(report)
    assert set(found.values()) == {"ok"}
    assert "persistence" in found
    sizes = [format_size(size) for size in remote.SIZES]
    assert {"connect", "server", "maxmemory", "lookup", "damage", "verdict", *sizes, f"{sizes[0]} sealed"} <= set(found)
    numbers = report["remote"]
    assert all(each["read_bytes_per_s"] > 0 for each in numbers["speeds"])
    assert set(numbers["pays_below_tokens_per_s"]) == {"Llama 3 8B", "Llama 3 70B", "Qwen 2.5 7B"}


@pytest.mark.parametrize(
    ("memory", "policy", "said"),
    [("0", "noeviction", "set maxmemory"), ("64mb", "noeviction", "takes no block"), ("64mb", "volatile-lru", "ttl_s")],
)
def test_a_server_that_does_not_evict_is_warned_of(
    memory: str, policy: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server("--appendonly", "yes", memory=memory, policy=policy) as running:
        code, report = doctor(capsys, "--remote", running.unix)
    assert code == 0
    found = statuses(report)
    assert (found["maxmemory"], found["persistence"]) == ("warning", "warning")
    assert said in next(check["detail"] for check in report["checks"] if check["name"] == "maxmemory")


def test_a_server_that_writes_snapshots_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as running:
        running.client().save()
        code, report = doctor(capsys, "--remote", running.unix)
    assert code == 0
    told = next(check for check in report["checks"] if check["name"] == "persistence")
    assert told["status"] == "warning"
    assert "snapshots" in told["detail"]


def test_a_server_that_cannot_be_used_fails_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with server("--requirepass", "right") as closed:
        code, report = doctor(capsys, "--remote", f"valkey://:wr0ng@127.0.0.1:{closed.port}/0")
    assert code == 1
    assert "password" in report["checks"][0]["detail"]
    assert "wr0ng" not in json.dumps(report)
    code, report = doctor(capsys, "--remote", f"valkey://127.0.0.1:{free_port()}/0")
    assert code == 1
    assert statuses(report) == {"connect": "failed"}


def test_a_secret_file_that_others_can_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o644)
    assert main(["doctor", "--remote", "unix:///nowhere", "--secret-file", str(path)]) == 2
    assert "chmod 600" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--remote", "http://x"], ["doctor", "--remote", "unix:///x", "--disk", "/tmp"],
        ["doctor", "--secret-file", "x"], ["inspect"], ["inspect", "/tmp", "--remote", "unix:///x"],
        ["inspect", "--remote", "unix:///x", "--prefix", "a*"], ["inspect", "--remote", "unix:///nowhere/s"],
        ["doctor", "--remote", "mooncake://nowhere"], ["doctor", "--remote", "s3://x", "--ca-file", "y"],
        ["doctor", "--cluster"], ["inspect", "/tmp", "--cluster"], ["doctor", "--remote", "unix:///x", "--cluster"],
        ["doctor", "--remote", "nonsense://x"],
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def published(remote: pk.Valkey | pk.Objects) -> pk.KVSpec:
    """Put blocks of two namespaces into a store, three and five."""
    spec = pk.KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=16, model="toy@1")
    with pk.KVCache(spec, memory=pk.Blocks(40), remote=remote) as cache:
        for namespace, blocks in ((None, 3), (pk.Namespace(tenant="a"), 5)):
            prompt = np.arange(blocks * 16 + 1, dtype=np.int32)
            with cache.sequence(prompt, namespace) as seq, cache.step([seq]) as step:
                step.write(0, np.zeros((len(prompt), 1, 8), np.float32), np.zeros((len(prompt), 1, 8), np.float32))
            assert cache.publish(prompt, namespace) == blocks
    return spec


def check_groups(spec: pk.KVSpec, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
    """Inspect counts the published blocks."""
    assert main(["inspect", "--json", *arguments]) == 0
    groups = json.loads(capsys.readouterr().out)
    assert sorted(each["objects"] for each in groups.values()) == [3, 5]
    assert all(each["bytes"] == each["objects"] * (spec.block_bytes + 128) for each in groups.values())
    assert main(["inspect", *arguments]) == 0
    assert "8 blocks in 2 groups" in capsys.readouterr().out


def test_inspect_counts_blocks_and_bytes_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as running:
        spec = published(pk.Valkey(running.unix, secret=SECRET))
        check_groups(spec, capsys, "--remote", running.unix)


@pytest.mark.slow
def test_a_cluster_is_measured_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("glide_sync", reason="valkey-glide-sync is not installed: pip install '.[valkey-cluster]'")
    with cluster() as nodes:
        url = f"valkey://127.0.0.1:{nodes[0].port}"
        spec = published(pk.Valkey(url, secret=SECRET, cluster=True, insecure=True, write_s=60.0))
        check_groups(spec, capsys, "--remote", url, "--cluster")
        code, report = doctor(capsys, "--remote", url, "--cluster")
        assert sum(node.client().dbsize() for node in nodes) == 8
    assert code == 0
    found = statuses(report)
    assert found.pop("network") == found.pop("login") == "warning"
    assert set(found.values()) <= {"ok", "skipped"}
    assert "cluster" in next(check["detail"] for check in report["checks"] if check["name"] == "server")


def test_a_folder_is_measured_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install '.[objects]'")
    url = f"file://{tmp_path}/kv"
    spec = published(pk.Objects(url, secret=SECRET, write_s=60.0))
    check_groups(spec, capsys, "--remote", url)
    code, report = doctor(capsys, "--remote", url)
    assert code == 0
    found = statuses(report)
    assert found.pop("eviction") == "warning"
    assert {"connect", "lookup", "damage", "verdict"} <= set(found)
    assert set(found.values()) <= {"ok", "skipped"}
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["pagedkv"]  # all of the doctor's is gone


def test_a_store_without_room_is_told_from_one_that_loses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "MEASURED_BYTES", 8 << 20)
    with server(memory="3mb", policy="noeviction") as full:
        code, report = doctor(capsys, "--remote", full.unix)
    assert code == 1
    detail = next(check["detail"] for check in report["checks"] if check["status"] == "failed")
    assert "is there room" in detail


def test_what_a_server_says_reaches_no_terminal_as_it_is() -> None:
    facts = facts_of(b"redis_version:7.2.\x1b[31m" + b"9" * 6000 + b"\r\nmaxmemory_policy:\x1b[2J\r\n# x:y\r\n")
    version, numbers = version_of(facts)
    assert numbers == (7, 2)
    assert version.isprintable()
    assert len(version) <= 40
    assert facts["maxmemory_policy"] == "?[2J"
    assert version_of({"redis_version": "9" * 6000})[1][0] < 10**9
    assert group_of(b"pagedkv:\x1b[2J\x07:1", "pagedkv:") == "?[2J?"
    for said in ("x", "9" * 5000, ""):
        found = list(remote._server({"redis_version": "7.0", "maxmemory": said}, {}))
        assert found[1].status == "warning"
