"""The controller of elastic replicas: from observations to decisions. Its owner starts and drains engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headwise.runtime.frontend.routing.base import STATUS_TIMEOUT_S
from headwise.runtime.frontend.scaling.base import (
    CacheWorth,
    Decision,
    Observation,
    Replica,
    ReplicaState,
    ScalingPolicy,
)
from headwise.runtime.frontend.scaling.demand import Load, load_of, needed
from headwise.runtime.frontend.scaling.evidence import Evidence, Sample
from headwise.runtime.frontend.scaling.forecast import TREND_WINDOW_S, LoadHistory
from headwise.runtime.frontend.scaling.leaving import choose_leaving, number_of

TO_SPARE = 0.8
"""Fewer engines are enough if they would keep this share of the target: else the number would go up and down."""


class ReplicaSet:
    """Decides how many engines there should be, and which. Call `decide` about once a second.

    Where the policy has no target, the number changes by hand only. Else it changes
    - after more, or less, was needed for as long as the policy says (`Evidence`);
    - at once, from nothing to one engine, if a request waits;
    - at once, to a number set by hand, which holds until it is given back.
    It holds while a running engine's report is overdue. A lost engine counts like one that starts.

    number: of engines that are to serve; at first the policy's least
    """

    def __init__(self, policy: ScalingPolicy, number: int | None = None) -> None:
        self.policy = policy
        self.number = policy.min_replicas if number is None else number
        self._check(self.number)
        self._by_hand: int | None = None
        self._evidence = Evidence(policy.upscale_delay_s, policy.downscale_delay_s)
        self._history = LoadHistory()
        self._start_s = 0.0  # that the last engine took from its order until it served
        self._now = float("-inf")
        self._starting: dict[str, float] = {}  # since when, by name
        self._leaving: dict[str, int] = {}  # epochs, by name
        self._cancelled: set[str] = set()
        self._to_replace: dict[str, int] = {}  # epochs, by name
        self._is_roll_asked = False
        self._rolled_again = ""  # what becomes of the roll before
        self._is_one_ahead = False  # the engine that takes the place of the next one of these is there first
        self._may_be_ahead = True

    # ---- orders from outside ----

    def set_by_hand(self, number: int | None) -> None:
        """So many engines, whatever the load; None: as the load needs, again. Raises `ValueError` for a number out of
        bounds, and for None where there is no target."""
        if number is not None:
            self._check(number)
        elif not self.policy.follows_load:
            raise ValueError(
                "the deployment has neither target_ttft_s nor target_queue_s, so no load says how many engines it needs"
            )
        self._by_hand = number
        self._evidence.clear()

    @property
    def may_grow_from_nothing(self) -> bool:
        """Whether a request that finds no engine will get one."""
        return self.number > 0 or (self.policy.follows_load and self._by_hand is None)

    @property
    def is_on_demand(self) -> bool:
        """Whether there are no engines while there are no requests."""
        return self.policy.min_replicas == 0 and self.policy.follows_load and self._by_hand is None

    def drain(self, name: str, epoch: int) -> None:
        """This engine has to go, as its node is about to: another takes its place. A second time changes nothing."""
        self._leaving[name] = epoch

    def roll(self) -> None:
        """All engines that there are have to go, one after the other: the next one once all others serve, and where
        there is room for one more, the one that takes its place, too: so it can take what that one has cached."""
        self._is_roll_asked = True

    def _check(self, number: int) -> None:
        policy = self.policy
        if not policy.min_replicas <= number <= policy.max_replicas:
            raise ValueError(
                f"the number of replicas must be from min_replicas {policy.min_replicas} to max_replicas "
                f"{policy.max_replicas}, got {number}"
            )

    # ---- decisions ----

    def decide(
        self,
        observed: Observation,
        replicas: Sequence[Replica],
        now: float,
        cache: CacheWorth | None = None,
        has_room: Callable[[], bool] = lambda: False,
    ) -> Decision:
        """What should be.

        replicas: all that there are, or are being started, whoever ordered them
        now:      seconds of the scheduler's clock; if it goes back, no time has passed
        cache:    what the index says of the engines' caches; None: it is silent
        has_room: whether one more engine would find a node at once. Asked before an engine is replaced
        """
        now = self._now = max(now, self._now)
        self._note(replicas, now)
        self._go_on_rolling(replicas, now, has_room)
        going = {each.name for each in replicas if each.state is ReplicaState.DRAINING} | set(self._leaving)
        staying = tuple(report for report in observed.engines if report.name not in going)
        observed = replace(observed, engines=staying)  # what the others have to do yet, nobody else has to
        number, reason = self._number(observed, replicas, now)
        changes = f"{self.number} -> {number}: " if number != self.number else f"{number}: "
        self.number = number
        if self._to_replace:
            reason += f"; still to be replaced: {', '.join(self._to_replace)}"
        reason += self._rolled_again
        return self._orders(observed, replicas, now, cache, changes + reason)

    def _note(self, replicas: Sequence[Replica], now: float) -> None:
        """Keep who is starting since when, and who is leaving."""
        there = {replica.name: replica for replica in replicas}
        for name, replica in there.items():
            if replica.state is ReplicaState.STARTING:
                self._starting.setdefault(name, now)
            else:
                since = self._starting.pop(name, None)
                if since is not None and replica.state is ReplicaState.RUNNING:
                    self._start_s = now - since
            if name in self._cancelled and replica.state is ReplicaState.RUNNING:
                self._cancelled.discard(name)  # it began to serve before the order came
                self._leaving[name] = replica.epoch
            if replica.state is not ReplicaState.DRAINING and self._leaving.get(name, replica.epoch) != replica.epoch:
                del self._leaving[name]  # started anew; with its old epoch it goes, also if it was away for a time
        for name in self._cancelled - set(there):
            self._starting.pop(name, None)
        self._cancelled &= set(there)

    def _go_on_rolling(self, replicas: Sequence[Replica], now: float, has_room: Callable[[], bool]) -> None:
        """Have the next engine replaced, if all that there should be serve: by one that serves already, or if there is
        no room for that, or it does not come, by one that starts meanwhile."""
        self._rolled_again = ""
        if self._is_roll_asked:
            self._is_roll_asked, self._may_be_ahead = False, True
            if self._to_replace:
                left = ", ".join(self._to_replace)
                self._rolled_again = f"; a roll was under way ({left} left), and begins anew"
            self._to_replace = {each.name: each.epoch for each in replicas if each.state is not ReplicaState.DRAINING}
        there = {each.name: each.epoch for each in replicas if each.state is not ReplicaState.DRAINING}
        self._to_replace = {name: epoch for name, epoch in self._to_replace.items() if there.get(name) == epoch}
        if not self._to_replace:
            self._is_one_ahead = False
            return
        all_serve = all(each.state is ReplicaState.RUNNING for each in replicas)
        has_all = all_serve and len(replicas) == self.number + self._is_one_ahead
        if self._is_one_ahead and not has_all:
            if not any(now - since > self.policy.pending_timeout_s for since in self._starting.values()):
                return
            self._may_be_ahead = False  # nor is another one waited for so long
        elif not has_all:
            return
        elif not self._is_one_ahead and self._may_be_ahead and has_room():
            self._is_one_ahead = True
            return
        self._is_one_ahead = False
        name = next(iter(self._to_replace))
        self._leaving[name] = self._to_replace.pop(name)

    def _number(self, observed: Observation, replicas: Sequence[Replica], now: float) -> tuple[int, str]:
        """The number of engines from now on, and why."""
        silent = self._silent(observed, replicas)
        load = self._load(observed, now)
        if silent:
            self._evidence.clear()
            self._history.clear()
        elif load is not None and self.policy.follows_load:
            up, down = (needed(load, self.policy, share) for share in (1.0, TO_SPARE))
            self._evidence.add(Sample(now, up, down if down.number > up.number else up))
        if self._by_hand is not None:
            return self._by_hand, "set by hand"
        if not self.policy.follows_load:
            return self.number, "as configured: there is no target that the number could follow"
        if silent:
            return self.number, f"held: no report of {', '.join(silent)}"
        if not self.number and observed.held:
            return 1, f"{observed.held} requests wait, and there is no engine"
        rise, fall = self._evidence.rise(self.number, now), self._evidence.fall(self.number, now)
        policy = self.policy
        if rise is not None and self.number < policy.max_replicas:
            return min(rise.number, policy.max_replicas), f"for {policy.upscale_delay_s:.0f} s {rise.why}"
        if fall is not None and self.number > policy.min_replicas:
            return max(fall.number, policy.min_replicas), f"for {policy.downscale_delay_s:.0f} s {fall.why}"
        return self.number, needed(load, policy).why if load is not None else "the load is not measured yet"

    def _silent(self, observed: Observation, replicas: Sequence[Replica]) -> list[str]:
        """The running engines whose reports are overdue; of those that leave, none is needed."""
        heard = {report.name for report in observed.engines if report.silent_s <= STATUS_TIMEOUT_S}
        running = {replica.name for replica in replicas if replica.state is ReplicaState.RUNNING}
        return sorted(running - heard - set(self._leaving))

    def _load(self, observed: Observation, now: float) -> Load | None:
        """The load to count on when an engine serves for which there is reason from now on; None: it was not observed
        for long enough, or in seconds that no engine has measured."""
        if observed.engines and not observed.token_s:
            self._history.clear()
            return None
        self._history.add(now, observed.arrivals)
        expected = self._history.expected(min(self._start_s + self.policy.upscale_delay_s, TREND_WINDOW_S / 2))
        return None if expected is None else load_of(expected, observed)

    # ---- who ----

    def _orders(
        self, observed: Observation, replicas: Sequence[Replica], now: float, cache: CacheWorth | None, reason: str
    ) -> Decision:
        """What has to be done with whom, so that there will be as many as there should be."""
        staying = [
            each
            for each in replicas
            if each.state is not ReplicaState.DRAINING
            and each.name not in self._leaving
            and each.name not in self._cancelled
        ]
        names = {each.name for each in staying}
        awaited = [name for name in self._starting if name not in names and name not in self._cancelled]
        missing = self.number + self._is_one_ahead - len(staying) - len(awaited)
        if missing > 0:
            taken = {each.name for each in replicas} | set(self._starting)
            awaited += [self._begin(name, now) for name in _free_names(taken, missing)]
        elif missing < 0:
            self._give_up(observed, staying, awaited, cache, -missing)
            awaited = [name for name in awaited if name in self._starting]
        overdue = sorted(name for name, since in self._starting.items() if now - since > self.policy.pending_timeout_s)
        if overdue:
            longest = max(now - self._starting[name] for name in overdue)
            reason += f"; {', '.join(overdue)} not started after {longest:.0f} s: is there a node for it?"
        there = {each.name: each for each in replicas}
        return Decision(
            self.number,
            reason,
            start=tuple(awaited),
            cancel=tuple(sorted(self._cancelled)),
            drain=tuple(
                name
                for name in sorted(self._leaving)
                if name in there and there[name].state is not ReplicaState.DRAINING
            ),
            overdue=tuple(overdue),
            replaced=tuple(self._to_replace)[: self._is_one_ahead],
        )

    def _begin(self, name: str, now: float) -> str:
        self._starting[name] = now
        self._leaving.pop(name, None)
        return name

    def _give_up(
        self,
        observed: Observation,
        staying: Sequence[Replica],
        awaited: Sequence[str],
        cache: CacheWorth | None,
        count: int,
    ) -> None:
        """Let so many go: first who does not serve yet, the last one asked for first."""
        for name in sorted(awaited, key=number_of)[::-1][:count]:
            del self._starting[name]
            count -= 1
        idle = [each for each in staying if each.state in (ReplicaState.STARTING, ReplicaState.LOST)]
        idle.sort(
            key=lambda each: (
                each.state is ReplicaState.LOST,
                self._starting.get(each.name, 0.0),
                number_of(each.name),
            ),
            reverse=True,
        )
        for each in idle[:count]:
            self._cancelled.add(each.name)
        count -= len(idle[:count])
        running = {each.name: each.epoch for each in staying if each.state is ReplicaState.RUNNING}
        for chosen in choose_leaving(list(running), count, observed, cache, self._leaving):
            self._leaving[chosen.name] = running[chosen.name]


def _free_names(taken: set[str], count: int) -> list[str]:
    """``count`` names with the lowest numbers that nobody has."""
    names, number = list[str](), 0
    while len(names) < count:
        if (name := f"engine-{number}") not in taken:
            names.append(name)
        number += 1
    return names
