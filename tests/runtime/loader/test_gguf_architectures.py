"""GGUF files of all architectures become the models that they were made of."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from support.engine.dense_oracle import run_rank
from support.reference import CLOSE, answers
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint
from support.tiny_models import BYTE_MERGES, BYTE_TOKENS, CONTROL
from tokenizers import Tokenizer

from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.gguf_cache import converted_directory
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.rope import served_up_to
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.quantised import Matrix

ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "phi3-long": gguf.MODEL_ARCH.PHI3,
}
NOT_IN_GGUF = {
    "qwen2": ("use_sliding_window", "sliding_window", "max_window_layers"),  # no published model has windows
    "gemma2": ("query_pre_attn_scalar",),  # follows from the size
}


def write_gguf(path: Path, name: str, kind: gguf.GGMLQuantizationType | None = None) -> Path:
    """A tiny checkpoint as llama.cpp's converter would write it, by the names that it has of each tensor. kind: of
    matrices"""
    config, architecture = TINY_CONFIGS[name], ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-5 if name.startswith("phi3") else 1e-6))
    writer.add_rope_freq_base(config["rope_theta"])
    if not name.startswith("phi3"):
        writer.add_key_length(64)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "phi3-long":
        writer.add_rope_dimension_count(48)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for length in ("long", "short"):
            writer.add_tensor(
                f"rope_factors_{length}.weight", np.array(config["rope_scaling"]["long_factor"], np.float32)
            )
    _add_tokenizer(writer)
    weights, names = Checkpoint(checkpoint(name)), gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for hf_name in weights.names:
        values = weights.tensor(hf_name)
        if name == "gemma2" and hf_name.endswith("norm.weight"):
            values = values + np.float32(1)
        known = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        raw = None if kind is None or values.ndim < 2 else kind
        values = np.ascontiguousarray(values)
        # A Gemma 2 of ours is not tied.
        writer.add_tensor(
            known or "output.weight", values if raw is None else gguf.quantize(values, raw), raw_dtype=raw
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(BYTE_TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(BYTE_TOKENS) - len(CONTROL)))
    writer.add_token_merges(BYTE_MERGES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_converted_file_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    directory = converted_directory(write_gguf(tmp_path / "tiny.gguf", name), tmp_path, SilentProgress())
    weights = Checkpoint(directory)
    config = model_config({**weights.config, **{key: TINY_CONFIGS[name][key] for key in NOT_IN_GGUF.get(name, ())}})
    config = served_up_to(config, config.max_position)
    answer = next(answer for answer in answers(name) if answer.name == "more")
    logits = run_rank(config, weights, SingleRank(), np.array(answer.prompt_ids, np.int32))
    assert logits is not None
    np.testing.assert_allclose(logits[-1][answer.sample_ids], answer.sample_logits, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_are_computed_from_as_the_same_numbers_expanded(name: str, tmp_path: Path) -> None:
    """Those of Phi-3's fused projections, too."""
    path = write_gguf(tmp_path / "tiny.gguf", name, gguf.GGMLQuantizationType.Q8_0)
    directory, found, kept = converted_directory(path, tmp_path, SilentProgress()), [], set[str]()
    for blocks in (False, True):
        weights = Noting(directory, blocks, kept)
        config = served_up_to(model_config(weights.config), 64)
        found.append(run_rank(config, weights, SingleRank(), np.arange(3, 60, dtype=np.int32)))
    np.testing.assert_allclose(*found, atol=1e-4, rtol=0)
    matrices = {each for each in Checkpoint(directory).names if len(Checkpoint(directory).shape(each)) == 2}
    assert matrices == kept


class Noting(Checkpoint):
    """Notes which matrices were taken as they are kept."""

    def __init__(self, directory: Path, blocks: bool, kept: set[str]) -> None:
        super().__init__(directory, blocks=blocks)
        self._noted = kept

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._note(name, super().kept_rows(name, start, stop))

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._note(name, super().kept_columns(name, start, stop))

    def _note(self, name: str, matrix: Matrix | None) -> Matrix | None:
        self._noted |= set() if matrix is None else {name}
        return matrix


def test_text_of_qwen_is_split_as_its_own_tokenizer_splits_it(tmp_path: Path) -> None:
    directory = converted_directory(write_gguf(tmp_path / "tiny.gguf", "qwen3"), tmp_path, SilentProgress())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "It'S 2026, the\u0301re:\n\n  über"  # an accent that becomes part of its letter
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))]
    assert pieces == ["It", "'S", "Ġ", "2", "0", "2", "6", ",", "ĠthÃ©re", ":ĊĊ", "Ġ", "ĠÃ¼ber"], (
        "as transformers' Qwen2"
    )
