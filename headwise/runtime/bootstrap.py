"""Starting and stopping a deployment: the one module of the runtime that knows Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray

from headwise.actors.names import NAMESPACE, actor_name
from headwise.errors import DeploymentError, HeadwiseError, first_line
from headwise.runtime.config import EngineConfig
from headwise.runtime.loader.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from headwise.actors.front_guard import FrontGuard
    from headwise.storage.curve import CurveKeys

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 10.0
PORT_ATTEMPTS = 3
LOCAL_RESOURCES_TIMEOUT_S = 5.0
"""Of a Ray instance started here that is too small: it does not grow."""
OBJECT_STORE_BYTES = 80 << 20
"""Of a Ray instance started here: nothing large goes through its object store."""
_WATCH_S = 2.0
_SET_BY_RAY = ("PYTHONBREAKPOINT", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")
"""Variables that `ray.init` sets in this process. The next instance would obey them."""
_QUIET: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}


class Deployment:
    """A running deployment: one scheduler, one attention store, and ``replicas`` engines with their workers.

    This process owns its actors: they end with it, however it ends. Ray replaces those that die; this process has it
    replace a scheduler and a store that live and do nothing. Made by `start`.
    """

    def __init__(self, config: EngineConfig, cluster: _Cluster) -> None:
        self.config = config
        self.client_address = ""
        self._cluster = cluster
        self._actors: dict[str, Any] = {}
        self._placements: list[Any] = []
        self._namespace = ""  # whose cache blocks the scheduler asks for
        self._guard: FrontGuard | None = None
        self._stopped = False

    @classmethod
    def start(cls, config: EngineConfig, address: str | None = None, progress: Progress | None = None) -> Deployment:
        """Start a deployment and wait until it serves.

        address: of the Ray cluster: ``HOST:PORT``, or ``auto`` for the one this machine is part of. None starts a
                 local Ray instance that ends with the deployment.

        Raises `DeploymentError` if it cannot be started or the cluster cannot be reached, and the `ModelError` or
        `ConfigError` that keeps an engine from serving.
        """
        progress = progress or SilentProgress()
        progress.stage(f"connecting to the Ray cluster at {address}" if address else "starting a local Ray instance")
        deployment = cls(config, _Cluster.connect(address) if address else _Cluster.start())
        try:
            deployment._choose(progress)
            deployment._start_actors(progress)
        except BaseException:
            deployment.stop()
            raise
        return deployment

    def _choose(self, progress: Progress) -> None:
        """Settle what the configuration leaves to what the cluster has, and say what was chosen."""
        from headwise.actors.placement import cluster_gpus
        from headwise.runtime.block_storage import foreign_storage
        from headwise.runtime.device import resolve_device
        from headwise.runtime.info import chosen
        from headwise.runtime.loader.resolve import resolve_model
        from headwise.runtime.model_card import read_model_card

        self.config = resolve_device(self.config, cluster_gpus())
        directory = resolve_model(self.config.model, self.config.cache_path, progress)  # for the scheduler, here
        card = read_model_card(self.config, directory, progress)
        log.info(chosen(self.config, card))
        if foreign := foreign_storage(self.config, card):
            log.warning(foreign)

    def _start_actors(self, progress: Progress) -> None:
        from headwise.actors import placement
        from headwise.actors.engine import Engine
        from headwise.actors.front_guard import FrontGuard
        from headwise.storage.curve import CurveKeys

        config, secret = self.config, secrets.token_hex(16)
        curve = CurveKeys.generate() if config.secure else None
        progress.stage("starting the scheduler")
        front, store_endpoint = self._start_front(secret, curve)
        self._guard = FrontGuard(dict(self._actors), config.front_timeout_s)
        self._guard.start()
        progress.stage("waiting for the cluster's resources")
        may_come = not self._cluster.owned or placement.could_fit(config)
        timeout_s = config.start_timeout_s if may_come else LOCAL_RESOURCES_TIMEOUT_S
        self._placements = placement.reserve(config, timeout_s)
        progress.stage(f"loading and warming up {config.replicas} engine(s) with {config.tp_size} worker(s) each")
        engines = []
        for index, group in enumerate(self._placements):
            arguments = config, index, front, secret, store_endpoint, curve, self._namespace
            engines.append(self._named(Engine, f"engine-{index}", placement.in_bundle(group, 0), *arguments))
        started = [engine.ready.remote() for engine in engines]
        for done in range(len(started)):
            progress.update(done, len(started))
            ready, started = ray.wait(started)
            _get(ready[0])

    def _start_front(self, secret: str, curve: CurveKeys | None) -> tuple[tuple[str, int], str]:
        """Start the scheduler and the store; the scheduler's node and port, and the store's endpoint.

        Their addresses are chosen here, before they are made, so that a restarted one has that of the one before it.
        A free port may be taken before it is bound: then others are tried.
        """
        from headwise.actors.placement import is_loopback, node_address

        store_host = "127.0.0.1" if is_loopback(self.config.host) else node_address()
        for attempt in range(1, PORT_ATTEMPTS + 1):
            port, store_port = _free_ports(self.config.host, store_host)
            store_endpoint = f"tcp://{store_host}:{store_port}"
            try:
                return self._try_front(secret, self.config.port or port, store_endpoint, curve), store_endpoint
            except _PortTaken as taken:
                if attempt == PORT_ATTEMPTS:
                    raise taken.error from None
                log.warning("%s; trying other ports", taken.error)
                self._kill_actors()
                self._wait_for_names()
                self._actors.clear()
        raise AssertionError("the last attempt returns or raises")

    def _try_front(self, secret: str, port: int, store_endpoint: str, curve: CurveKeys | None) -> tuple[str, int]:
        from headwise.actors.placement import on_this_node
        from headwise.actors.scheduler import GlobalScheduler
        from headwise.actors.store import AttentionStore

        here = on_this_node()
        arguments = self.config, secret, port, store_endpoint, curve
        scheduler = self._named(GlobalScheduler, "scheduler", here, *arguments)
        try:
            front: tuple[str, int] = _get(scheduler.start.remote())
        except DeploymentError as error:
            if self.config.port:
                raise
            raise _PortTaken(error) from None
        self.client_address = _get(scheduler.client_address.remote())
        namespace = self._namespace = _get(scheduler.namespace.remote())
        store = self._named(AttentionStore, "store", here, self.config, store_endpoint, namespace, curve)
        try:
            _get(store.endpoint.remote())
        except DeploymentError as error:
            raise _PortTaken(error) from None
        return front

    def _named(self, actor_class: Any, role: str, options: dict[str, Any], *arguments: Any) -> Any:
        """Make an actor under the deployment's name; raises `DeploymentError` if there is one already."""
        name = actor_name(self.config.name, role)
        try:
            handle = actor_class.options(name=name, namespace=NAMESPACE, **options).remote(*arguments)
        except ValueError:
            raise DeploymentError(
                f"a deployment named {self.config.name!r} is already running on this Ray cluster; "
                "stop it, or choose another name"
            ) from None
        self._actors[role] = handle
        return handle

    # ---- while it runs ----

    def wait(self) -> None:
        """Block for as long as the deployment lives, logging what fails and comes back.

        Raises `DeploymentError` when an actor is dead for good.
        """
        failing: set[str] = set()
        while not self._stopped:
            for role, actor in self._actors.items():
                try:
                    ray.get(actor.__ray_ready__.remote(), timeout=_WATCH_S)
                except ray.exceptions.ActorDiedError as error:
                    if self._stopped:
                        return
                    raise DeploymentError(f"{role} is dead and will not be restarted: {error}") from None
                except (ray.exceptions.RayError, TimeoutError) as error:
                    if role not in failing:
                        log.warning("%s does not answer: %s", role, error)
                    failing.add(role)
                else:
                    if role in failing:
                        log.warning("%s answers again", role)
                    failing.discard(role)
            time.sleep(_WATCH_S)

    def worker_pids(self) -> list[list[int]]:
        """Process ids of the workers: per engine, by rank. An engine that is restarting its workers has none."""
        engines = [actor for role, actor in self._actors.items() if role.startswith("engine-")]
        return [_get(engine.worker_pids.remote()) for engine in engines]

    def actor_pids(self) -> dict[str, int]:
        """Process ids of the scheduler, the store and the engines, by role."""
        return {role: _get(actor.__ray_call__.remote(_pid)) for role, actor in self._actors.items()}

    def store_stats(self) -> dict[str, Any]:
        """The attention store's statistics: see `AttentionStore.stats`."""
        stats: dict[str, Any] = _get(self._actors["store"].stats.remote())
        return stats

    # ---- the end ----

    def stop(self) -> None:
        """End all actors and give back what they hold; a Ray instance started for them ends too. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._guard is not None:
            self._guard.stop()
        try:
            self._stop_actors()
        finally:
            self._cluster.disconnect()

    def _stop_actors(self) -> None:
        stopping = [actor.stop.remote() for role, actor in reversed(self._actors.items())]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT_S)
        self._kill_actors()
        if self._placements:
            from headwise.actors.placement import release

            release(self._placements)
        self._wait_for_names()

    def _kill_actors(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)

    def _wait_for_names(self) -> None:
        """Wait until actors that were killed are no more, and others may have their names."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(_exists(self.config.name, role) for role in self._actors) and time.monotonic() < deadline:
            time.sleep(0.05)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class _PortTaken(Exception):
    """A port that was free a moment ago is not; ``error`` tells whose it was to be."""

    def __init__(self, error: DeploymentError) -> None:
        super().__init__(str(error))
        self.error = error


