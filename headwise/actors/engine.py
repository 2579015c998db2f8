"""The actor of one replica: an engine, its server, and the supervision of its workers."""

from __future__ import annotations

import logging
import os
import threading
import time
from hashlib import sha256

import ray

from headwise.actors.placement import is_loopback, node_address
from headwise.actors.worker_group import WorkerGroup
from headwise.errors import DeploymentError, EngineDiedError, HeadwiseError
from headwise.runtime.block_storage import check_agrees, open_lookup
from headwise.runtime.config import EngineConfig
from headwise.runtime.engine import EngineCore
from headwise.runtime.engine_reports import Reporting
from headwise.runtime.engine_server import EngineServer
from headwise.runtime.front_door import FrontDoor
from headwise.runtime.host_copies import check_host_cache
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.model_card import with_pool
from headwise.runtime.watchdog import Watchdog
from headwise.storage.curve import CurveKeys
from headwise.storage.flusher import Flusher
from headwise.storage.lookup import StorageLookup

log = logging.getLogger(__name__)

MAX_RESTARTS = 20
"""Restarts of an engine's process before Ray gives it up."""
MAX_FAILED_STARTS = 3
"""Times in a row that new workers may fail to start before the engine's process gives up."""
_WATCH_S = 1.0


@ray.remote(max_restarts=MAX_RESTARTS, max_concurrency=4)
class Engine:
    """Serves by itself from the moment it is made, and again after Ray restarted it.

    With a lost worker its requests leave for other engines; then all ranks are started anew, with an empty cache and
    a new epoch. A server whose thread stands still ends the process.
    """

    def __init__(
        self,
        config: EngineConfig,
        index: int,
        front: tuple[str, int],
        secret: str,
        store_endpoint: str,
        curve: CurveKeys | None,
        namespace: str,
    ) -> None:
        """``front`` is the scheduler's node and port, ``namespace`` whose cache blocks it takes the engines' to be.

        No handles: an actor whose arguments hold references cannot be restarted once they are lost.
        """
        self._config = config
        self._name = f"engine-{index}"
        self._placement = ray.util.get_current_placement_group()
        self._front = front
        self._secret = secret
        self._token = sha256(f"{secret}/{index}".encode()).hexdigest()[:16]
        self._store_endpoint = store_endpoint
        self._curve = curve
        self._namespace = namespace
        self._group: WorkerGroup | None = None
        self._server: EngineServer | None = None
        self._flusher: Flusher | None = None
        self._lookup: StorageLookup | None = None
        self._watchdog: Watchdog | None = None
        self._core_died = threading.Event()
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._failure: HeadwiseError | None = None
        self._thread = threading.Thread(target=self._supervise, name="headwise-supervisor", daemon=True)
        self._thread.start()

    # ---- for the driver ----

    def ready(self) -> str:
        """Wait until the engine serves; its endpoint. Raises what keeps it from serving."""
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        assert self._server is not None
        return self._server.endpoint

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank; empty while they are being started."""
        group = self._group
        return [] if group is None else group.pids

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    # ---- the supervisor's thread ----

    def _supervise(self) -> None:
        try:
            self._open()
            self._serve()
        except HeadwiseError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("the engine's supervisor failed")
            self._give_up(DeploymentError(f"{self._name} failed: {type(error).__name__}: {error}"))
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()
            if self._server is not None:
                self._server.stop()
            if self._flusher is not None:
                self._flusher.close()
            if self._lookup is not None:
                self._lookup.close()

    def _open(self) -> None:
        """Everything that outlives the workers: model, flusher, server and who watches over it."""
        host, port = self._front
        address = node_address()
        if is_loopback(self._config.host):
            if host != address:
                raise DeploymentError(
                    f"{self._name} was placed on node {address}, which cannot reach {self._config.host} of node "
                    f"{host}: set host to 0.0.0.0"
                )
            host = address = "127.0.0.1"
        self._front_door = FrontDoor.open(self._config)
        check_agrees(f"{self._name} on node {address}", self._front_door.namespace, self._namespace)
        self._model_dir = resolve_model(self._config.model, self._config.cache_path)
        check_host_cache(self._config, self._front_door.card)
        self._lookup = open_lookup(self._config, self._front_door.card)
        epoch = time.time_ns()
        lookup, namespace = self._lookup, self._namespace
        volume = str if lookup is None else lambda: lookup.volume
        self._flusher = Flusher(self._name, epoch, self._store_endpoint, namespace, self._curve, volume=volume)
        self._server = EngineServer(
            f"tcp://{address}:*",
            reporting=Reporting(f"tcp://{host}:{port}", self._secret, self._name),
            flusher=self._flusher,
            epoch=epoch,
            on_died=self._on_died,
        )
        if _was_restarted():
            self._server.fault("the engine's process was started again")
        self._server.start()
        server = self._server
        self._watchdog = Watchdog(lambda: server.turns, self._config.engine_timeout_s, self._exit_stuck)
        self._watchdog.start()

    def _serve(self) -> None:
        """One group of workers after the other, until stopped or until none can be started."""
        failed_starts = 0
        while not self._stopping.is_set():
            group = WorkerGroup(self._config, self._model_dir, self._placement, self._token)
            try:
                group.wait_ready()
                failed_starts = 0
                self._attach(group)
                self._settled.set()
                self._watch(group)
            except HeadwiseError as error:
                failed_starts += 1
                log.error("%s: workers did not start: %s", self._name, error)
                if not self._settled.is_set() or failed_starts == MAX_FAILED_STARTS:
                    raise
            finally:
                self._group = None
                group.close()

    def _attach(self, group: WorkerGroup) -> None:
        assert self._server is not None
        card, tokenizer = self._front_door.card, self._front_door.tokenizer
        card = with_pool(card, self._config, group.executor.num_blocks * card.layout.block_bytes)
        core = EngineCore(self._config, card, tokenizer, group.executor, lookup=self._lookup)
        self._core_died.clear()
        wakers = group.executor.sockets if self._lookup is None else (*group.executor.sockets, self._lookup)
        self._server.attach(core, wakers)
        self._group = group

    def _watch(self, group: WorkerGroup) -> None:
        """Return once the engine's thread has let go of a group that lost a worker, or when stopped."""
        assert self._server is not None
        while not self._core_died.is_set():
            if self._stopping.is_set():
                self._server.stop()
                return
            try:
                group.watch(_WATCH_S)
            except HeadwiseError as error:
                self._server.fail(EngineDiedError(str(error)))
                self._core_died.wait()

    def _on_died(self, error: EngineDiedError) -> None:
        """On the server's thread: it uses the executor no more."""
        log.error("%s: %s", self._name, error)
        self._core_died.set()

    def _exit_stuck(self) -> None:
        """Ray starts the engine again; the workers end with this process."""
        if self._stopping.is_set():
            return
        log.error("%s has not got on for %g s: its process ends", self._name, self._config.engine_timeout_s)
        os._exit(1)

    def _give_up(self, error: HeadwiseError) -> None:
        """At the first start the driver is told, by `ready`. Later nobody asks: exit, so that Ray starts it again."""
        first_start = not self._settled.is_set() and not _was_restarted()
        self._failure = error
        self._settled.set()
        if not first_start:
            time.sleep(_WATCH_S)
            os._exit(1)


def _was_restarted() -> bool:
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)
