"""Paths that a caller gives: checked, with the user's home in place of ``~``."""

from __future__ import annotations

import os
from typing import Any

from pagedkv.errors import InvalidArgument, WrongType


def path_text(path: Any, name: str) -> str:
    """A path as text, with the user's home in place of a leading ``~``.

    Parameters
    ----------
    path : str or os.PathLike of text.
    name : of the argument, for errors.

    Raises
    ------
    WrongType, InvalidArgument
        It is no path, empty, holds a NUL, or begins with ``~`` and the name of no user.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise WrongType(f"{name} must be a path, not {type(path).__name__}") from None
    if not isinstance(text, str):
        raise WrongType(f"{name} must be text, not bytes")
    if not text or "\0" in text:
        raise InvalidArgument(f"{name} must not be empty or hold a NUL")
    full = os.path.expanduser(text)
    if full.startswith("~"):
        user, _, _ = full.partition("/")
        raise InvalidArgument(f"{name}: {user} is no user of this machine; write ./{full} for a folder of that name")
    return full


def nearest_existing(path: str | os.PathLike[str]) -> str:
    """The path if it exists, else the nearest path above it that does.

    A directory can be made at `path` only if the result is a directory.
    """
    at = os.path.abspath(path)
    while not os.path.lexists(at):
        at = os.path.dirname(at)
    return at
