"""``pagedkv verify``.

It finds exactly what a tier would not serve, and a repair takes away nothing else.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagedkv._core.chain_key import chain_key
from pagedkv.cache.records import whole_prefixes
from pagedkv.errors import PagedKVError
from pagedkv.tiers import DiskTier, Record
from pagedkv.tiers.disk.segments import Segments
from pagedkv.tiers.disk.tier import StoredBlock
from pagedkv.tools.store import verify as verify_module
from pagedkv.tools.store.reader import StoreReader
from pagedkv.tools.store.scan import ChainBuilder, batches
from pagedkv.tools.store.verify import verify
from tests.tools.conftest import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    NUM_BLOCKS,
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
DIR: 24 slots, 13 blocks (63.5 KiB)
wrong    superblock copy 0 of SUPER is damaged
wrong    payload    slot 2
wrong    header     slot 9
useless  orphan     9 slots: 3, 4, 5, 6, 7, 10, 11, 12, 13
something is wrong
"""
REPAIRED = """\
DIR: 24 slots, 13 blocks (63.5 KiB)
wrong    superblock copy 0 of SUPER is damaged
wrong    payload    slot 2
wrong    header     slot 9
useless  orphan     9 slots: 3, 4, 5, 6, 7, 10, 11, 12, 13
repair   rewrote copy 0 of SUPER
repair   buried 1 of payload
repair   buried 9 of orphan
repair   buried 1 of header
something was wrong
"""


def served(path: Path) -> dict[bytes, np.ndarray]:
    """What a tier that opens the directory serves, by key."""
    with open_tier(path) as tier:
        found = list(tier.records())
        room = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        slots = np.array([stored.block for stored in found], np.int32)
        hit = tier.read(slots, [stored.record for stored in found], room, slots)
    return {stored.record.key: room[stored.block].copy() for stored, ok in zip(found, hit) if ok}


def wreck(store: Path) -> None:
    damage(store, 2, 4096 + BLOCK_BYTES - 1)
    damage(store, 9, 300)
    data = (store / "SUPER").read_bytes()
    (store / "SUPER").write_bytes(b"x" + data[1:])


def test_a_store_that_is_whole_is_clean(store: Path, run: Run) -> None:
    ran = run("verify", store)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{store}: 24 slots, 14 blocks (68.4 KiB)\nnothing is wrong\n"
    assert run("verify", store, "--json").json == {
        "ok": True, "path": str(store), "num_slots": 24, "blocks": 14, "num_bytes": 14 * BLOCK_BYTES, "wrong": {},
        "useless": {}, "problems": [], "changed": 0, "chains_checked": True, "repaired": None,
    }  # fmt: skip


def test_what_is_wrong_is_listed_by_reason_and_slot(store: Path, run: Run) -> None:
    wreck(store)
    ran = run("verify", store)
    assert ran.code == 1
    assert ran.out.replace(str(store), "DIR") == GOLDEN
    found = run("verify", store, "--json")
    assert found.code == 1
    assert found.json == {
        "ok": False, "path": str(store), "num_slots": 24, "blocks": 13, "num_bytes": 13 * BLOCK_BYTES,
        "wrong": {"payload": [2], "header": [9]}, "useless": {"orphan": [3, 4, 5, 6, 7, 10, 11, 12, 13]},
        "problems": [{"reason": "superblock", "detail": "copy 0 of SUPER is damaged"}], "changed": 0,
        "chains_checked": True, "repaired": None,
    }  # fmt: skip


