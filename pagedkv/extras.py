"""The command that installs an extra, for errors about a missing package.

It names the packages themselves: that works beside an installed wheel and in a checkout alike, whether or not an index
has pagedkv, and does not build pagedkv again.
"""

from __future__ import annotations

import re


def command(extra: str) -> str:
    """``pip install 'matplotlib>=3.8' ... (pagedkv's extra [bench])``.

    It comes from the metadata of the installed pagedkv. Without metadata (a bare folder on the path) it names the
    extra alone.
    """
    from importlib import metadata  # brings email and more, which no cache needs

    try:
        requirements = metadata.requires("pagedkv") or []
    except metadata.PackageNotFoundError:
        requirements = []
    wanted = re.compile(rf"""\bextra\s*==\s*["']{re.escape(extra)}["']""")
    parts = (requirement.partition(";") for requirement in requirements)
    names = " ".join(f"'{name.strip()}'" for name, _, marker in parts if wanted.search(marker))
    return f"pip install {names} (pagedkv's extra [{extra}])" if names else f"install pagedkv's extra [{extra}]"
