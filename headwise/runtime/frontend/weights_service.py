"""Has all engines of a deployment serve by the weights that clients ask for last."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headwise.errors import DeploymentError, HeadwiseError, InvalidRequestError, ModelError, OverloadedError
from headwise.runtime.config.model_card import Naming
from headwise.runtime.frontend.client_socket import Send
from headwise.runtime.frontend.fleet_view import FleetView
from headwise.runtime.frontend.routing import Router
from headwise.runtime.protocol.messages import EngineStatus, UpdateWeights, WantedWeights, WeightsUpdated, failure
from headwise.runtime.protocol.weights import Weights

MAX_ASKERS = 256
MOST_REFUSAL = 400
"""Characters of an engine's reason that a client is told."""
NOBODY_S = 10.0
"""Where no engine is there for so long, the next ones start with what is asked for."""


class Hashing(Protocol):
    """What hashes prompts: `headwise.runtime.frontend.preprocessor.Preprocessor`."""

    naming: Naming
    """What block hashes start from, with the weights and adapters that engines have."""


@dataclass
class _Asked:
    """Weights that clients wait for. is_had: an engine has them; askers: their connections, and numbers of the calls"""

    update: UpdateWeights
    since: float
    is_had: bool = False
    askers: set[tuple[bytes, int]] = field(default_factory=set)


