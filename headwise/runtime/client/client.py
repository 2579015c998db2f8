"""The client of a deployment: text in, text out, streamed or whole, synchronous or asynchronous."""

from __future__ import annotations

import asyncio
import ipaddress
import queue
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError, DeploymentError, HeadwiseError, InvalidRequestError
from headwise.runtime.client.io_thread import ClientIO
from headwise.runtime.client.many_prompts import aread_all, read_all
from headwise.runtime.client.token_stream import AsyncTokenStream, TokenStream, into_loop
from headwise.runtime.client.ways import RelayMode
from headwise.runtime.loader.chat import CHAT_OPTIONS, Chat, chat_of, plain_chat
from headwise.runtime.loader.chat_images import ImageFile, take_images
from headwise.runtime.protocol.images import IMAGE_LIMITS, PromptImage
from headwise.runtime.protocol.messages import FindPrefix, GetStats, Roll, Route, Scale, UpdateWeights
from headwise.runtime.protocol.prompt_items import PlacedItems, PromptEmbeds, PromptItem, check_items, placed
from headwise.runtime.protocol.request import (
    GenerationResult,
    SamplingParams,
    as_priority,
    as_retention,
    as_string,
    as_token_ids,
)
from headwise.runtime.protocol.request_checks import check_one_sample
from headwise.runtime.protocol.weights import adapter_changes, new_weights
from headwise.sockets.curve import ClientKeys

Prompt = str | Sequence[int]
Messages = Chat
Sampling = SamplingParams | Mapping[str, Any] | None
Items = Sequence[PromptItem | Mapping[str, Any]]

Asked = tuple[Route, tuple[PromptEmbeds, ...], tuple[ImageFile, ...]]
"""A call's message to the scheduler, the embeddings that go to an engine only, and files of images to encode."""


