"""When an engine changes what it is for: from prompts to decoding, or back. Decisions only: no I/O, no clock.

What a request costs is taken from what routing expects of it (`routing.costs`), with so many engines of each kind:

    waiting   for its prompt: what is queued at the engines for prompts, or the wait that the load of the last minutes
              means there (`demand.Load`), whichever is more
    decoding  admission and answer: running requests fill pools and sequences, and slow down each other's answers

One engine at a time goes over if that would lower the sum by `LEAST_GAIN_S`, and by `LEAST_SHARE` of an engine's part
of it, for ``delay_s`` on end. Engines that serve whole requests stay as they are, except where no others decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headwise.runtime.frontend.routing.base import STATUS_TIMEOUT_S, EngineRole
from headwise.runtime.frontend.scaling.base import EngineReport, Observation, Replica, ReplicaState
from headwise.runtime.frontend.scaling.demand import CLEAR_S, Load, load_of
from headwise.runtime.frontend.scaling.forecast import LoadHistory
from headwise.runtime.frontend.scaling.roles import Split

LEAST_GAIN_S = 0.5
LEAST_SHARE = 0.5

Side = Literal["prefill", "decode"]


@dataclass(frozen=True)
class RolePolicy:
    """delay_s: another split must have been better for so long
    rest_s:  after a change, none follows for so long: what it brings shows only once requests have ended
    """

    delay_s: float = 15.0
    rest_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("delay_s", "rest_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")


@dataclass(frozen=True)
class RoleDecision:
    """The split from now on, and why, in words. ``is_change``: it is another one than before."""

    split: Split
    reason: str
    is_change: bool = False


@dataclass(frozen=True)
class Costs:
    """Seconds of a request that it waits for its prompt to begin, and that decoding adds."""

    waiting: float
    decoding: float

    @property
    def total(self) -> float:
        return self.waiting + self.decoding

    def __str__(self) -> str:
        return f"{self.waiting:.2f} s of waiting and {self.decoding:.2f} s of decoding a request"


@dataclass(frozen=True)
class Pressure:
    """What all engines of a kind have to do together, so that it can be shared out among more or fewer.

    backlog_s: of prompts, at the engines for prompts, and held
    load:      of prompts that arrive; None: not known yet
    helping:   engines that serve whole requests beside the others; None: all that decode do
    pools, sequences: that running requests fill, in engines
    turnover_s: in which an answer is decoded
    """

    backlog_s: float
    load: Load | None
    helping: int | None
    pools: float
    sequences: float
    turnover_s: float

    def costs(self, prefill: int, decode: int) -> Costs:
        """With so many engines of each kind."""
        waiting = self.backlog_s / prefill
        if self.load is not None:
            servers = prefill + (decode if self.helping is None else self.helping)
            waiting = max(waiting, min(self.load.wait_s(servers), CLEAR_S * self.load.work / servers))
        short = max(self.pools, self.sequences) / decode - 1.0
        return Costs(waiting, (max(0.0, short) + min(1.0, self.sequences / decode)) * self.turnover_s)


class RoleBalance:
    """Call `decide` about once a second, with the split that was decided last, or that somebody has asked for since."""

    def __init__(self, policy: RolePolicy) -> None:
        self.policy = policy
        self._history = LoadHistory()
        self._now = self._changed = -math.inf
        self._split: Split | None = None
        self._towards: Side | None = None
        self._since = -math.inf  # that this side should have got an engine

    def decide(
        self,
        observed: Observation,
        replicas: Sequence[Replica],
        roles: Mapping[str, EngineRole],
        split: Split,
        now: float,
        fits: Callable[[str, EngineRole], bool] = lambda name, role: True,
    ) -> RoleDecision:
        """The split that should be.

        roles: of all ``replicas``, those that serve whole requests left out
        split: what was asked for, or decided last
        now:   seconds of any clock; if it goes back, no time has passed
        fits:  whether an engine has the tensor-parallel ranks for a role: one that has not does not change
        """
        now = self._now = max(now, self._now)
        if split != self._split:  # what was seen of another one counts no more
            self._split = split
            self._forget()
        there = split.of(len(replicas))
        held = self._held(observed, replicas, there)
        if held:
            self._forget()
            return RoleDecision(split, held)
        self._history.add(now, observed.prompts)
        pressure = _pressure(observed, roles, there, self._history)
        engines = len(replicas)
        decoding = there.decode or engines - there.prefill
        current = pressure.costs(there.prefill, decoding)
        options: dict[Side, Costs] = {}
        if decoding > 1 and _may_change(roles, _role_that_decodes(there), "prefill", replicas, fits):
            options["prefill"] = pressure.costs(there.prefill + 1, decoding - 1)
        if there.prefill > 1 and _may_change(roles, "prefill", _role_that_decodes(there), replicas, fits):
            options["decode"] = pressure.costs(there.prefill - 1, decoding + 1)
        better = min(options, key=lambda side: options[side].total, default=None)
        least = max(LEAST_GAIN_S, LEAST_SHARE * current.total / engines)
        if better is None or current.total - options[better].total < least:
            self._forget()
            return RoleDecision(split, f"as they are: {current}")
        return self._go_on(there, split, better, current, options[better])

    def _held(self, observed: Observation, replicas: Sequence[Replica], there: Split) -> str:
        """Why nothing can be decided; empty: it can."""
        if not there.prefill:
            return "no engine is for prompts alone"
        unready = sorted(each.name for each in replicas if each.state is not ReplicaState.RUNNING)
        if unready:
            return f"held: {', '.join(unready)} is starting or leaving"
        heard = {report.name for report in observed.engines if report.silent_s <= STATUS_TIMEOUT_S}
        silent = sorted(each.name for each in replicas if each.name not in heard)
        if silent:
            self._history.clear()
            return f"held: no report of {', '.join(silent)}"
        return "" if observed.token_s else "held: no engine has computed a prompt yet"

    def _forget(self) -> None:
        self._towards = None

    def _go_on(self, there: Split, split: Split, better: Side, current: Costs, then: Costs) -> RoleDecision:
        """A change would be worth it now: make it if it has been for long enough."""
        if self._towards != better:
            self._towards, self._since = better, self._now
        one = 1 if better == "prefill" else -1
        after = Split(there.prefill + one, there.decode - one if there.decode else 0)
        what = f"{_in_words(after)} would be better: {then}, instead of {current}"
        left_s = self._since + self.policy.delay_s - self._now
        rest_s = self._changed + self.policy.rest_s - self._now
        if left_s > 0 or rest_s > 0:
            return RoleDecision(split, f"{what}; not before {max(left_s, rest_s):.0f} s")
        self._changed = self._now
        self._forget()
        why = f"for {self.policy.delay_s:.0f} s that would have been better: {then}, instead of {current}"
        return RoleDecision(after, f"{_in_words(there)} -> {_in_words(after)}: {why}", is_change=True)


def _role_that_decodes(split: Split) -> EngineRole:
    return "decode" if split.decode else "mixed"


def _may_change(
    roles: Mapping[str, EngineRole],
    before: EngineRole,
    after: EngineRole,
    replicas: Sequence[Replica],
    fits: Callable[[str, EngineRole], bool],
) -> bool:
    """Whether any engine of one role has the ranks for another one."""
    return any(roles.get(each.name, "mixed") == before and fits(each.name, after) for each in replicas)


def _pressure(observed: Observation, roles: Mapping[str, EngineRole], split: Split, history: LoadHistory) -> Pressure:
    by_role: dict[EngineRole, list[EngineReport]] = {"mixed": [], "prefill": [], "decode": []}
    for report in observed.engines:
        by_role[roles.get(report.name, "mixed")].append(report)
    decoding = by_role[_role_that_decodes(split)]
    expected = history.expected(0.0)
    return Pressure(
        backlog_s=observed.held_s + sum(report.backlog_s for report in by_role["prefill"]),
        load=None if expected is None else load_of(expected, observed),
        helping=len(by_role["mixed"]) if split.decode else None,
        pools=sum(report.pool * report.crowding for report in decoding),
        sequences=sum(report.sequences * report.crowding for report in decoding),
        turnover_s=max((report.turnover_s for report in decoding), default=0.0),
    )


def _in_words(split: Split) -> str:
    return f"{split.prefill} for prompts, {split.decode} to decode" if split.decode else f"{split.prefill} for prompts"
