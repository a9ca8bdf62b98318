"""A store on Mooncake, by its own client.

Mooncake's calls have no time limit: a stopped machine holds them up for half a minute. So each one runs in a thread
with memory of its own, and the call that waits for it may leave. It never writes into a caller's memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv import extras
from pagedkv.errors import TierError
from pagedkv.tiers.remote.connecting import Attempt
from pagedkv.tiers.remote.store import MISSING, UNUSABLE, Came, Unreachable

Codes: TypeAlias = list[int]
Work: TypeAlias = Callable[[Any, int], Iterable[int]]  # of Mooncake's client and an address in memory

WINDOW_BYTES = 8 << 20  # of one call into the client, and of its memory
WINDOW_KEYS = 4096
MOST_OUT = 8  # calls into the client at a time: those that hang count
LOCAL_BYTES = 16 << 20  # that the client takes for itself
LIMITS = {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_RPC_CONNECT_TIMEOUT_MS": "500", "MC_RPC_TIMEOUT_MS": "1000"}
THREAD = "pagedkv-mooncake"
CLOSES_S = 5.0  # to leave the store
ABSENT, OF_ANOTHER_SIZE = -704, -600
REFUSALS = {-200: "FULL", -703: "UNFINISHED"}  # of a value
BROKEN = range(-999, -799)  # no transfer, no master


class Memory:
    """Registered memory of one call into the client.

    Parameters
    ----------
    array : uint8 [n]
    give_back : called with it once no call uses it any more.

    Attributes
    ----------
    codes : answers of the call that used it last.
    """

    def __init__(self, array: NDArray[np.uint8], give_back: Callable[[Memory], None]) -> None:
        self.array, self.codes = array, Codes()
        self._give_back = give_back

    def close(self) -> None:
        """Give it back."""
        self._give_back(self)


class Client:
    """Mooncake's client, set up, and the memory of its calls. Any thread may call it.

    Parameters
    ----------
    client : of Mooncake.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._idle: list[Memory] = []
        self._num_out = 0

    @contextlib.contextmanager
    def call(
        self, work: Work, count: int, size: int, until: float, fill: Callable[[NDArray[np.uint8]], None] | None = None
    ) -> Iterator[Memory]:
        """Run a call in a thread; its memory is the caller's until it leaves the block.

        Parameters
        ----------
        work : the call.
        count : answers that it has.
        size : bytes of memory that it needs.
        fill : called with the memory first, in this thread.

        Raises
        ------
        Unreachable
            It has not come back by then; its memory is out until it has.
        """
        memory = self._take(size)
        try:
            if fill is not None:
                fill(memory.array)
            attempt = Attempt(lambda: self._run(work, memory), THREAD)
        except RuntimeError:
            memory.close()
            raise Unreachable("connect", "this process has no thread left for a call") from None
        except BaseException:
            memory.close()
            raise
        done = None
        try:
            done = attempt.wait(until)
        finally:
            if done is None:
                attempt.abandon()
        if done is None:
            raise Unreachable("timeout", "no answer in time")
        try:
            if len(done.codes) != count:
                raise Unreachable("protocol", "Mooncake's client has not taken the call: is it 0.3.13 or newer?")
            yield done
        finally:
            done.close()

    def close(self) -> None:
        """Leave the store, unless a call is still in it. It takes a second."""
        with self._lock:
            is_busy = self._num_out > 0
        if not is_busy:
            self._client.close()

    def _run(self, work: Work, memory: Memory) -> Memory:
        memory.codes = []
        with contextlib.suppress(Exception):  # an argument that this version of Mooncake does not take
            memory.codes = [int(code) for code in work(self._client, memory.array.ctypes.data)]
        return memory

    def _take(self, size: int) -> Memory:
        with self._lock:
            if self._num_out >= MOST_OUT:
                raise Unreachable("timeout", f"{MOST_OUT} calls into Mooncake have not come back")
            self._num_out += 1
            if not size:
                return Memory(np.empty(0, np.uint8), self._forget)
            found = next((memory for memory in self._idle if memory.array.nbytes >= size), None)
            if found is not None:
                self._idle.remove(found)
                return found
        try:
            array = np.empty(max(size, WINDOW_BYTES + 1), np.uint8)
            if self._client.register_buffer(array.ctypes.data, array.nbytes):
                raise Unreachable("connect", f"Mooncake cannot register {array.nbytes:,} bytes of memory")
        except BaseException:
            self._forget()
            raise
        return Memory(array, self._keep)

    def _keep(self, memory: Memory) -> None:
        with self._lock:
            self._num_out -= 1
            self._idle.append(memory)

    def _forget(self, _memory: Memory | None = None) -> None:
        with self._lock:
            self._num_out -= 1


