"""Chooses tokens from logits: greedy, or drawn from the filtered distribution by a counter-based generator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.philox import uniform
from headwise.runtime.request import SamplingParams, TokenLogprobs

Logits = NDArray[np.float32]


class Sampler:
    """Draws depend on (seed, position) and the row's own logits alone, never on the rest of the batch."""

    def sample(
        self,
        logits: Logits,
        params: Sequence[SamplingParams],
        seeds: NDArray[np.uint64],
        positions: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], dict[int, TokenLogprobs]]:
        """A token for each row of ``logits [n, vocab]``, and log-probabilities where ``params`` ask for them.

        Of tokens that are equally likely the one with the lowest id goes first. Log-probabilities are those of the
        model: before temperature and filters. Raises ValueError naming rows whose logits are not usable.
        """
        tokens = logits.argmax(axis=1).astype(np.int32)  # the position of a NaN, if there is one
        best = logits[np.arange(len(tokens)), tokens]
        if not np.isfinite(best).all():
            bad = np.flatnonzero(~np.isfinite(best)).tolist()
            raise ValueError(f"the logits of rows {bad} are not finite: the model or its cache is broken")
        drawn = [row for row, param in enumerate(params) if not param.greedy]
        if drawn:
            uniforms = uniform(seeds[drawn], positions[drawn])
            for row, number in zip(drawn, uniforms.tolist(), strict=True):
                tokens[row] = draw(logits[row], params[row], number)
        logprobs = {
            row: token_logprobs(logits[row], int(tokens[row]), param.logprobs)
            for row, param in enumerate(params)
            if param.logprobs is not None
        }
        return tokens, logprobs


def draw(logits: Logits, params: SamplingParams, number: float) -> int:
    """The token at ``number`` in [0, 1) of the filtered distribution's cumulative sum, most likely token first."""
    candidates, probabilities = filtered(logits, params)
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return int(candidates[min(index, len(candidates) - 1)])


def filtered(logits: Logits, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that pass top-k, then min-p, then top-p, most likely first, and their weights (not normalised)."""
    scaled = logits.astype(np.float64) / params.temperature
    scaled -= scaled.max()
    candidates = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        # Ties at the k-th place: keep all that are as likely, and let the stable sort below choose.
        candidates = np.flatnonzero(scaled >= np.partition(scaled, -params.top_k)[-params.top_k])
    if params.min_p > 0:
        candidates = candidates[scaled[candidates] >= np.log(params.min_p)]
    candidates = candidates[np.argsort(-scaled[candidates], kind="stable")]
    if params.top_k:
        candidates = candidates[: params.top_k]
    weights = np.exp(scaled[candidates])
    if params.top_p < 1:
        before = np.cumsum(weights) - weights  # the probability ahead of each token: the first is always kept
        kept = max(1, int(np.count_nonzero(before < params.top_p * weights.sum())))
        candidates, weights = candidates[:kept], weights[:kept]
    return candidates, weights


def token_logprobs(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of ``token`` and of the ``count`` most likely tokens, most likely first."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    count = min(count, len(wide))
    top = np.flatnonzero(wide >= np.partition(wide, -count)[-count]) if count else np.empty(0, np.int64)
    top = top[np.argsort(-wide[top], kind="stable")][:count]
    return TokenLogprobs(float(wide[token]), tuple((int(i), float(wide[i])) for i in top))
