"""The handshake of SOCKS5 (RFC 1928), both sides: CONNECT only, and without authentication.

    client: 5, number of methods, methods          server: 5, method 0 (no authentication)
    client: 5, 1 (CONNECT), 0, address, port       server: 5, reply, 0, address, port

An address is 1 and 4 bytes (IPv4), 4 and 16 bytes (IPv6), or 3, a length and a name. No part has more than 262 bytes.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from asyncio import StreamReader, StreamWriter
from enum import IntEnum

from headwise.sockets.endpoint import Endpoint

VERSION = 5
"""First byte of every connection."""

_NO_AUTHENTICATION, _NO_METHOD = 0, 0xFF
_CONNECT = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4
_LONGEST_NAME = 255


class Reply(IntEnum):
    """What became of a request."""

    SUCCEEDED = 0
    FAILED = 1
    NOT_ALLOWED = 2
    NETWORK_UNREACHABLE = 3
    HOST_UNREACHABLE = 4
    REFUSED = 5
    COMMAND_NOT_SUPPORTED = 7
    ADDRESS_NOT_SUPPORTED = 8

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


_REPLIES = {
    errno.ECONNREFUSED: Reply.REFUSED,
    errno.ENETUNREACH: Reply.NETWORK_UNREACHABLE,
    errno.EHOSTUNREACH: Reply.HOST_UNREACHABLE,
    errno.ETIMEDOUT: Reply.HOST_UNREACHABLE,
}


class SocksError(Exception):
    """The handshake failed.

    answer: bytes that tell the client so
    """

    def __init__(self, message: str, answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


def reply(code: Reply) -> bytes:
    """The server's last message. It has no address of its own to tell."""
    return bytes((VERSION, code, 0, _IPV4)) + bytes(6)


def reply_to(error: OSError) -> Reply:
    """What to tell a client whose destination could not be reached."""
    if isinstance(error, socket.gaierror | asyncio.TimeoutError | TimeoutError):
        return Reply.HOST_UNREACHABLE
    return _REPLIES.get(error.errno or 0, Reply.FAILED)


class Acceptor:
    """The server's side, as bytes only: no I/O.

    destination: where the client wants to go; None until it has said so
    rest:        what the client has sent behind that
    """

    def __init__(self) -> None:
        self.destination: Endpoint | None = None
        self.rest = b""
        self._unread = b""
        self._has_greeted = False

    def take(self, data: bytes) -> bytes:
        """Take what has come; returns what to answer. Raises `SocksError`; after that, nothing more may be taken."""
        if self.destination is not None:
            self.rest += data
            return b""
        self._unread += data
        answer = b"" if self._has_greeted else self._greet()
        if self._has_greeted:
            try:
                self._read_request()
            except SocksError as error:
                error.answer = answer + error.answer
                raise
        return answer

    def _greet(self) -> bytes:
        if not self._unread:
            return b""
        if self._unread[0] != VERSION:
            raise SocksError(f"version {self._unread[0]} is not {VERSION}")
        if len(self._unread) < 2 or len(self._unread) < 2 + self._unread[1]:
            return b""
        end = 2 + self._unread[1]
        methods, self._unread = self._unread[2:end], self._unread[end:]
        if _NO_AUTHENTICATION not in methods:
            raise SocksError("the client insists on authentication", bytes((VERSION, _NO_METHOD)))
        self._has_greeted = True
        return bytes((VERSION, _NO_AUTHENTICATION))

    def _read_request(self) -> None:
        data = self._unread
        if data and data[0] != VERSION:
            raise SocksError(f"version {data[0]} is not {VERSION}", reply(Reply.FAILED))
        if len(data) >= 2 and data[1] != _CONNECT:
            raise SocksError(f"command {data[1]} is not CONNECT", reply(Reply.COMMAND_NOT_SUPPORTED))
        if len(data) >= 4 and data[3] not in (_IPV4, _NAME, _IPV6):
            raise SocksError(f"unknown kind of address {data[3]}", reply(Reply.ADDRESS_NOT_SUPPORTED))
        if len(data) < 5:
            return
        first, length = {_IPV4: (4, 4), _IPV6: (4, 16), _NAME: (5, data[4])}[data[3]]
        end = first + length
        if len(data) < end + 2:
            return
        host = data[first:end]
        name = host.decode("latin-1") if data[3] == _NAME else str(ipaddress.ip_address(host))
        self.destination = Endpoint.of(name, int.from_bytes(data[end : end + 2], "big"))
        self.rest, self._unread = data[end + 2 :], b""


async def connect(reader: StreamReader, writer: StreamWriter, destination: Endpoint) -> None:
    """The client's side: ask the server behind this connection for ``destination``.

    Raises `SocksError` if it does not do that, `OSError` or `EOFError` if the connection ends.
    """
    writer.write(bytes((VERSION, 1, _NO_AUTHENTICATION)))
    _, method = await _read(reader, 2)
    if method != _NO_AUTHENTICATION:
        raise SocksError("it wants authentication")
    writer.write(bytes((VERSION, _CONNECT, 0)) + _address(destination.host) + destination.port.to_bytes(2, "big"))
    _, code, _, kind = await _read(reader, 4)
    if code != Reply.SUCCEEDED:
        known = Reply(code).words if code in set(Reply) else f"reply {code}"
        raise SocksError(known)
    length = {_IPV4: 4, _IPV6: 16}.get(kind)
    if length is None:
        length = (await reader.readexactly(1))[0]
    await reader.readexactly(length + 2)


async def _read(reader: StreamReader, count: int) -> bytes:
    """So many bytes of a message, which begins with the version."""
    first = await reader.readexactly(1)
    if first[0] != VERSION:
        raise SocksError("no relay listens there")
    return first + await reader.readexactly(count - 1)


def _address(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.encode("latin-1", "replace")[:_LONGEST_NAME]
        return bytes((_NAME, len(name))) + name
    return bytes((_IPV4 if address.version == 4 else _IPV6,)) + address.packed
