"""The tiers under the device, and how fast blocks come up from them and go down to them.

As said, or as measured.

Measured rates are those of ``python -m bench.tiers --json FILE``: for host memory copies to the device and back, for a
disk cold reads with checksums that leave nothing in the page cache (the default of ``pagedkv.Disk``), by the read path
that was fastest, and synced writes. Of several block sizes, the one nearest to the model's blocks counts.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pagedkv.errors import InvalidArgument
from pagedkv.spec.sizes import parse_size

TIERS = ("host", "disk")
LATENCY_S = {"host": 20e-6, "disk": 100e-6}
Bytes: TypeAlias = Any  # a number, or an array of them; and so are the seconds
_TIER = re.compile(r"([a-z]+)=([^@]+)(?:@([^@]+)/s)?", re.ASCII)
_BLOCK = re.compile(r"(\d{1,9}) KiB", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes/s of a tier's link, up to the device's side and down."""

    up: float
    down: float


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier under the device: its size in bytes, and its link."""

    name: str
    num_bytes: int
    rates: Rates

    def up_s(self, num_bytes: Bytes) -> Bytes:
        """Seconds until so many bytes have come up in one go."""
        return LATENCY_S[self.name] + num_bytes / self.rates.up

    def down_s(self, num_bytes: Bytes) -> Bytes:
        """Seconds until they have gone down."""
        return LATENCY_S[self.name] + num_bytes / self.rates.down


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates by tier, and what the report says of where they come from."""

    rates: dict[str, Rates]
    source: dict[str, object]


def read_moves(path: str | os.PathLike[str], block_bytes: int) -> Measured:
    """Rates out of a result of ``python -m bench.tiers``, for blocks of about this size.

    Raises
    ------
    InvalidArgument
        The file is something else.
    OSError
    """
    name = os.fspath(path)
    try:
        found = json.loads(Path(path).read_bytes())
        rows = [(str(row["case"]), str(row["block"]), float(row["gb_per_s"]) * 1e9) for row in found["rows"]]
        about = {key: str(found["environment"][key]) for key in ("cpu", "commit", "date")}
        block = min({block for _, block, _ in rows}, key=lambda block: abs(math.log(_bytes(block) / block_bytes)))
        cases = [(case.split(", "), rate) for case, at, rate in rows if at == block]
        rates = {"host": Rates(_best(cases, "host to device"), _best(cases, "device to host")), "disk": _disk(cases)}
    except (ValueError, TypeError, LookupError, RecursionError):
        raise InvalidArgument(
            f"--moves: {name[:200]} is no result of python -m bench.tiers --json FILE, which has rows of measured moves"
        ) from None
    return Measured(rates, {"file": Path(path).name, "block": block, **about})


def _disk(cases: list[tuple[list[str], float]]) -> Rates:
    """The fastest cold read that drops its pages, and the synced writes with as many checksums."""
    up = _best(cases, "cold read", last="drop")
    sums = next(case[1] for case, rate in cases if case[0] == "cold read" and case[-1] == "drop" and rate == up)
    return Rates(up, _best(cases, "write and sync", sums, last="drop"))


def _best(cases: list[tuple[list[str], float]], *first: str, last: str = "") -> float:
    best = max(rate for case, rate in cases if case[: len(first)] == [*first] and (not last or case[-1] == last))
    if not 0 < best < math.inf:
        raise ValueError("no rate")
    return best


def _bytes(block: str) -> int:
    found = _BLOCK.fullmatch(block)
    if found is None or not int(found[1]):
        raise ValueError(f"{block!r} is no block size")
    return int(found[1]) << 10


def parse_tiers(text: str, measured: Measured | None = None) -> tuple[TierSize, ...]:
    """``"host=256GiB@50GB/s,disk=4TB@6GB/s"``, or ``"none"``.

    A tier without a rate has the measured ones.

    Raises
    ------
    InvalidArgument
    """
    if text == "none":
        return ()
    tiers: list[TierSize] = []
    for part in text.split(","):
        found = _TIER.fullmatch(part.strip())
        if found is None or found[1] not in TIERS:
            raise InvalidArgument(f"--tiers: {part.strip()[:60]!r} is not such as host=256GiB@50GB/s or disk=4TB@6GB/s")
        if found[1] in [tier.name for tier in tiers]:
            raise InvalidArgument(f"--tiers: {found[1]} is named twice")
        tiers.append(_tier(found, measured))
    return tuple(sorted(tiers, key=lambda tier: TIERS.index(tier.name)))


def _tier(found: re.Match[str], measured: Measured | None) -> TierSize:
    name = found[1]
    try:
        size, rate = parse_size(found[2]), None if found[3] is None else parse_size(found[3])
    except InvalidArgument as problem:
        raise InvalidArgument(f"--tiers: {name}: {problem}") from None
    if not size or rate == 0:
        raise InvalidArgument(f"--tiers: {name}: neither its size nor its bandwidth can be 0")
    if rate is not None:
        return TierSize(name, size, Rates(float(rate), float(rate)))
    if measured is None:
        raise InvalidArgument(
            f"--tiers: {name} has no rate: say {name}={found[2][:20]}@50GB/s, or give measured ones with --moves FILE"
        )
    return TierSize(name, size, measured.rates[name])
