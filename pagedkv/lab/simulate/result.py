"""What serving a workload came to.

Times of each request, samples of the memory, and the rates made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedkv.lab.simulate.found import Found

Times = NDArray[np.float64]


class Log:
    """Taken down while a simulation runs.

    Attributes
    ----------
    arrived_s, first_s, ended_s : float64 [num_requests]; NaN where it has not happened.
    """

    def __init__(self, arrived_s: Times) -> None:
        self.arrived_s = arrived_s
        self.first_s = np.full(len(arrived_s), np.nan)
        self.ended_s = np.full(len(arrived_s), np.nan)
        self._weight = self._used = self._held = self._running = 0.0
        self.most_running = 0

    def sample(self, seconds: float, used_tokens: int, held_tokens: float, running: int) -> None:
        """For so long, sequences had so many tokens of KV in so many token slots."""
        self._weight += seconds
        self._used += seconds * used_tokens
        self._held += seconds * held_tokens
        self._running += seconds * running
        self.most_running = max(self.most_running, running)

    def sample_run(self, seconds: Times, used_tokens: Times, held_tokens: int, running: int) -> None:
        """As `sample` for each of several steps, with the same sums to the last bit.

        Both float64 [num_steps].
        """
        self._weight = _added(self._weight, seconds)
        self._used = _added(self._used, seconds * used_tokens)
        self._held = _added(self._held, seconds * held_tokens)
        self._running = _added(self._running, seconds * running)
        self.most_running = max(self.most_running, running)

    @property
    def tokens_per_slot(self) -> float:
        """Tokens of KV per slot held, over time; above 1 where slots are shared."""
        return self._used / self._held if self._held else 0.0

    @property
    def mean_held(self) -> float:
        """Slots held, over time."""
        return self._held / self._weight if self._weight else 0.0

    @property
    def mean_running(self) -> float:
        """Sequences, over time."""
        return self._running / self._weight if self._weight else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class SimResult:
    """One line of the table.

    Attributes
    ----------
    system : str
    requests, refused : how many were served, and how many could never be.
    seconds : from the first arrival to the last token, of the virtual clock.
    ttft_s, tpot_s : ``mean``, ``p50`` and ``p99``: until the first token, and per token after it.
    output_tokens_per_s, tokens_per_s : generated, and with prompts.
    hit_rate : by tier and ``total``: of prompt tokens.
    mean_running, most_running : sequences at once.
    tokens_per_slot : tokens of KV per slot of memory held, over time; 1 minus it is waste, beyond 1 is sharing
        A slot is the bytes of a token in all layers. With the system ``groups`` a token that a window or chunk has left
        behind takes less than a slot.
    memory_held : share of the device's slots, which is of its bytes, held by running sequences, over time.
    preemptions : by ``swap`` and ``recompute``.
    computed_tokens : prompt and output tokens computed, again where that was so.
    recomputed_tokens, restored_blocks : what became of suspended requests: their tokens that were computed once more,
        and their blocks that came back from colder tiers.
    moved_bytes : by direction.
    stalled_s : that steps waited for promotions.
    found : times to the first token by where the prompt was found, as :func:`pagedkv.lab.simulate.found.by_place` has
        them.
    lagging_tokens : that layers with full attention still had behind hits, as ``CacheStats.lagging_tokens``; None where
        all layers keep all tokens.
    steps, wall_s : of the simulation.
    """

    system: str
    requests: int
    refused: int
    seconds: float
    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]
    output_tokens_per_s: float
    tokens_per_s: float
    hit_rate: Mapping[str, float]
    mean_running: float
    most_running: int
    tokens_per_slot: float
    memory_held: float
    preemptions: Mapping[str, int]
    computed_tokens: int
    moved_bytes: Mapping[str, int]
    steps: int
    wall_s: float
    recomputed_tokens: int = 0
    restored_blocks: int = 0
    stalled_s: float = 0.0
    found: Found = field(default_factory=dict)
    parameters: Mapping[str, object] = field(default_factory=dict)
    lagging_tokens: int | None = None

    @property
    def disk_written_bytes(self) -> int | None:
        """Bytes written to the disk; None without one."""
        if not dict(self.parameters.get("blocks", {})).get("disk"):  # type: ignore[call-overload]
            return None
        return sum(count for way, count in self.moved_bytes.items() if way.endswith("_to_disk"))

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        if self.lagging_tokens is None:
            del plain["lagging_tokens"]
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in plain.items()}


def clock(start: float, seconds: Times) -> Times:
    """When each of several steps is over, added up one after the other; float64 [num_steps]."""
    times: Times = np.add.accumulate(np.concatenate(([start], seconds)))[1:]
    return times


def _added(total: float, values: Times) -> float:
    return float(clock(total, values)[-1])


def spread(values: Times) -> dict[str, float]:
    """``mean``, ``p50`` and ``p99`` of the known values; zeros where there are none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    return {"mean": float(known.mean()), "p50": float(np.median(known)), "p99": float(np.percentile(known, 99))}


def summarise(
    system: str, log: Log, outputs: NDArray[np.int64], prompts: NDArray[np.int64], capacity_tokens: int, refused: int,
    **counted: object,
) -> SimResult:  # fmt: skip
    """The rates of a run that is over.

    `outputs` and `prompts` are tokens of each request, int64 [n].
    """
    served = ~np.isnan(log.ended_s)
    seconds = float(np.nanmax(log.ended_s) - log.arrived_s[0]) if served.any() else 0.0
    several = served & (outputs > 1)
    tpot = (log.ended_s - log.first_s)[several] / (outputs[several] - 1)
    made, asked = int(outputs[served].sum()), int(prompts[served].sum())
    return SimResult(
        system=system,
        requests=int(served.sum()),
        refused=refused,
        seconds=seconds,
        ttft_s=spread(log.first_s - log.arrived_s),
        tpot_s=spread(tpot),
        output_tokens_per_s=made / seconds if seconds else 0.0,
        tokens_per_s=(made + asked) / seconds if seconds else 0.0,
        mean_running=log.mean_running,
        most_running=log.most_running,
        tokens_per_slot=log.tokens_per_slot,
        memory_held=log.mean_held / capacity_tokens,
        **counted,  # type: ignore[arg-type]
    )
