"""The engines' reports as columns of numbers, and the requests sent to them since (reservations)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.prompt_turns import NONE_BESIDE, Beside, Present, turn_of
from headwise.runtime.frontend.routing.base import (
    RESERVATION_S,
    STATUS_TIMEOUT_S,
    TYPICAL_OUTPUT,
    EngineRole,
    RoutedRequest,
    RouterOptions,
)
from headwise.runtime.frontend.routing.expected import EXPECTED_TOKENS, ExpectedBlocks
from headwise.runtime.protocol.messages import STATUS_INTERVAL_S, EngineLoad, EngineStatus
from headwise.runtime.protocol.request import owner_digest

IN_FLIGHT_S = 0.25
"""A status that comes so soon after the loss of an engine may have been sent before the loss."""

OVERDUE_S = 2.5 * STATUS_INTERVAL_S
"""An engine that a client reported as lost counts as lost when it has sent no status for so long."""

SUSPICION_NOTED_S = 60.0
"""At most one fault line per interval about clients that report an engine as lost while it still sends statuses."""

DEFAULT_SECONDS = {"prefill_token_s": 1e-3, "decode_step_s": 3e-2, "host_token_s": 1e-4, "storage_token_s": 4e-4}
"""Used until an engine has measured its own values. Only their proportions matter."""

UNMEASURED_PEER_GAIN = 0.5
"""Of a token's computing, what fetching it from another engine is taken to save until that was measured."""

SLOW = 1.5
"""Engines of a deployment are alike, but their measured seconds per prompt token vary: behind a long context a token
costs several times as much. So each engine counts with the median of all, unless it has been so many times slower or
faster than that for long. A single status changes little, even after a long silence."""
SLOWNESS_S = 60.0

Column = NDArray[np.float64]


@dataclass(eq=False)
class Engine:
    """One engine: its last status, and its state.

    slot:         its slot in `ExpectedBlocks`
    slowness:     its seconds per prompt token over the median of all, averaged over `SLOWNESS_S`; 0: not measured
    lost_at:      when it was found to be lost; None: not since the last status
    suspected_at: when a client reported it as lost; None: not since the last status
    suspicion_noted_at: when a fault line was last written about a client's wrong report
    began:        when the first status of its epoch came
    restarts:     epochs that followed the first one that was seen
    waiting:      prompts that wait there, as its last status tells
    coming:       those that are on their way, by the digests of their owners
    """

    status: EngineStatus
    slot: int
    slowness: float = 0.0
    lost_at: float | None = None
    suspected_at: float | None = None
    suspicion_noted_at: float = -math.inf
    began: float = -math.inf
    restarts: int = 0
    is_silent: bool = False
    is_given_up: bool = False
    waiting: Mapping[str, Beside] = field(default_factory=dict)
    coming: Present = field(default_factory=Present)

    def beside(self, owner: str) -> Beside:
        """What this owner has there, or on its way, by the digest of its name; empty: nobody's has nothing beside."""
        if not owner:
            return NONE_BESIDE
        here, coming = self.waiting.get(owner, NONE_BESIDE), self.coming.of(owner)
        return Beside(here.prompts + coming.prompts, here.tokens + coming.tokens)


@dataclass(frozen=True)
class _Reservation:
    """owner: by the digest of its name"""

    engine: str
    tokens: int
    until: float
    owner: str


@dataclass(frozen=True)
class Arrivals:
    """All requests that were sent to engines since the start: how many, the engine-seconds until their first tokens,
    without waits, and the sum of those seconds' squares. A request that is sent again counts again: it is work again.
    """

    requests: int = 0
    seconds: float = 0.0
    squares: float = 0.0

    def plus(self, seconds: float) -> Arrivals:
        """With one more, of so many engine-seconds."""
        return Arrivals(self.requests + 1, self.seconds + seconds, self.squares + seconds**2)


