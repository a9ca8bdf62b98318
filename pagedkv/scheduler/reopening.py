"""How the other branches of a request come back after a suspension.

They share the blocks of the branches before them.

A request is refused or taken by its worst case with the prompt shared, so after a suspension its branches have to share
it again, whatever the tree has. The tree lacks blocks that a quota refused, that were purged, or that were on their way
to another tier when they were committed. A fork shares blocks without the tree's help.
"""

from __future__ import annotations

import numpy as np

from pagedkv.cache.cache import KVCache
from pagedkv.cache.sequence import Sequence
from pagedkv.errors import OutOfBlocks
from pagedkv.scheduler.request import Branch, Tokens


def reopen(cache: KVCache, branch: Branch, must: bool, waits: bool) -> Sequence | None:
    """Open a suspended branch beside those of its request that are open.

    It holds no block twice that they hold.

    Its sequence comes from the cache if that gives it the blocks that the others hold, because the cache may have some
    of its own tokens too; otherwise it is forked from the branch with which it shares most tokens.

    Parameters
    ----------
    cache : KVCache
    branch : Branch
        Suspended; another one of its request is open and has computed all its tokens but the last.
    must : bool
        Fork it, which takes no block, where the cache has no room to bring up the branch's blocks. Else None.
    waits : bool
        Bring its cached blocks up from slower tiers, and wait for that. Else take those that are on the device.
    """
    relative, common = _closest(branch)
    kin = relative.seq
    assert kin is not None
    size, table = cache.spec.block_size, cache.table
    whole = common // size
    if table.info(kin.row).num_committed >= whole:  # the tree has them: then a match most likely finds them
        try:
            seq = _from_cache(cache, branch, waits)
        except OutOfBlocks:
            if not must:
                return None
        else:
            if seq.blocks[:whole].tolist() == kin.blocks[:whole].tolist():
                cache.count(seq)
                return seq
            seq.release()
    (seq,) = kin.fork()
    seq.truncate(common)
    seq.append(branch.saved[common:])
    return seq


def _from_cache(cache: KVCache, branch: Branch, waits: bool) -> Sequence:
    request = branch.request
    load = cache.begin_load(
        branch.saved, request.namespace, session=request.session, on_trial=True, trace=request.trace
    )
    try:
        if not waits:
            load.keep_arrived()
        return load.sequence()
    finally:
        load.cancel()


def _closest(branch: Branch) -> tuple[Branch, int]:
    """The open branch that shares most tokens with a suspended one of its request.

    And how many tokens those are.
    """
    open_ones = [other for other in branch.request.live() if other.seq is not None]
    shared = [common_tokens(other.tokens, branch.saved[:-1]) for other in open_ones]
    at = int(np.argmax(shared))
    return open_ones[at], shared[at]


def common_tokens(a: Tokens, b: Tokens) -> int:
    """Leading tokens in which `a` and `b` agree."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
