"""The actor of the deployment's front."""

from __future__ import annotations

import logging
import threading
import time

import ray

from headwise.actors.names import NAMESPACE, actor_name
from headwise.actors.placement import node_address
from headwise.actors.remote import remote
from headwise.errors import DeploymentError
from headwise.runtime.config import EngineConfig
from headwise.runtime.front_door import FrontDoor
from headwise.runtime.scheduler_server import SchedulerServer, router_options
from headwise.runtime.tokenizer_pool import TokenizerPool
from headwise.storage.curve import CurveKeys
from headwise.storage.store_client import StoreClient

log = logging.getLogger(__name__)

_BIND_TIMEOUT_S = 10.0
"""Longest wait of a restarted scheduler for the process before it to let go of the port."""


@remote(max_restarts=20, max_concurrency=4)
class GlobalScheduler:
    """Serves at a port that a restarted one binds again: clients and engines find it by themselves."""

    def __init__(
        self, config: EngineConfig, secret: str, port: int, store_endpoint: str, curve: CurveKeys | None
    ) -> None:
        self._config = config
        self._secret = secret
        self._port = port
        self._store_endpoint = store_endpoint
        self._curve = curve
        self._front_door: FrontDoor | None = None
        self._store: StoreClient | None = None  # the server's, while that runs
        self._server: SchedulerServer | None = None
        self._tokenizers: TokenizerPool | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._start_again()

    def start(self) -> tuple[str, int]:
        """Open the model and serve; the node's address and the port. Raises `DeploymentError`, `ModelError`."""
        config = self._config
        front_door = self._front_door = self._front_door or FrontDoor.open(config)
        store = self._store = StoreClient(self._store_endpoint, front_door.namespace, self._curve)
        tokenising, self._tokenizers = front_door.with_pool(config)
        try:
            self._server = SchedulerServer(
                tokenising,
                config.host,
                self._port,
                secret=self._secret,
                model=config.model,
                replicas=config.replicas,
                routing=router_options(config, front_door),
                max_queued=config.max_queued,
                hold_s=config.start_timeout_s,
                store=store,
                index_timeout_s=config.index_timeout_s,
                on_silent=self._replace,
                size=front_door.limits.size,
                tokenizers=config.tokenizer_processes,
            )
        except DeploymentError:
            self._tokenizers.close()
            store.close()
            raise
        self._server.start()
        return self.address()

    def _start_again(self) -> None:
        deadline = time.monotonic() + _BIND_TIMEOUT_S
        while True:
            try:
                self.start()
                return
            except DeploymentError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.1)

    def namespace(self) -> str:
        """Of the index: what its blocks are of."""
        assert self._front_door is not None
        return self._front_door.namespace

    def address(self) -> tuple[str, int]:
        return node_address(), self._port

    def client_address(self) -> str:
        """Where clients connect to: ``tcp://HOST:PORT``."""
        host, port = self.address()
        return f"tcp://{host if self._config.host == '0.0.0.0' else self._config.host}:{port}"

    @ray.method(enable_task_events=False)
    def turns(self) -> int:
        """See `SchedulerServer`."""
        assert self._server is not None
        return self._server.turns

    def stop(self) -> None:
        if self._tokenizers is not None:
            self._tokenizers.close()  # first: the server's end waits for what is being tokenised
        if self._server is not None:
            self._server.stop()
        if self._store is not None:
            self._store.close()

    def _replace(self, engine: str) -> None:
        """On the server's thread, which must not wait: have Ray end a process that does not run, and start another."""
        threading.Thread(target=self._kill, args=(engine,), name=f"headwise-replace-{engine}", daemon=True).start()

    def _kill(self, engine: str) -> None:
        log.error("%s has said nothing for %g s: its process is replaced", engine, self._config.engine_timeout_s)
        try:
            actor = ray.get_actor(actor_name(self._config.name, engine), namespace=NAMESPACE)
            ray.kill(actor, no_restart=False)
        except (ValueError, ray.exceptions.RayError) as error:
            log.error("%s could not be replaced: %s", engine, error)
