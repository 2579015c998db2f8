"""Calls that must come: the form that such an answer has, and what reads it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headwise.runtime.http.tools.base import AnswerParser, CallArguments, CallBegin, Part
from headwise.runtime.http.tools.call_reader import CallReader, ObjectCall
from headwise.runtime.loader.tools import parameters_of

_DATA = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords of JSON schema whose values are data: what is within is no schema."""
_BY_NAME = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""Keywords whose values are schemas by name: a name is no keyword."""


def schema_of_one(tool: Mapping[str, Any]) -> str:
    """The JSON schema of an answer that is the arguments of a call of this tool, and nothing else."""
    return json.dumps(parameters_of(tool))


def schema_of_some(tools: Sequence[Mapping[str, Any]], is_one: bool) -> str:
    """The JSON schema of an answer that is a list of calls of these tools: at least one, or just one.

    Each tool's schema is a definition of its own, and references within it are led there.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, "arguments": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    defined = {str(index): _led(parameters_of(tool), f"#/$defs/{index}") for index, tool in enumerate(tools)}
    most = {"maxItems": 1} if is_one else {}
    return json.dumps({"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": defined})


class OneCall(AnswerParser):
    """An answer of the form of `schema_of_one`."""

    def __init__(self, name: str) -> None:
        self._begin: list[Part] = [CallBegin(name)]

    def push(self, text: str) -> list[Part]:
        begin, self._begin = self._begin, []
        return [*begin, *([CallArguments(text)] if text else [])]

    def finish(self) -> list[Part]:
        return self.push("")


class SomeCalls(AnswerParser):
    """An answer of the form of `schema_of_some`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._reader is None:
                _, brace, rest = text.partition("{")  # past a bracket or a comma
                self._reader = ObjectCall(self._names) if brace else None
                text = brace + rest
                continue
            more, behind = self._reader.push(text)
            parts += more
            text = behind or ""
            if behind is not None:
                self._reader = None
        return parts

    def finish(self) -> list[Part]:
        return []


def _led(schema: Any, root: str) -> Any:
    """A schema whose references within itself start at another root."""
    if isinstance(schema, list):
        return [_led(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    led = {key: _led_value(key, value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        led["$ref"] = root + reference[1:]
    return led


def _led_value(keyword: str, value: Any, root: str) -> Any:
    if keyword in _DATA:
        return value
    if keyword in _BY_NAME and isinstance(value, dict):
        return {name: _led(each, root) for name, each in value.items()}
    return _led(value, root)
