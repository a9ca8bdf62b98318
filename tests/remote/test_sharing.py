"""Caches that share a store: hits from another's work, with its bytes, and nothing else."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.cache.remote.claims import Claims
from pagedkv.cache.remote.sender import Asked, Sender
from pagedkv.core import Tier
from tests.remote.servers import Server, certificates, free_port, server

SPEC = pk.KVSpec(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_size=16, model="toy@1")
TABLE = np.random.default_rng(7).standard_normal((4096, 2, 16), dtype=np.float32)
SECRET = b"a secret of ours"
PATIENT = {"lookup_s": 30.0, "read_s": 30.0, "write_s": 30.0, "connect_s": 30.0}


def prompt_of(number: int, blocks: int = 20) -> NDArray[np.int32]:
    return np.random.default_rng([9, number]).integers(0, 4096, blocks * 16 + 5).astype(np.int32)


def open_cache(url: str, *, spec: pk.KVSpec = SPEC, memory: Any = None, **options: Any) -> pk.KVCache:
    names = {"secret", "seal", "shard", "write", "claims", "required", "min_blocks", "prefix", "max_queued", *PATIENT}
    names |= {"cluster", "insecure", "purge_s", "ca_file"}
    remote = {"secret": SECRET, **PATIENT, **{name: options.pop(name) for name in names & set(options)}}
    if "host_memory" in options or "device_memory" in options:
        memory = None
    else:
        memory = memory or pk.Blocks(200)
    return pk.KVCache(spec, memory=memory, remote=pk.Valkey(url, **remote), **options)


def run(
    cache: pk.KVCache, prompt: NDArray[np.int32], namespace: pk.Namespace | None = None, **options: Any
) -> dict[str, int]:
    """Compute a prompt's missing part, and check every byte; tokens by their origin."""
    shift = 0.0 if namespace is None else 1.0
    with cache.sequence(prompt, namespace, **options) as seq:
        hits = dict(seq.hit_tokens)
        with cache.step([seq]) as step:
            for layer in range(SPEC.num_layers):
                step.write(layer, TABLE[step.tokens % 4096] + layer + shift, TABLE[step.tokens % 4096] - layer)
        k, v = seq.gather()
        for layer in range(SPEC.num_layers):
            assert np.array_equal(k[layer], TABLE[prompt % 4096] + layer + shift), "wrong bytes"
            assert np.array_equal(v[layer], TABLE[prompt % 4096] - layer), "wrong bytes"
    return hits


def remote_stats(cache: pk.KVCache) -> dict[str, Any]:
    found = cache.stats().remote
    assert found is not None
    return dict(found)


def wait_for(is_so: Any, what: str) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.005)


def sent(cache: pk.KVCache, blocks: int) -> None:
    wait_for(lambda: remote_stats(cache)["written_blocks"] + remote_stats(cache)["deduplicated"] >= blocks, "not sent")


@pytest.fixture
def running() -> Iterator[Server]:
    with server() as found:
        yield found


def test_a_second_cache_finds_all_whole_blocks_and_writes_nothing(running: Server) -> None:
    prompt = prompt_of(1)
    with open_cache(running.unix) as first:
        assert run(first, prompt)["remote"] == 0
        assert first.publish(prompt) == 20
        first.check_integrity()
    with open_cache(running.tcp) as second:
        assert run(second, prompt) == {"device": 0, "remote": 320, "partial": 0}
        assert run(second, prompt) == {"device": 320, "remote": 0, "partial": 0}
        assert second.publish(prompt) == 20
        stats = remote_stats(second)
        assert (stats["written_blocks"], stats["read_blocks"], stats["claims"]) == (0, 20, 0)
        second.check_integrity()


def test_committed_blocks_are_sent_by_themselves_once(running: Server) -> None:
    with open_cache(running.unix) as cache:
        run(cache, prompt_of(1))
        sent(cache, 20)
        run(cache, prompt_of(1))
        run(cache, np.concatenate((prompt_of(1)[:320], prompt_of(2))))
        sent(cache, 40)
        assert remote_stats(cache)["deduplicated"] == 0, "blocks that were sent were handed out again"
    assert running.client().dbsize() == 40


