"""Cases of which the quick run takes a slice and the slow run the rest.

Both together are all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(nth: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters of a test.

    The first and every `nth` after it are quick, the others are marked ``slow``.

    Parameters
    ----------
    cases : values of one parameter each, or what ``pytest.param`` returns.
    """
    out = []
    for i, case in enumerate(cases):
        values, marks, name = ((case,), (), None) if not hasattr(case, "marks") else (case.values, case.marks, case.id)
        out.append(pytest.param(*values, marks=[*marks, pytest.mark.slow] if i % nth else marks, id=name))
    return out
