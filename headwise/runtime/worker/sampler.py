"""Chooses tokens from logits: greedy, or drawn from the filtered distribution by a counter-based generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.protocol.request import SamplingParams, TokenLogprobs
from headwise.runtime.worker.last_sampled import NO_TOKEN, only_usable
from headwise.runtime.worker.logit_edits import LogitEdits

Logits = NDArray[np.float32]

NOT_FINITE = "the logits are not finite: the model or its cache is broken"

_BUCKET_SHIFT = 49
"""Leaves a float64's exponent and 3 bits of its fraction: weights of a bucket differ by an eighth at most."""
_RUN = 128
"""Tokens of which the likeliest is found at once."""


@dataclass(frozen=True)
class Draws:
    """What rows of logits are to be drawn with; `uniform` makes a row's number of its seed and position.

    seeds: uint64 ``[n]``; positions: int64 ``[n]``
    """

    params: Sequence[SamplingParams]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]


def sample(logits: Logits, draws: Draws, edits: LogitEdits | None = None) -> NDArray[np.int32]:
    """A token for each row of ``logits [n, vocab]``, as ``edits`` change them; they themselves stay as they are.

    A draw depends on seed, position and the row's own logits alone, never on the rest of the batch: where these are
    not usable, the row has `NO_TOKEN`. Filters and greedy choice take the lowest id of equally likely tokens.
    """
    if edits is not None:
        logits = logits.copy()
        edits.apply(logits)
    tokens: NDArray[np.int32] = logits.argmax(axis=1).astype(np.int32)  # the position of a NaN, if there is one
    tokens = only_usable(tokens, logits[np.arange(len(tokens)), tokens])
    for row, param in enumerate(draws.params):
        if param.temperature > 0 and tokens[row] != NO_TOKEN:
            tokens[row] = draw(logits[row], param, uniform(int(draws.seeds[row]), int(draws.positions[row])))
    return tokens


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1), a multiple of 2**-53, that belongs to a seed and a token position.

    Philox 4x64-10 with the seed as its key and the position as its counter: Salmon, Moraes, Dror, Shaw, "Parallel
    random numbers: as easy as 1, 2, 3", SC 2011.
    """
    # The first word of the counter is the generator's own, which it steps; the position goes into the second.
    bits: int = np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw()
    return (bits >> 11) * 2.0**-53


def draw(logits: Logits, params: SamplingParams, number: float) -> int:
    """The token at ``number`` of the filtered distribution's cumulative sum, in the order of token ids.

    ``number`` is a multiple of 2**-53 in [0, 1), as `uniform` gives it.
    """
    candidates, weights = filtered(logits, params)
    cumulative = np.cumsum(weights)
    # With at most 53 bits below 1, the product rounds to less than the sum: the index is in range, its weight not zero.
    return int(candidates[np.searchsorted(cumulative, number * cumulative[-1], side="right")])


def filtered(logits: Logits, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that pass top-k, then min-p, then top-p, ascending, and their weights (not normalised).

    Never sorts the vocabulary: top-k partitions it, and top-p sorts only the tokens about as likely as its last one.
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
    """Indices, ascending, of the smallest set of weights that reaches ``top_p < 1`` of their sum; never empty.

    The leading bits of non-negative floats order them as integers, so buckets by those bits are in order: whole
    buckets are kept until the one in which the sum is reached, and that one alone is sorted.
    """
    buckets = weights.view(np.int64) >> _BUCKET_SHIFT
    mass = np.cumsum(np.bincount(buckets, weights)[::-1])  # from the most likely bucket down
    target = top_p * mass[-1]
    crossing = int(np.searchsorted(mass, target))
    edge = len(mass) - 1 - crossing
    tied = np.flatnonzero(buckets == edge)
    tied = tied[np.argsort(-weights[tied], kind="stable")]
    before = mass[crossing - 1] if crossing else 0.0
    kept = buckets > edge
    kept[tied[: np.searchsorted(before + np.cumsum(weights[tied]), target) + 1]] = True
    return np.flatnonzero(kept)


def token_logprobs(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of ``token`` and of the ``count`` most likely tokens, most likely first.

    They are those of the model: before temperature and filters. Powers are computed in float32, and added in float64.
    """
    best = logits.max()
    rest = np.log(np.exp(logits - best).sum(dtype=np.float64))
    top = _in_order(logits, min(count, len(logits)))
    chosen, *values = (logits[[token, *top]].astype(np.float64) - best - rest).tolist()
    return TokenLogprobs(chosen, tuple(zip(top.tolist(), values, strict=True)))


def _in_order(logits: Logits, count: int) -> NDArray[np.int64]:
    """The ``count`` best tokens, the best one first, of equals the lowest id.

    At least ``count`` tokens reach the ``count``-th best maximum of short runs, and few do: only those are sorted.
    """
    if not count:
        return np.empty(0, np.int64)
    maxima = np.maximum.reduceat(logits, np.arange(0, len(logits), _RUN))
    if len(maxima) > count:
        tokens = np.flatnonzero(logits >= np.partition(maxima, -count)[-count])
    else:
        tokens = np.arange(len(logits))
    return tokens[np.argsort(-logits[tokens], kind="stable")[:count]]
