"""setp, set, selp, slct: all comparisons, unordered ones too, and boolean combinations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ptxsim.cuda import Asm, run_asm, sample

ORDERED: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def unordered(function: Any) -> Any:
    return lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b)


def pred(compare: str, kind: str, expect: Any) -> Asm:
    text = f"{{.reg .pred p; setp.{compare}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p;}}"
    return Asm(f"{compare}.{kind}", text, "u32", (kind, kind), expect)


CASES = [pred(name, kind, f) for name, f in ORDERED.items() for kind in ("s16", "s32", "u32", "u64", "s64")]
CASES += [
    pred(name, "u32", f)
    for name, f in (("lo", np.less), ("ls", np.less_equal), ("hi", np.greater), ("hs", np.greater_equal))
]
CASES += [pred(name, "f32", f) for name, f in ORDERED.items() if name != "ne"]
CASES += [pred(f"{name}u", "f32", unordered(f)) for name, f in ORDERED.items()]
CASES += [
    pred("ne", "f32", lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)),
    pred("num", "f32", lambda a, b: ~(np.isnan(a) | np.isnan(b))),
    pred("nan", "f32", lambda a, b: np.isnan(a) | np.isnan(b)),
    pred("lt", "f64", np.less),
    Asm(
        "and",
        "{.reg .pred p, q; setp.lt.s32 q, %1, %2; setp.gt.and.s32 p, %1, 5, q; selp.u32 %0, 1, 0, p;}",
        "u32",
        ("s32", "s32"),
        lambda a, b: (a > 5) & (a < b),
    ),
    Asm(
        "or not",
        "{.reg .pred p, q; setp.lt.s32 q, %1, %2; setp.gt.or.s32 p, %1, 5, !q; selp.u32 %0, 1, 0, p;}",
        "u32",
        ("s32", "s32"),
        lambda a, b: (a > 5) | ~(a < b),
    ),
    Asm(
        "two",
        "{.reg .pred p, q; .reg .u32 x; setp.lt.s32 p|q, %1, %2; selp.u32 x, 2, 0, q; selp.u32 %0, 1, x, p;}",
        "u32",
        ("s32", "s32"),
        lambda a, b: np.where(a < b, 1, 2),
    ),
    Asm(
        "logic",
        "{.reg .pred p, q, r; setp.lt.s32 p, %1, %2; setp.gt.s32 q, %1, 0; xor.pred r, p, q; not.pred r, r; "
        "selp.u32 %0, 1, 0, r;}",
        "u32",
        ("s32", "s32"),
        lambda a, b: ~((a < b) ^ (a > 0)),
    ),
    Asm("set u32", "set.lt.u32.s32 %0, %1, %2;", "u32", ("s32", "s32"), lambda a, b: np.where(a < b, 0xFFFFFFFF, 0)),
    Asm("set f32", "set.ge.f32.s32 %0, %1, %2;", "f32", ("s32", "s32"), lambda a, b: np.where(a >= b, 1.0, 0.0)),
    Asm("slct", "slct.s32.s32 %0, %1, %2, %1;", "s32", ("s32", "s32"), lambda a, b: np.where(a >= 0, a, b)),
    Asm(
        "testp",
        "{.reg .pred p; testp.infinite.f32 p, %1; selp.u32 %0, 1, 0, p;}",
        "u32",
        ("f32", "f32"),
        lambda a, b: np.isinf(a),
    ),
    Asm(
        "guard",
        "{.reg .pred p; setp.lt.s32 p, %1, %2; mov.u32 %0, 7; @p mov.u32 %0, 8; @!p add.u32 %0, %0, 2;}",
        "u32",
        ("s32", "s32"),
        lambda a, b: np.where(a < b, 8, 9),
    ),
]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_comparison(one: Asm) -> None:
    a, b = (sample(kind, 256, 20 + i) for i, kind in enumerate(one.sources))
    b = np.where(np.arange(256) % 5 == 0, a, b)
    np.testing.assert_array_equal(run_asm(CASES, one, a, b), one.expect(a, b).astype(run_asm(CASES, one, a, b).dtype))


def test_packed_halves() -> None:
    cases = [
        Asm(
            "setp",
            "{.reg .pred p, q; .reg .u32 x; setp.lt.f16x2 p|q, %1, %2; selp.u32 x, 2, 0, q; "
            "selp.u32 %0, 1, 0, p; or.b32 %0, %0, x;}",
            "u32",
            ("u32", "u32"),
            None,
        ),
        Asm("set", "set.gt.f16x2.f16x2 %0, %1, %2;", "u32", ("u32", "u32"), None),
    ]
    a, b = (np.random.default_rng(i).standard_normal((64, 2)).astype(np.float16) for i in range(2))
    words = [x.view(np.uint32)[:, 0] for x in (a, b)]
    less = a < b
    np.testing.assert_array_equal(run_asm(cases, cases[0], *words), less[:, 0] + 2 * less[:, 1])
    np.testing.assert_array_equal(
        run_asm(cases, cases[1], *words).view(np.float16).reshape(-1, 2), (a > b).astype(np.float16)
    )