def test_decoding_sends_each_block_as_it_is_full(running: Server) -> None:
    with open_cache(running.unix) as cache:
        with cache.sequence(prompt_of(1)) as seq:
            for _ in range(5 * 16):
                with cache.step([seq]) as step:
                    for layer in range(SPEC.num_layers):
                        step.write(layer, TABLE[step.tokens % 4096] + layer, TABLE[step.tokens % 4096] - layer)
                seq.append([7])
        wait_for(lambda: running.client().dbsize() == 25, "not every block was sent")
        assert remote_stats(cache)["deduplicated"] == 0
    with open_cache(running.unix) as other:
        whole = np.concatenate((prompt_of(1), np.full(80, 7, np.int32)))
        assert run(other, whole)["remote"] == 25 * 16


@pytest.mark.parametrize("write", ["all", "reused", "never"])
def test_when_blocks_are_sent(running: Server, write: str) -> None:
    with open_cache(running.unix, write=write) as cache:
        run(cache, prompt_of(1))
        run(cache, prompt_of(2))
        run(cache, prompt_of(2))
        expected = {"all": 40, "reused": 20, "never": 0}[write]
        if expected:
            sent(cache, expected)
        cache.close()
        assert running.client().dbsize() == expected


def test_sealed_blocks_are_found_with_the_secret_and_never_without(running: Server) -> None:
    pytest.importorskip("cryptography", minversion="46")
    prompt = prompt_of(3)
    with open_cache(running.unix, seal=True) as first:
        run(first, prompt)
        assert first.publish(prompt) == 20
    raw = b"".join(running.client().get(key) for key in running.client().keys("*"))
    assert (TABLE[prompt[:16] % 4096]).tobytes()[:64] not in raw
    with open_cache(running.unix, seal=True, secret=b"another secret!!") as stranger:
        assert run(stranger, prompt)["remote"] == 0
    with open_cache(running.unix) as plain:
        assert run(plain, prompt)["remote"] == 0
    with open_cache(running.unix, seal=True) as second:
        assert run(second, prompt)["remote"] == 320


def test_values_overwritten_without_the_secret_are_misses(running: Server) -> None:
    pytest.importorskip("cryptography", minversion="46")
    prompt = prompt_of(3)
    with open_cache(running.unix, seal=True) as first:
        run(first, prompt)
        first.publish(prompt)
    client = running.client()
    for number, key in enumerate(client.keys("*")):
        value = bytearray(client.get(key))
        value[128:] = np.random.default_rng(number).bytes(len(value) - 128)
        client.set(key, bytes(value))
    with open_cache(running.unix, seal=True) as second:
        assert run(second, prompt)["remote"] == 0
        assert remote_stats(second)["misses"]["seal"] > 0
        second.check_integrity()
        assert second.publish(prompt) == 20, "wrong values are not replaced"
    with open_cache(running.unix, seal=True) as third:
        assert run(third, prompt)["remote"] == 320


