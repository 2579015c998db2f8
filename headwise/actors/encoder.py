"""The actor that encodes images, and where it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headwise import heap
from headwise.actors.addresses import engine_host, listen_at_free_port, ports_in_turn, scheduler_host
from headwise.actors.ending import Ending, die_when_told_to
from headwise.actors.front import About, Front, Keys
from headwise.actors.placement import node_address
from headwise.actors.remote import remote
from headwise.actors.restarts import Life
from headwise.log_lines import show_log_lines
from headwise.runtime.config.addresses import parse_ports
from headwise.runtime.config.engine_config import EngineConfig

if TYPE_CHECKING:
    from headwise.runtime.encoder.image_encoder import Place

_LEAST_CPUS = 0.1


@remote(max_concurrency=5)
class ImageEncoderActor:
    """Holds an `EncoderServer` with the model's vision tower. It keeps no state but what it made of the latest images:
    one that is started again makes it anew.

    front: where the scheduler is
    start: how many times it was started before
    """

    def __init__(self, config: EngineConfig, name: str, front: Front, keys: Keys, start: int = 0) -> None:
        die_when_told_to()
        show_log_lines()
        self._config, self._name, self._front, self._keys = config, name, front, keys
        self._server: Any = None
        self._ending = Ending()

    def ready(self) -> str:
        """Load the tower and serve; the endpoint. Raises `ModelError`, `ConfigError`. May be called again."""
        if self._server is None:
            self._server = self._serve()
        return str(self._server.endpoint)

    def _serve(self) -> Any:
        from headwise.runtime.encoder.image_encoder import ImageEncoder
        from headwise.runtime.encoder.reports import Reporting
        from headwise.runtime.encoder.server import EncoderServer
        from headwise.runtime.loader.resolve import resolve_model

        config, keys = self._config, self._keys
        directory = resolve_model(config.model, config.cache_path)
        encoder = ImageEncoder.open(config, directory, place=_gpu(config) if config.image_encoder_gpus else None)
        encoder.warm_up()
        reporting = Reporting(self._scheduler, keys.secret, self._name, config.advertise_host, keys.own)
        server = listen_at_free_port(
            engine_host(config.host, node_address()),
            node_address(),
            ports_in_turn(parse_ports(config.engine_ports), self._name),
            lambda endpoint: EncoderServer(encoder, endpoint, reporting=reporting, keys=keys.inner, users=keys.users),
        )
        heap.settle()
        server.start()
        return server

    @property
    def _scheduler(self) -> str:
        return f"tcp://{scheduler_host(self._config.host, self._front.node)}:{self._front.port}"

    def ended(self) -> None:
        """Return when it is stopped. A caller that waits here learns at once when the process dies."""
        self._ending.wait()

    def about(self) -> About:
        """For an owner that finds this actor."""
        return About(self._front)

    def follow(self, front: Front) -> None:
        """The scheduler is there from now on, or soon."""
        if front == self._front:
            return
        self._front = front
        if self._server is not None:
            self._server.follow(self._scheduler)

    def loop_count(self) -> int:
        """See `EncoderServer`."""
        return 0 if self._server is None else int(self._server.loop_count)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._ending.come()


def _gpu(config: EngineConfig) -> Place:
    """The GPU that Ray shows this process, of which others may have a part, too."""
    from headwise.runtime.encoder.image_encoder import Place
    from headwise.runtime.worker.cuda_device import CudaDevice

    device = CudaDevice(replace(config, tensor_ops="cupy", weights_dtype="auto"))
    return Place(device.ops, device.current)


class EncoderSite:
    """Where an encoder runs: wherever Ray finds what it asks for, as it keeps nothing that others miss."""

    node = address = ""

    def __init__(self, config: EngineConfig, is_detached: bool) -> None:
        self._cpus, self._gpus = config.image_encoder_cpus or _LEAST_CPUS, config.image_encoder_gpus
        self._is_detached = is_detached

    @property
    def nodes(self) -> frozenset[str]:
        """Nobody knows: Ray does not ask for them."""
        return frozenset()

    def choose(self, life: Life) -> None:
        """Ray does."""

    def is_alive(self) -> bool:
        return True

    def is_placed(self) -> bool:
        return True

    def options(self) -> dict[str, Any]:
        lifetime = {"lifetime": "detached"} if self._is_detached else {}
        return {"num_cpus": self._cpus, "num_gpus": self._gpus, "scheduling_strategy": "SPREAD", **lifetime}

    def needs(self) -> str:
        return f"a node with {self._cpus:g} CPU" + (f" and {self._gpus:g} GPU" if self._gpus else "")

    def release(self) -> None:
        """It took nothing."""
