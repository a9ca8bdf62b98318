"""Verdicts on kernels of one device: kept in a file, beside the compiled kernels.

A file is ``tuning-DIGEST.json``, of a device's name, a driver and a compiler. It says for which of them and for which
sources it holds; one of others, or with a verdict that no trial comes to, is not believed, and made again. It appears
by renaming, so processes may share the folder; the last to write a config's verdict is believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagedkv._version import __version__
from pagedkv.kernels.jit import write_whole
from pagedkv.kernels.source import kernel_names, source_hash
from pagedkv.observe.callbacks import Log, came_from_signal

log = Log(logging.getLogger("pagedkv.kernels"))
VERSION = 2
CLEARLY = 0.97  # of the preferred kernel's time, below which another takes its place
REFERENCE = "decode_simt"  # the others are compared with it; it is taken where none of them is right


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one config's trial.

    Attributes
    ----------
    kernel : the one to take.
    us : device microseconds by kernel, of those that were right.
    wrong : by kernel, how its results differ or why it did not run.
    late : kernels that were not tried: there was no time, or the device was lost.
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
    device, driver, compiler : the device's name, the CUDA version its driver is for, and the NVRTC's.
    """

    def __init__(self, folder: Path | None, device: str, driver: str, compiler: str) -> None:
        digest = hashlib.blake2b("\n".join((device, driver, compiler)).encode(), digest_size=8).hexdigest()
        self.path = None if folder is None else folder / f"tuning-{digest}.json"
        self._about = {
            "version": VERSION, "pagedkv": __version__, "device": device, "driver": driver, "compiler": compiler,
            "sources": sources_digest(),
        }  # fmt: skip
        self._lock = threading.Lock()
        self._warned = False
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

    def put(self, config: str, verdict: Verdict) -> Verdict:
        """Keep a verdict, and those of the file, which are no older than this process's others.

        Returns the one kept: no kernel is taken that this or another process has found wrong.
        """
        with self._lock:
            kept = self._read()
            found = kept.get(config)
            if found is not None:
                verdict = _joined(verdict, found, _candidates(config))
            kept[config] = verdict
            self._known = {**self._known, **kept}
            self._own.add(config)
            if self.path is None:
                return verdict
            verdicts = {name: asdict(one) for name, one in kept.items()}
            body = json.dumps({**self._about, "verdicts": verdicts}, indent=1, sort_keys=True)
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(self.path, body.encode())
            except OSError as error:
                log.warning("verdicts on kernels cannot be kept in %s: %s", self.path, error.strerror)
            return verdict

    def forget(self) -> None:
        """Drop all verdicts, in the file as well.

        Raises
        ------
        OSError
            The file cannot be removed; nothing is dropped.
        """
        with self._lock:
            if self.path is not None:
                self.path.unlink(missing_ok=True)
            self._known = {}
            self._own.clear()

    def _read(self) -> dict[str, Verdict]:
        """The verdicts of the file; none, and a warning, where they cannot be believed."""
        if self.path is None:
            return {}
        try:
            if self.path.exists() and not self.path.is_file():
                raise OSError("no file")  # a pipe, say, of which a read never returns
            found: Any = json.loads(self.path.read_bytes())
            other = [name for name, value in self._about.items() if found.get(name) != value]
            if not other:
                return {name: _verdict(name, one) for name, one in found["verdicts"].items()}
            trouble = f"are of another {', '.join(other)}"
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if came_from_signal(error):
                raise
            trouble = f"are damaged ({error!r:.200})"
        if not self._warned:
            log.warning("the verdicts on kernels in %s %s: they are made again", self.path, trouble)
        self._warned = True
        return {}


def fastest(us: Mapping[str, float], candidates: Iterable[str]) -> str:
    """The kernel to take of those with times: the preferred, unless another is clearly faster."""
    chosen = REFERENCE
    for kernel in filter(us.__contains__, candidates):
        if chosen == REFERENCE or us[kernel] < CLEARLY * us[chosen]:
            chosen = kernel
    return chosen


def _candidates(config: str) -> list[str]:
    """The kernels with which a config's text ends in brackets, the preferred first."""
    return config[config.rindex("[") + 1 : -1].split(", ")


def _joined(own: Verdict, other: Verdict, candidates: Iterable[str]) -> Verdict:
    """The verdict of two trials: by the times of both, without what either found wrong."""
    wrong = {**other.wrong, **own.wrong}
    us = {name: value for name, value in {**other.us, **own.us}.items() if name not in wrong}
    late = tuple(name for name in own.late if name not in us and name not in wrong)
    return Verdict(fastest(us, candidates), us, wrong, late)


def sources_digest() -> str:
    """32 hex digits over the sources of all kernels and the Python of their tilings."""
    digest = hashlib.blake2b("".join(map(source_hash, kernel_names())).encode(), digest_size=16)
    for module in sorted(Path(__file__).parent.glob("*.py")):
        with contextlib.suppress(OSError):  # an editor's lock, say, which is a link to nothing
            digest.update(hashlib.blake2b(module.read_bytes()).digest())
    return digest.hexdigest()


def _verdict(config: str, found: Any) -> Verdict:
    """The file's verdict on a config.

    Raises
    ------
    ValueError, LookupError, TypeError, AttributeError, OverflowError
        It is none, or one that no trial comes to.
    """
    candidates = set(_candidates(config))
    us = {name: float(value) for name, value in found["us"].items()}
    wrong = {name: str(why) for name, why in found["wrong"].items()}
    verdict = Verdict(found["kernel"], us, wrong, tuple(found.get("late", ())))
    known = [*us, *wrong, *verdict.late]
    if len(set(known)) < len(known) or not candidates.issuperset(known):
        raise ValueError(f"{known} are not some of {sorted(candidates)}, each once")
    if not all(0 <= value < math.inf for value in us.values()):  # a NaN is not >=
        raise ValueError(f"{us} are no times")
    if verdict.kernel != REFERENCE and verdict.kernel not in us:
        raise ValueError(f"{verdict.kernel!r} is none of the kernels that were right")
    return verdict