@pytest.mark.parametrize(
    "change",
    [
        {"secret": b"another secret!!"}, {"model": "toy@2"}, {"dtype": "float16"}, {"layout": "HND"}, {"shard": (0, 2)},
        {"prefix": "x"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_nothing_is_found_under_another_name(running: Server, change: dict[str, Any]) -> None:
    prompt = prompt_of(4)
    with open_cache(running.unix) as first:
        run(first, prompt)
        first.publish(prompt)
    of_spec = {name: value for name, value in change.items() if name in ("model", "dtype", "layout")}
    spec = dataclasses.replace(SPEC, **of_spec)
    options = {name: value for name, value in change.items() if name in ("secret", "shard", "prefix")}
    with open_cache(running.unix, spec=spec, **options) as other, other.sequence(prompt) as seq:
        assert seq.hit_tokens["remote"] == 0


def test_namespaces_share_nothing_and_a_purge_deletes_one(running: Server) -> None:
    prompt, one, two = prompt_of(5), pk.Namespace(tenant="one"), pk.Namespace(tenant="two")
    with open_cache(running.unix) as first:
        run(first, prompt, one)
        first.publish(prompt, one)
        run(first, prompt)
        first.publish(prompt)
    with open_cache(running.unix) as second:
        assert run(second, prompt, two)["remote"] == 0
        assert run(second, prompt, one)["remote"] == 320
        second.publish(prompt, two)
        second.purge(one)
        assert run(second, prompt, one)["remote"] == 0
    with open_cache(running.unix) as third:
        assert run(third, prompt, two)["remote"] == 320
        assert run(third, prompt)["remote"] == 320


def test_a_purge_that_the_store_does_not_confirm_says_so(running: Server) -> None:
    one = pk.Namespace(tenant="one")
    with open_cache(running.unix, purge_s=0.2) as cache:
        run(cache, prompt_of(1), one)
        cache.publish(prompt_of(1), one)
        running.kill()
        with pytest.raises(pk.TierError, match="remote store"):
            cache.purge(one)
        assert run(cache, prompt_of(1), one) == {"device": 0, "remote": 0, "partial": 0}


def test_the_second_request_for_a_prefix_waits_for_the_first_ones_transfer(running: Server) -> None:
    prompt = prompt_of(6, 60)
    with open_cache(running.unix) as first:
        run(first, prompt)
        first.publish(prompt)
    with open_cache(running.unix) as second:
        loads = [second.load(prompt) for _ in range(4)]
        for load in loads:
            assert load.wait() == 960
        for load in loads:
            load.cancel()
        assert remote_stats(second)["read_blocks"] == 60, "a block was read twice"
        second.check_integrity()


def test_eviction_at_the_store_in_the_middle_of_a_chain_serves_what_leads(running: Server) -> None:
    prompt = prompt_of(7)
    with open_cache(running.unix, write="never") as first:  # so that nothing is sent behind the deletion
        run(first, prompt)
        first.publish(prompt)
        names = first._shared.claims  # type: ignore[union-attr]
        tier = first._storage.remote  # type: ignore[attr-defined]
        digest = first._digest(None)
        keys = names.keys_from(prompt, digest, first.placement.acquire(prompt[:0])[0], 20)()
        client = running.client()
        client.delete(tier._values.key(digest, keys[11]))
    with open_cache(running.unix) as second:
        assert run(second, prompt)["remote"] == 11 * 16
        assert second.publish(prompt) == 20
    with open_cache(running.unix) as third:
        assert run(third, prompt)["remote"] == 320


def test_blocks_that_go_between_lookup_and_read_are_computed_and_not_asked_for_at_once(running: Server) -> None:
    prompt = prompt_of(8)
    with open_cache(running.unix) as first:
        run(first, prompt)
        first.publish(prompt)
    with open_cache(running.unix) as second:
        tier = second._storage.remote  # type: ignore[attr-defined]
        real = tier._store.get_into
        tier._store.get_into = lambda *given: (running.client().flushall(), real(*given))[1]
        assert run(second, prompt)["remote"] == 0
        tier._store.get_into = real
        assert remote_stats(second)["misses"] == {"absent": 20}
        with second.sequence(np.concatenate((prompt_of(8)[:160], prompt_of(9)))) as seq:
            assert seq.hit_tokens["device"] == 160
        second.check_integrity()


def test_a_decoder_waits_for_blocks_that_are_being_computed(running: Server) -> None:
    prompt = prompt_of(10)

    def prefill() -> None:
        time.sleep(0.2)
        with open_cache(running.unix) as first:
            run(first, prompt)
            first.publish(prompt)

    with open_cache(running.unix) as second:
        thread = threading.Thread(target=prefill)
        thread.start()
        assert run(second, prompt, await_remote_s=60.0)["remote"] == 320
        thread.join()
        began = time.monotonic()
        assert run(second, prompt_of(11), await_remote_s=0.1)["remote"] == 0
        assert time.monotonic() - began >= 0.1


def test_a_decoder_waits_for_the_last_blocks_as_for_the_first(running: Server) -> None:
    """Fewer than `min_blocks` may be missing in the end."""
    prompt = prompt_of(13)
    with open_cache(running.unix) as first, open_cache(running.unix, min_blocks=4) as second:
        run(first, prompt[: 18 * 16 + 1])
        first.publish(prompt[: 18 * 16 + 1])
        with second.load(prompt, await_remote_s=600.0) as load:
            wait_for(lambda: load.done() or remote_stats(second)["claims"] == 18, "the first blocks are not found")
            run(first, prompt)
            first.publish(prompt)
            assert load.wait(60) == 320


def test_disk_and_store_together_know_their_own_chains(running: Server, tmp_path: Path) -> None:
    prompt = prompt_of(12)
    disk = pk.Disk(str(tmp_path / "kv"), pk.Blocks(400), write="all")
    with open_cache(running.unix, disk=disk) as first:
        run(first, prompt)
        first.publish(prompt)
        first.checkpoint()
        run(first, prompt_of(13))
    with open_cache(running.unix, disk=disk) as second:
        hits = run(second, prompt)
        assert (hits["disk"], hits["remote"]) == (320, 0)
        second.check_integrity()
    with open_cache(running.unix) as third:
        assert run(third, prompt)["remote"] == 320
        assert run(third, prompt_of(13))["remote"] == 320
    small = pk.Disk(str(tmp_path / "small"), pk.Blocks(400), write="all")
    with open_cache(running.unix, disk=small, memory=pk.Blocks(40)) as fourth:
        for number in (12, 13, 12, 13, 14, 15, 12, 13):  # blocks from the store are demoted to the disk, never back
            run(fourth, prompt_of(number))
        ways = set(fourth.stats().moved_bytes)
        assert "disk_to_remote" not in ways
        fourth.check_integrity()


def test_a_namespace_quota_and_small_tiers_hold_beside_claims(running: Server) -> None:
    with open_cache(running.unix) as first:
        for number in range(20, 30):
            run(first, prompt_of(number))
            first.publish(prompt_of(number))
    with open_cache(running.unix, memory=pk.Blocks(45), claims=8) as second:
        for number in [*range(20, 30)] * 2:
            run(second, prompt_of(number))
            second.check_integrity()
        assert remote_stats(second)["read_blocks"] > 0
        assert second.stats().blocks["remote"]["capacity"] == 8


def test_a_store_that_dies_costs_nothing_but_hits(running: Server) -> None:
    with open_cache(running.unix, read_s=0.5, write_s=0.5, lookup_s=0.5) as cache:
        run(cache, prompt_of(1))
        sent(cache, 20)
        running.kill()
        for number in range(2, 12):
            assert run(cache, prompt_of(number))["remote"] == 0
        assert run(cache, prompt_of(1))["device"] in (0, 320)
        assert remote_stats(cache)["state"] == "off"
        cache.check_integrity()


@pytest.mark.parametrize("required", [False, True])
def test_a_store_that_is_not_there_when_a_cache_opens(required: bool, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    if required:
        with pytest.raises(pk.TierError, match="cannot be reached"):
            open_cache(f"valkey://127.0.0.1:{port}", required=True)
        return
    with open_cache(f"valkey://127.0.0.1:{port}") as cache:
        assert run(cache, prompt_of(1))["remote"] == 0
        assert remote_stats(cache)["state"] == "off"
        with server(port=port):
            wait_for(lambda: run(cache, prompt_of(2)) and remote_stats(cache)["state"] == "ok", "it is not tried again")


def test_a_wrong_password_leaves_the_store_out_with_one_line_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    with server("--requirepass", "right") as closed, caplog.at_level(logging.WARNING, "pagedkv"):
        url = f"valkey://:wr0ng@127.0.0.1:{closed.port}/0"
        with open_cache(url) as cache:
            assert run(cache, prompt_of(1))["device"] == 0
            assert remote_stats(cache) == {"state": "left_out"}
            with pytest.raises(pk.TierError, match="left out"):
                cache.purge(pk.Namespace(tenant="x"))
        with pytest.raises(pk.TierError, match="password") as caught:
            open_cache(url, required=True)
        lines = [record.getMessage() for record in caplog.records if "remote" in record.getMessage()]
        assert len(lines) == 1
        said = "".join([*lines, str(caught.value), repr(pk.Valkey(url, secret=SECRET))])
        assert "wr0ng" not in said
        assert "a secret of ours" not in said


@pytest.mark.parametrize("cluster", [False, True])
def test_a_wrong_authority_leaves_the_store_out_with_one_line_and_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cluster: bool
) -> None:
    if cluster:
        pytest.importorskip("glide_sync")
    authority, certificate, key = certificates(tmp_path)
    (tmp_path / "other").mkdir()
    other, _, _ = certificates(tmp_path / "other")
    port = free_port()
    files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", authority)
    tls = ("--tls-port", str(port), *files, "--tls-auth-clients", "no")
    with server(*tls), caplog.at_level(logging.WARNING, "pagedkv"):
        url = f"valkeys://:pa55w0rd@127.0.0.1:{port}"
        with open_cache(url, ca_file=other, cluster=cluster) as cache:
            for device in (0, 320):
                assert run(cache, prompt_of(1)).items() >= {"device": device}.items()
            assert remote_stats(cache)["state"] in ("left_out", "off")
        lines = [record.getMessage() for record in caplog.records if "remote" in record.getMessage()]
        assert len(lines) == 1, lines
        assert "pa55w0rd" not in lines[0]
        assert "a secret of ours" not in lines[0]


def test_two_processes_share(running: Server) -> None:
    code = (
        "import sys; sys.path[:0] = [sys.argv[2]]\n"
        "from tests.remote.test_sharing import open_cache, prompt_of, run\n"
        "with open_cache(sys.argv[1]) as cache:\n"
        "    hits = [run(cache, prompt_of(number))['remote'] for number in range(3)]\n"
        "    print(*hits, *[cache.publish(prompt_of(number)) for number in range(3)])\n"
    )
    root = str(Path(__file__).parent.parent.parent)
    said = [
        subprocess.run([sys.executable, "-c", code, running.unix, root], capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert said == ["0 0 0 20 20 20\n", "320 320 320 20 20 20\n"]


def test_the_remote_tier_is_named_in_match_and_stats(running: Server) -> None:
    with open_cache(running.unix) as cache:
        run(cache, prompt_of(1))
        assert cache.match(prompt_of(1)) == {"device": 320, "remote": 0}
        assert Tier.REMOTE.name.lower() in cache.stats().blocks
        assert "remote" in repr(cache)


@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError])
def test_a_publish_that_is_interrupted_is_sent_and_holds_nothing_afterwards(
    running: Server, problem: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(1)
    with open_cache(running.unix, write="never") as cache:
        run(cache, prompt)

        def interrupted(self: Sender, asked: Asked, seconds: float | None) -> bool:
            raise problem

        with monkeypatch.context() as patch:
            patch.setattr(Sender, "wait", interrupted)
            with pytest.raises(problem):
                cache.publish(prompt)
        wait_for(lambda: running.client().dbsize() == 20, "the blocks of a publish were not sent")
        wait_for(lambda: not cache.stats().blocks["device"]["live"], "a path is held after its send")
        assert cache.publish(prompt) == 20
        with cache.sequence(np.arange(199 * 16, dtype=np.int32)) as seq, cache.step([seq]) as step:
            for layer in range(SPEC.num_layers):  # a caller that needs all room does not wait for ever
                step.write(layer, TABLE[step.tokens % 4096], TABLE[step.tokens % 4096])
        cache.check_integrity()
    with open_cache(running.unix) as other:
        assert run(other, prompt)["remote"] == 320


def test_a_prefetch_asks_the_store_and_brings_its_blocks_once(running: Server) -> None:
    prompt = prompt_of(1)
    with open_cache(running.unix) as first:
        run(first, prompt)
        assert first.publish(prompt) == 20
    with open_cache(running.unix) as cache:
        tickets = [cache.prefetch(prompt) for _ in range(3)]
        assert [ticket.wait(60) for ticket in tickets] == [320] * 3
        assert cache.match(prompt)["device"] == 320
        assert remote_stats(cache)["read_blocks"] == 20
        assert run(cache, prompt)["device"] == 320
        cache.check_integrity()


@pytest.mark.parametrize("way", ["publish", "write"])
def test_a_purge_waits_for_blocks_that_were_chosen_before_it(
    running: Server, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send is held up before it names its blocks: the purge begins then, and ends behind it."""
    tenant, chosen, go_on = pk.Namespace(tenant="a"), threading.Event(), threading.Event()
    real = Claims.names_of_path

    def slow(self: Claims, node: int, first: int) -> list[Any]:
        chosen.set()
        assert go_on.wait(60)
        return real(self, node, first)

    monkeypatch.setattr(Claims, "names_of_path", slow)
    with open_cache(running.unix, write="all" if way == "write" else "never") as cache:
        run(cache, prompt_of(1), tenant)
        threads = [threading.Thread(target=cache.publish, args=(prompt_of(1), tenant))] if way == "publish" else []
        for thread in threads:
            thread.start()
        assert chosen.wait(60)
        threads.append(threading.Thread(target=cache.purge, args=(tenant,)))
        threads[-1].start()
        threads[-1].join(0.2)
        assert threads[-1].is_alive(), "the purge did not wait for a send under way"
        go_on.set()
        for thread in threads:
            thread.join(60)
        assert running.client().dbsize() == 0, "purged blocks came back to the store"
        cache.check_integrity()


def test_a_disk_that_refuses_a_purge_keeps_no_block_in_the_store(running: Server, tmp_path: Path) -> None:
    tenant = pk.Namespace(tenant="a")
    with open_cache(running.unix, device_memory=pk.Blocks(60), disk=pk.Disk(tmp_path / "kv", pk.Blocks(40))) as cache:
        run(cache, prompt_of(1), tenant)
        assert cache.publish(prompt_of(1), tenant) == 20

        def refuses(digest: bytes) -> None:
            raise pk.TierError("the tier is read-only")

        cache._store.purge = refuses  # type: ignore[union-attr, method-assign]
        with pytest.raises(pk.TierError, match=r"from disk again after a restart: the tier is read-only"):
            cache.purge(tenant)
        assert running.client().dbsize() == 0
        running.kill()
        with pytest.raises(pk.TierError, match=r"read-only and it may be served from the remote store again"):
            cache.purge(tenant)
