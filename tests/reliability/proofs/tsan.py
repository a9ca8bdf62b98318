"""ThreadSanitizer over everything that runs without the GIL, and over the core's mutex.

The interpreter is the stock one.
"""

from __future__ import annotations

from tests.reliability import child
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.sanitizers import THREAD, Copy, instrumented

MOST_THREADS = 6
SHARES = {"core_hammer": 0.25, "native_hammer": 0.73, "tier_hammer": 0.01, "cache_hammer": 0.01}
MUTEX_CALLS = {
    "if pthread_mutex_trylock(&self.mutex) != 0": "if False",
    "pthread_mutex_unlock(&self.mutex)": "pass",
}


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Run the hammers in an instrumented copy, which must report nothing.

    Then run two copies with a race in them, which must be reported.
    """
    tally = Tally()
    if reason := THREAD.missing():
        tally.skipped = (f"ThreadSanitizer: {reason}",)
        return tally
    with instrumented(THREAD) as copy:
        for hammer, share in SHARES.items():
            reports = _hammer(copy, hammer, max(1, int(count * share)), seed, tally, tick)
            tally.add("reports", len(reports))
            for report in reports:
                tally.fail(f"{hammer} {seed}:\n{report}")
        _expect(copy, "native_hammer", 600_000, tally, "calls without the mutex", "unlocked")
        for call, nothing in MUTEX_CALLS.items():
            copy.edit("pagedkv/_core/lock.pyx", call, nothing)
        copy.compile(["pagedkv._core.lock"])
        _expect(copy, "core_hammer", 20_000, tally, "a core without its mutex")
    return tally


def _hammer(
    copy: Copy, hammer: str, count: int, seed: int, tally: Tally, tick: Tick, *options: str, first_ends: bool = False
) -> list[str]:
    environment = copy.sanitizer.surroundings(copy.folder)
    if first_ends:  # a core without its mutex may never end by itself
        environment["TSAN_OPTIONS"] += ":halt_on_error=1"
    module = f"tests.reliability.{hammer}"
    ended = child.run(module, count, seed, MOST_THREADS, *options, tick=tick, root=copy.folder, environment=environment)
    found = ended.tally_or_wrong()
    found.found = {f"{hammer.partition('_')[0]} operations": found.count}
    child.add(tally, found)
    return copy.sanitizer.reports(ended.errors)


def _expect(copy: Copy, hammer: str, count: int, tally: Tally, what: str, *options: str) -> None:
    """A race was planted: it has to be reported, whatever else it does."""
    reports = _hammer(copy, hammer, count, 1, Tally(), lambda n: None, *options, first_ends=True)
    tally.add("planted races reported", bool(reports))
    if not reports:
        tally.fail(f"ThreadSanitizer sees nothing in {what}")


PROOF = Proof(
    "ThreadSanitizer on what runs without the GIL (core, native callers, transfers): no report, no suppression; "
    "both planted races are reported",
    "operations",
    quick=200_000,
    full=4_000_000,
    run=run,
)
