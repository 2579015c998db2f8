"""What clients send to `/v1/responses`, checked: OpenAI's newer form of a chat, as far as it needs no state."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from headwise.errors import InvalidRequestError
from headwise.runtime.http.bodies import Body, Wanted
from headwise.runtime.http.errors import invalid
from headwise.runtime.http.parameters import WITHOUT_EFFECT, sampling_of
from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.request import MAX_LOGPROBS

_ROLES = ("assistant", "developer", "system", "user")
_TEXTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
"""What may be asked for besides the text. There is no reasoning, so none of it is encrypted."""

_STATEFUL = frozenset(("background", "context_management", "conversation", "previous_response_id", "prompt"))
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "max_tool_calls": (),
    "parallel_tool_calls": (True, False),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "truncation": ("disabled",),
}
"""Fields that are not served: refused unless they say what happens anyway."""

_Key = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _StreamOptions(_Closed):
    include_obfuscation: bool | None = None


class _Text(_Closed):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponseBody(Body):
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: _Text | None = None
    include: list[str] | None = Field(None, max_length=16)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    metadata: dict[_Key, _Value] | None = Field(None, max_length=16)
    stream_options: _StreamOptions | None = None


def wanted_response(body: ResponseBody) -> Wanted:
    """Raises `ApiError`."""
    messages = _messages(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    logprobs = _logprobs(body)
    sampling = replace(sampling_of(_others(body), body.max_output_tokens), logprobs=logprobs)
    form = _form(body.text)
    if form is not None and sampling.guided is not None:
        raise invalid("an answer has one form: give it as text.format, and leave the other one out", "text")
    sampling = sampling if form is None else replace(sampling, guided=form)
    return Wanted((), messages, sampling, body.options, stream=bool(body.stream), source="input")


def _others(body: ResponseBody) -> dict[str, Any]:
    """The fields that are said of sampling. Raises `ApiError` for what needs state, and for what is not served."""
    others = {}
    for name, value in (body.model_extra or {}).items():
        is_neutral = any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(name, ()))
        if value is None or name in WITHOUT_EFFECT or is_neutral:
            continue
        if name in _STATEFUL:
            raise invalid(f"{name}: this server keeps no state; send all that was said before as input", name)
        if name in _NEUTRAL:
            raise invalid(
                f"{name} is not served here: leave it out, or ask /v1/chat/completions, which has tools and reasoning",
                name,
            )
        if name == "response_format":
            raise invalid("response_format is called text.format here", name)
        others[name] = value
    return others


def _logprobs(body: ResponseBody) -> int | None:
    include = body.include or []
    for index, what in enumerate(include):
        if what not in _INCLUDABLE:
            raise invalid(f"include[{index}] may be {' or '.join(_INCLUDABLE)}, got {what!r:.80}", "include")
    if _LOGPROBS in include:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid(f'top_logprobs are told where include has "{_LOGPROBS}"', "top_logprobs")
    return None


def _form(text: _Text | None) -> Guided | None:
    """What form the text must have; None: any."""
    if text is None or text.format is None:
        return None
    described = text.format
    kind, schema = described.get("type"), described.get("schema")
    if kind == "text":
        return None
    if kind != "json_object" and not (kind == "json_schema" and isinstance(schema, dict)):
        raise invalid("text.format must have a type: text, json_object, or json_schema with a schema", "text")
    try:
        return Guided.of({"json_object": True} if kind == "json_object" else {"json_schema": schema})
    except InvalidRequestError as error:
        raise invalid(str(error), "text") from None


def _messages(given: Any) -> list[dict[str, Any]]:
    """The chat that an input says."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("input must be a text, or a list of messages which is not empty", "input")
    return [_message(f"input[{index}]", item) for index, item in enumerate(given)]


def _message(name: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise invalid(f"{name} must be a message with role and content, got {_shown(item)}", "input")
    kind = item.get("type", "message")
    if kind == "item_reference":
        raise invalid(
            f"{name} refers to an earlier item, but this server keeps no state: send the item itself", "input"
        )
    if kind != "message":
        raise invalid(f"{name} is of type {_shown(kind)}; messages are served", "input")
    if item.get("role") not in _ROLES:
        raise invalid(f"{name}.role must be one of {', '.join(_ROLES)}, got {_shown(item.get('role'))}", "input")
    return {"role": item["role"], "content": _content(f"{name}.content", item.get("content"))}


def _content(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{name} must be a text or a list of text parts, got {_shown(content)}", "input")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            such = '{"type": "input_text", "text": "Hello"}'
            raise invalid(f"{name}[{index}] must be a text part such as {such}, got {_shown(part)}", "input")
        texts.append(part["text"])
    return "".join(texts)


def _shown(value: Any) -> str:
    """A value for an error's message."""
    return reprlib.repr(value)[:80]
