"""Calls behind a mark within the text: as Hermes and Qwen, Llama 3, Mistral, Granite 3, and Nemotron write them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection

from headwise.runtime.http.tools.base import AnswerParser, CallSpacing, Part, Text, cut_at
from headwise.runtime.http.tools.call_reader import CallReader, NamedCall, ObjectCall, ReadsCall

_MAX_SPACE = 64
"""White space before a call; text begins so, too, and it would be held back."""


class MarkedCalls(AnswerParser):
    """Text, and calls that a mark opens. What follows a mark and is no call stays text, with the mark.

    names: functions that may be called
    """

    mark = ""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._state: Callable[[], bool] = self._at_start
        self._opening = ""  # what opened the call that is being read
        self._reader: ReadsCall = ObjectCall(names)
        self._parts: list[Part] = []
        self._spacing = CallSpacing()

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        told, self._parts = self._parts, []
        return self._spacing.push(told)

    def finish(self) -> list[Part]:
        if self._state == self._in_call:
            rest = "" if self._reader.has_begun else self._opening + self._reader.raw
        elif self._state == self._behind_call:
            rest = ""  # a mark that was cut off
        else:
            rest = self._opening + self._buffer
        return [*self._spacing.push([Text(rest)] if rest else []), *self._spacing.finish()]

    # ---- states: each takes from the buffer, and says whether there may be more to take ----

    def _at_start(self) -> bool:
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        before, mark, self._buffer = cut_at(self._buffer, (self.mark,))
        if before:
            self._parts.append(Text(before))
        if mark:
            self._open(mark)
        return bool(mark)

    def _in_call(self) -> bool:
        parts, rest = self._reader.push(self._buffer)
        self._parts += parts
        self._buffer = rest or ""
        if rest is None:
            return False
        if self._reader.has_begun:
            self._state = self._behind_call
        else:
            self._parts.append(Text(self._opening + self._reader.raw))
            self._state = self._in_text
        self._opening = ""
        return True

    @abstractmethod
    def _behind_call(self) -> bool:
        """Pass over what closes a call, or open the next one."""

    def _open(self, opening: str, reader: Callable[[Collection[str]], CallReader] = ObjectCall) -> None:
        """Read a call from here on, which this text has opened."""
        self._opening, self._reader, self._state = opening, reader(self._names), self._in_call

    def _pass(self, mark: str) -> bool:
        """Pass over white space and a mark behind a call, or over white space only, if something else is there."""
        self._buffer = self._buffer.lstrip()
        if len(self._buffer) < len(mark) and mark.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(mark)
        self._state = self._in_text
        return True


class HermesCalls(MarkedCalls):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once for each call: Hermes, Qwen 2.5 and 3."""

    mark = "<tool_call>"
    shown_tokens = ("<tool_call>", "</tool_call>")

    def _behind_call(self) -> bool:
        return self._pass("</tool_call>")


class LlamaCalls(MarkedCalls):
    """``{"name": ..., "parameters": {...}}`` behind ``<|python_tag|>``, or at the beginning of the answer; several are
    separated by semicolons. Code behind the mark, for Llama's own tools, stays text.
    """

    mark = "<|python_tag|>"
    shown_tokens = ("<|python_tag|>",)

    def _at_start(self) -> bool:
        text = self._buffer.lstrip()
        space = self._buffer[: len(self._buffer) - len(text)]
        if not text and len(space) <= _MAX_SPACE:
            return False
        if len(space) <= _MAX_SPACE and text[0] == "{":
            self._open(space)
            self._buffer = text
        else:
            self._state = self._in_text
        return True

    def _behind_call(self) -> bool:
        behind = self._buffer.lstrip()
        separator = ";" if behind.startswith(";") else ""
        text = behind.removeprefix(separator).lstrip()
        if not text:
            self._buffer = separator
            return False
        if text[0] == "{":
            self._open(separator)
        else:
            self._state = self._in_text
        self._buffer = text
        return True


class MistralCalls(MarkedCalls):
    """``[TOOL_CALLS]`` before a list of ``{"name": ..., "arguments": {...}}``, or, in newer models, before each
    ``name[ARGS]{...}``.
    """

    mark = "[TOOL_CALLS]"
    shown_tokens: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _open(self, opening: str, reader: Callable[[Collection[str]], CallReader] = ObjectCall) -> None:
        self._opening, self._state = opening, self._behind_mark

    def _behind_mark(self) -> bool:
        """Which of both forms is it?"""
        text = self._buffer.lstrip()
        space = self._buffer[: len(self._buffer) - len(text)]
        if len(space) > _MAX_SPACE:
            self._parts.append(Text(self._opening + space))
            self._opening, self._buffer, self._state = "", text, self._in_text
            return True
        if not text:
            return False
        is_list = text.startswith("[")
        self._buffer = text[1:] if is_list else text
        is_object = is_list or text.startswith("{")
        super()._open(self._opening + space + "[" * is_list, ObjectCall if is_object else NamedCall)
        return True

    def _behind_call(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            self._buffer = ""
            return False
        if text[0] == ",":
            self._buffer = text[1:]
            super()._open(",")
        else:
            self._buffer = text.removeprefix("]")
            self._state = self._in_text
        return True


class GraniteCalls(MistralCalls):
    """``<|tool_call|>`` before such a list: Granite 3."""

    mark = "<|tool_call|>"
    shown_tokens = ("<|tool_call|>",)


class NemotronCalls(MistralCalls):
    """``<TOOLCALL>`` before such a list, and ``</TOOLCALL>`` behind it: Nemotron Nano 2 and Llama-Nemotron."""

    mark = "<TOOLCALL>"
    shown_tokens = ("<TOOLCALL>", "</TOOLCALL>")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_closed = False

    def _behind_call(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith("]") and not self._is_closed:
            self._is_closed, self._buffer = True, text[1:]
        if not self._is_closed:
            return super()._behind_call()
        is_past = self._pass("</TOOLCALL>")
        self._is_closed = not is_past
        return is_past
