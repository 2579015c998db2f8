"""A real HTTP server over a real client of a deployment of this process; only the model and its texts are scripted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from support.engine.repeating import RepeatingCore
from support.engine.scripted_deployment import Deployment

from headwise.errors import InvalidRequestError
from headwise.runtime.client.client import Client
from headwise.runtime.frontend.prompts import TextLimits
from headwise.runtime.http.app import AppOptions, make_app
from headwise.runtime.http.logprobs import Decoder
from headwise.runtime.http.server import HttpServer, listen
from headwise.runtime.http.texts import Texts
from headwise.runtime.http.tools.select import Parsers
from headwise.runtime.loader.chat import plain_chat
from headwise.runtime.protocol.images import PromptImage

MODEL = "scripted"


class CountingDecoder:
    """Of a `ScriptedCore`'s tokens."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in ids)


class ScriptedTexts:
    """Tokens of prompts are characters; those of answers are numbers, as a `ScriptedCore` says them."""

    limits = TextLimits(1000, 4)

    async def encode(self, prompt: str | None, messages: Any, images: Sequence[PromptImage] = ()) -> list[int]:
        text = (
            prompt
            if prompt is not None
            else "".join(message["content"] for message in plain_chat(messages)["messages"])
        )
        self.limits.size(text, None)
        return [ord(character) for character in text]

    async def decode(self, tokens: Sequence[int]) -> str:
        if any(not 0 <= token < 0x110000 for token in tokens):
            raise InvalidRequestError(f"token ids are from 0 to 1114111, got {tokens}")
        return "".join(map(chr, tokens))

    def token_bytes(self, token: int) -> bytes | None:
        return f"{token} ".encode() if token < 0x110000 else None

    def decoder(self) -> Decoder:
        return CountingDecoder()


@dataclass(frozen=True)
class Served:
    """A server's port, who asks it, the server itself, and the client that it has."""

    port: int
    http: httpx.Client
    server: HttpServer
    client: Client

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(deployment: Deployment, texts: Texts | None = None, port: int = 0, **options: Any) -> Iterator[Served]:
    """The deployment over HTTP, with these `AppOptions`. port: 0: a free one"""
    with Client(deployment.address) as client:
        app = make_app(client, texts or ScriptedTexts(), AppOptions(**{"model": MODEL, **options}))
        server = HttpServer(app, listen("127.0.0.1", port))
        server.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120.0) as http:
                yield Served(server.port, http, server, client)
        finally:
            server.stop()


@contextmanager
def serving_repeated(core: RepeatingCore) -> Iterator[Served]:
    """What answers with its prompt, in which there may be Hermes' calls, and thoughts."""
    deployment = Deployment()
    deployment.add_engine(core)
    parsers = Parsers("hermes", "think", lambda tokens: "".join(map(chr, tokens)))
    with serving(deployment, parsers=parsers) as served:
        yield served
    deployment.close()
