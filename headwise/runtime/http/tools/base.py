"""The contract of parsers: an answer's text as it comes -> the parts that it consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Text:
    """More of what the user reads."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of the function of that name begins; its arguments follow."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of the call that began last: JSON text, as the model writes it."""

    text: str


Part = Text | Reasoning | CallBegin | CallArguments


class AnswerParser(ABC):
    """Parses one answer. However its text is cut into pieces, the parts are the same once neighbours are `joined`.

    A call begins once the function's name is certain, is one that was offered, and arguments follow: what is not so far
    stays text, with its marks. What comes then is told as it comes, so arguments that a model leaves unfinished or
    malformed are told as they are.

    shown_tokens: the control tokens that it reads (`SamplingParams.shown_tokens`)
    """

    shown_tokens: tuple[str, ...] = ()

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """The parts that the next piece of text makes certain."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """The rest, when no more text comes. To be called once."""


class PlainText(AnswerParser):
    """Text is text."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class Trim:
    """Text as it comes, without the white space at its beginning and end.

    at_start: whether white space at the beginning is left out, too
    """

    def __init__(self, at_start: bool = True) -> None:
        self._is_before = at_start
        self._has_told = False
        self._space: list[str] = []

    def push(self, text: str) -> str:
        if self._is_before:
            text = text.lstrip()
            self._is_before = not text
        kept = text.rstrip()
        if not kept:
            self._space.append(text)
            return ""
        told = "".join((*self._space, kept))
        self._space = [text[len(kept) :]]
        self._has_told = True
        return told

    def interrupt(self) -> None:
        """Something else stands here: leave out the white space behind it. What is before it is told with more text."""
        self._is_before = True
        if not self._has_told:
            self._space = []

    @property
    def space(self) -> str:
        """White space that ends the text so far, and was not told."""
        return "" if self._is_before else "".join(self._space)


class CallSpacing:
    """Leaves out the white space behind calls, and before them where no text follows."""

    def __init__(self) -> None:
        self._trim = Trim(at_start=False)

    def push(self, parts: Iterable[Part]) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            if not isinstance(part, Text):
                self._trim.interrupt()
                told.append(part)
            elif text := self._trim.push(part.text):
                told.append(Text(text))
        return told

    def finish(self) -> list[Part]:
        """White space that ends the text, unless a call stands before it."""
        return [Text(self._trim.space)] if self._trim.space else []


def cut_at(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """Text before the first of some marks, that mark, and what is behind it. Without a mark the last is the end of the
    text that may begin one.
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    keep = max((_overlap(text, mark) for mark in marks), default=0)
    return text[: len(text) - keep], "", text[len(text) - keep :]


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts, with neighbours of one kind as one."""
    whole: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind is CallBegin:
            whole += group
        else:
            whole.append(kind("".join(part.text for part in group if not isinstance(part, CallBegin))))
    return whole


def _overlap(text: str, mark: str) -> int:
    """Length of the longest proper prefix of the mark that the text ends with."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
