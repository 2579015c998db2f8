"""When an actor that ended is started again, and where. Pure: no clock, no Ray."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class RestartPolicy:
    """How often something may end before its next start has to wait.

    at_once:         ends that are followed by a start at once
    first_delay_s:   wait after the first end beyond ``at_once``; each further end doubles it
    longest_delay_s: the longest wait
    refill_s:        seconds after which one end is forgotten
    """

    at_once: int = 3
    first_delay_s: float = 1.0
    longest_delay_s: float = 60.0
    refill_s: float = 60.0


class Restarts:
    """Counts ends and forgets them with time. So restarts never stop for good, and never follow each other too fast."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self.policy = policy or RestartPolicy()
        self._most = self.policy.at_once + 1 + math.log2(self.policy.longest_delay_s / self.policy.first_delay_s)
        self._ends = 0.0
        self._at = 0.0

    def ended(self, now: float) -> float:
        """Seconds to wait before the next start. ``now``: of any clock that does not go back."""
        self._ends = min(self.recent(now) + 1.0, self._most)
        self._at = now
        beyond = self._ends - self.policy.at_once
        if beyond <= 0:
            return 0.0
        return float(min(self.policy.longest_delay_s, self.policy.first_delay_s * 2.0 ** (beyond - 1)))

    def has_one_to_spare(self, now: float) -> bool:
        """Whether one more end would be followed by a start at once."""
        return self.recent(now) + 1.0 <= self.policy.at_once

    def recent(self, now: float) -> float:
        """Ends that are not forgotten yet, the oldest of them in part."""
        return max(0.0, self._ends - (now - self._at) / self.policy.refill_s)


class Phase(Enum):
    """DOWN: its next start is not due. PLACING: no node has room yet. STARTING: it does not serve yet. RUNNING: it
    serves.
    """

    DOWN = auto()
    PLACING = auto()
    STARTING = auto()
    RUNNING = auto()


class Life:
    """Where an actor stands between its ends and starts.

    start_timeout_s: seconds after which a start that neither succeeded nor failed counts as failed
    avoided:         nodes on which it failed to start, or ended again and again
    """

    def __init__(self, start_timeout_s: float = math.inf, policy: RestartPolicy | None = None) -> None:
        self.phase = Phase.DOWN
        self.avoided: set[str] = set()
        self.start_timeout_s = start_timeout_s
        self._restarts = Restarts(policy)
        self._since = self._due = -math.inf
        self._late_after_s = start_timeout_s

    def placing(self, now: float) -> None:
        self._enter(Phase.PLACING, now)

    def created(self, now: float, timeout_s: float = math.inf) -> None:
        """``timeout_s``: of this start, if it is to take less time than others."""
        self._late_after_s = min(timeout_s, self.start_timeout_s)
        self._enter(Phase.STARTING, now)

    def ready(self, now: float) -> None:
        self._enter(Phase.RUNNING, now)

    def ended(self, now: float, node: str) -> float:
        """Seconds until it is started again. ``node``: the one it was on."""
        if not self._restarts.recent(now):
            self.avoided.clear()
        delay = self._restarts.ended(now)
        if node and (delay or self.phase is Phase.STARTING):
            self.avoided.add(node)
        self._due = now + delay
        self._enter(Phase.DOWN, now)
        return delay

    def displaced(self, now: float) -> None:
        """It ended because its node died. It may start again at once."""
        self._due = now
        self._enter(Phase.DOWN, now)

    def can_be_replaced(self, now: float) -> bool:
        """Whether it serves, and would be started again at once if it ended."""
        return self.phase is Phase.RUNNING and self._restarts.has_one_to_spare(now)

    def is_due(self, now: float) -> bool:
        """Whether it is to be started."""
        return self.phase is Phase.DOWN and now >= self._due

    def is_late(self, now: float) -> bool:
        """Whether its start takes too long. Waiting for a node does not count."""
        return self.phase is Phase.STARTING and now - self._since > self._late_after_s

    def has_waited_for(self, seconds: float, now: float) -> bool:
        """Whether it has waited for room for so long."""
        return self.phase is Phase.PLACING and self.waited_s(now) >= seconds

    def waited_s(self, now: float) -> float:
        """Seconds for which it has waited for room by now; 0: it has room, or was not to be started yet."""
        return now - self._since if self.phase is Phase.PLACING else 0.0

    def has_run_for(self, seconds: float, now: float) -> bool:
        """Whether it has served for so long. Earlier reports of its silence are about the process before it."""
        return self.phase is Phase.RUNNING and now - self._since >= seconds

    def next_node(self, last: str, alive: Collection[str], with_room: Sequence[str]) -> str:
        """The node to start it on: ``last`` unless that is dead or avoided; then another one that has room now, the
        first of those in ``with_room``.

        Where all that have room are avoided: any of them but the last; where there is none: ``last``, or if that is
        dead, empty: wherever there will be room.
        """
        if last in alive and last not in self.avoided:
            return last
        others = [node for node in with_room if node in alive and node != last]
        for node in others:
            if node not in self.avoided:
                return node
        self.avoided &= {last}
        return others[0] if others else last if last in alive else ""

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now