class WeightsService:
    """Used by the scheduler's thread.

    Engines are told what is wanted in answer to every status that names other weights, so that who comes late, or has
    missed it, gets it then. Once one engine has new weights they are those of the deployment: its owner starts engines
    with them, also when this scheduler is no more, and engines with others get no requests. Weights that all engines
    refuse are forgotten.

    secret:    of the deployment
    timeout_s: longest wait of a client for engines to have them
    configured: ``adapters`` of the configuration
    """

    def __init__(
        self,
        secret: str,
        router: Router,
        fleet: FleetView,
        hashing: Hashing,
        clock: Callable[[], float],
        send: Send,
        timeout_s: float,
        configured: str = "",
    ) -> None:
        self._secret, self._router, self._fleet, self._hashing = secret, router, fleet, hashing
        self._clock, self._send, self._timeout_s = clock, send, timeout_s
        self._configured = configured
        self._weights: Weights | None = None  # the deployment's; None: not known yet
        self._naming: Naming | None = None  # of those: what the first engine that has them says
        self._early: dict[tuple[bytes, int], UpdateWeights] = {}  # what was asked for before they were known
        self._asked: _Asked | None = None
        self._reporters: dict[str, bytes] = {}  # by engine: its connection

    # ---- clients ----

    def update(self, identity: bytes, message: UpdateWeights) -> None:
        """A client asks for weights. If it does so again, it only waits on."""
        try:
            message.weights.check()
            if self._weights is None:
                self._check_room(self._early)
                self._early[identity, message.key] = message
            else:
                self._ask(identity, message, self._weights)
        except HeadwiseError as error:
            self._send(identity, failure(error, message.key))

    def _ask(self, identity: bytes, message: UpdateWeights, former: Weights) -> None:
        """former: the deployment's weights"""
        asked, wanted = self._asked, self._wanted_by(message, former)
        wanted.check()
        if wanted.version == former.version and wanted != former:
            raise InvalidRequestError(f"version {former.version!r:.80} names other weights: give another one")
        if asked is not None and asked.update.weights != wanted:
            raise OverloadedError(
                f"engines are about to have weights {asked.update.weights.version!r:.80}; ask again when they do"
            )
        if asked is None:
            asked = self._asked = _Asked(replace(message, weights=wanted), self._clock(), is_had=wanted == former)
            for reporter in self._reporters.values():  # need not wait for their next statuses
                self._send(reporter, WantedWeights(self._secret, wanted, message.keeps_running))
        self._check_room(asked.askers)
        asked.askers.add((identity, message.key))

    def _wanted_by(self, message: UpdateWeights, former: Weights) -> Weights:
        """All that a client asks for. Changes are made once, however often it asks for them."""
        if message.changes is not None:
            known = [former] if self._asked is None else [former, self._asked.update.weights]
            for each in known:
                if each.version == message.weights.version:
                    return each
        return message.weights.over(former, message.changes, self._configured)

    @staticmethod
    def _check_room(waiting: Collection[tuple[bytes, int]]) -> None:
        if len(waiting) >= MAX_ASKERS:
            raise OverloadedError(f"{MAX_ASKERS} clients wait for weights already; try again later")

    def forget(self, ended: frozenset[bytes]) -> None:
        """Connections have ended. What was asked over them counts all the same."""
        self._reporters = {name: each for name, each in self._reporters.items() if each not in ended}
        self._early = {asker: each for asker, each in self._early.items() if asker[0] not in ended}
        if self._asked is not None:
            self._asked.askers = {asker for asker in self._asked.askers if asker[0] not in ended}

    # ---- engines ----

    def heard(self, reporter: bytes, status: EngineStatus) -> EngineStatus:
        """Tell an engine what is wanted, if it says that it has other weights. Returns its status as the router may
        take it: who has other weights than the deployment gets no requests."""
        self._reporters[status.engine] = reporter
        checked = self._checked(status)
        wanted = self._wanted_of(status)
        if wanted is not None:
            self._send(reporter, wanted)
        return checked

    def _checked(self, status: EngineStatus) -> EngineStatus:
        asked, said = self._asked, status.weights
        if asked is not None and said == asked.update.weights and not asked.is_had:
            self._have(said)
        self._learn(said)
        if self._weights is None:
            return status
        if said != self._weights:
            return replace(status, work=replace(status.work, accepts=False))
        self._hash_like(status)
        return status

    def _have(self, weights: Weights) -> None:
        """An engine has what was asked for."""
        assert self._asked is not None
        self._asked.is_had = True
        self._weights, self._naming = weights, None
        self._fleet.want_weights(weights)

    def _learn(self, said: Weights | None) -> None:
        """What a scheduler before this one knew: from the owner, or where that is a new one, too, from an engine."""
        fleet = self._fleet.exchange.fleet
        if self._weights is None and fleet is not None:
            self._weights = said if fleet.weights is None else fleet.weights

    def _hash_like(self, status: EngineStatus) -> None:
        said = Naming(status.identity, status.adapters)
        if not said.identity or said == self._naming:
            return
        if self._naming is not None:
            self._router.note(
                f"{status.engine} has other weights than other engines, though they have one name, "
                f"{status.weights.version!r:.80}: have they changed since?"
            )
            return
        self._naming = self._hashing.naming = said

    def _wanted_of(self, status: EngineStatus) -> WantedWeights | None:
        keeps_running, wanted = False, self._weights
        if self._asked is not None:
            keeps_running, wanted = self._asked.update.keeps_running, self._asked.update.weights
        if wanted is None or wanted in (status.weights, status.refused):
            return None
        return WantedWeights(self._secret, wanted, keeps_running)

    # ---- what becomes of it ----

    def answer(self, now: float) -> None:
        """Tell clients what has become of what they asked for, if that is known by now."""
        self._learn(None)
        self._tell_owner()
        if self._early and self._weights is not None:
            early, self._early = self._early, {}
            for (identity, _), message in early.items():
                self.update(identity, message)
        asked = self._asked
        if asked is None:
            return
        engines = self._engines(now)
        has, refuses, lacks = self._sorted(engines, asked.update.weights)
        if not engines and not asked.is_had and (self._needs_none or now - asked.since > NOBODY_S):
            self._have(asked.update.weights)  # the next engine will tell whether it can
        elif lacks and now - asked.since > self._timeout_s:
            self._end(DeploymentError(f"{_names(lacks)} has not had the weights for {self._timeout_s:g} s"))
        elif refuses and not lacks:
            self._end(self._refused(has, refuses))
        elif asked.is_had and not lacks and self._is_with_owner:
            self._end(None, tuple(sorted(status.engine for status in has)))

    def _engines(self, now: float) -> list[EngineStatus]:
        """Those that serve, and will."""
        table = self._router.table
        statuses = [table.engines[table.rows[name]].status for name in self._router.alive(now)]
        return [status for status in statuses if not status.is_leaving]

    @staticmethod
    def _sorted(engines: list[EngineStatus], weights: Weights) -> tuple[list[EngineStatus], ...]:
        """Those that have weights, those that refuse them, and the others."""
        has = [status for status in engines if status.weights == weights]
        refuses = [status for status in engines if status not in has and status.refused == weights]
        return has, refuses, [status for status in engines if status not in has and status not in refuses]

    def _refused(self, has: list[EngineStatus], refuses: list[EngineStatus]) -> HeadwiseError:
        why = f"{_names(refuses)} cannot have these weights: {refuses[0].refusal[:MOST_REFUSAL]}"
        if not has:
            return ModelError(f"{why}; nothing has changed: mend that, and ask under another version")
        return ModelError(
            f"{why}; {_names(has)} has them, and the others get no requests until they have those of another version"
        )

    def _end(self, error: HeadwiseError | None, engines: tuple[str, ...] = ()) -> None:
        assert self._asked is not None
        asked, self._asked = self._asked, None
        version = asked.update.weights.version
        self._router.note(f"weights {version!r:.80}: {error or f'{len(engines)} engines have them'}")
        for identity, key in asked.askers:
            self._send(identity, WeightsUpdated(key, engines) if error is None else failure(error, key))

    # ---- the owner ----

    @property
    def _needs_none(self) -> bool:
        """Whether there are no engines because there are no requests."""
        return self._fleet.state.is_on_demand and not self._fleet.state.expected

    @property
    def _is_with_owner(self) -> bool:
        """Whether the owner of the engines starts others with the deployment's weights."""
        fleet = self._fleet.exchange.fleet
        return fleet is None or fleet.weights == self._weights

    def _tell_owner(self) -> None:
        """One that was started anew may not know, or know those before."""
        if self._weights is not None and not self._is_with_owner and not self._fleet.is_asking:
            self._fleet.want_weights(self._weights)

    def stats(self) -> dict[str, Any]:
        """Plain data."""
        asked = self._asked
        return {
            "version": "" if self._weights is None else self._weights.version,
            "model": "" if self._weights is None else self._weights.model,
            "adapters": [name for name, _ in self._hashing.naming.adapters],
            "asked": "" if asked is None else asked.update.weights.version,
        }


def _names(engines: list[EngineStatus]) -> str:
    names = sorted(status.engine for status in engines)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
