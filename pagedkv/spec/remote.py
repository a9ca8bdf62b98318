"""Remote stores that caches share: where they are, and how a cache uses them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.budgets import check_choice
from pagedkv.spec.paths import path_text
from pagedkv.spec.server_url import read_url
from pagedkv.spec.sizes import Bytes, check_flag, num_bytes_of, number_of_seconds, whole_number

LEAST_SECRET, MOST_SECRET = 16, 64  # bytes
MOST_CLAIMS = 1 << 24
MOST_SECONDS = 1e6  # of a limit: sockets and threads take no more than some weeks
WRITES = ("all", "reused", "never")
LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
OPEN = re.compile(r"(?:ftp|http|webhdfs)://(?:[^/@]*@)?([^/?]*)")  # file systems that send in the open
PREFIX = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, repr=False)
class Remote:
    """The options of every remote store.

    Parameters
    ----------
    secret : 16 to 64 bytes, or the path of a file with them
        Known to all who share the store, and to no others: it makes keys that cannot be guessed, and seals blocks. A
        file must belong to this user and be closed to others (mode 0600); one newline at its end does not count.
    seal : encrypt and authenticate blocks (AES-256-GCM, extra ``seal``), so that a writer to the store without
        the secret can only cause misses. Without it blocks have a sum, which guards against accidents.
    shard : (rank, size) of this process among those that split each block's KV heads.
    write : ``"all"``, ``"reused"`` or ``"never"``
        When blocks are sent to the store, if it lacks them: once they are computed; once a second request uses them;
        never. In the background, from the device.
    claims : blocks of the store that this cache knows at a time; about 200 bytes each.
    prefix : of all keys: 1 to 64 letters, digits, dots, dashes and underscores.
    lookup_s : seconds that a request waits for the store's answer about the blocks it has.
    read_s, write_s, connect_s : seconds that reading, writing and connecting may take.
    purge_s : seconds that deleting a namespace may take: the store is asked for all keys of its database.
    max_queued : bytes of the device that are kept for being sent, at most.
    min_blocks : a shorter rest of a prompt is not asked about, unless the request awaits it (`await_remote_s`).
    required : raise where the store cannot be reached when the cache is opened. Else the cache begins without it, and
        tries again by itself; a server that can never serve is left out, with one line in the log.

    Raises
    ------
    WrongType, InvalidArgument
    """

    kind: ClassVar[str] = "remote"
    _: KW_ONLY
    secret: bytes | str | os.PathLike[str] = field(repr=False)
    seal: bool = False
    shard: tuple[int, int] = (0, 1)
    write: Literal["all", "reused", "never"] = "all"
    claims: int = 65_536
    prefix: str = "pagedkv"
    lookup_s: float = 0.02
    read_s: float = 2.0
    write_s: float = 5.0
    connect_s: float = 0.5
    purge_s: float = 60.0
    max_queued: str | Bytes = "64MiB"
    min_blocks: int = 4
    required: bool = False

    def __post_init__(self) -> None:
        for name in ("seal", "required"):
            check_flag(getattr(self, name), name)
        object.__setattr__(self, "shard", _shard(self.shard))
        check_choice("write", self.write, WRITES)
        whole_number(self.claims, "claims", 1, MOST_CLAIMS)
        whole_number(self.min_blocks, "min_blocks", 1, 1 << 20)
        if not isinstance(self.prefix, str) or not PREFIX.fullmatch(self.prefix):
            raise InvalidArgument("prefix must be 1 to 64 letters, digits, dots, dashes and underscores")
        for name in ("lookup_s", "read_s", "write_s", "connect_s", "purge_s"):
            if not 0 < number_of_seconds(getattr(self, name), name) <= MOST_SECONDS:
                raise InvalidArgument(f"{name} must be more than 0: no call could end in time; and at most 1e6 seconds")
        if num_bytes_of(self.max_queued, "max_queued") < 1:
            raise InvalidArgument("max_queued must be at least one byte")
        if isinstance(self.secret, bytes):
            check_secret(self.secret)
        else:
            path_text(self.secret, "secret")

    def secret_bytes(self) -> bytes:
        """The secret, read from its file if it lies in one.

        Raises
        ------
        InvalidArgument
            The file cannot be read, can be read by others, or holds no secret. The message names the path alone.
        """
        return self.secret if isinstance(self.secret, bytes) else read_secret(path_text(self.secret, "secret"))

    @property
    def where(self) -> str:
        """The store's address, for people: without user and password."""
        return self.kind

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where!r}, secret=...)"


