"""Sizes, and lists of names and values, as people write them."""

from __future__ import annotations

import re

from headwise.errors import ConfigError

_UNITS = {unit: 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB"))} | {
    unit: 1024**power for power, unit in enumerate(("", "KIB", "MIB", "GIB", "TIB"))
}


def parse_bytes(text: str | int, name: str = "") -> int:
    """A size such as ``"8GiB"`` or ``512MB`` in bytes; raises `ConfigError` if it is none. name: of what it is"""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        what = f"{name} {text!r}" if name else repr(text)
        raise ConfigError(f"{what} is not a size; write a number and a unit, such as 8GiB or 512MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_pairs(text: str, example: str) -> dict[str, str]:
    """``NAME=VALUE,...`` as a mapping; raises `ConfigError`, which shows ``example``, if it is none."""
    pairs: dict[str, str] = {}
    for part in text.split(",") if text.strip() else ():
        name, equals, value = (each.strip() for each in part.partition("="))
        if not (name and equals and value):
            raise ConfigError(f"{part.strip()!r} is not NAME=VALUE; write {example}")
        if name in pairs:
            raise ConfigError(f"{name!r} is given twice in {text!r}")
        pairs[name] = value
    return pairs


def format_bytes(count: float) -> str:
    """A size with a binary unit, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
