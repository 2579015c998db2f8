"""How processes of one node meet: a socket of Linux' abstract namespace, to which readers stay connected.

    owner  Door          listens; tells who comes, if it is of the same user, what it offers
    reader knock(...)    is told; the connection ends when the owner hangs up, or dies

So each side knows when the other one is no more, whatever ended it. The name is random, and nothing of the file system:
a dead owner leaves nothing behind. Who listens, and who connects, the kernel says.

Sources: unix(7), listen(2) of the Linux man pages.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import suppress

from headwise.transfer.connectors.base import MAX_ADDRESS_BYTES, PeerLostError

log = logging.getLogger(__name__)

MAX_READERS = 256
"""Connections at a time; whoever comes beyond is turned away."""
PAUSE_S = 0.2
"""Before the next one is let in where one could not be: this process may have no descriptor left, for now."""

_NAME = re.compile(r"headwise-[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("iII")  # `struct ucred`: process, user, group


class Door:
    """The owner's side. It offers nothing at first.

    Raises `OSError` where there are no such sockets.
    """

    def __init__(self) -> None:
        self.name = f"headwise-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(_address(self.name))
        self._listener.listen(MAX_READERS)
        self._offer: bytes | None = None
        self._readers: dict[int, socket.socket] = {}  # by descriptor
        self._changed = threading.Condition()
        self._wake_read, self._wake_write = os.pipe()
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="headwise-peer-door", daemon=True)
        self._thread.start()

    def open(self, offer: bytes) -> None:
        """Offer this to whoever comes, of at most `MAX_ADDRESS_BYTES`."""
        with self._changed:
            self._offer = offer

    def shut(self, timeout_s: float) -> bool:
        """Offer nothing, and hang up; whether all readers have let go of what they were offered, in time."""
        with self._changed:
            self._offer = None
            for reader in self._readers.values():
                with suppress(OSError):  # it is going itself
                    reader.shutdown(socket.SHUT_WR)
            return self._changed.wait_for(lambda: not self._readers, timeout_s)

    def close(self) -> None:
        """The last call: who is connected still is disconnected."""
        self._is_open = False
        os.write(self._wake_write, b"-")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _serve(self) -> None:
        try:
            while self._is_open:
                poll = select.poll()
                for fd in (self._listener.fileno(), self._wake_read, *self._readers):
                    poll.register(fd, select.POLLIN)
                for fd, _ in poll.poll():
                    if fd == self._listener.fileno():
                        self._answer()
                    elif fd in self._readers:  # readers say nothing: this one has gone
                        self._let_out(fd)
        except Exception:
            log.exception("no peer can come to this worker's device memory any more")
        finally:
            for fd in list(self._readers):
                self._let_out(fd)
            self._listener.close()

    def _answer(self) -> None:
        try:
            reader = self._listener.accept()[0]
        except OSError as error:
            log.warning("a peer that comes to this worker's device memory is not let in yet: %s", error.strerror)
            time.sleep(PAUSE_S)
        else:
            self._let_in(reader)

    def _let_in(self, reader: socket.socket) -> None:
        with self._changed:
            if self._offer is None or len(self._readers) >= MAX_READERS or not _is_same_user(reader):
                reader.close()
                return
            try:
                reader.send(self._offer, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:  # it has gone already
                reader.close()
                return
            self._readers[reader.fileno()] = reader

    def _let_out(self, fd: int) -> None:
        with self._changed:
            self._readers.pop(fd).close()
            self._changed.notify_all()


def knock(name: str, timeout_s: float) -> tuple[int, bytes]:
    """The descriptor of a connection to the door ``name``, and what is offered there. The connection becomes readable
    when the owner hangs up; whoever closes it has let go of what was offered.

    Raises `PeerLostError`: nobody is there, nothing is offered, or not in time.
    """
    if not _NAME.fullmatch(name):
        raise PeerLostError("the address has no socket to connect to")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(max(timeout_s, 1e-3))
        connection.connect(_address(name))
        if not _is_same_user(connection):
            raise PeerLostError("its socket is another user's")
        offer = connection.recv(MAX_ADDRESS_BYTES + 1)
    except TimeoutError:
        connection.close()
        raise PeerLostError("it did not answer in time") from None
    except OSError as error:
        connection.close()
        raise PeerLostError(f"its process is gone, or shares nothing any more: {error.strerror}") from None
    except PeerLostError:
        connection.close()
        raise
    if not offer:
        connection.close()
        raise PeerLostError("it shares nothing now")
    return connection.detach(), offer


def has_hung_up(connection: int) -> bool:
    """Whether the owner has, or is no more."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _address(name: str) -> bytes:
    return b"\0" + name.encode()


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
