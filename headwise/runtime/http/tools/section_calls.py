"""Calls in a section of their own, each a name and JSON behind it: as Kimi-K2 and DeepSeek-V3 write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import ClassVar

from headwise.runtime.http.tools.call_reader import CallReader, NamedCall, ObjectCall
from headwise.runtime.http.tools.marked_calls import MarkedCalls


class SectionCalls(MarkedCalls):
    """Text, and calls that a mark begins a section of.

    begin:  what each call begins with
    passed: what stands behind calls and is passed over, with white space
    reader: of what begins with ``begin``
    """

    begin: ClassVar[str]
    passed: ClassVar[tuple[str, ...]]
    reader: ClassVar[type[NamedCall]]

    def _open(self, opening: str, reader: Callable[[Collection[str]], CallReader] = ObjectCall) -> None:
        super()._open(opening, self.reader)

    def _behind_call(self) -> bool:
        self._buffer = text = self._buffer.lstrip()
        if text.startswith(self.begin):
            self._open("")
            return True
        found = next((mark for mark in self.passed if text.startswith(mark)), "")
        if found:
            self._buffer = text.removeprefix(found)
            return True
        if any(mark.startswith(text) for mark in (self.begin, *self.passed)):
            return False
        self._state = self._in_text
        return True


class _KimiCall(NamedCall):
    _HEAD = re.compile(r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?(.*?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*")

    def name_of(self, head: str) -> str:
        found = self._HEAD.fullmatch(head)
        return "" if found is None else found[1]


class KimiCalls(SectionCalls):
    """``functions.NAME:0``, and its arguments behind ``<|tool_call_argument_begin|>``: Kimi-K2."""

    mark = "<|tool_calls_section_begin|>"
    begin = "<|tool_call_begin|>"
    passed = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
    shown_tokens = (mark, begin, "<|tool_call_argument_begin|>", *passed)
    reader = _KimiCall


def _token(name: str) -> str:
    """As DeepSeek writes its control tokens."""
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"<{bar}{name.replace(' ', chr(0x2581))}{bar}>"


_SEPARATOR = _token("tool sep")


class _DeepseekCall(NamedCall):
    def name_of(self, head: str) -> str:
        """Before the separator; or behind it and ``function``, on a line of its own before a block of code."""
        kind, _, rest = head.strip().removeprefix(DeepseekCalls.begin).partition(_SEPARATOR)
        name, _, block = rest.partition("\n")
        if not rest.strip():
            return kind.strip()
        return name.strip() if kind.strip() == "function" and block.strip() == "```json" else ""


class DeepseekCalls(SectionCalls):
    """``NAME``, a separator, and arguments, as DeepSeek-V3.1 writes it, or V3's and R1's form with a block of code."""

    mark = _token("tool calls begin")
    begin = _token("tool call begin")
    passed = ("```", _token("tool call end"), _token("tool calls end"))
    shown_tokens = (mark, begin, _SEPARATOR, *passed[1:])
    reader = _DeepseekCall
