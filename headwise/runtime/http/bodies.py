"""What clients send, checked: from JSON to what is to be generated."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from headwise.errors import InvalidRequestError
from headwise.runtime.http.errors import ApiError, invalid
from headwise.runtime.http.parameters import effort_variables, sampling_of
from headwise.runtime.http.retention import retention_options
from headwise.runtime.http.tools.choice import ToolChoice
from headwise.runtime.http.tools.select import Parsers
from headwise.runtime.loader.chat import chat_of, plain_variables
from headwise.runtime.protocol.prompt_items import PromptItem, check_items, placed
from headwise.runtime.protocol.request import MAX_LOGPROBS, SamplingParams

MAX_CHOICES = 128
"""Most answers of one request: its prompts, each so often as ``n`` says."""
COMPLETION_TOKENS = 16
"""What OpenAI's completions produce if nothing is said."""

Prompt = str | Sequence[int]
# A body may have millions of wrong items, each of which would become an error: only the first is looked for. Messages
# are checked by the client (`plain_messages`).
_Tokens = Annotated[list[int], FailFast()]


class Body(BaseModel):
    """Types are those of JSON: a string is no number. What is not declared here is in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None
    priority: int | None = Field(None, gt=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1)
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    retain_s: float | None = None
    retain_tokens: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of each call of the client, as far as they are given. Raises `ApiError`."""
        options = {"priority": self.priority, "cache_salt": self.cache_salt, "session": self.prompt_cache_key}
        retention = retention_options(self.retain_s, self.retain_tokens, self.prompt_cache_retention)
        return {**{name: value for name, value in options.items() if value is not None}, **retention}


class StreamOptions(BaseModel):
    """include_usage: whether a last event tells the usage
    continuous_usage_stats: vLLM's: whether each event tells that of its answer so far, besides
    include_obfuscation: OpenAI's padding of events, which there is none of here
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Generate(Body):
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None


class ItemBody(BaseModel):
    """See `PromptItem`. embeds: Base64 of float32, little-endian, token by token"""

    model_config = ConfigDict(extra="forbid", strict=True)

    offset: int
    length: int = Field(ge=1)
    hash: str = ""
    embeds: str | None = None
    columns: int = 0
    later: int = -1


class ChatBody(_Generate):
    messages: list[Any] = Field(min_length=1)
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class CompletionBody(_Generate):
    prompt: Any
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    prompt_items: list[ItemBody] | None = None


class TokenizeBody(BaseModel):
    """One of ``prompt`` and ``messages``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: _Tokens


@dataclass(frozen=True)
class Wanted:
    """What is to be generated: ``n`` answers to each prompt, or to one chat.

    options: of each call of the client: priority, cache_salt, session, retain_s, retain_tokens, items
    counts:  whether each event of a stream tells the usage so far
    source:  the field that has the prompts or the chat
    kept:    how many of the ``n`` are told, the likeliest ones; 0: all
    """

    prompts: tuple[Prompt, ...]
    messages: Any
    sampling: SamplingParams
    options: dict[str, Any]
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    counts: bool = False
    echo: bool = False
    source: str = "prompt"
    kept: int = 0

    @property
    def num_prompts(self) -> int:
        return 1 if self.messages is not None else len(self.prompts)

    @property
    def has_logprobs(self) -> bool:
        return self.sampling.logprobs is not None

    @cached_property
    def samples(self) -> list[SamplingParams]:
        """Those of each answer to a prompt."""
        logprobs = (self.sampling.logprobs or 0) if self.kept else self.sampling.logprobs
        return replace(self.sampling, n=self.n, logprobs=logprobs).samples()


_AnyBody = TypeVar("_AnyBody", bound=BaseModel)


def parse(body: type[_AnyBody], data: bytes) -> _AnyBody:
    """Raises `ApiError` with the field at fault."""
    try:
        return body.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = f"{where}: {first['msg']}" if where else f"the body is not valid: {first['msg']}"
        raise invalid(message, str(first["loc"][0])[:80] if first["loc"] else None) from None


def wanted_chat(body: ChatBody, choice: ToolChoice, parsers: Parsers) -> Wanted:
    """choice: what the body says of tools, as `ToolChoice.of` reads it"""
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs are told with logprobs: give logprobs: true as well", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wanted = _wanted(body, (), checked_chat(body, choice.tools), most, False, logprobs)
    return replace(wanted, sampling=choice.sampling(wanted.sampling, parsers))


