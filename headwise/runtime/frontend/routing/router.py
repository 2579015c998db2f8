"""Selects the engine for a request and reserves a place there, in one step."""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import OverloadedError
from headwise.runtime.frontend.routing import apart, peers
from headwise.runtime.frontend.routing.base import STATUS_TIMEOUT_S, Choice, Matches, RoutedRequest, RouterOptions
from headwise.runtime.frontend.routing.costs import Estimate, sources
from headwise.runtime.frontend.routing.engines import EngineTable, prefill_of
from headwise.runtime.frontend.routing.policies import make_policy
from headwise.runtime.protocol.messages import EngineStatus
from headwise.runtime.protocol.request import PeerHint

TIE = 0.01
"""Costs within this share of the least count as equal: one of those engines is drawn at random."""

SESSION_TIE, SESSION_TIE_S = 1.5, 0.2
"""A session stays on its engine while that costs at most so many times the least cost plus so many seconds."""

TIERS = ("device", "host", "peer", "storage")
"""Where a prefix comes from; ``peer`` is another engine."""

MAX_SESSIONS = 100_000
MAX_FAULTS = 200


@dataclass(frozen=True)
class Silence:
    """An engine that stopped reporting, the epoch of its last status, and whether it must now be replaced."""

    engine: str
    epoch: int
    for_s: float
    is_given_up: bool


