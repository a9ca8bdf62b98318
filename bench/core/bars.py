"""The bars of the bookkeeping benchmarks, and the comparison of a run's figures with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OWN = "pagedkv"


@dataclass(frozen=True, slots=True)
class Bar:
    """What pagedkv should reach in one case.

    Attributes
    ----------
    work : str
        The case in words.
    case : str
        pagedkv's case.
    limit : float
        Largest value that meets the bar, in `unit`.
    unit : str
        Unit of the limit and of the figures.
    peer_cases : tuple of str
        Peers' cases to compare with; the best figure among them is the best peer. A match that takes no
        references is less work than pagedkv's case: such a comparison leans to the peer.
    """

    work: str
    case: str
    limit: float
    unit: str
    peer_cases: tuple[str, ...]


BARS = (
    Bar("alloc + free, 16 blocks a call", "allocate_free_16", 60, "ns/block", ("allocate_free_16",)),
    Bar("alloc + free, 256 blocks a call", "allocate_free_256", 10, "ns/block", ("allocate_free_256",)),
    Bar("decode step, 256 sequences, arrays ready", "decode_step_256", 6, "us", ("decode_step_256",)),
    Bar("decode step, 4,096 sequences, arrays ready", "decode_step_4096", 150, "us", ("decode_step_4096",)),
    Bar("hit 8k, buffer, references", "hit_buffer_refs_8192", 4, "us", ("hit_buffer_8192",)),
    Bar("hit 128k, buffer, references", "hit_buffer_refs_131072", 40, "us", ("hit_buffer_131072",)),
    Bar("hit 8k, list, references", "hit_list_refs_8192", 15, "us", ("hit_list_8192",)),
    Bar("hit 128k, list, references", "hit_list_refs_131072", 250, "us", ("hit_list_131072",)),
    Bar(
        "hit 8k, list, references, 64-token nodes",
        "hit_list_refs_split64_8192",
        40,
        "us",
        ("hit_list_refs_split64_8192", "hit_list_refs_8192"),
    ),
    Bar(
        "hit 128k, list, references, 64-token nodes",
        "hit_list_refs_split64_131072",
        600,
        "us",
        ("hit_list_refs_split64_131072", "hit_list_refs_131072"),
    ),
    Bar(
        "insert a new 8k prompt, buffer",
        "insert_buffer_8192",
        15,
        "us",
        ("insert_buffer_8192", "insert_list_8192"),
    ),
    *(
        Bar(
            f"evict + alloc + insert, {size} blocks cached",
            f"evict_insert_{blocks}",
            60,
            "ns/block",
            ("evict_insert_100000",),
        )
        for size, blocks in (("100k", 100_000), ("1M", 1_000_000), ("10M", 10_000_000))
    ),
    Bar("memory, runs of 64 blocks", "memory_runs_of_64", 80, "B/block", ("memory_runs_of_64",)),
    Bar("replay, bookkeeping of a request", "replay", 30, "us/request", ("replay",)),
)


def compare(rows: Iterable[Mapping[str, Any]], bars: Iterable[Bar] = BARS) -> list[dict[str, Any]]:
    """One row per bar that pagedkv has a figure for, with the best peer of the same run.

    Parameters
    ----------
    rows : figures of one run, with the keys ``system``, ``variant``, ``case``, ``value``.
    bars : the bars to look at.

    Returns
    -------
    list of dict
        ``work``, ``unit``, ``pagedkv``, ``bar``, ``met`` (bool), ``best peer``, ``peer`` (its figure) and
        ``ratio`` (peer over pagedkv); the last three are None without a peer.
    """
    by_case: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("value") is not None:
            by_case.setdefault(row["case"], []).append(row)
    compared = []
    for bar in bars:
        own = [
            row["value"] for row in by_case.get(bar.case, []) if row["system"] == OWN and not row["variant"]
        ]
        if not own:
            continue
        peers = [row for case in bar.peer_cases for row in by_case.get(case, []) if row["system"] != OWN]
        best = min(peers, key=lambda row: float(row["value"]), default=None)
        compared.append(
            {
                "work": bar.work,
                "unit": bar.unit,
                "pagedkv": own[0],
                "bar": bar.limit,
                "met": own[0] <= bar.limit,
                "best peer": f"{best['system']} {best['variant']}".strip() if best else None,
                "peer": best["value"] if best else None,
                "ratio": best["value"] / own[0] if best and own[0] > 0 else None,
            }
        )
    return compared
