"""A cache's side of the store that it shares with others: its lookups and its sends."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pagedkv._core.dispatch import Dispatch
from pagedkv._core.placement import Placement
from pagedkv.cache.cost_model import CostModel
from pagedkv.cache.remote.claims import REMOTE, Claims
from pagedkv.cache.remote.lookups import Lookups
from pagedkv.cache.remote.sender import Asked, Sender, SendingCarrier
from pagedkv.cache.runtime import Runtime
from pagedkv.cache.storage import Carrier
from pagedkv.errors import TierError
from pagedkv.spec.remote import Remote
from pagedkv.spec.sizes import parse_size
from pagedkv.tiers.remote.tier import RemoteTier

LOOK_S = 0.002  # a purge looks so often whether sends under way are over


class Shared:
    """Lookups and sends of one cache.

    Parameters
    ----------
    placement : Placement
        With a pool of claims.
    tier : open.
    options : of the store.
    block_bytes : of a block.

    Attributes
    ----------
    claims : names blocks.
    lookups, sender : from `connect` on.
    """

    def __init__(self, placement: Placement, tier: RemoteTier, options: Remote, block_bytes: int) -> None:
        self._placement, self._tier, self._options = placement, tier, options
        self.claims = Claims(placement, options.secret_bytes(), block_bytes)
        self._block_bytes = block_bytes
        self.lookups: Lookups | None = None
        self.sender: Sender | None = None

    def connect(self, carrier: Carrier, costs: CostModel, dispatch: Dispatch, runtime: Runtime) -> None:
        """Begin to ask and to send.

        Parameters
        ----------
        carrier : a mover.
        costs : says which blocks are worth sending.
        dispatch : of the placement.
        runtime : whose threads ask.
        """
        tier, options = self._tier, self._options
        self.lookups = Lookups(tier, self.claims, dispatch, options.min_blocks, runtime, costs.latencies.lookup)
        self.sender = Sender(
            self._placement, cast(SendingCarrier, carrier), self.claims, costs, lambda: tier.may_ask, dispatch,
            parse_size(options.max_queued),
        )  # fmt: skip

    def publish(self, prompt: NDArray[np.int32], root: int, num_blocks: int, wait_s: float | None) -> int:
        """Send the first blocks of a prompt, and wait; how many of them the store has.

        Parameters
        ----------
        prompt : int32 [n]
        root : of its namespace.
        num_blocks : of them, all on the device, and owned by the caller.
        wait_s : seconds after which the rest goes on in the background; None: as long as the calls may take.
        """
        assert self.sender is not None
        until = math.inf if wait_s is None else time.monotonic() + wait_s
        done = stored = 0
        while done < num_blocks:
            asked = Asked(prompt, root, num_blocks, done)
            self.sender.ask(asked)
            left_s = None if until == math.inf else max(0.0, until - time.monotonic())
            if not self.sender.wait(asked, left_s) or not asked.num_sent:
                break
            if stored == done:
                stored += asked.num_stored
            done += asked.num_sent
        return stored

    def purge(self, digest: bytes) -> None:
        """Delete a namespace's blocks from the store, after this cache's sends under way.

        Raises
        ------
        TierError
            The store did not confirm it.
        """
        assert self.sender is not None
        until = time.monotonic() + 2 * self._options.write_s
        while self.sender.may_still_write:
            if time.monotonic() > until:
                raise TierError("blocks of this cache are still on their way to the remote store")
            time.sleep(LOOK_S)
        self._tier.purge(digest)

    def drain(self, within_s: float) -> None:
        """Wait until committed blocks are sent or refused, at most so many seconds."""
        until = time.monotonic() + within_s
        while self._tier.may_ask and time.monotonic() < until and self._is_sending():
            time.sleep(LOOK_S)

    def stats(self) -> dict[str, Any]:
        """Counters of the store, of lookups and of sends."""
        pool, sender = self._placement.pools[REMOTE], self.sender
        assert pool is not None
        assert sender is not None
        return {
            **dataclasses.asdict(self._tier.stats()),
            "claims": pool.capacity - pool.counts()["free"],
            "queued_bytes": sender.num_blocks * self._block_bytes,
            "not_worth_sending": sender.declined_blocks,
            "send_failures": sender.failures,
            "lookup_failures": 0 if self.lookups is None else self.lookups.failures,
        }

    def close(self) -> None:
        """Ask no more, and take no more to be published."""
        if self.lookups is not None:
            self.lookups.close()
        if self.sender is not None:
            self.sender.close()

    def _is_sending(self) -> bool:
        assert self.sender is not None
        return not self.sender.is_idle or bool(self._placement.num_unsent)
