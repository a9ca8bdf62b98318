"""A store in files or objects, by fsspec: a folder that machines mount, S3, GCS and others.

A value is one object, which appears as a whole. fsspec's calls have no time limit
of their own: a call looks at the clock after each object, and the mover leaves one that hangs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedkv import extras
from pagedkv.errors import InvalidArgument, TierError
from pagedkv.threads.crew import Crew
from pagedkv.tiers.remote.connecting import answer_of
from pagedkv.tiers.remote.store import MISSING, UNUSABLE, Came, Unreachable, count_into

AT_ONCE = 16  # objects
THREAD = "pagedkv-objects"

Item = TypeVar("Item")
Result = TypeVar("Result")


class ObjectStore:
    """Objects under one URL. Any thread may call it.

    Parameters
    ----------
    url : as fsspec's, such as ``s3://bucket/folder`` or ``file:///mnt/kv``.
    options : of the file system, such as credentials and endpoints.

    Raises
    ------
    ImportError
        fsspec, or the package of this kind of URL, is not installed.
    InvalidArgument
        The URL or an option cannot be used. The message repeats neither.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            import fsspec
        except ImportError:
            raise ImportError(f"an object store needs fsspec: {extras.command('objects')}") from None
        try:
            self._fs, self._folder = fsspec.core.url_to_fs(url, **options)
        except ImportError as problem:
            raise ImportError(f"this kind of URL needs a package that fsspec names: {problem}") from None
        except Exception as problem:
            raise InvalidArgument(f"fsspec cannot use this URL with these options: {type(problem).__name__}") from None
        self._pid = os.getpid()

    def open(self, until: float) -> None:
        """See :meth:`Store.open`: the folder is made, and an object written, read and removed."""
        answer_of(self._try, until, THREAD)

    def _try(self) -> None:
        probe = f"{self._folder}/probe-{os.urandom(8).hex()}"
        try:
            self._fs.makedirs(self._folder, exist_ok=True)
            self._fs.pipe_file(probe, b"x")
            read = self._fs.cat_file(probe)
            self._fs.rm_file(probe)
        except (PermissionError, FileNotFoundError, NotADirectoryError) as problem:
            raise TierError(f"objects cannot be written there: {type(problem).__name__}") from None
        except Exception as problem:
            raise Unreachable("connect", type(problem).__name__) from None
        if read != b"x":
            raise TierError("an object was read otherwise than it was written")

    def exists(self, keys: Sequence[str], until: float) -> list[bool]:
        """See :meth:`Store.exists`."""
        return self._each(lambda key: bool(self._fs.exists(self._path(key))), keys, until)

    def get_into(
        self,
        keys: Sequence[str],
        heads: NDArray[np.uint8],
        rows: Sequence[NDArray[np.uint8]],
        until: float,
        came: Came,
    ) -> None:
        """See :meth:`Store.get_into`."""
        for start in range(0, len(keys), AT_ONCE):
            part = range(start, min(start + AT_ONCE, len(keys)))
            for i, value in zip(part, self._each(self._read, [keys[i] for i in part], until), strict=True):
                size = heads[i].nbytes + rows[i].nbytes
                if value is None:
                    came(i, MISSING)
                elif len(value) != size:
                    came(i, UNUSABLE)
                else:
                    found = np.frombuffer(value, np.uint8)
                    heads[i] = found[: heads[i].nbytes]
                    rows[i][:] = found[heads[i].nbytes :]
                    came(i, size)

    def put(
        self, keys: Sequence[str], values: Iterable[tuple[bytes, NDArray[np.uint8]]], until: float
    ) -> list[str]:
        """See :meth:`Store.put`."""
        answers: list[str] = []
        for key, (head, row) in zip(keys, values, strict=True):
            _check(until)
            try:
                self._write(self._path(key), head + row.tobytes())
                answers.append("")
            except (PermissionError, OSError) as problem:
                answers.append(type(problem).__name__)
            except Exception as problem:
                raise Unreachable("protocol", type(problem).__name__) from None
        return answers

    def remove(self, keys: Sequence[str], until: float) -> None:
        """See :meth:`Store.remove`."""
        self._each(self._remove, keys, until)

    def remove_group(self, prefix: str, until: float) -> int:
        """See :meth:`Store.remove_group`."""
        there = list(answer_of(lambda: self._found(prefix), until, THREAD))
        self._each(self._remove_path, there, until)
        if self._is_local:
            answer_of(lambda: self._remove_folders(prefix), until, THREAD)
        return len(there)

    def groups(self, prefix: str, until: float) -> dict[str, dict[str, int]]:
        """See :meth:`Lists.groups`."""
        found: dict[str, dict[str, int]] = {}
        for path, size in answer_of(lambda: self._found(prefix), until, THREAD).items():
            count_into(found, path.split("/")[-3], size)
        return found

    def close(self) -> None:
        """See :meth:`Store.close`; fsspec keeps its own connections."""

    # ---- inside

    @property
    def _is_local(self) -> bool:
        """Whether the objects are files."""
        return bool(getattr(self._fs, "local_file", False))

    def _remove_folders(self, prefix: str) -> None:
        """Remove the empty folders of a group; a writer that just made one is refused at worst."""
        folders = [str(folder) for folder, _, _ in self._fs.walk(self._group(prefix))]
        for folder in sorted(folders, reverse=True):
            with contextlib.suppress(OSError):
                self._fs.rmdir(folder)

    def _found(self, prefix: str) -> dict[str, int]:
        """Bytes of each object under a prefix, by path."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._group(prefix), detail=True)
        except FileNotFoundError:
            return {}
        except Exception as problem:
            raise Unreachable("protocol", type(problem).__name__) from None
        return {str(path): int(one.get("size") or 0) for path, one in found.items()}

    def _path(self, key: str) -> str:
        """``prefix:GROUP:CHAIN`` as folders, so that a group is one, and no folder holds all."""
        prefix, group, chain = key.split(":")
        return f"{self._group(f'{prefix}:{group}:')}/{chain[:2]}/{chain}"

    def _group(self, prefix: str) -> str:
        """The folder of ``prefix:`` or ``prefix:GROUP:``."""
        return "/".join((self._folder, *prefix.removesuffix(":").split(":")))

    def _write(self, path: str, value: bytes) -> None:
        """Write an object; a file under another name first, as no reader may see a part of it."""
        if not self._is_local:
            self._fs.pipe_file(path, value)
            return
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        part = f"{path}.{os.urandom(4).hex()}"
        self._fs.pipe_file(part, value)
        self._fs.mv(part, path)

    def _read(self, key: str) -> bytes | None:
        try:
            value: bytes = self._fs.cat_file(self._path(key))
        except FileNotFoundError:
            return None
        return value

    def _remove(self, key: str) -> None:
        self._remove_path(self._path(key))

    def _remove_path(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            return

    def _each(self, work: Callable[[Item], Result], items: Sequence[Item], until: float) -> list[Result]:
        """The results for all items, some at a time."""
        if self._pid != os.getpid():
            raise Unreachable("closed", f"this store belongs to process {self._pid}; a forked child opens its own")
        done: list[Result] = []
        _check(until)
        try:
            with Crew(work, items, AT_ONCE) as crew:
                for result in crew:
                    done.append(result)
                    _check(until)
        except Unreachable:
            raise
        except Exception as problem:
            raise Unreachable("protocol", type(problem).__name__) from None
        return done


def _check(until: float) -> None:
    if time.monotonic() >= until:
        raise Unreachable("timeout", "no answer in time")
