"""Opens the remote tier that a cache's options describe."""

from __future__ import annotations

import time

from pagedkv.errors import TierError
from pagedkv.spec.remote import Mooncake, Objects, Remote, Valkey
from pagedkv.spec.sizes import num_bytes_of
from pagedkv.tiers.remote.store import Store, Unreachable
from pagedkv.tiers.remote.tier import RemoteTier, log
from pagedkv.tiers.remote.value import Values

ANSWER_S = 2.0  # to the first question, beside connecting


def open_store(remote: Remote) -> Store:
    """The store of some options, not connected yet.

    Raises
    ------
    ImportError, InvalidArgument
    """
    if isinstance(remote, Valkey):
        ca_file = None if remote.ca_file is None else str(remote.ca_file)
        if remote.cluster:
            from pagedkv.tiers.remote.glide import ClusterStore

            return ClusterStore(remote.url, connect_s=remote.connect_s, ttl_s=remote.ttl_s, ca_file=ca_file)
        from pagedkv.tiers.remote.valkey import ValkeyStore

        return ValkeyStore(remote.url, connect_s=remote.connect_s, ttl_s=remote.ttl_s, ca_file=ca_file)
    if isinstance(remote, Objects):
        from pagedkv.tiers.remote.objects import ObjectStore

        return ObjectStore(remote.url, remote.options)
    if isinstance(remote, Mooncake):
        from pagedkv.tiers.remote.mooncake import MooncakeStore

        return MooncakeStore(
            remote.master, host=remote.host, protocol=remote.protocol, devices=remote.devices,
            segment_bytes=num_bytes_of(remote.segment, "segment"),
        )  # fmt: skip
    raise TierError(f"no store is known for {type(remote).__name__}")


def open_remote(remote: Remote, fingerprint: bytes, block_bytes: int) -> RemoteTier | None:
    """The remote tier of some options; None where it is left out, with a line in the log.

    A store that cannot be reached now begins off, and is tried again later, unless it is required.

    Raises
    ------
    TierError
        It is required, and cannot be reached or can never serve.
    ImportError, InvalidArgument
    """
    values = Values(
        remote.secret_bytes(), fingerprint, block_bytes, shard=remote.shard, seal=remote.seal, prefix=remote.prefix
    )
    store = open_store(remote)
    tier = RemoteTier(
        store, values, remote.claims, where=remote.where,
        lookup_s=remote.lookup_s, read_s=remote.read_s, write_s=remote.write_s, purge_s=remote.purge_s,
    )  # fmt: skip
    try:
        store.open(time.monotonic() + remote.connect_s + ANSWER_S)
    except TierError as problem:
        tier.close()
        if remote.required:
            raise TierError(f"the remote tier {remote.where} cannot be used: {problem}") from None
        log.warning("the remote tier %s is left out: %s", remote.where, problem)
        return None
    except Unreachable as problem:
        if remote.required:
            tier.close()
            raise TierError(f"the remote tier {remote.where} cannot be reached: {problem}") from None
        tier.unreachable_at_first(problem)
    except BaseException:
        tier.close()
        raise
    return tier
