"""This process's connection to a Ray cluster, or to a local Ray instance that it starts and ends."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray._private import ray_constants

from headwise.actors.cluster_probe import OR_LOCAL, TO_FIND, can_connect, find_cluster, read_authentication
from headwise.actors.names import NAMESPACE
from headwise.errors import DeploymentError, first_line
from headwise.liveness_clock import LivenessClock
from headwise.sockets.scratch import ScratchDirectory, sweep

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20
"""For a Ray instance started here: nothing large goes through its object store."""
LOST_S = 15.0
"""A cluster whose control service has not answered for so long is lost. Ray ends this process some time later."""
_PROBE_S = 1.0
_PREFIX = "hw-"
_LOOPBACK_VARIABLE = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
_VARIABLES = (
    "PYTHONBREAKPOINT",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_USAGE_STATS_ENABLED",
    _LOOPBACK_VARIABLE,
)
"""Variables that are set in this process, here or by `ray.init`. The next instance would obey them."""
_QUIET: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}


class Cluster:
    """A connection to Ray, and the local instance if it was started here.

    owned: whether it is a local instance that was started here
    """

    def __init__(self, scratch: ScratchDirectory | None = None) -> None:
        self.owned = scratch is not None
        self._scratch = scratch
        self._environment: dict[str, str | None] | None = None
        self._watches: list[ClusterWatch] = []

    @classmethod
    def start(cls) -> Cluster:
        """Start a Ray instance of one node in this process: with files and a token of its own, at the loopback address,
        without dashboard. Raises `DeploymentError`.
        """
        if ray.is_initialized():
            raise DeploymentError(
                "this process is connected to a Ray cluster already: give address='auto' to deploy there, or call "
                "ray.shutdown() first"
            )
        # Ray's sockets lie in here, and their paths may have no more than 107 characters.
        sweep("/tmp", _PREFIX)
        scratch = ScratchDirectory("/tmp", _PREFIX)
        cluster = cls(scratch)
        # Without a token of its own Ray would write one to ~/.ray, and every later Ray of this user would ask for it.
        token = scratch.path / "token"
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), _LOOPBACK_VARIABLE: "0"}
        try:
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
            cluster._connect(
                variables,
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(scratch.path),
                _system_config={"worker_niceness": 0},  # serving is no background work
            )
        except Exception as error:
            cluster.disconnect()
            raise DeploymentError(f"a local Ray instance could not be started: {error}") from error
        return cluster

    @classmethod
    def connect(cls, address: str, remedy: str = OR_LOCAL) -> Cluster:
        """Connect to a running cluster (``HOST:PORT`` or ``auto``), or use the connection there is.

        remedy: what to do where there is none

        Raises `DeploymentError`, in at most 10 s if there is no such cluster or it refuses this process's token.
        """
        cluster = cls()
        if ray.is_initialized():
            return cluster
        found = find_cluster(address, remedy)
        try:
            cluster._connect({}, address=found)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise DeploymentError(f"the Ray cluster at {found} cannot be joined: {first_line(error)}") from None
        return cluster

    def _connect(self, variables: dict[str, str], **options: Any) -> None:
        self._environment = {name: os.environ.get(name) for name in _VARIABLES}
        if variables:
            os.environ.pop("RAY_AUTH_TOKEN", None)  # it would go before the file
            os.environ.update(variables)
        try:
            read_authentication()
            with _loopback_only() if _LOOPBACK_VARIABLE in variables else contextlib.nullcontext():
                ray.init(**options, **_QUIET)
        except BaseException:
            self.disconnect()
            raise

    def watch(self, on_lost: Callable[[DeploymentError], None]) -> None:
        """Watch the cluster: ``on_lost`` is called, on a thread, when it or this node's part of it is gone."""
        context = ray.get_runtime_context()
        here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        raylet = f"{here['NodeManagerAddress']}:{here['NodeManagerPort']}"
        self._watches = [
            ClusterWatch("control service (GCS)", str(context.gcs_address), on_lost),
            ClusterWatch("process on this node (raylet)", raylet, on_lost),
        ]
        for watch in self._watches:
            watch.start()

    @property
    def is_lost(self) -> bool:
        return any(watch.is_lost for watch in self._watches)

    def disconnect(self) -> None:
        """Close the connection and end the instance, if they were made here, and restore the environment."""
        for watch in self._watches:
            watch.stop()
        if self._environment is not None:
            ray.shutdown()
            for name, value in self._environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            self._environment = None
        if self._scratch is not None:
            self._scratch.close()


class ClusterWatch:
    """Notices that a process is gone that Ray cannot work without. Calls to Ray wait for it, and later end this process
    with an error of their own.

    what:    which process it is
    address: ``HOST:PORT`` at which it listens
    on_lost: called once
    """

    def __init__(
        self,
        what: str,
        address: str,
        on_lost: Callable[[DeploymentError], None],
        is_there: Callable[[str], bool] = can_connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_lost = False
        self._what = what
        self._address = address
        self._on_lost = on_lost
        self._is_there = is_there
        self._clock = LivenessClock(clock)
        self._heard_at = self._clock()
        self._is_away = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-cluster-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def look(self) -> bool:
        """Ask once; whether the cluster is lost. To be called every second."""
        was_there = self._is_there(self._address)
        now = self._clock()
        if was_there:
            if self._is_away:
                log.warning("Ray's %s at %s answers again", self._what, self._address)
            self._heard_at, self._is_away = now, False
        elif not self._is_away:
            self._is_away = True
            log.warning("Ray's %s at %s does not answer", self._what, self._address)
        return now - self._heard_at > LOST_S

    def _run(self) -> None:
        next_look = 0.0
        while not self._stopping.wait(_PROBE_S / 4):  # the clock counts time that is looked at several times a second
            self._clock()
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + _PROBE_S
            if self.look():
                self.is_lost = True
                self._on_lost(
                    DeploymentError(
                        f"the Ray cluster is lost: its {self._what} at {self._address} has not answered for "
                        f"{LOST_S:g} s; the deployment ends with it: start both again"
                    )
                )
                return


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Have Ray take 127.0.0.1 for this node's address, as it does where it serves one machine only (macOS, Windows).

    Its processes then listen there and nowhere else. By itself Ray replaces a loopback address that it is given.
    """
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled


def cluster_of_this_job() -> str | None:
    """The address of the Ray cluster that runs this process as a job, or None where it is no Ray job.

    Ray gives its jobs both variables; RAY_ADDRESS alone may be a user's, for the `ray` command.
    """
    return os.environ.get("RAY_ADDRESS") if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else None


@contextlib.contextmanager
def connection(address: str, remedy: str = TO_FIND) -> Iterator[str]:
    """A connection to a running cluster for as long as the block takes; its ``HOST:PORT``. Raises as `Cluster.connect`
    does."""
    cluster = Cluster.connect(address, remedy)
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        cluster.disconnect()
