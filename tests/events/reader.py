"""A subscriber as routers have one, written after vLLM's format and not after our code."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the events extra is not installed")
zmq = pytest.importorskip("zmq", reason="the events extra is not installed")

LIMIT_S = 60.0  # only a hang reaches it
END = b"\xff" * 8


class BlockStored(msgspec.Struct, tag=True):
    """Blocks came."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    locality: str = ""
    cache_salt: str | None = None
    extra_keys: list[list[str | int] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks went."""

    block_hashes: list[int]
    medium: str
    locality: str = ""


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All went."""


class Batch(msgspec.Struct, array_like=True):
    """One message's payload."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None


decode = msgspec.msgpack.Decoder(Batch).decode


class Index:
    """A router's knowledge of one cache."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.media: dict[int, set[str]] = defaultdict(set)
        self.children: dict[tuple[int | None, str | None, tuple[int, ...]], int] = {}
        self.place_of: dict[int, tuple[int | None, str | None, tuple[int, ...]]] = {}

    def apply(self, payload: bytes) -> Batch:
        batch = decode(payload)
        for event in batch.events:
            self._one(event)
        return batch

    def _one(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.clear()
            return
        assert event.locality == "LOCAL"
        assert event.medium in ("GPU", "CPU", "DISK")
        assert all(0 <= name < 1 << 64 for name in event.block_hashes)
        if isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                self.media[name].discard(event.medium)
                if not self.media[name]:
                    del self.media[name]
                    self.children.pop(self.place_of.pop(name, (None, None, ())), None)
            return
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.parent_block_hash is None or event.parent_block_hash in self.media, "the parent is unknown"
        before = event.parent_block_hash
        for i, name in enumerate(event.block_hashes):
            place = before, event.cache_salt, tuple(event.token_ids[i * size : (i + 1) * size])
            assert self.children.setdefault(place, name) == name, "the same tokens under two names"
            assert self.place_of.setdefault(name, place) == place, "one name for two contents"
            self.media[name].add(event.medium)
            before = name

    def blocks(self, tokens: Sequence[int], size: int, salt: str | None = None) -> list[set[str]]:
        """Media of the leading blocks that the cache has."""
        out, before = [], None
        for at in range(0, len(tokens) - size + 1, size):
            before = self.children.get((before, salt, tuple(token & 0xFFFFFFFF for token in tokens[at : at + size])))
            if before is None:
                break
            out.append(self.media[before])
        return out


class Subscriber:
    """Follows a publisher; whatever it missed, it asks for.

    Attributes
    ----------
    index : Index
    numbers : sequences of the messages that it has applied.
    """

    def __init__(self, publisher: Any, topic: str = "") -> None:
        self.context, self.index, self.numbers = zmq.Context(), Index(), list[int]()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(topic.encode())
        self.sub.connect(publisher.endpoint)
        self.dealer = None
        if publisher.replay is not None:
            self.dealer = self.context.socket(zmq.DEALER)
            self.dealer.connect(publisher.replay)

    @property
    def last(self) -> int:
        return self.numbers[-1] if self.numbers else -1

    def apply(self, number: int, payload: bytes) -> None:
        if number <= self.last:
            if number:
                return
            self.index.clear()  # it has begun again
        self.index.apply(payload)
        self.numbers.append(number)

    def catch_up(self, first: int | None = None) -> int:
        """Ask for all from `first` on, by default from the next one; how many came."""
        self.dealer.send_multipart([b"", (self.last + 1 if first is None else first).to_bytes(8, "big")])
        came = 0
        while True:
            assert self.dealer.poll(LIMIT_S * 1000)
            nothing, _, number, payload = self.dealer.recv_multipart()
            assert nothing == b""
            if number == END:
                assert payload == b""
                return came
            self.apply(int.from_bytes(number, "big"), payload)
            came += 1

    def live(self, within_s: float = LIMIT_S) -> list[bytes]:
        """The next message over PUB."""
        assert self.sub.poll(within_s * 1000)
        return self.sub.recv_multipart()

    def close(self) -> None:
        self.context.destroy(linger=0)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def joined(subscriber: Subscriber, change: Any) -> list[bytes]:
    """Have `change` publish until the subscriber hears of it; the first message it heard."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        change()
        if subscriber.sub.poll(20):
            return subscriber.sub.recv_multipart()
    raise AssertionError("the subscriber hears nothing")
