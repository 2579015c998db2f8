"""GGUF files of mixtures of experts, latents, delta-nets and layers of several kinds become the models they were.

`support.tiny_ggufs` writes the files. What they mean is judged by transformers' answers where it computed the very
model, by the Hugging Face directory with the same weights, and by llama.cpp (see `make_gguf_references.py`).
"""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
from support.engine.dense_oracle import run_rank, run_ranks
from support.reference import CLOSE, answers
from support.tiny_gguf_keys import model_keys
from support.tiny_ggufs import (
    JUDGED_GGUFS,
    K_QUANTS,
    TINY_GGUFS,
    TinyGguf,
    experts_in_k_quants,
    random_k_blocks,
    random_k_numbers,
    write_directory,
    write_tiny_gguf,
)

from headwise.errors import ConfigError, ModelError
from headwise.runtime.loader.block_file import BLOCKS, EXPERTS, BlockFile
from headwise.runtime.loader.checkpoint import SINGLE, Checkpoint, weight_files
from headwise.runtime.loader.gguf_cache import converted_directory
from headwise.runtime.loader.gguf_config import build_config
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.loader.safetensors_file import FLOATS, INTEGERS, SafetensorsFile
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.rope import rotation_scale
from headwise.runtime.ops.comm import SingleRank

Q8_0 = gguf.GGMLQuantizationType.Q8_0
NEVER = 262
"""The token that llama.cpp left out of its answers."""
CLOSE_TO_LLAMA_CPP = {**dict.fromkeys(("gemma4", "gemma4-moe", "gemma4-shared"), 4e-3), "gpt-oss-mxfp4": 0.1}
"""It looks GELU up in a table of 16-bit numbers, and multiplies MXFP4 with activations rounded to 8 bits."""
TRANSFORMERS = [name for name, tiny in TINY_GGUFS.items() if tiny.changes is None]
EXPANDED = (
    *("embed_tokens_per_layer.weight", "per_layer_model_projection.weight"),
    *(
        "mlp.gate.weight",
        "mixer.gate.weight",
        "mlp.router.gate.weight",
        "mlp.router.weight",
        "feed_forward.router.weight",
        "router.proj.weight",
        "router.layer.weight",
    ),
    *("per_layer_input_gate.weight", "block_sparse_moe.gate.weight"),
    *("indexer.wk.weight", "indexer.wq_b.weight", "indexer.weights_proj.weight", "in_proj_ba.weight"),
)
"""Matrices that models compute from floats of, whatever a file has."""
WITH_EXPERTS = [name for name, tiny in TINY_GGUFS.items() if model_keys(tiny.config, tiny.architecture)["expert_count"]]


@cache
def scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="headwise-gguf-")


@cache
def converted(name: str) -> Path:
    place = Path(scratch().name)
    return convert(write_tiny_gguf(place / f"{name}.gguf", TINY_GGUFS[name]), place)


def convert(source: Path, cache: Path) -> Path:
    return converted_directory(source, cache, SilentProgress())


def logits(directory: Path, ids: list[int], **changes: Any) -> np.ndarray:
    weights = Checkpoint(directory)
    found = run_rank(model_config({**weights.config, **changes}), weights, SingleRank(), np.array(ids, np.int32))
    assert found is not None
    return found


