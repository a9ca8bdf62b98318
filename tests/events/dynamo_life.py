"""A random life of a cache that Dynamo's indexer follows.

``python -m tests.events.dynamo_life SEED TIERS``; with ``pair`` for TIERS two caches are followed.

The indexer listens on all interfaces, so this runs in a network namespace of its own (tests/events/test_consumers.py).
Prints JSON: questions asked, wrong answers, messages that were lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pagedkv as pk
from tests.events.conftest import SIZE, World, compute
from tests.events.reader import LIMIT_S
from tests.events.test_answers import quiet

PORT, LIVE, REPLAY = 18095, "tcp://127.0.0.1:15600", "tcp://127.0.0.1:15700"
QUESTIONS = 250
SETTLES_S = 5.0  # the rest of a message is read in this time; a wrong answer stays wrong


def ask(path: str, body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request, timeout=LIMIT_S).read())


def known(prompt: list[int], worker: int = 1) -> int:
    """Tokens of a prompt that the indexer knows a worker to have cached, in any tier."""
    answer = ask("/query", {"token_ids": [token & 0xFFFFFFFF for token in prompt], "model_name": "m"})
    return max([0, *(value for value in answer["instances"].get(str(worker), {}).values() if isinstance(value, int))])


def until(true: Any) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, "the indexer does not come to know it"
        time.sleep(0.005)


def there() -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1).read()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def publisher_of(cache: pk.KVCache) -> Any:
    first = int(1000 * time.time())  # the indexer ignores numbers below the last one
    return pk.events.ZmqPublisher(cache, LIVE, replay=REPLAY, keep=200, first_sequence=first)


def pair(seed: int) -> dict[str, int]:
    """Two caches with the same prompts, one of which has been purged before."""
    worlds, marks, asked, wrong = [], iter(range(10_000, 1 << 20)), 0, 0
    for worker in (1, 2):
        world = World(seed, device=24)
        world.publisher.close()
        live, replay = f"tcp://127.0.0.1:1560{worker}", f"tcp://127.0.0.1:1570{worker}"
        world.publisher = pk.events.ZmqPublisher(world.cache, live, replay=replay)
        ask("/register", {"instance_id": worker, "endpoint": live, "replay_endpoint": replay, "model_name": "m",
                          "block_size": SIZE})  # fmt: skip
        worlds.append(world)
    compute(worlds[1].cache, [1] * 9)
    worlds[1].cache.purge(None)
    rng = worlds[0].rng
    while asked < QUESTIONS:
        for _ in range(3):
            compute(rng.choice(worlds).cache, worlds[0].prompt())
        for worker, world in enumerate(worlds, start=1):
            hear(world, marks, worker)
        for _ in range(5):
            prompt = worlds[0].prompt()
            for worker, world in enumerate(worlds, start=1):
                wrong += not agrees(world, prompt, worker)
            asked += 2
    for world in worlds:
        world.close()
    return {"asked": asked, "wrong": wrong}


def agrees(world: World, prompt: list[int], worker: int = 1) -> bool:
    """Whether the indexer comes to know as much of a prompt as the cache has.

    Nothing is published meanwhile. The block that `hear` asks for need not be the last event of its message: the
    cache may have moved blocks after storing it, so the indexer's answer may be older than its whole message.
    """
    mine = world.cache.explain(prompt).cached_tokens
    end = time.monotonic() + SETTLES_S
    while known(prompt, worker) != mine:
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def hear(world: World, marks: Iterator[int], worker: int = 1) -> None:
    """Wait until the indexer has caught up: it knows a block that was told last."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        mark = [next(marks)] * SIZE
        compute(world.cache, [*mark, 1])
        quiet(world)
        world.publisher.publish()
        for _ in range(100):
            if known(mark, worker) == SIZE:
                return
            time.sleep(0.002)
    raise AssertionError("the indexer hears nothing")


def life(seed: int, tiers: str) -> dict[str, int]:
    world = World(seed, **({"device": 30} if tiers == "device" else {"device": 20, "host": 16}))
    world.publisher.close()
    world.publisher = publisher_of(world.cache)
    ask("/register", {"instance_id": 1, "endpoint": LIVE, "replay_endpoint": REPLAY, "model_name": "m",
                      "block_size": SIZE})  # fmt: skip
    rng, asked, wrong, lost = world.rng, 0, 0, 0
    marks = iter(range(10_000, 1 << 20))

    hear(world, marks)
    turn = 0
    while asked < QUESTIONS:
        turn += 1
        for _ in range(rng.randint(1, 4)):
            compute(world.cache, world.prompt())
        if turn % 20 == 7:
            world.cache.purge(None)
        if turn == 30:
            world.publisher.close()
            world.publisher = publisher_of(world.cache)
        if rng.random() < 0.2:  # a message is lost on its way
            send, world.publisher._sockets.send = world.publisher._sockets.send, lambda *_: None
            lost += world.publisher.publish() > 0
            world.publisher._sockets.send = send
        hear(world, marks)
        for _ in range(5):
            prompt = world.prompt()
            asked += 1
            wrong += not agrees(world, prompt)
    snapshots = world.publisher.stats()["snapshots"]
    replays = world.publisher.stats()["replays"]
    world.close()
    return {"asked": asked, "wrong": wrong, "lost": lost, "replays": replays, "snapshots": snapshots}


def main() -> None:
    indexer = subprocess.Popen(
        [sys.executable, "-m", "dynamo.indexer", "--port", str(PORT), "--threads", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(there)
        seed, tiers = int(sys.argv[1]), sys.argv[2]
        print(json.dumps(pair(seed) if tiers == "pair" else life(seed, tiers)))
    finally:
        indexer.kill()
        indexer.wait()


if __name__ == "__main__":
    main()
