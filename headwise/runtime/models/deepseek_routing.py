"""DeepSeek's routing: which experts a token goes to, where experts come in groups of which a token may use a few.

DeepSeek-V2 (arXiv 2405.04434, section 2.2) takes the groups whose best expert is the likeliest, by a softmax;
DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) those whose two best together are, by sigmoids, to which a learned
correction is added for the choice alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import ModelError
from headwise.kernels.experts import NORM_MIN, Routing, ScoredBy
from headwise.runtime.models.hf_config import MOST_EXPERTS, HfConfig, flag, integer, number, positive
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.models.values import shown


@dataclass(frozen=True)
class GroupedMoeConfig(MoeConfig):
    """A mixture of experts in groups.

    scored_by:        what makes scores of the logits
    has_correction:   scores are corrected when experts are chosen
    groups:           of experts, equally many in each; 1: no groups
    groups_per_token: of which a token may use the experts
    best_of_group:    a group's score is the sum of so many of its best
    is_normed:        a token's weights are divided by their sum
    scale:            of weights
    """

    scored_by: ScoredBy
    has_correction: bool
    groups: int
    groups_per_token: int
    best_of_group: int
    is_normed: bool
    scale: float

    @property
    def routing(self) -> Routing:
        return Routing(
            experts=self.num_experts,
            per_token=self.experts_per_token,
            norm_min=NORM_MIN if self.is_normed else None,
            scored_by=self.scored_by,
            groups=self.groups,
            groups_per_token=self.groups_per_token,
            best_of_group=self.best_of_group,
            scale=self.scale,
        )


# ---- config.json ----


@dataclass(frozen=True)
class RoutedFields:
    """Of a ``config.json`` that has experts like DeepSeek's, where it says what of them.

    dense: how many layers have none, from the first on
    """

    experts: str = "n_routed_experts"
    size: str = "moe_intermediate_size"
    shared: str = "n_shared_experts"
    dense: str = "first_k_dense_replace"
    scale: str = "routed_scaling_factor"


_DEEPSEEK = RoutedFields()


def v2_moe(config: HfConfig, num_layers: int) -> GroupedMoeConfig:
    """The experts of a DeepSeek-V2 ``config.json``; raises ModelError on routing that is not known."""
    method = _one_of(config, "topk_method", ("greedy", "group_limited_greedy"))
    _one_of(config, "scoring_func", ("softmax",))
    if flag(config, "norm_topk_prob"):
        raise ModelError("config.json: DeepSeek-V2 is served without 'norm_topk_prob', as it was published; got true")
    has_groups = method == "group_limited_greedy"
    groups = positive(config, "n_group", default=1) if has_groups else 1
    per_token = positive(config, "topk_group", default=1) if has_groups else 1
    return _grouped(config, num_layers, groups, per_token, scored_by="softmax", best_of_group=1, is_normed=False)


def v3_moe(config: HfConfig, num_layers: int) -> GroupedMoeConfig:
    """The experts of a DeepSeek-V3 or Kimi-K2 ``config.json``; raises ModelError on routing that is not known."""
    return _corrected(config, num_layers, groups=8, groups_per_token=4)


def softmax_moe(config: HfConfig, num_layers: int) -> GroupedMoeConfig:
    """The experts of a Mistral 4 ``config.json``, by a softmax: of the groups whose two best are the likeliest."""
    _one_of(config, "scoring_func", ("softmax",))
    groups, per_token = positive(config, "n_group", default=1), positive(config, "topk_group", default=1)
    is_normed = flag(config, "norm_topk_prob", default=True)
    return _grouped(config, num_layers, groups, per_token, scored_by="softmax", best_of_group=2, is_normed=is_normed)


def ungrouped_moe(config: HfConfig, num_layers: int, fields: RoutedFields = _DEEPSEEK) -> GroupedMoeConfig:
    """The same of models whose experts come in no groups if ``n_group`` does not say so."""
    return _corrected(config, num_layers, groups=1, groups_per_token=1, fields=fields)


def _corrected(
    config: HfConfig, num_layers: int, groups: int, groups_per_token: int, fields: RoutedFields = _DEEPSEEK
) -> GroupedMoeConfig:
    _one_of(config, "topk_method", ("noaux_tc",))
    _one_of(config, "scoring_func", ("sigmoid",))
    groups = positive(config, "n_group", default=groups)
    per_token = positive(config, "topk_group", default=groups_per_token)
    is_normed = flag(config, "norm_topk_prob", default=True)
    asked = groups, per_token, fields
    moe = _grouped(config, num_layers, *asked, scored_by="sigmoid", best_of_group=2, is_normed=is_normed)
    return replace(moe, layers=named_sparse_layers(config, moe.layers, num_layers))


def named_sparse_layers(config: HfConfig, default: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The layers with experts: as ``mlp_layer_types`` names them, or where that is missing ``default``."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {"dense", "sparse"}:
        raise ModelError(
            f"config.json: 'mlp_layer_types' must name {num_layers} layers 'dense' or 'sparse', got {shown(kinds)}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _grouped(
    config: HfConfig, num_layers: int, groups: int, per_token: int, fields: RoutedFields = _DEEPSEEK, **routing: Any
) -> GroupedMoeConfig:
    experts = positive(config, fields.experts, most=MOST_EXPERTS)
    chosen = positive(config, "num_experts_per_tok")
    if experts % groups or per_token > groups or chosen > experts // groups * per_token:
        raise ModelError(
            f"config.json: 'num_experts_per_tok' {chosen} cannot be chosen from 'topk_group' {per_token} of 'n_group' "
            f"{groups} equal groups of {fields.experts!r} {experts}"
        )
    if groups > 1 and experts // groups < routing["best_of_group"]:
        raise ModelError(f"config.json: 'n_group' {groups} leaves fewer than two of {experts} experts to a group")
    if positive(config, "moe_layer_freq", default=1) != 1:
        raise ModelError(f"config.json: 'moe_layer_freq' must be 1, got {shown(config['moe_layer_freq'])}")
    return GroupedMoeConfig(
        layers=tuple(range(integer(config, fields.dense, default=0), num_layers)),
        num_experts=experts,
        experts_per_token=chosen,
        expert_size=positive(config, fields.size),
        num_shared_experts=integer(config, fields.shared, default=0),
        norm_min=None,
        has_correction=routing["scored_by"] != "softmax",
        groups=groups,
        groups_per_token=per_token,
        scale=number(config, fields.scale, 1.0),
        **routing,
    )


def _one_of(config: HfConfig, key: str, known: tuple[str, ...]) -> str:
    value = config.get(key, known[0])
    if value not in known:
        raise ModelError(f"config.json: {key!r} {shown(value)} is no routing that is known here: {', '.join(known)}")
    return str(value)
