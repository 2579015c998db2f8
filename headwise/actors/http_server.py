"""The actors that serve HTTP."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headwise import heap
from headwise.actors.addresses import check_free, endpoint_to
from headwise.actors.ending import Ending, die_when_told_to, leave_in_time
from headwise.actors.front import About, Front, UsersOfFile, users_with
from headwise.actors.placement import node_address
from headwise.actors.remote import remote
from headwise.log_lines import show_log_lines
from headwise.runtime.config.addresses import is_loopback
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.http import check_otel
from headwise.runtime.config.keys import read_keys
from headwise.sockets.curve import ClientKeys

if TYPE_CHECKING:
    from headwise.runtime.http.metrics import RequestMetrics
    from headwise.runtime.http.spans import Tracing

log = logging.getLogger(__name__)


@remote(max_concurrency=5)
class HttpServerActor:
    """Holds an `HttpServer` with a client of the deployment. It keeps no state: one that is started again is at once
    as good as its predecessor.

    scheduler: the endpoint that its client connects to, until it is told another one: see `follow`
    keys:      with which it does; None: in the clear
    start:     how many times it was started before
    """

    def __init__(
        self, config: EngineConfig, name: str, scheduler: str, keys: ClientKeys | None, start: int = 0
    ) -> None:
        die_when_told_to()
        show_log_lines()
        self._config = config
        self._name = name
        self._scheduler = scheduler
        self._keys = keys
        self._closing: list[Callable[[], None]] = []
        self._server: Any = None
        self._client: Any = None
        self._is_leaving = False
        self._front: Front | None = None  # as it was told
        self._ending = Ending()

    def ready(self) -> int:
        """Serve; the port. Raises `DeploymentError`, `ConfigError`. May be called again."""
        if self._server is not None:
            return self._config.http
        from headwise.actors.ray_metrics import RayMetrics
        from headwise.runtime.client.client import Client
        from headwise.runtime.config.info import head_groups
        from headwise.runtime.config.model_card import read_model_card
        from headwise.runtime.frontend.prompts import TextLimits
        from headwise.runtime.http.app import AppOptions, make_app
        from headwise.runtime.http.guard import ApiKeys
        from headwise.runtime.http.metrics import RequestMetrics
        from headwise.runtime.http.server import HttpServer, listen
        from headwise.runtime.http.texts import ModelTexts
        from headwise.runtime.http.tools.select import Parsers
        from headwise.runtime.loader.resolve import resolve_model
        from headwise.runtime.loader.tokenizer import Tokenizer
        from headwise.units import parse_bytes

        config = self._config
        directory = resolve_model(config.model, config.cache_path)
        card, tokenizer = (
            read_model_card(config, directory, identify=False),
            Tokenizer.from_directory(directory, config.chat_template),
        )
        limits = TextLimits(card.max_model_len, tokenizer.longest_token)
        model = card.config
        texts = ModelTexts(directory, tokenizer, limits, model.vocab_size, config.chat_template, model.image_tokens)
        self._closing.append(texts.close)
        client = self._client = Client(self._scheduler, keys=self._keys)
        self._closing.append(client.close)
        counts = RequestMetrics(self._name)
        news = UsersOfFile(config, str)
        self._closing.append(news.close)
        api_keys = ApiKeys(users_with(read_keys(config.api_key, config.api_key_file), str), news)
        options = AppOptions(
            config.model,
            api_keys,
            not (api_keys or config.insecure),
            parse_bytes(config.http_max_body),
            counts,
            groups=tuple(head_groups(card)),
            tracing=self._tracing(counts),
            parsers=Parsers.choose(
                config.tool_parser, config.reasoning_parser, tokenizer.chat_template, tokenizer.written
            ),
            adapters=tuple(config.adapter_paths),
            has_operations=config.http_operations,
        )
        tls = (config.http_cert, config.http_key) if config.http_cert else None
        self._server = HttpServer(make_app(client, texts, options), listen(config.http_host, config.http), tls)
        heap.settle()
        self._server.start()
        self._closing.append(RayMetrics(config.name, counts.registry.collect).close)
        return config.http

    def _tracing(self, counts: RequestMetrics) -> Tracing | None:
        if not self._config.otlp_endpoint:
            return None
        from headwise.runtime.http.spans import Tracing

        tracing = Tracing(self._config.otlp_endpoint, self._config.model, self._name, counts)
        self._closing.append(tracing.close)
        return tracing

    def ended(self) -> None:
        """Return when it is stopped. A caller that waits here learns at once when the process dies."""
        self._ending.wait()

    def about(self) -> About:
        """For an owner that finds this actor."""
        return About(self._front, is_leaving=self._is_leaving)

    def follow(self, front: Front) -> None:
        """The scheduler is there from now on, or soon."""
        self._front = front
        if self._client is not None:
            is_here = front.node == node_address()
            self._client.follow(endpoint_to(self._config.host, front.node, front.port, is_here=is_here))

    def leave(self, timeout_s: float, until: float = math.inf, front: Front | None = None) -> None:
        """Another server takes its place, on another node. This one takes no more connections, and ends when the
        answers under way have, or after ``timeout_s``: then `ended` returns.

        until: when the node is taken away, as `time.time` counts somewhere
        front: where the scheduler is from now on, or soon; None: nobody knows
        """
        self._is_leaving = True
        if front is not None:
            self.follow(front)
        leave_in_time(self._leave, timeout_s, until)

    def _leave(self, timeout_s: float) -> None:
        server = self._server
        if server is not None and not server.leave(timeout_s):
            log.warning("%s ends %d answers: its node is about to go", self._name, server.num_connections)
            self._client.close("the node of this HTTP server is about to go: ask again, where the deployment is now")
        self.stop()

    def loop_count(self) -> int:
        """See `HttpServer`."""
        return int(self._server.loop_count)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        while self._closing:
            self._closing.pop()()
        self._ending.come()


def check_http_start(config: EngineConfig) -> None:
    """Raise what keeps HTTP from being served here, before anything is started; say where it is."""
    if not (is_loopback(config.host) or config.api_key or config.api_key_file or config.insecure):
        log.warning("only clients by way of the Ray cluster (ray:...) are served: give --api-key-file, or --insecure")
    if not config.http:
        return
    from headwise.runtime.http.server import check_certificate

    read_keys(config.api_key, config.api_key_file)
    if config.otlp_endpoint:
        check_otel()
    if config.http_cert:
        check_certificate(config.http_cert, config.http_key)
    host = config.http_host
    check_free(host, config.http, "--http")
    if host != config.host and not is_loopback(config.host):
        log.warning("HTTP is served at %s only: give --api-key-file, or --insecure, for %s", host, config.host)


def http_address(config: EngineConfig, client_address: str) -> str:
    """Where HTTP is served, for people: ``http://HOST:PORT``; empty: nowhere."""
    if not config.http:
        return ""
    host = config.http_host
    if host == config.host:
        host = client_address.removeprefix("tcp://").rpartition(":")[0]
    return f"{'https' if config.http_cert else 'http'}://{host}:{config.http}"
