"""Of which engines a reader may ask blocks that are on their devices."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

UNREAD_S = 60.0
"""For so long an engine is asked for what is on its host, some of whose device could not be read."""


class OtherDevices:
    """ways: how all of our workers can read GPUs' memory, as `ways_to_devices`; none: they cannot"""

    def __init__(self, ways: tuple[str, ...]) -> None:
        self._ways = ways
        self._unread: dict[str, float | None] = {}  # until when engines are not tried; None: not asked since

    def ways_to(self, engine: str, now: float) -> tuple[str, ...]:
        """Our ways, to be told to an engine that is asked for blocks; none: it is to give those of its host."""
        if self._unread.get(engine, now) is None:
            self._unread[engine] = now + UNREAD_S
        self._unread = {name: until for name, until in self._unread.items() if until is None or until > now}
        return () if engine in self._unread else self._ways

    def lost(self, engine: str) -> None:
        """What was on an engine's device could not be read."""
        if engine not in self._unread:
            log.warning("blocks on the device of %s could not be read: for a while they come by its host", engine)
        self._unread[engine] = None
