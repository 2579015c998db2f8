"""Who the engines of a deployment are, and where they reach each other: told to those that know something else."""

from __future__ import annotations

import hashlib

from headwise.runtime.frontend.routing.engines import EngineTable
from headwise.runtime.protocol import wire
from headwise.runtime.protocol.messages import Directory, EngineStatus

Entry = tuple[int, str, int]
"""What a `Directory` says of an engine."""


class DirectoryService:
    """Answers engines' statuses. Absolute and repeated until it is seen: an engine that missed an answer gets the next,
    and a scheduler that was restarted ends up saying what the one before it said.

    secret: of the deployment
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._engines: dict[str, Entry] = {}
        self._version, self._encoded = "", b""

    def answer(self, table: EngineTable, status: EngineStatus) -> bytes | None:
        """The message that an engine gets which has just reported; None: it knows all.

        Engines that are silent or lost stay in it until the table forgets them: nobody is sent to them meanwhile.
        """
        known = self._engines.get(status.engine)
        if known != _entry(status) or len(self._engines) != len(table):
            self._take(table)
        return None if status.directory == self._version else self._encoded

    def _take(self, table: EngineTable) -> None:
        statuses = sorted((engine.status for engine in table.engines), key=lambda status: status.engine)
        engines = {status.engine: _entry(status) for status in statuses}
        if engines != self._engines:
            self._engines = engines
            self._version = hashlib.sha256(repr(engines).encode()).hexdigest()[:16]
            self._encoded = wire.encode(Directory(self._secret, self._version, engines))


def _entry(status: EngineStatus) -> Entry:
    return status.epoch, status.address or status.endpoint, status.tp_size