class Client:
    """Talks to the deployment at ``address``: ``HOST:PORT``, ``tcp://HOST:PORT``, or by way of its Ray cluster
    ``ray:auto`` or ``ray:HOST:PORT``, with ``/NAME`` behind it for a deployment of another name than headwise. Only by
    way of its cluster a client finds a deployment whose scheduler has moved to another node.

    Safe to use from several threads and event loops. Every call takes its sampling as a `SamplingParams`, or as
    keywords of that name, ``priority`` and ``cache_salt`` (see `GenerateRequest`), ``adapter``: the name of the LoRA
    adapter that it is computed with, ``session``: requests of one session go to the same engine while that costs
    little, and ``retain_s``: for so many seconds from its end on the cache keeps the prompt, or the first
    ``retain_tokens`` of it, rather than what nobody has asked to keep; ``tenant``: whose it is, where the client's key
    does not say so. A prompt of token ids may have ``items``: images
    or audio, as `PromptItem`. A request whose engine is lost continues on another engine, and its stream goes on.
    Errors are those of `headwise.errors`. Raises `DeploymentError` if nothing answers at the address.

    relay: ``auto``: engines that cannot be reached from here are reached through the scheduler's port; ``always``: all
           engines are; ``never``: none is, and a request whose engine cannot be reached fails
    keys:  of a deployment that wants them: its server key and an API key. Who comes by way of its cluster needs none
    """

    def __init__(self, address: str, relay: RelayMode = "auto", keys: ClientKeys | None = None) -> None:
        if not (keys is None or isinstance(keys, ClientKeys)):
            raise ConfigError(f"keys must be ClientKeys(SERVER_KEY, API_KEY) or None, got a {type(keys).__name__}")
        self.address, found = _resolve(address)
        locate = partial(_locate, address) if address.startswith("ray:") else None
        self._io = ClientIO(self.address, relay=relay, keys=keys or found, locate=locate)
        try:
            self.stats()
        except HeadwiseError:
            self.close()
            raise

    # ---- synchronous ----

    def generate(
        self, prompt: Prompt | Sequence[Prompt], sampling: Sampling = None, **options: Any
    ) -> GenerationResult | list[GenerationResult]:
        """Complete a prompt (text or token ids), or several at once, of which the first error cancels the others. Those
        that begin alike are sent one after the other, and of a long list some hundreds are under way at a time.

        With ``n`` above 1 the result is a list: the samples of the first prompt, then those of the next.

        Control tokens in the text act as control tokens. So pass text of untrusted users to `chat` instead.
        """
        asked = _routes(prompt, sampling, options)
        routes = [route for route, *_ in asked]
        return _as_asked(prompt, read_all(routes, lambda place: TokenStream(self._io, *asked[place])))

    def stream(self, prompt: Prompt, sampling: Sampling = None, **options: Any) -> TokenStream:
        """Complete a prompt and iterate over its deltas, whose ``text`` is what is new."""
        return TokenStream(self._io, *_route(prompt, None, sampling, options))

    def chat(self, messages: Messages, sampling: Sampling = None, **options: Any) -> GenerationResult:
        """Answer a chat: messages of ``role`` (system, developer, user, assistant, tool) and ``content`` (a string or a
        list of text parts), which stays text, also where it looks like a control token. An assistant's message may have
        ``tool_calls``. Messages of the user may have images, for models and deployments that take them: parts
        ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``, or ``{"type": "image", "image":
        ...}`` with a file's bytes, a `pathlib.Path` or an image of Pillow's. Videos likewise, of type ``video_url`` or
        ``video``, with ``fps`` if so many frames of a second are to be taken.

        tools, chat_template_kwargs: options for the model's chat template: functions that the model may call, in
                                     OpenAI's form, and further variables. Calls come as the model writes them: as text,
                                     with the control tokens that ``shown_tokens`` names
        continue_final_message:      the last message is the assistant's, and the beginning of the answer that is wanted
        """
        return self.stream_chat(messages, sampling, **options).read()

    def stream_chat(self, messages: Messages, sampling: Sampling = None, **options: Any) -> TokenStream:
        return TokenStream(self._io, *_route(None, messages, sampling, options))

    def stats(self) -> dict[str, Any]:
        """Plain data: the model, the scheduler's counts, and the engines' statistics by name, at most 0.5 s old."""
        stats: dict[str, Any] = _answer_to(lambda deliver: self._io.ask(GetStats, deliver))
        return stats

    def find_prefix(self, prompt: Prompt, cache_salt: str = "", items: Items = (), adapter: str = "") -> dict[str, Any]:
        """Who holds how much of a prompt: its ``tokens``, and by engine and tier how many of them the tier could
        serve, together with faster ones: ``{"tokens": 900, "engines": {"engine-0": {"device": 640, ...}}}``.
        """
        return self._find_prefix(prompt, None, cache_salt, items, adapter)

    def find_chat_prefix(self, messages: Messages, cache_salt: str = "", adapter: str = "") -> dict[str, Any]:
        """Like `find_prefix`, for a chat, whose images are encoded for that."""
        messages, files = take_images(messages, IMAGE_LIMITS)
        encoded = _answer_to(lambda deliver: self._io.encode(files, deliver)) if files else ()
        images = tuple(each.image for each in encoded)
        return self._find_prefix(None, messages, cache_salt, adapter=adapter, images=images)

    def _find_prefix(
        self,
        prompt: Prompt | None,
        messages: Messages | None,
        cache_salt: str,
        items: Items = (),
        adapter: str = "",
        images: tuple[PromptImage, ...] = (),
    ) -> dict[str, Any]:
        text, token_ids, plain = _prompt(prompt, messages)
        keys = _placed(items, token_ids).extra_keys
        salt, adapter = as_string("cache_salt", cache_salt), as_string("adapter", adapter)

        def asked(key: int) -> FindPrefix:
            return FindPrefix(key, text, token_ids, plain, salt, keys, adapter, images)

        found: dict[str, Any] = _answer_to(lambda deliver: self._io.ask(asked, deliver))
        return found

    # ---- operations: on all engines; they return when all engines are done ----

    def sleep(self) -> None:
        """Release the memory of weights and device cache. Running requests pause, and new ones wait, until `wake`.

        Cached device blocks are copied to the host, as far as there is room. Does nothing if already asleep.
        """
        self._operate("sleep")

    def wake(self) -> None:
        """Load the weights again and continue all requests. Does nothing if already awake."""
        self._operate("wake")

    def reset_cache(self, tier: str = "all") -> dict[str, int]:
        """Forget every cached block that no running request needs. Returns how many were forgotten, by engine.

        tier: ``device``, ``host``, ``storage`` or ``all``. Raises `ConfigError` for a tier that is not configured.
        """
        return self._operate("reset_cache", tier)

    def _operate(self, action: str, tier: str = "all") -> dict[str, int]:
        named = as_string("tier", tier)  # any other type would make the message malformed, which fails all calls
        blocks: dict[str, int] = _answer_to(lambda deliver: self._io.operate(action, named, deliver))
        return blocks

    def update_weights(
        self,
        model: str = "",
        *,
        version: str = "",
        keep_running: bool = False,
        adapters: Mapping[str, str] | None = None,
        add_adapters: Mapping[str, str] | None = None,
        drop_adapters: Iterable[str] = (),
    ) -> str:
        """Have all engines serve by other weights of the model that they serve, without a new start: those of a
        training step, for instance; or with other adapters. Returns their version once all engines have them.

        No request is lost, and none needs to end before: engines read the weights while they serve on, pause for as
        long as loading takes, and go on. What other weights have computed serves no request any more, also where it is
        cached, on whatever tier. `GenerationResult.weights` says which tokens are by which version. Engines that are
        started later have the weights, too: they must stay where they are, unchanged, until the next ones are had.

        model:        their directory (config.json and safetensors) at every engine's node, within the deployment's
                      ``weights_from``; or the model that it was started with. Empty: as it is
        version:      their name, which no others may have; empty: it is drawn. To ask for one twice is to ask once
        keep_running: requests that run go on behind what the weights before have computed of them, and nobody else is
                      served that; else they are computed anew, with the tokens that they have
        adapters:     directories by name: all that there are to be, also within ``weights_from``. Requests of those
                      that are there no more end with an error. None: as they are
        add_adapters, drop_adapters: in place of ``adapters`` those that come, or take the place of what has their
                      names, and the names of those that go

        Raises:
            ModelError: engines cannot have them, and why; either none has them then, or the error says which has.
            OverloadedError: others are about to be had.
            DeploymentError: engines have not had them in time.
        """
        weights = new_weights(model, version, adapters)
        changes = adapter_changes(model, adapters, add_adapters, drop_adapters)
        if not isinstance(keep_running, bool):
            raise InvalidRequestError(f"keep_running must be True or False, got {keep_running!r:.80}")
        _answer_to(
            lambda deliver: self._io.ask(lambda key: UpdateWeights(key, weights, keep_running, changes), deliver)
        )
        return weights.version

    # ---- how many engines ----

    def scale(self, replicas: int | None, split: tuple[int, int] | None = None) -> str:
        """Have so many engines, or with None as many as the load needs, as after the start. Returns what was decided,
        in words, before engines start or go; `stats` tells of them. Engines that go lose no request, and the number is
        absolute: to call it twice changes nothing.

        split: so many of the engines compute prompts only, so many decode only, and the others serve whole requests;
               None: as it is

        Raises `InvalidRequestError` for a number that the deployment's ``min_replicas`` and ``max_replicas`` exclude.
        """
        if isinstance(replicas, bool) or not (
            replicas is None or (isinstance(replicas, int) and 0 <= replicas < 2**31)
        ):
            raise InvalidRequestError(f"replicas must be a number of engines or None, got {replicas!r:.80}")
        decision: str = _answer_to(lambda deliver: self._io.ask(lambda key: Scale(key, replicas, split), deliver))
        return decision

    def roll(self) -> str:
        """Have all engines replaced by new ones, one after the other, so that no request is lost. Returns what was
        decided, in words, when that begins."""
        decision: str = _answer_to(lambda deliver: self._io.ask(Roll, deliver))
        return decision

    # ---- asynchronous ----

    async def agenerate(
        self, prompt: Prompt | Sequence[Prompt], sampling: Sampling = None, **options: Any
    ) -> GenerationResult | list[GenerationResult]:
        asked = _routes(prompt, sampling, options)
        routes = [route for route, *_ in asked]
        return _as_asked(prompt, await aread_all(routes, lambda place: AsyncTokenStream(self._io, *asked[place])))

    def astream(self, prompt: Prompt, sampling: Sampling = None, **options: Any) -> AsyncTokenStream:
        """Called in an event loop; iterate over it with ``async for``."""
        return AsyncTokenStream(self._io, *_route(prompt, None, sampling, options))

    async def achat(self, messages: Messages, sampling: Sampling = None, **options: Any) -> GenerationResult:
        return await self.astream_chat(messages, sampling, **options).read()

    def astream_chat(self, messages: Messages, sampling: Sampling = None, **options: Any) -> AsyncTokenStream:
        return AsyncTokenStream(self._io, *_route(None, messages, sampling, options))

    async def aencode_images(self, files: Sequence[ImageFile]) -> list[PromptImage]:
        """What stands for each of these images and videos of a chat, as an encoder of the deployment says it. Raises
        `InvalidRequestError` for what is no image, and where images are not served."""
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Any] = asyncio.Queue()
        self._io.encode(files, into_loop(answers, loop))
        answer = await answers.get()
        if isinstance(answer, HeadwiseError):
            raise answer
        return [each.image for each in answer]

    async def astats(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.stats)

    # ---- end ----

    def follow(self, address: str) -> None:
        """The deployment's scheduler is at this address from now on, or soon: what is asked of it is asked there, also
        what was asked before. What engines stream goes on."""
        self._io.follow(_resolve(address)[0])

    def close(self, reason: str = "the client was closed") -> None:
        """Abort running requests, which are told the reason, and disconnect; idempotent."""
        if hasattr(self, "_io"):
            self._io.close(reason)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _resolve(address: str) -> tuple[str, ClientKeys | None]:
    """The ZeroMQ endpoint of an address, and what keys are known of it; raises `DeploymentError`."""
    if not isinstance(address, str):
        raise _no_address(address)
    if address.startswith("ray:"):
        from headwise.actors.deployment import resolve_client

        cluster, _, name = address.removeprefix("ray:").partition("/")
        return resolve_client(cluster, name or "headwise")
    match = re.fullmatch(r"(?:tcp://)?([^/:\s\[\]]+|\[([0-9a-fA-F:.]+)\]):(\d{1,5})", address)
    if match is None or not 0 < int(match[3]) < 65536 or (match[2] and not _is_ipv6(match[2])):
        raise _no_address(address)
    return f"tcp://{match[1]}:{match[3]}", None


