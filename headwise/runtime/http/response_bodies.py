"""What clients send to `/v1/responses`, checked: OpenAI's newer form of a chat, as far as it needs no state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from headwise.errors import InvalidRequestError
from headwise.runtime.http.bodies import Body, Wanted
from headwise.runtime.http.errors import invalid
from headwise.runtime.http.parameters import WITHOUT_EFFECT, effort_variables, sampling_of
from headwise.runtime.http.response_items import messages_of
from headwise.runtime.http.tools.choice import ToolChoice
from headwise.runtime.http.tools.select import Parsers
from headwise.runtime.loader.chat import chat_of
from headwise.runtime.loader.plain_data import shown
from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.request import MAX_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
"""What may be asked for besides the text. No reasoning is encrypted."""

_STATEFUL = frozenset(("background", "context_management", "conversation", "previous_response_id", "prompt"))
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "max_tool_calls": (),
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


class _Reasoning(_Closed):
    """summary: of reasoning, which is told as it is"""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseBody(Body):
    input: Any
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: _Text | None = None
    include: list[str] | None = Field(None, max_length=16)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    metadata: dict[_Key, _Value] | None = Field(None, max_length=16)
    stream_options: _StreamOptions | None = None


def choice_of(body: ResponseBody, parsers: Parsers) -> ToolChoice:
    """What a body says of tools. Raises `ApiError`."""
    choice = body.tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    tools = None if not body.tools else [_tool(f"tools[{at}]", tool) for at, tool in enumerate(body.tools)]
    choice = None if choice == "auto" and tools is None else choice  # as clients say it without tools, too
    return ToolChoice.of(tools, choice, body.parallel_tool_calls, parsers)


def _tool(name: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise invalid(f"{name} must be of type function, with a name and parameters; got {shown(tool)}", "tools")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def wanted_response(body: ResponseBody, choice: ToolChoice, parsers: Parsers) -> Wanted:
    """choice: what the body says of tools. Raises `ApiError`."""
    messages = messages_of(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    logprobs = _logprobs(body)
    sampling = replace(sampling_of(_others(body), body.max_output_tokens), logprobs=logprobs)
    form = _form(body.text)
    if form is not None and sampling.guided is not None:
        raise invalid("an answer has one form: give it as text.format, and leave the other one out", "text")
    sampling = sampling if form is None else replace(sampling, guided=form)
    variables = effort_variables(None if body.reasoning is None else body.reasoning.effort, "reasoning")
    chat = chat_of(messages, list(choice.tools), variables)
    return Wanted((), chat, choice.sampling(sampling, parsers), body.options, stream=bool(body.stream), source="input")


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
            raise invalid(f"{name} is not served here: leave it out", name)
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
