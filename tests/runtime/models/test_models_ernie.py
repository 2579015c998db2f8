"""ERNIE 4.5 against logits of transformers, and with head windows against a dense oracle written plainly here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank, run_ranks, softmax
from support.random_ernie import DENSE, MOE, draw_weights, has_experts

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ModelError
from headwise.kernels.experts import Routing, route, tokens_by_expert
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.shard import valid_tp_sizes
from headwise.runtime.ops.comm import SingleRank

REFERENCES = json.loads((Path(__file__).parents[2] / "references" / "ernie45.json").read_text())

HEAD_WINDOWS = {"window_size": 6, "sink_size": 2, "window_attn_skip_freq": 3, "head_wise_swa_ratio": 0.5}


def fused(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights in the layout that transformers 5 holds them in."""
    found = {name: values for name, values in weights.items() if ".experts." not in name}
    for name in weights:
        if name.endswith(".experts.0.gate_proj.weight"):
            at = name.removesuffix(".0.gate_proj.weight")
            kinds = {
                kind: np.stack([weights[f"{at}.{e}.{kind}_proj.weight"] for e in range(MOE["moe_num_experts"])])
                for kind in ("gate", "up", "down")
            }
            found[f"{at}.gate_up_proj"] = np.concatenate([kinds["gate"], kinds["up"]], axis=1)
            found[f"{at}.down_proj"] = kinds["down"]
        if "moe_statics" in name:
            found[name.replace("moe_statics", "gate.moe_statics")] = found.pop(name)
    return found


def logits_of(config: dict[str, Any], ids: np.ndarray, ops_name: str = "numpy", weights=None) -> np.ndarray:
    weights = draw_weights(config) if weights is None else weights
    return run_rank(model_config(config), DictWeights(weights), SingleRank(), ids, ops_name)


IDS = np.random.default_rng(2).integers(0, 40, 30).astype(np.int32)


# ---- what transformers computes ----


@pytest.mark.parametrize("ops_name", ["numpy", "paddle"])
@pytest.mark.parametrize("reference", REFERENCES, ids=[entry["name"] for entry in REFERENCES])
def test_logits_are_those_of_transformers(reference: dict[str, Any], ops_name: str) -> None:
    if ops_name == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    logits = logits_of(reference["config"], np.array(reference["ids"], np.int32), ops_name)
    np.testing.assert_allclose(logits[reference["rows"]], reference["logits"], atol=1e-4)


def test_fused_expert_weights_are_read_like_published_ones() -> None:
    weights = draw_weights(MOE)
    assert not any(".experts.0." in name for name in fused(weights))
    np.testing.assert_array_equal(logits_of(MOE, IDS, weights=fused(weights)), logits_of(MOE, IDS, weights=weights))


# ---- head windows ----


