"""Harmony, the format of gpt-oss: an answer is messages, each to a channel, and perhaps to a recipient.

    <|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Genoa"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>

The format: https://github.com/openai/harmony
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from headwise.runtime.http.tools.base import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Part,
    Reasoning,
    Text,
    Trim,
    cut_at,
)

_HEADS = ("<|start|>", "<|channel|>")
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony(AnswerParser):
    """Analysis is reasoning, what is addressed to an offered function is a call of it, and all else is text. Messages
    of one kind are separated by a line break. Text outside of messages is text.

    names:          functions that may be called
    tells_analysis: whether analysis is told as reasoning; if not, it is text
    """

    shown_tokens = (*_HEADS, _MESSAGE, *_ENDS, "<|constrain|>")

    def __init__(self, names: Collection[str], tells_analysis: bool = True) -> None:
        self._names = names
        self._tells_analysis = tells_analysis
        self._buffer = ""
        self._head: list[str] = []
        self._is_head = False
        self._tell: Callable[[str], Part] = Text
        self._told: set[object] = set()  # the kinds that messages had so far
        self._between = ""  # what separates this message from the last of its kind
        self._trim = Trim()
        self._is_call = self._has_arguments = False

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and (self._read_head if self._is_head else self._read_message)(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """A message's rest; a head that was cut off says nothing."""
        parts: list[Part] = []
        if not self._is_head:
            self._add(self._buffer, parts)
            self._end_message(parts)
        return parts

    def _read_head(self, parts: list[Part]) -> bool:
        head, mark, self._buffer = cut_at(self._buffer, (_MESSAGE,))
        self._head.append(head)
        if not mark:
            return False
        self._begin_message("".join(self._head), parts)
        self._head, self._is_head = [], False
        return True

    def _read_message(self, parts: list[Part]) -> bool:
        text, mark, rest = cut_at(self._buffer, (*_HEADS, *_ENDS))
        self._add(text, parts)
        self._buffer = rest
        if mark:
            self._end_message(parts)
            self._head, self._is_head = [mark], mark in _HEADS
        return bool(mark)

    def _begin_message(self, head: str, parts: list[Part]) -> None:
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        self._trim, self._has_arguments = Trim(), False
        self._is_call = recipient is not None and recipient[1] in self._names
        if recipient is not None and self._is_call:
            parts.append(CallBegin(recipient[1]))
            self._tell, self._between = CallArguments, ""
            return
        is_analysis = channel is not None and channel[1] == "analysis" and self._tells_analysis
        self._tell = Reasoning if is_analysis else Text
        self._between = "\n" if self._tell in self._told else ""

    def _add(self, text: str, parts: list[Part]) -> None:
        text = self._trim.push(text)
        if text:
            parts.append(self._tell(self._between + text))
            self._between, self._has_arguments = "", True
            self._told.add(self._tell)

    def _end_message(self, parts: list[Part]) -> None:
        if self._is_call and not self._has_arguments:
            parts.append(CallArguments("{}"))
        self._is_call, self._tell = False, Text
        self._trim = Trim()
        self._between = "\n" if Text in self._told else ""
