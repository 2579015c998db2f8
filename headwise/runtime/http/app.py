"""The ASGI application: which path is answered by what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headwise import __version__
from headwise.errors import HeadwiseError, InvalidRequestError
from headwise.runtime.client.client import Client
from headwise.runtime.http.answers import Chat, Completion, Telling
from headwise.runtime.http.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    Wanted,
    check_model,
    checked_chat,
    parse,
    wanted_chat,
    wanted_completion,
)
from headwise.runtime.http.body_reader import BodyReader
from headwise.runtime.http.deployment_metrics import DeploymentMetrics, DeploymentView
from headwise.runtime.http.errors import MESSAGES, ApiError, invalid
from headwise.runtime.http.form import Form
from headwise.runtime.http.generation import Generation
from headwise.runtime.http.guard import ApiKeys, Guard, tenant_of
from headwise.runtime.http.logprobs import AnswerLogprobs, HeldLogprobs, LogprobForms
from headwise.runtime.http.message_bodies import (
    CountBody,
    MessagesBody,
    choice_of,
    counted_chat,
    wanted_message,
)
from headwise.runtime.http.messages import MessageForm
from headwise.runtime.http.metrics import RequestMetrics
from headwise.runtime.http.operations import Operations
from headwise.runtime.http.overview import overview
from headwise.runtime.http.page import HEADERS as PAGE_HEADERS
from headwise.runtime.http.page import PATHS as PAGE_PATHS
from headwise.runtime.http.page import page_routes
from headwise.runtime.http.response_bodies import ResponseBody, wanted_response
from headwise.runtime.http.response_bodies import choice_of as response_choice
from headwise.runtime.http.responses import ResponseForm
from headwise.runtime.http.texts import Texts
from headwise.runtime.http.tools.choice import ToolChoice
from headwise.runtime.http.tools.select import Parsers
from headwise.runtime.loader.chat_images import has_files, take_images, with_files
from headwise.runtime.protocol.images import IMAGE_LIMITS

if TYPE_CHECKING:
    from headwise.runtime.http.spans import Tracing

MAX_BODY_BYTES = 16 << 20

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class AppOptions:
    """model: its name, as clients give it
    keys:     of which each request must bear one
    is_local: requests must be for this machine, by an address or as localhost
    max_body: most bytes of a request's body
    counts:   what the server counts
    groups:   the model's head groups in words: which, and what they are
    tracing:  makes spans of requests; None: nobody asked for them
    parsers:  what finds calls of tools and reasoning in the model's answers
    adapters: names of LoRA adapters, which are models of their own as far as clients see; at the start
    has_operations: whether operators may ask for some
    """

    model: str
    keys: ApiKeys = field(default_factory=ApiKeys)
    is_local: bool = False
    max_body: int = MAX_BODY_BYTES
    counts: RequestMetrics = field(default_factory=lambda: RequestMetrics("http-0"))
    groups: tuple[tuple[str, str], ...] = ()
    tracing: Tracing | None = None
    parsers: Parsers = field(default_factory=Parsers)
    adapters: tuple[str, ...] = ()
    has_operations: bool = False


def make_app(client: Client, texts: Texts, options: AppOptions) -> ASGIApp:
    """The application over a deployment's client, which lives at least as long."""
    api = _Api(client, texts, options)
    routes: dict[str, tuple[str, Endpoint]] = {
        "/v1/models": ("GET", api.models),
        "/v1/chat/completions": ("POST", api.chat),
        "/v1/completions": ("POST", api.completions),
        "/v1/responses": ("POST", api.responses),
        MESSAGES: ("POST", api.messages),
        f"{MESSAGES}/count_tokens": ("POST", api.count_tokens),
        "/tokenize": ("POST", api.tokenize),
        "/detokenize": ("POST", api.detokenize),
        "/health": ("GET", api.health),
        "/ready": ("GET", api.ready),
        "/version": ("GET", api.version),
        "/metrics": ("GET", api.metrics),
        "/deployment": ("GET", api.deployment),
        **(api.operations.routes if options.has_operations else {}),
    }
    traced = options.tracing.traced if options.tracing is not None else _untraced
    starlette = Starlette(
        routes=[
            *(Route(path, traced(path, endpoint), methods=[method]) for path, (method, endpoint) in routes.items()),
            Route("/v1/models/{name:path}", api.model, methods=["GET"]),
            *page_routes(),
        ],
        exception_handlers={HTTPException: _not_found, ApiError: _answer, HeadwiseError: _answer, Exception: _answer},
    )
    starlette.router.redirect_slashes = False
    return Guard(starlette, options.keys, options.is_local, api.counts, (*routes, *PAGE_PATHS))


