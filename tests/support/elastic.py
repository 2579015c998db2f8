"""A deployment that does what the controller of elastic replicas says, in made-up seconds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from headwise.runtime.frontend.routing.engines import Arrivals
from headwise.runtime.frontend.scaling import Decision, EngineReport, Observation, Replica, ReplicaSet, ReplicaState

STARTING, RUNNING, LOST, DRAINING = ReplicaState


@dataclass
class Deployment:
    """Engines serve ``start_s`` after they were ordered, and end ``drain_s`` after they were drained.

    work:   engine-seconds of prompts that arrive in a second, in ten requests
    held:   requests that no engine can take
    silent: engines whose reports are overdue
    requests, worth: by engine
    has_room: whether one more engine would find a node
    """

    controller: ReplicaSet
    start_s: float = 5.0
    drain_s: float = 5.0
    work: float = 0.0
    held: int = 0
    has_room: bool = False
    silent: set[str] = field(default_factory=set)
    requests: dict[str, int] = field(default_factory=dict)
    caches: dict[str, float] = field(default_factory=dict)
    now: float = 1000.0
    epoch: int = 0
    arrivals: Arrivals = field(default_factory=Arrivals)
    replicas: dict[str, Replica] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    log: list[tuple[float, Decision]] = field(default_factory=list)

    def worth(self, without: Collection[str] = ()) -> dict[str, float]:
        return self.caches

    def tick(self, seconds: int = 1) -> Decision:
        """So many decisions, one a second, and what they order; the last one."""
        for _ in range(seconds):
            self.now += 1.0
            self._arrive()
            self._pass_time()
            seen, there = self.observation(), list(self.replicas.values())
            decision = self.controller.decide(seen, there, self.now, self, lambda: self.has_room)
            self.log.append((self.now, decision))
            self.obey(decision)
        return self.log[-1][1]

    def observation(self) -> Observation:
        serving = [each.name for each in self.replicas.values() if each.state in (RUNNING, DRAINING)]
        reports = tuple(
            EngineReport(name, 9.0 if name in self.silent else 0.1, self.requests.get(name, 0), 0.0, 5.0)
            for name in serving
        )
        return Observation(reports, self.arrivals, self.held, 0.5 * self.held)

    def obey(self, decision: Decision) -> None:
        for name in decision.start:
            if name not in self.replicas:
                self.epoch += 1
                self.replicas[name] = Replica(name, STARTING, self.epoch)
                self.due[name] = self.now + self.start_s
        for name in decision.cancel:
            del self.replicas[name]
            self.due.pop(name, None)
        for name in decision.drain:
            self.replicas[name] = replace(self.replicas[name], state=DRAINING)
            self.due[name] = self.now + self.drain_s

    def names(self, *states: ReplicaState) -> list[str]:
        return sorted(each.name for each in self.replicas.values() if each.state in states)

    def _arrive(self) -> None:
        if self.work:
            seen = self.arrivals
            self.arrivals = Arrivals(seen.requests + 10, seen.seconds + self.work, seen.squares + self.work**2 / 10)

    def _pass_time(self) -> None:
        for name in [name for name, at in self.due.items() if at <= self.now]:
            del self.due[name]
            if self.replicas[name].state is DRAINING:
                del self.replicas[name]
            else:
                self.replicas[name] = replace(self.replicas[name], state=RUNNING)