class _Cluster:
    """This process's connection to Ray, and the local instance if it was started here."""

    def __init__(self, directory: str | None = None) -> None:
        self.owned = directory is not None
        self._directory = directory
        self._environment: dict[str, str | None] | None = None

    @classmethod
    def start(cls) -> _Cluster:
        """Start a Ray instance of one node in this process, with files of its own; no dashboard."""
        if ray.is_initialized():
            raise DeploymentError(
                "this process is connected to a Ray cluster already: give address='auto' to deploy there, or call "
                "ray.shutdown() first"
            )
        # Ray's sockets lie in here, and their paths may have no more than 107 characters.
        directory = tempfile.mkdtemp(prefix="hw-", dir="/tmp")
        cluster = cls(directory)
        try:
            cluster._connect(
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=directory,
                _system_config={"worker_niceness": 0},  # serving is no background work
            )
        except Exception as error:
            raise DeploymentError(f"a local Ray instance could not be started: {error}") from error
        return cluster

    @classmethod
    def connect(cls, address: str) -> _Cluster:
        """Connect to a running cluster, or use the connection there is; raises `DeploymentError`."""
        cluster = cls()
        if ray.is_initialized():
            return cluster
        remedy = "start one with `ray start --head`, or leave the address out to start a local one"
        _check_reachable(address, remedy)
        try:
            cluster._connect(address=address)
        except ray.exceptions.AuthenticationError as error:
            raise DeploymentError(
                f"the Ray cluster at {address} refused this process's token: set RAY_AUTH_MODE=token and "
                f"RAY_AUTH_TOKEN_PATH to its token file ({first_line(error)})"
            ) from None
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise DeploymentError(f"no Ray cluster at {address}: {first_line(error)}; {remedy}") from None
        return cluster

    def _connect(self, **options: Any) -> None:
        self._environment = {name: os.environ.get(name) for name in _SET_BY_RAY}
        _read_authentication()
        try:
            ray.init(**options, **_QUIET)
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """Leave no trace of a connection made here, nor of an instance started here."""
        if self._environment is not None:
            ray.shutdown()
            for name, value in self._environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def cluster_of_this_job() -> str | None:
    """The address of the Ray cluster that runs this process as a job, or None where it is no Ray job.

    Ray gives its jobs both variables; RAY_ADDRESS alone may be a user's, for the `ray` command.
    """
    return os.environ.get("RAY_ADDRESS") if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else None


