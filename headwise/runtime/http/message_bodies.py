"""What clients send to `/v1/messages`, checked: Anthropic's form of a chat."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from headwise.errors import InvalidRequestError
from headwise.runtime.http.bodies import Body, Wanted
from headwise.runtime.http.errors import invalid
from headwise.runtime.http.parameters import effort_variables, sampling_of
from headwise.runtime.http.retention import marked_seconds
from headwise.runtime.http.tools.choice import ToolChoice
from headwise.runtime.http.tools.select import Parsers
from headwise.runtime.loader.chat import chat_of
from headwise.runtime.loader.plain_data import shown
from headwise.runtime.protocol.guided import Guided

_SAMPLING = ("temperature", "top_p", "top_k")
_WITHOUT_EFFECT = frozenset(("context_management", "inference_geo", "metadata", "service_tier", "speed"))
"""Fields that change no answer here: nothing is left out of a context."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}, "adaptive": {}}
"""What the chat template is told, as those of models that may think or not have it."""


class CountBody(Body):
    messages: list[Any] = Field(min_length=1)
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: Any = None
    cache_control: Any = None
    output_config: dict[str, Any] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Likewise; what is marked with ``cache_control`` is kept as long as the longest of the marks says, and with it
        all of the prompt."""
        marked = marked_seconds({"cache_control": self.cache_control}, self.tools, self.system, self.messages)
        return {**({"retain_s": marked} if marked else {}), **super().options}


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: list[str] | None = None


def choice_of(body: CountBody, parsers: Parsers) -> ToolChoice:
    """What a body says of tools. Raises `ApiError`."""
    given = body.tool_choice
    if given is not None and (not isinstance(given, Mapping) or given.get("type") not in (*_CHOICES, "tool")):
        raise invalid(
            f"tool_choice must have a type: auto, any, none, or tool with a name; got {shown(given)}", "tool_choice"
        )
    choice: Any = None if given is None else _CHOICES.get(given["type"])
    if given is not None and choice is None:
        choice = {"type": "function", "function": {"name": given.get("name")}}
    is_parallel = given is None or given.get("disable_parallel_tool_use") is not True
    tools = None if not body.tools else [_tool(f"tools[{at}]", tool) for at, tool in enumerate(body.tools)]
    return ToolChoice.of(tools, choice, is_parallel, parsers)


def _tool(name: str, tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or kind not in (None, "custom"):
        raise invalid(
            f"{name} must be a tool with name and input_schema; those of a server are not served: {shown(tool)}",
            "tools",
        )
    given = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def wanted_message(body: MessagesBody, choice: ToolChoice, parsers: Parsers) -> Wanted:
    """Raises `ApiError`."""
    others = _others(body)
    given = {name: others[name] for name in _SAMPLING if name in others}
    sampling = sampling_of({**given, "stop": body.stop_sequences or None}, body.max_tokens)
    form = _form(body.output_config)
    sampling = replace(sampling, fit_max_tokens=True, guided=form)
    chat = _chat(body, choice)
    return Wanted(
        (), chat, choice.sampling(sampling, parsers), body.options, stream=bool(body.stream), source="messages"
    )


def counted_chat(body: CountBody, choice: ToolChoice) -> Any:
    """The chat whose tokens are to be counted; the rest of a request may come with it. Raises `ApiError`."""
    _others(body, MessagesBody.model_fields)
    return _chat(body, choice)


def _others(body: CountBody, besides: Container[str] = ()) -> dict[str, Any]:
    """The fields that are not declared. Raises `ApiError` for one that nobody knows."""
    found = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name in found:
        if name not in _SAMPLING and name not in _WITHOUT_EFFECT and name not in besides:
            raise invalid(f"{name!r:.80} is no parameter of this endpoint", name[:80])
    return found


def _form(config: Mapping[str, Any] | None) -> Guided | None:
    """The form that an answer must have. Raises `ApiError`."""
    described = (config or {}).get("format")
    if described is None:
        return None
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, dict) or described.get("type") != "json_schema":
        raise invalid(
            f"output_config.format must be a json_schema with its schema, got {shown(described)}", "output_config"
        )
    try:
        return Guided.of({"json_schema": schema})
    except InvalidRequestError as error:
        raise invalid(str(error), "output_config") from None


def _chat(body: CountBody, choice: ToolChoice) -> Any:
    """Messages, tools and variables for the chat template. Raises `ApiError`."""
    messages = [] if body.system is None else [{"role": "system", "content": _text("system", body.system, "system")}]
    for index, message in enumerate(body.messages):
        messages += _messages(f"messages[{index}]", message)
    variables = _variables(body.thinking, (body.output_config or {}).get("effort"))
    return chat_of(messages, list(choice.tools), variables, messages[-1]["role"] == "assistant")


def _variables(thinking: Any, effort: Any) -> dict[str, Any]:
    if effort is not None and not isinstance(effort, str):
        raise invalid(f"output_config.effort must be a string, got {shown(effort)}", "output_config")
    told = effort_variables(effort, "output_config")
    if thinking is None:
        return told
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if not isinstance(kind, str) or kind not in _THINKING:
        raise invalid(f"thinking must have a type: {', '.join(_THINKING)}; got {shown(thinking)}", "thinking")
    return {**told, **_THINKING[kind]}


def _messages(name: str, message: Any) -> list[dict[str, Any]]:
    """A message as those that chat templates know: each result of a tool is one of its own."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or role not in ("user", "assistant"):
        raise invalid(f"{name} must have a role, user or assistant, and content; got {shown(message)}", "messages")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(f"{name}.content must be a text or a list of blocks, got {shown(content)}", "messages")
    blocks = [_block(f"{name}.content[{at}]", block) for at, block in enumerate(content)]
    return _of_assistant(name, blocks) if role == "assistant" else _of_user(name, blocks)


