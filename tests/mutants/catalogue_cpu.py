"""Mutants of the CPU kernels."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CALL, SHAPES, KERNELS, NUMBERS = (f"pagedkv/cpu/{name}" for name in ("attend.c", "attend.h", "kernels.h", "numbers.h"))
VARIANTS = "test_every_variant_of_every_batch_is_right"

MUTANTS = (
    Mutant(
        "a row in which something is not finite is left as the fast path made it", CALL,
        (("if (odd != 0 || lse == INFINITY || lost)", "if (0)"),),
        ("test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else",),
    ),
    Mutant(
        "a window is one key too short", SHAPES,
        (("s.begin = c->window ? s.position + 1 - c->window : 0;",
          "s.begin = c->window ? s.position + 2 - c->window : 0;"),),
        (f"{VARIANTS}[portable-around a tile-window]",),
    ),
    Mutant(
        "a sequence is cut by the size of its batch", CALL,
        (("const int part = rows <= TILED_ROWS ? part_of(keys) : keys;",
          "const int part = rows <= TILED_ROWS ? part_of(keys) / c->num_seqs + 1 : keys;"),),
        ("test_the_bits_depend_on_the_sequence_alone",),
    ),
    Mutant(
        "a sink takes no weight", CALL,
        (("l = l * mine + exp2f(sink - top);", "l = l * mine;"),),
        (f"{VARIANTS}[portable-around a block-sinks]",),
    ),
    Mutant(
        "a larger maximum leaves what was summed before as it was", KERNELS,
        (("const float less = *m == -INFINITY ? 0 : exp2f(*m - top);", "const float less = 1;"),),
        (f"{VARIANTS}[portable-around a tile-plain]",),
    ),
    Mutant(
        "halves are rounded up at a tie", NUMBERS,
        (("size += 0xfff + (size >> 13 & 1);", "size += 0x2000;"),),
        ("test_outputs_are_rounded_to_nearest_even",),
    ),
)  # fmt: skip
