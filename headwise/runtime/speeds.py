"""How fast an engine is, as measured: what it weighs copies against computing with, and a scheduler engines."""

from __future__ import annotations

from headwise.cache_controller.cache_manager import CacheManager

WINDOW_TOKENS = 2048
"""Prompt tokens after which what was measured before them counts half."""

FORGET_TOKENS = 16 * WINDOW_TOKENS
"""Prompt tokens computed since a copy was measured after which that is forgotten. One that stalled once would else
seem slower than computing for ever: no other would be made to measure anew."""


class StepSpeeds:
    """0 before the first step of a kind.

    decode_step_s: seconds of a step that only decodes
    prompt_tokens: tokens so far in steps that mostly computed prompts
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self.prompt_tokens = 0
        self._prefill_s = self._prefill_tokens = 0.0

    @property
    def prefill_token_s(self) -> float:
        """Seconds to compute a token of a prompt. Every token counts alike: a few tokens in a step take much longer
        each than many, and are no measure of what a long prompt would take."""
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0

    def take(self, tokens: int, sequences: int, compute_s: float) -> None:
        """A step has computed so many tokens of so many sequences."""
        if not tokens or not compute_s:
            return
        if tokens > 2 * sequences:  # mostly prompts
            self.prompt_tokens += tokens
            kept = 0.5 ** (tokens / WINDOW_TOKENS)
            self._prefill_s = kept * self._prefill_s + compute_s
            self._prefill_tokens = kept * self._prefill_tokens + tokens
        elif tokens == sequences:
            self.decode_step_s = smooth(self.decode_step_s, compute_s)


def smooth(old: float, new: float) -> float:
    """A moving average over about ten values; ``old`` is 0 before the first."""
    return 0.9 * old + 0.1 * new if old else new


def copy_speeds(cache: CacheManager) -> tuple[float, float]:
    """Seconds to bring a token's cache from the host to the device, and from storage to the host; 0: not measured."""
    host = cache.host
    if host is None:
        return 0.0, 0.0
    blocks_per_token = len(cache.policies) / cache.block_size
    fetch_s = host.storage.fetch_s if host.storage is not None else 0.0
    return host.copy_s * blocks_per_token, fetch_s * blocks_per_token