def some_ids(count: int = 90) -> list[int]:
    return [int(each) for each in np.random.default_rng(1).integers(3, 260, count)]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_converted_file_computes_what_transformers_does(name: str) -> None:
    answer = next(answer for answer in answers(TINY_GGUFS[name].checkpoint) if answer.name == "more")
    found = logits(converted(name), answer.prompt_ids)
    np.testing.assert_allclose(found[-1][answer.sample_ids], answer.sample_logits, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", TINY_GGUFS)
def test_a_converted_file_computes_what_the_directory_with_its_weights_does(name: str, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "hf", TINY_GGUFS[name])
    np.testing.assert_allclose(logits(converted(name), some_ids()), logits(directory, some_ids()), atol=1e-4, rtol=0)


def references() -> dict[str, Any]:
    """What llama.cpp said."""
    found: dict[str, Any] = json.loads((Path(__file__).parents[2] / "references" / "gguf.json").read_text())
    return found


@pytest.mark.parametrize("name", JUDGED_GGUFS)
def test_a_converted_file_computes_what_llama_cpp_does(name: str, tmp_path: Path) -> None:
    directory = convert(write_tiny_gguf(tmp_path / "tiny.gguf", JUDGED_GGUFS[name]), tmp_path)
    close = CLOSE_TO_LLAMA_CPP.get(name, CLOSE)
    for prompt, told in references()["models"][name].items():
        ids = told["prompt_ids"] + told["output_ids"]
        found = logits(directory, ids, **_as_llama_cpp(directory, name))[len(told["prompt_ids"]) - 1 : -1]
        first = found[0] - found[0].max()
        chances = first - np.log(np.exp(first).sum())
        np.testing.assert_allclose(chances[told["top_ids"]], told["top_logprobs"], atol=close, rtol=0, err_msg=prompt)
        found[:, NEVER] = -np.inf
        sure = np.array(told["gaps"]) > 4 * close
        assert sure.sum() > (20 if close < 0.1 else 10)
        np.testing.assert_array_equal(found.argmax(-1)[sure], np.array(told["output_ids"])[sure], prompt)


def _as_llama_cpp(directory: Path, name: str) -> dict[str, Any]:
    """What it does otherwise than published: it rounds where gpt-oss's ramp of frequencies begins and ends."""
    if not name.startswith("gpt-oss"):
        return {}
    return {"rope_scaling": {**Checkpoint(directory).config["rope_scaling"], "truncate": True}}


def test_older_files_have_keys_and_values_of_latents_in_one(tmp_path: Path) -> None:
    """And sizes of heads where other models have them."""
    tiny = TINY_GGUFS["deepseek-v2"]
    config, heads = tiny.config, tiny.config["num_attention_heads"]
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    keys = {
        "deepseek2.attention.head_count_kv": heads,
        "deepseek2.attention.key_length": size,
        "deepseek2.attention.value_length": config["v_head_dim"],
        "deepseek2.attention.key_length_mla": None,
        "deepseek2.attention.value_length_mla": None,
        "deepseek2.expert_gating_func": None,
    }
    path = write_tiny_gguf(tmp_path / "old.gguf", tiny, keys=keys, is_split=False)
    assert "blk.0.attn_kv_b.weight" in GgufFile(path).tensors
    np.testing.assert_array_equal(
        logits(convert(path, tmp_path), some_ids()), logits(converted("deepseek-v2"), some_ids())
    )


def test_older_files_have_what_goes_into_a_delta_net_in_one(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "old.gguf", TINY_GGUFS["qwen3-next"], is_split=False)
    assert "blk.0.ssm_in.weight" in GgufFile(path).tensors
    np.testing.assert_array_equal(
        logits(convert(path, tmp_path), some_ids()), logits(converted("qwen3-next"), some_ids())
    )


@pytest.mark.parametrize(
    ("experts", "gating", "groups"), [(256, 2, (8, 4)), (160, 1, (8, 3)), (384, 2, (1, 1)), (64, 1, (1, 1))]
)
def test_files_that_do_not_speak_of_groups_get_those_that_were_published(
    tmp_path: Path, experts: int, gating: int, groups: tuple[int, int]
) -> None:
    keys = {
        "deepseek2.expert_count": experts,
        "deepseek2.expert_gating_func": gating,
        "deepseek2.expert_group_count": None,
        "deepseek2.expert_group_used_count": None,
    }
    found = build_config(GgufFile(write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS["deepseek-v3"], keys=keys)))
    assert (found["n_group"], found["topk_group"]) == groups


def test_older_files_do_not_name_the_function_of_scores_that_are_corrected(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "old.gguf", TINY_GGUFS["glm4-moe-lite"], keys={"deepseek2.expert_gating_func": None}
    )
    np.testing.assert_array_equal(
        logits(convert(path, tmp_path), some_ids()), logits(converted("glm4-moe-lite"), some_ids())
    )


def test_a_glm_4_with_experts_may_rotate_by_positions_in_images(tmp_path: Path) -> None:
    """As files of GLM-4.5V say; a text's tokens have three alike."""
    sections = {"glm4moe.rope.dimension_sections": [4, 6, 6, 0]}
    path = write_tiny_gguf(tmp_path / "placed.gguf", TINY_GGUFS["glm4-moe"], keys=sections)
    found = convert(path, tmp_path)
    assert model_config(Checkpoint(found).config).ropes[0].axes == (0,) * 4 + (1,) * 6 + (2,) * 6
    np.testing.assert_array_equal(logits(found, some_ids()), logits(converted("glm4-moe"), some_ids()))


def test_older_files_do_not_name_the_size_of_qwen_2s_experts(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "old.gguf", TINY_GGUFS["qwen2-moe"], keys={"qwen2moe.expert_feed_forward_length": None}
    )
    np.testing.assert_array_equal(
        logits(convert(path, tmp_path), some_ids()), logits(converted("qwen2-moe"), some_ids())
    )


def test_windows_are_in_three_of_four_layers_where_a_file_does_not_say(tmp_path: Path) -> None:
    keys = {"olmo2.attention.sliding_window_pattern": None}
    path = write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS["olmo3"], keys=keys)
    np.testing.assert_array_equal(logits(convert(path, tmp_path), some_ids()), logits(converted("olmo3"), some_ids()))


def test_a_mistral_whose_queries_are_not_tempered_is_a_mistral_without_windows(tmp_path: Path) -> None:
    keys = {"mistral3.attention.temperature_scale": None}
    found = build_config(GgufFile(write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS["ministral3"], keys=keys)))
    assert (found["architectures"], found["sliding_window"]) == (["MistralForCausalLM"], None)
    model, tempered = model_config(found), model_config(Checkpoint(converted("ministral3")).config)
    assert model.temper is None
    assert tempered.temper is not None
    assert model.ropes == (model.ropes[0],) * 3
    assert rotation_scale(model.ropes[0], 64) == rotation_scale(tempered.ropes[0], 64)


