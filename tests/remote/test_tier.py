"""The remote tier over real servers: a block comes as it was stored, or is a counted miss."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.tiers import Name
from pagedkv.tiers.remote.store import Unreachable
from pagedkv.tiers.remote.tier import PATIENCE, RemoteTier
from pagedkv.tiers.remote.valkey import ValkeyStore
from pagedkv.tiers.remote.value import HEAD_BYTES, Values
from tests.remote.servers import Link, Server, server

BLOCK = 64 << 10
COUNT = 24
SECRET = b"a secret of ours"
NAMESPACE = bytes(range(32))
ORDER = np.arange(COUNT, dtype=np.int32)


def names(count: int = COUNT, salt: int = 0, namespace: bytes = NAMESPACE) -> list[Name]:
    rng = np.random.default_rng([7, salt])
    return [Name(rng.bytes(32), namespace) for _ in range(count)]


def contents(salt: int = 0, size: int = BLOCK) -> NDArray[np.uint8]:
    return np.random.default_rng([8, salt]).integers(0, 256, (COUNT, size), np.uint8)


def make(
    url: str,
    *,
    seal: bool = False,
    secret: bytes = SECRET,
    fingerprint: bytes = b"f" * 32,
    shard: tuple[int, int] = (0, 1),
    **limits: float,
) -> RemoteTier:
    """A tier that waits as long as a busy machine takes, unless a test says otherwise."""
    values = Values(secret, fingerprint, BLOCK, seal=seal, shard=shard)
    limits = {"lookup_s": 30.0, "read_s": 30.0, "write_s": 30.0, **limits}
    return RemoteTier(ValkeyStore(url, connect_s=30.0), values, 64, where=url.split("://", 1)[0], **limits)


def read(tier: RemoteTier, wanted: list[Name] | None = None) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    back = np.full((COUNT, BLOCK), 1, np.uint8)
    wanted = names() if wanted is None else wanted
    order = ORDER[: len(wanted)]
    return tier.read(order, wanted, back, order), back


def served(tier: RemoteTier, out: NDArray[np.uint8] | None = None) -> int:
    """Blocks that come; every one of them is right."""
    ok, back = read(tier)
    assert np.array_equal(back[ok], (contents() if out is None else out)[ok]), "wrong bytes"
    return int(ok.sum())


@pytest.fixture
def running() -> Iterator[Server]:
    with server() as found:
        yield found


@pytest.fixture(params=[False, True], ids=["sum", "seal"])
def seal(request: pytest.FixtureRequest) -> bool:
    if request.param:
        pytest.importorskip("cryptography", minversion="46")
    return bool(request.param)


@pytest.fixture
def tier(running: Server, seal: bool) -> Iterator[RemoteTier]:
    found = make(running.unix, seal=seal)
    assert found.write(ORDER, names(), contents(), ORDER).all()
    yield found
    found.close()


def test_blocks_come_back_and_a_second_writer_sends_nothing(tier: RemoteTier) -> None:
    assert served(tier) == COUNT
    assert tier.write(ORDER, names(), contents(), ORDER).all()
    stats = tier.stats()
    assert (stats.written_blocks, stats.deduplicated, stats.read_blocks) == (COUNT, COUNT, COUNT)
    assert tier.lookup(NAMESPACE, [name.key for name in names()]) == COUNT


@pytest.mark.parametrize(
    "other",
    [{"secret": b"another secret!!"}, {"fingerprint": b"g" * 32}, {"shard": (0, 2)}, {"shard": (1, 2)}],
    ids=["secret", "fingerprint", "one shard", "another shard"],
)
def test_another_secret_model_or_shard_finds_nothing(running: Server, tier: RemoteTier, seal: bool, other: Any) -> None:
    stranger = make(running.unix, seal=seal, **other)
    assert stranger.lookup(NAMESPACE, [name.key for name in names()]) == 0
    assert served(stranger) == 0
    assert stranger.stats().misses == {"absent": COUNT}
    stranger.close()


def test_another_namespace_and_the_other_mode_find_nothing(running: Server, tier: RemoteTier, seal: bool) -> None:
    pytest.importorskip("cryptography", minversion="46")
    assert tier.lookup(bytes(32), [name.key for name in names()]) == 0
    other = make(running.unix, seal=not seal)
    assert other.lookup(NAMESPACE, [name.key for name in names()]) == 0
    other.close()
    same = make(running.unix, seal=seal)
    assert served(same) == COUNT
    same.close()


def stored_keys(seal: bool) -> list[str]:
    values = Values(SECRET, b"f" * 32, BLOCK, seal=seal)
    return [values.key(name.namespace, name.key) for name in names()]


def test_every_changed_byte_of_a_head_is_refused(running: Server, tier: RemoteTier, seal: bool) -> None:
    client, key = running.client(), stored_keys(seal)[0]
    value = client.get(key)
    for at in range(HEAD_BYTES):
        changed = bytearray(value)
        changed[at] ^= 1 << (at % 8)
        client.set(key, bytes(changed))
        ok, _ = read(tier, names()[:1])
        assert not ok.any(), at
        assert not client.exists(key), "a wrong value stays, and no writer replaces it"
    assert sum(tier.stats().misses.values()) == HEAD_BYTES


@pytest.mark.slow
def test_every_changed_byte_of_a_value_is_refused(running: Server, seal: bool) -> None:
    values = Values(SECRET, b"f" * 32, 1000, seal=seal)
    tier = RemoteTier(ValkeyStore(running.unix), values, 64, where="here")
    arena = np.random.default_rng(0).integers(0, 256, (2, 1000), np.uint8)
    one = np.zeros(1, np.int32)
    tier.write(one, names()[:1], arena, one)
    client, key = running.client(), values.key(NAMESPACE, names()[0].key)
    value = client.get(key)
    for at in range(len(value)):
        changed = bytearray(value)
        changed[at] ^= 1 + at % 255
        client.set(key, bytes(changed))
        assert not tier.read(one, names()[:1], arena, one + 1).any(), at
    tier.close()


def test_flipped_payloads_are_misses_by_the_right_name(running: Server, tier: RemoteTier, seal: bool) -> None:
    client = running.client()
    for key in stored_keys(seal)[::2]:
        old = client.getrange(key, HEAD_BYTES + 12345, HEAD_BYTES + 12345)
        client.setrange(key, HEAD_BYTES + 12345, bytes([old[0] ^ 4]))
    assert served(tier) == COUNT // 2
    assert tier.stats().misses == {"seal" if seal else "sum": COUNT // 2}


def test_exchanged_replayed_and_cut_values_are_misses_by_name(running: Server, tier: RemoteTier, seal: bool) -> None:
    client, keys = running.client(), stored_keys(seal)
    values = [client.get(key) for key in keys]
    for number, key in enumerate(keys[:8]):
        client.set(key, values[(number + 1) % 8])  # whole, right values of other keys
    for key, value in zip(keys[8:16], values[8:16]):
        client.set(key, value[:-1])
    for key in keys[16:20]:
        client.set(key, b"")
    assert served(tier) == 4
    assert tier.stats().misses == {"key": 8, "length": 12}
    for key, value in zip(keys, values):
        client.set(key, value)  # an old value of the same key is the same content
    assert served(tier) == COUNT


def test_a_value_of_another_version_or_mode_is_a_miss(running: Server, tier: RemoteTier, seal: bool) -> None:
    client, keys = running.client(), stored_keys(seal)
    for place, what in ((4, "format"), (5, "integrity"), (6, "format"), (127, "format")):
        client.setrange(keys[place % COUNT], place, b"\x07")
        before = tier.stats().misses.get(what, 0)
        read(tier)
        assert tier.stats().misses[what] == before + 1


def test_a_purge_removes_a_namespace_and_no_other(running: Server, tier: RemoteTier) -> None:
    other = names(salt=1, namespace=b"o" * 32)
    tier.write(ORDER, other, contents(1), ORDER)
    assert tier.purge(NAMESPACE) == COUNT
    assert served(tier) == 0
    ok, back = read(tier, other)
    assert ok.all()
    assert np.array_equal(back, contents(1))
    slow = make(running.unix, purge_s=0.1)
    served(slow)  # it has a connection
    running.pause()
    with pytest.raises(TierError, match="did not confirm"):
        slow.purge(NAMESPACE)
    running.go_on()
    slow.close()


# ---- servers and links that fail


def test_a_dead_server_costs_misses_and_three_tries(running: Server, tier: RemoteTier) -> None:
    running.kill()
    for _ in range(20):
        assert served(tier) == 0
    stats = tier.stats()
    assert stats.state == "off"
    assert sum(stats.failures.values()) <= PATIENCE + 2  # trials
    assert stats.refused_off >= 20 - PATIENCE - 2


def test_a_server_that_comes_back_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagedkv.tiers.remote"):
        with server() as first:
            tier = make(first.tcp)
            port = first.port
            first.kill()
            for _ in range(PATIENCE):
                assert served(tier) == 0
            assert tier.is_off
        with server(port=port):
            until = time.monotonic() + 30
            while not tier.write(ORDER, names(), contents(), ORDER).all():
                assert time.monotonic() < until, "it is not tried again"
                time.sleep(0.05)
            assert served(tier) == COUNT
            assert tier.stats().state == "ok"
        tier.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert "is off now" in said[0]
    assert "works again" in said[1]


@pytest.mark.parametrize("during", [False, True], ids=["before", "in the middle"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_goes_away_costs_misses(how: signal.Signals, during: bool, seal: bool) -> None:
    with server() as running:
        tier = make(running.unix, seal=seal, read_s=0.3)
        assert tier.write(ORDER, names(), contents(), ORDER).all()
        threading.Timer(0.002 * during, running.process.send_signal, [how]).start()
        if not during:
            time.sleep(0.05)
        got = served(tier)
        assert got <= COUNT
        assert during or got == 0
        running.go_on()
        tier.close()


def change(pieces: dict[int, Callable[[bytes], bytes]]) -> Callable[[int, bytes], bytes]:
    return lambda number, data: pieces.get(number, lambda piece: piece)(data)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-7], lambda data: data + data, lambda data: data[::-1], lambda data: b""],
    ids=["loses", "repeats", "turns around", "drops"],
)  # fmt: skip
@pytest.mark.parametrize("piece", [3, 5, 9])
def test_a_link_that_changes_bytes_costs_misses(
    running: Server, tier: RemoteTier, seal: bool, damage: Any, piece: int
) -> None:
    link = Link(running.port, mangle=change({piece: damage}))
    far = make(link.url, seal=seal, read_s=0.5)
    for _ in range(3):
        served(far)
    far.close()
    link.close()


def test_a_slow_link_serves_what_comes_in_time(running: Server, tier: RemoteTier, seal: bool) -> None:
    link = Link(running.port, bytes_per_s=2e6)
    far = make(link.url, seal=seal, read_s=0.3)
    assert served(far) < COUNT
    assert far.stats().misses.get("late")
    patient = make(link.url, seal=seal, read_s=30.0)
    assert served(patient) == COUNT
    for each in (far, patient):
        each.close()
    link.close()


def late_replies(running: Server, rounds: int) -> tuple[int, int]:
    """Reads with late answers, each followed by another read: how many of each were served."""
    tier = make(running.unix, read_s=0.02)
    out = contents()
    tier.write(ORDER, names(), out, ORDER)
    late = after = 0
    one = np.zeros(1, np.int32)
    for number in range(rounds):
        for step, is_late in ((0, True), (3, False)):
            which = (number + step) % COUNT
            back = np.full((1, BLOCK), 1, np.uint8)
            if is_late:
                running.pause()
                threading.Timer(0.022, running.go_on).start()
            ok = tier.read(one, names()[which : which + 1], back, one)
            assert not ok[0] or np.array_equal(back[0], out[which]), f"round {number}: another question's answer"
            late, after = (late + ok[0], after) if is_late else (late, after + ok[0])
            tier._circuit.learn(time.monotonic(), 1, 0)
    running.go_on()
    tier.close()
    return int(late), int(after)


def test_a_late_reply_never_answers_the_next_question(running: Server) -> None:
    late_replies(running, 40)


@pytest.mark.slow
def test_a_thousand_late_replies_answer_no_other_question(running: Server) -> None:
    late, after = late_replies(running, 1000)
    assert late + after > 0


def test_an_evicting_server_serves_the_rest() -> None:
    with server() as small:
        tier = make(small.unix)
        limit_to(small, 16)
        assert one_by_one(tier.write).all()
        back = np.zeros((COUNT, BLOCK), np.uint8)
        ok = one_by_one(tier.read, back)
        assert 0 < ok.sum() < COUNT
        assert np.array_equal(back[ok], contents()[ok])
        assert tier.stats().misses == {"absent": COUNT - int(ok.sum())}
        tier.close()


def limit_to(running: Server, blocks: int) -> None:
    """Room for so many blocks more; buffers of a call count, too: one block at a time."""
    client = running.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"] + blocks * BLOCK)


def one_by_one(call: Any, arena: NDArray[np.uint8] | None = None) -> NDArray[np.bool_]:
    """A read or write of all blocks, each in a call of its own."""
    rows = contents() if arena is None else arena
    return np.concatenate([call(ORDER[i : i + 1], names()[i : i + 1], rows, ORDER[i : i + 1]) for i in range(COUNT)])


def test_a_full_server_refuses_and_is_not_taken_for_dead() -> None:
    with server(policy="noeviction") as full:
        tier = make(full.unix)
        limit_to(full, 16)
        ok = one_by_one(tier.write)
        assert 0 < ok.sum() < COUNT
        assert tier.stats().refused == {"OOM": COUNT - int(ok.sum())}
        assert tier.stats().state == "ok"
        full.client().config_set("maxmemory", 0)
        assert served(tier) == ok.sum()
        tier.close()


def test_a_missing_key_is_not_asked_for_again_at_once(running: Server) -> None:
    tier = make(running.unix)
    keys = [name.key for name in names()]
    for _ in range(5):
        assert tier.lookup(NAMESPACE, keys) == 0
    assert (tier.stats().lookups, tier.stats().lookups_spared) == (1, 4)
    assert tier.lookup(NAMESPACE, keys, anew=True) == 0
    assert tier.stats().lookups == 2
    tier.write(ORDER[:3], names()[:3], contents(), ORDER[:3])
    assert tier.lookup(NAMESPACE, keys) == 3, "one's own write ends it"
    tier.close()


def test_a_lookup_ends_at_the_first_hole(running: Server) -> None:
    tier = make(running.unix)
    many = np.arange(64, dtype=np.int32) % COUNT
    tier.write(many[:10], names()[:10], contents(), many[:10])
    tier.write(many[11:20], names()[11:20], contents(), many[11:20])
    assert tier.lookup(NAMESPACE, [name.key for name in names()]) == 10
    tier.close()


def test_a_tier_that_cannot_be_reached_at_first_is_off_until_it_can() -> None:
    with server() as found:
        tier = make(found.unix)
        tier.unreachable_at_first(Unreachable("connect", "nothing there"))
        assert tier.is_off
        assert not tier.may_ask
        until = time.monotonic() + 30
        while not tier.may_ask:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert tier.write(ORDER, names(), contents(), ORDER).all()
        assert not tier.is_off
        tier.close()
