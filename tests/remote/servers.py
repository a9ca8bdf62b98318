"""Servers that a test starts for itself on loopback, and links that do something wrong."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stopping import go_on, stop

BEGINS_S = 30.0  # a server that has not begun by then will not
WATCHDOG_S = 60.0  # a call that takes longer hangs


def redis_server() -> str:
    """The path of a redis-server of version 7 or newer; the test is skipped without one."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"v=(\d+)\.(\d+)", said)
    if version is None or int(version[1]) < 7:
        pytest.skip(f"redis-server 7.0 or newer is needed, not {said.split(' sha', 1)[0]}")
    return found


def free_port() -> int:
    """A port of loopback that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(place: str | int) -> bool:
    """Whether a unix socket or a port of loopback takes connections; its file comes first."""
    family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
    with socket.socket(family) as near:
        return not near.connect_ex(place if isinstance(place, str) else ("127.0.0.1", place))


class Server:
    """One redis-server, on a unix socket and on loopback."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, port: int) -> None:
        self.process, self.folder, self.port = process, folder, port
        self.unix, self.tcp = f"unix://{folder}/s", f"valkey://127.0.0.1:{port}/0"

    def client(self) -> Any:
        """redis-py's client of it, for looking and for damage."""
        import redis

        return redis.Redis(unix_socket_path=f"{self.folder}/s")

    def pause(self) -> None:
        """It answers nothing from now on."""
        stop(self.process)

    def go_on(self) -> None:
        """It answers again."""
        go_on(self.process)

    def kill(self) -> None:
        """It is gone."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def server(
    *options: str, memory: str = "512mb", policy: str = "allkeys-lru", port: int | None = None
) -> Iterator[Server]:
    """A server of its own, with further options of redis-server."""
    found = redis_server()
    with tempfile.TemporaryDirectory(prefix="pkv") as name:  # a socket's path has 107 bytes at most
        folder = Path(name)
        number = free_port() if port is None else port
        command = [
            *(found, "--bind", "127.0.0.1", "--port", str(number), "--unixsocket", f"{folder}/s"),
            *("--save", "", "--appendonly", "no", "--dir", name, "--loglevel", "warning"),
            *("--maxmemory", memory, "--maxmemory-policy", policy, *options),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + BEGINS_S
            while not _listens(f"{folder}/s") or (number and not _listens(number)):
                assert process.poll() is None, "redis-server ended at once"
                assert time.monotonic() < until, "redis-server does not begin"
                time.sleep(0.01)
            yield Server(process, folder, number)
        finally:
            if process.poll() is None:
                go_on(process)
                process.kill()
            process.wait()


@contextlib.contextmanager
def cluster(
    memory: str = "512mb", policy: str = "allkeys-lru", tls: tuple[str, str, str] | None = None
) -> Iterator[list[Server]]:
    """Three servers that are one cluster.

    With paths, as of `certificates`, they speak TLS alone.
    """
    tool = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if tool is None:
        pytest.skip("redis-cli is not installed: apt-get install redis-tools")
    with contextlib.ExitStack() as undo:
        nodes = []
        for _ in range(3):
            own = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "5000"]
            port = free_port()
            if tls is not None:
                own += ["--tls-port", str(port), "--tls-cluster", "yes", "--tls-auth-clients", "no"]
                own += ["--tls-ca-cert-file", tls[0], "--tls-cert-file", tls[1], "--tls-key-file", tls[2]]
            node = undo.enter_context(server(*own, memory=memory, policy=policy, port=port if tls is None else 0))
            node.port = port
            nodes.append(node)
        command = [tool, *(("--tls", "--cacert", tls[0]) if tls else ()), "--cluster", "create", "--cluster-yes"]
        command += [f"127.0.0.1:{node.port}" for node in nodes]
        subprocess.run(command, check=True, capture_output=True)
        until = time.monotonic() + BEGINS_S
        while any(node.client().cluster("info")["cluster_state"] != "ok" for node in nodes):
            assert time.monotonic() < until, "the cluster does not begin"
            time.sleep(0.05)
        yield nodes


def end(one: socket.socket) -> None:
    """Close a socket; a thread that waits on it goes on."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)  # close alone leaves an accept or recv of another thread waiting for ever
    one.close()


class Link:
    """A TCP proxy on loopback, which may hold back, change, lose or repeat answers.

    Parameters
    ----------
    port : of the server.
    bytes_per_s : of its answers; None: all that come.
    mangle : changes a piece of an answer; by its number.
    """

    def __init__(
        self, port: int, bytes_per_s: float | None = None, mangle: Callable[[int, bytes], bytes] | None = None
    ) -> None:
        self._server, self._rate, self._mangle = port, bytes_per_s, mangle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pieces = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        for each in [self._listener, *self._open]:
            end(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
                self._open += [near, far]
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if answers:
                    self._pieces += 1
                    if self._mangle is not None:
                        data = self._mangle(self._pieces, data)
                    if self._rate is not None:
                        time.sleep(len(data) / self._rate)
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def talker(*answers: bytes | None, then: Callable[[socket.socket], object] | None = None) -> Iterator[str]:
    """The URL of a server that gives these answers on each connection, one for each question.

    None closes the connection; after the last one it does `then`, and says nothing more.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def serve(near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for answer in answers:
                if answer is None:
                    near.close()
                    return
                near.recv(65536)
                near.sendall(answer)
            if then is not None:
                then(near)
            while near.recv(65536):
                pass

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                opened.append(near)
                threading.Thread(target=serve, args=(near,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"valkey://127.0.0.1:{listener.getsockname()[1]}/0"
    finally:
        for each in [listener, *opened]:
            end(each)


def certificates(folder: Path, host: str = "127.0.0.1") -> tuple[str, str, str]:
    """Paths of an authority's certificate, a server's signed by it, and the server's key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.timezone.utc)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]

    def certificate(name: str, key: Any, is_authority: bool) -> x509.Certificate:
        made = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if not is_authority:
            address = x509.IPAddress(ipaddress.ip_address(host))
            made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return made.sign(keys[0], hashes.SHA256())

    paths = [folder / name for name in ("ca.pem", "server.pem", "server.key")]
    pem = serialization.Encoding.PEM
    paths[0].write_bytes(certificate("authority", keys[0], True).public_bytes(pem))
    paths[1].write_bytes(certificate(host, keys[1], False).public_bytes(pem))
    plain = serialization.NoEncryption()
    paths[2].write_bytes(keys[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(paths[0]), str(paths[1]), str(paths[2])
