"""The tools of a chat, in OpenAI's form: functions that a model may call, and the calls that an assistant made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headwise.errors import InvalidRequestError
from headwise.runtime.loader.plain_data import plain_value, shown

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
"""Of all tools together, as JSON."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_EXAMPLE = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object", ...}}}'


def plain_tools(tools: Any) -> list[dict[str, Any]]:
    """Check tools, and copy them.

    Each is ``{"type": "function", "function": {"name", "description", "parameters", "strict"}}``; ``parameters`` is the
    JSON schema of an object. Schemas are not compiled here.

    Raises:
        InvalidRequestError: they are not such tools, too many or too large; the text names the part at fault.
    """
    if not isinstance(tools, list | tuple):
        raise InvalidRequestError(f"tools must be a list such as [{_EXAMPLE}], got {shown(tools)}")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"{len(tools)} tools were given; at most {MAX_TOOLS} are allowed")
    plain = [_plain_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in plain]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"two tools are named {name!r}: a call could not say which it means")
    _check_size("tools", plain)
    return plain


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments; without ``parameters`` there are none."""
    given = tool["function"].get("parameters")
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**given, "type": "object"}


def plain_tool_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Check the calls of an assistant's message, and copy them. Arguments that are a JSON object's text become that
    object, as chat templates write it; other text stays as the model wrote it.

    name: what they are, for errors. Raises `InvalidRequestError`.
    """
    if not isinstance(calls, list | tuple) or not calls:
        raise InvalidRequestError(f"{name} must be a non-empty list of calls, got {shown(calls)}")
    return [_plain_call(f"{name}[{index}]", call) for index, call in enumerate(calls)]


def _plain_tool(name: str, tool: Any) -> dict[str, Any]:
    function = _function(name, tool, _EXAMPLE)
    for key, kind in (("description", str), ("parameters", Mapping), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise InvalidRequestError(f"{name}.function.{key} must be a {_KINDS[kind]}, got {shown(function[key])}")
    parameters = function.get("parameters") or {}
    where = f"{name}.function.parameters"
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"{where} must be the schema of an object, got type {shown(parameters['type'])}")
    for key, schema_kind in (("properties", Mapping), ("required", list | tuple)):
        if key in parameters and not isinstance(parameters[key], schema_kind):
            raise InvalidRequestError(f"{where}.{key} must be a {_KINDS[schema_kind]}, got {shown(parameters[key])}")
    copied: dict[str, Any] = plain_value(name, tool)
    return copied


def _plain_call(name: str, call: Any) -> dict[str, Any]:
    function = _function(name, call, '{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}')
    if not isinstance(call.get("id"), str) or not call["id"]:
        raise InvalidRequestError(f"{name}.id must be a non-empty string, got {shown(call.get('id'))}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | Mapping):
        raise InvalidRequestError(f"{name}.function.arguments must be JSON text, got {shown(arguments)}")
    if isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    copied: dict[str, Any] = plain_value(name, {**call, "function": {**function, "arguments": arguments}})
    return copied


def _function(name: str, value: Any, example: str) -> Mapping[str, Any]:
    """What a tool, or a call, says of its function; raises `InvalidRequestError` unless it is one with a name."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type") != "function":
        raise InvalidRequestError(f"{name} must be a function such as {example}, got {shown(value)}")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise InvalidRequestError(
            f"{name}.function.name must be 1 to 64 letters, digits, '_' or '-', got {shown(function.get('name'))}"
        )
    return function


def _object_or_text(arguments: str) -> Any:
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _check_size(name: str, value: Any) -> None:
    try:
        size = len(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} is no valid Unicode: it has half of a surrogate pair") from None
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"{name} has {size} bytes as JSON; at most {MAX_TOOLS_BYTES} are allowed")


_KINDS: dict[Any, str] = {str: "string", Mapping: "mapping", bool: "boolean", list | tuple: "list"}