class MooncakeStore:
    """A Mooncake store. Any thread may call it; all share one client.

    A value that is there already is kept, as Mooncake does it, and counts as stored.

    Parameters
    ----------
    master : ``host:port`` of the master.
    host : this machine's address, for the store's other clients.
    protocol : ``"tcp"`` or ``"rdma"``.
    devices : for RDMA, as Mooncake names them; "" for all.
    segment_bytes : memory that this process lends to the store.

    Raises
    ------
    ImportError
        Mooncake is not installed.
    """

    def __init__(
        self, master: str, *, host: str, protocol: str, devices: str, segment_bytes: int
    ) -> None:
        self._client_type = _mooncake()
        self._setup = (host, "P2PHANDSHAKE", segment_bytes, LOCAL_BYTES, protocol, devices, master)
        self._client: Client | None = None
        self._pid = os.getpid()

    # ---- a Store

    def open(self, until: float) -> None:
        """Set the client up; see :meth:`Store.open`.

        Mooncake holds Python's interpreter while it does so: no thread of the process goes on for 4 to 5 seconds where
        there is no master. So this is done once, here, and never while a cache serves. Variables of Mooncake that the
        process has not set itself, ``MC_RPC_TIMEOUT_MS`` and others, are set to keep it as short as that.
        """
        for name, value in LIMITS.items():
            os.environ.setdefault(name, value)
        client = self._client_type()
        if code := client.setup(*self._setup):
            raise TierError(
                f"Mooncake's client finds no master there ({code}): start the master first, and open the cache anew"
            )
        self._client = Client(client)

    def exists(self, keys: Sequence[str], until: float) -> list[bool]:
        """See :meth:`Store.exists`."""
        found: list[bool] = []
        for start in range(0, len(keys), WINDOW_KEYS):
            part = list(keys[start : start + WINDOW_KEYS])

            def look(client: Any, _: int, part: list[str] = part) -> Codes:
                found: Codes = client.batch_is_exist(part)
                return found

            codes = self._call(look, len(part), until)
            if min(codes) < 0:
                raise _unreachable(min(codes))
            found += [code == 1 for code in codes]
        return found

    def get_into(
        self,
        keys: Sequence[str],
        heads: NDArray[np.uint8],
        rows: Sequence[NDArray[np.uint8]],
        until: float,
        came: Came,
    ) -> None:
        """See :meth:`Store.get_into`."""
        if not keys:
            return
        head_bytes = heads.shape[1]
        size = head_bytes + rows[0].nbytes
        window = max(1, min(WINDOW_KEYS, WINDOW_BYTES // size))
        for start in range(0, len(keys), window):
            part = list(keys[start : start + window])

            def read(client: Any, at: int, part: list[str] = part) -> Codes:
                # One byte more than a value: a longer one is told by its size.
                places = [at + i * (size + 1) for i in range(len(part))]
                found: Codes = client.batch_get_into(part, places, [size + 1] * len(part))
                return found

            failed = 0
            with self._connected.call(read, len(part), (size + 1) * len(part), until) as memory:
                for i, code in enumerate(memory.codes):
                    if code == size:
                        value = memory.array[i * (size + 1) : i * (size + 1) + size]
                        heads[start + i], rows[start + i][:] = value[:head_bytes], value[head_bytes:]
                        came(start + i, size)
                    elif code == ABSENT:
                        came(start + i, MISSING)
                    elif code >= 0 or code == OF_ANOTHER_SIZE:
                        came(start + i, UNUSABLE)
                    else:
                        failed = code
            if failed:
                raise _unreachable(failed)

    def put(
        self, keys: Sequence[str], values: Iterable[tuple[bytes, NDArray[np.uint8]]], until: float
    ) -> list[str]:
        """See :meth:`Store.put`."""
        answers: list[str] = []
        waiting: list[tuple[str, NDArray[np.uint8]]] = []
        size = 0
        for key, (head, row) in zip(keys, values, strict=True):
            waiting.append((key, np.concatenate((np.frombuffer(head, np.uint8), row))))
            size += waiting[-1][1].nbytes
            if len(waiting) >= WINDOW_KEYS or size >= WINDOW_BYTES:
                answers += self._put(waiting, until)
                waiting, size = [], 0
        return answers + (self._put(waiting, until) if waiting else [])

    def remove(self, keys: Sequence[str], until: float) -> None:
        """See :meth:`Store.remove`."""
        if keys:
            codes = self._call(lambda client, _: client.batch_remove(list(keys), True), len(keys), until)
            if failed := [code for code in codes if code not in (0, ABSENT)]:
                raise _unreachable(failed[0])

    def remove_group(self, prefix: str, until: float) -> int:
        """See :meth:`Store.remove_group`."""
        pattern = f"^{re.escape(prefix)}.*"
        (count,) = self._call(lambda client, _: [client.remove_by_regex(pattern, True)], 1, until)
        if count < 0:
            raise _unreachable(count)
        return count

    def close(self) -> None:
        """See :meth:`Store.close`. A client that hangs is left behind."""
        if self._pid != os.getpid():
            return
        client, self._client = self._client, None
        if client is not None:
            leaving = threading.Thread(target=client.close, name=THREAD, daemon=True)
            leaving.start()
            leaving.join(CLOSES_S)

    # ---- inside

    def _put(self, values: list[tuple[str, NDArray[np.uint8]]], until: float) -> list[str]:
        keys, arrays = [key for key, _ in values], [array for _, array in values]
        sizes = [array.nbytes for array in arrays]
        *starts, size = np.cumsum([0, *sizes]).tolist()

        def fill(memory: NDArray[np.uint8]) -> None:
            np.concatenate(arrays, out=memory[:size])

        def write(client: Any, at: int) -> Codes:
            found: Codes = client.batch_put_from(keys, [at + start for start in starts], sizes)
            return found

        with self._connected.call(write, len(keys), size, until, fill) as memory:
            codes = memory.codes
        if failed := [code for code in codes if code in BROKEN]:
            raise _unreachable(failed[0])
        return ["" if code >= 0 else REFUSALS.get(code, f"CODE{-code}") for code in codes]

    def _call(self, work: Work, count: int, until: float) -> Codes:
        """The answers to a call that needs no memory."""
        with self._connected.call(work, count, 0, until) as memory:
            return memory.codes

    @property
    def _connected(self) -> Client:
        if self._pid != os.getpid():
            raise Unreachable("closed", f"this store belongs to process {self._pid}; a forked child opens its own")
        if self._client is None:
            raise Unreachable("closed", "this store is closed, or was not opened")
        return self._client


def _unreachable(code: int) -> Unreachable:
    return Unreachable("closed", f"Mooncake answered {code}: no master, or no machine that has the value")


def _mooncake() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as problem:
        raise ImportError(
            f"a Mooncake store needs its client: {extras.command('mooncake')}, and Debian's libibverbs1 ({problem})"
        ) from None
    return MooncakeDistributedStore
