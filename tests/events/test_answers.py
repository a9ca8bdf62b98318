"""An index that is built from the events gives the cache's own answers, also after losses."""

from __future__ import annotations

import time
from typing import Any

import pytest

import pagedkv as pk
from tests.events.conftest import World, compute, publisher_of
from tests.events.reader import LIMIT_S, Subscriber
from tests.slices import one_in

TENANT = pk.Namespace(tenant="a")


def label(digest: bytes) -> pk.events.Labels:
    return pk.events.Labels(cache_salt="a" if digest == TENANT.digest() else None)


@pytest.mark.parametrize("seed", one_in(4, range(4)))
@pytest.mark.parametrize("tiers", ["device", "host", "disk"])
def test_a_thousand_answers_are_the_caches_own(seed: int, tiers: str, tmp_path: Any) -> None:
    """Twelve runs together."""
    options: dict[str, Any] = {"device": 20}
    if tiers != "device":
        options["host"] = 16
    if tiers == "disk":
        options["disk"] = pk.Disk(tmp_path / "kv", pk.Blocks(40), write="all")
    asked = 0
    with World(seed, label=label, keep=32, event_words=1 << 11, **options) as world:
        rng = world.rng
        for turn in range(84):
            for _ in range(rng.randint(1, 4) if turn % 21 else 40):  # 40: more than the ring holds
                compute(world.cache, world.prompt(), rng.choice([None, TENANT]))
            world.publisher.publish()
            if rng.random() < 0.1:
                world.cache.purge(rng.choice([None, TENANT]))
            if turn == 50:  # it starts again
                world.publisher.close()
                world.publisher = publisher_of(world.cache, label=label, keep=32)
                known = world.reader
                world.reader = Subscriber(world.publisher)
                world.reader.index, world.reader.numbers = known.index, known.numbers
                known.close()
                world.publisher.publish()
                world.reader.catch_up(0)
            world.publisher.publish()
            if rng.random() < 0.3 or turn == 83:
                continue  # it hears nothing of this for a while
            quiet(world)
            world.tell()
            for namespace in (None, TENANT):
                assert world.is_right(world.prompt(), namespace, "a" if namespace else None)
                asked += 1
        world.cache.check_integrity()
    assert asked >= 84


def quiet(world: World) -> None:
    """Wait until nothing moves between the tiers, or is about to."""
    end = time.monotonic() + LIMIT_S
    while True:
        counts = world.cache.placement.stats()
        if counts["in_flight"] == counts["wanted"] == 0:
            return
        assert time.monotonic() < end
        time.sleep(0.0005)
