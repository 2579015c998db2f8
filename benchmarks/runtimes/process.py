"""A serving runtime in a process of its own, which loads once and then serves what it is asked, over JSON lines.

The first line on stdin has the runtime's options; the answer says what was loaded. Each line after it asks for greedy
outputs of a fixed length (`prompts`, `output_tokens`) and is answered with what each of the `requests` got; or, where a
runtime can, for what it makes of a `text`.

Every runtime's own Python runs this file, so it needs the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Mark = tuple[float, int]
"""Seconds since all requests were sent, and how many tokens of one of them had come by then."""


@dataclass
class Served:
    """What a request got.

    marks: ascending; several tokens may come at once
    first: its first token, -1 where it is not known
    """

    marks: list[Mark]
    first: int

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self.marks[-1][1] if self.marks else 0

    def add(self, seconds: float, tokens: Sequence[int]) -> None:
        if not self.marks:
            self.first = int(tokens[0])
        self.marks.append((seconds, self.count + len(tokens)))


class Runtime(Protocol):
    """about: what was loaded, for the report"""

    about: dict[str, Any]

    def serve(self, prompts: list[list[int]], output_tokens: int) -> list[Served]:
        """Send all prompts at once; each gets its ``output_tokens`` likeliest next tokens, whatever they are."""


class Reader(Runtime, Protocol):
    """A runtime that can also say what it makes of a text."""

    def read(self, text: list[int]) -> dict[str, Any]:
        """Of each token of a text but the first: `surprise`, ``-ln p``, and `likeliest`, which one it expected."""


def answer(load: Callable[[dict[str, Any]], Runtime | Reader]) -> None:
    """Load the runtime, then serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    runtime = load(json.loads(sys.stdin.readline()))
    say(runtime.about)
    for line in sys.stdin:
        asked = json.loads(line)
        if "text" in asked:
            reader: Any = runtime
            say(reader.read(asked["text"]))
            continue
        say({"requests": [asdict(one) for one in runtime.serve(asked["prompts"], asked["output_tokens"])]})
