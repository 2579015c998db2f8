"""The way to engines for clients that cannot reach them: through the scheduler's port, by SOCKS5.

It leads to the engines of this deployment and nowhere else. All that goes this way passes the scheduler's node.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter

from headwise.sockets.endpoint import Endpoint
from headwise.sockets.socks import Acceptor, Reply, SocksError, reply, reply_to
from headwise.sockets.streams import PORTION, Stream, say_last

CONNECT_S = 2.5
"""Longest wait for an engine's node. A client waits longer before it counts the engine as lost."""


class Relay:
    """Opens connections to engines for clients that ask by SOCKS5. Its counts and `allow` may be used on any thread.

    counts: connections that were relayed, refused (no engine is there), and unreachable
    """

    def __init__(self) -> None:
        self.counts = {"relayed": 0, "refused": 0, "unreachable": 0}
        self._addresses: dict[Endpoint, Endpoint] = {}

    def allow(self, endpoint: str, address: str) -> None:
        """Let clients go to ``address``, which they know as ``endpoint`` (each ``tcp://HOST:PORT``, or ignored)."""
        try:
            self._addresses[Endpoint.parse(endpoint)] = Endpoint.parse(address)
        except ValueError:
            return

    def forbid(self, endpoint: str) -> None:
        """No engine is there any more. Connections that were made end with the engine."""
        try:
            self._addresses.pop(Endpoint.parse(endpoint), None)
        except ValueError:
            return

    async def ask(self, first: bytes, reader: StreamReader, writer: StreamWriter) -> Stream | None:
        """The handshake, of which ``first`` has come. Returns the connection to the engine, to which everything is to
        be passed on; None if the client has been told why there is none. Raises `EOFError` if the client hangs up.
        """
        acceptor, data = Acceptor(), first
        try:
            while True:
                writer.write(acceptor.take(data))
                if acceptor.destination is not None:
                    break
                data = await reader.read(PORTION)
                if not data:
                    raise EOFError
            engine = await self._connect(acceptor.destination)
        except SocksError as error:
            await say_last(error.answer, (reader, writer))
            return None
        writer.write(reply(Reply.SUCCEEDED))
        engine[1].write(acceptor.rest)
        self.counts["relayed"] += 1
        return engine

    async def _connect(self, destination: Endpoint) -> Stream:
        address = self._addresses.get(destination)
        if address is None:
            self.counts["refused"] += 1
            raise SocksError(f"{destination} is no engine of this deployment", reply(Reply.NOT_ALLOWED))
        try:
            return await asyncio.wait_for(asyncio.open_connection(address.host, address.port), CONNECT_S)
        except OSError as error:  # a timeout among them
            self.counts["unreachable"] += 1
            code = reply_to(error)
            raise SocksError(f"{destination}: {code.words}", reply(code)) from None
