"""Files are cut short or deleted while others read them.

No signal, no wrong byte, only misses.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagedkv.tiers import DiskTier
from tests.reliability.faults import in_worker
from tests.reliability.proof import Proof, Tally, Tick
from tests.reliability.small_store import scratch
from tests.reliability.stores import READ_PATHS, open_store, record_of

BLOCKS, BLOCK_BYTES, SEGMENT_BYTES = 8, 1 << 16, 3 * ((1 << 16) + 4096)
CUTS_OF_A_STORE = 20
EVERY = np.arange(BLOCKS, dtype=np.int32)
RECORDS = [record_of(number) for number in range(BLOCKS)]
PLAIN_READ = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 1 << 16)
mapping = mmap.mmap(fd, 1 << 16, prot=mmap.PROT_READ)
os.ftruncate(fd, 0)
print(bytes(mapping[:4096]))
"""


def run(count: int, seed: int, tick: Tick) -> Tally:
    """Run `count` cuts in a worker, and a control.

    The control is a plain read of a mapping that is cut: it ends its process.
    """
    tally = in_worker(cut_under_readers, count, seed, tick, {})
    with scratch() as place:
        plain = subprocess.run([sys.executable, "-c", PLAIN_READ, str(place / "file")], capture_output=True)
    tally.add("control, a plain read of a mapping: ended by SIGBUS", plain.returncode == -signal.SIGBUS)
    if plain.returncode != -signal.SIGBUS:
        tally.fail(f"control: a plain read of a cut mapping ended with {plain.returncode} and not by SIGBUS")
    return tally


def cut_under_readers(count: int, seed: int, tick: Tick) -> Tally:
    """In the worker: store after store, read by one thread and cut by another."""
    tally = Tally()
    content = np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
    with scratch() as place:
        for store in itertools.count():
            rng = np.random.default_rng([seed, store])
            hours = itertools.count()
            tier = open_store(
                place / "kv", num_blocks=BLOCKS, block_bytes=BLOCK_BYTES, segment_bytes=SEGMENT_BYTES,
                read_path=READ_PATHS[store % 2], clock=lambda: 3600.0 * next(hours),  # noqa: B023
            )  # fmt: skip
            with tier, Reader(tier, content) as reader:
                for _ in range(min(CUTS_OF_A_STORE, count - tally.count)):
                    with reader.paused:
                        tier.write(EVERY, RECORDS, content, EVERY)
                    reader.wait_for_reads(1)
                    tally.add(cut(place / "kv", rng))
                    reader.wait_for_reads(2)  # one that the cut came in between, and one after it
                    tally.count += 1
                    tick(1)
            tally.hits += reader.hits
            tally.add("misses", reader.misses)
            for complaint in reader.complaints:
                tally.fail(f"seed {seed}, store {store}: {complaint}")
            shutil.rmtree(place / "kv")
            if tally.count == count:
                break
    return tally


def cut(path: Path, rng: np.random.Generator) -> str:
    """Cut a segment file anywhere, or at a page, or delete it; says which."""
    files = sorted(path.glob("data.*"))
    if not files:
        return "cuts after the last file was deleted"
    file = files[rng.integers(len(files))]
    if rng.random() < 0.1:
        file.unlink()
        return "files deleted"
    size = int(rng.integers(file.stat().st_size + 1))
    os.truncate(file, size // 4096 * 4096 if rng.random() < 0.5 else size)
    return "files cut"


class Reader:
    """A thread that reads every block of a tier over and over, except while `paused` is held."""

    def __init__(self, tier: DiskTier, content: NDArray[np.uint8]) -> None:
        self.hits = self.misses = 0
        self.complaints: list[str] = []
        self.paused = threading.Lock()
        self._tier, self._content = tier, content
        self._read = threading.Condition()
        self._reads = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def wait_for_reads(self, more: int) -> None:
        """Until so many more reads are finished, or the thread is."""
        with self._read:
            wanted = self._reads + more
            self._read.wait_for(lambda: self._reads >= wanted or self._stop)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        arena = np.empty_like(self._content)
        try:
            while not self._stop:
                with self.paused:
                    served = self._tier.read(EVERY, RECORDS, arena, EVERY)
                wrong = np.flatnonzero(served & (arena != self._content).any(axis=1))
                if wrong.size:
                    self.complaints.append(f"blocks {wrong.tolist()} are served with other bytes")
                self.hits += int(served.sum())
                self.misses += int((~served).sum())
                with self._read:
                    self._reads += 1
                    self._read.notify_all()
        except Exception as problem:
            self.complaints.append(f"raised {type(problem).__name__}: {problem}")
        finally:
            with self._read:
                self._stop = True
                self._read.notify_all()


PROOF = Proof(
    claim="segment files cut or deleted under a reader, by both ways of reading: no signal, no wrong byte, only misses",
    unit="cuts",
    quick=200,
    full=2_000,
    run=run,
)
