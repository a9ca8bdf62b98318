"""A recorded run as one self-contained page.

Its content security policy forbids it to load anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from string import Template

from pagedkv.lab.recording import Recording
from pagedkv.lab.show.text import frame_of, picture


def page(recording: Recording, *, title: str = "pagedkv: a recorded run", step: int = 1) -> str:
    """An HTML document that steps through a recording, by buttons and by keys.

    Parameters
    ----------
    recording : Recording
    title : str
    step : int
        The step that it shows first, from 1 on.

    Raises
    ------
    InvalidArgument, WrongType
        There is no such step.
    """
    number, _ = frame_of(recording, step)
    style, script = _part("page.css"), _part("page.js")
    data: dict[str, object] = {
        "recording": recording.to_dict(),
        "pictures": [picture(recording, i + 1) for i in range(len(recording.frames))],
        "start": number,
    }
    if recording.groups:
        data["labels"] = [group.label(i) for i, group in enumerate(recording.groups)]
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'sha256-{_hash(style)}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Template(_part("page.html")).substitute(
        title=html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        policy=html.escape(policy),
        style=style,
        script=script,
        data=_as_data(data),
    )


def _part(name: str) -> str:
    return files("pagedkv.lab.show").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a Content-Security-Policy wants it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _as_data(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
