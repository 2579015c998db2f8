"""A deployment's CURVE keys (ZeroMQ's encryption), and the check that a client has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_CREDENTIALS = 6
"""Index of a CURVE client's public key in a request: behind version, id, domain, address, identity and mechanism."""


@dataclass(frozen=True)
class CurveKeys:
    """The key pair of the deployment's store, and the one that all its clients share; 40 characters of Z85 each."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """New keys; raises `zmq.ZMQError` where libzmq was built without CURVE."""
        import zmq

        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())


def secure_client(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Set up a client socket, before it connects, to talk to the deployment's server only, encrypted."""
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret


def secure_server(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Set up a server socket, before it binds, to accept CURVE clients only. A `CurveAuthenticator` decides which."""
    socket.curve_server = True
    socket.curve_publickey = keys.server_public
    socket.curve_secretkey = keys.server_secret
    socket.zap_domain = b"headwise"


class CurveAuthenticator:
    """Decides for libzmq which clients may connect (ZAP, ZeroMQ RFC 27): those that have the deployment's client key.

    CURVE alone accepts every client that knows the server's public key. Create this before the context's server
    sockets are bound, and call `answer` whenever ``socket`` is readable: handshakes wait for it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        import zmq
        from zmq.utils import z85

        self._client_key = z85.decode(keys.client_public)
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        import zmq

        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            is_allowed = request[5:6] == [b"CURVE"] and request[_CREDENTIALS:] == [self._client_key]
            status = [b"200", b"OK"] if is_allowed else [b"400", b"not a client of this deployment"]
            self.socket.send_multipart([_ZAP_VERSION, request[1], *status, b"", b""])
