"""What latent attention with an indexer (DSA) refuses of deployments and configs, in one line, and what it keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.dense_oracle import DictWeights, run_rank
from support.engine.loaded_model import GREEDY, LoadedModel, serve
from support.reference import answers
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint, draw_weights, reference

from headwise.errors import ConfigError, ModelError
from headwise.kernels.dsa import index_view
from headwise.kernels.mla import latent_view
from headwise.runtime.calibration.calibrate import DenseModel
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import describe
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.mla_config import IndexerConfig
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.shard import valid_tp_sizes
from headwise.runtime.ops.comm import SingleRank

NAME = "deepseek-v3.2"
V32 = TINY_CONFIGS[NAME]
PUBLISHED = Path(__file__).parents[3] / "support" / "published" / f"{NAME}.json"
CONFIG = EngineConfig(dtype="float32", kv_cache="1MiB", device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 0}, "'index_topk' must be a positive integer, got 0"),
        ({"index_topk": "all"}, "'index_topk' must be a positive integer, got 'all'"),
        ({"index_n_heads": -1}, "'index_n_heads' must be a positive integer, got -1"),
        ({"index_head_dim": 8}, "'index_head_dim' 8 is less than 'qk_rope_head_dim' 16"),
        ({"index_head_dim": 1 << 20}, "'index_head_dim' must be at most 65536"),
        ({"q_lora_rank": None}, "'q_lora_rank' must be a positive integer: an indexer's queries are made of it"),
        ({"layer_types": ["full_attention"] * 3}, "layer types .*full_attention.* are not supported"),
        ({"layer_types": ["indexed_attention"]}, "'layer_types' must name 3 layers"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "'mlp_layer_types' must name 3 layers 'dense' or 'sparse'"),
        ({"mlp_layer_types": ["dense", "sparse", "wide"]}, "'mlp_layer_types' must name 3 layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'quantization_config' is .*, which cannot be served"),
        ({"scoring_func": "softmax"}, "'scoring_func' 'softmax'.*sigmoid"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_before_weights_are_read(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        model_config({**V32, **changes})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda", "dtype": "bfloat16", "tensor_ops": "paddle"}, r"MLA.*tensor_ops paddle.*tensor_ops cupy"),
        ({"tp_size": 5}, r"tp_size 5 is more than the 4 query heads of .*: choose up to that"),
        (
            {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "int4"},
            r"int4 of latents \(MLA\) takes a kv_lora_rank of a multiple of 32 on a GPU, not 48: choose kv_dtype int8$",
        ),
    ],
)
def test_a_deployment_that_cannot_be_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    directory = checkpoint(NAME)
    with pytest.raises(ConfigError, match=message):
        read_model_card(replace(CONFIG, model=str(directory), **changes), directory, identify=False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_cache_has_scales_of_latents_and_of_keys(kv_dtype: str, device: str) -> None:
    directory = checkpoint(NAME)
    config = replace(CONFIG, model=str(directory), kv_dtype=kv_dtype, device=device)
    card = read_model_card(config, directory, identify=False)
    roles = [(role.name, role.shape) for role in card.layout.roles]
    assert roles == [("latent", (48 + 2 * 16,)), ("latent_scale", ()), ("indexer", (32,)), ("indexer_scale", ())]


def test_beside_latents_in_four_bits_keys_have_eight() -> None:
    directory = checkpoint(NAME)
    card = read_model_card(replace(CONFIG, model=str(directory), kv_dtype="int4"), directory, identify=False)
    roles = [(role.name, role.shape, role.dtype) for role in card.layout.roles]
    assert roles == [
        ("latent", (64 + 32,), "int4"),
        ("latent_scale", (3, 2), "float16"),
        ("indexer", (32,), "int8"),
        ("indexer_scale", (), "float32"),
    ]


def test_an_indexer_of_no_whole_vectors_needs_the_reference_kernels(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V32, "index_head_dim": 48}))
    with pytest.raises(ConfigError, match=r"multiple of 32.*heads of 48.*kernels reference"):
        read_model_card(replace(CONFIG, model=str(tmp_path)), tmp_path, identify=False)
    card = read_model_card(replace(CONFIG, model=str(tmp_path), kernels="reference"), tmp_path, identify=False)
    assert [role.shape for role in card.layout.roles] == [(64,), (48,)]


def test_there_is_no_head_pattern_to_measure() -> None:
    directory = checkpoint(NAME)
    with pytest.raises(ConfigError, match=r"MLA.*no head pattern"):
        DenseModel.load(replace(CONFIG, model=str(directory)), directory)


def test_fields_that_are_left_out_are_those_of_transformers() -> None:
    parsed = model_config({key: value for key, value in V32.items() if not key.startswith("index_")})
    assert parsed.mla is not None
    assert parsed.mla.indexer == IndexerConfig(heads=64, head_dim=128, top=2048)
    assert valid_tp_sizes(parsed) == [1, 2, 3, 4]  # query heads decide: every rank has the whole indexer
    named = model_config({**V32, "mlp_layer_types": ["sparse", "dense", "sparse"]})
    assert named.moe is not None
    assert named.moe.layers == (0, 2)
    assert model_config({**V32, "mlp_layer_types": ["dense", "sparse", "sparse"]}) == model_config(V32)


@pytest.mark.parametrize("name", ["wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias"])
def test_weights_of_another_indexer_are_refused(name: str) -> None:
    weights = draw_weights(V32, reference(NAME)["shapes"])
    at = f"model.layers.1.self_attn.indexer.{name}"
    weights[at] = weights[at][..., :-1]
    with pytest.raises(ModelError, match=rf"layers.1.self_attn.indexer.{name}.*do not belong together"):
        run_rank(model_config(V32), DictWeights(weights), SingleRank(), np.arange(3, dtype=np.int32))


def test_the_elements_of_a_layers_matrices_are_those_of_its_weights() -> None:
    shapes = reference(NAME)["shapes"]
    matrices = (shape for weight, shape in shapes.items() if ".layers.0.self_attn." in weight and len(shape) == 2)
    assert attention_of(model_config(V32)).weight_elements() == sum(shape[0] * shape[1] for shape in matrices)


def test_a_token_has_a_latent_and_a_key_in_each_layer_and_nothing_else_is_touched() -> None:
    """After a prompt, of a poisoned arena: as many numbers as layers keep of its tokens."""
    loaded = LoadedModel(NAME)
    answer = next(answer for answer in answers(NAME) if answer.name == "few").first(1)
    engine, executor = loaded.engine(prefix_caching=False)
    serve(engine, loaded.preprocessor, [answer], {answer.name: replace(GREEDY, max_tokens=1)})
    arena, card = loaded.worker.served.runner.cache.arena, loaded.worker.card
    assert [role.name for role in card.layout.roles] == ["latent", "indexer"]
    for view, width in ((latent_view, 48 + 16), (index_view, 32)):
        assert int(np.isfinite(view(arena, card.layout)).sum()) == 3 * width * len(answer.prompt_ids)
    assert int(np.isfinite(arena.view(np.float32)).sum()) == 3 * (48 + 16 + 32) * len(answer.prompt_ids)
    executor.close()


@pytest.mark.parametrize("tp_size", [1, 8])
def test_info_of_the_published_model(tmp_path: Path, tp_size: int) -> None:
    (tmp_path / "config.json").write_bytes(PUBLISHED.read_bytes())
    config = EngineConfig(model=str(tmp_path), kv_cache="64GiB", dtype="bfloat16", tp_size=tp_size)
    card = read_model_card(config, tmp_path, identify=False)
    rows = dict(describe(config, card, tmp_path, [8192]))
    assert rows["geometry"] == (
        "61 layers, 128 query heads of 128 + 64 over latents of 512 + 64, values of 128; "
        "of the tokens an indexer of 64 heads of 128 chooses 2048"
    )
    assert rows["head groups"] == "1 x 61 slots per rank (auto, padding 0.0%)"
    assert rows["  group 0"].startswith("full attention, 61 layers' latents and keys of indexers, ")
    assert card.bytes_per_token == 61 * (512 + 64 + 128) * 2 * tp_size  # every rank keeps all of them
