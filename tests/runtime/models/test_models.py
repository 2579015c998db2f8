"""Tiny random models against a dense oracle written plainly here, for one rank and for several."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.dense_oracle import DictWeights, capped, rotate, run_rank, run_ranks, softmax, visible
from support.random_models import CONFIGS, LLAMA3, random_weights

from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ModelError
from headwise.runtime.models.registry import build_model, model_config
from headwise.runtime.models.shard import Shard, split, valid_tp_sizes
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.select import make_ops


class Oracle:
    """The whole model in float64, as the papers write it: no sharing of code with the package."""

    def __init__(self, hf: dict, weights: DictWeights) -> None:
        self.hf, self.w = hf, lambda name: weights.tensor(name).astype(np.float64)
        self.gemma = hf["architectures"][0].startswith("Gemma")

    def logits(self, ids: np.ndarray) -> np.ndarray:
        hf, embedding = self.hf, self.w("model.embed_tokens.weight")
        x = embedding[ids] * (hf["hidden_size"] ** 0.5 if self.gemma else 1.0)
        for layer in range(hf["num_hidden_layers"]):
            x = self.layer(layer, x)
        x = self.norm(x, "model.norm.weight")
        tied = hf.get("tie_word_embeddings", self.gemma)
        return capped(x @ (embedding if tied else self.w("lm_head.weight")).T, hf.get("final_logit_softcapping", 0))

    def layer(self, layer: int, x: np.ndarray) -> np.ndarray:
        at = f"model.layers.{layer}."
        attended = self.attention(layer, self.norm(x, f"{at}input_layernorm.weight"))
        if self.gemma:
            x = x + self.norm(attended, f"{at}post_attention_layernorm.weight")
            fed = self.mlp(at, self.norm(x, f"{at}pre_feedforward_layernorm.weight"))
            return x + self.norm(fed, f"{at}post_feedforward_layernorm.weight")
        x = x + attended
        return x + self.mlp(at, self.norm(x, f"{at}post_attention_layernorm.weight"))

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = self.w(name) + (1.0 if self.gemma else 0.0)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.hf["rms_norm_eps"]) * scale

    def linear(self, x: np.ndarray, name: str, key: str) -> np.ndarray:
        y = x @ self.w(f"{name}.weight").T
        return y + self.w(f"{name}.bias") if self.hf.get(key) else y

    def mlp(self, at: str, x: np.ndarray) -> np.ndarray:
        gate, up = (self.linear(x, f"{at}mlp.{name}_proj", "mlp_bias") for name in ("gate", "up"))
        if self.gemma:
            act = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            act = gate / (1 + np.exp(-gate))
        return self.linear(act * up, f"{at}mlp.down_proj", "mlp_bias")

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        hf, at = self.hf, f"model.layers.{layer}.self_attn."
        dim, heads, kv_heads = hf["head_dim"], hf["num_attention_heads"], hf["num_key_value_heads"]
        q, k, v = (
            self.linear(x, f"{at}{name}_proj", "attention_bias").reshape(len(x), -1, dim) for name in ("q", "k", "v")
        )
        if self.gemma:
            q, k = self.norm(q, f"{at}q_norm.weight"), self.norm(k, f"{at}k_norm.weight")
        local = self.gemma and (layer + 1) % hf["sliding_window_pattern"] != 0
        window = hf.get("sliding_window", 0) if local or not self.gemma else 0
        angles = np.arange(len(x))[:, None, None] * self.frequencies(local)
        q, k = rotate(q, angles), rotate(k, angles)
        scale = hf.get("query_pre_attn_scalar", dim) ** -0.5
        mask = visible(HeadPolicy(window), len(x))
        out = np.empty_like(q)
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = capped(q[:, head] @ k[:, shared].T * scale, hf.get("attn_logit_softcapping", 0))
            out[:, head] = softmax(scores, mask) @ v[:, shared]
        return self.linear(out.reshape(len(x), -1), f"{at}o_proj", "attention_bias")

    def frequencies(self, local: bool) -> np.ndarray:
        hf = self.hf
        parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        theta = hf["rope_local_base_freq"] if local else parameters.get("rope_theta", hf["rope_theta"])
        inverse = theta ** -(np.arange(0, hf["head_dim"], 2) / hf["head_dim"])
        if parameters.get("rope_type") == "linear":
            return inverse / parameters["factor"]
        if parameters.get("rope_type") == "llama3":
            return np.array([llama3_frequency(f, parameters) for f in inverse])
        return inverse


def llama3_frequency(frequency: float, p: dict) -> float:
    wavelength = 2 * np.pi / frequency
    if wavelength < p["original_max_position_embeddings"] / p["high_freq_factor"]:
        return frequency
    if wavelength > p["original_max_position_embeddings"] / p["low_freq_factor"]:
        return frequency / p["factor"]
    smooth = (p["original_max_position_embeddings"] / wavelength - p["low_freq_factor"]) / (
        p["high_freq_factor"] - p["low_freq_factor"]
    )
    return (1 - smooth) * frequency / p["factor"] + smooth * frequency


IDS = np.random.default_rng(1).integers(0, 50, 40).astype(np.int32)


@pytest.mark.parametrize("ops_name", ["numpy", "numba", "paddle"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_computes_what_the_oracle_says(name: str, ops_name: str) -> None:
    if ops_name == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    config = model_config(CONFIGS[name])
    weights = random_weights(config)
    logits = run_rank(config, weights, SingleRank(), IDS, ops_name)
    np.testing.assert_allclose(logits, Oracle(CONFIGS[name], weights).logits(IDS), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama_biased_tied", "gemma3"])
def test_tensor_parallel_ranks_together_compute_the_same(name: str, size: int) -> None:
    config = model_config(CONFIGS[name])
    weights = random_weights(config)
    results = run_ranks(config, weights, size, IDS)
    expected = run_rank(config, weights, SingleRank(), IDS)
    np.testing.assert_allclose(results[0], expected, atol=1e-4, rtol=1e-4)
    assert all(results[rank] is None for rank in range(1, size))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["llama_biased_tied", "gemma3"])
def test_a_gpu_adds_biases_to_the_residual_stream_once_for_all_ranks(name: str, size: int) -> None:
    """But those that are normed before: they come with the product."""
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    from support.gpu.cuda_shim import LIBRARIES
    from support.gpu.emulated_gpu import EmulatedOps, SerialPrograms

    config = model_config({**CONFIGS[name], "attention_bias": True})
    weights, programs = random_weights(config), SerialPrograms(LIBRARIES)
    found = run_ranks(config, weights, size, IDS[:9], lambda: EmulatedOps("float32", programs))[0]
    np.testing.assert_allclose(found, run_rank(config, weights, SingleRank(), IDS[:9]), atol=1e-4, rtol=1e-4)
    for rank in range(size):
        shard = Shard.of(config, plan_head_groups(config.policies, size), rank)
        model = build_model(config, weights, EmulatedOps("float32", programs), SingleRank(), shard)
        out = model._layers[0].attention.out
        expected = (True, False) if name == "llama_biased_tied" else (False, rank == 0)
        assert (out.added is not None, out.bias is not None) == expected


def test_a_multimodal_checkpoint_keeps_its_decoder_under_a_prefix() -> None:
    text = {key: value for key, value in CONFIGS["gemma3"].items() if key != "architectures"}
    config = model_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    weights = random_weights(config, prefix="language_model.model.")
    expected = run_rank(config, random_weights(config), SingleRank(), IDS)
    np.testing.assert_array_equal(run_rank(config, weights, SingleRank(), IDS), expected)


def test_window_layers_become_window_policies() -> None:
    config = model_config(CONFIGS["gemma3"])
    assert [row[0] for row in config.policies] == [HeadPolicy(5), HeadPolicy(5), FULL]
    assert model_config(CONFIGS["mistral_window"]).policies[0][0] == HeadPolicy(7)
    assert model_config({**CONFIGS["mistral_window"], "sliding_window": None}).policies[0][0] == FULL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported: it needs learned positions and layer norms; the nearest "
            "that is served is LlamaForCausalLM; supported are",
        ),
        (
            {"architectures": ["PhiMoEForCausalLM"]},
            "needs layer norms and sparse mixing of experts; the nearest that is served is MixtralForCausalLM",
        ),
        (
            {"architectures": ["Gemma9ForCausalLM"], "num_key_value_heads": None},
            "the nearest by name that is served is Gemma[234]ForCausalLM; supp",
        ),
        (
            {"architectures": ["Xyzzy"], "num_key_value_heads": None},
            "Xyzzy is not supported; supported are",
        ),
        ({"architectures": []}, "architecture missing from config.json is not supported"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer, got 0"),
        ({"hidden_size": "big"}, "'hidden_size' must be a positive integer, got 'big'"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 key-value heads"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, "rope scaling 'ntk' is not supported; supported are"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling needs a positive number 'factor'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor 1 must be less than high_freq_factor"),
        ({"rope_scaling": "linear"}, "'rope_scaling' must be an object, got 'linear'"),
        ({"rope_parameters": [10000.0]}, "'rope_parameters' must be an object"),
        ({"rope_theta": "high"}, "'rope_theta' must be a positive number, got 'high'"),
        ({"rope_theta": 0}, "'rope_theta' must be a positive number, got 0"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a positive number, got nan"),
        ({"eos_token_id": [2, "</s>"]}, r"token ids must be integers from 0 on, got \[2, '</s>'\]"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' must be a list of names, got 'LlamaForCausalLM'"),
        ({"hidden_act": "gelu"}, "LlamaForCausalLM is served with the activation 'silu' only, got 'gelu'"),
        ({"head_dim": 15}, "rotary embedding needs an even 'head_dim', got 15"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'quantization_config' is .*, which cannot be served"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "'partial_rotary_factor' is 0.5, which cannot be served"),
    ],
)
def test_a_config_that_cannot_be_served_says_why(changes, message) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**CONFIGS["llama"], **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": "sliding_attention"}, "'layer_types' must name 3 layers, .* got 'sliding_attention'"),
        ({"layer_types": ["full_attention"]}, "'layer_types' must name 3 layers"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked"]}, r"layer types \['chunked'\] are not supported"),
        ({"text_config": 3}, "'text_config' must be an object, got 3"),
        ({"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' must be a positive number, got 0"),
        ({"final_logit_softcapping": -1.0}, "'final_logit_softcapping' must be a positive number, got -1.0"),
        ({"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True, which cannot be served"),
    ],
)
def test_a_gemma_config_that_cannot_be_served_says_why(changes, message) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({**CONFIGS["gemma3"], **changes})


def test_a_published_multimodal_gemma_config_leaves_out_what_hugging_face_defaults_to() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = model_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    full = [row[0].is_full for row in config.policies]
    assert full == [(layer + 1) % 6 == 0 for layer in range(34)]
    assert {rope.theta for rope, is_full in zip(config.ropes, full, strict=True) if is_full} == {1e6}
    assert all((rope.scaling is None) != is_full for rope, is_full in zip(config.ropes, full, strict=True))


def test_mistral_has_a_window_unless_its_config_says_null() -> None:
    without = {key: value for key, value in CONFIGS["mistral_window"].items() if key != "sliding_window"}
    assert model_config(without).policies[0][0] == HeadPolicy(4096)
    with pytest.raises(ModelError, match="'sliding_window' must be a positive integer, got -3"):
        model_config({**without, "sliding_window": -3})


def test_a_tp_size_that_does_not_fit_the_mlp_names_those_that_do() -> None:
    config = model_config({**CONFIGS["llama"], "intermediate_size": 3})
    shard = Shard(0, 4, ((0,),) * 3)
    with pytest.raises(ModelError, match="tp_size 4 is too much for the model's MLP size, 3; sizes that fit: "):
        build_model(config, random_weights(config), make_ops("numpy"), SingleRank(), shard)


def test_weights_of_another_model_are_refused() -> None:
    config = model_config(CONFIGS["llama"])
    other = model_config({**CONFIGS["llama"], "vocab_size": 51})
    with pytest.raises(ModelError, match="do not belong together"):
        run_rank(other, random_weights(config), SingleRank(), IDS)


def test_tp_sizes_divide_the_kv_heads_or_are_more_up_to_one_rank_a_query_head() -> None:
    assert valid_tp_sizes(model_config(CONFIGS["llama"])) == [1, 2, 4, 5, 6, 7, 8]
    assert valid_tp_sizes(model_config({**CONFIGS["llama"], "intermediate_size": 6})) == [1, 2, 4, 5, 6]
    three = {"num_attention_heads": 12, "num_key_value_heads": 3}
    assert valid_tp_sizes(model_config({**CONFIGS["llama"], **three})) == [1, 3, *range(4, 13)]


@pytest.mark.parametrize(
    ("total", "ranks", "unit"),
    [
        (14336, 7, 2048),
        (18944, 3, 256),
        (18944, 7, 256),
        (4864, 3, 128),
        (4864, 7, 64),
        (1536, 5, 32),
        (1536, 7, 32),
        (50, 4, 1),
    ],
)
def test_an_mlp_is_split_in_whole_units_where_ranks_do_not_divide_it(total: int, ranks: int, unit: int) -> None:
    parts = [split(total, rank, ranks) for rank in range(ranks)]
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    sizes = [stop - start for start, stop in parts]
    assert all(size % unit == 0 for size in sizes)
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) in ({0} if total % ranks == 0 else {unit})


@pytest.mark.parametrize("tp_size", [3, 5, 7])
def test_ranks_that_divide_neither_query_heads_nor_mlp_compute_what_one_does(tp_size: int) -> None:
    """Of 14 query heads over two KV heads, with biases, in the proportions of Qwen2.5-0.5B."""
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 38}
    config = model_config({**CONFIGS["llama"], **heads, "attention_bias": True})
    weights = random_weights(config)
    alone, together = run_rank(config, weights, SingleRank(), IDS), run_ranks(config, weights, tp_size, IDS)[0]
    np.testing.assert_allclose(together, alone, atol=1e-4, rtol=0)


@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2, 3, 4]),
    st.lists(st.sampled_from([FULL, HeadPolicy(4), HeadPolicy(6, 2)]), min_size=24, max_size=24),
    st.data(),
)
def test_every_query_head_is_one_rank_s_and_beside_the_kv_head_that_it_uses(kv_heads, share, policies, data) -> None:
    rows = tuple(tuple(policies[layer * 8 : layer * 8 + kv_heads]) for layer in range(3))
    sizes = {"num_attention_heads": kv_heads * share, "num_key_value_heads": kv_heads, "intermediate_size": 24}
    config = replace(model_config({**CONFIGS["llama"], **sizes}), policies=rows)
    size = data.draw(st.sampled_from(valid_tp_sizes(config)))
    plan = plan_head_groups(config.policies, size)
    shards = [Shard.of(config, plan, rank) for rank in range(size)]
    for layer in range(3):
        dealt = [head for shard in shards for span in shard.query_heads(config, layer) for head in range(*span)]
        assert sorted(dealt) == list(range(config.num_heads))
        for shard in shards:
            spans = shard.query_heads(config, layer)
            assert len({stop - start for start, stop in spans}) == 1, "kernels share a KV head's queries alike"
            assert spans[0][0] < spans[0][1]
            for kv_head, span in zip(shard.kv_heads[layer], spans, strict=True):
                assert {head // share for head in range(*span)} == {kv_head}
