"""Recordings as JSON files: version 1, or version 2 of a cache by groups of layers."""

from __future__ import annotations

import json
import os
from typing import Any

from pagedkv.errors import RecordingFormatError
from pagedkv.lab.recording.group_reader import GroupReader
from pagedkv.lab.recording.model import FORMAT, VERSION, VERSION_OF_GROUPS, Recording
from pagedkv.lab.recording.reader import Reader, shown

READERS: dict[int, type[Reader]] = {VERSION: Reader, VERSION_OF_GROUPS: GroupReader}


def write_recording(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write a recording as one JSON document."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(recording.to_dict(), file, separators=(",", ":"))
        file.write("\n")


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a recording that :meth:`Recorder.save` or ``pagedkv show --json`` wrote.

    Raises
    ------
    RecordingFormatError
        The file is no recording, or one of a version that this pagedkv does not know, or contradicts itself.
    OSError
        It cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        data = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise RecordingFormatError(path, "", f"no JSON: {problem}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordingFormatError(path, "", f'no recording: it does not say "format": "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int or version not in READERS:
        known = " and ".join(map(str, READERS))
        raise RecordingFormatError(path, "version", f"{shown(version)} is not known to this pagedkv: {known} are")
    return READERS[version](path).recording(data)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