def _block(name: str, block: Any) -> tuple[str, str, Mapping[str, Any]]:
    """Its place, its type, and itself."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(kind, str):
        raise invalid(f"{name} must be a block with a type, got {shown(block)}", "messages")
    return name, kind, block


def _of_user(name: str, blocks: list[tuple[str, str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for at, kind, block in blocks:
        if kind == "tool_result":
            result = _text(at, block.get("content") or "", "messages")
            found.append({"role": "tool", "tool_call_id": _string(at, block, "tool_use_id"), "content": result})
            continue
        if kind not in ("text", "image"):
            raise invalid(
                f"{at} is of type {shown(kind)}; text, image and tool_result are served in a user's message", "messages"
            )
        if not found or found[-1]["role"] != "user":
            found.append({"role": "user", "content": []})
        is_text = kind == "text"
        part = {"type": "text", "text": _string(at, block, "text")} if is_text else _image(at, block.get("source"))
        found[-1]["content"].append(part)
    for message in found:
        if message["role"] == "user" and all(part["type"] == "text" for part in message["content"]):
            message["content"] = "".join(part["text"] for part in message["content"])
    return found or [{"role": "user", "content": ""}]


def _image(name: str, source: Any) -> dict[str, Any]:
    """As OpenAI's content parts have it."""
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind != "base64":
        raise invalid(
            f"{name}.source must have the image itself, of type base64 with media_type and data: URLs and files are "
            f"not fetched; got {shown(source)}",
            "messages",
        )
    media_type, data = _string(f"{name}.source", source, "media_type"), _string(f"{name}.source", source, "data")
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


def _of_assistant(name: str, blocks: list[tuple[str, str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, kind, block in blocks:
        if kind == "text":
            texts.append(_string(at, block, "text"))
        elif kind == "thinking":
            thoughts.append(_string(at, block, "thinking"))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise invalid(f"{at}.input must be an object, got {shown(arguments)}", "messages")
            function = {"name": _string(at, block, "name"), "arguments": arguments}
            calls.append({"id": _string(at, block, "id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise invalid(
                f"{at} is of type {shown(kind)}; text, thinking and tool_use are served in an assistant's message",
                "messages",
            )
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _text(name: str, content: Any, param: str) -> str:
    """A text, or what text blocks say together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{name} must be a text or a list of text blocks, got {shown(content)}", param)
    for at, block in enumerate(content):
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise invalid(f"{name}[{at}] must be a text block, got {shown(block)}", param)
    return "".join(block["text"] for block in content)


def _string(name: str, block: Mapping[str, Any], field: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise invalid(f"{name}.{field} must be a string, got {shown(value)}", "messages")
    return value
