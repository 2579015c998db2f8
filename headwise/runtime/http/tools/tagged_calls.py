"""Calls whose arguments stand one by one between tags, as Qwen 3 Coder, GLM-4.5, MiniMax-M2 and others write them.

What is between the tags of an argument is its text, not JSON: whether it is a string, the function's schema says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from headwise.runtime.http.tools.base import CallArguments, CallBegin, Part, cut_at
from headwise.runtime.http.tools.call_reader import CallReader, ObjectCall
from headwise.runtime.http.tools.marked_calls import MarkedCalls

Schemas = Mapping[str, Any]
"""Of each function its ``parameters``: a JSON schema, or None."""

_MAX_NAME, _MAX_SPACE = 256, 64
"""Characters of a function's name, and of white space before or behind it."""
_PYTHON = {"true": "true", "false": "false", "none": "null", "null": "null"}


@dataclass(frozen=True)
class Tags:
    """What stands before and behind a function's name, an argument's name and its value, and behind all arguments.

    name:        with nothing behind it, it ends with its line, or where a tag begins
    is_on_lines: a value has lines of its own: the first and the last line break are not of it
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    close: str
    is_on_lines: bool = False


class TaggedCall:
    """`ReadsCall` of what ``tags`` describe."""

    def __init__(self, schemas: Schemas, tags: Tags) -> None:
        self._schemas, self._tags = schemas, tags
        self._buffer = ""
        self._state: Callable[[], bool] = self._before_name
        self._parts: list[Part] = []
        self._name = self._key = ""
        self._is_first = True
        self._is_over = False
        self._is_new = True  # nothing of the value was taken yet
        self._held: list[str] = []  # of a key or value that is told once it is whole
        self.has_begun = False

    @property
    def raw(self) -> str:
        """What was read of something that is not yet a call; of what is none, all is behind it."""
        return "" if self._is_over else self._buffer

    def push(self, text: str) -> tuple[list[Part], str | None]:
        self._buffer += text
        while not self._is_over and self._state():
            pass
        told, self._parts = self._parts, []
        return told, self._buffer if self._is_over else None

    # ---- states: each takes from the buffer, and says whether there may be more to take ----

    def _before_name(self) -> bool:
        """What is held back until it is certain that this is a call."""
        opening, behind = self._tags.name
        text = _behind_space(self._buffer)
        if text is None or not text.startswith(opening):
            return self._wait(text is not None and opening.startswith(text))
        ends = (behind,) if behind else ("\n", self._tags.key[0], self._tags.close)
        name, end, rest = cut_at(text.removeprefix(opening), ends)
        if not end or len(name) > _MAX_NAME:
            return self._wait(len(name) <= _MAX_NAME)
        if name.strip() not in self._schemas:
            return self._wait(False)
        return self._begins(name.strip(), rest if behind else end + rest)

    def _begins(self, name: str, rest: str) -> bool:
        """Whether arguments follow, or the end of the call."""
        text = _behind_space(rest)
        marks = self._tags.key[0], self._tags.close
        if text is None or not text.startswith(marks):
            return self._wait(text is not None and any(mark.startswith(text) for mark in marks))
        self.has_begun, self._name, self._buffer = True, name, text
        self._parts += [CallBegin(name), CallArguments("{")]
        self._state = self._before_key
        return True

    def _before_key(self) -> bool:
        opening, close = self._tags.key[0], self._tags.close
        text = self._buffer.lstrip()
        if text.startswith(opening):
            self._tell("" if self._is_first else ", ")
            self._is_first = False
            self._buffer, self._state = text.removeprefix(opening), self._in_key
            return True
        if not text.startswith(close) and (opening.startswith(text) or close.startswith(text)):
            return False
        self._tell("}")
        self._buffer = text.removeprefix(close)
        self._is_over = True
        return False

    def _in_key(self) -> bool:
        key = self._until(self._tags.key[1])
        if key is None:
            return False
        self._key, self._state = key.strip(), self._before_value
        return True

    def _before_value(self) -> bool:
        opening = self._tags.value[0]
        text = self._buffer.lstrip() if opening else self._buffer
        if not text.startswith(opening):
            if opening.startswith(text):
                return False
            opening = ""  # a tag was left out
        self._key, _, told = self._key.partition('" string="')  # DeepSeek says so itself
        is_string = told == "true" if told else _is_string(self._schemas[self._name], self._key)
        self._tell(f"{json.dumps(self._key, ensure_ascii=False)}: ")
        self._buffer, self._is_new = text.removeprefix(opening), True
        self._state = self._in_string if is_string else self._in_value
        if is_string:
            self._tell('"')
        return True

    def _in_string(self) -> bool:
        """Tell what is certain of a string: all but what may be the tag behind it, and the last line break."""
        is_on_lines = self._tags.is_on_lines
        if self._is_new and is_on_lines:
            if not self._buffer:
                return False
            self._buffer = self._buffer.removeprefix("\n")
        self._is_new = False
        text, end, rest = cut_at(self._buffer, (self._tags.value[1],))
        told = text.removesuffix("\n") if is_on_lines else text
        self._tell(json.dumps(told, ensure_ascii=False)[1:-1])
        if not end:
            self._buffer = self._buffer[len(told) :]
            return False
        self._tell('"')
        self._buffer, self._state = rest, self._before_key
        return True

    def _in_value(self) -> bool:
        """Tell a value that is no string, or may be none, once it is whole."""
        text = self._until(self._tags.value[1])
        if text is None:
            return False
        if self._tags.is_on_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._tell(_json_of(text))
        self._state = self._before_key
        return True

    def _until(self, mark: str) -> str | None:
        """All before a mark, which is passed over, too; None: it has not come. Each character is looked at once."""
        text, end, self._buffer = cut_at(self._buffer, (mark,))
        self._held.append(text)
        if not end:
            return None
        whole, self._held = "".join(self._held), []
        return whole

    def _wait(self, may_be_one: bool) -> bool:
        """More text decides, or this is no call."""
        self._is_over = not may_be_one
        return False

    def _tell(self, arguments: str) -> None:
        if arguments:
            self._parts.append(CallArguments(arguments))


def _behind_space(text: str) -> str | None:
    """What is behind the white space that a text begins with; None: there is too much."""
    found = text.lstrip()
    return found if len(text) - len(found) <= _MAX_SPACE else None


def _is_string(schema: Any, key: str) -> bool:
    """Whether an argument is a string by its function's schema, whatever it looks like."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    own = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(own, Mapping):
        return False
    every = own.get("enum")
    return own.get("type") == "string" or (isinstance(every, list) and all(isinstance(each, str) for each in every))


