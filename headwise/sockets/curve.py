"""CURVE, ZeroMQ's encryption: the keys of both sides, and the check that a client has one that the server knows.

A server has a key pair. A client proves that it has a token (an API key, or a deployment's own secret): its key pair
follows from the token, so that the token itself is never sent. Keys are written as 64 hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwise.errors import ConfigError

if TYPE_CHECKING:
    import zmq

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_MECHANISM, _CREDENTIALS = 5, 6
"""Indices in a request: behind version, id, domain, address and identity; the client's public key is last."""
KEY_PROPERTY = "X-Client-Key"
"""Of each message that comes over an encrypted connection: the client's public key."""
OVERHEAD_BYTES = 64
"""An encrypted frame is at most so much longer than what it carries (RFC 26: 33 bytes)."""

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ClientKeys:
    """What a client needs: the server's public ``server`` key, and a ``token`` that the server knows."""

    server: str
    token: str = field(repr=False)

    def __post_init__(self) -> None:
        """Raises `ConfigError` for what can be neither."""
        check_key(self.server, "the server's key")
        if not isinstance(self.token, str) or not self.token:
            raise ConfigError("a client needs an API key besides the server's key")


@dataclass(frozen=True)
class ServerKeys:
    """secret:  of the server's pair
    clients: public keys of the clients that may always connect (`client_key` of their tokens)
    """

    secret: str = field(repr=False)
    clients: frozenset[str]


def new_secret() -> str:
    """The secret of a new pair."""
    return secrets.token_hex(32)


def check_key(key: object, what: str) -> None:
    """Raise `ConfigError`, which does not show it, unless this is a key."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ConfigError(f"{what} must be 64 hexadecimal digits (0-9, a-f), as `headwise serve` prints them")


def public_key(secret: str) -> str:
    """The public key of a secret one."""
    import zmq
    from zmq.utils import z85

    return z85.decode(zmq.curve_public(_z85(secret))).hex()


def client_key(token: str) -> str:
    """The public key of the clients that have this token."""
    return public_key(_client_secret(token))


def _client_secret(token: str) -> str:
    return hashlib.blake2b(token.encode(), digest_size=32, person=b"headwise client").hexdigest()


def _z85(key: str) -> bytes:
    """As libzmq takes it."""
    from zmq.utils import z85

    encoded: bytes = z85.encode(bytes.fromhex(key))
    return encoded


def secure_client(socket: zmq.Socket[bytes], keys: ClientKeys | None) -> None:
    """Set up a client socket, before it connects, to talk to that server only; None: to any, and in the clear."""
    if keys is None:
        return
    secret = _client_secret(keys.token)
    socket.curve_serverkey = _z85(keys.server)
    socket.curve_publickey = _z85(public_key(secret))
    socket.curve_secretkey = _z85(secret)


def secure_server(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Set up a server socket, before it binds, to accept CURVE clients only. An `Authenticator` decides which."""
    socket.curve_server = True
    socket.curve_secretkey = _z85(keys.secret)
    socket.zap_domain = b"headwise"


class Authenticator:
    """Decides for libzmq which clients may connect (ZAP, ZeroMQ RFC 27): those whose public key is in `allowed`, which
    may be changed on any thread.

    CURVE alone accepts every client that knows the server's public key. Create this before the context's server
    sockets are bound, and close it before the context. It has a thread of its own, for handshakes wait for it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[str]) -> None:
        import zmq

        self.allowed = allowed
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ZAP_ENDPOINT)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="headwise-authenticator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            os.close(self._wake_write)
            self._thread.join()
            os.close(self._wake_read)

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while self._wake_read not in dict(poller.poll()):
            self._answer(self._socket.recv_multipart())
        self._socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        is_curve = len(request) == _CREDENTIALS + 1 and request[_MECHANISM] == b"CURVE"
        key = request[_CREDENTIALS].hex() if is_curve else ""
        is_allowed = key in self.allowed
        status = [b"200", b"OK"] if is_allowed else [b"400", b"not a client of this deployment"]
        # Of a property that is no user id messages come twice as fast (libzmq 4.3).
        told = _property(KEY_PROPERTY, key) if is_allowed else b""
        self._socket.send_multipart([_ZAP_VERSION, request[1], *status, b"", told])


def _property(name: str, value: str) -> bytes:
    """One of ZMTP's metadata (RFC 23)."""
    return bytes((len(name),)) + name.encode() + len(value).to_bytes(4, "big") + value.encode()
