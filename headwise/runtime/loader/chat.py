"""Chat templates: a conversation as the text its model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from headwise.errors import ConfigError, InvalidRequestError, ModelError
from headwise.runtime.loader.plain_data import plain_value, shown
from headwise.runtime.loader.tools import plain_tool_calls, plain_tools

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_VARIABLES = 64
MAX_VARIABLES_BYTES = 64 << 10
"""Of all variables of a template that a user gives together, as JSON."""
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")

_END = chr(0x10FFFF)
"""Marks where the text of a message ends; no character, and what of users' is the same comes before it."""

IMAGE_PART = {"type": "image"}
"""A content part that stands for an image, whose data goes another way: as templates of Hugging Face know it."""

VIDEO_PART = {"type": "video"}
"""The same for a video."""

CHAT_OPTIONS = ("tools", "chat_template_kwargs", "continue_final_message")
_PARTS = ("messages", *CHAT_OPTIONS)

Chat = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Its messages, or a mapping of ``messages``, ``tools``, ``chat_template_kwargs`` and ``continue_final_message``."""


class ChatTemplate:
    """A model's Jinja template, run in Jinja's sandbox with the names Hugging Face templates expect.

    source:         the template's text
    special_tokens: ``bos_token``, ``eos_token`` and the like -> their texts: variables of the template

    Raises `ModelError` if the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template is not valid Jinja (line {error.lineno}): {error.message}"
            ) from None
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Mapping[str, Any], add_generation_prompt: bool) -> str:
        """The conversation as text.

        chat:                  as `plain_chat` returns it
        add_generation_prompt: whether the text ends with the beginning of the assistant's answer, unless it ends with
                               the last message's text, to be gone on with

        Raises:
            InvalidRequestError: the template refuses the messages, or fails on them.
        """
        if not chat.get("continue_final_message"):
            return self._rendered(chat, chat["messages"], add_generation_prompt)
        *before, last = chat["messages"]
        begun = {**last, "content": last["content"] + _END}
        text, end, _ = self._rendered(chat, [*before, begun], add_generation_prompt=False).rpartition(_END)
        if not end:
            raise InvalidRequestError(
                "the model's chat template leaves the last message out: it cannot be gone on with"
            )
        return text

    def _rendered(self, chat: Mapping[str, Any], messages: Any, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **chat.get("chat_template_kwargs", {}),
                    "messages": messages,
                    "tools": chat.get("tools"),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # A template is a program: on unexpected input it may raise any Python error.
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from None


def read_template(path: str) -> str:
    """A chat template's text. Raises `ConfigError` if the file cannot be read, or is too large to be one."""
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not text or len(text) > MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(f"chat_template {path} must have 1 to {MAX_TEMPLATE_CHARACTERS} characters of Jinja")
    return text


def check_template(path: str) -> None:
    """Raise `ConfigError` or `ModelError` if this file is no chat template; empty: there is none to check."""
    if path:
        ChatTemplate(read_template(path), {})


def chat_of(
    messages: Any, tools: Any = None, chat_template_kwargs: Any = None, continue_final_message: Any = None
) -> Any:
    """A chat of its parts, which are not checked; None and nothing are the same."""
    others = {
        "tools": tools,
        "chat_template_kwargs": chat_template_kwargs,
        "continue_final_message": continue_final_message,
    }
    given = {name: value for name, value in others.items() if value}
    return {"messages": messages, **given} if given else messages


def plain_chat(chat: Any) -> dict[str, Any]:
    """Check a user's chat, and copy it into the form that templates and the wire need: a mapping of ``messages``, and
    of ``tools``, ``chat_template_kwargs`` and ``continue_final_message`` where they are given. A chat may also be its
    messages alone.

    Raises:
        InvalidRequestError: see `plain_messages`, `plain_tools` and `plain_variables`; or the last message is not the
            beginning of an answer, though it is to be gone on with.
    """
    if not isinstance(chat, Mapping) or "messages" not in chat:
        return {"messages": plain_messages(chat)}
    unknown = sorted(set(chat) - set(_PARTS), key=str)
    if unknown:
        raise InvalidRequestError(f"a chat has {', '.join(_PARTS)}, and no {shown(unknown[0])}: leave it out")
    plain: dict[str, Any] = {"messages": plain_messages(chat["messages"])}
    if chat.get("tools"):
        plain["tools"] = plain_tools(chat["tools"])
    if chat.get("chat_template_kwargs"):
        plain["chat_template_kwargs"] = plain_variables(chat["chat_template_kwargs"])
    goes_on = chat.get("continue_final_message")
    if not isinstance(goes_on, bool | None):
        raise InvalidRequestError(f"continue_final_message must be true or false, got {shown(goes_on)}")
    if goes_on:
        last = plain["messages"][-1]
        if (
            last["role"] != "assistant"
            or not isinstance(last["content"], str)
            or not last["content"]
            or "tool_calls" in last
        ):
            raise InvalidRequestError(
                "continue_final_message goes on with the last message, which must be the assistant's, with text and "
                f"without calls; got {shown(last)}"
            )
        plain["continue_final_message"] = True
    return plain


def plain_variables(variables: Any) -> dict[str, Any]:
    """Check what a user gives a chat template besides messages and tools, and copy it: plain data, by names that the
    template does not have otherwise. Raises `InvalidRequestError`.
    """
    name = "chat_template_kwargs"
    if not isinstance(variables, Mapping):
        raise InvalidRequestError(f'{name} must be a mapping such as {{"day": "Monday"}}, got {shown(variables)}')
    if len(variables) > MAX_VARIABLES:
        raise InvalidRequestError(f"{name} has {len(variables)} entries; at most {MAX_VARIABLES} are allowed")
    for key in variables:
        if not isinstance(key, str) or not key.isidentifier() or key in _OWN_VARIABLES or key.endswith("_token"):
            raise InvalidRequestError(f"{name} cannot have {shown(key)}: it is no name for a variable, or is taken")
    plain = {str(key): plain_value(f"{name}[{key!r:.80}]", value) for key, value in variables.items()}
    size = len(json.dumps(plain))
    if size > MAX_VARIABLES_BYTES:
        raise InvalidRequestError(f"{name} has {size} bytes as JSON; at most {MAX_VARIABLES_BYTES} are allowed")
    return plain


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Check a user's messages, and copy them into the form that templates and the wire need.

    Each has a role of `ROLES`, its content as one string (text parts ``{"type": "text", "text": ...}`` are joined), or
    where there are images as a list of text parts, `IMAGE_PART` and `VIDEO_PART`, and else only plain data. An
    assistant's message with ``tool_calls`` needs no content.

    Raises:
        InvalidRequestError: they are not such messages; the text names the part at fault.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            'messages must be a non-empty list such as [{"role": "user", "content": "Hello"}], '
            f"got {type(messages).__name__} {shown(messages)}"
        )
    return [_plain_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name} must be a mapping with role and content, got {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError(f"{name}['role'] must be a string, got {shown(role)}")
    if role not in ROLES:
        raise InvalidRequestError(f"{name}['role'] must be one of {', '.join(ROLES)}, got {shown(role)}")
    given = {str(key): value for key, value in message.items() if key != "tool_calls" or value is not None}
    plain = {key: _plain_field(f"{name}[{key!r:.80}]", key, value, role) for key, value in given.items()}
    if "tool_calls" in plain:
        plain.setdefault("content", None)
    elif plain.get("content") is None:
        raise InvalidRequestError(f"{name}['content'] must be a string, got None; or a list of text parts")
    return plain


def _plain_field(name: str, key: str, value: Any, role: str) -> Any:
    if key == "content" and not (value is None and role == "assistant"):
        return _content_of(name, value)
    if key == "tool_calls":
        if role != "assistant":
            raise InvalidRequestError(f"{name} is for messages of the role assistant: leave it out")
        return plain_tool_calls(name, value)
    if key == "tool_call_id" and not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string, got {shown(value)}")
    return plain_value(name, value)


def _content_of(name: str, content: Any) -> str | list[dict[str, str]]:
    """Text parts joined to one string; where images are among them, as many parts, those between them joined."""
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{name} must be a string, got {shown(content)}; or a list of text parts")
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        plain = _plain_part(f"{name}[{index}]", part)
        if parts and plain["type"] == parts[-1]["type"] == "text":
            parts[-1]["text"] += plain["text"]
        else:
            parts.append(plain)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _plain_part(name: str, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if part in (IMAGE_PART, VIDEO_PART):
        return dict(part)
    if kind in ("image", "image_url", "video", "video_url"):
        noun = "an image" if kind in ("image", "image_url") else "a video"
        raise InvalidRequestError(f"{name} is {noun}, which is not taken here: leave it out")
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        got = shown(part) if kind in (None, "text") else f"one of type {shown(kind)}"
        raise InvalidRequestError(f'{name} must be a text part such as {{"type": "text", "text": "Hello"}}, got {got}')
    return {"type": "text", "text": str(text)}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` with Hugging Face's parameters: Jinja's own escapes what HTML has a meaning for."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
