"""Output shown in these pages is what the snippet above it prints.

It stands in a ``text`` fence right under a ``python`` one.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("tutorial.md", "observability.md")]
FENCE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.checkout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_its_snippets_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__snippet__"}
    shown = 0
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        code, figure = match[1], match[2]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        assert printed.getvalue() == (figure or ""), f"the output of\n{code}"
        shown += figure is not None
    assert shown, "no figure found"
