"""``pagedkv show``: the built-in run or a file, on the terminal, as a page or as JSON.

Bad input is one line.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from pagedkv.cli import main
from pagedkv.errors import InvalidArgument
from pagedkv.lab.recording import read_recording
from pagedkv.lab.show import picture, steps
from pagedkv.lab.show.command import show
from pagedkv.lab.show.demo import record


@pytest.fixture
def run(tmp_path, demo):
    """The built-in run, as a file."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(demo.to_dict()))
    return str(path)


def failing(capsys, *argv):
    """Run the command with what it must refuse; its one line on stderr."""
    try:
        code = main(["show", *argv])
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_without_a_file_the_built_in_run_is_listed_and_its_last_step_drawn(capsys, demo):
    assert main(["show"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{steps(demo)}\n\n{picture(demo)}\n"
    assert captured.err == ""


def test_the_built_in_run_is_the_same_every_time(demo):
    """The threads decide what else is on its way while the dispatcher tells of one move.

    So the test leaves that out.
    """

    def told(recording):
        frames = [replace(frame, tiers={}) if frame.what == "moves" else frame for frame in recording.frames]
        return replace(recording, frames=tuple(frames))

    for _ in range(3):
        assert told(record()) == told(demo)


def test_the_built_in_run_shows_everything_that_can_happen(demo):
    assert list(demo.tiers) == ["device", "host", "disk"]
    blocks = [block for frame in demo.frames for held in frame.tiers.values() for block in held]
    assert {block.moving for block in blocks} == {"", "in", "out"}
    assert any(len(block.sequences) == 3 for block in blocks)
    assert any(frame.copies for frame in demo.frames)
    moves = {(move.source, move.destination) for frame in demo.frames for move in frame.moves}
    assert moves == {("device", "host"), ("host", "disk"), ("device", "disk"), ("host", "device"), ("disk", "device")}
    told = " ".join(frame.caption for frame in demo.frames)
    wanted = (
        "Dropped: ",
        "4 from the host, 8 from the disk",
        "out of a block that begins alike",
        "join the prefix tree",
    )
    assert [words for words in wanted if words not in told] == []
    assert demo.left_out == 0


def test_the_built_in_run_over_groups_is_the_same_every_time_and_shows_all_that_groups_can_do(demo_of_groups):
    def told(recording):
        frames = [
            replace(f, tiers={}, pages={}, points=(), extents={}) if f.what == "moves" else f for f in recording.frames
        ]
        return replace(recording, frames=tuple(frames))

    demo = demo_of_groups
    assert told(record("groups")) == told(demo)
    assert demo.left_out == 0
    moves = {(m.source, m.destination, m.group) for frame in demo.frames for m in frame.moves}
    assert {(a, b) for a, b, _ in moves} == {
        ("device", "host"),
        ("host", "disk"),
        ("host", "device"),
        ("disk", "device"),
    }
    assert {group for *_, group in moves} == {0, 1}
    assert {page.moving for frame in demo.frames for held in frame.pages.values() for page in held} == {"", "in", "out"}
    assert any(table.first > 0 for frame in demo.frames for seq in frame.sequences for table in seq.tables)
    assert any(page.shared for frame in demo.frames for page in frame.pages["device"])
    assert any(frame.page_copies for frame in demo.frames)
    story = " ".join(frame.caption for frame in demo.frames)
    wanted = ("8 are cached", "12 from the host", "Let go: device page", "New: a point after 3 blocks", "Gone: points")
    assert [words for words in wanted if words not in story] == []


def test_the_built_in_run_over_groups_is_asked_for(capsys, run, demo_of_groups, tmp_path):
    assert main(["show", "--demo", "groups", "--step", "20"]) == 0
    assert capsys.readouterr().out == f"{picture(demo_of_groups, 20)}\n"
    assert main(["show", "--demo", "groups", "--html", str(tmp_path / "run.html")]) == 0
    assert "<title>pagedkv: the built-in run over groups of layers</title>" in (tmp_path / "run.html").read_text()
    capsys.readouterr()
    assert "--demo makes a built-in run" in failing(capsys, run, "--demo", "groups")
    assert "invalid choice: 'moon'" in failing(capsys, "--demo", "moon")
    with pytest.raises(InvalidArgument, match="tiers, groups, prefix are"):
        record("moon")


def test_a_step_of_a_file_is_drawn(capsys, run, demo):
    assert main(["show", run, "--step", "15"]) == 0
    assert capsys.readouterr().out == f"{picture(demo, 15)}\n"


def test_all_steps_are_drawn_one_after_the_other(capsys, run, demo):
    assert main(["show", run, "--all"]) == 0
    assert capsys.readouterr().out == "".join(f"{picture(demo, i + 1)}\n\n" for i in range(len(demo.frames)))


def test_json_is_a_recording_again_and_with_a_step_one_frame(capsys, tmp_path, run, demo):
    assert main(["show", run, "--json"]) == 0
    (tmp_path / "again.json").write_text(capsys.readouterr().out)
    assert read_recording(tmp_path / "again.json") == demo
    assert main(["show", run, "--json", "--step", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(demo.to_dict()["frames"][1]))


def test_a_page_is_written_and_its_size_told(capsys, tmp_path, run):
    out = tmp_path / "run.html"
    assert main(["show", run, "--html", str(out), "--step", "7"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{out}: 46 steps, ")
    text = out.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "<title>pagedkv: run.json</title>" in text
    assert '"start":7' in text
    assert told.endswith(" KiB, opens at step 7\n")
    assert main(["show", run, "--html", str(out)]) == 0
    assert capsys.readouterr().out.endswith(" KiB\n")
    assert '"start":1' in out.read_text()


def test_options_that_would_be_ignored_beside_each_other_are_refused(capsys, tmp_path, run):
    out = tmp_path / "run.html"
    assert "not allowed with" in failing(capsys, run, "--all", "--step", "3")
    for other in (["--html", str(out)], ["--json"]):
        assert "--all draws in the terminal" in failing(capsys, run, "--all", *other)
    assert "it has steps 1 to 46" in failing(capsys, run, "--html", str(out), "--step", "47")
    assert not out.exists()


def test_files_that_cannot_be_read_or_written_are_one_line(capsys, tmp_path, run):
    assert "No such file" in failing(capsys, str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    assert "no recording" in failing(capsys, str(tmp_path / "bad.json"))
    assert "it has steps 1 to 46" in failing(capsys, run, "--step", "47")
    assert "it has steps 1 to 46" in failing(capsys, run, "--step", "0")
    assert "invalid int value" in failing(capsys, run, "--step", "x")
    assert "No such file" in failing(capsys, run, "--html", str(tmp_path / "none" / "run.html"))
    assert "irectory" in failing(capsys, str(tmp_path))


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self):
        return True


def test_colours_are_for_terminals_where_rich_is(demo, monkeypatch):
    pytest.importorskip("rich", reason="the bench extra is not installed")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), io.StringIO()
    show(demo, 15, coloured)
    show(demo, 15, plain)
    assert "\x1b[" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert plain.getvalue() == f"{picture(demo, 15)}\n"


def test_a_terminal_without_rich_gets_plain_text(demo, monkeypatch):
    monkeypatch.setattr("pagedkv.lab.show.command.importlib.util.find_spec", lambda name: None)
    terminal = Terminal()
    show(demo, 15, terminal)
    assert terminal.getvalue() == f"{picture(demo, 15)}\n"


def test_the_command_needs_no_extra(tmp_path):
    code = (
        "import sys\n"
        "for name in ('rich', 'prometheus_client', 'matplotlib'): sys.modules[name] = None\n"
        "from pagedkv.cli import main\n"
        "sys.exit(main(['show', '--step', '15']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "copy of 5" in done.stdout


def test_a_recording_of_anybodys_cannot_command_the_terminal(capsys, tmp_path, demo):
    data = demo.to_dict()
    data["frames"] = json.loads(json.dumps(data["frames"]).replace('"A"', json.dumps("A\x1b]0;x\x07")))
    data["frames"][2]["caption"] = "red \x1b[31m\r and\nmore"
    data["texts"]["0"] = "\x1b[2J"
    (tmp_path / "run.json").write_text(json.dumps(data))
    for options in ([], ["--all"], ["--step", "15"]):
        assert main(["show", str(tmp_path / "run.json"), *options]) == 0
        out = capsys.readouterr().out
        assert "A?]0;x?" in out or not options
        assert not set(out) & {"\x1b", "\x07", "\r"}


def test_what_an_encoding_does_not_have_becomes_a_question_mark(tmp_path, demo):
    data = demo.to_dict()
    data["frames"] = [{**data["frames"][0], "caption": "na\u00efve \u2603"}]
    (tmp_path / "run.json").write_text(json.dumps(data))
    command = [sys.executable, "-m", "pagedkv", "show", str(tmp_path / "run.json")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "na?ve ?" in done.stdout


def test_a_file_may_have_a_name_that_is_no_text(tmp_path, run):
    odd = os.fsdecode(b"run-\xff.json")
    (tmp_path / odd).write_text((tmp_path / "run.json").read_text())
    command = [sys.executable, "-m", "pagedkv", "show", odd, "--html", os.fsdecode(b"run-\xff.html")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "<title>pagedkv: run-?.json</title>" in (tmp_path / os.fsdecode(b"run-\xff.html")).read_text()