@pytest.mark.parametrize("rotates", [True, False])
def test_a_hybrid_without_states_has_attention_alone(tmp_path: Path, rotates: bool) -> None:
    """llama.cpp's converter calls such a model by another name, and llama.cpp ends with an error on this one."""
    tiny = replace(TINY_GGUFS["granite-hybrid-shared"], architecture="granitehybrid")
    told = {"rope.scaling.finetuned": rotates, "attention.head_count_kv": tiny.config["num_key_value_heads"]}
    states = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
    keys = {f"granitehybrid.{key}": value for key, value in {**told, **{f"ssm.{key}": None for key in states}}.items()}
    directory = convert(write_tiny_gguf(tmp_path / "x.gguf", tiny, keys=keys), tmp_path)
    kind = {"position_embedding_type": "rope" if rotates else "nope"}
    expected = logits(converted("granite-hybrid-shared"), some_ids(), **kind)
    np.testing.assert_array_equal(logits(directory, some_ids()), expected)


def test_heads_of_states_in_several_groups_are_normed_together(tmp_path: Path) -> None:
    """As transformers does it, though GGUF has the norm's weights group by group, and llama.cpp norms them so."""
    sizes = {"in_proj": {1104: 1152}, "conv1d": {560: 608}}
    tiny = replace(TINY_GGUFS["granite-hybrid-ssm"], changes={"mamba_n_groups": 2}, sizes=sizes)
    path = write_tiny_gguf(tmp_path / "x.gguf", tiny)
    assert GgufFile(path).tensors["blk.0.ssm_norm.weight"].shape == (2, 256)
    expected = logits(write_directory(tmp_path / "hf", tiny), some_ids())
    np.testing.assert_allclose(logits(convert(path, tmp_path), some_ids()), expected, atol=1e-4, rtol=0)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """A file's last layer, that is, where it says so."""
    tiny = TINY_GGUFS["deepseek-v3.2"]
    directory = convert(
        write_tiny_gguf(tmp_path / "x.gguf", tiny, keys={"deepseek32.nextn_predict_layers": 1}), tmp_path
    )
    weights = Checkpoint(directory)
    assert weights.config["num_hidden_layers"] == tiny.config["num_hidden_layers"] - 1
    assert not [name for name in weights.names if name.startswith("model.layers.2.")]


def test_a_block_that_predicts_further_tokens_may_be_attention_and_experts_at_once(tmp_path: Path) -> None:
    """As Nemotron 3's is, which is the last."""
    tiny = TINY_GGUFS["nemotron-h-moe"]
    told = model_keys(tiny.config, tiny.architecture)
    lists = {key: [*told[key][:-1], max(told[key])] for key in ("attention.head_count_kv", "feed_forward_length")}
    keys = {f"nemotron_h_moe.{key}": value for key, value in {**lists, "nextn_predict_layers": 1}.items()}
    weights = Checkpoint(convert(write_tiny_gguf(tmp_path / "x.gguf", tiny, keys=keys), tmp_path))
    assert weights.config["hybrid_override_pattern"] == tiny.config["hybrid_override_pattern"][:-1]
    assert weights.config["num_hidden_layers"] == len(tiny.config["hybrid_override_pattern"]) - 1
    assert not [name for name in weights.names if name.startswith("backbone.layers.8.")]
    assert [name for name in weights.names if name.startswith("backbone.layers.7.")]


def test_the_order_of_rows_of_queries_and_keys_is_all_one_where_nothing_is_rotated(tmp_path: Path) -> None:
    def in_pairs(name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        if not name.endswith(("attn_q.weight", "attn_k.weight")):
            return values
        return values.reshape(-1, 2, 32, values.shape[1]).swapaxes(1, 2).reshape(values.shape)

    path = write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS["nemotron-h"], encode=in_pairs)
    found, expected = logits(convert(path, tmp_path), some_ids()), logits(converted("nemotron-h"), some_ids())
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("rms", "found"), [(None, 1e-3), (2e-5, 2e-5)])
def test_norms_may_be_told_of_by_either_of_two_keys(tmp_path: Path, rms: float | None, found: float) -> None:
    """Which llama.cpp asks in this order."""
    at = "nemotron_h.attention.layer_norm"
    keys = {f"{at}_rms_epsilon": rms, f"{at}_epsilon": 1e-3}
    config = build_config(GgufFile(write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS["nemotron-h"], keys=keys)))
    assert model_config(config).rms_norm_eps == found


# ---- blocks ----