def _locate(address: str) -> str:
    """Where a scheduler that may have moved is now."""
    return _resolve(address)[0]


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _no_address(address: object) -> DeploymentError:
    return DeploymentError(
        f"{address!r:.80} is no address; write HOST:PORT, tcp://HOST:PORT, ray:auto or ray:HOST:PORT[/NAME]"
    )


def _answer_to(ask: Callable[[Callable[[Any], None]], None]) -> Any:
    """Ask, and wait for the answer; raises it if it is an error."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ask(answers.put)
    answer = answers.get()
    if isinstance(answer, HeadwiseError):
        raise answer
    return answer


def _is_one(prompt: Any) -> bool:
    """Whether this is one prompt (text, or token ids) rather than several."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence) and not hasattr(prompt, "__array__"):
        raise InvalidRequestError(f"a prompt must be a string or token ids, got {type(prompt).__name__}")
    return len(prompt) == 0 or not (isinstance(prompt[0], str | Sequence) or hasattr(prompt[0], "__len__"))


def _routes(prompt: Prompt | Sequence[Prompt], sampling: Sampling, options: dict[str, Any]) -> list[Asked]:
    """A message for each sample of each prompt."""
    prompts: Any = [prompt] if _is_one(prompt) else prompt
    names = {field.name for field in fields(SamplingParams)}
    params = SamplingParams.of(sampling, {name: value for name, value in options.items() if name in names})
    others = {name: value for name, value in options.items() if name not in names}
    return [_route(one, None, sample, dict(others)) for one in prompts for sample in params.samples()]


