"""EAGLE-3 heads: what their configs and weights must be, and what a model is with one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafting_checkpoints import drafting_checkpoint
from support.eagle_checkpoints import HEADS, head_checkpoint, head_config, head_weights, write_head
from support.engine.dense_oracle import dense_rank, on_ranks
from support.engine.loaded_model import BASE
from support.engine.watched_drafts import drafts_of_torch
from support.reference import CLOSE, answers
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise.cache_controller.policy import FULL
from headwise.errors import ConfigError, ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import describe
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.draft_model import DraftModel
from headwise.runtime.models.eagle_config import eagle_config, with_eagle
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.shard import valid_tp_sizes
from headwise.runtime.ops.comm import Communicator, SingleRank
from headwise.runtime.ops.select import make_ops
from headwise.runtime.worker.worker import ModelWorker

NAME = "qwen3"


def config_with(head: Path | str, name: str = NAME, **changes: Any) -> EngineConfig:
    given = {"model": str(checkpoint(name)), "draft_model": str(head), "speculation": 2, "kv_cache": "24MiB"}
    return replace(BASE, **{**given, **changes})


def with_head(name: str = NAME, **fields: Any) -> ModelConfig:
    model = model_config(TINY_CONFIGS[name])
    return with_eagle(model, eagle_config({**head_config(name), **fields}, model))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_s_layer_is_one_more_of_the_model_s(name: str) -> None:
    model, found = model_config(TINY_CONFIGS[name]), with_head(name)
    own = head_config(name)["num_key_value_heads"]
    assert (found.num_layers, found.decoder_layers, found.draft_layers) == (model.num_layers + 1, model.num_layers, 1)
    assert found.policies == (*model.policies, (FULL,) * own)
    assert [found.heads_of(layer).kv_heads for layer in range(found.num_layers)] == [2] * model.num_layers + [own]
    assert (found.mlp_size(0), found.mlp_size(model.num_layers)) == (96, 160)


def drafts(name: str, comm: Communicator, ops_name: str = "numpy") -> list[int] | None:
    """As `make_eagle_references` has the first ones; None on other ranks than 0."""
    ops, config = make_ops(ops_name), with_head(name)
    head = DraftModel(str(head_checkpoint(name)), Path()).weights()
    model, attention = dense_rank(config, Checkpoint(checkpoint(name)), comm, ops, head=head)
    answer = next(answer for answer in answers(name) if answer.name == "more")
    ids, begin = np.array(answer.prompt_ids + answer.output_ids, np.int32), len(answer.prompt_ids)
    positions = np.arange(len(ids) - 1, dtype=np.int32)
    given = model.for_drafts(model.forward(ids[:-1], positions, attention))
    found = model.drafted(model.draft(ids[1:], positions, given, attention)[begin - 1 :])
    return None if found is None else ops.host(found[0]).tolist()


def assert_right(name: str, found: list[int] | None) -> None:
    expected = drafts_of_torch("eagle.json")[name]["first"]
    sure = [index for index, (_, gap) in enumerate(expected) if gap > CLOSE]
    assert found is not None
    assert [found[index] for index in sure] == [expected[index][0] for index in sure]
    assert len(sure) > 0.9 * len(expected)


@pytest.mark.parametrize("ops_name", ["numpy", "numba", "paddle"])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_torch(name: str, ops_name: str) -> None:
    if ops_name == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    assert_right(name, drafts(name, SingleRank(), ops_name))


@pytest.mark.parametrize("name", HEADS)
def test_two_ranks_together_draft_the_same(name: str) -> None:
    found = on_ranks(2, lambda comm: drafts(name, comm))
    assert_right(name, found[0])
    assert found[1] is None


def test_which_layers_it_takes() -> None:
    ids = "eagle_aux_hidden_state_layer_ids"

    def taken(layers: int, **fields: Any) -> tuple[int, ...]:
        model = model_config({**TINY_CONFIGS[NAME], "num_hidden_layers": layers})
        return eagle_config({**head_config(NAME), **fields}, model).taken

    assert (taken(36), taken(3)) == ((2, 18, 33), (0, 1, 2))
    assert taken(36, eagle_config={ids: [], "use_aux_hidden_state": True}) == taken(36), "as ModelOpt writes it"
    assert taken(36, eagle_config={ids: [30, 1]}) == taken(36, **{ids: [1, 30]}) == (1, 30)


def test_ranks_must_have_a_part_of_its_mlp_and_its_heads() -> None:
    assert valid_tp_sizes(with_head("qwen2", intermediate_size=3)) == [1, 2, 3]
    assert valid_tp_sizes(with_head("qwen2", num_key_value_heads=4)) == [1, 2, 4]
    assert valid_tp_sizes(with_head("qwen2", num_key_value_heads=1)) == [1, 2, 3, 4]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Eagle3Speculator"]}, "'architectures' is ['Eagle3Speculator'], which is no EAGLE-3 head"),
    ({"architectures": None}, "'architectures' is None"),
    ({"num_hidden_layers": 2}, "'num_hidden_layers' is 2, which cannot be served"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "'use_aux_hidden_state' is False, which cannot be served"),
    ({"eagle_config": {"norm_before_fc": True}}, "'norm_before_fc' is True"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}}, "the model has the layers 0 to 2"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1,2"}}, "is '1,2', for layers ['1,2']"),
    ({"eagle_config": {"use_last_layernorm": False}}, "'use_last_layernorm' is False"),
    ({"eagle_config": {"parallel_draft_step": 2}}, "'parallel_draft_step' is 2"),
    ({"eagle_config": [1]}, "'eagle_config' must be an object"),
    ({"fc_norm": True}, "'fc_norm' is True, which cannot be served"),
    ({"norm_output": True}, "'norm_output' is True"),
    ({"ptd_token_id": 7}, "'ptd_token_id' is 7"),
    ({"attention_bias": True}, "'attention_bias' is True"),
    ({"layer_types": ["sliding_attention"]}, "heads with full attention are served"),
    ({"hidden_act": "gelu"}, "the activation 'silu' only"),
    ({"quantization_config": {"quant_method": "fp8"}}, "'quantization_config' is"),
    ({"hidden_size": 32}, "'hidden_size' is 32, and 64 of the model that it is to draft for"),
    ({"target_hidden_size": 128}, "'target_hidden_size' is 128, and 64"),
    ({"vocab_size": 512}, "'vocab_size' is 512, and 263"),
    ({"num_attention_heads": 8}, "'num_attention_heads' is 8, and 4"),
    ({"head_dim": 32}, "'head_dim' is 32, and 64"),
    ({"draft_vocab_size": 264}, "'draft_vocab_size' 264 is more than 'vocab_size' 263"),
    ({"norm_before_residual": "yes"}, "'norm_before_residual' must be true or false"),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    head = write_head(tmp_path, {**head_config(NAME), **fields}, {})
    with pytest.raises(ConfigError, match=rf"draft_model {re.escape(str(head))}: .*{re.escape(why)}"):
        read_model_card(config_with(head), checkpoint(NAME), identify=False)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek-v3", "latent attention"),
        ("qwen3-next", "states in some layers"),
        ("llama4", "attention within chunks"),
        ("gemma4", "layers of unlike heads"),
        ("gemma2", "attention scores with a cap"),
        ("granite", "attention scores of another scale"),
    ],
)
def test_models_of_other_attention_have_no_head(name: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"has {why}, which no EAGLE-3 head is served with: leave draft_model out"):
        eagle_config(head_config(NAME), model_config(TINY_CONFIGS[name]))


def test_a_directory_must_be_a_head_s(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_model .*nowhere: .* has no config\.json: give a head's directory"):
        read_model_card(config_with(tmp_path / "nowhere"), checkpoint(NAME))
    head = write_head(tmp_path / "head", head_config(NAME), {})
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"save the head's weights as safetensors; pytorch_model\.bin is not read"):
        read_model_card(config_with(head), checkpoint(NAME))
    with pytest.raises(ConfigError, match="is no Hugging Face repository"):
        read_model_card(config_with("hf:nobody"), checkpoint(NAME))


def test_it_needs_speculation() -> None:
    with pytest.raises(
        ConfigError, match="draft_model somewhere drafts for speculation, which is 0: give speculation 3"
    ):
        EngineConfig(draft_model="somewhere")


CHANGED: list[tuple[str, Callable[[np.ndarray], np.ndarray | None], str]] = [
    ("fc.weight", lambda values: values[:, :64], "fc.weight of the draft head has the shape"),
    (
        "layers.0.self_attn.q_proj.weight",
        lambda values: values[:, :64],
        "q_proj.weight of the draft head has the shape",
    ),
    ("lm_head.weight", lambda values: values[:100], "lm_head.weight of the draft head has the shape"),
    ("lm_head.weight", lambda values: None, "the weights have no 'lm_head.weight'"),
    ("layers.0.hidden_norm.weight", lambda values: None, "lacks the tensor 'layers.0.hidden_norm.weight'"),
    ("d2t", lambda values: None, "weights lack 'd2t': which of 263 tokens its 120 are"),
    ("d2t", lambda values: values[:100], "d2t of the draft head has the shape"),
    ("d2t", lambda values: values + 263, "'d2t' has tokens"),
]


@pytest.mark.parametrize(("name", "change", "why"), CHANGED)
def test_weights_that_do_not_fit_are_refused_by_name(
    name: str, change: Callable[[np.ndarray], np.ndarray | None], why: str, tmp_path: Path
) -> None:
    weights, changed = dict(head_weights(NAME)), change(head_weights(NAME)[name])
    del weights[name]
    head = write_head(tmp_path, head_config(NAME), weights if changed is None else {**weights, name: changed})
    with pytest.raises(ModelError, match=re.escape(why)):
        ModelWorker(config_with(head), checkpoint(NAME), 0, SingleRank())


def test_a_model_with_another_head_is_another_one(tmp_path: Path) -> None:
    weights, config = head_weights(NAME), head_config(NAME)
    other = {**weights, "norm.weight": weights["norm.weight"] * np.float32(2)}
    heads = [
        head_checkpoint(NAME),
        write_head(tmp_path / "weights", config, other),
        write_head(tmp_path / "config", {**config, "rms_norm_eps": 1e-6}, weights),
        "",
    ]
    cards = [read_model_card(config_with(head), checkpoint(NAME)) for head in heads]
    assert len({card.identity for card in cards}) == len({card.drafting for card in cards}) == len(heads)
    assert len({card.weights for card in cards}) == 1, "which head patterns are of"
    assert [card.config.draft_layers for card in cards] == [1, 1, 1, 0]


def test_it_takes_the_place_of_the_model_s_own_layer() -> None:
    model = drafting_checkpoint("glm4-moe")
    config = config_with(head_checkpoint(NAME), model=str(model))
    card = read_model_card(config, model)
    assert (card.config.num_layers, card.config.draft_layers) == (4, 1)
    assert card.config.eagle is not None
    assert dict(describe(config, card, model))["geometry"].startswith("3 layers, one more that drafts (EAGLE-3), 4 q")
