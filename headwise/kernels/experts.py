"""Which experts of a mixture a token goes to, and which tokens an expert computes: the rule, and it in NumPy.

Kernels that route on a device must choose what `route` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.fused import Activation

NORM_MIN = 1e-20
"""For routing weights that are divided by their sum, whatever it is: of the likeliest experts it is never so small."""


ScoredBy = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""What makes scores of a router's logits; the last is ``sqrt(log(1 + exp(logit)))``."""
SCORED_BY: tuple[ScoredBy, ...] = get_args(ScoredBy)


@dataclass(frozen=True)
class Routing:
    """How scores of experts become a token's choice.

    experts:          to choose from
    per_token:        so many are chosen
    norm_min:         weights are divided by their sum over the chosen, or this where it is greater; None: not divided
    scored_by:        what makes scores of the logits
    groups:           of experts, equally many in each; 1: no groups
    groups_per_token: of which a token may use the experts
    best_of_group:    a group's score is the sum of so many of its best
    scale:            of weights
    """

    experts: int
    per_token: int
    norm_min: float | None
    scored_by: ScoredBy = "softmax"
    groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Mixture:
    """What a mixture of experts is besides its weights.

    correction: float32 ``[experts]``, added to scores for the choice alone; None: nothing is
    scales:     float32 ``[experts]``, which weights are multiplied by besides; None: nothing is
    weighs_input: a token is multiplied by its weight before an expert has it; else what the expert made of it
    logit_bias: float32 ``[experts]``, of a router whose product lacks it; None: there is nothing to add
    """

    routing: Routing
    activation: Activation
    correction: NDArray[np.float32] | None = None
    scales: NDArray[np.float32] | None = None
    weighs_input: bool = False
    logit_bias: NDArray[np.float32] | None = None


def route(
    logits: NDArray[np.float32], correction: NDArray[np.float32] | np.float32, routing: Routing
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Each token's experts and their weights, both ``[T, per_token]``, from router logits ``[T, experts]``.

    A token goes to the experts with the highest scores, corrected by what is added for the choice alone; of equal ones
    that of the lower index counts as the higher. Sigmoids that nothing is added to are compared by their logits, which
    differ where they round to 1. Weights are scores without the correction. Equal logits are routed
    alike, whatever else is in the batch: so ranks that compute them by the same operation agree.
    """
    scores = _SCORES[routing.scored_by](logits)
    is_plain = routing.scored_by == "sigmoid" and routing.groups == 1 and np.ndim(correction) == 0
    compared = logits if is_plain else _within_groups(scores + correction, routing)
    chosen = _best(compared, routing.per_token)
    weights = np.take_along_axis(scores, chosen, axis=1)
    if routing.norm_min is not None:
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.float32(routing.norm_min))
    return chosen, weights * np.float32(routing.scale)


def tokens_by_expert(
    chosen: NDArray[np.int64], weights: NDArray[np.float32]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
    """For every expert that has tokens: the expert, its tokens in ascending order, and their weights for it."""
    order = np.argsort(chosen, axis=None, kind="stable")
    experts, starts = np.unique(chosen.reshape(-1)[order], return_index=True)
    tokens = np.split(order // chosen.shape[1], starts[1:])
    shares = np.split(weights.reshape(-1)[order], starts[1:])
    yield from zip(experts.tolist(), tokens, shares, strict=True)


def _within_groups(scores: NDArray[np.float32], routing: Routing) -> NDArray[np.float32]:
    """Scores of the experts of each token's best groups; minus infinity elsewhere."""
    if routing.groups == 1:
        return scores
    grouped = scores.reshape(len(scores), routing.groups, -1)
    best = np.sort(grouped, axis=2)[:, :, -routing.best_of_group :].sum(axis=2)
    allowed = np.zeros(best.shape, np.bool_)
    np.put_along_axis(allowed, _best(best, routing.groups_per_token), True, axis=1)
    return np.where(allowed[:, :, None], grouped, np.float32(-np.inf)).reshape(scores.shape)


def _best(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))`` of a float32 array, of a GPU's, too, without overflow."""
    return np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5)


def _softmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    powers: NDArray[np.float32] = np.exp(x - x.max(axis=1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _root_softplus(x: NDArray[np.float32]) -> NDArray[np.float32]:
    roots: NDArray[np.float32] = np.sqrt(np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x))))
    return roots


_SCORES = {"softmax": _softmax, "sigmoid": sigmoid, "sqrtsoftplus": _root_softplus}
