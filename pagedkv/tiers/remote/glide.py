"""A store on a Valkey or Redis cluster, by valkey-glide-sync.

The library finds the nodes, follows redirections, and connects again. All calls but the search go as batches: a batch
alone has a time limit of its own, other calls that of their client. A batch's values arrive together and are copied
into their rows; ``get(buffer=)`` would save a copy, and end by the client's limit.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv import extras
from pagedkv.errors import InvalidArgument, TierError
from pagedkv.spec.server_url import read_url
from pagedkv.tiers.remote.connecting import REFUSED, Attempt
from pagedkv.tiers.remote.connection import WORDS
from pagedkv.tiers.remote.store import MISSING, UNUSABLE, Came, Unreachable, count_into
from pagedkv.tiers.remote.valkey import OLDEST, escaped, facts_of, group_of, version_of

Use: TypeAlias = Literal["lookup", "values"]

WINDOW_BYTES = 4 << 20  # of one batch, which comes whole or not at all
WINDOW_KEYS = 4096
SEARCH_MS = 1000  # of one page of a search


class ClusterStore:
    """One cluster. Any thread may call it; all share two clients and their connections.

    One client is for lookups, so that they need not wait behind values.

    The library writes a line to stderr for each call that has no answer in time.

    Parameters
    ----------
    url : ``valkey://``, ``valkeys://`` (TLS), ``redis://`` or ``rediss://``, with user and password
        Any node of the cluster: the client finds the others.
    connect_s : seconds that a call waits for the client to connect, within its own limit.
    ttl_s : seconds until the cluster forgets a value; None for as long as it has room.
    ca_file : certificates to trust in place of the system's.

    Raises
    ------
    ImportError
        valkey-glide-sync is not installed.
    InvalidArgument
        The URL or the file cannot be read. The message does not repeat the URL.
    """

    def __init__(
        self, url: str, *, connect_s: float = 0.5, ttl_s: int | None = None, ca_file: str | None = None
    ) -> None:
        self._glide = _glide()
        self._place = place = read_url(url, ca_file)
        if place.kind == "unix" or place.database:
            raise InvalidArgument("a cluster is reached over TCP, and has database 0 alone")
        try:
            self._login = (place.user.decode() or None, place.password.decode())
        except UnicodeDecodeError:
            raise InvalidArgument("user and password of a cluster must be UTF-8") from None
        self._authorities = None if ca_file is None else Path(ca_file).read_bytes()
        self._connect_s = connect_s
        self._expiry = None if ttl_s is None else self._glide.ExpirySet(self._glide.ExpiryType.SEC, ttl_s)
        self._lock = threading.Lock()
        self._attempts: dict[Use, Attempt[Any]] = {}
        self._clients: dict[Use, Any] = {}
        self._pid = os.getpid()
        self._closed = False

    # ---- a Store

    def open(self, until: float) -> None:
        """Connect and look what cluster it is; see :meth:`Store.open`."""
        self._connected(until, "lookup")
        version, numbers = version_of(self.info(until))
        if numbers < OLDEST:
            raise TierError(f"the cluster is of version {version}; a remote store needs Valkey, or Redis 7.0 or newer")

    def info(self, until: float) -> dict[str, str]:
        """See :meth:`Tells.info`."""
        (text,) = self._ask(until, "custom_command", [(["INFO"],)], anywhere=True)
        if not isinstance(text, bytes):
            raise TierError("the user of the URL may not call INFO, or this is no Valkey or Redis cluster")
        return facts_of(text)

    def exists(self, keys: Sequence[str], until: float) -> list[bool]:
        """See :meth:`Store.exists`."""
        found: list[bool] = []
        for start in range(0, len(keys), WINDOW_KEYS):
            part = keys[start : start + WINDOW_KEYS]
            answers = self._ask(until, "exists", [([key],) for key in part])
            found += [number == 1 for number in self._numbers(answers)]
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
        window = max(1, min(WINDOW_KEYS, WINDOW_BYTES // max(1, size)))
        for start in range(0, len(keys), window):
            part = range(start, min(start + window, len(keys)))
            failed = None
            answers = self._ask(until, "get", [(keys[i],) for i in part])
            for i, value in zip(part, answers, strict=True):
                if isinstance(value, bytes) and len(value) == size:
                    heads[i] = np.frombuffer(value, np.uint8, head_bytes)
                    rows[i][:] = np.frombuffer(value, np.uint8, offset=head_bytes)
                    came(i, size)
                elif value is None:
                    came(i, MISSING)
                elif isinstance(value, bytes) or self._word(value) == "WRONGTYPE":
                    came(i, UNUSABLE)
                else:
                    failed = self._word(value)
            if failed is not None:
                raise Unreachable("closed", f"a node of the cluster did not answer: {failed}")

    def put(
        self, keys: Sequence[str], values: Iterable[tuple[bytes, NDArray[np.uint8]]], until: float
    ) -> list[str]:
        """See :meth:`Store.put`."""
        answers: list[str] = []
        waiting: list[tuple[str, bytes]] = []
        size = 0
        for key, (head, row) in zip(keys, values, strict=True):
            waiting.append((key, b"".join((head, row.data))))
            size += len(waiting[-1][1])
            if size >= WINDOW_BYTES or len(waiting) >= WINDOW_KEYS:
                answers += self._set(waiting, until)
                waiting, size = [], 0
        return answers + (self._set(waiting, until) if waiting else [])

    def remove(self, keys: Sequence[str], until: float) -> None:
        """See :meth:`Store.remove`."""
        self._unlink(list(keys), until)

    def remove_group(self, prefix: str, until: float) -> int:
        """See :meth:`Store.remove_group`."""
        return sum(self._unlink(keys, until) for keys in self._search(prefix, until))

    def groups(self, prefix: str, until: float) -> dict[str, dict[str, int]]:
        """See :meth:`Lists.groups`."""
        found: dict[str, dict[str, int]] = {}
        for keys in self._search(prefix, until):
            for key, size in zip(keys, self._ask(until, "strlen", [(key,) for key in keys]), strict=True):
                count_into(found, group_of(key, prefix), size if type(size) is int else 0)
        return found

    def close(self) -> None:
        """See :meth:`Store.close`."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            self._clients.clear()
            attempts, self._attempts = self._attempts, {}
        for attempt in attempts.values():
            attempt.abandon()

    # ---- inside

    def _ask(
        self, until: float, command: str, arguments: list[tuple[Any, ...]], anywhere: bool = False
    ) -> list[Any]:
        """Answers to a batch of one command, each a value or an error.

        Raises
        ------
        Unreachable, TierError
        """
        glide, client = self._glide, self._connected(until, "lookup" if command == "exists" else "values")
        batch = glide.ClusterBatch(is_atomic=False)
        for each in arguments:
            getattr(batch, command)(*each)
        left_ms = int((until - time.monotonic()) * 1000)
        if left_ms < 1:
            raise Unreachable("timeout", "no answer in time")
        options = glide.ClusterBatchOptions(timeout=left_ms, route=glide.RandomNode() if anywhere else None)
        try:
            answers = client.exec(batch, raise_on_error=False, options=options)
        except glide.GlideError as problem:
            raise self._failed(problem) from None
        if not isinstance(answers, list) or len(answers) != len(arguments):
            raise Unreachable("protocol", "the cluster has answered something else than was asked")
        return answers

    def _set(self, pairs: list[tuple[str, bytes]], until: float) -> list[str]:
        answers = self._ask(until, "set", [(key, value, None, self._expiry) for key, value in pairs])
        return ["" if answer == "OK" else self._word(answer) for answer in answers]

    def _unlink(self, keys: list[Any], until: float) -> int:
        removed = 0
        for start in range(0, len(keys), WINDOW_KEYS):
            part = keys[start : start + WINDOW_KEYS]
            answers = self._ask(until, "unlink", [([key],) for key in part])
            removed += sum(self._numbers(answers))
        return removed

    def _search(self, prefix: str, until: float) -> Iterator[list[bytes]]:
        """Keys that begin with `prefix`, some at a time.

        A page may take longer than is left: a thread waits for it then, and this call goes on without it.
        """
        glide, cursor = self._glide, self._glide.ClusterScanCursor()
        while not cursor.is_finished():
            client = self._connected(until, "values")
            page = Attempt(functools.partial(_page, client, cursor, escaped(prefix) + b"*"))
            try:
                found = page.wait(until)
            except glide.GlideError as problem:
                raise self._failed(problem) from None
            if found is None:
                raise Unreachable("timeout", "no answer in time")
            cursor = found.cursor
            yield [key for key in found.keys if key.startswith(prefix.encode())]

    def _connected(self, until: float, use: Use) -> Any:
        """The client for a use; it connects again by itself."""
        if self._pid != os.getpid():
            raise Unreachable("closed", f"this store belongs to process {self._pid}; a forked child opens its own")
        with self._lock:
            if self._closed:
                raise Unreachable("closed", "this store is closed")
            if use in self._clients:
                return self._clients[use]
            attempt = self._attempts.get(use)
            if attempt is None or attempt.has_failed:
                attempt = self._attempts[use] = Attempt(self._connect)
        try:
            client = attempt.wait(min(until, time.monotonic() + self._connect_s))
        except self._glide.GlideError as problem:
            raise self._failed(problem) from None
        if client is None:
            raise Unreachable("connect", f"no connection in time ({self._connect_s} s at most); is it a cluster?")
        with self._lock:
            if not self._closed:
                self._clients[use] = client
        return client

    def _connect(self) -> Any:
        glide, (user, password) = self._glide, self._login
        tls = None
        if self._authorities is not None:
            tls = glide.TlsAdvancedConfiguration(root_pem_cacerts=self._authorities)
        return glide.GlideClusterClient.create(
            glide.GlideClusterClientConfiguration(
                [glide.NodeAddress(self._place.host, self._place.port)],
                use_tls=self._place.kind == "tls",
                credentials=glide.ServerCredentials(password, user) if user or password else None,
                request_timeout=SEARCH_MS,
                advanced_config=glide.AdvancedGlideClusterClientConfiguration(
                    connection_timeout=max(1, int(self._connect_s * 1000)), tls_config=tls
                ),
            )
        )

    def _failed(self, problem: BaseException) -> Exception:
        """The error that one of the library stands for, whose text may name addresses."""
        text = str(problem)
        if any(word in text for word in ("NOAUTH", "WRONGPASS", "NOPERM")):
            return TierError(REFUSED)
        if "certificate" in text or "UnknownIssuer" in text:
            return TierError("the cluster's certificate is not signed by a trusted authority: pass ca_file=")
        if isinstance(problem, self._glide.TimeoutError):
            return Unreachable("timeout", "no answer in time")
        if isinstance(problem, self._glide.ClosingError):
            return Unreachable("connect", "no connection: is it a cluster, with TLS or without as the URL says?")
        if isinstance(problem, self._glide.ConnectionError):
            return Unreachable("closed", "the connection broke")
        return Unreachable("protocol", f"the cluster answered {self._word(problem)}")

    def _numbers(self, answers: list[Any]) -> list[int]:
        for answer in answers:
            if type(answer) is not int:
                raise Unreachable("protocol", f"a node of the cluster answered {self._word(answer)}")
        return answers

    def _word(self, answer: object) -> str:
        """One word for an error of the library, such as ``"OOM"`` or ``"MOVED"``."""
        text = str(answer).removeprefix("An error was signalled by the server: - ")
        word = re.match(r"[A-Za-z]{1,20}", text)
        return word[0].upper() if word and isinstance(answer, Exception) and word[0].upper() in WORDS else "ERR"


class _Page:
    """A page of a search."""

    def __init__(self, cursor: Any, keys: list[bytes]) -> None:
        self.cursor, self.keys = cursor, keys

    def close(self) -> None:
        """There is nothing to give back."""


def _page(client: Any, cursor: Any, pattern: bytes) -> _Page:
    return _Page(*client.scan(cursor, match=pattern, count=1000))


def _glide() -> Any:
    try:
        import glide_sync
    except ImportError:
        raise ImportError(f"a cluster needs valkey-glide-sync: {extras.command('valkey-cluster')}") from None
    glide_sync.Logger.init(glide_sync.LogLevel.OFF)  # unless the program has chosen: it writes to the terminal
    return glide_sync
