"""Fields of a configuration: what each may be, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from headwise.errors import ConfigError


def option(default: Any, text: str, low: float = -math.inf, high: float = math.inf, *, is_secret: bool = False) -> Any:
    """A field of a configuration, with its help text.

    low, high: what a number may be
    """
    return field(default=default, repr=not is_secret, metadata={"help": text, "low": low, "high": high})


def check_option(f: Field[Any], hint: Any, value: Any) -> None:
    """Raise `ConfigError` unless ``value`` is of the field's type and range."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{f.name} must be one of {', '.join(map(str, get_args(hint)))}, got {value!r}")
        return
    hint, words = number_or_words(hint)
    if value in words:
        return
    expected = (int, float) if hint is float else hint
    if not isinstance(value, expected) or (isinstance(value, bool) and hint is not bool):
        got = repr(value) if f.repr else f"a secret {type(value).__name__}"
        raise ConfigError(f"{f.name} must be {' or '.join((getattr(hint, '__name__', hint), *words))}, got {got}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = f.metadata["low"], f.metadata["high"]
        if not low <= value <= high:  # also catches NaN
            limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise ConfigError(f"{f.name} must be {limits}, got {value!r}")


def number_or_words(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """The type of a field, and which words may stand there in place of a number: none of most fields."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, ()
    number, words = get_args(hint)
    return number, get_args(words)


def field_default(f: Field[Any]) -> Any:
    """The default of a config field."""
    return None if f.default is MISSING else f.default
