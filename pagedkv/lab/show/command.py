"""The command ``pagedkv show``: a recorded run in the terminal, or as a page.

Exit code 0, or 2 for bad input.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from pagedkv.errors import InvalidArgument
from pagedkv.lab.recording import Recording, read_recording
from pagedkv.lab.show.demo import DEMOS, record
from pagedkv.lab.show.document import page
from pagedkv.lab.show.styles import Style
from pagedkv.lab.show.svg import svg
from pagedkv.lab.show.text import frame_of, lines, steps

DESCRIPTION = """Draw a recorded run of a cache: the sequences' block tables, and who owns which block on which tier.
Without a file, a small built-in run is made and drawn; --demo groups makes one of a cache by groups of layers, --demo
prefix a short one for --svg. Record a
run of your own with pagedkv.lab.recording.Recorder."""

RICH_STYLES: dict[Style, str] = {
    "": "", "head": "bold", "dim": "dim", "shared": "bold cyan", "copied": "bold red", "moving": "yellow",
}  # fmt: skip


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``show`` command and its options."""
    parser = commands.add_parser("show", help="draw a recorded run, block by block", description=DESCRIPTION)
    add = parser.add_argument
    add("recording", nargs="?", metavar="RECORDING", help="what Recorder.save wrote (default: a built-in run)")
    add("--demo", choices=DEMOS, help=f"which built-in run, where there is no RECORDING (default: {DEMOS[0]})")
    drawn = parser.add_mutually_exclusive_group()
    drawn.add_argument(
        "--step", type=int, metavar="N",
        help="draw this step (default: list the steps and draw the last); with --html, open it there (default: 1)",
    )  # fmt: skip
    drawn.add_argument("--all", action="store_true", help="draw every step")
    add("--svg", metavar="OUT", help="write one step as a picture for a document (default: the last)")
    add("--html", metavar="OUT", help="write one self-contained page that steps through the run")
    add("--json", action="store_true", help="print the recording as JSON; with --step, that frame")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Any = None) -> int:
    """Draw; 0."""
    name = arguments.recording
    if arguments.all and (arguments.html is not None or arguments.svg is not None or arguments.json):
        raise InvalidArgument(
            "--all draws in the terminal; a page or JSON has every step anyway, and a picture one: leave it out"
        )
    if arguments.demo is not None and name is not None:
        raise InvalidArgument(f"--demo makes a built-in run, and {name} is a recording: leave one of them out")
    recording = record(arguments.demo or DEMOS[0]) if name is None else read_recording(name)
    number, _ = frame_of(recording, arguments.step)
    if arguments.svg is not None:
        Path(arguments.svg).write_text(svg(recording, arguments.step), encoding="utf-8")
        if not arguments.json:
            print(_fitting(f"{arguments.svg}: step {number} of {len(recording.frames)}", sys.stdout))
    if arguments.html is not None:
        title = f"pagedkv: {Path(name).name}" if name is not None else "pagedkv: the built-in run"
        title += " over groups of layers" if arguments.demo == "groups" else ""
        document = page(recording, title=title, step=1 if arguments.step is None else number)
        Path(arguments.html).write_text(document, encoding="utf-8")
        if not arguments.json:
            size = f"{len(recording.frames)} steps, {len(document.encode()) / 1024:.0f} KiB"
            if arguments.step is not None:
                size += f", opens at step {number}"
            print(_fitting(f"{arguments.html}: {size}", sys.stdout))
    if arguments.json:
        whole = recording.to_dict()
        print(json.dumps(whole if arguments.step is None else whole["frames"][number - 1]))
    elif arguments.html is None and arguments.svg is None:
        if arguments.all:
            for i in range(len(recording.frames)):
                show(recording, i + 1, sys.stdout)
                print()
        else:
            if arguments.step is None:
                print(_fitting(f"{steps(recording)}\n", sys.stdout))
            show(recording, number, sys.stdout)
    return 0


def show(recording: Recording, step: int, file: TextIO) -> None:
    """Print a step: in colours on a terminal where rich is installed, else as plain text."""
    drawn = [[(_fitting(text, file), style) for text, style in line] for line in lines(recording, step)]
    if importlib.util.find_spec("rich") is None or not file.isatty():
        for line in drawn:
            print("".join(text for text, _ in line).rstrip(), file=file)
        return
    rich_text: Any = importlib.import_module("rich.text").Text
    console: Any = importlib.import_module("rich.console").Console(file=file, highlight=False)
    for line in drawn:
        console.print(rich_text.assemble(*((text, RICH_STYLES[style]) for text, style in line)), soft_wrap=True)


def _fitting(text: str, file: TextIO) -> str:
    """With question marks for characters that the file's encoding does not have."""
    encoding = file.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