class Oracle:
    """The whole model in float64: neighbours rotated in place, every expert for every token, masks by the fields."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.w = {name: values.astype(np.float64) for name, values in draw_weights(config).items()}

    def logits(self, ids: np.ndarray) -> np.ndarray:
        embedding = self.w["model.embed_tokens.weight"]
        x = embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self.attention(layer, self.norm(x, f"{at}input_layernorm"))
            fed = self.experts if has_experts(self.config, layer) else self.mlp
            x = x + fed(f"{at}mlp.", self.norm(x, f"{at}post_attention_layernorm"))
        return self.norm(x, "model.norm") @ embedding.T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def mlp(self, at: str, x: np.ndarray) -> np.ndarray:
        gate, up = (x @ self.w[f"{at}{name}_proj.weight"].T for name in ("gate", "up"))
        return (gate / (1 + np.exp(-gate)) * up) @ self.w[f"{at}down_proj.weight"].T

    def experts(self, at: str, x: np.ndarray) -> np.ndarray:
        logits = x @ self.w[f"{at}gate.weight"].T
        probability = softmax(logits, np.ones(logits.shape, bool))
        score = probability + self.w[f"{at}moe_statics.e_score_correction_bias"]
        out = self.mlp(f"{at}shared_experts.", x)
        every = np.stack([self.mlp(f"{at}experts.{e}.", x) for e in range(self.config["moe_num_experts"])])
        for token in range(len(x)):
            best = sorted(range(len(every)), key=lambda e, t=token: -score[t, e])[: self.config["moe_k"]]
            total = sum(probability[token, e] for e in best)
            out[token] += sum(probability[token, e] / total * every[e, token] for e in best)
        return out

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        config, at = self.config, f"model.layers.{layer}.self_attn."
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        q, k, v = (x @ self.w[f"{at}{name}_proj.weight"].T for name in "qkv")
        dim = q.shape[1] // heads
        q, k, v = (part.reshape(len(x), -1, dim) for part in (q, k, v))
        q, k = self.rotated(q), self.rotated(k)
        out = np.empty_like(q)
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = q[:, head] @ k[:, shared].T * dim**-0.5
            out[:, head] = softmax(scores, self.mask(layer, shared, len(x))) @ v[:, shared]
        return out.reshape(len(x), -1) @ self.w[f"{at}o_proj.weight"].T

    def rotated(self, x: np.ndarray) -> np.ndarray:
        dim = x.shape[-1]
        angles = np.arange(len(x))[:, None, None] * self.config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    def mask(self, layer: int, kv_head: int, count: int) -> np.ndarray:
        """Every third layer is full; elsewhere the last two of four heads see 2 first and 6 last tokens."""
        seen = np.tril(np.ones((count, count), bool))
        if layer == 2 or kv_head < 2:
            return seen
        for token in range(count):
            seen[token, 2 : max(2, token - 5)] = False
        return seen


@pytest.mark.parametrize("ops_name", ["numpy", "paddle"])
@pytest.mark.parametrize("base", [DENSE, MOE], ids=["dense", "moe"])
def test_head_windows_with_sinks_compute_what_the_oracle_says(base: dict[str, Any], ops_name: str) -> None:
    if ops_name == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    config = {**base, "num_hidden_layers": 4, **HEAD_WINDOWS}
    logits, expected = logits_of(config, IDS, ops_name), Oracle(config).logits(IDS)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(logits_of({**base, "num_hidden_layers": 4}, IDS)[-1] - expected[-1]).max() > 1e-2


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({}, ["----"] * 4),
        ({"window_size": 6, "sink_size": 2}, ["wwww"] * 4),
        ({**HEAD_WINDOWS, "head_wise_swa_ratio": 1}, ["wwww", "wwww", "----", "wwww"]),
        (HEAD_WINDOWS, ["--ww", "--ww", "----", "--ww"]),
        ({**HEAD_WINDOWS, "window_attn_skip_freq": [0, 1, 1, 0]}, ["----", "--ww", "--ww", "----"]),
        ({**HEAD_WINDOWS, "window_attn_skip_freq": 1}, ["----"] * 4),
        ({**HEAD_WINDOWS, "window_attn_skip_freq": None, "head_wise_swa_ratio": 0.45}, ["--ww"] * 4),
        ({**HEAD_WINDOWS, "window_attn_skip_freq": None, "head_wise_swa_ratio": 0.0}, ["----"] * 4),
    ],
)
def test_head_window_fields_become_policies(fields: dict[str, Any], windowed: list[str]) -> None:
    policies = model_config({**DENSE, "num_hidden_layers": 4, **fields}).policies
    of = {"w": HeadPolicy(6, 2), "-": FULL}
    assert policies == tuple(tuple(of[mark] for mark in row) for row in windowed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_size": 0}, "'window_size' must be a positive integer, got 0"),
        ({"window_size": [6, 0]}, r"'window_size' must be a positive integer, got \[6, 0\]"),
        ({"window_size": None}, "'sink_size' means nothing without 'window_size'"),
        ({"sink_size": -1}, "'sink_size' must be an integer of at least 0, got -1"),
        ({"sink_size": 6}, "'sink_size' 6 must be less than 'window_size' 6"),
        ({"head_wise_swa_ratio": 1.5}, "'head_wise_swa_ratio' must be a number from 0 to 1, got 1.5"),
        ({"head_wise_swa_ratio": float("nan")}, "'head_wise_swa_ratio' must be a number from 0 to 1, got nan"),
        ({"head_wise_swa_ratio": "half"}, "'head_wise_swa_ratio' must be a number from 0 to 1, got 'half'"),
        ({"window_attn_skip_freq": [1]}, r"one 0 or 1 for each of 2 layers, got \[1\]"),
        ({"window_attn_skip_freq": [1, 2]}, r"one 0 or 1 for each of 2 layers, got \[1, 2\]"),
        ({"window_attn_skip_freq": 0}, "'window_attn_skip_freq' must be a positive integer, or a list .* got 0"),
        ({"window_attn_skip_freq": "2"}, "'window_attn_skip_freq' must be a positive integer, or a list .* got '2'"),
    ],
)
def test_head_window_fields_that_make_no_sense_say_why(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**DENSE, **HEAD_WINDOWS, **fields})


# ---- experts ----


def test_the_published_geometry_is_the_default() -> None:
    config = model_config(
        {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "vocab_size": 103424,
            "max_position_embeddings": 131072,
        }
    )
    moe = config.moe
    assert moe is not None
    assert (config.head_dim, config.tie_embeddings, config.rms_norm_eps, config.ropes[0].theta) == (
        128,
        True,
        1e-5,
        5e5,
    )
    assert (moe.num_experts, moe.experts_per_token, moe.num_shared_experts, moe.expert_size) == (64, 6, 2, 1536)
    assert moe.layers == tuple(range(1, 28))
    assert valid_tp_sizes(config) == [1, 2, *range(4, 21)]


def test_routing_weighs_by_probability_what_it_chose_by_corrected_probability() -> None:
    probabilities = np.array([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]], np.float32)
    correction = np.array([-1.0, 0.0, 0.0, 0.5], np.float32)
    chosen, weights = route(np.log(probabilities), correction, Routing(4, 2, norm_min=1e-12))
    assert chosen.tolist() == [[3, 1], [3, 1]]
    np.testing.assert_allclose(weights, [[0.05 / 0.35, 0.3 / 0.35], [0.5, 0.5]], rtol=1e-6)
    _, floored = route(np.log(probabilities), correction, Routing(4, 2, norm_min=0.7))
    np.testing.assert_allclose(floored[0], [0.05 / 0.7, 0.3 / 0.7], rtol=1e-6)


def test_tokens_are_grouped_by_expert_and_experts_without_tokens_left_out() -> None:
    chosen = np.array([[5, 0], [0, 2], [5, 2]])
    weights = np.array([[0.125, 0.25], [0.375, 0.5], [0.625, 0.75]], np.float32)
    groups = [
        (expert, tokens.tolist(), shares.tolist()) for expert, tokens, shares in tokens_by_expert(chosen, weights)
    ]
    assert groups == [(0, [0, 1], [0.25, 0.375]), (2, [1, 2], [0.5, 0.75]), (5, [0, 2], [0.125, 0.625])]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_k": 9}, "'moe_k' 9 is more than 'moe_num_experts' 8"),
        ({"moe_num_experts": [8, 8]}, r"'moe_num_experts' must be a positive integer, got \[8, 8\]"),
        ({"moe_layer_end_index": -2}, "'moe_layer_end_index' must be an integer of at least -1, got -2"),
        ({"moe_layer_interval": 0}, "'moe_layer_interval' must be a positive integer, got 0"),
        ({"moe_num_shared_experts": -1}, "'moe_num_shared_experts' must be an integer of at least 0, got -1"),
        ({"moe_gate_act": "sigmoid"}, "'moe_gate_act' is 'sigmoid', which cannot be served"),
        ({"use_bias": True}, "'use_bias' is True, which cannot be served"),
    ],
)
def test_a_config_that_cannot_be_served_says_why(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**MOE, **fields})


def test_a_router_of_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"gate.weight has the shape \(8, 64\) .* do not belong together"):
        logits_of({**MOE, "moe_num_experts": 7}, IDS, weights=draw_weights(MOE))


def test_ranks_have_at_least_a_column_of_each_expert() -> None:
    assert valid_tp_sizes(model_config({**MOE, "moe_intermediate_size": 6})) == [1, 2, 4, 5, 6]


# ---- tensor parallel ----


@pytest.mark.parametrize("layout", [dict, fused], ids=["published", "fused"])
@pytest.mark.parametrize("base", [DENSE, MOE], ids=["dense", "moe"])
def test_two_ranks_together_compute_the_same(base: dict[str, Any], layout) -> None:
    config = {**base, **HEAD_WINDOWS}
    weights = draw_weights(config)
    results = run_ranks(model_config(config), DictWeights(layout(weights)), 2, IDS)
    np.testing.assert_allclose(results[0], logits_of(config, IDS, weights=weights), atol=1e-4)
    assert results[1] is None
