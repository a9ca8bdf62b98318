"""Checks commit messages against CONTRIBUTING.md: ``python -m tests.commits``.

Of the file that is named, which holds one message; without one, of the commits that ``origin/main`` lacks, else of the
newest ones. A copy of the tree without its history has none to check, and passes; a shallow clone has few.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SINCE = datetime.datetime(2026, 11, 25, 15, 10, tzinfo=datetime.timezone.utc)  # older commits are not judged
NEWEST = 50  # commits, where none is ahead of origin/main
LONGEST = 72  # characters of a subject, less one
SUBJECT = re.compile(r"[a-z_][\w./-]*(?:, [a-z_][\w./-]*)*: [^A-Z\s].*")
TRAILER = re.compile(r"[A-Z][\w-]*: .*")  # such as "Signed-off-by: ..."; a trailer is no reason


class Commit(NamedTuple):
    """A commit of the history.

    Attributes
    ----------
    name : its abbreviated hash.
    time_s : when it was committed, in seconds since 1970.
    message : subject, empty line and body.
    """

    name: str
    time_s: int
    message: str


def problems(message: str) -> list[str]:
    """The rules that a commit message breaks."""
    subject, *rest = message.strip("\n").split("\n")
    found = []
    if not SUBJECT.fullmatch(subject):
        found.append("the subject is not `room: verb what`, lower case after the colon")
    if len(subject) >= LONGEST:
        found.append(f"the subject has {len(subject)} characters, and may have {LONGEST - 1}")
    if rest and rest[0].strip():
        found.append("there is no empty line after the subject")
    if not any(line.strip() and not TRAILER.fullmatch(line) for line in rest):
        found.append("there is no body that says why")
    return found


def without_comments(message: str) -> str:
    """A message as git keeps it: less the lines that git wrote into the editor."""
    written, _, _ = message.partition("# ------------------------ >8 ------------------------")
    return "\n".join(line for line in written.split("\n") if not line.startswith("#"))


def history(root: Path = ROOT) -> list[Commit]:
    """Commits to check, without merges; none where there is no history."""
    for which in (["origin/main..HEAD"], [f"-{NEWEST}", "HEAD"]):
        command = ["git", "-C", str(root), "log", "--no-merges", "-z", "--format=%h %ct %B", *which, "--"]
        try:
            log = subprocess.run(command, capture_output=True, check=True, text=True, encoding="utf-8").stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        if log:
            parts = (entry.split(" ", 2) for entry in log.split("\0") if entry)
            commits = [Commit(name, int(time_s), message) for name, time_s, message in parts]
            return [commit for commit in commits if commit.time_s >= SINCE.timestamp()]
    return []


def main(files: list[str]) -> int:
    """Print each problem; 1 if there is one."""
    if files:
        messages = {file: without_comments(Path(file).read_text(encoding="utf-8")) for file in files}
    else:
        messages = {commit.name: commit.message for commit in history()}
        print(f"{len(messages)} commits checked")
    found = [f"{name}: {problem}" for name, message in messages.items() for problem in problems(message)]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