def quantised(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType.F32 if values.shape[-1] % 32 else Q8_0


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_are_kept_as_the_blocks_that_the_file_has(name: str, tmp_path: Path) -> None:
    directory = convert(write_tiny_gguf(tmp_path / "q.gguf", TINY_GGUFS[name], quantised), tmp_path)
    weights, plain = Checkpoint(directory, blocks=True), Checkpoint(directory)
    experts = [each for each in weights.names if ".experts." in each and len(weights.shape(each)) == 2]
    assert len(experts) > 10
    quantised_ones = 0
    for each in experts:
        rows, columns = weights.shape(each)
        kept = weights.kept_rows(each, 1, rows - 1)
        np.testing.assert_array_equal(plain.rows(each, 1, rows - 1), plain.tensor(each)[1 : rows - 1])
        np.testing.assert_array_equal(plain.columns(each, 5, columns - 3), plain.tensor(each)[:, 5 : columns - 3])
        if kept is not None:
            quantised_ones += 1
            np.testing.assert_array_equal(kept.dequantised(), plain.rows(each, 1, rows - 1))
            assert plain.kept_rows(each, 1, rows - 1) is None
    assert quantised_ones > 10


@pytest.mark.parametrize("name", TINY_GGUFS)
def test_a_model_of_blocks_computes_what_it_does_of_the_same_numbers_expanded(name: str, tmp_path: Path) -> None:
    directory = convert(write_tiny_gguf(tmp_path / "q.gguf", TINY_GGUFS[name], quantised), tmp_path)
    asked = Asked(Checkpoint(directory, blocks=True))
    config = model_config(asked.config)
    found = run_rank(config, asked, SingleRank(), np.array(some_ids(), np.int32))
    assert found is not None
    np.testing.assert_allclose(found, logits(directory, some_ids()), atol=1e-4, rtol=0)
    files = [BlockFile(directory / each) for each in (BLOCKS, EXPERTS) if (directory / each).exists()]
    every = {each for blocks in files for each, kind in blocks.kinds.items() if kind == "Q8_0"}
    expanded = every & asked.expanded | every - asked.kept
    assert [each for each in expanded if not each.endswith(EXPANDED)] == []


def test_experts_in_k_quants_are_the_numbers_that_the_gguf_package_reads(tmp_path: Path) -> None:
    """Also on two ranks, each of which has half of every block of a row."""
    packed = write_tiny_gguf(tmp_path / "k.gguf", K_QUANTS, experts_in_k_quants, random_k_blocks)
    floats = write_tiny_gguf(tmp_path / "f.gguf", K_QUANTS, encode=random_k_numbers)
    expected = logits(convert(floats, tmp_path / "floats"), some_ids())
    asked, ids = Asked(Checkpoint(convert(packed, tmp_path), blocks=True)), np.array(some_ids(), np.int32)
    config = model_config(asked.config)
    for found in (run_rank(config, asked, SingleRank(), ids), run_ranks(config, asked, 2, ids)[0]):
        assert found is not None
        np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)
    assert len([name for name in asked.kept if ".experts." in name]) == 3 * 8 * 3, "all matrices of all experts"


class Asked:
    """Weights that remember which matrices were taken as they are kept, and of which there were floats."""

    def __init__(self, source: Checkpoint) -> None:
        self._source, self.kept, self.expanded = source, set[str](), set[str]()

    def rows(self, name: str, start: int, stop: int) -> Any:
        self.expanded.add(name)
        return self._source.rows(name, start, stop)

    def columns(self, name: str, start: int, stop: int) -> Any:
        self.expanded.add(name)
        return self._source.columns(name, start, stop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def kept_rows(self, name: str, start: int, stop: int) -> Any:
        return self._noted(name, self._source.kept_rows(name, start, stop))

    def kept_columns(self, name: str, start: int, stop: int) -> Any:
        return self._noted(name, self._source.kept_columns(name, start, stop))

    def _noted(self, name: str, matrix: Any) -> Any:
        self.kept |= {name} if matrix is not None else set()
        return matrix


@pytest.mark.parametrize(
    "name", ["qwen3-moe", "gpt-oss-mxfp4", "gemma4-moe", "deepseek-v3", "granite-hybrid-moe", "nemotron-h-moe"]
)
def test_ranks_have_their_parts_of_experts_that_are_blocks(name: str, tmp_path: Path) -> None:
    """Though a rank's part begins within a group; where it computes from blocks, that is refused with the remedy."""
    directory = convert(write_tiny_gguf(tmp_path / "q.gguf", TINY_GGUFS[name], quantised), tmp_path)
    weights, ids = Checkpoint(directory), np.array(some_ids(20), np.int32)
    config = model_config(weights.config)
    np.testing.assert_allclose(run_ranks(config, weights, 2, ids)[0], logits(directory, some_ids(20)), atol=1e-3)
    expert = next(each for each in weights.names if ".experts.0.down_proj.weight" in each)
    with pytest.raises(ConfigError, match=r"in groups of 32 columns, .*: choose another tp_size, or weights_dtype bf"):
        Checkpoint(directory, blocks=True).kept_columns(expert, 16, 32)


def test_experts_are_on_disk_once_and_no_larger_than_their_blocks(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "q.gguf", TINY_GGUFS["qwen3-moe"], quantised)
    directory = convert(source, tmp_path)
    experts = {name for name in Checkpoint(directory).names if ".experts." in name}
    assert set(BlockFile(directory / EXPERTS).kinds) == experts
    assert not experts & set(BlockFile(directory / BLOCKS).kinds)
    assert not experts & set(SafetensorsFile(directory / SINGLE).names)
    assert [path.name for path in weight_files(directory)] == [SINGLE, EXPERTS], "both are read, and hashed"


def test_mxfp4_stays_four_bits_on_disk_and_is_exact(tmp_path: Path) -> None:
    directory = convert(write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS["gpt-oss-mxfp4"]), tmp_path)
    blocks = BlockFile(directory / EXPERTS)
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    assert blocks.kinds[name] == "MXFP4"
    assert blocks.shape(name) == (64, 96)
    assert SafetensorsFile(directory / EXPERTS, INTEGERS | {"F32": FLOATS["F32"]}).shape(f"{name}.codes") == (64, 48)
    form = blocks.code_form(name)
    assert form is not None
    assert (form.bits, form.group) == (5, 32), "in memory codes are integers, from -12 to 12"
    source, weights = GgufFile(tmp_path / "x.gguf"), Checkpoint(directory)
    np.testing.assert_array_equal(weights.tensor(name), source.tensor("blk.0.ffn_down_exps.weight")[2])


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_experts_in_sixteen_bits_stay_so(tmp_path: Path, kind: str) -> None:
    def halves(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType[kind] if "_exps" in name else gguf.GGMLQuantizationType.F32

    directory = convert(write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS["mixtral"], halves), tmp_path)
    weights, name = Checkpoint(directory), "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    assert weights.stored(name).dtype.itemsize == 2
    expected = GgufFile(tmp_path / "x.gguf").tensor("blk.1.ffn_down_exps.weight")[3]
    np.testing.assert_array_equal(weights.tensor(name), expected)


