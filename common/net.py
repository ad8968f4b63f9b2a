"""HTTP requests that end in time, whoever is at the other end.

`http.client` limits single reads: a server that sends one byte a second, in its headers or in its body, can hold a client for hours. Here
connecting, the TLS handshake, sending, headers and body share one deadline, and the body has a size limit. Redirects and proxy variables are
not followed: the address given is the one asked.
"""
import http.client
import io
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from urllib.parse import urlsplit

from common import UserError


class TooLarge(Exception):
    """The body is larger than the limit."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    body: bytes


@dataclass(frozen=True)
class Endpoint:
    url: str  # for messages
    scheme: str
    host: str
    port: int | None
    path: str


def shown(url: str) -> str:
    """Scheme and host of an address, whole or not, for messages: what else stands in it may be a secret."""
    return "".join(re.match(r"(\w+://)?(?:[^/?#]*@)?(\[[^/?#\]]*\]|[^/?#:]*)", url).groups(""))


def endpoint(url: str, path: str) -> Endpoint:
    """The parts of a server's address; `path` is added where the address does not end with it. UserError where it is no http(s) address."""
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:
        raise UserError(f"{shown(url)!r} is not an address (host or port cannot be read); write it as http://127.0.0.1:8000") from None  # the error quotes it
    if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"[!-~]+", url):
        raise UserError(f"{shown(url)!r} is not an address (http or https, a host, no spaces); write it as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UserError(f"the address of {parts.hostname} holds a user name or password, which is not supported; leave it out (a key comes from the environment)")
    full = parts.path.rstrip("/")
    full = full if full.endswith(path) else full + path
    return Endpoint(f"{parts.scheme}://{parts.netloc}{full}", parts.scheme, parts.hostname, port, full + (f"?{parts.query}" if parts.query else ""))


class _Wire(io.RawIOBase):
    """A connected socket as http.client wants it, every read and write of which ends at the deadline."""

    def __init__(self, sock: socket.socket, end: float):
        self._sock, self._end = sock, end

    def _arm(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self._arm()
        return self._sock.recv_into(buffer)

    def sendall(self, data) -> None:
        self._arm()
        self._sock.sendall(data)

    def close(self) -> None:
        """Nothing: http.client lets go of the connection before the body is read; exchange() closes the socket."""

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)


def exchange(method: str, scheme: str, host: str, port: int | None, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, *,
             end: float, max_bytes: int, connect_s: float = 1e9, address: tuple[int, tuple] | None = None,
             want_body: Callable[[int, Message], bool] = lambda status, headers: True) -> Answer:
    """One request. end: the time (monotonic) at which all is over; connect_s: most seconds for connecting; max_bytes: of the body as sent.
    address: (family, socket address) to connect to, if the host was looked up before. want_body: whether to read it, given status and
    headers. Raises TimeoutError, TooLarge, OSError (TLS faults too) or http.client.HTTPException (a body that was cut off too)."""
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port)
    left = max(0.001, min(connect_s, end - time.monotonic()))
    if address is None:
        sock = socket.create_connection((host, connection.port), timeout=left)
    else:
        sock = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        if address is not None:
            sock.settimeout(left)
            sock.connect(address[1])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if scheme == "https":
            sock.settimeout(max(0.001, end - time.monotonic()))
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        connection.sock = _Wire(sock, end)
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        if not want_body(response.status, response.headers):
            return Answer(response.status, response.headers, b"")
        if (response.length or 0) > max_bytes:
            raise TooLarge
        content = bytearray()
        while chunk := response.read1(1 << 16):  # returns what has come
            content += chunk
            if len(content) > max_bytes:
                raise TooLarge
            if time.monotonic() > end:
                raise TimeoutError
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return Answer(response.status, response.headers, bytes(content))
    finally:
        sock.close()


def hidden(text: str, *secrets: str) -> str:
    """`text` without the secrets, should a server have sent one back."""
    for secret in secrets:
        text = text.replace(secret, "***") if secret else text
    return text
