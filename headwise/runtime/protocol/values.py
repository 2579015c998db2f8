"""Checks of the values that users give: each is returned as a plain Python type, or refused with one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headwise.errors import InvalidRequestError


def as_integer(name: str, value: Any, low: int, high: int) -> int:
    """A Python or NumPy integer as a Python int; raises `InvalidRequestError` on anything else, or out of range."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, got {value!r:.80}")
    return int(value)


def as_optional_integer(name: str, value: Any, low: int, high: int) -> int | None:
    """Like `as_integer`; None stays None."""
    return None if value is None else as_integer(name, value, low, high)


def as_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """A Python or NumPy number as a float; raises `InvalidRequestError` on anything else, NaN, or out of range.

    open_low: whether ``low`` itself is out of range
    """
    ok = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not ok or not low <= value <= high or (open_low and value == low):  # also catches NaN
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r:.80}")
    return float(value)


def as_flag(name: str, value: Any) -> bool:
    """A Python or NumPy bool as a Python bool; raises `InvalidRequestError` on anything else."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidRequestError(f"{name} must be True or False, got {value!r:.80}")
    return bool(value)


def as_items(name: str, value: Any, what: str, most: int) -> tuple[Any, ...]:
    """A list, tuple or array as a tuple, of ``what`` (a plural) at most so many; raises `InvalidRequestError`."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{name} must be a list, got {value!r:.80}")
    if len(value) > most:
        raise InvalidRequestError(f"{len(value)} {what} were given; at most {most} are allowed")
    return tuple(str(each) if isinstance(each, str) else each for each in value)


def check_text(name: str, value: str) -> None:
    """Raise `InvalidRequestError` for a string that cannot be encoded, and so neither be sent nor hashed."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        shown = value[max(0, error.start - 16) : error.end]
        raise InvalidRequestError(
            f"{name} is no valid Unicode: character {error.start} is half of a surrogate pair, got {shown!r}"
        ) from None


def as_numbers_by_token(name: str, value: Any, low: float, high: float, most: int) -> dict[int, float]:
    """A mapping of token ids to numbers, ascending by id; raises `InvalidRequestError`.

    Ids may also be texts of digits: JSON has no other keys.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must be a mapping of token ids to numbers, got {value!r:.80}")
    if len(value) > most:
        raise InvalidRequestError(f"{name} names {len(value)} tokens; at most {most} are allowed")
    numbers = {
        _as_token(name, token): as_number(f"{name} of token {token!r:.20}", number, low, high)
        for token, number in value.items()
    }
    return dict(sorted(numbers.items()))


def _as_token(name: str, token: Any) -> int:
    is_digits = isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) <= 10
    return as_integer(f"a token id in {name}", int(token) if is_digits else token, 0, 2**31 - 1)