def test_columns_that_move_keep_their_blocks_where_these_move_as_wholes(tmp_path: Path) -> None:
    """Of a delta-net's last projection, whose columns belong to value heads."""
    name = "model.layers.0.linear_attn.out_proj.weight"
    for tiny, kind in ((TINY_GGUFS["qwen3.5"], "reordered Q8_0"), (JUDGED_GGUFS["qwen3.5"], "Q8_0")):
        directory = convert(write_tiny_gguf(tmp_path / f"{kind}.gguf", tiny, quantised), tmp_path)
        weights = Checkpoint(directory, blocks=True)
        assert BlockFile(directory / BLOCKS).kinds[name] == kind
        kept = weights.kept_rows(name, 0, 64)
        assert (kept is None) == (kind != "Q8_0")
        np.testing.assert_allclose(weights.tensor(name), tiny.weights()[name], atol=0.02)
        if kept is not None:
            np.testing.assert_array_equal(kept.dequantised(), weights.tensor(name))


def test_gates_and_ups_in_one_tensor_are_taken_apart(tmp_path: Path) -> None:
    tiny = TINY_GGUFS["qwen3-moe"]
    joined = convert(write_tiny_gguf(tmp_path / "joined.gguf", tiny, quantised, joins_gate_up=True), tmp_path)
    assert "blk.0.ffn_gate_up_exps.weight" in GgufFile(tmp_path / "joined.gguf").tensors
    apart = convert(write_tiny_gguf(tmp_path / "apart.gguf", tiny, quantised), tmp_path)
    found, expected = Checkpoint(joined), Checkpoint(apart)
    assert sorted(found.names) == sorted(expected.names)
    for name in found.names:
        np.testing.assert_array_equal(found.tensor(name), expected.tensor(name))


# ---- files that are not right ----


