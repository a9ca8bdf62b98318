"""Leaks: references, descriptors, threads, memory.

LeakSanitizer checks what the core allocates itself.
"""

from __future__ import annotations

import re

from tests.reliability import child
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.sanitizers import ADDRESS, Copy, instrumented

BLOCK = re.compile(r"^(?:Direct|Indirect) leak of .*?(?=^\s*$)", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"#1 0x\w+ in .*pagedkv/")  # the caller of malloc is one of our modules
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=1", "LSAN_OPTIONS": "exitcode=0:max_leaks=0"}
CORE_OPERATIONS = 12_000


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Cycles in a process of their own; then the core's hammer in an instrumented copy."""
    tally = child.run("tests.reliability.leak_cycles", count, seed, tick=tick).tally_or_wrong()
    if reason := ADDRESS.missing():
        tally.skipped = (f"LeakSanitizer: {reason}",)
        return tally
    with instrumented(ADDRESS) as copy:
        planted = copy.python("-c", "from pagedkv import planted; planted.leak(12345)", **OPTIONS)
        if "LeakSanitizer has encountered a fatal error" in planted.stdout:
            tally.skipped = ("LeakSanitizer cannot stop the threads of a process here",)
            return tally
        seen = any("12345 byte" in leak for leak in leaks(planted.stdout))
        tally.add("planted leaks reported", seen)
        if not seen:
            tally.fail(f"LeakSanitizer did not report a planted leak:\n{planted.stdout[-3000:]}")
        for leak in core_leaks(copy, seed):
            tally.fail(f"seed {seed}: {leak}")
    return tally


def core_leaks(copy: Copy, seed: int) -> list[str]:
    """What our modules allocated and did not give back before the interpreter ended."""
    ran = copy.python("-m", "tests.reliability.core_hammer", str(CORE_OPERATIONS), str(seed), "4", **OPTIONS)
    if ran.returncode:
        return [f"the hammer ended with exit code {ran.returncode}:\n{ran.stdout[-3000:]}"]
    return leaks(ran.stdout)


def leaks(output: str) -> list[str]:
    """Return the reported leaks whose memory one of our modules asked for.

    The interpreter's own are not ours to judge.
    """
    return [found.group() for found in BLOCK.finditer(output + "\n\n") if OURS.search(found.group())]


PROOF = Proof(
    "caches with a disk tier opened, used and closed: descriptors, threads and references are the same, objects and "
    "private memory do not grow; LeakSanitizer on the core: no leak, a planted one reported",
    "open/close cycles",
    quick=200,
    full=10_000,
    run=run,
)
