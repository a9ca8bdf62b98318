"""Places where arrays live: ``"cpu"``, ``"cuda"`` (the first GPU) and ``"cuda:1"``.

A size is never a place.
"""

from __future__ import annotations

import re
from typing import Any

from pagedkv.errors import InvalidArgument, WrongType

_PLACE = re.compile(r"cpu|cuda(?::([0-9]{1,4}))?", re.ASCII)
_NUMBER_AND_UNIT = re.compile(r"[0-9.]+ ?[A-Za-z]+", re.ASCII)


def is_place(text: str) -> bool:
    """Whether `text` names a place."""
    return _PLACE.fullmatch(text) is not None


def cuda_number(device: Any) -> int | None:
    """The number of the CUDA device that `device` names; None for ``"cpu"``.

    Raises
    ------
    WrongType
        Not a string.
    InvalidArgument
        Neither ``"cpu"`` nor ``"cuda"`` nor ``"cuda:<number>"``.
    """
    if not isinstance(device, str):
        raise WrongType(f"device is a place, 'cpu', 'cuda' or 'cuda:<number>', not {device!r:.40}")
    found = _PLACE.fullmatch(device)
    if found is None:
        is_size = _NUMBER_AND_UNIT.fullmatch(device) is not None
        hint = f"; a size goes into device_memory={device[:40]!r}" if is_size else ""
        raise InvalidArgument(f"device must be 'cpu', 'cuda' or 'cuda:<number>', got {device[:40]!r}{hint}")
    return None if device == "cpu" else int(found[1] or 0)