class Stages(SilentProgress):
    """Remembers what was begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def stage(self, text: str) -> None:
        self.begun.append(text)


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("mixtral", "blk.1.ffn_up_exps.weight"),
        ("qwen3-moe", "blk.2.attn_k_norm.weight"),
        ("gpt-oss", "blk.0.attn_sinks.weight"),
        ("gpt-oss", "blk.1.ffn_down_exps.bias"),
        ("deepseek-v3", "blk.1.exp_probs_b.bias"),
        ("deepseek-v3", "blk.2.attn_v_b.weight"),
        ("deepseek-v3.2", "blk.0.indexer.k_norm.bias"),
        ("ernie", "output_norm.weight"),
        ("ernie-moe", "blk.2.ffn_gate_shexp.weight"),
        ("gemma4-shared", "blk.3.proj.weight"),
        ("gemma4-moe", "blk.0.ffn_down_exps.scale"),
        ("qwen3-next", "blk.1.ssm_a"),
        ("qwen3-next", "blk.0.attn_gate.weight"),
        ("qwen3.5", "blk.2.attn_gate.weight"),
        ("llama4", "blk.3.ffn_gate_inp.weight"),
        ("glm4", "blk.1.ffn_up.weight"),
        ("glm4-moe", "blk.2.exp_probs_b.bias"),
        ("seed-oss", "blk.0.post_attention_norm.weight"),
        ("arcee", "blk.1.ffn_up.weight"),
        ("qwen2-moe", "blk.0.ffn_gate_inp_shexp.weight"),
        ("smollm3", "blk.3.attn_k.weight"),
        ("minimax-m2", "blk.1.attn_q_norm.weight"),
        ("olmo2", "blk.2.post_ffw_norm.weight"),
        ("exaone4", "blk.0.attn_k_norm.weight"),
        ("exaone-moe", "blk.1.ffn_up_shexp.weight"),
        ("cohere2", "blk.3.ffn_gate.weight"),
        ("dots1", "blk.0.ffn_down.weight"),
        ("afmoe", "blk.2.attn_gate.weight"),
        ("ministral3", "blk.2.ffn_norm.weight"),
        ("granite-hybrid-shared", "blk.0.ffn_gate_shexp.weight"),
        ("granite-hybrid-ssm", "blk.0.ssm_conv1d.bias"),
        ("granite-hybrid-ssm", "blk.3.ssm_d"),
        ("granite-hybrid-ssm", "blk.1.ffn_up.weight"),
        ("granite-hybrid-moe", "blk.2.attn_q.weight"),
        ("granite-hybrid-moe", "blk.1.ffn_up_shexp.weight"),
        *(
            ("kimi-linear", f"blk.0.{name}")
            for name in ("ssm_a", "ssm_dt.bias", "ssm_conv1d_k.weight", "attn_k.weight")
        ),
        *(("kimi-linear", f"blk.1.{name}.weight") for name in ("ssm_f_b", "ssm_g_a", "ssm_beta", "ssm_norm")),
        *(
            ("kimi-linear", f"blk.2.{name}")
            for name in ("attn_k_b.weight", "attn_kv_a_norm.weight", "exp_probs_b.bias")
        ),
        ("kimi-linear", "blk.4.ffn_up_shexp.weight"),
        ("nemotron-h", "blk.4.attn_norm.weight"),
        ("nemotron-h", "blk.0.ssm_in.weight"),
        ("nemotron-h", "blk.7.ssm_dt.bias"),
        ("nemotron-h", "blk.3.ssm_norm.weight"),
        ("nemotron-h", "blk.9.ffn_down.weight"),
        ("nemotron-h", "blk.8.attn_output.weight"),
        ("nemotron-h", "output_norm.weight"),
        ("nemotron-h-moe", "blk.7.exp_probs_b.bias"),
        ("nemotron-h-moe", "blk.4.ffn_up_exps.weight"),
        ("nemotron-h-moe", "blk.1.ffn_down_shexp.weight"),
        ("nemotron-h-latent", "blk.3.ffn_latent_up.weight"),
    ],
)
def test_what_a_file_lacks_is_named_before_its_weights_are_read(tmp_path: Path, name: str, lacks: str) -> None:
    path, stages = write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS[name], but=(lacks,)), Stages()
    with pytest.raises(ModelError, match=rf"x\.gguf lacks the tensor '{lacks}'; download it again"):
        converted_directory(path, tmp_path, stages)
    assert stages.begun == ["reading x.gguf"]


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("mixtral", {"llama.expert_count": 5}, r"shape \(4, 96, 64\), and the metadata say \(5, 96, 64\): 5 experts"),
        ("qwen3-moe", {"qwen3moe.expert_feed_forward_length": 16}, "8 experts of size 16"),
        ("qwen3-moe", {"qwen3moe.expert_used_count": 9}, "'num_experts_per_tok' 9 is more than 'num_experts' 8"),
        ("qwen3-moe", {"qwen3moe.expert_count": 0}, r"qwen3moe\.expert_count must be one positive integer"),
        ("gpt-oss", {"gpt-oss.expert_count": None}, r"lacks the metadata key 'gpt-oss\.expert_count'"),
        ("deepseek-v3", {"deepseek2.expert_gating_func": 3}, "neither softmax"),
        ("deepseek-v3", {"deepseek2.attention.kv_lora_rank": 32}, r"attn_k_b.weight has the shape \(4, 48, 24\)"),
        ("deepseek-v3", {"deepseek2.attention.temperature_scale": 0.1}, "scales queries by their position"),
        ("deepseek-v3", {"deepseek2.rope.dimension_count": 64}, "heads of 40 elements, of which 64 are rotated"),
        ("gemma4", {"gemma4.attention.head_count_kv": [4, 4, 2, 4]}, "for each of 5 layers"),
        ("gemma4", {"gemma4.attention.head_count_kv": [4, 2, 2, 4, 2]}, "differs between layers of a kind"),
        ("qwen3.5", {"qwen35.ssm.inner_size": 193}, "no multiple of 4 heads"),
        ("qwen3.5", {"qwen35.nextn_predict_layers": 4}, "leaves no layer"),
        ("glm4", {"glm4.rope.dimension_sections": [8, 12, 12, 0]}, "reorders a GLM-4's rows"),
        ("glm4", {"glm4.rope.dimension_count": 128}, "dimension_count 128 is more than a head's 64"),
        ("glm4-moe", {"glm4moe.expert_gating_func": 1}, r"glm4moe\.expert_gating_func must be sigmoid \(2\), got 1"),
        ("afmoe", {"afmoe.expert_weights_norm": False}, "weights are not normed"),
        ("seed-oss", {"seed_oss.rope.dimension_count": 32}, "rotates 32 of 64 dimensions"),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": [True]}, "pattern covers 1 of 4 layers"),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": 0}, "sliding_window_pattern must be positive, got 0"),
        ("cohere2", {"cohere2.logit_scale": None}, r"lacks the metadata key 'cohere2\.logit_scale'"),
        ("ministral3", {"mistral3.expert_count": 8}, "a mistral3 with 8 experts, which cannot be served"),
        ("qwen3.5", {"qwen35.expert_count": 8}, "a qwen35 with 8 experts, which cannot be served"),
        ("granite", {"granite.rope.scaling.finetuned": False}, r"granite\.rope\.scaling\.finetuned is false, so that"),
        (
            "granite-hybrid-moe",
            {"granitehybrid.attention.head_count_kv": [0, 0, 2]},
            "for each of 4 layers, 0 for those",
        ),
        ("granite-hybrid-moe", {"granitehybrid.attention.head_count_kv": [0, 1, 2, 0]}, r"got \[0, 1, 2, 0\]"),
        (
            "granite-hybrid-moe",
            {"granitehybrid.attention.head_count_kv": [0] * 4},
            "of which there is at least one; got",
        ),
        ("granite-hybrid-moe", {"granitehybrid.rope.scaling.finetuned": True}, "is not false: so are Bamba's files"),
        ("granite-hybrid-moe", {"granitehybrid.rope.scaling.finetuned": None}, "is not false: so are Bamba's files"),
        ("granite-hybrid-moe", {"granitehybrid.expert_shared_feed_forward_length": None}, "lacks the metadata key"),
        ("granite-hybrid-moe", {"granitehybrid.expert_shared_feed_forward_length": 65}, "and the metadata say 16640"),
        ("granite-hybrid-ssm", {"granitehybrid.feed_forward_length": 64}, "and the metadata say 16384 numbers"),
        ("granite-hybrid-ssm", {"granitehybrid.ssm.inner_size": 513}, "inner_size 513 is no multiple of 32 heads"),
        (
            "granite-hybrid-ssm",
            {"granitehybrid.ssm.time_step_rank": 16},
            r"ssm_a has the shape \(32, 1\), and the",
        ),
        (
            "granite-hybrid-ssm",
            {"granitehybrid.ssm.state_size": 16},
            r"shape \(560, 4\), and the metadata say 2176",
        ),
        ("kimi-linear", {"kimi-linear.attention.head_count_kv": [0] * 5}, "0 for those with states"),
        ("kimi-linear", {"kimi-linear.attention.head_count_kv": 1}, "of 5 layers 0 have Kimi Delta Attention"),
        ("kimi-linear", {"kimi-linear.kda.head_dim": None}, r"lacks the metadata key 'kimi-linear\.kda\.head_dim'"),
        ("kimi-linear", {"kimi-linear.kda.head_dim": 16}, "the metadata say 4096 numbers"),
        ("kimi-linear", {"kimi-linear.ssm.conv_kernel": 3}, "ssm_conv1d_q.weight has the shape .* say 384 numbers"),
        ("kimi-linear", {"kimi-linear.attention.key_length_mla": 16}, "heads of 16 elements, of which 16 are rotated"),
        ("kimi-linear", {"kimi-linear.expert_gating_func": 1}, "expert_gating_func must be sigmoid"),
        ("kimi-linear", {"kimi-linear.expert_count": None}, "lacks the metadata key 'kimi-linear.expert_count'"),
        ("nemotron-h", {"nemotron_h.expert_count": 8}, "a nemotron_h with 8 experts, which cannot be served"),
        ("nemotron-h", {"nemotron_h.feed_forward_length": [0, 160]}, "for each of 10 layers, 0 for those without an M"),
        ("nemotron-h", {"nemotron_h.feed_forward_length": 160}, r"blocks \[5, 8\] have heads of attention and an MLP"),
        ("nemotron-h", {"nemotron_h.attention.head_count_kv": 2}, r"blocks \[1, 4, 6, 9\] have heads of attention"),
        ("nemotron-h", {"nemotron_h.attention.head_count_kv": [0] * 10}, "0 for those without attention"),
        (
            "nemotron-h",
            {"nemotron_h.feed_forward_length": [0, 96, 0, 0, 96, 0, 96, 0, 0, 96]},
            r"blk\.1\.ffn_up\.weight has the shape \(160, 64\), and the metadata say 6144",
        ),
        ("nemotron-h", {"nemotron_h.attention.key_length": 32}, "attn_q.weight has the shape"),
        ("nemotron-h", {"nemotron_h.ssm.group_count": 2}, r"shape \(448, 4\), and the metadata say 1408"),
        (
            "nemotron-h",
            {"nemotron_h.ssm.time_step_rank": 32},
            r"ssm_a has the shape \(16, 1\), and the metadata say 32",
        ),
        (
            "nemotron-h",
            {"nemotron_h.attention.layer_norm_rms_epsilon": None, "nemotron_h.attention.layer_norm_epsilon": None},
            "lacks the metadata key 'nemotron_h.attention.layer_norm_epsilon'",
        ),
        (
            "nemotron-h-moe",
            {"nemotron_h_moe.expert_count": None},
            r"lacks the metadata key 'nemotron_h_moe\.expert_count'",
        ),
        ("nemotron-h-moe", {"nemotron_h_moe.expert_shared_count": None}, "lacks the metadata key"),
        ("nemotron-h-moe", {"nemotron_h_moe.expert_shared_count": 2}, r"ffn_up_shexp\.weight has the shape \(80, 64\)"),
        (
            "nemotron-h-moe",
            {"nemotron_h_moe.expert_shared_feed_forward_length": 64},
            "and the metadata say 4096 numbers",
        ),
        ("nemotron-h-moe", {"nemotron_h_moe.expert_feed_forward_length": 48}, "8 experts of size 48"),
        ("nemotron-h-moe", {"nemotron_h_moe.expert_gating_func": 1}, "expert_gating_func must be sigmoid"),
        ("nemotron-h-latent", {"nemotron_h_moe.moe_latent_size": 16}, r"latent_down\.weight has the shape \(32, 64\)"),
        ("nemotron-h-latent", {"nemotron_h_moe.moe_latent_size": None}, "the metadata say "),
    ],
)
def test_metadata_that_do_not_fit_are_named_before_weights_are_read(
    tmp_path: Path, name: str, keys: dict[str, Any], says: str
) -> None:
    path, stages = write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS[name], keys=keys), Stages()
    with pytest.raises(ModelError, match=says) as raised:
        converted_directory(path, tmp_path, stages)
    assert "x.gguf" in str(raised.value)
    assert stages.begun == ["reading x.gguf"]


class Biased(TinyGguf):
    """With a bias beside one matrix of a checkpoint, or those of one layer's experts."""

    biased: ClassVar[re.Pattern[str]]

    @property
    def shapes(self) -> dict[str, list[int]]:
        found = super().shapes
        biases = {name.replace(".weight", ".bias"): [found[name][0]] for name in found if self.biased.search(name)}
        return {**found, **biases}


