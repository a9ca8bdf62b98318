"""Opening: ranks that do not fit, or do not come, are refused by name."""

from __future__ import annotations

import dataclasses
import pickle
import socket
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.spec.ranks import MOST_ADDRESS
from pagedkv.tiers.ranks.frames import Kind
from pagedkv.tiers.ranks.wire import HEAD, MAGIC, VERSION
from tests.ranks.conftest import DEVICE, HOST, SECRET, SPEC, WATCHDOG_S, World, in_thread, ranks_at

DISK = pk.Disk("/nowhere/kv", pk.Blocks(64))
CACHE: dict[str, Any] = {"spec": SPEC, "device_memory": DEVICE, "host_memory": HOST}
RANK: dict[str, Any] = {**CACHE, "rank": 1}


def both(address: str, of_cache: dict[str, Any], of_rank: dict[str, Any]) -> tuple[BaseException, BaseException]:
    """The errors of a cache and of one rank of it."""
    given = {**RANK, "ranks": ranks_at(address), **of_rank}
    rank = in_thread(lambda: pk.Rank(**given))
    cache = in_thread(lambda: pk.KVCache(**{**CACHE, "ranks": ranks_at(address), **of_cache}))
    found = cache.exception(WATCHDOG_S), rank.exception(WATCHDOG_S)
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spec": dataclasses.replace(SPEC, dtype="float16")}, "it has KVSpec.*float16.*and the cache KVSpec.*float32"),
        ({"spec": dataclasses.replace(SPEC, model="toy@2")}, "model='toy@2'"),
        ({"spec": dataclasses.replace(SPEC, num_kv_heads=6)}, "num_kv_heads=6"),
        ({"device_memory": pk.Blocks(9)}, r"its tiers have \[9, 16, 0\] blocks .* and the cache's \[8, 16, 0\]"),
        ({"host_memory": None}, r"its tiers have \[8, 0, 0\] blocks"),
        ({"disk": DISK}, r"its tiers have \[8, 16, 64\] blocks"),
    ],
)
def test_a_rank_that_was_given_something_else_is_refused_on_both_sides(
    address: str, changes: dict[str, Any], said: str
) -> None:
    for problem in both(address, {}, changes):
        assert isinstance(problem, pk.RanksDisagree)
        assert problem.rank == 1
        with pytest.raises(pk.RanksDisagree, match=f"^rank 1: .*{said}"):
            raise problem


def test_ranks_with_other_options_of_the_disk_are_refused(address: str) -> None:
    other = dataclasses.replace(DISK, segment_size="1MiB")
    for problem in both(address, {"disk": DISK}, {"disk": other}):
        with pytest.raises(pk.RanksDisagree, match=r"rank 1: .*its disk tier has other options than the cache's"):
            raise problem


def test_a_rank_of_another_number_of_ranks_is_refused(address: str) -> None:
    alone = ranks_at(address, size=1)
    for problem in both(address, {}, {"ranks": alone, "rank": 0, "device_memory": DEVICE}):
        with pytest.raises(pk.RanksDisagree, match=r"rank 0: .*one of 1 ranks, and the cache has 3"):
            raise problem


def test_the_second_process_of_one_rank_is_refused(address: str) -> None:
    ranks = ranks_at(address)
    coming = [in_thread(lambda: pk.Rank(**RANK, ranks=ranks)) for _ in range(2)]
    with pytest.raises(pk.RanksDisagree, match="rank 1: two processes say that they are this rank"):
        pk.KVCache(**CACHE, ranks=ranks)
    for one in coming:
        assert isinstance(one.exception(WATCHDOG_S), pk.RanksDisagree | pk.RankLost)


def test_a_rank_with_another_secret_is_refused_and_the_right_one_is_let_in(address: str) -> None:
    cache = in_thread(lambda: pk.KVCache(**CACHE, ranks=ranks_at(address)))
    with pytest.raises(pk.RanksDisagree, match="rank 1: it has another secret than the cache"):
        pk.Rank(**RANK, ranks=ranks_at(address, secret=b"another secret, of 16 bytes"))
    coming = all_three(address)
    with cache.result(WATCHDOG_S) as opened:
        assert opened.stats().failed_moves == 0
    for one in coming:
        one.result(WATCHDOG_S).close()


def all_three(address: str, **changes: Any) -> list[Future[pk.Rank]]:
    """All ranks, as they come."""
    given = {**RANK, "ranks": ranks_at(address), **changes}
    return [in_thread(partial(pk.Rank, **{**given, "rank": rank})) for rank in range(3)]


def hear(end: socket.socket) -> tuple[int, bytes]:
    """Kind and payload of the next frame."""
    head = end.recv(HEAD.size, socket.MSG_WAITALL)
    _, kind, _, size, _ = HEAD.unpack(head)
    return kind, end.recv(size, socket.MSG_WAITALL)


