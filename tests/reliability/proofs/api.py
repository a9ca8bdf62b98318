"""Hostile callers: every public call with arbitrary arguments.

Also inside itself, after close, and with forged handles.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from tests.cache.oddities import NUMBERS, ODDITIES, ForeignError
from tests.reliability import small_store as small
from tests.reliability.api_world import KEPT, ApiWorld, Call, reenter
from tests.reliability.proof import Proof, Tally, Tick

BATCH = 400  # calls on one world; then its books are recounted
CLOSED = 100  # of these, on what was closed before
HEAVY = {"KVCache", "DiskTier", "Mover", "close", "prefetch_likely", "set_kind of a learner"}  # make threads or files
SCALARS = [
    np.int64(-1), np.uint64(2**64 - 1), np.float64("nan"), np.str_("lru"), np.bytes_(b"x" * 32),
    np.datetime64(0, "s"), np.void(b"abcd"), np.array(7), np.array([2**31 - 1]), np.array([0, 0]),
    np.arange(4, dtype=np.int8),
]  # fmt: skip


def odd(world: ApiWorld, choose: random.Random) -> Any:
    """Something that a caller might pass."""
    kind = choose.random()
    if kind < 0.3:
        return choose.choice(NUMBERS)
    if kind < 0.7:
        return choose.choice(ODDITIES)
    if kind < 0.77:
        return choose.choice(world.near_misses())
    if kind < 0.85:
        return choose.choice(SCALARS)
    if kind < 0.9:
        return [choose.choice(NUMBERS + ODDITIES) for _ in range(choose.randrange(4))]
    if kind < 0.95:
        return _array(choose)
    return reenter(world, choose)


def _array(choose: random.Random) -> Any:
    """Moves, or an arena, or a row of ids, of a shape and type that may be wrong."""
    kinds = ["u1", "i1", "i4", "i8", "u8", "f4", "O", "S4", "V8", "?", [("transfer", "i8")], _moves(choose)]
    shape = choose.choice([(), (0,), (1,), (3,), (1, small.BLOCK_BYTES), (2, 3), (1, 2, 4)])
    return np.zeros(shape, choose.choice(kinds))


def _moves(choose: random.Random) -> list[tuple[str, str]]:
    names = ["transfer", "src_tier", "dst_tier", "src_block", "dst_block"]
    return [(name, choose.choice(["i8", "i1", "i4", "u8", "f8", "O", "S3", "?"])) for name in names]


def attempt(
    call: Call, world: ApiWorld, choose: random.Random, tally: Tally, odds: dict[Any, Any] | None = None
) -> None:
    """Make the call with odd arguments; only documented errors may come out of it.

    Parameters
    ----------
    odds : by place: those. Default: some, at places by chance.
    """
    arguments, options = list(call.arguments), dict(call.options or {})
    places: list[Any] = [*range(len(arguments)), *options]
    arity = odds is None and choose.random() < 0.02
    if odds is None:
        chosen = choose.sample(places, min(len(places), choose.choice((0, 1, 1, 1, 2, 3))))
        odds = {place: odd(world, choose) for place in chosen}
    for place, value in odds.items():
        if isinstance(place, int):
            arguments[place] = value
        else:
            options[place] = value
    if arity:
        arguments.append(odd(world, choose)) if choose.random() < 0.5 else options.update(no_such_option=1)
    how = f"{call.name}{short(tuple(arguments))} with {short(options)}"
    try:
        made = call.function(*arguments, **options)
    except (pk.PagedKVError, ForeignError) as problem:
        tally.add(f"refused: {type(problem).__name__}")
    except TypeError as problem:
        if not arity:
            tally.fail(f"{how}: {problem!r}")
    except Exception as problem:
        tally.fail(f"{how}: {problem!r}")
    else:
        tally.add("accepted")
        try:
            call.after(made)
        except (pk.PagedKVError, ForeignError):
            tally.add("accepted, refused when used")
        except Exception as problem:
            tally.fail(f"{how}, then using it: {problem!r}")


def short(value: Any) -> str:
    """A report of arguments that fits on a line."""
    if isinstance(value, np.ndarray):
        return f"array({value.dtype}, {list(value.shape)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}={short(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(short, value)) + ")"
    return repr(value)[:80]


def is_heavy(call: Call) -> bool:
    """Whether it makes threads or files or a cache: one in ten of the others."""
    return call.name in HEAVY or call.name.startswith("Scheduler")


def batch(folder: Path, seed: int, count: int, tally: Tally) -> None:
    """One world: calls on it, its books, and calls after it is closed."""
    choose = random.Random(seed)
    world = ApiWorld(folder)
    calls = [call for call in world.calls() for _ in range(1 if is_heavy(call) else 10)]
    for number in range(count - CLOSED):
        call = choose.choice(calls)
        if call.name == "DiskTier":
            call.arguments = (folder / f"another {number}", *call.arguments[1:])
        attempt(call, world, choose, tally)
        if number % 50 == 49:
            try:
                world.cache.check_integrity()
            except AssertionError as problem:
                tally.fail(f"batch of seed {seed}, after {number + 1} calls: {problem}")
    for wrong in world.check():
        tally.fail(f"batch of seed {seed}: {wrong}")
    world.close()
    tally.add("books recounted and bystanders compared")
    tally.hits += KEPT
    for _ in range(CLOSED):
        call = choose.choice([call for call in calls if not is_heavy(call)])
        attempt(call, world, choose, tally)
    tally.count += count


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work there: some oddities are good names of directories."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Batches of calls; the numbers of a batch follow from its own seed, which a failure names."""
    tally = Tally()
    with small.quiet(), small.small_files():
        while tally.count < count:
            number = tally.count // BATCH
            with small.scratch() as folder, inside(folder):
                batch(folder, seed * 1_000_003 + number, BATCH, tally)
            tick(BATCH)
    return tally


PROOF = Proof(
    claim="every public call with wrong types, extreme numbers, odd arrays, forged handles, objects that call back, "
    "and after close: documented errors only, sound books, and no bystander notices",
    unit="calls",
    quick=20_000,
    full=500_000,
    run=run,
)