@pytest.mark.parametrize(
    ("name", "pattern", "refused"),
    [
        ("nemotron-h", r"\.0\.mixer\.in_proj", "blk.0.ssm_in.bias"),
        ("nemotron-h", r"\.1\.mixer\.up_proj", "blk.1.ffn_up.bias"),
        ("nemotron-h", r"\.5\.mixer\.q_proj", "blk.5.attn_q.bias"),
        ("nemotron-h-moe", r"\.1\.mixer\.experts.*down_proj", "blk.1.ffn_down_exps.bias"),
        ("nemotron-h-moe", r"\.4\.mixer\.shared_experts\.up_proj", "blk.4.ffn_up_shexp.bias"),
    ],
)
def test_biases_that_no_published_model_has_are_refused(tmp_path: Path, name: str, pattern: str, refused: str) -> None:
    class Tiny(Biased):
        biased = re.compile(pattern)

    path, stages = write_tiny_gguf(tmp_path / "x.gguf", Tiny(**vars(TINY_GGUFS[name]))), Stages()
    with pytest.raises(ModelError, match=rf"x\.gguf: the tensor '{refused}' is no part of a nemotron_h"):
        converted_directory(path, tmp_path, stages)
    assert stages.begun == ["reading x.gguf"]


def test_a_file_with_experts_that_is_cut_short_is_refused_at_once(tmp_path: Path) -> None:
    path, stages = write_tiny_gguf(tmp_path / "x.gguf", TINY_GGUFS["gpt-oss-mxfp4"]), Stages()
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelError, match=r"x\.gguf is truncated or corrupt"):
        converted_directory(path, tmp_path, stages)
    assert stages.begun == ["reading x.gguf"]