class EngineTable:
    """Engines by row: ``names[row]``, ``engines[row]``, and one value a row in each column.

    arrivals: all requests; ``prompts``: those of them whose prompts engines compute that do not only decode

    heard:    when the last status came
    ready_at: when all prompts that were sent there so far will be computed
    reserved: requests routed there that no status has named yet
    room:     how many more requests may wait there, reserved ones included; -inf if it accepts none
    requests: running and waiting
    waiting:  of these, those that wait
    prefill_token_s: see `SLOW`
    host_gain_s, storage_gain_s, peer_gain_s: seconds by which loading a token from the host, from storage, or from
              another engine is faster than computing it, as measured; the median of the others where an engine has
              measured nothing
    lends:    1 if others may ask the engine for blocks, else 0
    pace:     share by which running requests slow down the computing of prompts
    turnover_s: seconds in which all running requests end
    prefills, decodes: 1 for engines that only compute prompts for others, or only decode what others computed, else 0
    used, used_per_token: shares of the pool that are held, and that one more token will hold; 0 where the pool is not
              known
    """

    heard: Column
    ready_at: Column
    reserved: Column
    room: Column
    requests: Column
    waiting: Column
    prefill_token_s: Column
    host_gain_s: Column
    storage_gain_s: Column
    peer_gain_s: Column
    lends: Column
    pace: Column
    turnover_s: Column
    prefills: Column
    decodes: Column
    used: Column
    used_per_token: Column

    _COLUMNS = (
        *("heard", "ready_at", "reserved", "room", "requests", "waiting", "prefill_token_s", "host_gain_s"),
        *(
            "storage_gain_s",
            "peer_gain_s",
            "lends",
            "pace",
            "turnover_s",
            "prefills",
            "decodes",
            "used",
            "used_per_token",
        ),
    )

    def __init__(self, options: RouterOptions) -> None:
        self.names: list[str] = []
        self.engines: list[Engine] = []
        self.rows: dict[str, int] = {}
        self.arrivals = self.prompts = Arrivals()
        self.expected = ExpectedBlocks(max(1, EXPECTED_TOKENS // options.block_size))
        self._options = options
        self._roles: Mapping[str, EngineRole] = {}
        self._slots: list[int] = []  # by row
        self._reservations: dict[str, _Reservation] = {}  # in the order in which they expire
        for column in self._COLUMNS:
            setattr(self, column, np.zeros(0))

    def __len__(self) -> int:
        return len(self.names)

    # ---- statuses ----

    def update(self, status: EngineStatus, now: float) -> list[str]:
        """Take in a status, and return the faults it tells of, in words. A status of an earlier epoch is ignored."""
        row = self.rows.get(status.engine)
        if row is None:
            row = self._add(status, now)
        engine, faults = self.engines[row], []
        silent_s = now - float(self.heard[row])
        if status.epoch < engine.status.epoch and silent_s <= STATUS_TIMEOUT_S:
            return []  # from the process that was replaced
        if status.epoch != engine.status.epoch:
            faults.append(f"{status.engine} came back with an empty cache (epoch {status.epoch})")
            self.forget_cache(row)
            self._drop_reservations(status.engine)
            engine.lost_at, engine.began, engine.restarts = None, now, engine.restarts + 1
        elif engine.is_silent:
            faults.append(f"{status.engine} reports again after {silent_s:.1f} s")
        if status.work.device_resets != engine.status.work.device_resets:
            self.forget_cache(row)
        engine.status, engine.is_silent, engine.is_given_up = status, False, False
        told = () if status.work.prompts is None else status.work.prompts.beside
        engine.waiting = {owner: Beside(*counts) for owner, *counts in told}
        engine.suspected_at = None
        if engine.lost_at is not None and now - engine.lost_at > IN_FLIGHT_S:
            engine.lost_at = None
        self._learn_slowness(engine, min(silent_s, STATUS_TIMEOUT_S) / SLOWNESS_S)
        self.heard[row] = now
        self._confirm(row, status)
        self._derive(row)
        unconfirmed = sum(each.tokens for each in self._reservations.values() if each.engine == status.engine)
        self.ready_at[row] = now + (status.work.queued_tokens + unconfirmed) * self.prefill_token_s[row]
        return [*faults, *(f"{status.engine}: {fault}" for fault in status.faults)]

    def _confirm(self, row: int, status: EngineStatus) -> None:
        """End the reservations of the requests that this status counts."""
        for request_id in (each for name in status.received for each in (name, prefill_of(name))):
            held = self._reservations.get(request_id)
            if held is not None and held.engine == status.engine:
                del self._reservations[request_id]
                self._arrived(held)

    def _derive(self, row: int) -> None:
        """Compute the columns that depend on statuses only."""
        engine, options = self.engines[row], self._options
        work = engine.status.work
        takes = work.accepts and engine.lost_at is None and not engine.status.is_leaving
        self.room[row] = options.engine_queue - work.waiting if takes else -np.inf
        self.lends[row] = takes
        self.requests[row] = max(work.running + work.waiting, engine.status.load)
        self.waiting[row] = work.waiting
        self.used[row] = work.used_blocks / work.total_blocks if work.total_blocks else 0.0
        self.used_per_token[row] = options.blocks_per_token / work.total_blocks if work.total_blocks else 0.0
        slowness = np.array([_outlying(engine.slowness) for engine in self.engines])
        self.prefill_token_s[:] = slowness * self._median("prefill_token_s")
        decode_step_s = slowness * self._median("decode_step_s")
        running = np.array([engine.status.work.running > 0 for engine in self.engines])
        self.pace[:] = running * decode_step_s / (options.step_tokens * self.prefill_token_s)
        host_token_s = self._own_or_median("host_token_s")
        self.host_gain_s[:] = self.prefill_token_s - host_token_s
        self.storage_gain_s[:] = self.host_gain_s - self._own_or_median("storage_token_s")
        self.peer_gain_s[:] = self._peer_gain_s()
        self.turnover_s[:] = decode_step_s * TYPICAL_OUTPUT

    def _peer_gain_s(self) -> Column:
        """Engines ask each other only when told to: as long as none has measured that, it is taken for worth it."""
        if not any(engine.status.work.peer_token_s > 0 for engine in self.engines):
            return self.prefill_token_s * UNMEASURED_PEER_GAIN
        return self.host_gain_s - self._own_or_median("peer_token_s")

    def _own_or_median(self, name: str) -> Column:
        own = np.array([getattr(engine.status.work, name) for engine in self.engines], np.float64)
        return np.where(own > 0, own, self._median(name))

    def _median(self, name: str) -> float:
        """The median of the measured values; the default where no engine has measured."""
        measured = sorted(value for engine in self.engines if (value := getattr(engine.status.work, name)) > 0)
        return (
            (measured[len(measured) // 2] + measured[(len(measured) - 1) // 2]) / 2
            if measured
            else DEFAULT_SECONDS[name]
        )

    def _learn_slowness(self, engine: Engine, weight: float) -> None:
        own = engine.status.work.prefill_token_s
        if own > 0:
            ratio = own / self._median("prefill_token_s")
            engine.slowness += (weight if engine.slowness else 1.0) * (ratio - engine.slowness)

    def _add(self, status: EngineStatus, now: float) -> int:
        for column in self._COLUMNS:
            setattr(self, column, np.append(getattr(self, column), 0.0))
        row = self.rows[status.engine] = len(self.names)
        self.names.append(status.engine)
        self.engines.append(Engine(status, self.expected.take_slot()))
        self._slots.append(self.engines[row].slot)
        self.heard[row] = now
        self._apply_roles()
        return row

    def remove(self, name: str) -> None:
        """Forget an engine."""
        self._drop_reservations(name)
        row = self.rows[name]
        self.expected.free_slot(self.engines[row].slot)
        for column in self._COLUMNS:
            setattr(self, column, np.delete(getattr(self, column), row))
        del self.names[row], self.engines[row]
        self.rows = {name: row for row, name in enumerate(self.names)}
        del self._slots[row]

    # ---- roles ----

    def set_roles(self, roles: Mapping[str, EngineRole]) -> None:
        """What engines are for from now on; those that are not named serve whole requests."""
        if roles != self._roles:
            self._roles = dict(roles)
            self._apply_roles()

    def _apply_roles(self) -> None:
        roles = [self._roles.get(name, "mixed") for name in self.names]
        self.prefills[:] = [role == "prefill" for role in roles]
        self.decodes[:] = [role == "decode" for role in roles]

    @property
    def has_roles(self) -> bool:
        return bool(self._roles)

    # ---- liveness ----

    def alive(self, now: float) -> NDArray[np.bool_]:
        """Which engines have reported recently."""
        return self.heard >= now - STATUS_TIMEOUT_S

    def mark_lost(self, endpoint: str, now: float) -> list[str]:
        """The engine at this endpoint is lost: it gets nothing until it reports again. Returns the names newly lost."""
        news = []
        for row, engine in enumerate(self.engines):
            if engine.status.endpoint == endpoint:
                if engine.lost_at is None:
                    news.append(self.names[row])
                engine.lost_at = now
                self.room[row], self.lends[row] = -np.inf, 0
        return news

    def suspect(self, endpoint: str, now: float) -> list[str]:
        """A client reports the engine at this endpoint as lost: it counts as lost unless it sends statuses. Returns the
        names of engines that do, if no fault line was written about that recently."""
        wrong = []
        for row, engine in enumerate(self.engines):
            if engine.status.endpoint == endpoint and not engine.status.is_leaving:  # it sends its requests away
                engine.suspected_at = now
                self.lends[row] = 0
                if now - self.heard[row] <= OVERDUE_S and now - engine.suspicion_noted_at > SUSPICION_NOTED_S:
                    engine.suspicion_noted_at = now
                    wrong.append(self.names[row])
        return wrong

    def overdue(self, now: float) -> list[str]:
        """The endpoints of the engines that clients reported as lost and that have sent no status in time."""
        return [
            engine.status.endpoint
            for engine, heard in zip(self.engines, self.heard, strict=True)
            if engine.suspected_at is not None and engine.lost_at is None and now - heard > OVERDUE_S
        ]

    def reported_since(self, then: float) -> NDArray[np.bool_]:
        """Which engines have sent a status since then."""
        began = np.array([engine.began for engine in self.engines], np.float64)
        return (self.heard > then + IN_FLIGHT_S) | (began > then)

    # ---- expected cache contents ----

    def expect(self, path: Sequence[bytes], row: int, now: float) -> None:
        """The blocks of a path will be on the device of this row's engine."""
        self.expected.add(path, self.engines[row].slot, now)

    def expected_depths(self, path: Sequence[bytes]) -> Column | None:
        """How many leading blocks of the path each engine is expected to have; None: none has any."""
        found = self.expected.depths(path)
        if not found:
            return None
        return np.fromiter(map(found.get, self._slots, repeat(0)), np.float64, len(self))

    def forget_cache(self, row: int) -> None:
        """This row's engine has lost its cache: expect no blocks there any more."""
        engine = self.engines[row]
        self.expected.free_slot(engine.slot)
        engine.slot = self._slots[row] = self.expected.take_slot()

    # ---- reservations ----

    def backlog(self, now: float) -> Column:
        """Seconds of computing before a request that arrives now can start."""
        return np.maximum(self.ready_at - now, 0.0)

    def reserve(
        self, request_id: str, row: int, tokens: int, now: float, is_arrival: bool = True, owner: str = ""
    ) -> None:
        """Count a request with ``tokens`` to compute against an engine until its status names it.

        is_arrival: False: it is reserved elsewhere, too, and counts there
        owner: of `GenerateRequest`
        """
        self._release(request_id)
        digest = owner_digest(owner) if owner else ""
        self._reservations[request_id] = _Reservation(self.names[row], tokens, now + RESERVATION_S, digest)
        self.engines[row].coming.add(digest, tokens)
        self.reserved[row] += 1
        own_s = float(tokens * self.prefill_token_s[row])
        self.ready_at[row] = max(self.ready_at[row], now) + own_s
        if is_arrival:
            slowed_s = own_s * (1.0 + float(self.pace[row]))
            self.arrivals = self.arrivals.plus(slowed_s)
            if not self.decodes[row]:
                self.prompts = self.prompts.plus(slowed_s)

    def release(self, request_id: str) -> None:
        """The request will not come: end its reservations. Unknown ids are ignored."""
        self._release(request_id)
        self._release(prefill_of(request_id))

    def _release(self, request_id: str) -> None:
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None:
            row = self._arrived(reservation)
            self.ready_at[row] -= reservation.tokens * self.prefill_token_s[row]

    def _arrived(self, reservation: _Reservation) -> int:
        """It is none any more. Returns its engine's row."""
        row = self.rows[reservation.engine]
        self.reserved[row] -= 1
        self.engines[row].coming.remove(reservation.owner, reservation.tokens)
        return row

    def expire(self, now: float) -> None:
        """End reservations that no status has confirmed in time, and forget blocks expected long ago."""
        while self._reservations:
            request_id, first = next(iter(self._reservations.items()))
            if first.until > now:
                break
            self._release(request_id)
        self.expected.expire(now)

    def _drop_reservations(self, name: str) -> None:
        for request_id in [each for each, held in self._reservations.items() if held.engine == name]:
            self._release(request_id)

    @property
    def num_reserved(self) -> int:
        return len(self._reservations)

    # ---- places ----

    def places(self, request: RoutedRequest) -> Column:
        """How many more requests each engine takes while one of them is this one: one that has no room left has places
        for those that would go before most of what waits there. Not more than 0 where there is none."""
        left = self.room - self.reserved
        if not len(left) or left.min() > 0.0:
            return left
        owner = owner_digest(request.owner) if request.owner else ""
        ahead = [full and self._goes_before_most(request, owner, row) for row, full in enumerate(left <= 0)]
        return left + np.array(ahead, np.float64) * self._options.places_ahead

    def _goes_before_most(self, request: RoutedRequest, owner: str, row: int) -> bool:
        """Whether that is the request's place in the order in which this row's engine begins prompts."""
        engine, turn = self.engines[row], 0.0
        waiting = engine.status.work.prompts
        if waiting is None:
            return False
        if self._options.fair_prompts:
            turn = turn_of(0.0, request.lacking, engine.beside(owner), request.share)
        return (request.priority, turn) < (waiting.priority, waiting.turn)

    # ---- statistics ----

    def stats(self, now: float) -> dict[str, dict[str, Any]]:
        """Each engine's own statistics and its state, as plain data, by name."""
        backlog = self.backlog(now)
        return {
            name: {
                **self.engines[row].status.stats,
                "work": _told(self.engines[row].status.work),
                "epoch": self.engines[row].status.epoch,
                "restarts": self.engines[row].restarts,
                "role": self._roles.get(name, "mixed"),
                "is_leaving": self.engines[row].status.is_leaving,
                "tp_size": self.engines[row].status.tp_size,
                "endpoint": self.engines[row].status.endpoint,
                "silent_s": round(now - float(self.heard[row]), 3),
                "reserved": int(self.reserved[row]),
                "backlog_s": round(float(backlog[row]), 6),
            }
            for name, row in sorted(self.rows.items())
        }


def prefill_of(request_id: str) -> str:
    """The name under which a request's prompt is reserved with the engine that computes it for another one."""
    return f"{request_id}/prefill"


def _told(work: EngineLoad) -> dict[str, Any]:
    """Who has how much waiting is nobody else's business."""
    return {name: value for name, value in asdict(work).items() if name != "prompts"}


def _outlying(slowness: float) -> float:
    """1 for an engine that is as fast as the others, or not measured."""
    return 1.0 if not slowness or 1 / SLOW <= slowness <= SLOW else slowness
