"""How clients say over HTTP for how long the cache is to keep a prompt: in OpenAI's, Anthropic's and our words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headwise.errors import InvalidRequestError
from headwise.runtime.http.errors import invalid
from headwise.runtime.loader.plain_data import shown
from headwise.runtime.protocol.request import as_retention

OPENAI = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86400.0}
"""Seconds, by ``prompt_cache_retention``."""

ANTHROPIC = {"5m": 300.0, "1h": 3600.0}
"""Seconds, by the ``ttl`` of a ``cache_control``; the first one without any."""


def retention_options(retain_s: float | None, retain_tokens: int | None, openai: str | None) -> dict[str, Any]:
    """The client's options, of the fields ``retain_s``, ``retain_tokens`` and ``prompt_cache_retention``; ours have the
    last word. Raises `ApiError`."""
    if openai is not None and openai not in OPENAI:
        raise invalid(
            f"prompt_cache_retention must be one of {', '.join(OPENAI)}, got {openai!r:.80}; retain_s takes seconds",
            "prompt_cache_retention",
        )
    seconds = OPENAI[openai] if retain_s is None and openai is not None else retain_s
    try:
        as_retention(seconds or 0, retain_tokens or 0)
    except InvalidRequestError as error:
        raise invalid(str(error), str(error).partition(" ")[0]) from None  # which names it first
    given = {"retain_s": seconds, "retain_tokens": retain_tokens}
    return {name: value for name, value in given.items() if value}


def marked_seconds(*places: Any) -> float:
    """The longest time of all the ``cache_control`` in these fields of a body: in themselves, in lists of blocks or
    tools, and in the content of these; 0: there is none. Raises `ApiError`."""
    return max((_seconds(mark) for place in places for mark in _marks(place)), default=0.0)


def _marks(place: Any) -> Iterator[Any]:
    for each in place if isinstance(place, list) else [place]:
        if isinstance(each, Mapping):
            if each.get("cache_control") is not None:
                yield each["cache_control"]
            if isinstance(each.get("content"), list):
                yield from _marks(each["content"])


def _seconds(mark: Any) -> float:
    ttl = mark.get("ttl", next(iter(ANTHROPIC))) if isinstance(mark, Mapping) else None
    if (
        not isinstance(mark, Mapping)
        or mark.get("type") != "ephemeral"
        or not isinstance(ttl, str)
        or ttl not in ANTHROPIC
    ):
        raise invalid(
            f"cache_control must be of type ephemeral, with a ttl of {' or '.join(ANTHROPIC)}, got {shown(mark)}",
            "cache_control",
        )
    return ANTHROPIC[ttl]