def _json_of(text: str) -> str:
    """A value as JSON: as it is, if it is JSON; true, false and none as Python writes them, too; else as a string."""
    plain = text.strip()
    known = _PYTHON.get(plain.lower())
    if known is not None:
        return known
    try:
        json.loads(plain)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return plain


class TaggedCalls(MarkedCalls):
    """Text, and calls between tags.

    functions: that may be called, with the schemas of their arguments, where there are any

    close: what closes what ``mark`` opened, where that is not the end of a call; before it more calls may follow
    """

    tags: ClassVar[Tags]
    close: ClassVar[str] = ""

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        self._schemas: Schemas = functions if isinstance(functions, Mapping) else dict.fromkeys(functions)

    def _open(self, opening: str, reader: Callable[[Collection[str]], CallReader] = ObjectCall) -> None:
        self._opening, self._state = opening, self._in_call
        self._reader = TaggedCall(self._schemas, self.tags)

    def _behind_call(self) -> bool:
        opening, text = self.tags.name[0], self._buffer.lstrip()
        if opening and self.close:
            if text.startswith(opening):
                self._buffer = text
                self._open("")
                return True
            if opening.startswith(text):
                self._buffer = text
                return False
        return self._pass(self.close)


class Qwen3CoderCalls(TaggedCalls):
    """``<function=NAME>``, ``<parameter=KEY>`` and lines of the value; Qwen 3.5 writes them, too."""

    mark, close = "<tool_call>", "</tool_call>"
    shown_tokens = ("<tool_call>", "</tool_call>")
    tags = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", is_on_lines=True)


class SeedCalls(TaggedCalls):
    """Seed-OSS: the same behind another mark, on no lines of its own."""

    mark, close = "<seed:tool_call>", "</seed:tool_call>"
    shown_tokens = ("<seed:tool_call>", "</seed:tool_call>")
    tags = Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>")


class MinimaxCalls(TaggedCalls):
    """``<invoke name="NAME">`` and ``<parameter name="KEY">VALUE</parameter>``: MiniMax-M2."""

    mark, close = "<minimax:tool_call>", "</minimax:tool_call>"
    shown_tokens = ("<minimax:tool_call>", "</minimax:tool_call>")
    tags = Tags(('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), "</invoke>")


class GlmCalls(TaggedCalls):
    """The name, and pairs of ``<arg_key>`` and ``<arg_value>``: GLM-4.5 and later."""

    mark = "<tool_call>"
    shown_tokens = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    tags = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>")


_DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"


class DeepseekTaggedCalls(TaggedCalls):
    """DeepSeek-V3.2: as MiniMax-M2 by other names, and each argument says whether it is a string."""

    mark, close = f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"
    shown_tokens = (_DSML,)
    tags = Tags(
        (f'<{_DSML}invoke name="', '">'),
        (f'<{_DSML}parameter name="', '">'),
        ("", f"</{_DSML}parameter>"),
        f"</{_DSML}invoke>",
    )


class DeepseekV4Calls(DeepseekTaggedCalls):
    """DeepSeek-V4: the same in a block of another name."""

    mark, close = f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"
