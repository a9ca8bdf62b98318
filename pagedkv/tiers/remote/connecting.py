"""Opens connections to a Valkey or Redis server: redis-py connects, we log in.

redis-py resolves names and opens TCP, unix and TLS sockets. It never sees the user and the password, so none of its
errors can repeat them: AUTH and SELECT go over our own reader, within one limit for all of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from pagedkv import extras
from pagedkv.errors import TierError
from pagedkv.spec.server_url import read_url
from pagedkv.tiers.remote.connection import VERSIONS, Refused, Wire, ask, word_of
from pagedkv.tiers.remote.store import Unreachable

REFUSED = "the server refuses the user or the password of the URL, or wants one that the URL lacks"
NOT_READY = {"LOADING", "BUSY", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED"}  # it will serve later


class Dialer:
    """Opens connections to the server of one URL. Any thread may call it.

    Parameters
    ----------
    url, ca_file : see :func:`read_url`.
    connect_s : seconds to reach an address of the server, and then to log in.

    Raises
    ------
    ImportError
        redis-py is not installed.
    InvalidArgument
        The URL or the file cannot be read.
    """

    def __init__(self, url: str, connect_s: float, ca_file: str | None = None) -> None:
        self._redis = _redis()
        place = read_url(url, ca_file)
        self.kind, self._connect_s = place.kind, connect_s
        self._options: dict[str, Any] = {"host": place.host, "port": place.port}
        if place.kind == "unix":
            self._options = {"path": place.path}
        elif place.kind == "tls":
            self._options.update(ssl_ca_certs=ca_file, ssl_cert_reqs="required", ssl_check_hostname=True)
        self._login: list[tuple[bytes, ...]] = []
        if place.user:
            self._login.append((b"AUTH", place.user, place.password))
        elif place.password:
            self._login.append((b"AUTH", place.password))
        if place.database:
            self._login.append((b"SELECT", b"%d" % place.database))

    def connect(self) -> Wire:
        """A connection that is logged in.

        Resolving the host's name has no limit of its own, and each of its addresses may take `connect_s`.

        Raises
        ------
        Unreachable, TierError, ImportError
        """
        connection = self._make()
        try:
            connection.connect()
            wire = Wire(connection)
            self._log_in(wire, time.monotonic() + self._connect_s)
            return wire
        except BaseException as problem:
            with contextlib.suppress(Exception):
                connection.disconnect()
            if isinstance(problem, (self._redis.RedisError, OSError, ValueError)):
                raise self._failed(problem) from None
            raise

    def late(self) -> Unreachable:
        """The error of a call that no longer waits for a connection."""
        hint = "; is it a port with TLS?" if self.kind == "tls" else ""
        return Unreachable("connect", f"no connection in time ({self._connect_s} s at most){hint}")

    def _make(self) -> Any:
        redis = self._redis
        kinds = {"tcp": "Connection", "tls": "SSLConnection", "unix": "UnixDomainSocketConnection"}
        return getattr(redis.connection, kinds[self.kind])(
            **self._options, protocol=2, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            socket_connect_timeout=self._connect_s, socket_timeout=self._connect_s,
            redis_connect_func=lambda connection: None,
        )  # fmt: skip

    def _log_in(self, wire: Wire, until: float) -> None:
        for words in self._login:
            wire.send(ask(*words), until)
            reply = wire.line(until)
            if reply != b"+OK":
                raise refusal(reply, "AUTH" if words[0] == b"AUTH" else b" ".join(words).decode())

    def _failed(self, problem: BaseException) -> Exception:
        """The error that a failure to connect stands for; redis-py hides its cause."""
        cause: BaseException | None = problem
        why = "the host or path of the URL cannot be used"
        while cause is not None:
            kind = type(cause).__name__
            if kind == "SSLCertVerificationError":
                return TierError(
                    "the server's certificate is not signed by a trusted authority for this host: pass ca_file=, or "
                    "correct the URL"
                )
            if "NO_CERTIFICATE" in str(getattr(cause, "reason", "")):
                return TierError("ca_file holds no certificate: name a file of PEM certificates")
            if kind.startswith("SSL"):
                return TierError(
                    "the server does not speak TLS here: take valkey:// for a plain port, valkeys:// for one with TLS"
                )
            why = getattr(cause, "strerror", None) or why
            cause = cause.__cause__ or cause.__context__
        if isinstance(problem, self._redis.TimeoutError):
            return self.late()
        return Unreachable("connect", f"no connection: {why}")


class Closes(Protocol):
    """A connection."""

    def close(self) -> None:
        """End it."""


Connected = TypeVar("Connected", bound=Closes)
Value = TypeVar("Value")


class Attempt(Generic[Connected]):
    """A connection that a thread of its own opens; the call that waits for it may give up.

    A later call then takes it over: a server that is slow to connect is reached in the end, also where every call has
    less time than that.

    Parameters
    ----------
    connect : opens the connection.
    name : of the thread.

    Raises
    ------
    RuntimeError
        There is no thread left.
    """

    def __init__(self, connect: Callable[[], Connected], name: str = "pagedkv-connect") -> None:
        self._connect = connect
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._is_wanted = True
        self._wire: Connected | None = None
        self._problem: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def has_failed(self) -> bool:
        """Whether it is over without a connection."""
        return self._problem is not None

    def wait(self, until: float) -> Connected | None:
        """The connection, the caller's from now on; None if there is none by `until`.

        Raises
        ------
        Unreachable, TierError, ImportError
        """
        if not self._done.wait(max(0.0, until - time.monotonic())):
            return None
        if self._problem is not None:
            raise self._problem
        return self._wire

    def abandon(self) -> None:
        """Close the connection when it comes: no call will ask for it."""
        with self._lock:
            self._is_wanted = False
            wire = self._wire
        if wire is not None:
            wire.close()

    def _run(self) -> None:
        try:
            wire = self._connect()
            with self._lock:
                self._wire = wire
                is_wanted = self._is_wanted
            if not is_wanted:
                wire.close()
        except BaseException as problem:
            self._problem = problem
        self._done.set()


class Answer(Generic[Value]):
    """The answer to a call that a thread of its own makes."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def close(self) -> None:
        """There is nothing to give back."""


