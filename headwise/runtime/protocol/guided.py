"""What form an output must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headwise.errors import InvalidRequestError
from headwise.runtime.protocol.values import as_flag, as_items

MAX_GRAMMAR_BYTES = 64 << 10
"""Of a schema, regular expression or grammar, or of all choices together, in UTF-8."""
MAX_CHOICES = 1024


@dataclass(frozen=True)
class Guided:
    """The whole output must have one form; exactly one is given. It is compiled by llguidance.

    json_schema: a JSON schema, as a mapping or as JSON text
    json_object: any JSON object
    regex:       a regular expression, in the syntax of Rust's crate ``regex``
    choice:      one of these texts
    grammar:     a context-free grammar, in llguidance's variant of Lark's syntax
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Convert every value to a plain Python type; raises `InvalidRequestError`. Nothing is compiled here."""
        values: dict[str, Any] = {
            "json_schema": _json(self.json_schema),
            "json_object": as_flag("json_object", self.json_object),
            "regex": _text("regex", self.regex),
            "choice": as_items("choice", self.choice, "choices", MAX_CHOICES),
            "grammar": _text("grammar", self.grammar),
        }
        for text in values["choice"]:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"a choice must be a non-empty string, got {text!r:.80}")
        for name, value in values.items():
            object.__setattr__(self, name, value)
            _check_size(name, value)
        if len(self._given) != 1:
            forms = ", ".join(field.name for field in fields(self))
            raise InvalidRequestError(f"guided must have one of {forms}; it has {' and '.join(self._given) or 'none'}")

    @property
    def form(self) -> tuple[str, str | tuple[str, ...] | bool]:
        """The name of the form that is there, and what it is."""
        (name,) = self._given
        return name, getattr(self, name)

    @property
    def _given(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name) not in (None, False, ())]

    @classmethod
    def of(cls, value: Any) -> Guided | None:
        """From a user's input: None, a `Guided`, or a mapping of its fields. Raises `InvalidRequestError`."""
        if value is None or isinstance(value, Guided):
            return value
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise InvalidRequestError(f"guided must be a mapping with one of {', '.join(names)}, got {value!r:.80}")
        return cls(**value)


def _json(value: Any) -> str | None:
    """A schema as JSON text; text is not parsed."""
    if not isinstance(value, Mapping):
        return _text("json_schema", value)
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"json_schema is no plain JSON: {error}") from None


def _text(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequestError(f"{name} must be a non-empty string, got {value!r:.80}")
    return None if value is None else str(value)


def _check_size(name: str, value: Any) -> None:
    texts = value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} is no valid Unicode: it has half of a surrogate pair") from None
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"{name} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
