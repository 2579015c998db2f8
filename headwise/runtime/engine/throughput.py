"""How fast an engine computes, as measured. It decides what is worth copying, and the frontend routes by it."""

from __future__ import annotations

from headwise.cache_controller.copy_costs import OUTLIER, smooth

WINDOW_TOKENS = 2048
"""Prompt tokens after which what was measured before them counts half."""


class StepTimes:
    """Measured times of an engine's steps; 0 before the first step of a kind.

    decode_step_s: seconds of a step that only decodes
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self._prefill_s = self._prefill_tokens = 0.0

    @property
    def prefill_token_s(self) -> float:
        """Seconds to compute a token of a prompt.

        Every token counts alike: in a step of few tokens each takes much longer than in a step of many, which says
        little of a long prompt.
        """
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0

    def observe(self, tokens: int, sequences: int, compute_s: float) -> None:
        """A step has computed so many tokens of so many sequences."""
        if not tokens or not compute_s:
            return
        if tokens > 2 * sequences:  # mostly prompts
            if self._prefill_tokens:
                compute_s = min(compute_s, OUTLIER * max(self._prefill_s, tokens * self.prefill_token_s))
            kept = 0.5 ** (tokens / WINDOW_TOKENS)
            self._prefill_s = kept * self._prefill_s + compute_s
            self._prefill_tokens = kept * self._prefill_tokens + tokens
        elif tokens == sequences:
            self.decode_step_s = smooth(self.decode_step_s, compute_s)