@pytest.mark.parametrize(
    "name", ["deepseek-v3.2", "gemma4-moe", "qwen3.5-moe", "granite-hybrid-moe", "nemotron-h-latent"]
)
def test_a_flipped_header_gives_a_model_error_or_a_model(name: str, tmp_path: Path) -> None:
    whole, draw = write_tiny_gguf(tmp_path / "whole.gguf", TINY_GGUFS[name]).read_bytes(), random.Random(5)
    header = min(tensor.offset for tensor in GgufFile(tmp_path / "whole.gguf").tensors.values())
    path, messages = tmp_path / "flipped.gguf", []
    for attempt in range(40):
        broken = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(4, header)] = draw.randrange(256)
        path.write_bytes(broken)
        try:
            assert len(Checkpoint(convert(path, tmp_path / str(attempt))).names) > 0
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert [message for message in messages if "flipped.gguf" not in message] == []


# ---- files in parts ----


def write_parts(directory: Path, count: int = 3) -> list[Path]:
    """A model in several parts, as `llama-gguf-split` cuts them: the first has all metadata."""
    whole = write_tiny_gguf(directory / "whole.gguf", TINY_GGUFS["qwen3-moe"], quantised)
    reader = gguf.GGUFReader(whole)
    names = [tensor.name for tensor in reader.tensors]
    paths = [directory / f"big-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        split = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        mine = {name for at, name in enumerate(names) if at * count // len(names) == number}
        write_tiny_gguf(
            path,
            TINY_GGUFS["qwen3-moe"],
            quantised,
            but=tuple(name for name in names if name not in mine),
            keys=split if number == 0 else {**dict.fromkeys(GgufFile(whole).metadata), **split},
        )
    return paths


def test_a_file_in_parts_is_read_as_one(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    found = Checkpoint(convert(paths[0], tmp_path))
    expected = Checkpoint(convert(tmp_path / "whole.gguf", tmp_path))
    assert sorted(found.names) == sorted(expected.names)
    for name in found.names:
        np.testing.assert_array_equal(found.tensor(name), expected.tensor(name))
    first = convert(paths[0], tmp_path)
    os.utime(paths[2], ns=(1, 1))
    assert convert(paths[0], tmp_path) != first, "a part that changed is another file"


def test_parts_that_are_missing_or_others_are_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf is one of 3 parts: give the first, whose name ends in"):
        convert(paths[1], tmp_path)
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(paths[0].read_bytes())
    with pytest.raises(
        ModelError, match=r"renamed\.gguf is one of 3 parts: give the first, .*llama-gguf-split --merge"
    ):
        convert(copy, tmp_path)
    third = paths[2].read_bytes()
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf is not part 3 of 3 of "):
        convert(paths[0], tmp_path)
    paths[2].write_bytes(third[:-64])
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf is truncated"):
        convert(paths[0], tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelError, match=r"cannot read .*00003-of-00003\.gguf: No such file"):
        convert(paths[0], tmp_path)
