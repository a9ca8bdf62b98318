"""A file that holds whole lines only, whatever fails while one is written."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from pagedkv.errors import InvalidArgument

OWNER_ONLY = 0o600  # a trace says when who asked for how much


class WholeLines:
    """A new file, or a regular file that is emptied.

    A line that cannot be written as a whole is cut off again, so the file stays readable, and the next line can be
    written once there is room. Only a process that dies in the middle of a write leaves a part of a line.

    Parameters
    ----------
    path : of the file; only its owner may read it.

    Attributes
    ----------
    size : bytes of the lines written so far.

    Raises
    ------
    InvalidArgument
        The file cannot be opened, or is no regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.size = 0
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, OWNER_ONLY)
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise InvalidArgument(f"cannot write a trace to {self.path!r}: {reason}; name another file") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise InvalidArgument(f"{self.path!r} is no regular file, and a trace needs one: name another")
            os.ftruncate(self._file, 0)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, line: bytes) -> None:
        """Add a line, with its end.

        Raises
        ------
        OSError
            It was not written; the lines before it are still there.
        """
        rest, at = memoryview(line), self.size
        try:
            while rest:
                done = os.pwrite(self._file, rest, at)
                rest, at = rest[done:], at + done
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size = at

    def close(self) -> None:
        """Close the file. Twice is fine."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
