"""The answers of Hugging Face transformers that tests compare with (see `tests/references/make_references.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

CLOSE = 1e-3
"""Where the two best logits are closer than this, rounding may choose: neither the token nor what follows is judged."""


@dataclass(frozen=True)
class Answer:
    """One prompt and its 64 greedy tokens in float32."""

    name: str
    prompt_ids: list[int]
    output_ids: list[int]
    gaps: list[float]
    top_ids: list[int]
    top_logits: list[float]
    sample_ids: list[int]
    sample_logits: list[float]

    @property
    def judged(self) -> list[int]:
        """The leading output tokens that any right implementation must produce."""
        stop = next((i for i, gap in enumerate(self.gaps) if gap < CLOSE), len(self.gaps))
        return self.output_ids[:stop]

    def first(self, tokens: int) -> Answer:
        """The same, cut to fewer output tokens, for tests that have seen enough by then."""
        return replace(self, output_ids=self.output_ids[:tokens], gaps=self.gaps[:tokens])


@cache
def answers(model: str) -> tuple[Answer, ...]:
    references = Path(__file__).parent.parent / "references"
    path = next(path for path in (references / f"{model}.json", references / f"tiny-{model}.json") if path.exists())
    return tuple(Answer(**entry) for entry in json.loads(path.read_text())["prompts"])


def sure_answers(tokens: int) -> list[Answer]:
    """SmolLM2's ``tokens`` to short prompts, each the best by a quarter: rounded weights, which CPUs with other
    instructions round otherwise, say the same. For tests in which streams go on whatever happens to engines."""
    return [answer.first(tokens) for answer in answers("smollm2-135m-sure")]


def assert_same(answer: Answer, token_ids: Sequence[int]) -> None:
    """Raise AssertionError with the first token that differs."""
    judged = answer.judged
    got = list(token_ids[: len(judged)])
    differ = next((i for i, (a, b) in enumerate(zip(got, judged, strict=False)) if a != b), None)
    assert differ is None, f"{answer.name}: token {differ} is {got[differ]}, not {judged[differ]}"
    assert len(got) >= len(judged), f"{answer.name}: {len(got)} tokens, {len(judged)} expected"
