"""DeepSeek's routing by plain formulas, and configs and weights that cannot be served. See also test_models_tiny."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank
from support.tiny_checkpoints import TINY_CONFIGS, draw_weights, reference

from headwise.cache_controller.planner import plan_head_groups
from headwise.errors import ModelError
from headwise.kernels.experts import route
from headwise.runtime.models.deepseek_routing import GroupedMoeConfig
from headwise.runtime.models.registry import build_model, model_config
from headwise.runtime.models.shard import Shard, valid_tp_sizes
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.select import make_ops

V2, V3 = TINY_CONFIGS["deepseek-v2"], TINY_CONFIGS["deepseek-v3"]
V2_GROUPS = {**V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 32}
KIMI = {**V3, "n_group": 1, "topk_group": 1}

# ---- routing ----


def chosen_by_hand(logits: np.ndarray, correction: np.ndarray, config: dict[str, Any]) -> dict[int, float]:
    """Experts and weights of one token, by the words of the papers."""
    is_v3, experts = config["scoring_func"] == "sigmoid", len(logits)
    scores = 1 / (1 + np.exp(-logits)) if is_v3 else np.exp(logits) / np.exp(logits).sum()
    corrected = scores + correction if is_v3 else scores
    groups = config.get("n_group", 1)
    members = [range(group * experts // groups, (group + 1) * experts // groups) for group in range(groups)]

    def worth(group: int) -> float:
        best = sorted((corrected[expert] for expert in members[group]), reverse=True)
        return sum(best[:2]) if is_v3 else best[0]

    allowed = sorted(range(groups), key=worth, reverse=True)[: config.get("topk_group", 1)]
    candidates = [expert for group in allowed for expert in members[group]]
    best = sorted(candidates, key=lambda expert: -corrected[expert])[: config["num_experts_per_tok"]]
    total = sum(scores[expert] for expert in best) if config["norm_topk_prob"] else 1.0
    return {expert: scores[expert] / total * config["routed_scaling_factor"] for expert in best}


@pytest.mark.parametrize("config", [V2, V2_GROUPS, V3, KIMI], ids=["v2-lite", "v2", "v3", "kimi"])
def test_tokens_go_where_the_papers_say(config: dict[str, Any]) -> None:
    draw, moe = np.random.default_rng(0), model_config(config).moe
    assert isinstance(moe, GroupedMoeConfig)
    logits = draw.standard_normal((200, 8)).astype(np.float32) * 2
    correction = draw.standard_normal(8).astype(np.float32) * 0.3
    chosen, weights = route(logits, correction if moe.has_correction else np.float32(0), moe.routing)
    for token in range(len(logits)):
        by_hand = chosen_by_hand(logits[token].astype(np.float64), correction, config)
        assert dict(zip(chosen[token].tolist(), weights[token], strict=True)) == pytest.approx(by_hand, rel=1e-5)


def test_logits_of_any_size_give_finite_weights() -> None:
    for config in (V2_GROUPS, V3):
        moe = model_config(config).moe
        assert isinstance(moe, GroupedMoeConfig)
        with np.errstate(all="raise", under="ignore"):
            _, weights = route(np.array([[-1e4, 1e4] * 4], np.float32), np.float32(0), moe.routing)
        assert np.isfinite(weights).all()


# ---- bad input ----


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**V3, "kv_lora_rank": 0}, "'kv_lora_rank' must be a positive integer, got 0"),
        ({**V3, "kv_lora_rank": None}, "'kv_lora_rank' must be a positive integer, got None"),
        ({**V3, "q_lora_rank": -1}, "'q_lora_rank' must be a positive integer"),
        ({**V3, "v_head_dim": 1 << 20}, "'v_head_dim' must be at most 65536"),
        ({**V3, "qk_rope_head_dim": 15}, "'qk_rope_head_dim' must be even.*got 15"),
        ({**V3, "qk_nope_head_dim": "128"}, "'qk_nope_head_dim' must be a positive integer, got '128'"),
        ({**V3, "topk_method": "dice"}, "'topk_method' 'dice'.*noaux_tc"),
        ({**V3, "scoring_func": "softmax"}, "'scoring_func' 'softmax'.*sigmoid"),
        ({**V2, "topk_method": "noaux_tc"}, "'topk_method' 'noaux_tc'.*greedy, group_limited_greedy"),
        ({**V2, "scoring_func": ["x"]}, r"'scoring_func' \['x'\].*softmax"),
        ({**V2, "norm_topk_prob": True}, "'norm_topk_prob'"),
        ({**V3, "n_group": 3}, "'n_group' 3 equal groups of 'n_routed_experts' 8"),
        ({**V3, "topk_group": 5}, "'topk_group' 5"),
        ({**V3, "num_experts_per_tok": 5}, "'num_experts_per_tok' 5"),
        ({**V3, "n_group": 8, "topk_group": 8}, "fewer than two"),
        ({**V3, "moe_layer_freq": 2}, "'moe_layer_freq' must be 1, got 2"),
        ({**V2, "rope_interleave": False}, "'rope_interleave'"),
        ({**V3, "quantization_config": {"quant_method": "fp8"}}, "'quantization_config' is .*, which cannot be served"),
        ({**V3, "rope_scaling": {**V3["rope_scaling"], "mscale_all_dim": "x"}}, "mscale_all_dim"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        model_config(config)
    assert "\n" not in str(caught.value)


def test_a_model_without_experts_is_dense() -> None:
    dense = {key: value for key, value in V2.items() if "expert" not in key}
    assert model_config(dense).moe is None


def test_query_heads_decide_how_many_ranks_there_may_be() -> None:
    assert valid_tp_sizes(model_config(V3)) == [1, 2, 3, 4]


def test_a_rank_has_as_much_of_shared_experts_as_of_so_many_routed_ones() -> None:
    """Though three ranks have unlike parts of each: 10, 11 and 11 of 32 columns. A GPU computes them alike."""
    config, weights = model_config(V3), DictWeights(draw_weights(V3, reference("deepseek-v3")["shapes"]))
    plan, found = plan_head_groups(config.policies, 3, is_replicated=True), []
    for rank in range(3):
        model = build_model(config, weights, make_ops("numpy"), SingleRank(), Shard.of(config, plan, rank))
        experts = model._layers[-1].mlp.experts
        routed, shared = (mlp.down.weight.shape[0] for mlp in (experts.routed[0], experts.shared))
        assert shared == 2 * routed
        found.append(routed)
    assert found == [10, 11, 11]


@pytest.mark.parametrize("name", ["kv_b_proj", "kv_a_proj_with_mqa", "q_a_proj", "q_b_proj"])
def test_weights_of_other_ranks_are_refused(name: str) -> None:
    weights = draw_weights(V3, reference("deepseek-v3")["shapes"])
    at = f"model.layers.1.self_attn.{name}.weight"
    weights[at] = weights[at][:, :-1]
    with pytest.raises(ModelError, match=rf"layers.1.self_attn.{name}.*do not belong together"):
        run_rank(model_config(V3), DictWeights(weights), SingleRank(), np.arange(3, dtype=np.int32))
