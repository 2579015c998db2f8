"""Finds the end of a JSON value that comes in pieces."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_CLOSES = {"{": "}", "[": "]"}
_SPACE = " \t\r\n"
_OF_SCALARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.")


class JsonScan:
    """Looks at brackets and strings only, and at each character once: what it passes need not be valid JSON."""

    def __init__(self) -> None:
        self._closes: list[str] = []  # brackets that are open, as what closes them
        self._is_string = self._is_escaped = self._is_scalar = False

    def push(self, text: str, at: int) -> int | None:
        """Go on with ``text[at:]``. The position where the value has ended, or cannot go on; None: it goes on."""
        while at < len(text):
            if self._is_string:
                at, self._is_string = self._in_string(text, at)
                if not (self._is_string or self._closes):
                    return at
                continue
            character = text[at]
            if character in "}]":
                if not self._closes or self._closes.pop() != character:
                    return at
                if not self._closes:
                    return at + 1
            elif not self._takes(character):
                return at
            at += 1
        return None

    def _takes(self, character: str) -> bool:
        """Whether the value goes on with this character, outside of strings; it closes no bracket."""
        is_inside = bool(self._closes)
        if character in _OF_SCALARS:
            self._is_scalar = self._is_scalar or not is_inside
            return True
        if self._is_scalar:
            return False
        if character == '"':
            self._is_string = True
        elif character in _CLOSES:
            self._closes.append(_CLOSES[character])
        else:
            return is_inside and (character in _SPACE or character in ",:")
        return True

    def _in_string(self, text: str, at: int) -> tuple[int, bool]:
        """The position behind what follows of the string, and whether the string goes on."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1, True
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text), True
        self._is_escaped = found[0] == "\\"
        return found.end(), self._is_escaped