def answer_of(work: Callable[[], Value], until: float, name: str) -> Value:
    """Make a call without a limit of its own in a thread, which is left where it takes longer.

    Raises
    ------
    Unreachable
        It has not come back by then, or there is no thread for it. Errors of the call itself come out as they are.
    """
    try:
        attempt = Attempt(lambda: Answer(work()), name)
    except RuntimeError:
        raise Unreachable("connect", "this process has no thread left for a call") from None
    found = attempt.wait(until)
    if found is None:
        raise Unreachable("timeout", "no answer in time")
    return found.value


def refusal(reply: bytes, asked: str) -> Exception:
    """The error that an unexpected reply to a login or to the first question stands for.

    Parameters
    ----------
    reply : a line.
    asked : the command, without secrets.
    """
    if not reply.startswith(b"-"):
        return Unreachable("protocol", f"the server answered {asked} with something else than was asked")
    word = word_of(reply)
    if b"max number of clients" in reply:
        return Unreachable("connect", "the server has as many clients as it may have (maxclients)")
    if word in NOT_READY:
        return Unreachable("connect", f"the server is not ready: {word}")
    if word == "DENIED":
        return TierError(
            "the server is in protected mode and refuses other machines: give it a password, or protected-mode no"
        )
    if word == "NOPERM":
        return TierError(
            f"the user of the URL may not call {asked}: a remote store needs AUTH, SELECT, INFO, EXISTS, GET, SET, "
            "UNLINK, SCAN and STRLEN, and all keys of its prefix"
        )
    if asked == "AUTH" or word in ("NOAUTH", "WRONGPASS"):
        return TierError(REFUSED)
    if asked.startswith("SELECT"):
        return TierError(f"the server refuses {asked}: take a database that it has; a node of a cluster has 0 alone")
    return Refused(reply)


def _redis() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.connection
        import redis.retry
    except ImportError:
        raise ImportError(f"a Valkey store needs redis-py ({VERSIONS}): {extras.command('valkey')}") from None
    return redis
