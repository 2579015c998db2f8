"""Which parser reads a model's answers: as configured, or as its chat template says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.http.tools.base import AnswerParser, PlainText
from headwise.runtime.http.tools.harmony import Harmony
from headwise.runtime.http.tools.marked_calls import (
    GraniteCalls,
    HermesCalls,
    LlamaCalls,
    MarkedCalls,
    MistralCalls,
    NemotronCalls,
)
from headwise.runtime.http.tools.section_calls import DeepseekCalls, KimiCalls
from headwise.runtime.http.tools.tagged_calls import (
    DeepseekTaggedCalls,
    DeepseekV4Calls,
    GlmCalls,
    MinimaxCalls,
    Qwen3CoderCalls,
    SeedCalls,
)
from headwise.runtime.http.tools.thinking import CLOSE, OPEN, Thinking

log = logging.getLogger(__name__)

PROMPT_END = 16
"""Last tokens of a prompt that are looked at: they say whether the answer begins within reasoning."""

_MARKED: dict[str, type[MarkedCalls]] = {
    "hermes": HermesCalls,
    "llama3": LlamaCalls,
    "mistral": MistralCalls,
    "granite": GraniteCalls,
    "nemotron": NemotronCalls,
    "qwen3_coder": Qwen3CoderCalls,
    "glm45": GlmCalls,
    "minimax_m2": MinimaxCalls,
    "seed_oss": SeedCalls,
    "kimi_k2": KimiCalls,
    "deepseek_v3": DeepseekCalls,
    "deepseek_v32": DeepseekTaggedCalls,
    "deepseek_v4": DeepseekV4Calls,
}

Tokens = Sequence[int] | NDArray[np.int32]
Written = Callable[[Sequence[int]], str]
"""The text of tokens, with control tokens."""


@dataclass(frozen=True)
class Parsers:
    """The forms of one model's answers.

    tools:     one of `_MARKED`, ``gpt_oss``, or ``none``: it calls no tools by itself
    reasoning: ``think``, ``seed_oss``, ``gpt_oss`` or ``none``
    written:   reads the end of a prompt; None: no prompt ends within reasoning
    """

    tools: str = "none"
    reasoning: str = "none"
    written: Written | None = None

    @classmethod
    def choose(cls, tools: str, reasoning: str, template: str | None, written: Written) -> Parsers:
        """Those of the configuration (``EngineConfig.tool_parser``, ``reasoning_parser``), where ``auto`` is what the
        chat template contains. Logs the choice.
        """
        chosen = cls(
            _tools_of(template or "") if tools == "auto" else tools,
            _reasoning_of(template or "") if reasoning == "auto" else reasoning,
            written,
        )
        log.info("headwise: answers are parsed by tool_parser %s, reasoning_parser %s", chosen.tools, chosen.reasoning)
        return chosen

    def shown_tokens(self, names: Collection[str]) -> tuple[str, ...]:
        """The control tokens that the parser of an answer reads."""
        parser = self.parser(names, ())
        return tuple(dict.fromkeys((*parser.shown_tokens, *self._of_calls(names).shown_tokens)))

    def parser(self, functions: Collection[str], prompt: Tokens) -> AnswerParser:
        """Of an answer to this prompt that may call these functions; a mapping has their parameters' schemas."""
        calls = self._of_calls(functions)
        marks = _THINKING.get(self.reasoning)
        if marks is None:
            return calls
        end = [int(token) for token in prompt[-PROMPT_END:]]
        return Thinking(calls, self.written is not None and self.written(end).rstrip().endswith(marks[0]), marks)

    def _of_calls(self, names: Collection[str]) -> AnswerParser:
        if "gpt_oss" in (self.reasoning, self.tools):
            return Harmony(names if self.tools == "gpt_oss" else (), self.reasoning == "gpt_oss")
        return _MARKED[self.tools](names) if names and self.tools in _MARKED else PlainText()


_THINKING = {"think": (OPEN, CLOSE), "seed_oss": ("<seed:think>", "</seed:think>")}
"""What reasoning stands between."""
_OWN_MARKS = ("granite", "nemotron", "kimi_k2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "minimax_m2", "seed_oss")
"""Forms that are known by their mark."""


def _tools_of(template: str) -> str:
    """What a template tells a model that calls look like."""
    if _is_harmony(template):
        return "gpt_oss"
    own = next((form for form in _OWN_MARKS if _MARKED[form].mark in template), None)
    if own is not None:
        return own
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3"
    if "<tool_call>" not in template:
        return "none"
    return "qwen3_coder" if "<function=" in template else "glm45" if "<arg_key>" in template else "hermes"


def _reasoning_of(template: str) -> str:
    if _is_harmony(template):
        return "gpt_oss"
    return next((form for form, marks in _THINKING.items() if any(mark in template for mark in marks)), "none")


def _is_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template
