"""The publisher beside a subscriber that was written apart from it."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.events.wire import Translator, messages
from tests.core.chains import chain, root_hash
from tests.events.conftest import ANY_PORT, SIZE, SPEC, World, compute, open_cache, publisher_of
from tests.events.reader import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Subscriber,
    decode,
    joined,
    msgspec,
    zmq,
)

GOLDEN = 0x73078104D9BDD096  # of PROMPT's three blocks, the largest
PROMPT = list(range(100, 100 + 3 * SIZE + 1))


def test_a_message_has_three_frames_and_a_batch_of_tagged_maps() -> None:
    options = {"topic": "kv@pod@m", "data_parallel_rank": 3}
    with (
        open_cache(4) as cache,
        publisher_of(cache, **options) as publisher,
        Subscriber(publisher, "kv@pod") as reader,
    ):
        first = iter(range(1 << 20))
        topic, number, payload = joined(reader, lambda: (compute(cache, [next(first)] * 5), publisher.publish()))
        assert (topic, len(number)) == (b"kv@pod@m", 8)
        batch = decode(payload)
        assert batch.data_parallel_rank == 3
        assert batch.ts > 1e9
        compute(cache, PROMPT)
        publisher.publish()
        while not isinstance(batch.events[-1], BlockStored) or batch.events[-1].token_ids != PROMPT[:-1]:
            _, after, payload = reader.live()
            assert int.from_bytes(after, "big") == int.from_bytes(number, "big") + 1
            number, batch = after, decode(payload)
        stored = batch.events[-1]
        assert (stored.parent_block_hash, stored.block_size, len(stored.block_hashes)) == (None, SIZE, 3)
        assert (stored.medium, stored.lora_id, stored.lora_name) == ("GPU", None, None)
        assert any(isinstance(event, BlockRemoved) for event in batch.events)
        raw = msgspec.msgpack.decode(payload)[1][-1]
        assert {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size"} <= raw.keys()
        assert {"lora_id", "lora_name", "medium", "locality"} <= raw.keys()


def test_the_first_message_clears_and_tells_all_and_then_only_changes(world: World) -> None:
    compute(world.cache, PROMPT)
    assert world.publisher.publish() == 2
    assert world.publisher.publish() == 0
    assert world.reader.catch_up() == 1
    assert world.reader.numbers == [0]
    assert world.is_right(PROMPT)
    compute(world.cache, PROMPT[:SIZE] + [1] * 9)
    assert world.publisher.publish() == 1
    world.reader.catch_up()
    assert world.is_right(PROMPT[:SIZE] + [1] * 9)


def test_a_cache_by_groups_publishes_its_spine_and_tells_where_requests_go_on() -> None:
    spec = pk.KVSpec.of([pk.Attention(1, 2, window=9), pk.Attention(1, 2)], dtype="float32", block_size=SIZE)
    with pk.KVCache(spec, pk.Blocks(40), pk.Blocks(40), by_group=True, event_words=1 << 16) as cache:
        with cache.sequence(PROMPT) as seq, cache.step([seq]) as step:
            for layer in range(2):
                step.mark_written(layer)
        told = cache.events()
        assert [event.kind for event in told] == ["stored", "resumable"]
        assert told[1].tier is pk.Tier.DEVICE
        assert told[1].depth + 1 == 3
        assert told[1].hashes == told[0].hashes[-1:]
        cache.moves.make_room(np.array([cache.placement.pools[0].num_available + 1, 0]))
        told = cache.events()
        assert [(event.kind, event.tier) for event in told] == [
            ("resumable", pk.Tier.HOST), ("not_resumable", pk.Tier.DEVICE),
        ]  # fmt: skip
        with publisher_of(cache) as publisher, Subscriber(publisher) as reader:
            publisher.publish()
            assert reader.catch_up() == 1
            raw = Translator(SIZE, by_group=True)(cache.placement.snapshot_events()[0])
            assert [event["type"] for event in raw] == ["BlockStored"]
            assert (raw[0]["group_idx"], raw[0]["kv_cache_spec_kind"]) == (0, "full_attention")
            assert len(raw[0]["block_hashes"]) == 3
    assert not {"group_idx", "kv_cache_spec_kind"} & Translator(SIZE)([one_stored()])[0].keys()


def one_stored() -> pk.core.KVEvent:
    """The event of a cache of all tokens."""
    with open_cache() as cache:
        compute(cache, PROMPT)
        return cache.events()[0]


def test_the_names_of_blocks_are_the_same_in_every_process(world: World) -> None:
    """Routers that follow several caches need that. The next version names them so, too."""
    world.tell()
    world.cache.purge(None)
    compute(world.cache, PROMPT)
    world.tell()
    assert list(world.reader.index.place_of) == chain(PROMPT, SIZE, root_hash(pk.Namespace().digest(), 0), 0)
    assert max(world.reader.index.place_of) == GOLDEN


def test_the_end_of_a_replay_comes_also_without_any_message(world: World) -> None:
    assert world.reader.catch_up() == 0
    world.publisher.publish()
    assert world.reader.catch_up(5) == 0
    assert world.publisher.stats()["replays"] == 2


def test_a_question_that_cannot_be_read_is_counted_and_the_next_one_answered(world: World) -> None:
    world.publisher.publish()
    for frames in ([b"x"], [b"", b"1234567"], [b"", b"", b"12345678"], [b"y", b"12345678"], [b""]):
        world.reader.dealer.send_multipart(frames)
    assert world.reader.catch_up() == 1
    assert world.publisher.stats()["refused"] == 5


def test_a_subscriber_that_lost_more_than_is_kept_is_told_all() -> None:
    with World(keep=16) as world:
        for _ in range(40):
            world.go_on()
            world.publisher.publish()
        assert world.publisher.stats()["snapshots"] == 1
        world.reader.catch_up()
        assert world.publisher.stats()["snapshots"] == 2
        assert world.reader.numbers[0] > 16
        assert all(world.is_right(world.prompt()) for _ in range(50))
        with Subscriber(world.publisher) as another:  # the kept messages begin with that now
            another.catch_up()
            assert another.numbers[0] == world.reader.numbers[0]
        assert world.publisher.stats()["snapshots"] == 2


def test_an_overflow_of_the_ring_clears_and_tells_all() -> None:
    with World(event_words=256) as world:
        old = [world.prompt() for _ in range(5)]
        for prompt in old:
            compute(world.cache, prompt)
        world.tell()
        for i in range(30):
            compute(world.cache, [i] * 30)
            world.go_on()
        assert world.cache.stats().placement["events_lost"] > 0
        world.tell()
        assert world.publisher.stats()["snapshots"] == 2
        assert all(world.is_right(world.prompt()) for _ in range(50))
        assert all(map(world.is_right, old))
        world.go_on()
        world.tell()
        assert world.publisher.stats()["snapshots"] == 2


def test_a_large_snapshot_is_parted_and_still_kept_whole() -> None:
    with World(device=400, keep=16) as world:
        for i in range(60):
            compute(world.cache, [i] * (6 * SIZE))
        world.publisher._translate._size = SIZE
        parts = list(messages(world.publisher._translate(world.cache.placement.snapshot_events()[0]), 50))
        assert len(parts) > 6
        assert all(sum(len(event["block_hashes"]) for event in part) <= 50 for part in parts)
        world.tell()
        assert world.is_right([59] * 20)


def test_a_new_publisher_begins_at_zero_and_its_subscriber_anew(world: World) -> None:
    compute(world.cache, PROMPT)
    world.tell()
    compute(world.cache, [5] * 9)
    world.tell()
    world.publisher.close()
    world.cache.placement.clear()
    world.publisher = publisher_of(world.cache)
    world.publisher.publish()
    with Subscriber(world.publisher) as again:
        again.index, again.numbers = world.reader.index, world.reader.numbers
        again.catch_up(0)
        assert again.numbers[-1] == 0
        assert again.index.blocks(PROMPT, SIZE) == []


def test_numbers_may_begin_where_an_earlier_publisher_cannot_have_been(world: World) -> None:
    world.publisher.close()
    world.publisher = publisher_of(world.cache, first_sequence=1 << 40)
    with Subscriber(world.publisher) as reader:
        compute(world.cache, PROMPT)
        world.publisher.publish()
        reader.catch_up()
        assert reader.numbers == [1 << 40]
        assert len(reader.index.blocks(PROMPT, SIZE)) == 3


@pytest.mark.parametrize("field", ["cache_salt", "extra_keys"])
def test_a_namespace_is_told_by_the_labels_that_the_host_gives_it(field: str) -> None:
    salt: dict[str, Any] = {field: "s" if field == "cache_salt" else ("s",)}
    mine, hidden = pk.Namespace(tenant="a"), pk.Namespace(tenant="b")
    told = {
        mine.digest(): pk.events.Labels(lora_id=7, lora_name="law", **salt),
        pk.Namespace().digest(): pk.events.Labels(),
    }
    with World(label=told.get) as world:
        for namespace in (mine, hidden, None):
            compute(world.cache, PROMPT, namespace)
        world.publisher.publish()
        events = decode(world.publisher._kept[0][1]).events
        assert isinstance(events[0], AllBlocksCleared)
        first, second = sorted(events[1:], key=lambda event: event.lora_name or "")
        assert (second.lora_id, second.lora_name) == (7, "law")
        assert second.block_hashes != first.block_hashes
        if field == "cache_salt":
            assert (first.cache_salt, second.cache_salt) == (None, "s")
        else:
            assert (first.extra_keys, second.extra_keys) == (None, [["s"], None, None])
        world.cache.purge(hidden)
        world.cache.purge(mine)
        world.publisher.publish()
        (gone,) = decode(world.publisher._kept[1][1]).events[-1:]
        assert set(second.block_hashes) == set(gone.block_hashes)


def test_labels_of_another_type_are_refused_and_nothing_is_lost() -> None:
    answers: list[Any] = ["no labels", pk.events.Labels()]
    with World(label=lambda digest: answers[0]) as world:
        compute(world.cache, PROMPT)
        with pytest.raises(pk.WrongType, match="label must return Labels or None, not str"):
            world.publisher.publish()
        answers.pop(0)
        world.tell()
        assert world.is_right(PROMPT)


def test_an_exception_among_changes_loses_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with World() as world:
        world.tell()
        compute(world.cache, PROMPT)
        with monkeypatch.context() as patched:
            patched.setattr(world.publisher, "_encode", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                world.publisher.publish()
        world.tell()
        assert world.is_right(PROMPT)


def test_partly_filled_blocks_are_never_published(tmp_path: Any) -> None:
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(64), write="all")
    with World(device=16, disk=disk) as world:
        for i in range(6):
            compute(world.cache, [i] * (2 * SIZE + 2))
            world.tell()
        assert world.cache.explain([3] * 11).partial_tokens == 2
        assert world.cache.stats().placement["cached_blocks"] == 18
        assert len(world.reader.index.place_of) == 12
        assert all(world.is_right([i] * 30) for i in range(6))


def test_a_thread_publishes_by_itself() -> None:
    with open_cache() as cache, publisher_of(cache, every_s=0.005) as publisher:
        with Subscriber(publisher) as reader:
            compute(cache, PROMPT)
            while len(reader.index.blocks(PROMPT, SIZE)) < 3:
                reader.catch_up()
        assert publisher.stats()["failures"] == 0


def test_many_threads_may_publish_while_others_compute() -> None:
    with World(device=64) as world:
        stop = threading.Event()

        def publish() -> None:
            while not stop.is_set():
                world.publisher.publish()

        threads = [threading.Thread(target=publish) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            world.go_on()
        stop.set()
        for thread in threads:
            thread.join()
        world.tell()
        assert world.reader.numbers == list(range(len(world.reader.numbers)))
        assert all(world.is_right(world.prompt()) for _ in range(50))


def test_a_subscriber_that_reads_nothing_holds_up_nobody() -> None:
    with open_cache() as cache, publisher_of(cache, max_queued=1) as publisher:
        context = zmq.Context()
        slow = context.socket(zmq.SUB)
        slow.rcvhwm = 1
        slow.subscribe(b"")
        slow.connect(publisher.endpoint)
        for i in range(300):
            compute(cache, [i] * 9)
            publisher.publish()
        assert publisher.stats()["messages"] == 300
        context.destroy(linger=0)


def test_closing_twice_is_fine_and_then_it_publishes_no_more(world: World) -> None:
    world.publisher.close()
    world.publisher.close()
    with pytest.raises(pk.ClosedError, match="this publisher is closed"):
        world.publisher.publish()
    assert "closed" in repr(world.publisher)


def test_its_address_is_free_again_when_it_is_closed(world: World) -> None:
    where = world.publisher.endpoint
    with pytest.raises(pk.AddressInUse, match=where) as caught:
        pk.events.ZmqPublisher(world.cache, where)
    assert caught.value.endpoint == where
    world.publisher.close()
    pk.events.ZmqPublisher(world.cache, where).close()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"endpoint": "nowhere"}, pk.InvalidArgument, "cannot listen at 'nowhere'"),
        ({"endpoint": "tcp://127.0.0.1:99999"}, pk.InvalidArgument, "cannot listen"),
        ({"replay": "smoke://x"}, pk.InvalidArgument, "cannot listen at 'smoke://x'"),
        ({"endpoint": 5557}, pk.WrongType, "endpoint must be text"),
        ({"replay": 1}, pk.WrongType, "replay must be text"),
        ({"topic": b"kv"}, pk.WrongType, "topic must be text"),
        ({"topic": "a\nb"}, pk.InvalidArgument, "topic must be printable"),
        ({"topic": "x" * 256}, pk.InvalidArgument, "at most 255 bytes"),
        ({"topic": "\ud800"}, pk.InvalidArgument, "topic must be printable"),
        ({"keep": 1}, pk.InvalidArgument, "keep"),
        ({"keep": 20.0}, pk.WrongType, "keep"),
        ({"first_sequence": -1}, pk.InvalidArgument, "first_sequence"),
        ({"max_queued": 0}, pk.InvalidArgument, "max_queued"),
        ({"data_parallel_rank": -1}, pk.InvalidArgument, "data_parallel_rank"),
        ({"label": "salt"}, pk.WrongType, "label must be callable"),
        ({"every_s": 0}, pk.InvalidArgument, "every_s"),
        ({"every_s": "1"}, pk.WrongType, "every_s"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], error: type, match: str) -> None:
    with open_cache() as cache, pytest.raises(error, match=match):
        pk.events.ZmqPublisher(cache, **{"endpoint": ANY_PORT, **options})


def test_a_cache_without_events_is_refused() -> None:
    with pk.KVCache(SPEC, pk.Blocks(4)) as cache, pytest.raises(pk.InvalidArgument, match="open it with event_words"):
        pk.events.ZmqPublisher(cache, ANY_PORT)
    with pytest.raises(pk.WrongType, match="cache must be a KVCache, not str"):
        pk.events.ZmqPublisher("cache", ANY_PORT)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["zmq", "msgspec.msgpack"])
def test_without_the_extra_the_error_names_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with open_cache() as cache, pytest.raises(ImportError, match=r"pip install 'msgspec.* 'pyzmq.* \[events\]"):
        pk.events.ZmqPublisher(cache, ANY_PORT)


def test_a_forked_child_is_refused_and_leaves_the_sockets_alone(world: World) -> None:
    child = os.fork()
    if child == 0:
        try:
            world.publisher.close()
            world.publisher.publish()
        except pk.ClosedError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    compute(world.cache, PROMPT)
    world.tell()
    assert world.is_right(PROMPT)


def test_it_cannot_be_pickled(world: World) -> None:
    with pytest.raises(pk.WrongType, match="open another like it"):
        pickle.dumps(world.publisher)


def test_threads_may_close_a_publisher_at_once() -> None:
    with open_cache(4) as cache:
        for _ in range(20):
            publisher = publisher_of(cache, every_s=0.001)
            threads = [threading.Thread(target=publisher.close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "close() hangs"


@pytest.mark.parametrize("own_thread", [False, True])
def test_a_publisher_that_is_closed_by_its_label_ends_after_the_call(own_thread: bool) -> None:
    made: list[pk.events.ZmqPublisher] = []
    called = threading.Event()

    def label(digest: bytes) -> None:
        made[0].close()
        called.set()

    with open_cache(4) as cache:
        compute(cache, PROMPT)
        made.append(publisher_of(cache, label=label, every_s=0.2 if own_thread else None))
        if own_thread:
            assert called.wait(60)
        else:
            made[0].publish()
            assert called.is_set()
        made[0].close()
        with pytest.raises(pk.errors.ClosedError):
            made[0].publish()
        publisher_of(cache).close()


def test_a_signal_handler_may_close_a_publisher_inside_publish() -> None:
    def label(digest: bytes) -> None:
        signal.raise_signal(signal.SIGUSR1)

    with open_cache(4) as cache:
        compute(cache, PROMPT)
        publisher = publisher_of(cache, label=label)
        before = signal.signal(signal.SIGUSR1, lambda *_: publisher.close())
        try:
            publisher.publish()
        finally:
            signal.signal(signal.SIGUSR1, before)
        with pytest.raises(pk.errors.ClosedError):
            publisher.publish()
