"""Starting and stopping a deployment."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray

from headwise.actors.addresses import check_free
from headwise.actors.calls import get
from headwise.actors.cluster import Cluster, cluster_of_this_job, connection
from headwise.actors.found import Found, find_scheduler, names_of, wait_until_gone
from headwise.actors.front import Front, Keys, Notice
from headwise.actors.http_server import check_http_start, http_address
from headwise.actors.names import ENCODER, ENGINE, HTTP, SCHEDULER, STANDBY, STORE, actor_name
from headwise.actors.notice import FAREWELL_S, drain_time
from headwise.actors.restarts import Life, Phase
from headwise.errors import DeploymentError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.loader.chat import check_template
from headwise.runtime.loader.progress import Progress, SilentProgress
from headwise.runtime.protocol.weights import FIRST
from headwise.sockets.curve import ClientKeys

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from headwise.actors.fleet import Fleet
    from headwise.actors.front_move import FrontMove
    from headwise.actors.frontend import Frontend
    from headwise.actors.frontend_watchdog import FrontendWatchdog
    from headwise.actors.role import Role
    from headwise.actors.supervisor import Supervisor

__all__ = ["Deployment", "cluster_of_this_job", "resolve_client"]

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
LOCAL_RESOURCES_TIMEOUT_S = 5.0
"""Longest wait for room on a local Ray instance that is too small: it does not grow."""
_SLOWEST_START = 2.0
"""An engine whose start neither succeeds nor fails counts as failed after so many times ``start_timeout_s``."""
_LOOK_S = 0.05


class Deployment:
    """A running deployment: one scheduler, one attention store, and engines with their workers.

    This process owns the actors: they end when it ends, unless they are detached. It replaces actors that die and
    actors that hang. Made by `start`.

    keys:        of a detached deployment, whose actors another process may adopt
    is_detached: whether the actors outlive this process
    """

    def __init__(
        self, config: EngineConfig, cluster: Cluster, keys: Keys | None = None, *, is_detached: bool = False
    ) -> None:
        from headwise.actors.supervisor import Supervisor

        self.config = config
        self._cluster = cluster
        self._keys = keys or Keys.generate(config)
        self._is_detached = is_detached
        self._frontend: Frontend | None = None
        self._supervisor: Supervisor = Supervisor()
        self._fleet: Fleet | None = None
        self._watchdog: FrontendWatchdog | None = None
        self._front_move: FrontMove | None = None
        self._followers: dict[str, tuple[Any, Front]] = {}  # by role: its actor, and the front that it knows
        self._stopped = False
        self._over = threading.Event()
        self._failure: DeploymentError | None = None

    @classmethod
    def start(cls, config: EngineConfig, address: str | None = None, progress: Progress | None = None) -> Deployment:
        """Start a deployment and wait until it serves: until an engine does, and all others that have room either do
        or have failed. Engines without room are started when there is some.

        address: of the Ray cluster: ``HOST:PORT``, or ``auto`` for the one this machine is part of. None starts a
                 local Ray instance that ends with the deployment.

        Raises `DeploymentError` if no engine can be started or the cluster cannot be reached, and the `ModelError` or
        `ConfigError` that keeps engines from serving.
        """
        progress = progress or SilentProgress()
        check_free(config.host, config.port)
        check_http_start(config)
        check_template(config.chat_template)
        keys = Keys.generate(config)
        if not address:
            _check_here(config, progress)
        progress.stage(f"connecting to the Ray cluster at {address}" if address else "starting a local Ray instance")
        deployment = cls(config, Cluster.connect(address) if address else Cluster.start(), keys)
        try:
            deployment._cluster.watch(deployment._on_lost)
            deployment.begin(progress)
        except BaseException:
            deployment.stop()
            raise
        return deployment

    def begin(self, progress: Progress) -> None:
        """Start the actors, and wait as `start` does. Raises what that raises; `stop` then ends what was begun."""
        from headwise.actors.frontend import Frontend

        self._choose(progress)
        progress.stage("starting the scheduler")
        self._frontend = Frontend(self.config, self._keys, self._is_detached)
        self._frontend.start()
        self._supervise()
        self._wait_for_engines(progress)
        self._wait_for_encoders(progress)
        self._have_standby()

    def adopt(self, found: Found) -> None:
        """Go on with the actors of an owner that has died, which knew where scheduler and store are."""
        from headwise.actors.frontend import Frontend
        from headwise.runtime.frontend.scaling.leaving import number_of

        assert found.front is not None
        self._frontend = Frontend(self.config, self._keys, self._is_detached)
        self._frontend.adopt(found, self._supervisor.now())
        names = {name for name in (*found.actors, *found.groups) if name.startswith(ENGINE)}
        adopted = set(map(found.name_of, self._frontend.roles)) & found.serving
        encoders = {name for name in found.actors if name.startswith(ENCODER)}
        for name in found.actors.keys() - adopted - names - encoders:
            if name in found.leaving | found.late:
                self._adopt_former(name, found.actors[name], is_told=name in found.leaving)
            else:
                ray.kill(found.actors[name])  # one that stood by, or whatever it is: nobody looks after it
        self._supervise(found, sorted(names, key=number_of))
        self._have_standby()

    def _adopt_former(self, name: str, handle: Any, *, is_told: bool) -> None:
        """An actor whose role had gone to another node before: once it is told, it knows itself when it has to end."""
        from headwise.actors.placement import draining_nodes
        from headwise.actors.role import FormerRole, PastSite

        former = FormerRole(self.config.name, name, handle, PastSite())
        if is_told:
            self._supervisor.add_former(former, self.config.drain_timeout_s)
            return
        assert self._frontend is not None
        until = min(draining_nodes().values(), default=math.inf)  # which of them is its node it does not say
        stay_s = drain_time(self.config.drain_timeout_s, until - time.time())
        self._supervisor.dismiss(former, Notice(stay_s, until, self._frontend.front))

    def _choose(self, progress: Progress) -> None:
        """Resolve the settings that depend on the cluster (the device), and log what was chosen."""
        from headwise.actors.placement import resolve
        from headwise.runtime.config.block_storage import foreign_storage
        from headwise.runtime.config.info import chosen
        from headwise.runtime.config.model_card import read_model_card
        from headwise.runtime.config.peer_blocks import check_exchanges
        from headwise.runtime.encoder.image_encoder import check_images
        from headwise.runtime.loader.resolve import resolve_model

        self.config = resolve(self.config)
        directory = resolve_model(self.config.model, self.config.cache_path, progress)  # for the scheduler, here
        card = read_model_card(self.config, directory, progress)
        check_exchanges(self.config, card)
        check_images(self.config, directory)
        log.info(chosen(self.config, card, directory))
        log.info(
            "engines fetch blocks from each other: %s",
            f"no, {why_not}" if (why_not := self.config.without_peer_loads) else "yes",
        )
        if foreign := foreign_storage(self.config, card):
            log.warning(foreign)

    def _supervise(self, found: Found | None = None, engines: Sequence[str] = ()) -> None:
        """From now on start, watch and replace actors; first of all take over the ``engines`` that were found."""
        from headwise.actors.fleet import Fleet
        from headwise.actors.front_move import FrontMove
        from headwise.actors.frontend_watchdog import FrontendWatchdog
        from headwise.actors.placement import draining_nodes

        assert self._frontend is not None
        config, supervisor, frontend = self.config, self._supervisor, self._frontend
        encoders = self._encoder_roles(found)
        self._watchdog = FrontendWatchdog(supervisor, [*frontend.roles, *encoders], config)
        self._front_move = FrontMove(frontend, supervisor, draining_nodes, self._names, config.drain_timeout_s)
        for role in (*frontend.roles.values(), *encoders.values()):
            supervisor.add(role)
        number = None if found is None else len(set(engines) - found.leaving)
        self._fleet = Fleet(config, supervisor, self._engine_role, number)
        if found is not None:
            self._take_over(found, engines)
        supervisor.start(self._look)
        self._watchdog.start()

    def _have_standby(self) -> None:
        """Once all serve: until then they need the processors."""
        from headwise.actors.role import StandbyRole

        assert self._frontend is not None
        if self.config.standby:
            self._supervisor.add(StandbyRole(self._frontend.roles[SCHEDULER]))

    def _take_over(self, found: Found, engines: Sequence[str]) -> None:
        from headwise.actors.placement import ranks_of

        assert self._fleet is not None
        for name in engines:
            group = found.groups.get(name)
            tp_size = self.config.tp_size
            if group is not None and len(self.config.tp_sizes) > 1:
                tp_size = ranks_of(group) // self.config.pipeline_parallel_size
            role = self._engine_role(name, tp_size, group)
            role.starts = 1  # whatever is made next follows another one
            if name in found.actors:
                role.adopt(found.actors[name], self._supervisor.now())
            self._fleet.adopt(role, tp_size, name in found.leaving)
        self._fleet.resume(found.wish)

    def _look(self, now: float) -> None:
        """On the supervisor's thread, several times a second."""
        assert self._fleet is not None
        assert self._frontend is not None
        self._fleet.look(now)
        if self._front_move is not None:
            self._front_move.look(now, self._fleet.engines)
        front = self._frontend.front
        servers = [role for role in self._frontend.roles.values() if role.name.startswith(HTTP)]
        encoders = [role for role in self._supervisor.roles.values() if role.name.startswith(ENCODER)]
        for role in (*self._fleet.engines, *servers, *encoders, *self._supervisor.formers):
            actor = self._supervisor.serving(role.name)
            if actor is not None and self._followers.get(role.name) != (actor, front):
                self._followers[role.name] = actor, front
                actor.follow.remote(front)

    def _names(self) -> set[str]:
        """That actors of the deployment have."""
        names = {role.known_as for role in self._roles.values()}
        with contextlib.suppress(Exception):  # Ray does not answer now: those of this owner's are known
            names |= set(names_of(self.config.name))
        return names

    def _engine_role(self, name: str, tp_size: int, group: PlacementGroup | None = None) -> Role:
        from headwise.actors.engine import Engine
        from headwise.actors.placement import EngineSite
        from headwise.actors.role import Role

        config = self.config.of_ranks(tp_size)

        def arguments() -> tuple[Any, ...]:
            assert self._frontend is not None
            assert self._fleet is not None
            return config, name, self._frontend.front, self._keys, self._fleet.weights or FIRST

        def others() -> list[str]:
            assert self._fleet is not None
            return [role.site.node for role in self._fleet.engines if role.name != name and role.site.node]

        site = EngineSite(config, others, actor_name(self.config.name, name) if self._is_detached else "", group)
        life = Life(_SLOWEST_START * self.config.start_timeout_s)
        return Role(self.config.name, name, Engine, arguments, site, life)

    def _encoder_roles(self, found: Found | None) -> dict[str, Role]:
        """By name; those that are found are taken over."""
        from headwise.actors.encoder import EncoderSite, ImageEncoderActor
        from headwise.actors.role import Role

        def role(name: str) -> Role:
            def arguments() -> tuple[Any, ...]:
                assert self._frontend is not None
                return self.config, name, self._frontend.front, self._keys

            site, life = EncoderSite(self.config, self._is_detached), Life(self.config.start_timeout_s)
            made = Role(self.config.name, name, ImageEncoderActor, arguments, site, life)
            if found is not None and name in found.actors:
                made.adopt(found.actors[name], self._supervisor.now())
            return made

        return {name: role(name) for name in (f"{ENCODER}{n}" for n in range(self.config.image_encoders))}

    def _wait_for_encoders(self, progress: Progress) -> None:
        """Until each serves or has failed; raises why, where none does."""
        from headwise.actors import placement

        roles = [role for role in self._supervisor.roles.values() if role.name.startswith(ENCODER)]
        if not roles:
            return
        if self._cluster.owned and not placement.could_hold_encoder(self.config):
            raise DeploymentError(
                f"this machine has no room for an encoder of images: it needs {roles[0].site.needs()}; lower "
                "image_encoder_cpus or image_encoder_gpus"
            )
        progress.stage(f"loading the vision tower in {len(roles)} encoder(s)")
        deadline = time.monotonic() + self.config.start_timeout_s
        while any(role.life.phase is not Phase.RUNNING and role.error is None for role in roles):
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise DeploymentError(
                    f"no encoder of images has started in {self.config.start_timeout_s:g} s (start_timeout_s): each "
                    f"needs {roles[0].site.needs()}; lower image_encoder_cpus, or add nodes"
                )
            time.sleep(_LOOK_S)
        failed = [role.error for role in roles if role.error is not None]
        if len(failed) == len(roles) and failed[0] is not None:
            raise failed[0]

    def _wait_for_engines(self, progress: Progress) -> None:
        """Wait until the deployment serves; raises what keeps it from it. What engines log meanwhile is logged here."""
        from headwise.actors import placement
        from headwise.actors.first_start import has_room, is_served
        from headwise.actors.start_lines import StartLines

        assert self._fleet is not None
        progress.stage("waiting for the cluster's resources")
        ranks = " or ".join(str(size * self.config.pipeline_parallel_size) for size in self.config.tp_sizes)
        can_fit = not self._cluster.owned or placement.could_fit(self.config)
        room_timeout_s = self.config.start_timeout_s if can_fit else LOCAL_RESOURCES_TIMEOUT_S
        deadline, is_loading, lines = time.monotonic() + room_timeout_s, False, StartLines(log)
        while (engines := self._fleet.starts()) is None or not is_served(engines):
            if self._failure is not None:
                raise self._failure
            if engines is not None and has_room(engines):
                if not is_loading:
                    progress.stage(f"loading and warming up engines with {ranks} worker(s) each")
                is_loading = True
                progress.update(sum(engine.phase is Phase.RUNNING for engine in engines), len(engines))
            elif time.monotonic() > deadline:
                raise placement.no_room(self.config, room_timeout_s)
            for role in self._fleet.engines:
                if role.handle is not None:
                    lines.look(role.name, role.handle)
            time.sleep(_LOOK_S)
        lines.finish()

    # ---- while it runs ----

    def wait(self) -> None:
        """Block for as long as the deployment lives. Raises `DeploymentError` when its Ray cluster is gone."""
        while not self._over.wait(1.0):
            pass
        if self._failure is not None:
            raise self._failure

    def _on_lost(self, error: DeploymentError) -> None:
        self._failure = self._failure or error
        self._over.set()

    @property
    def client_address(self) -> str:
        """Where clients connect to: ``tcp://HOST:PORT``."""
        assert self._frontend is not None
        return self._frontend.client_address

    @property
    def client_keys(self) -> ClientKeys | None:
        """What this process connects with; None: whoever reaches the address may."""
        return self._keys.own

    @property
    def http_address(self) -> str:
        """Where OpenAI's API is served: ``http://HOST:PORT``; empty: nowhere."""
        return http_address(self.config, self.client_address)

    @property
    def _roles(self) -> dict[str, Role]:
        """All that there are, by name."""
        return {**(self._frontend.roles if self._frontend is not None else {}), **self._supervisor.roles}

    @property
    def _actors(self) -> dict[str, Any]:
        """The actors that there are, by role."""
        return {name: role.handle for name, role in self._roles.items() if role.handle is not None}

    def _is_stopped(self) -> bool:
        """Another thread may stop the deployment at any moment."""
        return self._stopped

    @property
    def has_standby(self) -> bool:
        """Whether another scheduler stands by, ready to take the place of the one that serves."""
        return self._supervisor.serving(f"{SCHEDULER}{STANDBY}") is not None

    def worker_pids(self) -> list[list[int]]:
        """Process ids of the workers: per engine, by rank. An engine that is starting or has ended has none."""
        assert self._fleet is not None
        engines = [self._supervisor.serving(role.name) for role in self._fleet.engines]
        return [[] if engine is None else get(engine.worker_pids.remote()) for engine in engines]

    def actor_pids(self) -> dict[str, int]:
        """Process ids of the scheduler, the store and the engines, by role."""
        return {role: get(actor.__ray_call__.remote(_pid)) for role, actor in self._actors.items()}

    def store_stats(self) -> dict[str, Any]:
        """The attention store's statistics: see `AttentionStore.stats`. `DeploymentError`: it is being restarted."""
        store = self._actors.get(STORE)
        if store is None:
            raise DeploymentError("the attention store is being started again; try again in a second")
        stats: dict[str, Any] = get(store.stats.remote())
        return stats

    # ---- the end ----

    def drain(self) -> None:
        """Have all engines end what they do, put into storage what only they have cached, and go. Returns when they
        have, or a few seconds after ``drain_timeout_s``; then `stop`. Requests that come meanwhile are refused.
        """
        if self._fleet is None:
            return
        self._fleet.close()
        deadline = time.monotonic() + self.config.drain_timeout_s + FAREWELL_S
        while self._fleet.engines and self._failure is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def abandon(self, error: DeploymentError) -> None:
        """Have `begin`, on another thread, raise this."""
        self._on_lost(error)

    def stop(self) -> None:
        """End all actors and give back what they hold; a Ray instance started for them ends too. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._over.set()
        self._supervisor.stop()
        if self._watchdog is not None:
            self._watchdog.stop()
        try:
            if not self._cluster.is_lost:  # a lost cluster takes no calls
                self._stop_actors()
        finally:
            self._cluster.disconnect()

    def _stop_actors(self) -> None:
        stopping = [actor.stop.remote() for actor in reversed(self._actors.values())]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT_S)
        for role in self._roles.values():
            role.kill()
        for role in self._roles.values():
            role.site.release()
        wait_until_gone(self.config.name, [role.known_as for role in self._roles.values()])

    def __enter__(self) -> Deployment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _check_here(config: EngineConfig, progress: Progress) -> None:
    """Raise why this machine's devices do not go with the configuration, or the model does not, before a Ray instance
    is started that has these devices and no others."""
    from headwise.actors.placement import gpus_here
    from headwise.runtime.config.device import resolve_device
    from headwise.runtime.config.model_card import read_model_card
    from headwise.runtime.encoder.image_encoder import check_images
    from headwise.runtime.loader.resolve import resolve_model

    config = resolve_device(config, gpus_here())
    directory = resolve_model(config.model, config.cache_path, progress)
    read_model_card(config, directory, identify=False)
    check_images(config, directory)


def resolve_client(cluster: str, name: str) -> tuple[str, ClientKeys | None]:
    """The client address (``tcp://HOST:PORT``) of the deployment ``name`` on a Ray cluster (``HOST:PORT`` or ``auto``),
    and the keys to connect with.

    Raises `DeploymentError` if there is no such cluster or deployment.
    """
    with connection(cluster) as found:
        scheduler = find_scheduler(name)
        if scheduler is None:
            raise DeploymentError(
                f"no deployment named {name!r} runs on the Ray cluster at {found}; start one with `headwise serve`"
            )
        address, keys = get([scheduler.client_address.remote(), scheduler.client_keys.remote()])
        return address, keys


def _pid(actor: Any) -> int:
    return os.getpid()
