"""Reads one call as it comes: a JSON object of a name and arguments, or a name with arguments behind it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Protocol

from headwise.runtime.http.tools.base import CallArguments, CallBegin, Part
from headwise.runtime.http.tools.json_scan import JsonScan

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_MAX_HEAD = 256
"""Characters before the arguments of a call that is no JSON object."""

Step = Callable[[str, int], int]
"""Reads on from a position of a piece of text; returns the position behind what it took."""


class ReadsCall(Protocol):
    """Reads one call.

    has_begun: whether it is certain that this is a call
    """

    has_begun: bool

    @property
    def raw(self) -> str:
        """What was read of something that is not, or not yet, a call."""

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """What the next piece of text says, and the text behind the call; None: the call goes on.

        When something was no call, `has_begun` is false, and ``raw`` and the text behind it are the whole.
        """


class CallReader(ABC):
    """`ReadsCall`, a step at a time. names: functions that may be called"""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._step: Step = self._first
        self._parts: list[Part] = []
        self._scan = JsonScan()
        self._raw: list[str] = []
        self._is_over = False
        self.has_begun = False

    def push(self, text: str) -> tuple[list[Part], str | None]:
        at = 0
        while at < len(text) and not self._is_over:
            at = self._step(text, at)
        if not self.has_begun:
            self._raw.append(text[:at])
        told, self._parts = self._parts, []
        return told, text[at:] if self._is_over else None

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    @abstractmethod
    def _first(self, text: str, at: int) -> int:
        """The step that reads the beginning."""

    def _begin(self, name: str, arguments: str) -> None:
        self.has_begun = True
        self._parts.append(CallBegin(name))
        self._tell(arguments)

    def _tell(self, arguments: str) -> None:
        if arguments:
            self._parts.append(CallArguments(arguments))

    def _end(self, at: int) -> int:
        self._is_over = True
        return at


class ObjectCall(CallReader):
    """``{"name": ..., "arguments": {...}}``, in any order; ``parameters`` is as good as ``arguments``. Other members
    are passed over. A call without arguments has ``{}``.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._key = ""
        self._value: list[str] = []  # the string or value that is being read
        self._name: str | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._has_arguments = False

    def _first(self, text: str, at: int) -> int:
        return self._expect(text, at, {"{": self._in_object})

    def _expect(self, text: str, at: int, steps: dict[str, Step]) -> int:
        """Pass over white space and one of these characters, or end before another."""
        if text[at] in _SPACE:
            return at + 1
        if text[at] not in steps:
            return self._end(at)
        self._step = steps[text[at]]
        return at + 1

    def _in_object(self, text: str, at: int) -> int:
        """Before a key, or at the end of the object."""
        if text[at] != '"':
            return self._behind_value(text, at) if text[at] == "}" else self._expect(text, at, {})
        self._scan, self._value, self._step = JsonScan(), [], self._in_key
        return at

    def _in_key(self, text: str, at: int) -> int:
        end = self._take(text, at)
        if end is None:
            return len(text)
        self._key = _read("".join(self._value))
        self._step = self._before_value
        return end

    def _before_value(self, text: str, at: int) -> int:
        return self._expect(text, at, {":": self._at_value})

    def _at_value(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        self._scan, self._value = JsonScan(), []
        is_arguments = self._key in _ARGUMENTS and not self._has_arguments
        self._step = self._in_arguments if is_arguments and text[at] == "{" else self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        end = self._take(text, at)
        if end is None:
            return len(text)
        value = _read("".join(self._value))
        if self._key == "name" and self._name is None:
            if not isinstance(value, str) or value not in self._names:
                return self._end(end)
            self._name = value
        elif self._key in _ARGUMENTS and not self._has_arguments and isinstance(value, str):
            self._early, self._has_arguments = [value], True  # some models write them as a string
        if self._name is not None and self._has_arguments and not self.has_begun:
            self._begin(self._name, "".join(self._early))
        self._step = self._after_value
        return end

    def _in_arguments(self, text: str, at: int) -> int:
        end = self._scan.push(text, at)
        piece = text[at:] if end is None else text[at:end]
        if self._name is None:
            self._early.append(piece)
        elif self.has_begun:
            self._tell(piece)
        else:
            self._begin(self._name, piece)
        if end is None:
            return len(text)
        self._has_arguments, self._step = True, self._after_value
        return end

    def _after_value(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._behind_value(text, at)
        return self._expect(text, at, {",": self._in_object})

    def _behind_value(self, text: str, at: int) -> int:
        """At the end of the object."""
        if self._name is None:
            return self._end(at)
        if not self.has_begun:
            self._begin(self._name, "{}")
        return self._end(at + 1)

    def _take(self, text: str, at: int) -> int | None:
        """Take what follows of a key or value; its end, if that is there."""
        end = self._scan.push(text, at)
        self._value.append(text[at:] if end is None else text[at:end])
        return end


class NamedCall(CallReader):
    """``name[ARGS]{...}``, or without ``[ARGS]``. An id between ``[CALL_ID]`` and ``[ARGS]`` is passed over."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._head = ""

    def _first(self, text: str, at: int) -> int:
        if text[at] != "{":
            self._head += text[at]
            return at + 1 if len(self._head) <= _MAX_HEAD else self._end(at + 1)
        name = self.name_of(self._head)
        if name not in self._names:
            return self._end(at)
        self._begin(name, "")
        self._step = self._in_arguments
        return at

    def name_of(self, head: str) -> str:
        """The function's name out of what stands before the arguments; anything else, if that is no call."""
        return head.partition("[CALL_ID]")[0].partition("[ARGS]")[0].strip()

    def _in_arguments(self, text: str, at: int) -> int:
        end = self._scan.push(text, at)
        self._tell(text[at:] if end is None else text[at:end])
        return len(text) if end is None else self._end(end)


def _read(value: str) -> Any:
    """What JSON text says; None if it is none."""
    try:
        return json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return None
