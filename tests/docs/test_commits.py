"""The check of commit messages finds bad ones, and passes where there is no history."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import commits
from tests.commits import LONGEST, SINCE, history, main, problems, without_comments

pytestmark = pytest.mark.checkout


@pytest.mark.parametrize(
    "message",
    [
        "tiers: name the protocol\n\nTwo things had one name.\n",
        "docs, tests: say it\n\n- because\n\nSigned-off-by: A <a@example.org>",
        "cache/load: `wait` once\n\nWhy.",
        f"core: {'x' * (LONGEST - 7)}\n\nWhy.",
    ],
)
def test_a_good_message_has_no_problem(message: str) -> None:
    assert problems(message) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("name the protocol\n\nWhy.", "room: verb what"),
        ("tiers: Name it\n\nWhy.", "room: verb what"),
        ("The house: name it\n\nWhy.", "room: verb what"),
        ("tiers:name it\n\nWhy.", "room: verb what"),
        (f"core: {'x' * (LONGEST - 6)}\n\nWhy.", f"has {LONGEST} characters"),
        ("tiers: name it\nWhy.", "no empty line"),
        ("tiers: name it\n", "no body"),
        ("tiers: name it\n\nSigned-off-by: A <a@example.org>\n", "no body"),
    ],
)
def test_a_bad_message_has_one(message: str, problem: str) -> None:
    (found,) = problems(message)
    assert problem in found


def test_comments_of_the_editor_do_not_count() -> None:
    scissors = "# ------------------------ >8 ------------------------\ndiff"
    assert problems(without_comments(f"tiers: name it\n\n# Please enter\n{scissors}")) == [
        "there is no body that says why"
    ]


def test_a_file_with_a_message_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "message"
    file.write_text("Name it\n\nWhy.\n", encoding="utf-8")
    assert main([str(file)]) == 1
    assert "room: verb what" in capsys.readouterr().out


def commit(root: Path, message: str, after_s: int) -> None:
    """Make an empty commit so many seconds after the first that is judged."""
    when = f"{int(SINCE.timestamp()) + after_s} +0000"
    who = {f"GIT_{role}_{part}": "a@example.org" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    environment = {**os.environ, **who, "GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
    git(root, "commit", "-q", "--allow-empty", "--no-verify", "-m", message, environment=environment)


def git(root: Path, *words: str, environment: dict[str, str] | None = None) -> None:
    subprocess.run(["git", "-C", str(root), *words], check=True, env=environment)


def test_old_commits_and_those_of_origin_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    commit(tmp_path, "Old", -1)
    assert history(tmp_path) == []
    commit(tmp_path, "New", 0)
    commit(tmp_path, "Newer", 1)
    assert [one.message.strip() for one in history(tmp_path)] == ["Newer", "New"]
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD~1")
    assert [one.message.strip() for one in history(tmp_path)] == ["Newer"]
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    monkeypatch.setattr(commits, "NEWEST", 1)
    assert [one.message.strip() for one in history(tmp_path)] == ["Newer"]


def test_a_tree_without_history_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert history(tmp_path) == []
    git(tmp_path, "init", "-q")
    assert history(tmp_path) == []
