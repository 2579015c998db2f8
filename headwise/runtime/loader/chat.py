"""Chat templates: a conversation as the text its model was trained on."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from headwise.errors import InvalidRequestError, ModelError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 32
"""How deep lists and mappings in a message may be nested."""


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

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The conversation as text.

        messages:              as `plain_messages` returns them
        add_generation_prompt: whether the text ends with the beginning of the assistant's answer

        Raises:
            InvalidRequestError: the template refuses the messages, or fails on them.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        # A template is a program: on unexpected input it may raise any Python error.
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from None


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Check a user's messages, and copy them into the form that templates and the wire need.

    Each has a role of `ROLES`, its content as one string (text parts ``{"type": "text", "text": ...}`` are joined), and
    else only plain data.

    Raises:
        InvalidRequestError: they are not such messages; the text names the part at fault.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            'messages must be a non-empty list such as [{"role": "user", "content": "Hello"}], '
            f"got {type(messages).__name__} {_shown(messages)}"
        )
    return [_plain_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name} must be a mapping with role and content, got {_shown(message)}")
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError(f"{name}['role'] must be a string, got {_shown(role)}")
    if role not in ROLES:
        raise InvalidRequestError(f"{name}['role'] must be one of {', '.join(ROLES)}, got {_shown(role)}")
    plain = {}
    for key, value in message.items():
        plain[str(key)] = (
            _text_of(f"{name}['content']", value) if key == "content" else _plain(f"{name}[{key!r:.80}]", value, 1)
        )
    if "content" not in plain:
        raise InvalidRequestError(f"{name}['content'] must be a string, got None; or a list of text parts")
    return plain


def _text_of(name: str, content: Any) -> str:
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{name} must be a string, got {_shown(content)}; or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            got = _shown(part) if kind in (None, "text") else f"one of type {_shown(kind)}"
            raise InvalidRequestError(
                f'{name}[{index}] must be a text part such as {{"type": "text", "text": "Hello"}}, got {got}'
            )
        texts.append(text)
    return "".join(texts)


def _plain(name: str, value: Any, depth: int) -> Any:
    """A copy of another field of a message (a name, tool calls): strings, numbers, lists and mappings."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping | list | tuple):
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"{name} has more than {MAX_DEPTH} lists and mappings within one another")
        if isinstance(value, Mapping):
            return {str(key): _plain(name, each, depth + 1) for key, each in value.items()}
        return [_plain(name, each, depth + 1) for each in value]
    raise InvalidRequestError(f"{name} must be plain data (strings, numbers, lists, mappings), got {_shown(value)}")


def _shown(value: Any) -> str:
    """A value for an error's message, cut to 80 characters."""
    return reprlib.repr(value)[:80]


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
