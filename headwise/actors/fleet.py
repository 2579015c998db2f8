"""The engines of a deployment: how many there are, which go, and which of them hang."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray

from headwise.actors import placement, rebalance
from headwise.actors.first_start import EngineStart
from headwise.actors.names import SCHEDULER, STORE
from headwise.actors.notice import drain_time
from headwise.actors.restarts import Phase
from headwise.actors.role import Role
from headwise.actors.store_worth import StoreWorth
from headwise.actors.supervisor import Supervisor
from headwise.errors import first_line
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.frontend.routing.base import EngineRole
from headwise.runtime.frontend.routing.engines import Arrivals
from headwise.runtime.frontend.scaling import (
    Decision,
    FleetState,
    Observation,
    RankSizes,
    Replica,
    ReplicaSet,
    ReplicaState,
    RoleBalance,
    RolePolicy,
    ScalingPolicy,
    SchedulerNews,
    Split,
    Wish,
    Wishes,
    deal,
)
from headwise.runtime.frontend.scaling.leaving import choose_leaving, number_of
from headwise.runtime.protocol.weights import Weights

log = logging.getLogger(__name__)

_ASK_S = 1.0
_CLOSING = Decision(0, "the deployment is being stopped")
_REBALANCE_S = 5.0
"""How often nodes are looked at that may be better for an engine."""


class Fleet:
    """Does what the controller (`ReplicaSet`) says, by what the scheduler observes and clients ask for: starts engines,
    drains them, and replaces those of which the scheduler hears nothing.

    While the scheduler is away nothing is decided: the number holds. `look` is called on the supervisor's thread.

    make_role: makes the role of an engine, by its name and its ranks
    number:    of engines at the start, within what the policy allows; None: as configured
    """

    def __init__(
        self,
        config: EngineConfig,
        supervisor: Supervisor,
        make_role: Callable[[str, int], Role],
        number: int | None = None,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._make_role = make_role
        policy = policy_of(config)
        number = config.first_replicas if number is None else number
        self._controller = ReplicaSet(policy, min(max(number, policy.min_replicas), policy.max_replicas))
        self._store = StoreWorth(lambda: supervisor.serving(STORE))
        self._epochs = itertools.count(1)
        self._epoch: dict[str, int] = {}  # of each engine: one that comes back under an old name is another one
        self._sizes = RankSizes.of(config)
        self._ranks: dict[str, int] = {}  # of each engine
        self._decision: Decision | None = None
        self._wishes = Wishes(self._controller, Split(config.prefill_replicas, config.decode_replicas))
        self._roles: dict[str, EngineRole] = {}
        self._balance = RoleBalance(RolePolicy(config.upscale_delay_s)) if config.elastic_roles else None
        self._balanced = self._last_change = ""
        self._answer: Any = None  # of the scheduler: the call that is under way
        self._ask_at = self._now = 0.0
        self._serial = 0
        self._rebalancer = rebalance.Rebalancer()
        self._rebalance_at = 0.0 if rebalance.is_wanted(config) else math.inf
        self._moved = self._resized = ""
        self._has_begun = self._is_closing = False

    def adopt(self, role: Role, ranks: int, is_leaving: bool) -> None:
        """Take over an engine of the owner before this one. Before the supervisor's thread is started."""
        self._ranks[role.name] = ranks
        if is_leaving:
            role.leave_by = self._supervisor.now() + self._config.drain_timeout_s + self._config.engine_timeout_s
        self._epoch[role.name] = next(self._epochs)
        self._supervisor.add(role)

    def resume(self, wish: Wish | None) -> None:
        """What clients asked for last still holds; None: nobody knows what that was."""
        self._wishes.resume(wish)

    @property
    def weights(self) -> Weights | None:
        """That engines are to start with; None: not known yet."""
        return self._wishes.weights

    def close(self) -> None:
        """Have all engines drained, and start no others. Callable from any thread."""
        self._is_closing = True

    @property
    def engines(self) -> list[Role]:
        """By their numbers. The supervisor has other roles, too."""
        engines = [role for name, role in self._supervisor.roles.items() if name in self._epoch]
        return sorted(engines, key=lambda role: number_of(role.name))

    def starts(self) -> list[EngineStart] | None:
        """How far each engine is; None: nothing was begun yet. Callable from any thread."""
        if not self._has_begun:
            return None
        return [
            EngineStart(role.name, role.life.phase, role.life.waited_s(self._now), role.error) for role in self.engines
        ]

    def look(self, now: float) -> None:
        """Start the first engines; later, ask the scheduler when it is time, and act on what it says."""
        self._now = now
        if not self._has_begun:
            self._decide(Observation((), Arrivals()), now)
            self._has_begun = True
        news = self._ask(now)
        if self._is_closing:
            self._close(now)
            return
        if news is None:
            return
        self._replace_silent(news.silent, now)
        has_new_wish = news.wish is not None and self._wishes.take(news.wish)
        if news.observed is not None and (has_new_wish or news.serial != self._serial):
            self._serial = news.serial
            self._decide(news.observed, now)
        if has_new_wish:
            self._ask_at = now  # somebody waits for the answer

    # ---- the scheduler ----

    def _ask(self, now: float) -> SchedulerNews | None:
        """Tell the scheduler how the engines are, now and then; its news, once they have come."""
        if self._answer is None:
            scheduler = self._supervisor.serving(SCHEDULER)
            if scheduler is not None and now >= self._ask_at:
                self._answer = scheduler.exchange.options(enable_task_events=False).remote(self._state())
                self._ask_at = now + _ASK_S
            return None
        if not ray.wait([self._answer], timeout=0)[0]:
            return None
        question, self._answer = self._answer, None
        with contextlib.suppress(ray.exceptions.RayError):  # the scheduler has ended, which is noticed elsewhere
            news: SchedulerNews = ray.get(question)
            return news
        return None

    def _state(self) -> FleetState:
        assert self._decision is not None
        engines, split = self.engines, self._wishes.split
        self._deal()
        apart = f"; {split.prefill} for prompts, {split.decode} to decode" if split.total else ""
        return FleetState(
            number=self._decision.number,
            reason=self._decision.reason + self._moved + self._resized + apart + self._balanced,
            replicas={role.name: _in_words(role) for role in engines},
            expected=sum(not role.is_leaving and role.life.phase is not Phase.PLACING for role in engines),
            is_awaited=self._controller.may_grow_from_nothing,
            is_on_demand=self._controller.is_on_demand and not self._is_closing,
            is_closing=self._is_closing,
            wish=self._wishes.last,
            refusal=self._wishes.refusal,
            roles=dict(self._roles),
            weights=self.weights,
        )

    def _deal(self) -> None:
        """Say what each engine is for. What has the wrong ranks for it does it all the same."""
        staying = [role.name for role in self.engines if not role.is_leaving]
        self._roles = deal(staying, self._wishes.split, self._roles, self._fits)

    def _fits(self, name: str, role: EngineRole) -> bool:
        return self._ranks[name] == self._sizes.of_role(role)

    def _balance_roles(self, observed: Observation, now: float) -> None:
        """Have an engine do what there is too much of, if it is time."""
        if self._balance is None or self._is_closing:
            return
        self._deal()
        decision = self._balance.decide(observed, self._replicas(), self._roles, self._wishes.split, now, self._fits)
        self._wishes.split = decision.split
        if decision.is_change:
            log.info("roles: %s", decision.reason)
            self._last_change = decision.reason
            self._ask_at = now  # the scheduler is to hear of it
        before = f"; changed last: {self._last_change}" if self._last_change and not decision.is_change else ""
        self._balanced = f" ({decision.reason}{before})" if decision.split.total else ""

    def _replace_silent(self, names: tuple[str, ...], now: float) -> None:
        """Replace engines that the scheduler reports as silent. An engine that was started only since then is not
        meant, and is left alone.
        """
        roles = self._supervisor.roles
        timeout_s = self._config.engine_timeout_s
        for name in names:
            if name in roles and roles[name].life.has_run_for(timeout_s, now):
                self._supervisor.replace(name, f"it has said nothing for {timeout_s:g} s")

    # ---- decisions ----

    def _leave_draining_nodes(self) -> None:
        """Engines on nodes that are about to be taken away have to go; others take their places."""
        draining = placement.draining_nodes()
        for role in self.engines if draining else ():
            if role.site.nodes & draining.keys() and not role.is_leaving:
                log.warning(
                    "%s has to go: Ray drains %s", role, "its node" if len(role.site.nodes) == 1 else "a node of it"
                )
                self._controller.drain(role.name, self._epoch[role.name])

    def _rebalance(self, observed: Observation, now: float) -> None:
        """Have an engine go whose node has too many, if there is a better one for the engine that takes its place."""
        if now < self._rebalance_at:
            return
        self._rebalance_at = now + _REBALANCE_S
        engines = self.engines
        if any(role.is_leaving or role.life.phase is not Phase.RUNNING for role in engines):
            move = self._rebalancer.look(None, (), now)
        else:
            self._moved = ""
            homes = {role.name: role.site.node for role in engines}
            is_shared = len(set(homes.values())) < len(homes)
            with_room = placement.nodes_with_room(self._config) if is_shared else ()
            move = self._rebalancer.look(homes, with_room, now)
        if move is None:
            return
        (chosen,) = choose_leaving(move.engines, 1, observed, self._store)
        role = self._supervisor.roles[chosen.name]
        better = (
            f"a node of {len(move.engines)} engines, while node {placement.address_of(move.target)} has {move.there}"
        )
        log.warning("%s has to go: it is on %s", role, better)
        self._moved = f"; {chosen.name} was moved: it was on {better}"
        self._controller.drain(chosen.name, self._epoch[chosen.name])

    def _resize(self, observed: Observation) -> None:
        """Have an engine go whose ranks are not those for what it does, if all serve: another one takes its place. One
        that is alone stays: nobody would serve meanwhile."""
        engines = self.engines
        is_calm = not any(role.is_leaving or role.life.phase is not Phase.RUNNING for role in engines)
        if self._sizes.are_alike or not is_calm or len(engines) < 2:
            return
        self._deal()
        wrong = [role.name for role in engines if not self._fits(role.name, self._roles.get(role.name, "mixed"))]
        self._resized = ""
        if not wrong or self._decision is None or len(engines) != self._decision.number:
            return
        (chosen,) = choose_leaving(wrong, 1, observed, self._store)
        kind = self._roles.get(chosen.name, "mixed")
        why = f"it has {self._ranks[chosen.name]} ranks, and as {kind} it is to have {self._sizes.of_role(kind)}"
        log.warning("%s has to go: %s", chosen.name, why)
        self._resized = f"; {chosen.name} was replaced: {why}"
        self._controller.drain(chosen.name, self._epoch[chosen.name])

    def _decide(self, observed: Observation, now: float) -> None:
        self._leave_draining_nodes()
        self._rebalance(observed, now)
        before = self._decision
        decision = self._controller.decide(observed, self._replicas(), now, self._store, self._has_room)
        if before is None or (before.number, before.overdue) != (decision.number, decision.overdue):
            log.info("replicas: %s", decision.reason)
        self._decision = decision
        roles = self._supervisor.roles
        going = {*decision.cancel, *decision.drain, *decision.replaced}
        self._start([name for name in decision.start if name not in roles], going)
        for name in decision.cancel:
            self._supervisor.retire(roles[name], "it is not needed any more")
        for name in decision.drain:
            self._drain(roles[name], now)
        self._balance_roles(observed, now)
        self._resize(observed)

    def _has_room(self) -> bool:
        """Whether one more engine would find a node now."""
        has_room = placement.has_room(self._config)
        if not has_room:
            log.warning("no node has room for one more engine: one is drained before another takes its place")
        return has_room

    def _start(self, names: Sequence[str], going: Collection[str]) -> None:
        """Start engines, with the ranks that are lacking once others have gone."""
        there = [self._ranks[role.name] for role in self.engines if not role.is_leaving and role.name not in going]
        for name, ranks in zip(names, self._sizes.to_start(self._wishes.split, there, len(names)), strict=True):
            self._epoch[name], self._ranks[name] = next(self._epochs), ranks
            self._supervisor.add(self._make_role(name, ranks))

    def _close(self, now: float) -> None:
        if self._decision is not _CLOSING:
            self._decision, self._ask_at = _CLOSING, now  # the scheduler is to hear of it
        for role in self.engines:
            if not role.is_leaving and not role.is_adopted:
                self._drain(role, now)

    def _replicas(self) -> list[Replica]:
        return [Replica(role.name, _state_of(role), self._epoch[role.name]) for role in self.engines]

    def _drain(self, role: Role, now: float) -> None:
        """Have an engine take nothing new, end what it has, hand over what only it has cached, and end. If it does not,
        it is killed some time later."""
        if role.handle is None or role.life.phase is not Phase.RUNNING:
            self._supervisor.retire(role, "it does not serve, and is not wanted any more")
            return
        draining = placement.draining_nodes()
        until = min((draining.get(node, math.inf) for node in role.site.nodes), default=math.inf)
        timeout_s = drain_time(self._config.drain_timeout_s, until - time.time())
        role.leave_by = now + timeout_s + self._config.engine_timeout_s
        ordered = () if self._decision is None else self._decision.drain
        leaving = [each.name for each in self.engines if (each.is_leaving or each.name in ordered) and each is not role]
        takers = self._takers(role, leaving)
        sole_blocks = self._store.sole_blocks(role.name, leaving) if self._config.storage or takers else b""
        log.info("%s is drained: it ends in %g s at the latest", role, timeout_s)
        worth = self._store.worth_storing(role.name, leaving) if self._config.storage else None
        role.handle.drain.remote(timeout_s, sole_blocks, takers, until, worth)

    def _takers(self, role: Role, leaving: Sequence[str]) -> dict[str, int]:
        """The engines that may take what only this one has cached, and what they may evict for it. Where one of them
        shares its storage nobody does: what is there and in a host, too, takes the room of two
        (`benchmarks/autoscaling.py`). Storage of the engine's own node may go with that node."""
        if self._config.without_peer_loads or self._is_closing:
            return {}
        going = {*leaving, role.name}
        names = [each.name for each in self.engines if each.life.phase is Phase.RUNNING and each.name not in going]
        if not names or (self._config.storage and self._store.shares_storage(role.name, leaving)):
            return {}
        return dict(self._store.allowances(role.name, names, leaving))


def policy_of(config: EngineConfig) -> ScalingPolicy:
    """How the number of a deployment's engines changes."""
    return ScalingPolicy(
        config.min_replicas,
        config.most_replicas,
        target_ttft_s=config.target_ttft_s or None,
        target_queue_s=config.target_queue_s or None,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        drain_timeout_s=config.drain_timeout_s,
        pending_timeout_s=config.start_timeout_s,
    )


def _state_of(role: Role) -> ReplicaState:
    if role.is_leaving:
        return ReplicaState.DRAINING
    if role.life.phase is Phase.RUNNING:
        return ReplicaState.RUNNING
    return ReplicaState.LOST if role.has_served else ReplicaState.STARTING


def _in_words(role: Role) -> str:
    """How far an engine is."""
    if role.is_leaving:
        return "draining"
    if role.life.phase is Phase.RUNNING:
        return f"serves on node {role.site.address}"
    failed = f" after it failed: {first_line(role.error)}" if role.error else ""
    if role.life.phase is Phase.PLACING:
        return f"waits for {role.site.needs()}{failed}"
    return ("starting" if role.life.phase is Phase.STARTING else "about to be started") + failed
