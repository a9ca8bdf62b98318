"""``pagedkv doctor --remote`` and ``inspect --remote``: try and count a remote store.

The doctor writes under a prefix of its own, and deletes that at the end, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, TierError
from pagedkv.spec.remote import Mooncake, Objects, Remote, Valkey
from pagedkv.spec.server_url import read_url
from pagedkv.spec.sizes import format_size
from pagedkv.tiers.base import Name
from pagedkv.tiers.remote.opening import open_store
from pagedkv.tiers.remote.store import Lists, Store, Tells, Unreachable
from pagedkv.tiers.remote.tier import RemoteTier
from pagedkv.tiers.remote.value import HEAD_BYTES, Values
from pagedkv.tools.payoff import verdict

SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20)
MEASURED_BYTES = 32 << 20  # written and read for each size
VALKEY = ("valkey", "valkeys", "redis", "rediss", "unix")  # schemes of servers
LIMIT_S = 60.0
OPENS_S = 10.0
NAMESPACE, FINGERPRINT = bytes(32), b"pagedkv doctor".ljust(32, b".")


class Finding(NamedTuple):
    """One line of the report; see `pagedkv.tools.doctor.Check`."""

    name: str
    status: Literal["ok", "warning", "failed", "skipped"]
    detail: str


def options(url: str, secret_file: str | None, ca_file: str | None, *, is_cluster: bool = False) -> Remote:
    """The store that a command line names; without a secret a random one.

    The URL's scheme chooses: ``valkey``, ``redis`` and ``unix`` a server, ``mooncake`` a master, all others fsspec.

    Raises
    ------
    InvalidArgument
    """
    common: dict[str, Any] = {
        "secret": os.urandom(32) if secret_file is None else secret_file,
        "prefix": f"pagedkv-doctor-{os.urandom(8).hex()}",
        "connect_s": OPENS_S,
    }
    scheme, _, rest = url.partition("://")
    if scheme in VALKEY:
        return Valkey(url, ca_file=ca_file, cluster=is_cluster, insecure=True, **common)
    if ca_file is not None or is_cluster:
        raise InvalidArgument("--ca-file and --cluster are for the URL of a server, such as valkeys://host:6379")
    if scheme == "mooncake":
        return Mooncake(rest, insecure=True, **common)
    if scheme in ("http", "https"):
        raise InvalidArgument("--remote: no store speaks HTTP; name its server, as valkey://host:6379/0")
    return Objects(url, insecure=True, **common)


def examine(remote: Remote, numbers: dict[str, Any]) -> Generator[Finding, None, None]:
    """Try a store; `numbers` is filled with the measurements.

    Raises
    ------
    ImportError, InvalidArgument
    """
    secret = remote.secret_bytes()
    store = open_store(remote)
    try:
        try:
            store.open(_soon(OPENS_S))
            facts = store.info(_soon(OPENS_S)) if isinstance(store, Tells) else None
        except (TierError, Unreachable) as problem:
            yield Finding("connect", "failed", str(problem))
            return
        yield Finding("connect", "ok", remote.where)
        if facts is not None:
            yield from _server(facts, numbers)
        yield from _ways(remote)
        try:
            yield from _round_trips(store, remote.prefix, numbers)
            yield from _speeds(store, remote, secret, numbers)
            yield _self_test(store, remote, secret)
            yield _verdict(numbers)
        except (TierError, Unreachable) as problem:
            yield Finding("measuring", "failed", str(problem))
    finally:
        with contextlib.suppress(TierError, Unreachable):
            store.remove_group(f"{remote.prefix}:", _soon(LIMIT_S))
        store.close()


def _server(facts: dict[str, str], numbers: dict[str, Any]) -> Iterator[Finding]:
    kind = "Valkey" if "valkey_version" in facts else "Redis"
    version = (facts.get("valkey_version") or facts.get("redis_version", "?"))[:40]
    numbers |= {"server": f"{kind} {version}", "policy": facts.get("maxmemory_policy")}
    yield Finding("server", "ok", f"{kind} {version}{', a cluster' * (facts.get('redis_mode') == 'cluster')}")
    said, policy = facts.get("maxmemory", ""), facts.get("maxmemory_policy", "")
    limit = int(said) if re.fullmatch(r"[0-9]{1,18}", said) else 0
    if not limit:
        yield Finding("maxmemory", "warning", "none: the server grows until the system kills it; set maxmemory")
    elif policy == "noeviction":
        detail = "noeviction: once full it takes no block; set maxmemory-policy allkeys-lru"
        yield Finding("maxmemory", "warning", f"{format_size(limit)}, {detail}")
    elif policy.startswith("volatile"):
        detail = "it evicts only keys with a time to live; pass ttl_s=, or set maxmemory-policy allkeys-lru"
        yield Finding("maxmemory", "warning", f"{format_size(limit)}, {policy}: {detail}")
    else:
        yield Finding("maxmemory", "ok", f"{format_size(limit)}, {policy}")
    yield Finding("persistence", *_persistence(facts))


def _persistence(facts: dict[str, str]) -> tuple[Literal["ok", "warning"], str]:
    """Whether the server writes blocks to its disk."""
    if facts.get("aof_enabled") == "1":
        return "warning", "the server logs every block to disk (appendonly yes): a cache needs none of that"
    if facts.get("rdb_bgsave_in_progress") == "1" or facts.get("rdb_saves", "0") != "0":
        return "warning", 'the server writes snapshots of all blocks to disk: a cache needs none (save "")'
    return "ok", "no log, and no snapshot since the server was started"


def _ways(remote: Remote) -> Iterator[Finding]:
    """What can be said without asking: who else sees the KV, and who deletes it."""
    if isinstance(remote, Valkey):
        is_near = not remote.cluster and (remote.url.startswith("unix://") or remote.is_loopback)
        if remote.url.startswith(("valkeys://", "rediss://")):
            yield Finding("network", "ok", "TLS")
        elif not is_near:
            detail = "KV and password cross the network in the open: take valkeys://, or seal=True"
            yield Finding("network", "warning", detail)
        if not is_near and not read_url(remote.url).password:
            yield Finding("login", "warning", "no password: all who reach the server can read, add and delete blocks")
    elif isinstance(remote, Mooncake):
        yield Finding("network", "warning", "Mooncake sends KV in the open: take seal=True, or a network of its own")
    else:
        if isinstance(remote, Objects) and remote.is_open:
            yield Finding("network", "warning", "KV crosses the network in the open: take TLS, or seal=True")
        yield Finding("eviction", "warning", "none: have the bucket or folder delete old objects")


def _round_trips(store: Store, prefix: str, numbers: dict[str, Any]) -> Iterator[Finding]:
    keys = [f"{prefix}:none:{number:064x}" for number in range(1024)]
    one = statistics.median(_times(lambda: store.exists(keys[:1], _soon()), 50))
    many = statistics.median(_times(lambda: store.exists(keys, _soon()), 9)) / len(keys)
    numbers |= {"round_trip_s": one, "lookup_s_per_key": many}
    yield Finding("lookup", "ok", f"{one * 1e6:.0f} us for one block, {many * 1e6:.2f} us for each of {len(keys)}")


def _speeds(store: Store, remote: Remote, secret: bytes, numbers: dict[str, Any]) -> Iterator[Finding]:
    numbers["speeds"] = found = []
    for seal in (False, True):
        for size in SIZES if not seal else SIZES[-2:-1]:
            try:
                values = Values(secret, FINGERPRINT, size, seal=seal, prefix=remote.prefix)
            except ImportError as problem:
                yield Finding("sealed", "skipped", str(problem))
                return
            count = max(2, MEASURED_BYTES // size)
            tier = RemoteTier(store, values, count, where=remote.where, read_s=LIMIT_S, write_s=LIMIT_S)
            trial = _measure(tier, count, size)
            name = f"{format_size(size)}{' sealed' * seal}"
            if trial.refused:
                room = format_size(MEASURED_BYTES)
                detail = f"the store took {count - trial.refused} of {count} blocks: is there room for {room}?"
                yield Finding(name, "failed", detail)
            elif trial.wrong:
                yield Finding(name, "failed", f"{trial.wrong} of {count} blocks did not come back as they were written")
            else:
                found.append({
                    "block_bytes": size, "seal": seal,
                    "write_bytes_per_s": trial.write_rate, "read_bytes_per_s": trial.read_rate,
                })  # fmt: skip
                detail = f"write {trial.write_rate / 1e9:.2f} GB/s, read {trial.read_rate / 1e9:.2f} GB/s, checked"
                yield Finding(name, "ok", detail)
            store.remove_group(values.group(NAMESPACE), _soon())


class _Trial(NamedTuple):
    """Bytes per second, and blocks that the store refused or gave back wrong."""

    write_rate: float
    read_rate: float
    refused: int
    wrong: int


def _measure(tier: RemoteTier, count: int, size: int) -> _Trial:
    """Write so many blocks, and read them twice."""
    out = np.random.default_rng(size).integers(0, 256, (count, size), np.uint8)
    back, order = np.zeros_like(out), np.arange(count, dtype=np.int32)
    names = _names(count)
    ok: list[NDArray[np.bool_]] = []
    (wrote,) = _times(lambda: ok.append(tier.write(order, names, out, order)), 1)
    taken = ok.pop()
    reads = _times(lambda: ok.append(tier.read(order, names, back, order)), 2)
    right = np.all(ok, axis=0) & (back == out).all(axis=1)
    refused, wrong = int(count - taken.sum()), int((taken & ~right).sum())
    return _Trial(out.nbytes / wrote, out.nbytes / min(reads), refused, wrong)


def _self_test(store: Store, remote: Remote, secret: bytes) -> Finding:
    """Change one bit of a stored block: that block must be a miss, and its neighbour a hit."""
    values = Values(secret, FINGERPRINT, SIZES[0], prefix=remote.prefix)
    tier = RemoteTier(store, values, 2, where=remote.where, read_s=LIMIT_S, write_s=LIMIT_S)
    rows, order, names = np.ones((2, SIZES[0]), np.uint8), np.arange(2, dtype=np.int32), _names(2)
    tier.write(order, names, rows, order)
    key = values.key(NAMESPACE, names[0].key)
    head, row = np.zeros((1, HEAD_BYTES), np.uint8), np.zeros(SIZES[0], np.uint8)
    store.get_into([key], head, [row], _soon(), lambda i, size: None)
    row[SIZES[0] // 3] ^= 1
    store.remove([key], _soon())  # some stores keep what is there
    store.put([key], [(head[0].tobytes(), row)], _soon())
    hits = tier.read(order, names, np.zeros_like(rows), order).tolist()
    if hits == [False, True]:
        return Finding("damage", "ok", "a block with one changed bit is a counted miss, its neighbour is a hit")
    return Finding("damage", "failed", f"one bit was changed in the first of two blocks, and hits are {hits}")


def _verdict(numbers: dict[str, Any]) -> Finding:
    rates = [each["read_bytes_per_s"] for each in numbers["speeds"] if not each["seal"]]
    if not rates:
        return Finding("verdict", "skipped", "nothing could be measured")
    return Finding("verdict", "ok", verdict("remote", max(rates), numbers))


def inspect(remote: Remote, prefix: str) -> dict[str, dict[str, int]]:
    """Objects and bytes of each group of keys under a prefix.

    A group is one model, layout, namespace, shard and mode; its name is a digest that tells none of them.

    Raises
    ------
    InvalidArgument
        It is of a kind that cannot list its keys.
    TierError
        The store cannot be used, or does not answer.
    """
    store = open_store(remote)
    if not isinstance(store, Lists):
        raise InvalidArgument(f"the keys of {remote.where} cannot be listed: its client has no call for that")
    try:
        store.open(_soon(OPENS_S))
        return store.groups(f"{prefix}:", _soon(10 * LIMIT_S))
    except Unreachable as problem:
        raise TierError(f"the remote store {remote.where} does not answer: {problem}") from None
    finally:
        store.close()


def show(groups: dict[str, dict[str, int]], where: str, out: TextIO) -> None:
    """Print them as a table, the largest first."""
    total = {name: sum(each[name] for each in groups.values()) for name in ("objects", "bytes")}
    out.write(f"{where}: {total['objects']:,} blocks in {len(groups)} groups, {format_size(total['bytes'])}\n")
    for group, each in sorted(groups.items(), key=lambda item: -item[1]["bytes"]):
        out.write(f"  {group}  {each['objects']:>12,} blocks  {format_size(each['bytes']):>10}\n")


def check_prefix(prefix: str) -> str:
    """Return a prefix of keys as `pk.Valkey(prefix=)` takes it.

    Raises
    ------
    InvalidArgument
    """
    if not prefix.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise InvalidArgument("--prefix must be letters, digits, dots, dashes and underscores")
    return prefix


def _names(count: int) -> list[Name]:
    return [Name(number.to_bytes(32, "little"), NAMESPACE) for number in range(count)]


def _soon(seconds: float = LIMIT_S) -> float:
    return time.monotonic() + seconds


def _times(work: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of so many calls."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        taken.append(max(1e-9, time.perf_counter() - start))
    return taken