def _as_asked(
    prompt: Prompt | Sequence[Prompt], results: list[GenerationResult]
) -> GenerationResult | list[GenerationResult]:
    """The result itself, where one sample of one prompt was asked for."""
    return results[0] if _is_one(prompt) and len(results) == 1 else results


def _route(prompt: Prompt | None, messages: Messages | None, sampling: Sampling, options: dict[str, Any]) -> Asked:
    """The message for a call, its embeddings and images; raises `InvalidRequestError` for what nobody accepts."""
    priority = as_priority(options.pop("priority", 0))
    cache_salt = as_string("cache_salt", options.pop("cache_salt", ""))
    retention = as_retention(options.pop("retain_s", 0), options.pop("retain_tokens", 0))
    session, adapter, tenant = (as_string(name, options.pop(name, "")) for name in ("session", "adapter", "tenant"))
    if messages is not None:
        messages = chat_of(messages, **{name: options.pop(name, None) for name in CHAT_OPTIONS})
    messages, files = take_images(messages, IMAGE_LIMITS)
    text, token_ids, plain = _prompt(prompt, messages)
    items = _placed(options.pop("items", ()), token_ids)
    chosen = SamplingParams.of(sampling, options)
    check_one_sample(chosen)
    wire = chosen.to_wire()
    identity = cache_salt, session, items.extra_keys, adapter
    route = Route(0, text, token_ids, plain, wire, priority, *identity, retention=retention, tenant=tenant)
    return route, items.embeds, files


def _placed(items: Items, token_ids: NDArray[np.int32] | None) -> PlacedItems:
    check_items(items, token_ids)
    return placed(items, 0 if token_ids is None else len(token_ids))


def _prompt(
    prompt: Prompt | None, messages: Messages | None
) -> tuple[str | None, NDArray[np.int32] | None, dict[str, Any] | None]:
    """A prompt's three forms, one of them given: text, token ids, a chat. Raises `InvalidRequestError`."""
    if messages is not None:
        return None, None, plain_chat(messages)
    if prompt is None:
        raise InvalidRequestError("give a prompt, as a string or as token ids, or messages for a chat; got None")
    if isinstance(prompt, str):
        return as_string("the prompt", prompt), None, None
    return None, as_token_ids(prompt), None
