"""Which engines live, and which of them gets the next request. No I/O, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.errors import OverloadedError
from headwise.runtime.client_protocol import EngineStatus

STATUS_TIMEOUT_S = 3.0
"""An engine that reports nothing for so long gets no requests."""


@dataclass
class _Engine:
    """An engine's last status; ``routed`` requests were sent its way since."""

    status: EngineStatus
    heard: float
    routed: int = 0

    @property
    def load(self) -> int:
        return self.status.load + self.routed


class EngineTable:
    """The engines by name. ``now`` is in seconds of one clock."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._turn = 0

    def update(self, status: EngineStatus, now: float) -> None:
        self._engines[status.engine] = _Engine(status, now)

    def pick(self, now: float) -> EngineStatus:
        """The engine with the least load, in turn among equals; raises `OverloadedError` if none lives."""
        self._expire(now)
        if not self._engines:
            raise OverloadedError("no engine is ready: they are starting, or were lost; try again later")
        names = sorted(self._engines)
        self._turn += 1
        in_turn = [self._engines[names[(self._turn + i) % len(names)]] for i in range(len(names))]
        engine = min(in_turn, key=lambda engine: engine.load)
        engine.routed += 1
        return engine.status

    def endpoints(self, now: float, replicas: int) -> dict[str, str]:
        """Where to reach all ``replicas`` engines, by name; raises `OverloadedError` unless all of them live."""
        self._expire(now)
        if len(self._engines) < replicas:
            raise OverloadedError(
                f"{len(self._engines)} of {replicas} engines are ready: the others are starting, or were lost; try "
                "again later"
            )
        return {name: engine.status.endpoint for name, engine in sorted(self._engines.items())}

    def stats(self, now: float) -> dict[str, dict[str, Any]]:
        """The live engines' own statistics, by name."""
        self._expire(now)
        return {name: engine.status.stats for name, engine in sorted(self._engines.items())}

    def _expire(self, now: float) -> None:
        self._engines = {n: e for n, e in self._engines.items() if now - e.heard <= STATUS_TIMEOUT_S}
