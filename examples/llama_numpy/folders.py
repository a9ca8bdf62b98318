"""Where this user's models lie, and how files appear there: whole, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def models_folder() -> Path:
    """``$XDG_CACHE_HOME/pagedkv/models``, else ``~/.cache/pagedkv/models``; it need not exist.

    Raises
    ------
    OSError
        The user has no home either.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification says to ignore relative ones
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError as error:
            raise OSError(f"{error} Set XDG_CACHE_HOME to a folder for the models.") from None
    return Path(base, "pagedkv", "models")


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that gets its name only when the block ends well.

    It leaves nothing behind when the block raises.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits."""
    digest, chunk = hashlib.sha256(), bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(chunk):
            digest.update(memoryview(chunk)[:size])
    return digest.hexdigest()
