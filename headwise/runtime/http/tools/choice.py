"""What a request says of tools, checked: which are offered, and whether one must be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import InvalidRequestError
from headwise.runtime.http.errors import invalid
from headwise.runtime.http.tools.answer import ChatAnswer, MakeAnswer
from headwise.runtime.http.tools.base import AnswerParser, PlainText
from headwise.runtime.http.tools.forced import OneCall, SomeCalls, schema_of_one, schema_of_some
from headwise.runtime.http.tools.select import Parsers, Tokens
from headwise.runtime.loader.tools import plain_tools
from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.request import SamplingParams


@dataclass(frozen=True)
class ToolChoice:
    """tools:  that the model is told of, as `plain_tools` returns them
    forced: the tools of which one must be called
    schema: the form of an answer that is such calls; empty: it is free
    named:  whether one tool was named, so that its arguments are all that the answer has
    is_one: whether at most one call is wanted
    """

    tools: tuple[dict[str, Any], ...] = ()
    forced: tuple[dict[str, Any], ...] = ()
    schema: str = ""
    named: bool = False
    is_one: bool = False

    @classmethod
    def of(cls, tools: Any, choice: Any, is_parallel: bool | None, parsers: Parsers) -> ToolChoice:
        """From a request's ``tools``, ``tool_choice`` and ``parallel_tool_calls``. Raises `ApiError`."""
        try:
            offered = tuple(plain_tools(tools or []))
        except InvalidRequestError as error:
            raise invalid(str(error), "tools") from None
        if tools is not None and not offered:
            raise invalid("tools is an empty list: give at least one tool, or leave it out", "tools")
        if choice is None:
            choice = "auto" if offered else "none"
        if choice == "none":
            return cls()
        if not offered:
            raise invalid("tool_choice chooses among tools: give tools as well", "tool_choice")
        is_one = is_parallel is False
        if choice == "auto":
            if parsers.tools == "none":
                raise invalid(_NO_PARSER, "tools")
            return cls(offered, is_one=is_one)
        if choice == "required":
            return cls(offered, offered, schema_of_some(offered, is_one), is_one=is_one)
        tool = _named(choice, offered)
        return cls(offered, (tool,), schema_of_one(tool), named=True, is_one=True)

    @property
    def functions(self) -> dict[str, Any]:
        """Their names, and the schemas of their parameters, where they have any."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}

    def sampling(self, asked: SamplingParams, parsers: Parsers) -> SamplingParams:
        """The sampling of such an answer. Raises `ApiError` if it cannot have the form that was asked for."""
        if not self.forced:
            return replace(asked, shown_tokens=() if asked.guided else parsers.shown_tokens(self.functions))
        if asked.guided is not None:
            raise invalid("an answer has one form, and tool_choice asks for a call: leave the other out", "tool_choice")
        try:
            return replace(asked, guided=Guided(json_schema=self.schema))
        except InvalidRequestError as error:
            raise invalid(f"tools cannot be called by force: {error}", "tools") from None

    def answers(self, parsers: Parsers, has_form: bool) -> MakeAnswer:
        """What reads the answers.

        has_form: whether the request gave a form, which the whole answer then has: it is text, and nothing else
        """

        def parser(prompt: Tokens) -> AnswerParser:
            if self.named:
                return OneCall(self.forced[0]["function"]["name"])
            if self.forced:
                return SomeCalls(self.functions)
            return PlainText() if has_form else parsers.parser(self.functions, prompt)

        return lambda prompt: ChatAnswer(parser(prompt), self.is_one)


_NO_PARSER = (
    "this model's chat template has no form of calls that is known here: tool_choice required, or a function's name, "
    "forces a call; for auto, serve it with tool_parser and chat_template"
)


def _named(choice: Any, offered: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The tool that ``{"type": "function", "function": {"name": ...}}`` names."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(
            'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    for tool in offered:
        if tool["function"]["name"] == name:
            return tool
    raise invalid(f"tool_choice names {name!r:.80}, which is not among the tools", "tool_choice")