class _Api:
    """The endpoints. counts: what they count; operations: others"""

    def __init__(self, client: Client, texts: Texts, options: AppOptions) -> None:
        self.counts = options.counts
        self._client = client
        self._texts = texts
        self._models = (options.model, *options.adapters)
        self._model = options.model
        self._parsers = options.parsers
        self._bodies = BodyReader(options.max_body)
        self._view = DeploymentView(client)
        self.operations = Operations(client, self._view, self._body, self._look_for_models)
        self._logprobs = LogprobForms(texts)
        self._held = HeldLogprobs()
        self._groups = options.groups
        self._since = int(time.time())

    async def _check_model(self, asked: str | None) -> None:
        """Raise `ApiError` for another model than those that are served: the deployment's, and its adapters, of which
        there may be others by now."""
        if asked is not None and asked not in self._models:
            await self._look_for_models()
        check_model(asked, self._models)

    async def _look_for_models(self) -> None:
        with suppress(HeadwiseError):  # the scheduler is away: those that are known may be there still
            self._models = (self._model, *(await self._view.stats())["weights"]["adapters"])

    async def _body(self, request: Request) -> bytes:
        tenant, client = tenant_of(request), request.client
        return await self._bodies.read(request, tenant.name if tenant else client.host if client else "")

    async def models(self, request: Request) -> Response:
        await self._look_for_models()
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in self._models]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._check_model(name)
        return JSONResponse(self._model_card(name))

    async def _generation(
        self, request: Request, model: str | None, wanted: Wanted, form: Form, echoed: Sequence[str] = ()
    ) -> Generation:
        """What a request is answered by. model: that it asks for, which may be an adapter"""
        options = dict(wanted.options)
        if model not in (None, self._model):
            options["adapter"] = model
        if (tenant := tenant_of(request)) is not None:
            options.update(tenant=tenant.name, priority=tenant.at_most(options.get("priority", 0)))
        messages = wanted.messages
        if has_files(messages):  # which are large: others' tokens need not wait for them
            messages = await asyncio.to_thread(_with_files, wanted)
        wanted = replace(wanted, options=options, messages=messages)
        return Generation(self._client, wanted, form, echoed, self.counts, self._held)

    async def chat(self, request: Request) -> Generation:
        body = parse(ChatBody, await self._body(request))
        await self._check_model(body.model)
        choice = ToolChoice.of(body.tools, body.tool_choice, body.parallel_tool_calls, self._parsers)
        wanted = wanted_chat(body, choice, self._parsers)
        logprobs = self._logprobs.chat if wanted.has_logprobs else None
        answers = choice.answers(self._parsers, wanted.sampling.guided is not None)
        form = Chat(self._telling(body, wanted, logprobs), answers)
        return await self._generation(request, body.model, wanted, form)

    def _telling(
        self, body: ChatBody | CompletionBody, wanted: Wanted, logprobs: Callable[[str], AnswerLogprobs] | None
    ) -> Telling:
        prompt_logprobs = None if body.prompt_logprobs is None else self._logprobs.prompt
        has_tokens = bool(body.return_token_ids)
        told = wanted.include_usage, wanted.counts, logprobs, prompt_logprobs, has_tokens, wanted.n
        return Telling(body.model or self._model, *told)

    async def completions(self, request: Request) -> Generation:
        body = parse(CompletionBody, await self._body(request))
        await self._check_model(body.model)
        wanted = wanted_completion(body)
        echoed = await self._echoed(wanted) if wanted.echo else ()
        form_of = self._logprobs.echoing_completion if wanted.echo else self._logprobs.completion
        form = Completion(self._telling(body, wanted, form_of if wanted.has_logprobs else None))
        return await self._generation(request, body.model, wanted, form, echoed)

    async def responses(self, request: Request) -> Generation:
        body = parse(ResponseBody, await self._body(request))
        await self._check_model(body.model)
        choice = response_choice(body, self._parsers)
        wanted = wanted_response(body, choice, self._parsers)
        answers = choice.answers(self._parsers, wanted.sampling.guided is not None)
        logprobs = self._logprobs.chat() if wanted.has_logprobs else None
        form = ResponseForm(body.model or self._model, body, answers, logprobs)
        return await self._generation(request, body.model, wanted, form)

    async def messages(self, request: Request) -> Generation:
        body = parse(MessagesBody, await self._body(request))
        await self._check_model(body.model)
        choice = choice_of(body, self._parsers)
        wanted = wanted_message(body, choice, self._parsers)
        answers = choice.answers(self._parsers, wanted.sampling.guided is not None)
        form = MessageForm(body.model or self._model, body.max_tokens, answers)
        return await self._generation(request, body.model, wanted, form)

    async def count_tokens(self, request: Request) -> Response:
        body = parse(CountBody, await self._body(request))
        await self._check_model(body.model)
        tokens = await self._tokens(None, counted_chat(body, choice_of(body, self._parsers)))
        return JSONResponse({"input_tokens": len(tokens)})

    async def _echoed(self, wanted: Wanted) -> list[str]:
        try:
            return [
                prompt if isinstance(prompt, str) else await self._texts.decode(prompt) for prompt in wanted.prompts
            ]
        except InvalidRequestError as error:
            raise invalid(str(error), "prompt") from None

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeBody, await self._body(request))
        await self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        chat = None if body.messages is None else checked_chat(body, body.tools or [])
        tokens = await self._tokens(body.prompt, chat)
        return JSONResponse({"count": len(tokens), "max_model_len": self._texts.limits.tokens, "tokens": tokens})

    async def _tokens(self, prompt: str | None, chat: Any) -> list[int]:
        """Of a text, or of a chat; an encoder says which its images are."""
        try:
            chat, files = await asyncio.to_thread(take_images, chat, IMAGE_LIMITS) if has_files(chat) else (chat, ())
        except InvalidRequestError as error:
            raise invalid(str(error), "messages") from None
        images = await self._client.aencode_images(files) if files else ()
        return await self._texts.encode(prompt, chat, images)

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._body(request))
        await self._check_model(body.model)
        try:
            return JSONResponse({"prompt": await self._texts.decode(body.tokens)})
        except InvalidRequestError as error:
            raise invalid(str(error), "tokens") from None

    async def health(self, request: Request) -> Response:
        """This process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Some engine takes requests, or the first request starts one: who waits for an engine would never send it."""
        engines = await self._view.ready_engines()
        if not engines and not await self._view.is_on_demand():
            raise ApiError(
                503, "no engine is ready", kind="service_unavailable", code="no_engine", headers={"retry-after": "5"}
            )
        return JSONResponse({"status": "ready", "engines": engines})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """The server's own, and the deployment's where the scheduler answers. The connection ends with the answer, so
        that who asks again may reach another server on the same port.
        """
        text, tenant = generate_latest(self.counts.registry), tenant_of(request)
        try:
            moment = CollectorRegistry(auto_describe=False)
            moment.register(DeploymentMetrics(await self._view.stats(), "" if tenant is None else tenant.name))
            text += generate_latest(moment)
        except HeadwiseError:
            text += b"# the scheduler does not answer\n"
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4, "connection": "close"})

    async def deployment(self, request: Request) -> Response:
        """What the page shows."""
        headers = {**PAGE_HEADERS, "cache-control": "no-store"}
        return JSONResponse(overview(await self._view.stats(), self._model, self._groups), headers=headers)

    def _model_card(self, name: str) -> dict[str, Any]:
        base = {} if name == self._model else {"root": self._model, "parent": self._model}
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "headwise",
            "max_model_len": self._texts.limits.tokens,
            **base,
        }


def _with_files(wanted: Wanted) -> Any:
    """A chat whose images are decoded from Base64, once for all answers. Raises `ApiError`."""
    try:
        return with_files(wanted.messages, IMAGE_LIMITS)
    except InvalidRequestError as error:
        raise invalid(str(error), wanted.source) from None


def _untraced(path: str, endpoint: Endpoint) -> Endpoint:
    return endpoint


async def _answer(request: Request, error: Exception) -> Response:
    return ApiError.of(error).response(request.url.path)


async def _not_found(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such path, or no such method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method:.20} {request.url.path:.200}"
    why = "there is no such path" if error.status_code == 404 else str(error.detail)
    return ApiError(error.status_code, f"{what}: {why}", code="not_found", headers=error.headers).response(
        request.url.path
    )
