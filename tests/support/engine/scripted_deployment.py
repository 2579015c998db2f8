"""A deployment of one process: a real scheduler's server and real engines' servers around scripted cores."""

from __future__ import annotations

import threading
import time
from typing import Any

from support.engine.scripted import ScriptedCore
from support.waiting import eventually

from headwise.actors.front import Keys
from headwise.errors import EngineDiedError, InvalidRequestError
from headwise.runtime.client.client import Client
from headwise.runtime.config.model_card import Naming
from headwise.runtime.engine.reports import Reporting
from headwise.runtime.engine.server import EngineServer
from headwise.runtime.frontend.scaling import Exchange
from headwise.runtime.frontend.scheduler_server import SchedulerServer
from headwise.runtime.frontend.users_service import UsersSource
from headwise.runtime.protocol.images import ImagePlaces, with_images
from headwise.runtime.protocol.prompt_items import placed
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams, as_token_ids

SECRET = "of-this-deployment"


class ScriptedPreprocessor:
    """A preprocessor whose tokens are characters; of a chat with images, only these count."""

    naming = Naming("scripted")

    def prepare(
        self,
        *,
        prompt: Any,
        messages: Any,
        sampling: dict[str, Any],
        priority: int,
        cache_salt: str,
        items: Any,
        adapter: str,
        images: Any,
    ) -> GenerateRequest:
        if images:
            places = ImagePlaces(0, 2)
            tokens, items = with_images(as_token_ids([1, *map(places.of, images)]), images, places, 1 << 20)
        else:
            text = prompt if messages is None else "".join(message["content"] or "" for message in messages["messages"])
            tokens = as_token_ids([ord(c) for c in text] if isinstance(text, str) else text)
        if not len(tokens):
            raise InvalidRequestError("the prompt is empty")
        params = SamplingParams.from_wire(sampling)
        name, keys = f"r-{time.monotonic_ns()}-{threading.get_ident()}", placed(items, len(tokens)).extra_keys
        return GenerateRequest(name, tokens, params, priority, cache_salt, adapter, extra_keys=keys)

    def hashes(self, request: GenerateRequest) -> list[bytes]:
        return []


class Deployment:
    """A scheduler and engines of this process, whose owner is the test: it has ``exchange``.

    keys: of the deployment; without, its connections are in the clear
    users_source, users_are_known: see `SchedulerServer`
    """

    def __init__(
        self,
        replicas: int = 1,
        keys: Keys | None = None,
        without_images: str = "images are not enabled here",
        users_source: UsersSource | None = None,
        users_are_known: bool = True,
    ) -> None:
        self.keys = keys or Keys(SECRET)
        self.exchange = Exchange()
        self.preprocessor = ScriptedPreprocessor()
        self.scheduler = SchedulerServer(
            self.preprocessor,
            "127.0.0.1",
            0,
            secret=self.keys.secret,
            model="scripted",
            keys=self.keys.inner,
            users=self.keys.users,
            users_source=users_source,
            users_are_known=users_are_known,
            replicas=replicas,
            exchange=self.exchange,
            without_images=without_images,
        )
        self.scheduler.start()
        self.address = f"127.0.0.1:{self.scheduler.port}"
        self.servers: list[EngineServer] = []
        self.died: list[EngineDiedError] = []

    def add_engine(self, core: ScriptedCore | None, **options: Any) -> EngineServer:
        reporting = Reporting(
            f"tcp://{self.address}", self.keys.secret, f"engine-{len(self.servers)}", keys=self.keys.own
        )
        options = {"keys": self.keys.inner, "users": self.keys.users, **options}
        server = EngineServer("tcp://127.0.0.1:*", reporting=reporting, on_died=self.died.append, **options)
        if core is not None:
            server.attach(core)
        server.start()
        self.servers.append(server)
        with Client(self.address, keys=self.keys.own) as client:
            eventually(lambda: len(client.stats()["engines"]) == len(self.servers))
        return server

    def close(self) -> None:
        for server in self.servers:
            server.stop()
        self.scheduler.stop()