@dataclass(frozen=True, slots=True, repr=False)
class Valkey(Remote):
    """A Valkey or Redis server, 7.0 or newer (extra ``valkey``), or a cluster.

    A cluster needs the extra ``valkey-cluster``.

    Parameters
    ----------
    url : ``valkey://host:6379/0``, ``valkeys://`` (TLS), ``redis://``, ``rediss://`` or ``unix:///path``, with
        ``user:password@`` where the server wants them, percent-encoded.
    cluster : the URL names a node of a cluster, over TCP or TLS; the others are found through it.
    ttl_s : whole seconds until the server forgets a block; for servers whose ``maxmemory-policy`` evicts only such
        keys. Default: as long as it has room.
    ca_file : certificates to trust with TLS in place of the system's.
    insecure : allow a server elsewhere without TLS and `seal`: others on the network can read the KV, restore prompts
        from it, and change it.
    others : those of :class:`Remote`; `secret` is needed.

    Raises
    ------
    WrongType, InvalidArgument
        No message repeats the URL.
    """

    kind: ClassVar[str] = "valkey"
    url: str = field(repr=False)
    _: KW_ONLY
    cluster: bool = False
    ttl_s: int | None = None
    ca_file: str | os.PathLike[str] | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        Remote.__post_init__(self)
        if not isinstance(self.url, str):
            raise WrongType(f"url must be a string such as 'valkey://host:6379/0', not {type(self.url).__name__}")
        if not re.fullmatch(r"(valkeys?|rediss?|unix)://\S+", self.url):
            raise InvalidArgument("url must begin with valkey://, valkeys://, redis://, rediss:// or unix://")
        read_url(self.url)  # as the store will: nothing here may take it for another server than that does
        if self.ttl_s is not None:
            whole_number(self.ttl_s, "ttl_s", 1, 2**31 - 1)
        if self.ca_file is not None:
            object.__setattr__(self, "ca_file", path_text(self.ca_file, "ca_file"))
        for name in ("cluster", "insecure"):
            check_flag(getattr(self, name), name)
        if self.cluster and self.url.startswith("unix:"):
            raise InvalidArgument("cluster=True is for servers over TCP or TLS: one on a unix socket is no cluster")
        is_plain = self.url.startswith(("valkey://", "redis://"))
        if is_plain and not self.seal and not self.insecure and (self.cluster or not self.is_loopback):
            raise InvalidArgument(
                "this URL sends KV over a network in the open (a cluster's nodes may be anywhere): take valkeys:// "
                "(TLS), or seal=True, or insecure=True"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether the server is this machine, by its address."""
        return LOOPBACK.fullmatch(read_url(self.url).address) is not None

    @property
    def where(self) -> str:
        """See Remote."""
        return f"{self.url.partition('://')[0]}://{read_url(self.url).address}"


@dataclass(frozen=True, slots=True, repr=False)
class Objects(Remote):
    """Files or objects under a URL, by fsspec (extra ``objects``): a folder, S3 and others.

    Its round trips are long, so `lookup_s` is 1 s. Nothing evicts: have the bucket or folder delete old objects.

    Parameters
    ----------
    url : ``file:///mnt/kv``, ``s3://bucket/folder`` (with s3fs), or any other that fsspec knows.
    options : of the file system, such as ``{"key": ..., "secret": ..., "endpoint_url": ...}``.
    insecure : allow a URL or an endpoint that sends KV over a network in the open (``ftp://``, ``http://``) without
        `seal`: others on the network can read it, restore prompts from it, and change it.
    others : those of :class:`Remote`; `secret` is needed.

    Raises
    ------
    WrongType, InvalidArgument
        No message repeats the URL or an option.
    """

    kind: ClassVar[str] = "objects"
    url: str = field(repr=False)
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    insecure: bool = False
    lookup_s: float = 1.0
    read_s: float = 10.0
    write_s: float = 30.0

    def __post_init__(self) -> None:
        Remote.__post_init__(self)
        if not isinstance(self.url, str):
            raise WrongType(f"url must be a string such as 's3://bucket/folder', not {type(self.url).__name__}")
        if not re.fullmatch(r"[a-z0-9+]+://\S+", self.url):
            raise InvalidArgument("url must have a scheme that fsspec knows, such as s3://bucket or file:///mnt/kv")
        if not isinstance(self.options, Mapping):
            raise WrongType(f"options must be a mapping, not {type(self.options).__name__}")
        check_flag(self.insecure, "insecure")
        if self.is_open and not self.seal and not self.insecure:
            raise InvalidArgument(
                "this URL or endpoint sends KV over a network in the open: take one with TLS, or seal=True, or "
                "insecure=True"
            )

    @property
    def is_open(self) -> bool:
        """Whether KV crosses a network without TLS, as far as URL and options tell."""
        found = map(OPEN.match, _texts((self.url, self.options)))
        return any(place is not None and not LOOPBACK.fullmatch(place[1]) for place in found)

    @property
    def where(self) -> str:
        """See Remote."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rsplit('@', 1)[-1].split('?', 1)[0]}"


@dataclass(frozen=True, slots=True, repr=False)
class Mooncake(Remote):
    """A Mooncake store, version 0.3.13 or newer (extra ``mooncake``).

    Its client needs Debian's libibverbs1.

    Its traffic is not encrypted, and its client listens on all interfaces of this machine. The master must be there
    when the cache is opened: without one the whole process stands still for 4 to 5 seconds, and the store is left out.

    Parameters
    ----------
    master : ``host:port`` of the store's master.
    host : this machine's address, by which the store's other machines reach it.
    protocol : ``"tcp"`` or ``"rdma"``.
    devices : for RDMA, as Mooncake names them, such as ``"mlx5_0"``; by default all.
    segment : memory that this process lends to the store, such as ``"4GiB"``. What lies there is lost with the process.
    insecure : do without `seal`: others on the network can read the KV, restore prompts from it, and change it.
    others : those of :class:`Remote`; `secret` is needed.

    Raises
    ------
    WrongType, InvalidArgument
    """

    kind: ClassVar[str] = "mooncake"
    master: str
    _: KW_ONLY
    host: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    segment: str | Bytes = "0B"
    insecure: bool = False

    def __post_init__(self) -> None:
        Remote.__post_init__(self)
        for name in ("master", "host", "devices"):
            if not isinstance(getattr(self, name), str):
                raise WrongType(f"{name} must be a string, not {type(getattr(self, name)).__name__}")
        if not re.fullmatch(r"[^\s/@]+:\d{1,5}", self.master):
            raise InvalidArgument("master must be the host and port of Mooncake's master, such as '10.0.0.1:50051'")
        if not re.fullmatch(r"[^\s/@]+", self.host):
            raise InvalidArgument("host must be this machine's name or address, such as '10.0.0.2'")
        check_choice("protocol", self.protocol, ("tcp", "rdma"))
        num_bytes_of(self.segment, "segment")
        check_flag(self.insecure, "insecure")
        if not self.seal and not self.insecure:
            raise InvalidArgument("Mooncake sends KV over the network in the open: pass seal=True, or insecure=True")

    @property
    def where(self) -> str:
        """See Remote."""
        return f"mooncake://{self.master}"


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of mappings, lists and tuples."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _shard(value: Any) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise WrongType("shard must be (rank, size), such as (0, 1)")
    size = whole_number(value[1], "shard's size", 1, 1 << 16)
    return whole_number(value[0], "shard's rank", 0, size - 1), size


def check_secret(secret: bytes) -> bytes:
    """Return a secret that has a sensible length.

    Raises
    ------
    InvalidArgument
    """
    if not LEAST_SECRET <= len(secret) <= MOST_SECRET:
        raise InvalidArgument(f"a secret has {LEAST_SECRET} to {MOST_SECRET} bytes, not {len(secret)}")
    return secret


def read_secret(path: str) -> bytes:
    """The secret in a file that only its owner can read.

    Raises
    ------
    InvalidArgument
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise InvalidArgument(f"secret: {path} is no file")
            if found.st_uid not in (os.geteuid(), 0):
                raise InvalidArgument(f"secret: {path} belongs to another user, who can change it")
            if found.st_mode & 0o077:
                raise InvalidArgument(f"secret: {path} is open to others: chmod 600 {path}")
            content = os.read(number, MOST_SECRET + 2)
        finally:
            os.close(number)
    except OSError as problem:
        raise InvalidArgument(f"secret: {path} cannot be read: {problem.strerror}") from None
    content = content.removesuffix(b"\n")
    if not LEAST_SECRET <= len(content) <= MOST_SECRET:
        raise InvalidArgument(
            f"secret: {path} holds {len(content)} bytes{' or more' * (len(content) > MOST_SECRET)}; a secret has "
            f"{LEAST_SECRET} to {MOST_SECRET}, such as those of: openssl rand -hex 32 > {path}"
        )
    return content
