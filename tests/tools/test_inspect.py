"""``pagedkv inspect``: it says what is there, needs nothing, and changes nothing."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.tiers.disk.superblock import pack_super, parse_super
from tests.tools.conftest import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    FINGERPRINT,
    NUM_BLOCKS,
    PER_FILE,
    SLOT_BYTES,
    Run,
    chain,
    damage,
    is_refused,
    open_tier,
    slot_bytes,
    snapshot,
    write,
)

GOLDEN = """\
cache directory  DIR
format           1, made 1 d 2 h ago, uuid 00000000000000000000000000000001
fingerprint      000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f
sizes            24 slots of 4.88 KiB and 4 tokens, 5 sums each, in 3 files
state            closed properly; epoch 1
slots            8 live, 6 tombstone, 9 empty, 1 header
chains           8 blocks in 1 whole prefix
on disk          SIZES
problem          KEY is open to other users (mode 644)

namespace                                                         blocks     bytes  tokens   oldest   newest
----------------------------------------------------------------  ------  --------  ------  -------  -------
NAMESPACE       8  39.1 KiB      32  1 d 2 h  1 d 2 h
"""


def test_the_text_for_people(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count()
    monkeypatch.setattr(os, "urandom", lambda size: next(numbers).to_bytes(size, "big"))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 0, chain(tier.secret, "a", 8))
        write(tier, 8, chain(tier.secret, "b", 6))
        tier.invalidate(np.arange(8, 14, dtype=np.int32))
    damage(path, 20, 5, b"x")
    (path / "KEY").chmod(0o644)
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0 + 26 * 3600 + 59)
    ran = run("inspect", path)
    assert ran.code == 0
    assert ran.err == ""
    text = ran.out.replace(str(path), "DIR").replace(pk.Namespace(tenant="a").digest().hex(), "NAMESPACE")
    text = re.sub(r"(on disk +).*", r"\1SIZES", text)
    assert re.sub(r" +\n", "\n", text) == GOLDEN


def test_the_json_for_machines(store: Path, run: Run) -> None:
    before = time.time()
    found = run("inspect", store, "--json").json
    names = {tenant: pk.Namespace(tenant=tenant).digest().hex() for tenant in "ab"}
    written = [found["namespaces"][name].pop(when) for name in names.values() for when in ("oldest", "newest")]
    written += [found["superblock"].pop("created_at")]
    assert all(before - 100 <= when <= before + 1 for when in written)
    assert re.fullmatch("[0-9a-f]{32}", found["superblock"].pop("uuid"))
    disk = found.pop("disk")
    assert set(disk) == {"file_system", "bytes", "allocated_bytes", "free_bytes"}
    assert disk["bytes"] == sum(path.stat().st_size for path in store.iterdir())
    assert found.pop("learned") == []
    assert found == {
        "path": str(store),
        "superblock": {
            "format": 1, "fingerprint": FINGERPRINT.hex(), "clean": True, "epoch": 1, "next_generation": 16,
            "purges": [],
            "geometry": {
                "num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES, "block_tokens": BLOCK_TOKENS, "shards": 5,
                "segment_slots": PER_FILE,
            },
        },
        "key": "ok",
        "open_by": None,
        "problems": [],
        "slots": {
            "live": 14, "tombstone": 1, "empty": 9, "purged": 0, "stale": 0, "header": 0, "misplaced": 0,
            "generation": 0, "short": 0, "io_error": 0, "lost": 0,
        },
        "namespaces": {
            names["a"]: {"blocks": 8, "bytes": 8 * BLOCK_BYTES, "tokens": 32},
            names["b"]: {"blocks": 6, "bytes": 6 * BLOCK_BYTES, "tokens": 24},
        },
        "chains": {"whole_blocks": 14, "prefixes": 2, "orphans": 0, "doubled": 0, "wrong_key": 0},
    }  # fmt: skip


def test_a_cache_s_own_directory_is_told_by_namespace(tmp_path: Path, run: Run) -> None:
    spec = pk.KVSpec(1, 1, 4, "float32", 4, model="toy")
    tenants = [pk.Namespace(tenant="a"), pk.Namespace(tenant="b"), None]
    with pk.KVCache(spec, pk.Blocks(6), None, pk.Disk(str(tmp_path / "kv"), pk.Blocks(64))) as cache:
        for number in range(6):
            tokens = range(100 * number, 100 * number + 17)
            with cache.sequence(tokens, tenants[number % 3]) as seq, cache.step([seq]) as step:
                step.write(0, *np.zeros((2, len(step.tokens), 1, 4), np.float32))
        cache.purge(tenants[1])
    found = run("inspect", tmp_path / "kv", "--json").json
    default, purged = pk.Namespace().digest().hex(), tenants[1].digest().hex()
    assert found["slots"]["live"] > 0
    assert found["namespaces"].keys() <= {tenants[0].digest().hex(), default}
    assert purged not in found["namespaces"]
    assert sum(there["blocks"] for there in found["namespaces"].values()) == found["slots"]["live"]
    assert run("verify", tmp_path / "kv").code == 0


def test_tokens_are_counted_not_the_slots_of_a_partly_filled_block(tmp_path: Path, run: Run) -> None:
    spec = pk.KVSpec(1, 1, 4, "float32", 4, model="toy")
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(64), write="all")
    with (
        pk.KVCache(spec, pk.Blocks(8), None, disk) as cache,
        cache.sequence(range(9)) as seq,
        cache.step([seq]) as step,
    ):
        step.write(0, *np.zeros((2, 9, 1, 4), np.float32))
    (there,) = run("inspect", tmp_path / "kv", "--json").json["namespaces"].values()
    assert (there["blocks"], there["tokens"]) == (3, 9)


def test_nothing_in_the_directory_changes(store: Path, run: Run) -> None:
    damage(store, 2, 4096)
    before = snapshot(store)
    for _ in range(2):
        assert run("inspect", store).code == 0
        assert run("inspect", store, "--json").code == 0
        assert run("verify", store).code == 1
    assert snapshot(store) == before


def test_a_store_in_use_is_read_and_says_by_whom(tmp_path: Path, run: Run) -> None:
    with open_tier(tmp_path / "kv") as tier:
        write(tier, 0, chain(tier.secret, "a", 3))
        before = snapshot(tmp_path / "kv")
        ran = run("inspect", tmp_path / "kv", "--json")
        assert run("inspect", tmp_path / "kv").out.count(f"open by process {os.getpid()}") == 1
        assert run("verify", tmp_path / "kv").code == 0
        assert snapshot(tmp_path / "kv") == before
        assert ran.json["open_by"] == os.getpid()
        assert ran.json["superblock"]["clean"] is False
        assert ran.json["slots"]["live"] == 3
        write(tier, 3, chain(tier.secret, "b", 2))  # the tier noticed nothing
    assert run("inspect", tmp_path / "kv", "--json").json["open_by"] is None


def test_a_store_that_is_open_is_known_as_open_also_without_its_lock(tmp_path: Path, run: Run) -> None:
    with open_tier(tmp_path / "kv"):
        (tmp_path / "kv" / "LOCK").unlink()
        assert run("inspect", tmp_path / "kv", "--json").json["open_by"] == os.getpid()
        assert "in use by" in run("verify", tmp_path / "kv", "--repair").err


def test_looking_never_turns_an_opener_away(store: Path) -> None:
    """The lock is asked about, not tried."""
    script = (
        "import fcntl, sys\n"
        "def no(*_): raise AssertionError('a tool took a lock')\n"
        "fcntl.flock = fcntl.lockf = no\n"
        "from pagedkv.cli import main\n"
        "assert main(['inspect', sys.argv[1]]) == 0 and main(['verify', sys.argv[1]]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(store)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_read_only_mount_is_read(store: Path, run: Run, tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting needs root")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    if subprocess.run(["mount", "--bind", store, mounted], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount")
    try:
        if subprocess.run(["mount", "-o", "remount,bind,ro", mounted], capture_output=True).returncode:
            pytest.skip("this machine does not remount")
        assert run("inspect", mounted, "--json").json["slots"]["live"] == 14
        assert run("verify", mounted).code == 0
        is_refused(run("verify", mounted, "--repair"), "read-only")
    finally:
        subprocess.run(["umount", mounted], check=True)


@pytest.mark.parametrize(("wreck", "state", "words"), [
    (lambda key: key.unlink(), "missing", "KEY is missing"),
    (lambda key: key.write_bytes(bytes(32)), "wrong", "not the key this store was made with"),
    (lambda key: key.write_bytes(b"short"), "wrong", "not the key"),
    (lambda key: (key.unlink(), key.symlink_to("/etc/hostname")), "unreadable", "it is a link"),
    (lambda key: (key.unlink(), os.mkfifo(key, 0o600)), "unreadable", "not a plain file"),
])  # fmt: skip
def test_without_its_key_the_headers_are_read_and_the_chains_are_not(
    store: Path, run: Run, wreck: object, state: str, words: str
) -> None:
    wreck(store / "KEY")  # type: ignore[operator]
    found = run("inspect", store, "--json").json
    assert found["key"] == state
    assert found["chains"] is None
    assert found["slots"]["live"] == 14
    assert [problem["reason"] for problem in found["problems"]] == ["key"]
    assert words in found["problems"][0]["detail"]
    assert f"not checked, {state} KEY" in run("inspect", store).out
    ran = run("verify", store)
    assert ran.code == 1
    assert "skipped  chain keys and parents" in ran.out


def test_each_kind_of_damage_has_a_name(store: Path, run: Run) -> None:
    damage(store, 1, 40)  # a bit of the header
    name = slot_bytes(store, 3)
    damage(store, 4, 0, name)  # another slot's bytes
    (store / "data.0001").unlink()  # slots 10..19
    os.truncate(store / "data.0002", 12288 + 100)  # slots 20..23, 21 is cut
    found = run("inspect", store, "--json").json
    slots = {state: number for state, number in found["slots"].items() if number}
    assert slots == {"live": 8, "header": 1, "misplaced": 1, "lost": 12, "empty": 1, "short": 1}
    assert [problem["reason"] for problem in found["problems"]] == ["segment", "segment"]
    assert found["chains"] == {"whole_blocks": 3, "prefixes": 2, "orphans": 5, "doubled": 0, "wrong_key": 0}


def test_a_file_cut_within_a_header_is_short_there(store: Path, run: Run) -> None:
    """All that names the block is still there; the sum that would vouch for it is not."""
    os.truncate(store / "data.0000", 9 * SLOT_BYTES + 2048)
    slots = run("inspect", store, "--json").json["slots"]
    assert (slots["live"], slots["short"], slots["lost"]) == (13, 1, 0)
    assert run("verify", store, "--json").json["wrong"] == {"short": [9]}


def test_a_generation_that_was_never_given_is_no_block(store: Path, run: Run) -> None:
    """As after SUPER was put back from an older copy of the directory.

    A tier takes no such record either.
    """
    state = parse_super((store / "SUPER").read_bytes()[:4096])
    assert state is not None
    (store / "SUPER").write_bytes(2 * pack_super(replace(state, next_generation=9)))
    assert run("inspect", store, "--json").json["slots"]["generation"] == 6
    assert run("verify", store, "--json").json["wrong"] == {"generation": [8, 9, 10, 11, 12, 13]}
    with open_tier(store) as tier:
        assert [found.block for found in tier.records()] == list(range(8))


def test_another_store_s_blocks_are_misplaced(store: Path, tmp_path: Path, run: Run) -> None:
    with open_tier(tmp_path / "other") as tier:
        write(tier, 16, chain(tier.secret, "a", 1))
    damage(store, 16, 0, slot_bytes(tmp_path / "other", 16))
    assert run("inspect", store, "--json").json["slots"]["misplaced"] == 1


def test_purged_blocks_are_told_from_live_ones(tmp_path: Path, run: Run) -> None:
    """A purge that was on record before its tombstones were written.

    Its intact headers count no more.
    """
    path = tmp_path / "kv"
    with open_tier(path) as tier:
        write(tier, 0, chain(tier.secret, "a", 4))
        write(tier, 4, chain(tier.secret, "b", 3))
        kept = [slot_bytes(path, slot) for slot in range(4)]
        tier.purge(pk.Namespace(tenant="a").digest())
        shutil.copytree(path, tmp_path / "crashed")
    for slot, old in enumerate(kept):
        damage(tmp_path / "crashed", slot, 0, old)
    found = run("inspect", tmp_path / "crashed", "--json").json
    assert found["slots"]["purged"] == 4
    assert found["slots"]["live"] == 3
    assert [purge["namespace"] for purge in found["superblock"]["purges"]] == [pk.Namespace(tenant="a").digest().hex()]
    assert found["superblock"]["clean"] is False
    assert found["open_by"] is None
    ran = run("verify", tmp_path / "crashed")
    assert ran.code == 0
    assert "useless  purged     4 slots: 0, 1, 2, 3" in ran.out


def test_a_damaged_copy_of_the_superblock_is_a_problem_and_two_are_the_end(store: Path, run: Run) -> None:
    data = (store / "SUPER").read_bytes()
    (store / "SUPER").write_bytes(data[:4096] + b"x" + data[4097:])
    found = run("inspect", store, "--json").json
    assert found["problems"] == [{"reason": "superblock", "detail": "copy 1 of SUPER is damaged"}]
    assert found["slots"]["live"] == 14
    (store / "SUPER").write_bytes(b"y" + data[1:4096] + b"x" + data[4097:])
    is_refused(run("inspect", store), "both copies")


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["verify", "--repair"]])
def test_what_is_no_cache_directory_is_refused_in_one_line(tmp_path: Path, run: Run, command: list[str]) -> None:
    is_refused(run(*command, tmp_path / "nowhere"), "nowhere", "No such file")
    empty = tmp_path / "empty"
    empty.mkdir()
    is_refused(run(*command, empty), "not a cache directory", "SUPER")
    assert not list(empty.iterdir())
    (empty / "SUPER").mkdir()
    is_refused(run(*command, empty), "SUPER", "not a plain file")
    (tmp_path / "file").write_text("x")
    is_refused(run(*command, tmp_path / "file"), "not a directory")
    (tmp_path / "link").symlink_to(empty)
    is_refused(run(*command, tmp_path / "link"), "links are not followed")
    is_refused(run(*command, tmp_path / ("a" * 300)), "too long")


@pytest.mark.parametrize("content", [b"", b"short", bytes(8192), b"\xff" * 8192, b"PGKVSB\r\n" + bytes(9000)])
def test_a_foreign_super_is_refused(tmp_path: Path, run: Run, content: bytes) -> None:
    (tmp_path / "SUPER").write_bytes(content)
    is_refused(run("inspect", tmp_path), "SUPER", "damaged")


def test_a_directory_that_may_not_be_read_is_refused(store: Path, run: Run) -> None:
    if os.geteuid() != 0:
        store.chmod(0)
        is_refused(run("inspect", store), "Permission denied")
        store.chmod(0o700)
        return
    script = (
        "import os, sys\n"
        "from pagedkv.cli import main\n"
        "main(['inspect', '/nowhere'])\n"  # what is imported when it is first used is imported as root
        "os.setuid(65534)\n"
        "sys.exit(main(['inspect', sys.argv[1]]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(store)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 2
    assert "Permission denied" in done.stderr.splitlines()[1]


@pytest.mark.parametrize("arguments", [["inspect"], ["verify"], ["inspect", "a", "b"], ["inspect", "--repair", "a"]])
def test_bad_options_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from pagedkv.cli import main

    try:
        code: Any = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupt_is_130_and_leaves_nothing(store: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkv.tools.store import command

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before, opened = snapshot(store), set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(command, "survey", interrupted)
    monkeypatch.setattr(command, "verify", interrupted)
    for words in (["inspect"], ["verify", "--json"]):
        ran = run(*words, store)
        assert (ran.code, ran.out, ran.err) == (130, "", "pagedkv: interrupted\n")
    assert snapshot(store) == before
    assert len(os.listdir("/proc/self/fd")) == len(opened)


def test_a_superblock_that_lies_about_its_size_costs_no_time_and_no_memory(store: Path, run: Run) -> None:
    """Intact sums, as an attacker writes them, over two thousand million slots.

    The slots are in one file or in one file each.
    """
    state = parse_super((store / "SUPER").read_bytes()[:4096])
    assert state is not None
    for segment_slots, words in ((2**31 - 1, "has 122880 bytes instead of"), (65536, "more files are missing, cut")):
        geometry = replace(state.geometry, num_blocks=2**31 - 1, segment_slots=segment_slots)
        (store / "SUPER").write_bytes(2 * pack_super(replace(state, geometry=geometry)))
        found = run("inspect", store, "--json").json
        assert any(words in problem["detail"] for problem in found["problems"])
        assert found["slots"]["lost"] >= 2**31 - 1 - NUM_BLOCKS
        assert run("verify", store).code == 1
    geometry = replace(state.geometry, num_blocks=2**31 - 1, segment_slots=1)
    (store / "SUPER").write_bytes(2 * pack_super(replace(state, geometry=geometry)))
    is_refused(run("inspect", store), "speaks of 2147483647 files")


def test_too_many_files_for_the_process_is_said(tmp_path: Path, run: Run) -> None:
    with open_tier(tmp_path / "kv", num_blocks=60, segment_bytes=1):
        pass
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        ran = run("inspect", tmp_path / "kv")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    is_refused(ran, "60 files", "ulimit -n")
