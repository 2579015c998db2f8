"""Mixture of experts: which experts a token goes to, and which tokens an expert computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.base import MoeConfig
from headwise.runtime.models.decoder import GatedMlp, Linear
from headwise.runtime.ops.base import GroupedExperts


@dataclass(frozen=True)
class MoeMlp:
    """One rank's weights of a mixture of experts; the router is whole on every rank.

    correction: ``[num_experts]``, added to an expert's probability when experts are chosen, and only then
                (load balancing without an auxiliary loss, arXiv 2408.15664); 0 where a model has none
    experts:    each split over the ranks like a dense MLP
    shared:     the experts that every token goes through, as one MLP
    shared_gate: by how much a token does, as a sigmoid of its result; None: as it is
    grouped:    all experts as one; None where they are computed one by one
    """

    config: MoeConfig
    router: Linear
    correction: NDArray[np.float32] | np.float32
    experts: tuple[GatedMlp, ...]
    shared: GatedMlp | None
    shared_gate: Linear | None = None
    grouped: GroupedExperts | None = None


def route(
    logits: NDArray[np.float32],
    correction: NDArray[np.float32] | np.float32,
    experts_per_token: int,
    norm_min: float | None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Each token's experts and their weights, both ``[T, experts_per_token]``, from router logits ``[T, num_experts]``.

    A token goes to the experts with the highest ``softmax(logits) + correction``, the lower index where two are equal.
    Their weights are the softmax without the correction, divided by its sum over the chosen or by ``norm_min``,
    whichever is greater; as they are if that is None. Equal logits are routed alike, whatever else is in the batch: so
    ranks that compute them by the same operation agree.
    """
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    order = np.argsort(-(probabilities + correction), axis=1, kind="stable")
    chosen = order[:, :experts_per_token]
    weights = np.take_along_axis(probabilities, chosen, axis=1)
    if norm_min is None:
        return chosen, weights
    return chosen, weights / np.maximum(weights.sum(axis=1, keepdims=True), np.float32(norm_min))


def tokens_by_expert(
    chosen: NDArray[np.int64], weights: NDArray[np.float32]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
    """For every expert that has tokens: the expert, its tokens in ascending order, and their weights for it."""
    order = np.argsort(chosen, axis=None, kind="stable")
    experts, starts = np.unique(chosen.reshape(-1)[order], return_index=True)
    tokens = np.split(order // chosen.shape[1], starts[1:])
    shares = np.split(weights.reshape(-1)[order], starts[1:])
    yield from zip(experts.tolist(), tokens, shares, strict=True)
