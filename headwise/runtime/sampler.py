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

        Filters and greedy choice take the lowest id of equally likely tokens. Log-probabilities are those of the
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
    """The token at ``number`` in [0, 1) of the filtered distribution's cumulative sum, in the order of token ids."""
    candidates, weights = filtered(logits, params)
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    if index == len(candidates):  # the product was rounded up to the sum
        index = int(np.flatnonzero(weights)[-1])
    return int(candidates[index])


def filtered(logits: Logits, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that pass top-k, then min-p, then top-p, ascending, and their weights (not normalised).

    Never sorts the vocabulary: with top-p alone, only what could belong to the nucleus.
    """
    candidates, scaled = np.arange(len(logits)), logits.astype(np.float64)
    if 0 < params.top_k < len(logits):
        candidates = _most_likely(logits, params.top_k)
        scaled = scaled[candidates]
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # a tiny temperature leaves the best tokens at 0 and the rest at -inf
        scaled /= params.temperature
    if params.min_p > 0:
        passed = np.flatnonzero(scaled >= np.log(params.min_p))
        candidates, scaled = candidates[passed], scaled[passed]
    weights = np.exp(scaled)
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        candidates, weights = candidates[kept], weights[kept]
    return candidates, weights


def _most_likely(logits: Logits, count: int) -> NDArray[np.int64]:
    """The ``count`` best tokens, ascending; the lowest ids where the last places are tied."""
    threshold = np.partition(logits, -count)[-count]
    above, tied = np.flatnonzero(logits > threshold), np.flatnonzero(logits == threshold)
    return np.sort(np.concatenate([above, tied[: count - len(above)]]))


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices, ascending, of the smallest set of weights that reaches ``top_p`` of their sum; never empty."""
    total = weights.sum()
    # All weights below this together are less than 1 - top_p of the sum: none of them is ever needed.
    likely = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    likely = likely[np.argsort(-weights[likely], kind="stable")]
    cumulative = np.cumsum(weights[likely])
    return np.sort(likely[: np.searchsorted(cumulative, top_p * total) + 1])


def token_logprobs(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of ``token`` and of the ``count`` most likely tokens, most likely first."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    normaliser = np.log(np.exp(wide).sum())
    top = _most_likely(logits, min(count, len(logits))) if count else np.empty(0, np.int64)
    top = top[np.argsort(-wide[top], kind="stable")]
    return TokenLogprobs(float(wide[token] - normaliser), tuple((int(i), float(wide[i] - normaliser)) for i in top))
