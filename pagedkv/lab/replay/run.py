"""``pagedkv replay`` as a library: a Result for each pair of policy and capacity."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay.capacity import Capacity, not_a_size, resolve
from pagedkv.lab.replay.engine_groups import run_groups
from pagedkv.lab.replay.engine_real import require_folder, run_real
from pagedkv.lab.replay.engine_sim import run_sim
from pagedkv.lab.replay.load import load_trace
from pagedkv.lab.replay.options import Options, check_policies
from pagedkv.lab.replay.pages import ModelPages, model_pages
from pagedkv.lab.replay.progress import Progress, Silent
from pagedkv.lab.replay.references import BOUNDS, References
from pagedkv.lab.replay.result import MOVES, Json, Outcome, Result, hit_counts
from pagedkv.lab.replay.trace import Trace, require_trace
from pagedkv.lab.replay.weights import flop_weighted_hit_rate, token_hit_rate
from pagedkv.spec.sizes import Blocks, Bytes, Size


def replay(
    trace: Trace | str | os.PathLike[str],
    policies: Sequence[str] = ("lru",),
    capacities: Capacity | Size | Iterable[Capacity | Size] = "5%",
    *,
    options: Options | None = None,
    progress: Progress | None = None,
    references: References | None = None,
) -> list[Result]:
    """Replay a trace under each policy at each capacity, every time from an empty cache.

    Parameters
    ----------
    trace : a Trace, or what ``load_trace`` takes.
    policies : of ``lru arc s3fifo hazard``, other registered ones and the bounds ``infinite min min-bypass``.
    capacities : one or several; a size is that of a device tier alone (``"5%"``, ``"5000 blocks"``, ``Blocks(5000)``).
    options : engine and the rest; default ``Options()``.
    progress : called for each replay; default: not called.
    references : bounds already computed for this trace, with the same ``options.generating``.

    Returns
    -------
    list of Result, capacity by capacity, in the order of ``policies``.

    Raises
    ------
    InvalidArgument : unknown policy (the message lists the known), empty lists, a capacity that is none, requests that
        generate in a trace without output lengths, a stake without the policy ``hazard``.
    TraceFormatError : ``trace`` names a file that cannot be read as one.
    """
    options = Options() if options is None else options
    progress = Silent() if progress is None else progress
    loaded = load_trace(trace) if isinstance(trace, str | os.PathLike) else require_trace(trace)
    check_policies(policies)
    if options.hazard_stake is not None and "hazard" not in policies:
        raise InvalidArgument(
            f"hazard_stake is for the policy 'hazard', not among {', '.join(policies)}: add it, or leave it out"
        )
    pages = _pages(loaded, policies, options)
    sizes = [_capacity(loaded, capacity, options) for capacity in _several(capacities)]
    if not sizes:
        raise InvalidArgument("at least one capacity is needed")
    for size in sizes:
        require_folder(size)
    references = References(loaded, options.generating) if references is None else references
    if references.generating != options.generating:
        raise InvalidArgument(
            f"references were made for generating={references.generating}, options say {options.generating}: "
            "make them with References(trace, options.generating)"
        )
    return [_one(loaded, policy, size, options, progress, references, pages) for size in sizes for policy in policies]


def _pages(trace: Trace, policies: Sequence[str], options: Options) -> ModelPages | None:
    """The pages of each group of layers; None where every layer keeps every token."""
    layers = options.layers
    pages = None if layers is None else model_pages(layers.name, layers.groups, trace.block_size)
    if pages is None:
        return None
    refused = [f"the policy {name!r}" for name in policies if name != "lru" and name not in BOUNDS]
    if options.engine != "sim":
        refused.append(f"the engine {options.engine!r}")
    if options.generating is not None:
        refused.append("generating (--generating)")
    if refused:
        raise InvalidArgument(
            f"{pages.name}: layers that keep only tokens they can still read are replayed with the policy 'lru', the "
            f"engine 'sim' and requests that take no time: leave {refused[0]} out, or keep all tokens of every layer "
            "(Options(layers=None), --keep-window)"
        )
    return pages


def _several(
    capacities: Capacity | Size | Iterable[Capacity | Size],
) -> list[Capacity | Size]:
    if isinstance(capacities, Capacity | str | Blocks | Bytes):
        return [capacities]
    try:
        return list(capacities)
    except TypeError:
        raise not_a_size("capacities", capacities) from None


def _capacity(trace: Trace, capacity: Capacity | Size, options: Options) -> Capacity:
    if isinstance(capacity, Capacity):
        return capacity
    return resolve(
        trace, device_memory=capacity, bytes_per_token=options.bytes_per_token, names=("capacities",) * 3
    )


def _one(
    trace: Trace,
    policy: str,
    capacity: Capacity,
    options: Options,
    progress: Progress,
    references: References,
    pages: ModelPages | None,
) -> Result:
    progress.start(f"{policy} {'+'.join(f'{n:,}' for _, n in capacity.tiers())}", trace.num_requests)
    start = time.perf_counter()
    if policy in BOUNDS:
        engine, outcome = "bound", references.outcome(policy, capacity)
        parameters: Json = {}
        progress.advance(trace.num_requests)
    elif pages is not None:
        engine = options.engine
        outcome = run_groups(trace, pages, capacity, inclusive=options.inclusive, progress=progress)
        memory = list(capacity.memory(pages.all_bytes))
        parameters = {"inclusive": list(options.inclusive), **pages.to_json(), "memory_bytes": memory}
    else:
        engine = options.engine
        block_bytes = options.block_bytes if engine == "real" else trace.block_size * options.bytes_per_token
        sim = partial(run_sim, generating=options.generating, hazard_stake=options.hazard_stake)
        real = partial(run_real, cost_blocks=options.model.balance_tokens / trace.block_size)
        run = real if engine == "real" else sim
        outcome = run(
            trace,
            policy,
            capacity,
            demotion=options.demotion,
            inclusive=options.inclusive,
            block_bytes=block_bytes,
            progress=progress,
        )
        parameters = {
            "demotion": options.demotion,
            "inclusive": list(options.inclusive),
            "block_bytes": block_bytes,
            "cost_tokens": options.model.balance_tokens,
        }
    parameters["generating_ms"] = options.generating
    if policy == "hazard":
        stake = options.hazard_stake
        parameters["hazard_stake"] = str(stake) if stake == float("inf") else stake  # JSON knows no infinity
    wall_s = time.perf_counter() - start
    return _result(trace, policy, engine, capacity, options, outcome, parameters, references, wall_s)


def _result(
    trace: Trace,
    policy: str,
    engine: str,
    capacity: Capacity,
    options: Options,
    outcome: Outcome,
    parameters: Json,
    references: References,
    wall_s: float,
) -> Result:
    ns = outcome.bookkeeping_ns
    return Result(
        policy=policy,
        engine=engine,
        capacity=capacity,
        block_accesses=trace.num_accesses,
        hit_blocks=hit_counts(outcome),
        token_hit_rate=token_hit_rate(trace, outcome.hits),
        flop_weighted_hit_rate=flop_weighted_hit_rate(trace, outcome.hits, options.model),
        lru_hit_blocks=references.total("lru", capacity),
        min_hit_blocks=references.total("min", capacity),
        gap_to_min_closed=references.gap_closed(int(outcome.hits.sum(dtype=np.int64)), capacity),
        bytes={name: int(outcome.moved_bytes.get(name, 0)) for name in MOVES},
        bookkeeping_us_per_request=None if ns is None else ns / 1000 / trace.num_requests,
        wrong_bytes=outcome.wrong_bytes,
        verified_bytes=outcome.verified_bytes,
        wall_s=wall_s,
        parameters=parameters,
        counters=dict(outcome.counters),
        hits_per_request=outcome.hits.astype(np.int64),
    )