class Router:
    """``now`` is in seconds of one clock; ``rng`` breaks ties; ``unix_clock`` dates the faults."""

    def __init__(
        self,
        options: RouterOptions,
        rng: random.Random | None = None,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.options = options
        self.table = EngineTable(options)
        self._policy = make_policy(options)
        self._rng = rng or random.Random()
        self._unix_clock = unix_clock
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._faults: deque[tuple[float, str]] = deque(maxlen=MAX_FAULTS)
        self._decisions: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    @property
    def uses_index(self) -> bool:
        """Whether the policy uses the index's matches."""
        return self._policy.uses_index

    # ---- engines ----

    def update(self, status: EngineStatus, now: float) -> None:
        """Take in an engine's status."""
        for fault in self.table.update(status, now):
            self.note(fault)

    def mark_lost(self, endpoint: str, now: float, how: str = "was lost by a client") -> None:
        """The engine at ``endpoint`` is lost: it gets nothing until its next status."""
        for name in self.table.mark_lost(endpoint, now):
            self.note(f"{name} {how}")

    def disconnected(self, endpoint: str, now: float) -> None:
        """The engine at ``endpoint`` has lost its connection here: it is lost, or has left as it said it would."""
        table = self.table
        for name in [name for name, row in table.rows.items() if table.engines[row].status.endpoint == endpoint]:
            if table.engines[table.rows[name]].status.is_leaving:
                table.remove(name)
        self.mark_lost(endpoint, now, "has lost its connection to the scheduler")

    def suspect(self, endpoint: str, now: float) -> None:
        """A client reports the engine at ``endpoint`` as lost. It may be the only client that cannot reach it, so the
        engine's own reports decide: it is lost as soon as one is overdue."""
        for name in self.table.suspect(endpoint, now):
            self.note(f"{name} was lost by a client, but reports: can all clients reach {endpoint}?")
        self._lose_overdue(now)

    def _lose_overdue(self, now: float) -> None:
        for endpoint in self.table.overdue(now):
            self.mark_lost(endpoint, now)

    def watch(self, now: float) -> list[Silence]:
        """Engines that have just become silent, or have just been silent for long enough to be replaced: each once per
        silence. Call it a few times a second."""
        table = self.table
        table.expire(now)
        self._lose_overdue(now)
        silences = []
        for name in list(table.names):
            engine, for_s = table.engines[table.rows[name]], now - float(table.heard[table.rows[name]])
            if for_s > STATUS_TIMEOUT_S and not engine.is_silent:
                engine.is_silent = True
                silences.append(Silence(name, engine.status.epoch, for_s, is_given_up=False))
                self.note(f"{name} is silent: it gets no requests")
            if for_s > self.options.engine_timeout_s and not engine.is_given_up:
                engine.is_given_up = True
                silences.append(Silence(name, engine.status.epoch, for_s, is_given_up=True))
                self.note(f"{name} has been silent for {for_s:.0f} s: it is to be replaced")
            if for_s > self.options.forget_s:
                table.remove(name)
                self.note(f"{name} is not expected back")
        return silences

    @property
    def num_engines(self) -> int:
        """Engines that have reported and are not forgotten; silent ones are expected back."""
        return len(self.table)

    def alive(self, now: float) -> list[str]:
        """The names of the engines that have reported recently."""
        return [self.table.names[row] for row in np.flatnonzero(self.table.alive(now))]

    def room(self, now: float) -> int:
        """How many more requests engines can take now."""
        table = self.table
        return int(np.maximum(table.room - table.reserved, 0.0)[table.alive(now)].sum())

    def places(self, request: RoutedRequest, now: float) -> int:
        """How many more requests engines can take now while one of them is this one."""
        return int(np.maximum(self.table.places(request), 0.0)[self.table.alive(now)].sum())

    def describe(self, now: float) -> str:
        """How many engines can take requests, and why others cannot."""
        table = self.table
        alive = table.alive(now)
        lost = np.array([engine.lost_at is not None for engine in table.engines], bool)
        asleep = np.array([not engine.status.work.accepts for engine in table.engines], bool)
        full = alive & ~lost & ~asleep & (table.reserved >= table.room)
        return (
            f"of {len(table)} engines {int(full.sum())} are full (engine_queue {self.options.engine_queue}), "
            f"{int((~alive | lost).sum())} are silent or lost, {int((alive & ~lost & asleep).sum())} take no requests"
        )

    def endpoints(self, now: float, replicas: int) -> dict[str, str]:
        """Where to reach all ``replicas`` engines, by name, without those that are leaving; raises `OverloadedError`
        unless all of them live."""
        table = self.table
        statuses = [table.engines[table.rows[name]].status for name in self.alive(now)]
        alive = [status for status in statuses if not status.is_leaving]
        if len(alive) < replicas:
            raise OverloadedError(
                f"{len(alive)} of {replicas} engines are ready: the others are starting, or were lost; try again later"
            )
        return {status.engine: status.endpoint for status in sorted(alive, key=lambda status: status.engine)}

    # ---- requests ----

    def select_and_reserve(self, request: RoutedRequest, matches: Matches | None, now: float) -> Choice | None:
        """Choose the engine for a request, and count its cost there from now on; None if no engine can take it now.

        matches: the index's answer for the request's blocks; None: it did not answer

        An engine can take it if it has reported in the last `STATUS_TIMEOUT_S`, was not lost since, accepts requests,
        and has fewer than ``engine_queue`` waiting, those on their way included; or a few more, if the request would go
        before most of them.
        """
        rows = self._able(request, now)
        if not len(rows):
            return None
        estimated = self._policy.estimate(self.table, request, matches, now)
        plan = None
        if self.table.has_roles:
            if self._policy.uses_index and self.options.peer_loads:
                plan = apart.plan(self.table, request, estimated, rows, self.options)
            rows = apart.rows_that_decode(self.table, rows)
        if plan is not None:
            estimated = replace(estimated, cost=plan.cost)
        row, reason = self._select(request, estimated, rows)
        if plan is not None and self.table.decodes[row]:
            choice = self._choice_apart(row, request, plan, estimated)
            self.table.reserve(prefill_of(request.request_id), plan.row, plan.computed, now, owner=request.owner)
            self.table.expect(request.hashes, plan.row, now)
        else:
            choice = self._choice(row, reason, estimated)
        computed = request.num_tokens - choice.device - choice.host - choice.peer - choice.storage
        is_arrival = choice.reason != "apart"
        self.table.reserve(request.request_id, row, computed, now, is_arrival, request.owner)
        self.table.expect(request.hashes, row, now)
        self._policy.note_selected(row)
        self._remember(request, choice)
        return choice

    def can_take(self, request: RoutedRequest, now: float) -> bool:
        """Whether any engine can take a request now."""
        return bool(len(self._able(request, now)))

    def release(self, request_id: str) -> None:
        """The request will not come; unknown ids are ignored."""
        self.table.release(request_id)

    def _able(self, request: RoutedRequest, now: float) -> NDArray[np.intp]:
        table = self.table
        able = table.alive(now) & (table.places(request) > 0)
        if request.exclude:
            others = able & np.array([engine.status.endpoint != request.exclude for engine in table.engines], bool)
            able = others if others.any() else able & table.reported_since(request.lost_at)
        return np.flatnonzero(able)

    def _select(self, request: RoutedRequest, estimated: Estimate, rows: NDArray[np.intp]) -> tuple[int, str]:
        costs = estimated.cost[rows]
        least = float(costs.min())
        equal = rows[costs <= least * (1.0 + TIE)]
        row = int(equal[0] if len(equal) == 1 else equal[self._rng.randrange(len(equal))])
        if request.session:
            held = self.table.rows.get(self._sessions.get(request.session, ""))
            if held is not None and held in rows and estimated.cost[held] <= SESSION_TIE * least + SESSION_TIE_S:
                return held, "session"
        if request.exclude:
            return row, "rerouted"
        if not self._policy.uses_index:
            return row, self.options.policy
        served = estimated.served[:, -1]
        if served[row] < served[rows].max():
            return row, "spread"
        return row, "hit" if served[row] else "no_hit"

    def _choice(self, row: int, reason: str, estimated: Estimate) -> Choice:
        status, used = self.table.engines[row].status, sources(self.table, row, estimated)
        hint = None
        if used.peer and estimated.lent is not None:
            hint = peers.hint(self.table, row, estimated.lent)
        cost = float(estimated.cost[row])
        return Choice(
            status.engine,
            status.endpoint,
            cost,
            reason,
            device=used.device,
            host=used.host,
            peer=used.peer,
            storage=used.storage,
            hint=hint,
        )

    def _choice_apart(self, row: int, request: RoutedRequest, plan: apart.Apart, estimated: Estimate) -> Choice:
        status, other = self.table.engines[row].status, self.table.engines[plan.row].status
        device, with_host = (min(int(served), plan.tokens) for served in estimated.served[row, :2])
        fetched = plan.tokens - with_host
        return Choice(
            status.engine,
            status.endpoint,
            float(plan.cost[row]),
            "apart",
            device=device,
            host=with_host - device,
            peer=fetched,
            prefilled=min(plan.computed, fetched),
            hint=PeerHint(other.engine, other.epoch, plan.tokens, prefills=True),
        )

    def _remember(self, request: RoutedRequest, choice: Choice) -> None:
        self._decisions[choice.reason] += 1
        tokens = self._tokens
        for tier in TIERS:
            tokens[tier] += getattr(choice, tier)
        tokens["peer"] -= choice.prefilled
        tokens["prefilled"] += choice.prefilled
        tokens["all"] += request.num_tokens
        if request.session:
            self._sessions[request.session] = choice.engine
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    # ---- statistics ----

    def note(self, fault: str) -> None:
        """Add a fault to `faults`."""
        self._faults.append((round(self._unix_clock(), 3), fault))

    def faults(self) -> Sequence[tuple[float, str]]:
        """The last faults, oldest first: Unix time and text."""
        return tuple(self._faults)

    def stats(self) -> dict[str, Any]:
        """Plain data: decisions by reason, and the tokens that were expected from each tier."""
        return {
            "policy": self.options.policy,
            "decisions": dict(self._decisions),
            "expected_tokens": {key: self._tokens[key] for key in (*TIERS, "prefilled", "all")},
            "reserved": self.table.num_reserved,
            "sessions": len(self._sessions),
        }
