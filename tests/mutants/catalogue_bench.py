"""Mistakes in benches: the static bar lets a worse figure pass, versions are mixed up."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BAR, COMMAND = "bench/sass/bar.py", "bench/sass/__main__.py"
BY_HAND = ("test_a_figure_that_moves_by_5_percent_either_way_asks_to_be_committed",)
BY_COMMAND = ("test_the_command_fails_on_a_figure_that_moved_until_it_is_committed",)

MUTANTS = (
    Mutant(
        "a figure may move by 10 %",
        BAR,
        (("TOLERANCE = 0.05", "TOLERANCE = 0.1"),),
        (*BY_HAND, *BY_COMMAND),
    ),
    Mutant(
        "a figure that moved by just 5 % passes",
        BAR,
        (("abs(new - old) < TOLERANCE", "abs(new - old) <= TOLERANCE"),),
        BY_HAND,
    ),
    Mutant(
        "better figures pass as they are",
        BAR,
        (("return [*worse, *better, *new, *gone]", "return [*worse, *new, *gone]"),),
        (*BY_HAND, *BY_COMMAND),
    ),
    Mutant(
        "fewer bytes in flight are better",
        BAR,
        (('"bytes_in_flight": True', '"bytes_in_flight": False'),),
        ("test_a_figure_is_worse_where_the_kernel_has_more_to_do_or_less_to_do_it_with",),
    ),
    Mutant(
        "a figure that was nothing may become anything",
        BAR,
        (("if old == new or abs(", "if not old or abs("),),
        ("test_the_first_spill_or_rolled_loop_is_worse_than_none",),
    ),
    Mutant(
        "a loop that is no longer counted passes",
        BAR,
        (("*worse, *better, *new, *gone]", "*worse, *better, *new]"),),
        ("test_loops_without_a_counterpart_are_told",),
    ),
    Mutant(
        "the command ends well whatever moved",
        COMMAND,
        (("return 1 if found else 0", "return 0"),),
        BY_COMMAND,
    ),
    Mutant(
        "the command compares with the figures of now",
        COMMAND,
        (("compare(committed, rows)", "compare(rows, rows)"),),
        BY_COMMAND,
    ),
    Mutant(
        "a version that lacks a kernel ends the bench of launches",
        "bench/launches/__main__.py",
        ((" if call in runs[0] else None\n", "\n"),),
        ("test_a_kernel_that_the_version_before_lacks_has_no_figure_of_it",),
    ),
)
