"""Verdicts on kernels of one device: kept in a file, beside the compiled kernels.

A file is ``tuning-DIGEST.json``, of a device's name. It says for which driver and sources it holds; a verdict of others
is not believed, and made again. The file appears by renaming, so processes may share the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagedkv.kernels.jit import write_whole
from pagedkv.kernels.source import kernel_names, source_hash
from pagedkv.observe.callbacks import Log

log = Log(logging.getLogger("pagedkv.kernels"))
VERSION = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one config's trial.

    Attributes
    ----------
    kernel : the one to take.
    us : device microseconds by kernel, of those that were right.
    wrong : by kernel, how its results differ or why it did not run.
    late : kernels that there was no time to try.
    """

    kernel: str
    us: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    late: tuple[str, ...] = ()


class Verdicts:
    """The verdicts of one device, by the config's text.

    Parameters
    ----------
    folder : of the file; None keeps them in memory alone.
    device, driver : the device's name and the CUDA version its driver is for.
    """

    def __init__(self, folder: Path | None, device: str, driver: str) -> None:
        digest = hashlib.blake2b(device.encode(), digest_size=8).hexdigest()
        self.path = None if folder is None else folder / f"tuning-{digest}.json"
        self._about = {"version": VERSION, "device": device, "driver": driver, "sources": sources_digest()}
        self._lock = threading.Lock()
        self._known: dict[str, Verdict] = self._read()
        self._own: set[str] = set()  # configs whose verdict is of this process

    def all(self) -> dict[str, Verdict]:
        """Every verdict, by the config's text."""
        return dict(self._known)

    def get(self, config: str) -> Verdict | None:
        """The verdict on a config."""
        return self._known.get(config)

    def final(self, config: str) -> Verdict | None:
        """The verdict on a config, unless kernels are left that an earlier process had no time for."""
        found = self._known.get(config)
        return None if found is not None and found.late and config not in self._own else found

    def put(self, config: str, verdict: Verdict) -> None:
        """Keep a verdict, also those that another process has written meanwhile."""
        with self._lock:
            self._own.add(config)
            self._known = {**self._read(), **self._known, config: verdict}
            if self.path is None:
                return
            kept = {name: asdict(one) for name, one in self._known.items()}
            body = json.dumps({**self._about, "verdicts": kept}, indent=1, sort_keys=True)
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(self.path, body.encode())
            except OSError as error:
                log.warning("verdicts on kernels cannot be kept in %s: %s", self.path, error.strerror)

    def forget(self) -> None:
        """Drop all verdicts, in the file as well."""
        with self._lock:
            self._known = {}
            self._own.clear()
            if self.path is not None:
                self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Verdict]:
        if self.path is None:
            return {}
        try:
            found: Any = json.loads(self.path.read_bytes())
            kept = {str(name): _verdict(one) for name, one in found["verdicts"].items()}
            about = {name: found[name] for name in self._about}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the verdicts on kernels in %s are damaged (%r): they are made again", self.path, error)
            return {}
        other = [name for name, value in self._about.items() if about[name] != value]
        if other:
            log.info(
                "the verdicts on kernels in %s are of another %s: they are made again", self.path, ", ".join(other)
            )
            return {}
        return kept


def sources_digest() -> str:
    """32 hex digits over all kernels' sources."""
    text = "".join(source_hash(name) for name in kernel_names())
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _verdict(found: Any) -> Verdict:
    """A verdict of the file.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError
        It is none.
    """
    us = {str(name): float(value) for name, value in found["us"].items()}
    wrong = {str(name): str(why) for name, why in found["wrong"].items()}
    if not isinstance(found["kernel"], str):
        raise TypeError("kernel is no name")
    return Verdict(found["kernel"], us, wrong, tuple(map(str, found.get("late", ()))))