def resolve_client_address(cluster: str, name: str) -> str:
    """The client address (``tcp://HOST:PORT``) of the deployment ``name`` on a Ray cluster (``HOST:PORT`` or ``auto``).

    Raises `DeploymentError` if there is no such cluster or deployment.
    """
    with _connection(cluster):
        try:
            scheduler = ray.get_actor(actor_name(name, "scheduler"), namespace=NAMESPACE)
        except ValueError:
            raise DeploymentError(
                f"no deployment named {name!r} runs on the Ray cluster at {cluster}; start one with `headwise serve`"
            ) from None
        address: str = _get(scheduler.client_address.remote())
        return address


@contextlib.contextmanager
def _connection(cluster: str) -> Iterator[None]:
    connection = _Cluster.connect(cluster)
    try:
        yield
    finally:
        connection.disconnect()


def _read_authentication() -> None:
    """Let Ray see RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as they are now; by itself it reads them when imported.

    Processes that Ray starts read them at their own start, and would disagree with this one.
    """
    with contextlib.suppress(ImportError):  # releases of Ray without tokens
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


def _check_reachable(address: str, remedy: str) -> None:
    """Ray itself waits for minutes for a cluster that is not there."""
    if address.startswith("ray://"):
        raise DeploymentError(f"{address!r}: Ray clients cannot own a deployment; give the cluster's HOST:6379 instead")
    if address == "auto":
        current = Path("/tmp/ray/ray_current_cluster")  # where Ray itself looks
        address = current.read_text().strip() if current.exists() else ""
        if not address:
            return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise DeploymentError(f"{address!r} is no address of a Ray cluster; write HOST:PORT or auto")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise DeploymentError(f"no Ray cluster at {address}: {error}; {remedy}") from None


def _get(reference: Any) -> Any:
    """`ray.get`, raising headwise's own errors as they were raised and Ray's as `DeploymentError`."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, HeadwiseError):
            raise error.cause from None
        raise DeploymentError(f"an actor failed: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise DeploymentError(f"an actor of the deployment died: {first_line(error)}") from error


def _free_ports(*hosts: str) -> list[int]:
    """A port for each address of this machine, all of them free; raises `DeploymentError` for what is none."""
    with contextlib.ExitStack() as stack:
        ports = []
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                taken = stack.enter_context(socket.create_server((host, 0), family=family))
            except OSError as error:
                raise DeploymentError(f"cannot listen on {host}: {error}; choose another --host") from None
            ports.append(int(taken.getsockname()[1]))
        return ports


def _pid(actor: Any) -> int:
    return os.getpid()


def _exists(name: str, role: str) -> bool:
    try:
        ray.get_actor(actor_name(name, role), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
