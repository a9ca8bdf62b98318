"""The table of hot loops for a terminal and for docs/kernels.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line per loop, with headings that name the units."""
    return [
        {
            "GPU": f"{row['gpu']}, {row['arch']}",
            "kernel": row["kernel"],
            "variant": row["variant"],
            "per": row["per"],
            "issue slots": row["issue_slots"],
            "tensor cycles": row["tensor_cycles"],
            "shared cycles": row["shared_cycles"],
            "registers": row["registers"],
            "spills": row["spill_bytes"],
            "CTAs/SM": row["ctas_per_sm"],
            "KiB in flight/SM": row["bytes_in_flight"] // 1024,
            "bound": f"{row['bound']:g} {row['unit']}",
            "binds": row["binds"],
        }
        for row in rows
    ]
