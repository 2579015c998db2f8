"""The output of a response: what a model thinks, says and calls, as items that grow, and the events that tell of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Event = tuple[str, dict[str, Any]]
"""Its type, without ``response.`` before it, and what it tells."""

_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_GROWS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""Of an item's type, what its events call the text that it has more and more of."""


@dataclass
class _Item:
    """call: of a function's, its id and the function's name"""

    kind: str
    index: int
    call: dict[str, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    ident: str = ""

    def __post_init__(self) -> None:
        self.ident = f"{_PREFIX[self.kind]}_{secrets.token_hex(16)}"

    @property
    def place(self) -> dict[str, Any]:
        """Where in the response its text is."""
        place = {"item_id": self.ident, "output_index": self.index}
        return place if self.kind == "function_call" else {**place, "content_index": 0}

    @property
    def told(self) -> dict[str, Any]:
        """What is told of log-probabilities with a text."""
        return {"logprobs": self.logprobs} if self.kind == "message" else {}

    def content(self) -> dict[str, Any]:
        part = {"type": _GROWS[self.kind], "text": "".join(self.texts)}
        return {**part, "annotations": [], **self.told} if self.kind == "message" else part

    def data(self, status: str) -> dict[str, Any]:
        head = {"id": self.ident, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**head, **self.call, "arguments": "".join(self.texts)}
        content = [] if status == "in_progress" else [self.content()]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


class ResponseOutput:
    """Of one answer. items: those that are whole"""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._untold: list[Any] = []  # log-probabilities of what is no text of a message, or is held back

    def take(self, delta: dict[str, Any]) -> Iterator[Event]:
        """More of it, as `ChatAnswer` makes it."""
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._begin("function_call", {"call_id": call["id"], "name": function["name"]})
            yield from self._more(function["arguments"])
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if delta.get(name):
                if self._open is None or self._open.kind != kind:
                    yield from self._begin(kind)
                yield from self._more(delta[name])

    def take_logprobs(self, logprobs: list[Any]) -> None:
        """Of tokens whose text is taken next; they are told with a message's next text."""
        self._untold += logprobs

    def finish(self, status: str) -> Iterator[Event]:
        """The end of the last item. An answer without any is an empty message."""
        if self._open is None:
            yield from self._begin("message")
        yield from self._close(status)

    def _begin(self, kind: str, call: dict[str, str] | None = None) -> Iterator[Event]:
        yield from self._close("completed")
        item = self._open = _Item(kind, len(self.items), call or {})
        yield "output_item.added", {"output_index": item.index, "item": item.data("in_progress")}
        if kind != "function_call":
            yield "content_part.added", {**item.place, "part": item.content()}

    def _more(self, text: str) -> Iterator[Event]:
        item = self._open
        if item is None or not text:
            return
        item.texts.append(text)
        told = {}
        if item.kind == "message":
            told, self._untold = {"logprobs": self._untold}, []
            item.logprobs += told["logprobs"]
        yield f"{_GROWS[item.kind]}.delta", {**item.place, "delta": text, **told}

    def _close(self, status: str) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is None:
            return
        item.logprobs += self._untold
        self._untold = []
        data = item.data(status)
        self.items.append(data)
        name = "arguments" if item.kind == "function_call" else "text"
        yield f"{_GROWS[item.kind]}.done", {**item.place, name: "".join(item.texts), **item.told}
        if item.kind != "function_call":
            yield "content_part.done", {**item.place, "part": item.content()}
        yield "output_item.done", {"output_index": item.index, "item": data}
