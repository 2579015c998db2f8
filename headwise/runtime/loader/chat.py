"""Chat templates: a conversation as the text its model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from headwise.errors import InvalidRequestError, ModelError


class ChatTemplate:
    """A model's Jinja template, run in Jinja's sandbox with the names Hugging Face templates expect.

    ``special_tokens``: ``bos_token``, ``eos_token`` and the like, as the template may print them.
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
        """The conversation's text. Raises `InvalidRequestError` on messages the template cannot take."""
        from jinja2 import TemplateError

        _check_messages(messages)
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        # A template is a program of the model's author: it fails in Python's ways, too, on what it did not foresee.
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from None


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            'messages must be a non-empty list such as [{"role": "user", "content": "Hello"}], '
            f"got {type(messages).__name__} {messages!r:.80}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{index}] must be a mapping with role and content, got {message!r:.80}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidRequestError(f"messages[{index}][{key!r}] must be a string, got {message.get(key)!r:.80}")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