def checked_chat(body: ChatBody | TokenizeBody, tools: Sequence[Any]) -> Any:
    """Messages, tools and variables for the chat template; the messages are checked later. Raises `ApiError`."""
    effort, goes_on = {}, False
    if isinstance(body, ChatBody):
        effort, goes_on = effort_variables(body.reasoning_effort, "reasoning_effort"), _goes_on(body)
    try:
        variables = plain_variables(body.chat_template_kwargs or {})
        return chat_of(body.messages, list(tools), {**effort, **variables}, goes_on)
    except InvalidRequestError as error:
        raise invalid(str(error), "chat_template_kwargs") from None


def _goes_on(body: ChatBody) -> bool:
    """Whether the last message is the beginning of the answer. Raises `ApiError`."""
    goes_on = bool(body.continue_final_message)
    if body.add_generation_prompt is goes_on:
        raise invalid(
            "an answer begins anew, or goes on with the last message: add_generation_prompt is the opposite of "
            "continue_final_message, or left out",
            "add_generation_prompt",
        )
    return goes_on


def wanted_completion(body: CompletionBody) -> Wanted:
    most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n:
        raise invalid(f"best_of {best_of} is less than n {n}: it is how many answers the n are chosen of", "best_of")
    if best_of > n and body.stream:
        raise invalid("the best answers are known at their ends: leave best_of out, or stream", "best_of")
    body = body.model_copy(update={"n": best_of})
    wanted = _wanted(body, _prompts(body.prompt), None, most, bool(body.echo), body.logprobs)
    if body.prompt_items:
        wanted = replace(wanted, options={**wanted.options, "items": _items(body.prompt_items, wanted.prompts)})
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        wanted = replace(wanted, sampling=replace(wanted.sampling, prompt_logprobs=body.logprobs))
    return replace(wanted, kept=n) if best_of > n else wanted


def _wanted(
    body: _Generate,
    prompts: tuple[Prompt, ...],
    messages: Any,
    most: int | None,
    echo: bool,
    logprobs: int | None,
) -> Wanted:
    n, usage = body.n or 1, body.stream_options
    if n * max(1, len(prompts)) > MAX_CHOICES:
        raise invalid(f"{len(prompts)} prompts with n {n} are more than {MAX_CHOICES} answers: send less at once", "n")
    if usage is not None and not body.stream:
        raise invalid("stream_options are for streams: leave them out, or give stream: true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs are not streamed: leave them or stream out", "prompt_logprobs")
    sampling = sampling_of(body.model_extra or {}, most)
    if n > 1 and not sampling.temperature:
        raise invalid(f"at temperature 0 all {n} answers are the same one: ask for one, or give a temperature", "n")
    return Wanted(
        prompts,
        messages,
        replace(sampling, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs),
        body.options,
        n,
        bool(body.stream),
        usage is not None and bool(usage.include_usage),
        usage is not None and bool(usage.include_usage and usage.continuous_usage_stats),
        echo,
        "prompt" if messages is None else "messages",
    )


def _prompts(given: Any) -> tuple[Prompt, ...]:
    """The prompts in OpenAI's four forms: a text, token ids, a list of either."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and given:
        kinds = {type(each) for each in given}
        if kinds == {int}:
            return (given,)
        if kinds <= {str, list} and all(
            {type(token) for token in each} <= {int} for each in given if type(each) is list
        ):
            return tuple(given)
    raise invalid("prompt must be a text, a list of token ids, or a list of texts or of lists of token ids", "prompt")


def _items(given: Sequence[ItemBody], prompts: Sequence[Prompt]) -> list[PromptItem]:
    if len(prompts) != 1:
        raise invalid(f"prompt_items are those of one prompt: send {len(prompts)} requests", "prompt_items")
    try:
        items = [
            PromptItem(each.offset, each.length, each.hash, _embeds(each), each.columns, each.later) for each in given
        ]
        check_items(items, prompts[0])
        placed(items, len(prompts[0]))
    except InvalidRequestError as error:
        raise invalid(str(error), "prompt_items") from None
    return items


def _embeds(item: ItemBody) -> NDArray[np.float32] | None:
    """Raises `InvalidRequestError`."""
    if item.embeds is None:
        return None
    try:
        data = b64decode(item.embeds, validate=True)
    except ValueError as error:
        raise InvalidRequestError(f"embeds must be Base64: {error}") from None
    if not data or len(data) % (4 * item.length):
        raise InvalidRequestError(f"embeds have {len(data)} bytes: no rows of float32 for {item.length} tokens")
    return np.frombuffer(data, "<f4").reshape(item.length, -1)


def check_model(asked: str | None, served: Sequence[str]) -> None:
    """Raise `ApiError` for another model than those that are served: the first, and its adapters."""
    if asked is not None and asked not in served:
        told = f"{served[0]!r} is" if len(served) == 1 else f"served are {', '.join(served)}"
        raise ApiError(
            404, f"the model {asked!r:.200} is not served here: {told}", param="model", code="model_not_found"
        )
