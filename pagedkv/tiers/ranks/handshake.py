"""The handshake: the deciding process and its ranks prove that they belong together.

1. A rank connects; the deciding process sends a CHALLENGE, 32 random bytes.
2. The rank says HELLO: its rank, the number of ranks, the spec and the blocks of each tier, under a keyed BLAKE2b of
   both sides' random bytes with the secret.
3. The deciding process answers with a PROOF under the same secret, or REFUSED and the reason.
4. When all ranks are there: OPEN. Each rank opens its tiers and answers OPENED, or FAILED and the reason. Then START.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import struct
import time
from dataclasses import dataclass

from pagedkv.errors import RankLost, RanksDisagree, TierError
from pagedkv.tiers.ranks.frames import Kind
from pagedkv.tiers.ranks.wire import VERSION, Broken, Frame, Listener, Wire, connect

NONCE = 32
HELLO_S = 5.0  # that one process may take to say who it is: others wait for it
AGAIN_S = 0.02  # between two attempts to connect
MOST_TEXT = 4096
_HELLO = struct.Struct("<II32s3q32s")
_OPENED = struct.Struct("<3qBq32s")


@dataclass(frozen=True, slots=True)
class Hello:
    """The arguments that the deciding process and a rank must have in common.

    Attributes
    ----------
    rank, size : of the rank; the deciding process leaves `rank` out of the comparison.
    spec : fingerprint of the whole KV's spec, 32 bytes.
    blocks : of device, host and disk.
    disk : 32 bytes that stand for the disk tier's options.
    text : the spec, for people.
    """

    rank: int
    size: int
    spec: bytes
    blocks: tuple[int, int, int]
    disk: bytes
    text: str

    def pack(self) -> bytes:
        """As bytes."""
        head = _HELLO.pack(self.rank, self.size, self.spec, *self.blocks, self.disk)
        return head + self.text.encode()[:MOST_TEXT]

    @classmethod
    def unpack(cls, body: bytes) -> Hello:
        """From bytes whose sender has the secret.

        Raises
        ------
        Broken
        """
        if len(body) < _HELLO.size:
            raise Broken("sent a greeting that is too short")
        rank, size, spec, device, host, store, disk = _HELLO.unpack_from(body)
        return cls(rank, size, spec, (device, host, store), disk, body[_HELLO.size :].decode(errors="replace"))

    def difference(self, other: Hello) -> str:
        """In which way a rank's `other` differs from the deciding process's own; "" in none."""
        if other.size != self.size:
            return f"it was started as one of {other.size} ranks, and the cache has {self.size}"
        if other.spec != self.spec:
            return f"it has {other.text}, and the cache {self.text}"
        if other.blocks != self.blocks:
            return f"its tiers have {list(other.blocks)} blocks (device, host, disk), and the cache's {[*self.blocks]}"
        if other.disk != self.disk:
            return "its disk tier has other options than the cache's"
        if other.rank >= self.size:
            return f"there is no rank {other.rank} among {self.size}"
        return ""


@dataclass(frozen=True, slots=True)
class Opened:
    """The tiers of one rank.

    Attributes
    ----------
    blocks : of device, host and disk; 0 for a disk that was left out.
    has_store : whether there is a disk tier.
    write_bytes : that writing one block to it takes.
    secret : the key of its chain keys.
    """

    blocks: tuple[int, int, int]
    has_store: bool
    write_bytes: int
    secret: bytes

    def pack(self) -> bytes:
        """As bytes."""
        return _OPENED.pack(*self.blocks, self.has_store, self.write_bytes, self.secret)

    @classmethod
    def unpack(cls, body: bytes) -> Opened:
        """From bytes.

        Raises
        ------
        Broken
        """
        if len(body) != _OPENED.size:
            raise Broken("sent an answer of another length")
        device, host, disk, has_store, write_bytes, secret = _OPENED.unpack(body)
        return cls((device, host, disk), bool(has_store), write_bytes, secret)


class _Stranger(Exception):
    """A process that does not know the secret. Never leaves this module."""


def _proof(secret: bytes, who: bytes, challenge: bytes, nonce: bytes, body: bytes) -> bytes:
    content = challenge + nonce + hashlib.blake2b(body).digest()
    return hashlib.blake2b(content, key=secret, digest_size=32, person=who).digest()


# ---- the deciding process


def gather(listener: Listener, secret: bytes, mine: Hello, until: float) -> list[Wire]:
    """Wait for all ranks; their wires by rank.

    Raises
    ------
    RanksDisagree
        One of them does not fit. All that came are told, and let go.
    RankLost
        Not all came until `until`, of the monotonic clock.
    """
    wires: dict[int, Wire] = {}
    strangers = 0
    try:
        while len(wires) < mine.size:
            wire = listener.accept(until)
            if wire is None:
                missing = [rank for rank in range(mine.size) if rank not in wires]
                others = f"; {strangers} processes with another secret were refused" if strangers else ""
                also = f", nor did {missing[1:]}" if missing[1:] else ""
                raise RankLost(missing[0], f"did not come in time{also}{others}")
            try:
                rank = _greet(wire, secret, mine, min(until, time.monotonic() + HELLO_S), set(wires))
            except (Broken, _Stranger) as problem:
                strangers += isinstance(problem, _Stranger)
                wire.close()
            except BaseException:
                wire.close()
                raise
            else:
                wires[rank] = wire
    except BaseException as problem:
        dismiss(list(wires.values()), str(problem) if isinstance(problem, TierError) else "it was interrupted")
        raise
    return [wires[rank] for rank in range(mine.size)]


def _greet(wire: Wire, secret: bytes, mine: Hello, until: float, there: set[int]) -> int:
    """Find out which rank has connected, and prove to it that this process knows the secret."""
    challenge = os.urandom(NONCE)
    _say(wire, Kind.CHALLENGE, challenge)
    frame = wire.read(until)
    if frame.version != VERSION:
        text = f"it speaks version {frame.version} of the ranks' protocol, and the cache version {VERSION}"
        _refuse(wire, text)
        raise RanksDisagree(None, text)
    if frame.kind != Kind.HELLO or len(frame.payload) < 2 * NONCE:
        raise Broken("sent no greeting")
    nonce, proof, body = frame.payload[:NONCE], frame.payload[NONCE : 2 * NONCE], frame.payload[2 * NONCE :]
    if not hmac.compare_digest(proof, _proof(secret, b"pagedkv-rank", challenge, nonce, body)):
        _refuse(wire, "it has another secret than the cache")
        raise _Stranger
    other = Hello.unpack(body)
    problem = mine.difference(other)
    if not problem and other.rank in there:
        problem = "two processes say that they are this rank"
    if problem:
        _refuse(wire, problem)
        raise RanksDisagree(other.rank, problem)
    _say(wire, Kind.PROOF, _proof(secret, b"pagedkv-core", challenge, nonce, body))
    return other.rank


def open_all(wires: list[Wire], until: float) -> list[Opened]:
    """Have all ranks open their tiers.

    Raises
    ------
    TierError
        One of them could not. All are let go.
    RankLost
        One of them ended, or took too long.
    """
    try:
        for wire in wires:
            _say(wire, Kind.OPEN)
        found = [_opened_by(rank, wire, until) for rank, wire in enumerate(wires)]
        for wire in wires:
            _say(wire, Kind.START)
    except BaseException as problem:
        dismiss(wires, str(problem) if isinstance(problem, TierError) else "it was interrupted")
        raise
    return found


def _opened_by(rank: int, wire: Wire, until: float) -> Opened:
    try:
        frame = wire.read(until)
        if frame.kind == Kind.FAILED:
            raise TierError(f"rank {rank} cannot open its tiers: {_text(frame)}")
        if frame.kind != Kind.OPENED:
            raise Broken("sent something else than the answer to OPEN")
        return Opened.unpack(frame.payload)
    except Broken as problem:
        raise RankLost(rank, f"{problem} while it opened its tiers") from None


def dismiss(wires: list[Wire], why: str) -> None:
    """Tell ranks why there will be no cache, and close their wires."""
    for wire in wires:
        _refuse(wire, f"the cache was not opened: {why}")
        wire.close()


def _refuse(wire: Wire, text: str) -> None:
    with contextlib.suppress(Broken):
        _say(wire, Kind.REFUSED, text.encode()[:MOST_TEXT])


# ---- a rank


def join(path: str, secret: bytes, mine: Hello, until: float) -> Wire:
    """Connect to the deciding process, and wait until it has all ranks.

    Raises
    ------
    RanksDisagree
        The deciding process has refused this rank, or knows another secret.
    RankLost
        There is no deciding process until `until`, of the monotonic clock, or it ended.
    """
    while True:
        wire = connect(path)
        if wire is not None:
            break
        if time.monotonic() >= until:
            raise RankLost(None, f"was not at {path} in time")
        time.sleep(AGAIN_S)
    try:
        nonce, body = os.urandom(NONCE), mine.pack()
        challenge = _expect(wire, Kind.CHALLENGE, mine.rank, until).payload
        _say(wire, Kind.HELLO, nonce + _proof(secret, b"pagedkv-rank", challenge, nonce, body) + body)
        proof = _expect(wire, Kind.PROOF, mine.rank, until).payload
        if not hmac.compare_digest(proof, _proof(secret, b"pagedkv-core", challenge, nonce, body)):
            raise RanksDisagree(mine.rank, f"the process at {path} does not know the secret")
        _expect(wire, Kind.OPEN, mine.rank, until)
    except BaseException:
        wire.close()
        raise
    return wire


def opened(wire: Wire, rank: int, found: Opened, until: float) -> None:
    """Report this rank's tiers, and wait until all ranks have theirs.

    Raises
    ------
    RanksDisagree, RankLost
    """
    _say(wire, Kind.OPENED, found.pack())
    _expect(wire, Kind.START, rank, until)


def failed(wire: Wire, problem: BaseException) -> None:
    """Report that this rank's tiers cannot be opened, and close the wire."""
    with contextlib.suppress(Broken):
        _say(wire, Kind.FAILED, f"{type(problem).__name__}: {problem}".encode()[:MOST_TEXT])
    wire.close()


def _expect(wire: Wire, kind: Kind, rank: int, until: float) -> Frame:
    try:
        frame = wire.read(until)
    except Broken as problem:
        raise RankLost(None, f"{problem} while the ranks were opened") from None
    if frame.version != VERSION:
        text = f"it speaks version {VERSION} of the ranks' protocol, and the cache version {frame.version}"
        raise RanksDisagree(rank, text)
    if frame.kind == Kind.REFUSED:
        raise RanksDisagree(rank, _text(frame))
    if frame.kind != kind:
        raise RankLost(None, f"sent a frame of kind {frame.kind} where {kind.name} was due")
    return frame


def _say(wire: Wire, kind: Kind, payload: bytes = b"") -> None:
    """Send a frame. It is small, and the socket's buffer is empty: nothing waits."""
    wire.put(kind, payload=payload)
    wire.send()


def _text(frame: Frame) -> str:
    return frame.payload[:MOST_TEXT].decode(errors="replace")


def digest_of(*values: object) -> bytes:
    """32 bytes that stand for these plain values."""
    return hashlib.blake2b(repr(values).encode(), digest_size=32).digest()

