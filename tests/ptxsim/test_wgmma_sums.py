"""No thread may touch wgmma's sums until it has waited for their group."""

from __future__ import annotations

import pytest

from tests.ptxsim.test_wgmma import WAIT, multiply


@pytest.mark.parametrize("registers", [False, True])
def test_sums_that_are_not_waited_for_are_wrong(registers: bool) -> None:
    with pytest.raises(AssertionError, match="nan location mismatch"):
        multiply("f16", False, registers, wait="")


def test_sums_are_wrong_while_a_later_group_may_be_under_way() -> None:
    with pytest.raises(AssertionError, match="nan location mismatch"):
        multiply("f16", False, False, wait=WAIT.replace("wait_group.sync.aligned 0", "wait_group.sync.aligned 1"))


def test_sums_that_are_changed_too_early_are_wrong() -> None:
    early = "for (int i = 0; i < N / 2; ++i) d[i] *= 1.f + blockIdx.x;"
    multiply("f16", False, False, after=early)
    with pytest.raises(AssertionError, match="nan location mismatch"):
        multiply("f16", False, False, wait=early + WAIT)
