"""AddressSanitizer and UndefinedBehaviorSanitizer over the test suite."""

from __future__ import annotations

import os
import re

from pagedkv.kernels.toolkits import installed_nvrtcs
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.sanitizers import ADDRESS, Copy, instrumented

QUICK = ("tests/core", "tests/tiers", "tests/cache")
LEFT_OUT = {
    "tests/kernels": "pure Python, and GPU code that is interpreted",
    "tests/ptxsim": "pure Python",
    "tests/bench": "starts benchmarks",
    "tests/packaging": "builds wheels, which are not instrumented",
    "tests/mutants": "builds copies of its own, which are not instrumented",
    "tests/reliability": "the proofs",
    "tests/show/test_in_a_browser.py": "drives a browser, which does not start beside the sanitizer",
    "tests/interop/test_capsules.py::test_handing_over_a_hundred_thousand_times_leaves_no_memory_behind":
        "measures memory, and the sanitizer keeps what was freed",
}  # fmt: skip
PLANTED = ("element(5, 5)", "element(5, -1)", "after_free(5)", "overflow(70000, 276480)")


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Run so many tests of the suites that do most in compiled code.

    From the full count on, it runs the whole suite.
    """
    tally = Tally()
    if reason := ADDRESS.missing():
        tally.skipped = (f"AddressSanitizer: {reason}",)
        return tally
    with instrumented(ADDRESS) as copy:
        for mistake in PLANTED:
            _expect(copy, mistake, tally)
        everything = count >= PROOF.full
        left_out = (f"--{'deselect' if '::' in name else 'ignore'}={name}" for name in LEFT_OUT)
        chosen = ["tests", *left_out] if everything else list(QUICK)
        sample = [] if everything else ["-p", "tests.reliability.sampled"]
        ran = copy.python(
            *("-m", "pytest", "-v", "-s", "-n", "0", "-m", "not full", "-p", "no:cacheprovider"),
            *sample, *chosen, PAGEDKV_SAMPLE=f"{count}:{seed}", **_where_nvrtc_is(),
        )  # fmt: skip
    tally.count = len(re.findall(r"\bPASSED\b", ran.stdout))
    tick(tally.count)
    not_run = len(re.findall(r"\bSKIPPED\b(?! \[)", ran.stdout))  # the summary at the end has them once more
    if not_run:
        tally.skipped = (f"{not_run} tests that skip themselves here",)
    if everything:
        tally.skipped += tuple(f"{name} ({why})" for name, why in LEFT_OUT.items())
    reports = ADDRESS.reports(ran.stdout)
    for report in reports:
        tally.fail(report)
    failed = re.findall(r"^FAILED .*|^ERROR .*", ran.stdout, re.MULTILINE)
    for line in failed:
        tally.fail(f"{line}\n{ran.stdout[-4000:]}")
    if ran.returncode and not reports and not failed:
        tally.fail(f"pytest ended with exit code {ran.returncode}:\n{ran.stdout[-4000:]}")
    tally.found |= {"reports": len(reports), "tests failed": len(failed)}
    return tally


def _where_nvrtc_is() -> dict[str, str]:
    """For the loader: beside the sanitizer NVRTC does not find the library that lies beside it."""
    folders = [str(nvrtc.library.parent) for nvrtc in installed_nvrtcs()]
    return {"LD_LIBRARY_PATH": ":".join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


def _expect(copy: Copy, mistake: str, tally: Tally) -> None:
    """A mistake compiled like everything else has to be reported."""
    ran = copy.python("-c", f"from pagedkv import planted; print(planted.{mistake})")
    seen = bool(ADDRESS.reports(ran.stdout)) and ran.returncode != 0
    tally.add("planted mistakes reported", seen)
    if not seen:
        tally.fail(f"nothing was reported of {mistake}:\n{ran.stdout[-2000:]}")


PROOF = Proof(
    "AddressSanitizer and UndefinedBehaviorSanitizer over the test suite, every module instrumented: no report; "
    f"{len(PLANTED)} planted mistakes are reported",
    "tests",
    quick=350,
    full=2500,
    run=run,
)
