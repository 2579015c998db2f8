"""Starting and stopping a deployment."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray

from headwise.actors.addresses import check_free, free_ports, is_loopback
from headwise.actors.calls import get
from headwise.actors.cluster import Cluster, cluster_of_this_job, connection
from headwise.actors.names import NAMESPACE, STANDBY, actor_name
from headwise.actors.restarts import Life, Phase
from headwise.errors import DeploymentError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.loader.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from headwise.actors.fleet import Fleet
    from headwise.actors.frontend_watchdog import FrontendWatchdog
    from headwise.actors.role import Role, Site
    from headwise.actors.supervisor import Supervisor
    from headwise.storage.index.encryption import CurveKeys

__all__ = ["Deployment", "cluster_of_this_job", "resolve_client_address"]

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
PORT_ATTEMPTS = 3
LOCAL_RESOURCES_TIMEOUT_S = 5.0
"""Longest wait for room on a local Ray instance that is too small: it does not grow."""
_SLOWEST_START = 2.0
"""An engine whose start neither succeeds nor fails counts as failed after so many times ``start_timeout_s``."""
_LOOK_S = 0.05


class Deployment:
    """A running deployment: one scheduler, one attention store, and engines with their workers.

    This process owns the actors: they end when it ends. It replaces actors that die and actors that hang. Made by
    `start`.
    """

    def __init__(self, config: EngineConfig, cluster: Cluster) -> None:
        from headwise.actors.supervisor import Supervisor

        self.config = config
        self.client_address = ""
        self._cluster = cluster
        self._namespace = ""  # whose cache blocks the scheduler asks for
        self._frontend: dict[str, Role] = {}
        self._supervisor: Supervisor = Supervisor()
        self._fleet: Fleet | None = None
        self._watchdog: FrontendWatchdog | None = None
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
        progress.stage(f"connecting to the Ray cluster at {address}" if address else "starting a local Ray instance")
        deployment = cls(config, Cluster.connect(address) if address else Cluster.start())
        try:
            deployment._cluster.watch(deployment._on_lost)
            deployment._choose(progress)
            deployment._start_actors(progress)
        except BaseException:
            deployment.stop()
            raise
        return deployment

    def _choose(self, progress: Progress) -> None:
        """Resolve the settings that depend on the cluster (the device), and log what was chosen."""
        from headwise.actors.placement import cluster_gpus
        from headwise.runtime.config.block_storage import foreign_storage
        from headwise.runtime.config.info import chosen
        from headwise.runtime.config.model_card import read_model_card
        from headwise.runtime.loader.resolve import resolve_model
        from headwise.runtime.worker.device import resolve_device

        self.config = resolve_device(self.config, cluster_gpus())
        directory = resolve_model(self.config.model, self.config.cache_path, progress)  # for the scheduler, here
        card = read_model_card(self.config, directory, progress)
        log.info(chosen(self.config, card, directory))
        if foreign := foreign_storage(self.config, card):
            log.warning(foreign)

    def _start_actors(self, progress: Progress) -> None:
        from headwise.actors.fleet import Fleet
        from headwise.actors.frontend_watchdog import FrontendWatchdog
        from headwise.actors.role import StandbyRole
        from headwise.storage.index.encryption import CurveKeys

        config, secret = self.config, secrets.token_hex(16)
        curve_keys = CurveKeys.generate() if config.secure else None
        progress.stage("starting the scheduler")
        scheduler, store_endpoint = self._start_frontend(secret, curve_keys)
        supervisor = self._supervisor
        have_standby = ["scheduler"] if config.standby else []
        self._watchdog = FrontendWatchdog(supervisor, list(self._frontend), have_standby, config)
        for role in self._frontend.values():
            supervisor.add(role)
        arguments = scheduler, secret, store_endpoint, curve_keys, self._namespace
        self._fleet = Fleet(config, supervisor, partial(self._engine_role, arguments))
        supervisor.start(self._fleet.look)
        self._watchdog.start()
        self._wait_for_engines(progress)
        for name in have_standby:
            supervisor.add(StandbyRole(self._frontend[name]))

    def _engine_role(self, arguments: tuple[Any, ...], name: str) -> Role:
        from headwise.actors.engine import Engine
        from headwise.actors.placement import EngineSite
        from headwise.actors.role import Role

        def others() -> list[str]:
            assert self._fleet is not None
            return [role.site.node for role in self._fleet.engines if role.name != name and role.site.node]

        site, life = EngineSite(self.config, others), Life(_SLOWEST_START * self.config.start_timeout_s)
        return Role(self.config.name, name, Engine, (self.config, name, *arguments), site, life)

    def _wait_for_engines(self, progress: Progress) -> None:
        """Wait until the deployment serves; raises what keeps it from it."""
        from headwise.actors import placement
        from headwise.actors.first_start import has_room, is_served

        assert self._fleet is not None
        progress.stage("waiting for the cluster's resources")
        can_fit = not self._cluster.owned or placement.could_fit(self.config)
        room_timeout_s = self.config.start_timeout_s if can_fit else LOCAL_RESOURCES_TIMEOUT_S
        deadline, is_loading = time.monotonic() + room_timeout_s, False
        while (engines := self._fleet.starts()) is None or not is_served(engines):
            if self._failure is not None:
                raise self._failure
            if engines is not None and has_room(engines):
                if not is_loading:
                    progress.stage(f"loading and warming up engines with {self.config.tp_size} worker(s) each")
                is_loading = True
                progress.update(sum(engine.phase is Phase.RUNNING for engine in engines), len(engines))
            elif time.monotonic() > deadline:
                raise placement.no_room(self.config, room_timeout_s)
            time.sleep(_LOOK_S)

    def _start_frontend(self, secret: str, curve_keys: CurveKeys | None) -> tuple[tuple[str, int], str]:
        """Start the scheduler and the store. Returns the scheduler's node and port, and the store's endpoint.

        Their addresses are chosen here, before the actors are made, so that a restarted actor keeps its address.
        Another process may take a free port before it is bound: then other ports are tried.
        """
        from headwise.actors.placement import node_address

        store_host = "127.0.0.1" if is_loopback(self.config.host) else node_address()
        for attempt in range(1, PORT_ATTEMPTS + 1):
            port, store_port = free_ports(self.config.host, store_host)
            store_endpoint = f"tcp://{store_host}:{store_port}"
            try:
                return self._try_start_frontend(
                    secret, self.config.port or port, store_endpoint, curve_keys
                ), store_endpoint
            except _PortTaken as taken:
                if attempt == PORT_ATTEMPTS:
                    raise taken.error from None
                log.warning("%s; trying other ports", taken.error)
                self._kill_actors()
                self._wait_for_names()
                self._frontend.clear()
        raise AssertionError("the last attempt returns or raises")

    def _try_start_frontend(
        self, secret: str, port: int, store_endpoint: str, curve_keys: CurveKeys | None
    ) -> tuple[str, int]:
        from headwise.actors.placement import FrontendSite
        from headwise.actors.scheduler import GlobalScheduler
        from headwise.actors.store import AttentionStore

        here, slowest_s = FrontendSite(), self.config.start_timeout_s
        arguments: tuple[Any, ...] = self.config, secret, port, store_endpoint, curve_keys
        scheduler = self._start_role("scheduler", GlobalScheduler, arguments, here, Life(slowest_s))
        try:
            address: tuple[str, int] = get(scheduler.is_ready)
        except DeploymentError as error:
            if self.config.port:
                raise
            raise _PortTaken(error) from None
        assert scheduler.handle is not None
        self.client_address = get(scheduler.handle.client_address.remote())
        namespace = self._namespace = get(scheduler.handle.namespace.remote())
        arguments = self.config, store_endpoint, namespace, curve_keys
        store = self._start_role("store", AttentionStore, arguments, here, Life(slowest_s))
        try:
            get(store.is_ready)
        except DeploymentError as error:
            raise _PortTaken(error) from None
        return address

    def _start_role(self, name: str, actor_class: Any, arguments: tuple[Any, ...], site: Site, life: Life) -> Role:
        """Make an actor under the deployment's name; raises `DeploymentError` if there is one already."""
        from headwise.actors.role import Role

        role = Role(self.config.name, name, actor_class, arguments, site, life)
        try:
            role.create()
        except ValueError:
            raise DeploymentError(
                f"a deployment named {self.config.name!r} is already running on this Ray cluster; "
                "stop it, or choose another name"
            ) from None
        self._frontend[name] = role
        return role

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
    def _roles(self) -> dict[str, Role]:
        """All that there are, by name."""
        return {**self._frontend, **self._supervisor.roles}

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
        return self._supervisor.serving(f"scheduler{STANDBY}") is not None

    def worker_pids(self) -> list[list[int]]:
        """Process ids of the workers: per engine, by rank. An engine that is starting or has ended has none."""
        assert self._fleet is not None
        engines = [self._supervisor.serving(role.name) for role in self._fleet.engines]
        return [[] if engine is None else get(engine.worker_pids.remote()) for engine in engines]

    def actor_pids(self) -> dict[str, int]:
        """Process ids of the scheduler, the store and the engines, by role."""
        return {role: get(actor.__ray_call__.remote(_pid)) for role, actor in self._actors.items()}

    def store_stats(self) -> dict[str, Any]:
        """The attention store's statistics: see `AttentionStore.stats`."""
        stats: dict[str, Any] = get(self._actors["store"].stats.remote())
        return stats

    # ---- the end ----

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
        self._kill_actors()
        for role in self._roles.values():
            role.site.release()
        self._wait_for_names()

    def _kill_actors(self) -> None:
        for role in self._roles.values():
            role.kill()

    def _wait_for_names(self) -> None:
        """Wait until the killed actors are gone and their names are free again."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(_exists(self.config.name, role) for role in self._roles) and time.monotonic() < deadline:
            time.sleep(0.05)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class _PortTaken(Exception):
    """A port that was free a moment ago is taken; ``error`` says which address."""

    def __init__(self, error: DeploymentError) -> None:
        super().__init__(str(error))
        self.error = error


def resolve_client_address(cluster: str, name: str) -> str:
    """The client address (``tcp://HOST:PORT``) of the deployment ``name`` on a Ray cluster (``HOST:PORT`` or ``auto``).

    Raises `DeploymentError` if there is no such cluster or deployment.
    """
    with connection(cluster) as found:
        for role in ("scheduler", f"scheduler{STANDBY}"):  # either may have either name, and both know the address
            with contextlib.suppress(ValueError):
                scheduler: Any = ray.get_actor(actor_name(name, role), namespace=NAMESPACE)
                address: str = get(scheduler.client_address.remote())
                return address
    raise DeploymentError(
        f"no deployment named {name!r} runs on the Ray cluster at {found}; start one with `headwise serve`"
    )


def _pid(actor: Any) -> int:
    return os.getpid()


def _exists(name: str, role: str) -> bool:
    try:
        ray.get_actor(actor_name(name, role), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
