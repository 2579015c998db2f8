"""DeepSeek's routing: which experts a token goes to, where experts come in groups of which a token may use a few.

DeepSeek-V2 (arXiv 2405.04434, section 2.2) takes the groups whose best expert is the likeliest, by a softmax;
DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) those whose two best together are, by sigmoids, to which a learned
correction is added for the choice alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.base import MoeConfig
from headwise.runtime.models.hf_config import HfConfig, integer, number, positive
from headwise.runtime.models.values import shown


@dataclass(frozen=True)
class GroupedMoeConfig(MoeConfig):
    """A mixture of experts in groups.

    is_sigmoid:       scores are sigmoids of the logits, else their softmax
    has_correction:   scores are corrected when experts are chosen
    groups:           of experts, equally many in each; 1: no groups
    groups_per_token: of which a token may use the experts
    best_of_group:    a group's score is the sum of so many of its best
    is_normed:        a token's weights are divided by their sum
    scale:            of weights
    """

    is_sigmoid: bool
    has_correction: bool
    groups: int
    groups_per_token: int
    best_of_group: int
    is_normed: bool
    scale: float


def route(
    logits: NDArray[np.float32], correction: NDArray[np.float32] | np.float32, moe: GroupedMoeConfig
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Each token's experts and their weights, both ``[T, experts_per_token]``, from router logits ``[T, num_experts]``.

    Of equal scores that of the lower index counts as the higher. Equal logits are routed alike, whatever else is in the
    batch: so ranks that compute them by the same operation agree.
    """
    scores = _sigmoid(logits) if moe.is_sigmoid else _softmax(logits)
    candidates = _within_groups(scores + correction, moe)
    chosen = _best(candidates, moe.experts_per_token)
    weights = np.take_along_axis(scores, chosen, axis=1)
    if moe.is_normed:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    return chosen, weights * np.float32(moe.scale)


def _within_groups(scores: NDArray[np.float32], moe: GroupedMoeConfig) -> NDArray[np.float32]:
    """Scores of the experts of each token's best groups; minus infinity elsewhere."""
    if moe.groups == 1:
        return scores
    grouped = scores.reshape(len(scores), moe.groups, -1)
    best = np.sort(grouped, axis=2)[:, :, -moe.best_of_group :].sum(axis=2)
    allowed = np.zeros(best.shape, np.bool_)
    np.put_along_axis(allowed, _best(best, moe.groups_per_token), True, axis=1)
    return np.where(allowed[:, :, None], grouped, np.float32(-np.inf)).reshape(scores.shape)


def _best(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    halves: NDArray[np.float32] = np.float32(0.5) * np.tanh(np.float32(0.5) * x)  # does not overflow
    return halves + np.float32(0.5)


def _softmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    powers: NDArray[np.float32] = np.exp(x - x.max(axis=1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return shares


# ---- config.json ----


def v2_moe(config: HfConfig, num_layers: int) -> GroupedMoeConfig:
    """The experts of a DeepSeek-V2 ``config.json``; raises ModelError on routing that is not known."""
    method = _one_of(config, "topk_method", ("greedy", "group_limited_greedy"))
    _one_of(config, "scoring_func", ("softmax",))
    if config.get("norm_topk_prob"):
        raise ModelError("config.json: DeepSeek-V2 is served without 'norm_topk_prob', as it was published; got true")
    has_groups = method == "group_limited_greedy"
    groups = positive(config, "n_group", default=1) if has_groups else 1
    per_token = positive(config, "topk_group", default=1) if has_groups else 1
    return _grouped(config, num_layers, groups, per_token, is_sigmoid=False, best_of_group=1, is_normed=False)


def v3_moe(config: HfConfig, num_layers: int) -> GroupedMoeConfig:
    """The experts of a DeepSeek-V3 or Kimi-K2 ``config.json``; raises ModelError on routing that is not known."""
    _one_of(config, "topk_method", ("noaux_tc",))
    _one_of(config, "scoring_func", ("sigmoid",))
    groups, per_token = positive(config, "n_group", default=8), positive(config, "topk_group", default=4)
    is_normed = bool(config.get("norm_topk_prob", True))
    return _grouped(config, num_layers, groups, per_token, is_sigmoid=True, best_of_group=2, is_normed=is_normed)


def _grouped(
    config: HfConfig, num_layers: int, groups: int, per_token: int, **routing: Any
) -> GroupedMoeConfig:  # fmt: skip
    experts = positive(config, "n_routed_experts")
    chosen = positive(config, "num_experts_per_tok")
    if experts % groups or per_token > groups or chosen > experts // groups * per_token:
        raise ModelError(
            f"config.json: 'num_experts_per_tok' {chosen} cannot be chosen from 'topk_group' {per_token} of 'n_group' "
            f"{groups} equal groups of 'n_routed_experts' {experts}"
        )
    if groups > 1 and experts // groups < routing["best_of_group"]:
        raise ModelError(f"config.json: 'n_group' {groups} leaves fewer than two of {experts} experts to a group")
    if config.get("moe_layer_freq", 1) != 1:
        raise ModelError(f"config.json: 'moe_layer_freq' must be 1, got {shown(config['moe_layer_freq'])}")
    return GroupedMoeConfig(
        layers=tuple(range(integer(config, "first_k_dense_replace", default=0), num_layers)),
        num_experts=experts,
        experts_per_token=chosen,
        expert_size=positive(config, "moe_intermediate_size"),
        num_shared_experts=integer(config, "n_shared_experts", default=0),
        norm_min=None,
        has_correction=routing["is_sigmoid"],
        groups=groups,
        groups_per_token=per_token,
        scale=number(config, "routed_scaling_factor", 1.0),
        **routing,
    )


def _one_of(config: HfConfig, key: str, known: tuple[str, ...]) -> str:
    value = config.get(key, known[0])
    if value not in known:
        raise ModelError(f"config.json: {key!r} {shown(value)} is no routing that is known here: {', '.join(known)}")
    return str(value)
