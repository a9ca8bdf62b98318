"""The URLs of Valkey and Redis servers, read strictly.

A mark that was not quoted in a password would make another host or an option of it, so whatever is not understood is
refused, and no message repeats any part of a URL.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Literal

from pagedkv.errors import InvalidArgument

SCHEMES: dict[str, Literal["tcp", "tls", "unix"]] = {
    "valkey": "tcp", "valkeys": "tls", "redis": "tcp", "rediss": "tls", "unix": "unix",
}  # fmt: skip
PORT = 6379
PLACE = re.compile(
    r"(?:(?P<login>[^/?#\s]*)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[^/?#\s@:\[\]]*)(?::(?P<port>\d{1,5}))?"
    r"(?P<path>/[^?#\s]*)?(?:\?db=(?P<db>\d{1,9}))?"
)  # behind the scheme
READABLE = (
    "write it as valkey://user:password@host:6379/0 or unix://user:password@/path?db=0, with % as %25, @ as %40, "
    "/ as %2F, ? as %3F and # as %23 in user and password"
)


@dataclass(frozen=True, slots=True)
class Place:
    """A server, and the login there.

    Attributes
    ----------
    kind : how it is reached.
    host, port : of TCP and TLS.
    address : for people: host and port as the URL has them, or the path; no login.
    path : of a unix socket.
    database : its number.
    user, password : b"" where the URL has none.
    """

    kind: Literal["tcp", "tls", "unix"]
    host: str
    port: int
    address: str
    path: str
    database: int
    user: bytes = field(repr=False)
    password: bytes = field(repr=False)


def read_url(url: str, ca_file: str | None = None) -> Place:
    """The server that a URL names.

    Parameters
    ----------
    url : ``valkey://``, ``valkeys://`` (TLS), ``redis://``, ``rediss://`` or ``unix://``; the option ``db`` is known.
    ca_file : certificates to trust with TLS in place of the system's.

    Raises
    ------
    InvalidArgument
        The URL or the file cannot be read.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest:
        raise InvalidArgument(f"a remote store's URL begins with one of {', '.join(s + '://' for s in SCHEMES)}")
    found = PLACE.fullmatch(rest)
    if found is None:
        raise InvalidArgument(f"the remote store's URL cannot be read, or has an option other than db; {READABLE}")
    kind, host, path = SCHEMES[scheme], found["host"].strip("[]"), found["path"] or ""
    database, port = found["db"] or "0", int(found["port"] or PORT)
    if kind == "unix":
        if not path or host or found["port"]:
            raise InvalidArgument("a unix:// URL has three slashes and a path: unix:///run/kv.sock")
    else:
        if not host or not re.fullmatch(r"/?|/\d{1,9}", path) or port > 65535:
            raise InvalidArgument(f"the remote store's URL has no host, or no number as port or path; {READABLE}")
        database, path = path[1:] or database, ""
    if ca_file is not None:
        if kind != "tls":
            raise InvalidArgument("ca_file is of use with TLS alone: take a valkeys:// URL")
        if not os.access(ca_file, os.R_OK):
            raise InvalidArgument(f"ca_file: {ca_file} cannot be read")
    user, _, password = (found["login"] or "").partition(":")
    address = path if kind == "unix" else found["host"] + (f":{found['port']}" if found["port"] else "")
    return Place(
        kind, host, port, address, os.fsdecode(decoded(path)), int(database), user=decoded(user),
        password=decoded(password),
    )  # fmt: skip


def decoded(text: str) -> bytes:
    """The bytes that a part of a URL stands for."""
    return re.sub(rb"%([0-9A-Fa-f]{2})", lambda found: bytes.fromhex(found[1].decode()), text.encode())
