"""docs/testing.md has a row for each file with slow tests, with their numbers."""

from __future__ import annotations

import pytest

from tests.slow import BEGIN, END, PAGE, ROOT, WHAT, Counts, collect, place, table, with_table

pytestmark = pytest.mark.checkout


@pytest.mark.slow
def test_the_page_has_every_file_with_slow_tests() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, table(collect())), "write it: python -m tests.slow"


def test_the_files_that_are_described_exist_and_stand_in_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    drawn = page.partition(BEGIN)[2].partition(END)[0]
    assert [row for row in WHAT if not (ROOT / row).exists() or f"| `{row}` |" not in drawn] == []
    assert drawn.count("| `tests/") == len(WHAT)


def test_a_table_has_the_most_slow_tests_first() -> None:
    first, second = list(WHAT)[:2]
    lines = table({first: (1, 2), second: (1000, 1000)}).split("\n")
    assert lines[2:] == [f"| `{second}` | 1,000 | 1,000 | {WHAT[second]} |", f"| `{first}` | 1 | 2 | {WHAT[first]} |"]
    with pytest.raises(KeyError, match=r"tests/new\.py"):
        table({"tests/new.py": (1, 1)})


def test_tests_are_counted_by_file_and_one_folder_is_one_row() -> None:
    assert place("tests/realmodel/test_reuse.py::test_a[1]") == "tests/realmodel"
    assert place("tests/kernels/test_matrix.py::test_a") == "tests/kernels/test_matrix.py"

    class Item:
        def __init__(self, nodeid: str, slow: bool) -> None:
            self.nodeid, self.slow = nodeid, slow

        def get_closest_marker(self, name: str) -> object:
            return self.slow or None

    counts = Counts()
    counts.pytest_collection_modifyitems([Item("tests/a.py::x", True), Item("tests/a.py::y", False)] * 2)
    assert counts == {("tests/a.py", True): 2, ("tests/a.py", False): 2}


def test_only_what_is_between_the_marks_is_replaced() -> None:
    assert with_table(f"a\n{BEGIN}\nold\n{END}\nb", "new") == f"a\n{BEGIN}\n\nnew\n\n{END}\nb"
