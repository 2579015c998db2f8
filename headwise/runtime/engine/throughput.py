"""How fast an engine is, as measured: what it weighs copies against computing with, and a scheduler engines."""

from __future__ import annotations

from headwise.cache_controller.cache_manager import CacheManager

WINDOW_TOKENS = 2048
"""Prompt tokens after which what was measured before them counts half."""

OUTLIER = 4.0
"""What is measured counts as at most so many times what was known: a process that was suspended has not become slow."""

RETRY_S = 60.0
"""Copies that seem slower than computing are not made, and so not measured: after so long they are tried again."""


class StepSpeeds:
    """0 before the first step of a kind.

    decode_step_s: seconds of a step that only decodes
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
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
            if self._prefill_tokens:
                compute_s = min(compute_s, OUTLIER * max(self._prefill_s, tokens * self.prefill_token_s))
            kept = 0.5 ** (tokens / WINDOW_TOKENS)
            self._prefill_s = kept * self._prefill_s + compute_s
            self._prefill_tokens = kept * self._prefill_tokens + tokens
        elif tokens == sequences:
            self.decode_step_s = smooth(self.decode_step_s, compute_s)


def smooth(old: float, new: float) -> float:
    """A moving average over about ten values; ``old`` is 0 before the first."""
    return 0.9 * old + 0.1 * min(new, OUTLIER * old) if old else new


class CopyTrials:
    """Forgets how slow copies were measured to be, `RETRY_S` after they ceased to be worth it: they are tried again."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._slow_since: float | None = None

    def look(self, now: float) -> None:
        """Note the time. To be called now and then while there is something to do."""
        host, groups = self._cache.host, len(self._cache.policies)
        if host is None:
            return
        is_loaded = host.is_worth_loading(groups, self._cache.block_size)
        is_fetched = host.storage is None or host.is_worth_fetching(groups, self._cache.block_size)
        if is_loaded and is_fetched:
            self._slow_since = None
        elif self._slow_since is None:
            self._slow_since = now
        elif now - self._slow_since > RETRY_S:
            self._slow_since = None
            if not is_loaded:
                host.copy_s = 0.0
            elif host.storage is not None:
                host.storage.fetch_s = 0.0


def copy_speeds(cache: CacheManager) -> tuple[float, float]:
    """Seconds to bring a token's cache from the host to the device, and from storage to the host; 0: not measured."""
    host = cache.host
    if host is None:
        return 0.0, 0.0
    blocks_per_token = len(cache.policies) / cache.block_size
    fetch_s = host.storage.fetch_s if host.storage is not None else 0.0
    return host.copy_s * blocks_per_token, fetch_s * blocks_per_token
