"""Of which engines a reader may ask blocks that are on their devices."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

UNREAD_S = 60.0
"""For so long an engine is asked for what is on its host, some of whose device could not be read."""


class OtherDevices:
    """node: where all of our workers can read GPUs' memory; empty: nowhere"""

    def __init__(self, node: str) -> None:
        self._node = node
        self._unread: dict[str, float | None] = {}  # until when engines are not tried; None: not asked since

    def node_for(self, engine: str, now: float) -> str:
        """Our node, to be told to an engine that is asked for blocks; empty: it is to give those of its host."""
        if self._unread.get(engine, now) is None:
            self._unread[engine] = now + UNREAD_S
        self._unread = {name: until for name, until in self._unread.items() if until is None or until > now}
        return "" if engine in self._unread else self._node

    def lost(self, engine: str) -> None:
        """What was on an engine's device could not be read."""
        if engine not in self._unread:
            log.warning("blocks on the device of %s could not be read: for a while they come by its host", engine)
        self._unread[engine] = None
