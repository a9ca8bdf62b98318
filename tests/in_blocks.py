"""Sizes of tests' caches, all small numbers of blocks.

``device=8, host=4`` stands for KVCache's arguments.
"""

from __future__ import annotations

from typing import Any

import pagedkv as pk

_MEMORY = {"device": "device_memory", "host": "host_memory", "pin_budget": "pin_budget"}


def in_blocks(size: Any) -> Any:
    """An int as so many blocks; strings and None as they are."""
    return pk.Blocks(size) if isinstance(size, int) else size


def cache_options(**options: Any) -> dict[str, Any]:
    """Return KVCache's arguments, with its memory budgets given in blocks.

    ``device``, ``host`` and ``pin_budget`` are converted; all others stay as they are.
    """
    return {_MEMORY.get(name, name): in_blocks(value) if name in _MEMORY else value for name, value in options.items()}
