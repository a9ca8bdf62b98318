"""Output shown in these pages is what the snippet or command above it prints.

It stands in a ``text`` fence right under a ``python`` one, or under ``pagedkv replay`` in compare_policies.md.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from pagedkv.cli import main
from tests.replay.hits import recorded

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("tutorial.md", "observability.md")]
FENCE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
SHOWN = "\n.venv/bin/pagedkv replay\n```\n\n```text\n"  # the command, and where its output begins

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


def replay_shown() -> str:
    return (ROOT / "docs" / "compare_policies.md").read_text(encoding="utf-8").partition(SHOWN)[2].partition("```\n")[0]


def test_the_pages_have_the_hits_of_the_recorded_replay() -> None:
    by_tier = recorded("shared_hits.json")["mooncake_conversation_dev"]["tiers"]
    hits = {policy: sum(counts) for policy, counts in by_tier.items()}
    shown = {line.split()[0]: line.split()[1:2] for line in replay_shown().splitlines() if line.strip()}
    assert {name: shown[name] for name in hits} == {name: [f"{count:,}"] for name, count in hits.items()}
    lru, hazard = f"{hits['lru']:,}", f"{hits['hazard']:,}"
    assert f"{hazard} hits to LRU's {lru}" in (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    decision = next((ROOT / "docs" / "decisions").glob("0020-*")).read_text(encoding="utf-8")
    assert f"`lru` keeps {lru}\n" in decision
    assert f"to {hazard})" in decision


@pytest.mark.slow
def test_the_page_shows_what_a_replay_without_arguments_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay"]) == 0
    assert capsys.readouterr().out == replay_shown()
