"""What was said before, as `/v1/responses` takes it: items, which become the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.runtime.http.errors import ApiError, invalid
from headwise.runtime.loader.plain_data import shown

_ROLES = ("assistant", "developer", "system", "user")
_TEXTS = ("input_text", "output_text", "text")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def messages_of(given: Any) -> list[dict[str, Any]]:
    """The chat that an input says. Raises `ApiError`.

    What an assistant thought, said and called in a row is one message, as chat templates have it.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise _wrong("input must be a text, or a list of items which is not empty")
    found: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        _add(found, f"input[{index}]", item)
    return found


def _add(messages: list[dict[str, Any]], name: str, item: Any) -> None:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping):
        raise _wrong(f"{name} must be a message with role and content, or another item; got {shown(item)}")
    if kind == "item_reference":
        raise _wrong(f"{name} refers to an earlier item, but this server keeps no state: send the item itself")
    if kind not in _KINDS:
        raise _wrong(f"{name} is of type {shown(kind)}; served are {', '.join(_KINDS)}")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call_output":
        output = _content(f"{name}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": _string(name, item, "call_id"), "content": output})
    elif kind == "function_call":
        function = {"name": _string(name, item, "name"), "arguments": _string(name, item, "arguments")}
        call = {"id": _string(name, item, "call_id"), "type": "function", "function": function}
        _assistant(messages, last).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        thought = _thought(name, item)
        if thought:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif item.get("role") not in _ROLES:
        raise _wrong(f"{name}.role must be one of {', '.join(_ROLES)}, got {shown(item.get('role'))}")
    else:
        content = _content(f"{name}.content", item.get("content"), takes_images=item["role"] == "user")
        if item["role"] == "assistant" and last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = content
        else:
            messages.append({"role": item["role"], "content": content})


def _assistant(messages: list[dict[str, Any]], last: dict[str, Any] | None) -> dict[str, Any]:
    """The assistant's message that goes on."""
    if last is None:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _thought(name: str, item: Mapping[str, Any]) -> str:
    """What a model thought, or what it came to; what only another server can read is nothing."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise _wrong(f"{name} must have a list of texts as its content or summary, got {shown(parts)}")
    return "".join(_string(f"{name}[{index}]", part, "text") for index, part in enumerate(parts))


def _content(name: str, content: Any, *, takes_images: bool = False) -> Any:
    """A text, or where there are images, parts as chats have them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{name} must be a text or a list of text parts, got {shown(content)}")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if takes_images and kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
            continue
        if not isinstance(part, Mapping) or kind not in _TEXTS or not isinstance(part.get("text"), str):
            such = '{"type": "input_text", "text": "Hello"}'
            raise _wrong(f"{name}[{index}] must be a text part such as {such}, got {shown(part)}")
        parts.append({"type": "text", "text": part["text"]})
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _string(name: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise _wrong(f"{name}.{field} must be a string, got {shown(value)}")
    return value


def _wrong(why: str) -> ApiError:
    return invalid(why, "input")
