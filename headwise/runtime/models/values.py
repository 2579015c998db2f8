"""Values of a ``config.json``, which a stranger wrote: how they are read as numbers, and shown in errors."""

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
    """An integer or float of JSON as a float; None if it is no number, or too large to be a finite one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None