def test_a_repair_buries_what_is_wrong_and_touches_nothing_else(store: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(store, tmp_path / "before")
    before = served(tmp_path / "before")
    wreck(store)
    kept = [slot_bytes(store, slot) for slot in (0, 1, 8)]
    ran = run("verify", store, "--repair")
    assert ran.code == 1
    assert ran.out.replace(str(store), "DIR") == REPAIRED
    assert [slot_bytes(store, slot) for slot in (0, 1, 8)] == kept
    assert run("verify", store).code == 0
    assert run("verify", store, "--repair", "--json").json["repaired"] == []
    after = served(store)
    assert len(after) == 3
    assert all(np.array_equal(after[key], before[key]) for key in after)
    found = run("inspect", store, "--json").json
    assert found["slots"] | {"live": 3, "tombstone": 12, "empty": 9} == found["slots"]
    assert found["superblock"]["clean"] is True
    assert found["superblock"]["next_generation"] == 16


def test_a_repair_keeps_out_and_is_kept_out_by_the_lock(store: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tier(store) as tier:
        before = snapshot(store)
        is_refused(run("verify", store, "--repair"), "in use by", str(os.getpid()))
        assert snapshot(store) == before
        assert tier.stats().state == "ok"
    held = []

    def while_repairing(*arguments: object) -> object:
        with open(store / "LOCK", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        return verify(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("pagedkv.tools.store.repair.verify", while_repairing)
    assert run("verify", store, "--repair").code == 0
    assert held == [True]


@pytest.mark.parametrize(("harm", "word"), [
    (lambda store: (store / "KEY").unlink(), "KEY"),
    (lambda store: (store / "data.0001").unlink(), "data.0001"),
    (lambda store: os.truncate(store / "data.0002", 5), "data.0002"),
    (lambda store: store.chmod(0o755), "chmod 700"),
])  # fmt: skip
def test_a_repair_refuses_what_a_tier_refuses(store: Path, run: Run, harm: object, word: str) -> None:
    harm(store)  # type: ignore[operator]
    assert run("verify", store).code == 1
    slots = [path.read_bytes() for path in sorted(store.glob("data.*"))]
    is_refused(run("verify", store, "--repair"), word)
    assert [path.read_bytes() for path in sorted(store.glob("data.*"))] == slots


@pytest.mark.parametrize("harm", [
    lambda store: store.chmod(0o750),
    lambda store: (store / "KEY").chmod(0o604),
    lambda store: (store / "SUPER").chmod(0o640),
    lambda store: (store / "LOCK").chmod(0o622),
    lambda store: (store / "data.0001").chmod(0o660),
    lambda store: (store / "KEY").unlink(),
    lambda store: (store / "KEY").write_bytes(bytes(33)),
    lambda store: (store / "SUPER").write_bytes(bytes(8192)),
    lambda store: ((store / "LOCK").unlink(), (store / "LOCK").symlink_to("KEY")),
    lambda store: ((store / "LOCK").unlink(), (store / "LOCK").mkdir()),
    lambda store: ((store / "LOCK").unlink(), os.mkfifo(store / "LOCK", 0o600)),
    lambda store: (store / "data.0000").rename(store / "data.0003"),
    lambda store: (store / "data.0003").touch(0o600),
    lambda store: os.truncate(store / "data.0001", 10 * SLOT_BYTES + 1),
    lambda store: os.truncate(store / "data.0001", 10 * SLOT_BYTES - 1),
    lambda store: os.truncate(store / "data.0001", 0),
    lambda store: (store / "data.0001").symlink_to((store / "data.0001").rename(store.parent / "elsewhere")),
])  # fmt: skip
def test_what_a_tier_refuses_is_never_called_clean(store: Path, run: Run, harm: Callable[[Path], object]) -> None:
    harm(store)
    assert run("verify", store).code in (1, 2)
    with pytest.raises(PagedKVError):
        open_tier(store)


def test_a_file_of_another_user_is_wrong(store: Path, run: Run) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    os.chown(store / "data.0002", 65534, -1)
    ran = run("verify", store)
    assert ran.code == 1
    assert "wrong    owner      data.0002 belongs to user 65534, the directory to 0" in ran.out


def test_every_damaged_byte_is_found_and_only_its_slot(store: Path) -> None:
    """The bytes are in every part of a slot.

    Identity, tokens, time, sums, padding, the header's own sum, and payload.
    """
    rng = np.random.default_rng(7)
    header = [
        0,
        4,
        6,
        8,
        16,
        24,
        32,
        48,
        80,
        112,
        144,
        176,
        208,
        212,
        216,
        224,
        239,
        240,
        248,
        280,
        319,
        320,
        2000,
        4095,
    ]
    places = [*header, 4096, 4096 + BLOCK_BYTES - 1, *rng.integers(4096, 4096 + BLOCK_BYTES, 20).tolist()]
    for at in places:
        damage(store, 5, at)
        with StoreReader(store) as reader:
            found = verify(reader, lambda num_bytes: None)
        assert [slot for slots in found.wrong.values() for slot in slots] == [5], f"byte {at}"
        damage(store, 5, at)
    damage(store, 5, 4096 + BLOCK_BYTES)  # the payload's padding to a whole page means nothing
    with StoreReader(store) as reader:
        assert verify(reader, lambda num_bytes: None).ok


@pytest.mark.parametrize("seed", range(12))
def test_what_verify_finds_right_is_what_a_tier_serves(store: Path, tmp_path: Path, run: Run, seed: int) -> None:
    """Random damage: flipped bits, slots copied over each other, zeros, noise.

    Checked before and after a repair.
    """
    rng = np.random.default_rng(seed)
    for _ in range(int(rng.integers(1, 6))):
        slot, kind = int(rng.integers(NUM_BLOCKS)), rng.integers(4)
        if kind == 0:
            damage(store, slot, int(rng.integers(4096 + BLOCK_BYTES)))
        elif kind == 1:
            damage(store, slot, 0, slot_bytes(store, int(rng.integers(NUM_BLOCKS))))
        else:
            size = int(rng.choice([512, 4096]))
            at = int(rng.integers((SLOT_BYTES - size) // 512 + 1)) * 512
            damage(store, slot, at, rng.bytes(size) if kind == 2 else bytes(size))
    shutil.copytree(store, tmp_path / "copy")
    with StoreReader(store) as reader:
        found = verify(reader, lambda num_bytes: None)
    bad = {slot for slots in found.wrong.values() for slot in slots}
    with open_tier(tmp_path / "copy") as tier:
        records = list(tier.records())
        room = np.zeros((len(records), BLOCK_BYTES), np.uint8)
        slots = np.array([stored.block for stored in records], np.int32)
        hit = tier.read(slots, [stored.record for stored in records], room, np.arange(len(records), dtype=np.int32))
    doubled = set(found.useless.get("doubled", ()))
    assert {stored.block for stored, ok in zip(records, hit) if ok} >= _alive(store) - bad - doubled, seed
    assert not {stored.block for stored, ok in zip(records, hit) if ok} & bad, seed
    run("verify", store, "--repair")
    assert run("verify", store).code == 0, seed
    before = {stored.record.key: room[i] for i, stored in enumerate(records) if hit[i]}
    after = served(store)
    assert after.keys() <= before.keys(), seed
    assert all(np.array_equal(content, before[key]) for key, content in after.items()), seed


def _alive(store: Path) -> set[int]:
    """Slots whose headers a tier would take."""
    with StoreReader(store) as reader:
        return {int(batch.slots[i]) for batch in batches(reader, None) for i in batch.records}


def test_a_block_under_another_key_is_wrong(tmp_path: Path, run: Run) -> None:
    """Every sum is right; only the chain key tells."""
    with open_tier(tmp_path / "kv") as tier:
        records = chain(tier.secret, "a", 3)
        forged = Record(bytes(32), records[1].parent, records[1].namespace, records[1].tokens)
        write(tier, 0, [records[0], forged, records[2]])
    found = run("verify", tmp_path / "kv", "--json").json
    assert found["wrong"] == {"wrong_key": [1]}
    assert found["useless"] == {"orphan": [2]}


def test_an_older_copy_of_a_block_is_of_no_use_and_not_wrong(store: Path, run: Run) -> None:
    with open_tier(store) as tier:
        old = slot_bytes(store, 3)
        tier.invalidate([3])
        write(tier, 20, [chain(tier.secret, "a", 4)[3]])
    damage(store, 3, 0, old)  # its tombstone never reached the disk
    found = run("verify", store, "--json").json
    assert found["ok"] is True
    assert found["useless"] == {"doubled": [3]}
    assert run("inspect", store, "--json").json["chains"]["doubled"] == 1


def test_a_slot_that_changes_between_two_looks_is_not_wrong(
    store: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier that has the store open writes the slot anew while it is checked."""
    with open_tier(store) as tier:
        whole = verify_module._wrong_payloads

        def meanwhile(*arguments: object) -> dict[int, str]:
            write(tier, 4, chain(tier.secret, "b", 1, first_token=500))
            return whole(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(verify_module, "_wrong_payloads", meanwhile)
        ran = run("verify", store)
    assert "changed  1 slot while being read" in ran.out
    assert ran.code == 0
    damage(store, 4, 4096)
    monkeypatch.setattr(verify_module, "_wrong_payloads", whole)
    with open_tier(store):
        assert run("verify", store).code == 1  # it does not change, so it is wrong


def test_short_shards_are_checked_too(tmp_path: Path, run: Run) -> None:
    """Shards of 100 bytes are summed another way than long ones."""
    path = tmp_path / "kv"
    with DiskTier(path, 4, 400, fingerprint=bytes(32), block_tokens=BLOCK_TOKENS, shards=4) as tier:
        write(tier, 0, chain(tier.secret, "a", 3))
    assert run("verify", path).code == 0
    with open(path / "data.0000", "r+b") as file:
        file.seek(8192 + 4096 + 399)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 128]))
    assert run("verify", path, "--json").json["wrong"] == {"payload": [1]}


def test_batches_do_not_change_the_verdict(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wreck(store)
    ticks: list[int] = []
    verdicts = []
    for size in (1, 3 * SLOT_BYTES, 64 << 20):
        monkeypatch.setattr(verify_module, "BATCH_BYTES", size)
        ticks.clear()
        with StoreReader(store) as reader:
            verdicts.append(verify(reader, ticks.append).to_dict())
            assert sum(ticks) == NUM_BLOCKS * 4096 + 13 * BLOCK_BYTES <= verify_module.total_bytes(reader)
    assert verdicts[0] == verdicts[1] == verdicts[2]


def test_chains_are_sorted_as_a_cache_does_that_opens_the_store() -> None:
    """Random forests against the cache's own rules.

    They have gaps, branches, forged keys, and parents of another namespace.
    """
    secret = bytes(range(16))
    for seed in range(200):
        rng = np.random.default_rng(seed)
        paths = [chain(secret, str(rng.choice(["a", "b"])), int(rng.integers(1, 7))) for _ in range(3)]
        paths += [_branch(secret, paths[0][:2], int(rng.integers(1, 4)))]
        paths += [_branch(secret, paths[0][:1], 2, bytes(32))]
        blocks = list({record.key: record for path in paths for record in path}.values())
        blocks = [block for block in blocks if rng.random() < 0.9]
        if blocks and rng.random() < 0.3:
            victim = blocks[0]
            blocks[0] = Record(victim.key, victim.parent, victim.namespace, victim.tokens + 1)
        blocks = [blocks[i] for i in rng.permutation(len(blocks))]
        runs, orphans = whole_prefixes([StoredBlock(i, block, i + 1) for i, block in enumerate(blocks)], secret)
        builder = ChainBuilder(secret)
        for i, block in enumerate(blocks):
            builder.add(i, i + 1, block)
        found = builder.result()
        useless = [slot for slots in orphans.values() for slot in slots]
        assert sorted([*found.orphans, *found.wrong_key, *found.doubled]) == sorted(useless), seed
        assert found.leaves == len(runs) - len({run.parent for run in runs} - {-1}), seed
        assert found.whole == sum(len(run.found) for run in runs), seed


def _branch(secret: bytes, path: list[Record], length: int, namespace: bytes = b"") -> list[Record]:
    """Blocks that go on from the last of `path`, in its namespace or another."""
    found: list[Record] = []
    for number in range(length):
        last = [*path, *found][-1]
        digest = namespace or last.namespace
        tokens = np.full(BLOCK_TOKENS, 9000 + number, np.int32)
        found.append(Record(chain_key(secret, digest, last.key, tokens), last.key, digest, tokens))
    return found


def test_chains_go_on_when_keys_form_a_circle() -> None:
    """Making such a circle takes breaking the hash.

    A tool that would hang on it would be worse than the damage.
    """
    secret = bytes(16)
    builder = ChainBuilder(secret)
    builder._slots = {b"a": (1, 0), b"b": (2, 1)}
    builder._before = {b"a": (b"b", b"ns"), b"b": (b"a", b"ns")}
    found = builder.result()
    assert (found.whole, found.leaves, found.orphans) == (0, 0, [0, 1])


def test_a_long_chain_needs_no_recursion(tmp_path: Path, run: Run) -> None:
    with DiskTier(tmp_path / "kv", 3000, 8, fingerprint=bytes(32), block_tokens=BLOCK_TOKENS) as tier:
        records = chain(tier.secret, "a", 3000)
        tier.write(
            np.arange(3000, dtype=np.int32), records, np.zeros((3000, 8), np.uint8), np.arange(3000, dtype=np.int32)
        )
    found = run("inspect", tmp_path / "kv", "--json").json
    assert found["chains"] == {"whole_blocks": 3000, "prefixes": 1, "orphans": 0, "doubled": 0, "wrong_key": 0}


def test_an_interrupted_repair_leaves_the_store_usable_and_unlocked(
    store: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    wreck(store)
    monkeypatch.setattr("pagedkv.tools.store.repair._bury", interrupted)
    ran = run("verify", store, "--repair")
    assert (ran.code, ran.out, ran.err) == (130, "", "pagedkv: interrupted\n")
    monkeypatch.undo()
    assert len(served(store)) == 12
    assert run("verify", store, "--repair").code == 1
    assert run("verify", store).code == 0


def test_a_full_disk_is_said_and_not_hidden(store: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wreck(store)
    monkeypatch.setattr(Segments, "write_headers", lambda self, slots, headers: np.full(slots.size, -28, np.int64))
    ran = run("verify", store, "--repair")
    assert ran.code == 1
    assert "repair   could not bury 11: No space left on device" in ran.out


def test_broken_pipes_are_quiet(store: Path) -> None:
    """``pagedkv verify DIR | head -c 0``"""
    line = f"{sys.executable} -m pagedkv inspect {store} | true"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
