"""Reads untrusted values of a ``config.json`` as numbers, and shows them in errors."""

from __future__ import annotations

import math
import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 2
_SHORT.maxlist = _SHORT.maxdict = 4


def shown(value: Any) -> str:
    """A value for an error's line: as Python writes it, cut where it is long or deep."""
    return _SHORT.repr(value)


def finite_number(value: Any) -> float | None:
    """A JSON number as a float; None if it is not a number, or not finite as a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None