def connected(address: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    while end.connect_ex(address):
        pass
    return end


def test_a_rank_of_another_version_is_refused_and_told(address: str) -> None:
    cache = in_thread(lambda: pk.KVCache(**CACHE, ranks=ranks_at(address)))
    with connected(address) as end:
        assert hear(end)[0] == Kind.CHALLENGE
        end.sendall(HEAD.pack(MAGIC, Kind.HELLO, VERSION + 1, 0, 0))
        kind, said = hear(end)
    assert (kind, said) == (Kind.REFUSED, b"it speaks version 2 of the ranks' protocol, and the cache version 1")
    with pytest.raises(pk.RanksDisagree, match="version 2"):
        cache.result(WATCHDOG_S)


def test_a_cache_of_another_version_is_an_error_of_the_rank(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        rank = in_thread(lambda: pk.Rank(**RANK, ranks=ranks_at(address)))
        end, _ = listening.accept()
        with end:
            end.sendall(HEAD.pack(MAGIC, Kind.CHALLENGE, VERSION + 1, 0, 0))
            with pytest.raises(pk.RanksDisagree, match=r"rank 1: it speaks version 1 .*, and the cache version 2"):
                rank.result(WATCHDOG_S)


def test_a_process_that_cannot_prove_that_it_knows_the_secret_commands_no_rank(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        rank = in_thread(lambda: pk.Rank(**RANK, ranks=ranks_at(address)))
        end, _ = listening.accept()
        with end:
            end.sendall(HEAD.pack(MAGIC, Kind.CHALLENGE, VERSION, 32, 0) + bytes(32))
            assert hear(end)[0] == Kind.HELLO
            end.sendall(HEAD.pack(MAGIC, Kind.PROOF, VERSION, 32, 0) + bytes(32))
            with pytest.raises(pk.RanksDisagree, match="does not know the secret"):
                rank.result(WATCHDOG_S)


STRANGE = [b"GET / HTTP/1.1\r\n\r\n      ", HEAD.pack(MAGIC, Kind.HELLO, VERSION, 1 << 30, 0), b""]


@pytest.mark.parametrize("sent", STRANGE)
def test_a_stranger_s_bytes_end_its_connection_and_no_more(address: str, sent: bytes) -> None:
    cache = in_thread(lambda: pk.KVCache(**CACHE, ranks=ranks_at(address)))
    with connected(address) as end:
        hear(end)
        end.sendall(sent)
        end.shutdown(socket.SHUT_WR)
        assert end.recv(1) == b""
    coming = all_three(address)
    cache.result(WATCHDOG_S).close()
    for one in coming:
        one.result(WATCHDOG_S).close()


def test_ranks_that_do_not_come_are_named(address: str) -> None:
    with pytest.raises(pk.RankLost, match=r"rank 0 did not come in time, nor did \[1, 2\]") as lost:
        pk.KVCache(**CACHE, ranks=ranks_at(address, open_s=0.05))
    assert lost.value.rank == 0
    assert not Path(address).exists()


def test_a_rank_without_a_cache_says_where_it_looked(address: str) -> None:
    with pytest.raises(pk.RankLost, match=f"the deciding process was not at {address} in time"):
        pk.Rank(**RANK, ranks=ranks_at(address, open_s=0.05))


def test_a_cache_that_ends_while_its_ranks_open_is_an_error_of_theirs(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        rank = in_thread(lambda: pk.Rank(**RANK, ranks=ranks_at(address)))
        listening.accept()[0].close()
        with pytest.raises(pk.RankLost, match="the deciding process has closed its connection while the ranks were op"):
            rank.result(WATCHDOG_S)


def test_a_rank_that_cannot_open_its_tiers_is_named_and_all_are_let_go(address: str, tmp_path: Path) -> None:
    world = World(address, disk=tmp_path / "kv")
    world.close()
    one, other = tmp_path / "kv" / "rank1of3", tmp_path / "kv" / "rank2of3"
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    coming = all_three(address, **world.given)
    with pytest.raises(pk.TierError, match=r"rank 1 cannot open its tiers: LayoutMismatch: .*rank1of3"):
        pk.KVCache(SPEC, **world.given, ranks=world.ranks)
    first, *swapped = [one.exception(WATCHDOG_S) for one in coming]
    assert isinstance(first, pk.RanksDisagree)
    assert "rank 1 cannot open its tiers" in str(first)
    assert all(isinstance(problem, pk.LayoutMismatch) for problem in swapped)


def test_a_disk_that_one_rank_cannot_have_is_left_out_at_all(address: str, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "rank1of3").write_text("in the way")
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(64), required=False)
    coming = all_three(address, disk=disk)
    with pk.KVCache(**CACHE, disk=disk, ranks=ranks_at(address)) as cache:
        assert cache.stats().disk["state"] == "left_out"
        assert cache.match(range(9)) == {"device": 0, "host": 0}
    for one in coming:
        one.result(WATCHDOG_S).close()


@pytest.mark.parametrize("size", [2, 4, 6])
def test_numbers_of_ranks_that_do_not_divide_the_kv_heads_are_refused(address: str, size: int) -> None:
    ranks = ranks_at(address, size=size)
    said = f"3 KV heads cannot be split evenly over {size} ranks: take one of 1, 3 ranks"
    with pytest.raises(pk.InvalidArgument, match=said):
        pk.KVCache(**CACHE, ranks=ranks)
    with pytest.raises(pk.InvalidArgument, match=said):
        pk.Rank(**RANK, ranks=ranks)
    assert not Path(address).exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda"}, "are the ranks' own"),
        ({"threads": 3}, "are the ranks' own"),
        ({"storage": object()}, "are the ranks' own"),
        ({"remote": pk.Valkey("unix:///nowhere", secret=SECRET)}, "has no remote store"),
        ({"disk": DISK, "spec": dataclasses.replace(SPEC, model="")}, "name the model"),
    ],
)
def test_options_that_a_cache_with_ranks_cannot_have_are_refused(
    address: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(pk.InvalidArgument, match=said):
        pk.KVCache(**{**CACHE, **options}, ranks=ranks_at(address))


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"size": 0}, pk.InvalidArgument, "size"),
        ({"size": 65}, pk.InvalidArgument, "size"),
        ({"size": 3.5}, pk.WrongType, "size"),
        ({"secret": b"short"}, pk.InvalidArgument, "16 to 64 bytes"),
        ({"open_s": 0}, pk.InvalidArgument, "open_s must be more than 0"),
        ({"silent_s": 0}, pk.InvalidArgument, "silent_s must be more than 0"),
        ({"silent_s": "1"}, pk.WrongType, "silent_s"),
        ({"address": "/" + "a" * MOST_ADDRESS}, pk.InvalidArgument, "too long"),
        ({"address": 5}, pk.WrongType, "address"),
    ],
)
def test_ranks_refuse_values_that_cannot_be_used(changes: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        pk.Ranks(**{"address": "/tmp/s", "size": 3, "secret": SECRET, **changes})


def test_a_wrong_rank_or_no_ranks_is_refused_before_anything_opens(address: str) -> None:
    for rank in (3, -1):
        with pytest.raises(pk.InvalidArgument, match="rank"):
            pk.Rank(**{**RANK, "rank": rank}, ranks=ranks_at(address))
    with pytest.raises(pk.WrongType, match=r"ranks must be a pagedkv\.Ranks, not str"):
        pk.KVCache(**CACHE, ranks=address)  # type: ignore[arg-type]


def test_budgets_in_bytes_are_those_of_all_ranks_together(address: str) -> None:
    size = pk.Bytes(8 * SPEC.block_bytes)
    given: dict[str, Any] = {"spec": SPEC, "device_memory": size, "ranks": ranks_at(address)}
    coming = [in_thread(lambda rank=rank: pk.Rank(**given, rank=rank)) for rank in range(3)]
    with pk.KVCache(**given) as cache:
        assert cache.stats().blocks["device"]["max"] == 8
        for one in coming:
            assert one.result(WATCHDOG_S).device_arena.shape == (8, SPEC.block_bytes // 3)
    for one in coming:
        one.result().close()


def test_an_address_in_use_is_named_and_one_left_behind_is_taken(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        with pytest.raises(pk.AddressInUse, match=address):
            pk.KVCache(**CACHE, ranks=ranks_at(address))
    with pytest.raises(pk.RankLost, match="did not come"):
        pk.KVCache(**CACHE, ranks=ranks_at(address, open_s=0.05))


def test_the_socket_is_closed_to_other_users(address: str) -> None:
    cache = in_thread(lambda: pk.KVCache(**CACHE, ranks=ranks_at(address)))
    with connected(address) as end:
        hear(end)
        assert Path(address).stat().st_mode & 0o777 == 0o600
    coming = all_three(address)
    cache.result(WATCHDOG_S).close()
    assert not Path(address).exists()
    for one in coming:
        one.result(WATCHDOG_S).close()


def test_the_errors_of_ranks_travel_between_processes() -> None:
    for problem in (pk.RankLost(1, "is gone"), pk.RankLost(None, "is gone"), pk.RanksDisagree(2, "no")):
        again = pickle.loads(pickle.dumps(problem))
        assert (str(again), again.rank) == (str(problem), problem.rank)


def test_no_threads_of_ranks_stay_behind(address: str) -> None:
    before = set(threading.enumerate())
    World(address).close()
    assert [thread for thread in threading.enumerate() if thread not in before and "pagedkv" in thread.name] == []


def test_ranks_do_not_show_their_secret() -> None:
    assert SECRET.decode() not in repr(ranks_at("/tmp/s"))
