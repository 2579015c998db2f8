"""The actor of the deployment's front."""

from __future__ import annotations

import ray

from headwise.actors.placement import node_address
from headwise.runtime.config import EngineConfig
from headwise.runtime.front_door import FrontDoor
from headwise.runtime.scheduler_server import SchedulerServer


@ray.remote(max_restarts=20, max_concurrency=4)
class GlobalScheduler:
    """Clients find a restarted scheduler again where the port was configured; a free one is taken anew."""

    def __init__(self, config: EngineConfig, secret: str) -> None:
        self._config = config
        self._secret = secret
        self._server: SchedulerServer | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self.start()

    def start(self) -> tuple[str, int]:
        """Open the model and serve; the node's address and the port. Raises `DeploymentError`, `ModelError`."""
        config = self._config
        front_door = FrontDoor.open(config)
        self._server = SchedulerServer(
            front_door.prepare,
            config.host,
            config.port,
            secret=self._secret,
            model=config.model,
            replicas=config.replicas,
            max_pending=config.max_queued,
        )
        self._server.start()
        return self.address()

    def address(self) -> tuple[str, int]:
        assert self._server is not None
        return node_address(), self._server.port

    def client_address(self) -> str:
        """Where clients connect to: ``tcp://HOST:PORT``."""
        host, port = self.address()
        return f"tcp://{host if self._config.host == '0.0.0.0' else self._config.host}:{port}"

    def ping(self) -> None:
        pass

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
