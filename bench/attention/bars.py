"""The bars of attention on an H100, and how the rows of a run stand against them.

A bar without figures says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.attention.systems import MAX_ERROR

Row = Mapping[str, Any]
NOT_MEASURED = "not measured"
LARGE_KV_MIB = 256.0  # from which decode is held against the memory's ceiling


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure against its bar.

    Attributes
    ----------
    bar, case : which bar, where.
    figure, limit : None where it was not measured; ``at_most`` says on which side of the limit is good.
    against : what the figure is relative to.
    """

    bar: str
    case: str
    figure: float | None
    limit: float
    at_most: bool = False
    against: str = ""

    def row(self) -> dict[str, Any]:
        """As a line of a table: met is yes, no, or that it was not measured."""
        met = NOT_MEASURED
        if self.figure is not None:
            met = "met" if (self.figure <= self.limit if self.at_most else self.figure >= self.limit) else "missed"
        limit = f"{'<=' if self.at_most else '>='} {self.limit:g}"
        row = {"bar": self.bar, "case": self.case, "figure": self.figure, "limit": limit, "met": met}
        return {**row, "against": self.against}


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line per bar and case."""
    measured = [row for row in rows if row["status"] == "measured" and "us" in row]
    verdicts: list[Verdict] = []
    for judge in (_decode, _paging, _skew, _small, _blocks, _prefill, _cascade, _fp8, _error):
        verdicts += judge(measured)
    return [verdict.row() for verdict in verdicts]


def _in(rows: Iterable[Row], section: str) -> list[Row]:
    return [row for row in rows if row["section"] == section]


def _ours(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("default")]


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: float(row["us"]), default=None)


def _peers(rows: Iterable[Row], *names: str) -> list[Row]:
    return [row for row in rows if row["system"].startswith(names)]


def _cases(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows))


def _against_best(bar: str, case: str, own: Row, rivals: list[Row], limit: float = 1.0) -> Verdict:
    best = _fastest(rivals)
    if best is None:
        return Verdict(bar, case, None, limit, against="no peer was measured")
    return Verdict(bar, case, best["us"] / own["us"], limit, against=best["system"])


def _decode(rows: list[Row]) -> list[Verdict]:
    core = _in(rows, "core")
    found = []
    for own in _ours(core):
        if own["kv_mib"] >= LARGE_KV_MIB:
            found.append(Verdict("decode: share of the read ceiling", own["case"], own.get("of_read"), 0.9))
        rivals = _peers([row for row in core if row["case"] == own["case"]], "FlashInfer", "FA3", "XQA")
        found.append(_against_best("decode: against the best peer", own["case"], own, rivals))
    return found or [Verdict("decode", "core set", None, 0.9)]


def _paging(rows: list[Row]) -> list[Verdict]:
    ours = {(row["batch"], row["layout"]): row for row in _ours(_in(rows, "paging"))}
    found = []
    for (batch, layout), row in ours.items():
        flat = ours.get((batch, "contiguous"))
        if layout in ("shuffled", "pool") and flat:
            slower = row["us"] / flat["us"]
            found.append(Verdict("paged against contiguous: time", row["case"], slower, 1.02, True, "contiguous"))
    return found or [Verdict("paged against contiguous: time", "-", None, 1.02, True)]


def _skew(rows: list[Row]) -> list[Verdict]:
    ours = {row["lengths"]: row for row in _ours(_in(rows, "skew"))}
    both = "zipf" in ours and "uniform" in ours
    figure = ours["zipf"]["tb_per_s"] / ours["uniform"]["tb_per_s"] if both else None
    case = ours["zipf"]["case"] if both else "-"
    return [Verdict("skewed lengths: share of the uniform batch's bandwidth", case, figure, 0.9)]


def _small(rows: list[Row]) -> list[Verdict]:
    part = _in(rows, "small")
    found = []
    for own in _ours(part):
        rivals = _peers([row for row in part if row["case"] == own["case"]], "FlashInfer")
        found.append(_against_best("small decode: against FlashInfer", own["case"], own, rivals))
    return found or [Verdict("small decode: against FlashInfer", "-", None, 1.0)]


def _blocks(rows: list[Row]) -> list[Verdict]:
    ours = {row["block_size"]: row for row in _ours(_in(rows, "blocks"))}
    both = 16 in ours and 128 in ours
    figure = ours[128]["us"] / ours[16]["us"] if both else None
    return [Verdict("block size 16 against 128: bandwidth", ours[16]["case"] if both else "-", figure, 0.97)]


def _prefill(rows: list[Row]) -> list[Verdict]:
    part = _in(rows, "prefill")
    found = []
    for system, limit, rival in (("prefill_mma", 300.0, "fa2"), ("prefill_wgmma", 550.0, "fa3")):
        own = {row["case"]: row for row in part if row["system"] == system}
        large = next((row for case, row in own.items() if case.endswith("8K/8K")), None)
        figure = large["tflop_per_s"] if large else None
        found.append(Verdict(f"{system}: TFLOP/s", large["case"] if large else "8K/8K", figure, limit))
        for case, row in own.items():
            names = (f"FlashInfer prefill, {rival}", *(("FA3",) if rival == "fa3" else ()))
            rivals = _peers([other for other in part if other["case"] == case], *names)
            found.append(_against_best(f"{system}: against {rival.upper()}", case, row, rivals))
    return found


def _cascade(rows: list[Row]) -> list[Verdict]:
    part = _in(rows, "cascade")
    found = []
    for case in _cases(part):
        here = {row["system"]: row for row in part if row["case"] == case}
        own = here.get("cascade")
        if own is None:
            continue
        found.append(_against_best("cascade: against FlashInfer's", case, own, _peers(here.values(), "FlashInfer")))
        flat = here.get("flat decode")
        if flat and own["prefix"] == 32768 and own["requests"] == 256:
            found.append(Verdict("cascade: times faster than flat decode", case, flat["us"] / own["us"], 10.0))
    return found or [Verdict("cascade", "-", None, 1.0)]


def _fp8(rows: list[Row]) -> list[Verdict]:
    ours = {(row["batch"], row["kv_dtype"]): row for row in _ours(_in(rows, "fp8"))}
    found = [
        Verdict("fp8 KV: tokens/s of bfloat16", batch, ours[batch, "bfloat16"]["us"] / row["us"], 1.8)
        for (batch, dtype), row in ours.items()
        if dtype != "bfloat16" and (batch, "bfloat16") in ours
    ]
    return found or [Verdict("fp8 KV: tokens/s of bfloat16", "-", None, 1.8)]


def _error(rows: list[Row]) -> list[Verdict]:
    own = max(_ours(rows), key=lambda row: float(row["error"]), default=None)
    case = f"{own['case']}, {own['system']}" if own else "-"
    return [Verdict("error against float64", case, own["error"] if own else None, MAX_ERROR, True)]
