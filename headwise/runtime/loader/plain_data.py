"""Users' data that goes to a chat template: plain values, copied so that the wire takes them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from headwise.errors import InvalidRequestError

MAX_DEPTH = 32
"""How deep lists and mappings may be nested."""


def plain_value(name: str, value: Any, depth: int = 1) -> Any:
    """A copy of a value of strings, numbers, lists and mappings.

    name: what it is, for errors

    Raises `InvalidRequestError` for anything else, and beyond `MAX_DEPTH`.
    """
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping | list | tuple):
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"{name} has more than {MAX_DEPTH} lists and mappings within one another")
        if isinstance(value, Mapping):
            return {str(key): plain_value(name, each, depth + 1) for key, each in value.items()}
        return [plain_value(name, each, depth + 1) for each in value]
    raise InvalidRequestError(f"{name} must be plain data (strings, numbers, lists, mappings), got {shown(value)}")


def shown(value: Any) -> str:
    """A value for an error's message, cut to 80 characters."""
    return reprlib.repr(value)[:80]
