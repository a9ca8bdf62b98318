"""When the first token came, by where the prompt's prefix was found.

``device``, ``host``, ``disk``   at least half of the prompt was cached, and this is the coldest tier that some of it
                                 came from: what the rest had to wait for
``part``                         less than half of it was cached, wherever
``none``                         nothing was
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.lab.simulate.links import TIERS, TierSize
from pagedkv.spec.groups import Group

PLACES = ("device", *TIERS)
KINDS = (*PLACES, "part", "none")
Found = Mapping[str, Mapping[str, float]]


def place_of(name: str) -> int:
    """The column of a tier as a request's hits name it.

    What is reused of a block in part is copied on the device.
    """
    return 0 if name == "partial" else PLACES.index(name)


def bytes_by_group(found: NDArray[np.int64], groups: Sequence[Group]) -> NDArray[np.int64]:
    """Bytes of the found tokens where layers keep only their reach: int64 [num_requests, 3].

    Layers that see everything load all tokens. The others load a tail, which counts to the coldest tier with a part of
    the prompt.

    Parameters
    ----------
    found : int64 [num_requests, 3]; prompt tokens by tier, in whole blocks.
    groups : of layers, the first of which sees everything.
    """
    size = groups[0].spec.block_size
    num_bytes = found // size * groups[0].page_bytes
    coldest = np.where(found > 0, np.arange(len(PLACES)), 0).max(axis=1)
    for i, blocks in enumerate((found.sum(axis=1) // size).tolist()):
        num_bytes[i, coldest[i]] += sum(group.need(blocks) * group.page_bytes for group in groups[1:])
    return num_bytes


def by_place(
    found: NDArray[np.int64], prompts: NDArray[np.int64], ttft_s: NDArray[np.float64], tiers: Sequence[TierSize],
    num_bytes: NDArray[np.int64],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Figures of the requests of each kind that there are.

    Parameters
    ----------
    found : int64 [num_requests, 3]; prompt tokens by the tier that they were found in.
    prompts : int64 [num_requests]
    ttft_s : float64 [num_requests]; NaN for a request without a first token, which is left out.
    tiers : under the device.
    num_bytes : int64 [num_requests, 3]; KV of these tokens.

    Returns
    -------
    dict
        By kind: ``requests``; means of ``prompt_tokens`` and ``found_tokens``; the median of ``load_s``, which a
        request's own bytes take on their links with no other bytes before them; ``ttft_p50_s`` and ``ttft_p99_s``.
    """
    total = found.sum(axis=1)
    coldest = np.where(found > 0, np.arange(len(PLACES)), 0).max(axis=1)
    kinds = np.where(total == 0, KINDS.index("none"), np.where(2 * total < prompts, KINDS.index("part"), coldest))
    loads = np.zeros(len(found))
    for tier in tiers:
        own = num_bytes[:, PLACES.index(tier.name)]
        loads += np.where(own, tier.up_s(own), 0.0)
    figures = {}
    for number, kind in enumerate(KINDS):
        chosen = (kinds == number) & ~np.isnan(ttft_s)
        if chosen.any():
            figures[kind] = {
                "requests": int(chosen.sum()),
                "prompt_tokens": float(prompts[chosen].mean()),
                "found_tokens": float(total[chosen].mean()),
                "load_s": float(np.median(loads[chosen])),
                "ttft_p50_s": float(np.median(ttft_s[chosen])),
                "ttft_p99_s": float(np.percentile(ttft_s[chosen], 99)),
            }
    return figures
