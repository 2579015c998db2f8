"""A serving runtime in a process of its own, which loads once and then serves what it is asked, over JSON lines.

The first line on stdin has the runtime's options; the answer says what was loaded. Each line after it asks for greedy
outputs of a fixed length (`prompts`, `output_tokens`; where a runtime can, one after the other, `at` so many seconds)
and is answered with what each of the `requests` got; or, where a runtime can, for what it makes of a `text`.

Every runtime's own Python runs this file, so it needs the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Mark = tuple[float, int]
"""Seconds since a request was due, and how many of its tokens had come by then."""


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


def serve_when_due(
    prompts: Sequence[list[int]],
    at: Sequence[float] | None,
    send: Callable[[list[int]], str],
    step: Callable[[], Iterable[tuple[str, Sequence[int]]] | None],
) -> list[Served]:
    """Send each prompt when it is due, and serve until all have ended.

    at:   seconds from now on, ascending; None: all are due at once
    send: gives a request its name
    step: computes what is next; who got which tokens. None: there is nothing to do
    """
    served: dict[str, Served] = {}
    due_at: dict[str, float] = {}
    coming = deque(zip([0.0] * len(prompts) if at is None else at, prompts, strict=True))
    began = time.perf_counter()
    while True:
        while coming and coming[0][0] <= time.perf_counter() - began:
            seconds, prompt = coming.popleft()
            name = send(prompt)
            served[name], due_at[name] = Served([], -1), seconds
        given = step()
        now = time.perf_counter() - began
        if given is None and not coming:
            return list(served.values())
        if given is None:
            time.sleep(max(0.0, coming[0][0] - now))
        for name, tokens in given or ():
            served[name].add(now - due_at[name], tokens)


class Gradual(Runtime, Protocol):
    """A runtime that can also be sent prompts one after the other."""

    def serve(self, prompts: list[list[int]], output_tokens: int, at: list[float] | None = None) -> list[Served]:
        """See `serve_when_due`."""


class Reader(Runtime, Protocol):
    """A runtime that can also say what it makes of a text."""

    def read(self, text: list[int]) -> dict[str, Any]:
        """Of each token of a text but the first: `surprise`, ``-ln p``, and `likeliest`, which one it expected."""


def answer(load: Callable[[dict[str, Any]], Runtime | Gradual | Reader]) -> None:
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
        gradually = {"at": asked["at"]} if "at" in asked else {}
        served = runtime.serve(asked["prompts"], asked["output_tokens"], **gradually)
        say({"requests": [asdict(one) for one in served]})
