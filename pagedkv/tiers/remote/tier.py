"""The remote tier: asks a store, checks every answer, and stops asking where it fails.

A block id of this tier is a claim: a lookup made it, and the block's name, not the id, finds the value. The store owns
content, space and eviction. Whatever the store does, a call ends within its limit and does not raise: a block is there,
checked byte for byte, or it is a counted miss.

State: ok; off after `PATIENCE` calls in a row without an answer, or as long as a call hangs. After `FIRST_REST_S`,
doubled up to `LONGEST_REST_S`, one call tries the store again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TierError
from pagedkv.observe.callbacks import Log
from pagedkv.tiers.base import Name, check_size
from pagedkv.tiers.circuit import Circuit
from pagedkv.tiers.remote.absent import Absent
from pagedkv.tiers.remote.stats import Counts, RemoteStats, State
from pagedkv.tiers.remote.store import MISSING, Store, Unreachable
from pagedkv.tiers.remote.value import HEAD_BYTES, Values

log = Log(logging.getLogger("pagedkv.tiers.remote"))

PATIENCE = 3  # calls
FIRST_REST_S, LONGEST_REST_S = 0.5, 60.0
FIRST_WINDOW = 256  # keys of a lookup's first question; each further one is four times as long


class RemoteTier:
    """Blocks in a store that other processes share. Any thread may call it.

    Parameters
    ----------
    store : Store
        It is closed with the tier.
    values : Values
        Names and checks blocks.
    num_claims : block ids.
    where : the store's address without a password, for the log.
    lookup_s, read_s, write_s, purge_s : seconds that a call may take.
    clock : monotonic seconds, those of the store's limits.

    Raises
    ------
    WrongType, InvalidArgument
    """

    name = "remote"

    def __init__(
        self,
        store: Store,
        values: Values,
        num_claims: int,
        *,
        where: str,
        lookup_s: float = 0.02,
        read_s: float = 2.0,
        write_s: float = 5.0,
        purge_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_size(num_claims, values.block_bytes)
        self.num_blocks, self.block_bytes = num_claims, values.block_bytes
        self._store, self._values, self._where, self._clock = store, values, where, clock
        self.lookup_s, self._read_s, self._write_s, self._purge_s = lookup_s, read_s, write_s, purge_s
        self._lock = threading.RLock()  # reentrant: clocks and log handlers run under it
        self._circuit = Circuit(PATIENCE, FIRST_REST_S, LONGEST_REST_S)
        self._hanging = 0
        self._said: State = "ok"
        self._why = ""
        self._absent = Absent(clock)
        self._counts = Counts()
        self._local = threading.local()
        self._closed = False

    # ---- a store of blocks

    def lookup(self, namespace: bytes, chain_keys: Sequence[bytes], *, anew: bool = False) -> int:
        """How many of these blocks, from the front, the store says it has.

        It takes `lookup_s` at most.

        Parameters
        ----------
        namespace : its digest.
        chain_keys : of consecutive blocks of a prompt.
        anew : ask about blocks, too, that were missing a moment ago.
        """
        keys = [self._values.key(namespace, key) for key in chain_keys]
        if not anew:
            known = self._absent.first_in(keys)
            if known == 0:
                self._counts.add("lookups_spared")
                return 0
            keys = keys[:known]
        found = 0

        def ask(until: float) -> None:
            nonlocal found
            window = FIRST_WINDOW
            while found < len(keys):
                part = keys[found : found + window]
                there = self._store.exists(part, until)
                run = there.index(False) if False in there else len(part)
                found += run
                if run < len(part):
                    self._absent.add(keys[found])
                    return
                window *= 4

        if keys and self._call(ask, self.lookup_s):
            self._counts.add("lookups")
        self._counts.add("lookup_blocks", found)
        return found

    def read(
        self,
        blocks: NDArray[np.int32],
        expected: Sequence[Name],
        arena: NDArray[np.uint8],
        dst_blocks: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Fill rows of `arena`; bool [n], True for each that holds exactly its block."""
        count, values = len(expected), self._values
        ok = np.zeros(count, np.bool_)
        keys = [values.key(name.namespace, name.key) for name in expected]
        rows = [arena[block] for block in dst_blocks.tolist()]
        heads, payloads = np.zeros((count, HEAD_BYTES), np.uint8), rows
        if values.seals:
            payloads = list(self._scratch(count))
        wrong: list[str] = []
        came = [False] * count

        def check(i: int, size: int) -> None:
            came[i] = True
            if size == HEAD_BYTES + values.payload_bytes:
                why = values.problem(expected[i].key, heads[i], payloads[i], rows[i])
            else:
                why = "absent" if size == MISSING else "length"
            ok[i] = not why
            if why:
                self._counts.add_by("misses", why)
                self._absent.add(keys[i])
                if why != "absent":
                    wrong.append(keys[i])

        self._call(lambda until: self._store.get_into(keys, heads, payloads, until, check), self._read_s)
        served = int(ok.sum())
        self._counts.add("read_blocks", served)
        self._counts.add("read_bytes", served * (HEAD_BYTES + values.payload_bytes))
        if not all(came):
            self._counts.add_by("misses", "late", came.count(False))
        if wrong and not self._call(lambda until: self._store.remove(wrong, until), self._write_s):
            self._counts.add("left_behind", len(wrong))  # where it stays, no writer replaces it
        return ok

    def write(
        self,
        blocks: NDArray[np.int32],
        records: Sequence[Name],
        arena: NDArray[np.uint8],
        src_blocks: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Store rows of `arena`; bool [n] says which blocks the store has in the end.

        The caller keeps the rows as they are until this has returned, also where it has stopped waiting.
        """
        values = self._values
        ok = np.zeros(len(records), np.bool_)
        keys = [values.key(name.namespace, name.key) for name in records]

        def packed(missing: list[int]) -> Iterator[tuple[bytes, NDArray[np.uint8]]]:
            scratch = self._scratch(1)[0] if values.seals else None
            for i in missing:
                row = arena[src_blocks[i]]
                payload = row if scratch is None else scratch
                yield values.pack(records[i].key, row, payload), payload

        def send(until: float) -> None:
            ok[:] = self._store.exists(keys, until)
            missing = np.flatnonzero(~ok).tolist()
            self._counts.add("deduplicated", len(keys) - len(missing))
            if not missing:
                return
            answers = self._store.put([keys[i] for i in missing], packed(missing), until)
            for i, why in zip(missing, answers, strict=True):
                ok[i] = not why
                if why:
                    self._counts.add_by("refused", why)
                else:
                    self._absent.discard(keys[i])
                    self._counts.add("written_blocks")
                    self._counts.add("written_bytes", HEAD_BYTES + values.payload_bytes)

        self._call(send, self._write_s)
        return ok

    def purge(self, namespace: bytes) -> int:
        """Delete all blocks of a namespace, by its digest, from the store; how many.

        Another process may write it again.

        Raises
        ------
        TierError
            The store did not confirm it.
        """
        try:
            return self._store.remove_group(self._values.group(namespace), self._clock() + self._purge_s)
        except Unreachable as problem:
            self._learn(problem)
            raise TierError(
                f"the remote store {self._where} did not confirm that the namespace was deleted: {problem}"
            ) from None

    # ---- state

    @property
    def state(self) -> State:
        """Whether the store is asked."""
        return "off" if self.is_off else "ok"

    @property
    def is_off(self) -> bool:
        """Whether the store is not asked, but for a trial now and then."""
        return self._hanging > 0 or self._circuit.shut or self._closed

    @property
    def may_ask(self) -> bool:
        """Whether a call would be made now: it is on, or the time for a trial has come."""
        return not self._hanging and not self._closed and self._circuit.may_try(self._clock())

    def unreachable_at_first(self, problem: Unreachable) -> None:
        """It could not be reached when it was opened: it is off until a trial succeeds."""
        with self._lock:
            self._circuit.learn(self._clock(), 0, 1, hopeless=True)
        self._note(problem)

    def call_hangs(self, num_blocks: int) -> None:
        """A call into it does not come back. Nothing is logged before `log_state`."""
        with self._lock:
            self._hanging += 1
            self._circuit.learn(self._clock(), 0, 1, hopeless=True)
            self._why = "a call into it does not come back"
        self._counts.add_by("failures", "hang")

    def call_came_back(self) -> None:
        """A call that hung is over, whatever came of it."""
        with self._lock:
            self._circuit.learn(self._clock(), 0, 1, hopeless=True)  # the rest begins before it can be asked again
            self._hanging -= 1
        self.log_state()

    def log_state(self) -> None:
        """Log one line if the state has changed since the last one."""
        with self._lock:
            state: State = "off" if self._hanging or self._circuit.shut else "ok"
            if state == self._said:
                return
            self._said, why = state, self._why
        if state == "ok":
            log.warning("remote tier %s works again", self._where)
        else:
            log.warning("remote tier %s is off now: %s", self._where, why)

    def stats(self) -> RemoteStats:
        """State and counters."""
        return self._counts.read(self.state)

    def close(self) -> None:
        """Close the store's connections. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._store.close()

    # ---- inside

    def _call(self, ask: Callable[[float], None], limit_s: float) -> bool:
        """Ask the store within a limit, if it is asked at all; whether it has answered."""
        with self._lock:
            if self._closed or self._hanging or not self._circuit.lets_through(self._clock()):
                self._counts.add("refused_off")
                return False
        try:
            ask(self._clock() + limit_s)
        except Unreachable as problem:
            self._learn(problem)
            return False
        except TierError as problem:  # it has become another server than it was when it was opened
            self._learn(Unreachable("connect", str(problem)))
            return False
        with self._lock:
            self._circuit.learn(self._clock(), 1, 0)
        self.log_state()
        return True

    def _learn(self, problem: Unreachable) -> None:
        with self._lock:
            self._circuit.learn(self._clock(), 0, 1)
        self._note(problem)

    def _note(self, problem: Unreachable) -> None:
        self._why = f"{problem.kind}: {problem}"
        self._counts.add_by("failures", problem.kind)
        self.log_state()

    def _scratch(self, count: int) -> NDArray[np.uint8]:
        """This thread's uint8 [count, payload_bytes]."""
        have: NDArray[np.uint8] | None = getattr(self._local, "scratch", None)
        if have is None or len(have) < count:
            have = self._local.scratch = np.empty((count, self._values.payload_bytes), np.uint8)
        return have[:count]
