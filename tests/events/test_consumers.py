"""Routers' own readers of KV events, where they are installed.

Dynamo's indexer and smg's relay:

``pip install ai-dynamo-runtime``, ``pip install smg-grpc-servicer smg-grpc-proto``.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.events.conftest import SIZE, World, compute
from tests.events.test_answers import TENANT, label, quiet

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.checkout]


def alone(*command: str) -> list[str]:
    """The command in a network namespace of its own, which has nothing but a loopback device."""
    return ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def can_be_alone() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(alone("true"), capture_output=True).returncode == 0


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("tiers", ["device", "host"])
def test_dynamos_indexer_gives_the_caches_own_answers(seed: int, tiers: str) -> None:
    """250 answers each, with lost messages, evictions, purges and a restart."""
    said = lived(seed, tiers)
    assert (said["asked"], said["wrong"]) == (250, 0)
    assert said["lost"] > 3
    assert said["replays"] > 3


def test_dynamos_indexer_tells_two_caches_with_the_same_prompts_apart() -> None:
    """Where they name the same block differently, its answers are wrong."""
    said = lived(0, "pair")
    assert (said["asked"], said["wrong"]) == (250, 0)


def lived(seed: int, tiers: str) -> dict[str, int]:
    if not has("dynamo.indexer"):
        pytest.skip("ai-dynamo-runtime is not installed")
    if not can_be_alone():
        pytest.skip("no network namespace can be made, and the indexer listens on all interfaces")
    command = alone(sys.executable, "-m", "tests.events.dynamo_life", str(seed), tiers)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said: dict[str, int] = json.loads(done.stdout)
    print(said)
    return said


def test_smgs_relay_takes_every_event() -> None:
    try:
        from smg_grpc_servicer import kv_relay
    except ImportError:
        pytest.skip("smg-grpc-servicer is not installed")
    relay, payloads = kv_relay.Normalizer(), 0
    with World(3, device=20, host=16, label=label) as world:
        rng = world.rng
        for turn in range(200):
            compute(world.cache, world.prompt(), rng.choice([None, TENANT]))
            if turn % 50 == 20:
                world.cache.purge(TENANT)
            quiet(world)
            world.publisher.publish()
            for number, payload in list(world.publisher._kept)[payloads:]:
                relay.normalize_batch(kv_relay.decode_batch(payload), number)
                payloads += 1
        told = world.publisher.stats()["events"]
    counts = relay.counts
    print(counts)
    assert not counts.dropped
    assert counts.duplicate_stores == 0
    assert counts.forwarded_stored + counts.forwarded_removed + counts.forwarded_cleared == told > 400
    assert SIZE * counts.forwarded_stored > 0
