"""Caches that publish, with the toy model's KV in them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from tests.events.reader import Subscriber

SIZE = 4
SPEC = pk.KVSpec(1, 1, 2, "float32", SIZE, model="toy@1")
ANY_PORT = "tcp://127.0.0.1:*"


def open_cache(device: int = 24, host: int = 0, event_words: int = 1 << 16, **options: Any) -> pk.KVCache:
    return pk.KVCache(SPEC, pk.Blocks(device), pk.Blocks(host) if host else None, event_words=event_words, **options)


def compute(cache: pk.KVCache, tokens: list[int], namespace: pk.Namespace | None = None) -> None:
    """Run a request."""
    with cache.sequence(tokens, namespace) as seq:
        while seq.num_computed < len(tokens):
            with cache.step([seq]) as step:
                kv = np.zeros((len(step.tokens), 1, 2), np.float32)
                step.write(0, kv, kv)


def publisher_of(cache: pk.KVCache, **options: Any) -> Any:
    return pk.events.ZmqPublisher(cache, ANY_PORT, **{"replay": ANY_PORT, **options})


class World:
    """A cache, its publisher, a subscriber, and random requests."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.rng = Random(seed)
        mine = {name: options.pop(name) for name in ("keep", "label", "every_s") if name in options}
        self.cache = open_cache(**options)
        self.publisher = publisher_of(self.cache, **mine)
        self.reader = Subscriber(self.publisher)
        self.stems = [[self.rng.randrange(99) for _ in range(SIZE * self.rng.randint(1, 5))] for _ in range(6)]

    def prompt(self) -> list[int]:
        rng = self.rng
        return rng.choice(self.stems) + [rng.choice([0, 1, 2, -7]) for _ in range(rng.randint(1, 4 * SIZE))]

    def go_on(self) -> None:
        compute(self.cache, self.prompt())

    def tell(self) -> None:
        self.publisher.publish()
        self.reader.catch_up()

    def is_right(self, prompt: list[int], namespace: pk.Namespace | None = None, salt: str | None = None) -> bool:
        """Whether the subscriber and the cache know the same of a prompt."""
        there = self.cache.explain(prompt, namespace)
        names = {"device": "GPU", "host": "CPU", "disk": "DISK"}
        tiers = [names[str(run.tier)] for run in there.runs for _ in run.block_ids]
        known = self.reader.index.blocks(prompt, SIZE, salt)
        return len(known) == len(tiers) and all(tier in media for tier, media in zip(tiers, known, strict=True))

    def close(self) -> None:
        self.reader.close()
        self.publisher.close()
        self.cache.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def world() -> Iterator[World]:
    with World() as made:
        yield made
