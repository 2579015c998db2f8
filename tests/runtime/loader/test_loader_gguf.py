"""GGUF files become Hugging Face directories with the same weights, or a clear error."""

from __future__ import annotations

import errno
import json
import random
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.tiny_models import (
    BYTE_TOKENS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PIECES,
    gemma3_tensors,
    llama_tensors,
    write_gemma3_gguf,
    write_llama_gguf,
)

from headwise.errors import ConfigError, ModelError
from headwise.runtime.loader import gguf_convert
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.gguf_cache import converted_directory
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.loader.tokenizer import Tokenizer


def convert(source: Path, cache: Path) -> Path:
    return converted_directory(source, cache, SilentProgress())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def gemma3(tmp_path: Path) -> Path:
    return write_gemma3_gguf(tmp_path / "tiny-gemma.gguf")


@pytest.mark.parametrize(("name", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_llama_query_and_key_rows_go_back_to_halves_of_a_head(
    llama: Path, tmp_path: Path, name: str, heads: int
) -> None:
    stored = llama_tensors()[f"blk.1.attn_{name}.weight"]
    found = Checkpoint(convert(llama, tmp_path)).tensor(f"model.layers.1.self_attn.{name}_proj.weight")
    for head in range(heads):
        for pair in range(HEAD_DIM // 2):
            first = head * HEAD_DIM
            np.testing.assert_array_equal(found[first + pair], stored[first + 2 * pair])
            np.testing.assert_array_equal(found[first + HEAD_DIM // 2 + pair], stored[first + 2 * pair + 1])


def test_all_other_llama_weights_stay_as_they_are(llama: Path, tmp_path: Path) -> None:
    stored, checkpoint = llama_tensors(), Checkpoint(convert(llama, tmp_path))
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }.items():
        np.testing.assert_array_equal(checkpoint.tensor(ours), stored[theirs])
    assert len(checkpoint.names) == len(stored)


def test_gemma_norms_lose_the_one_that_gguf_adds(gemma3: Path, tmp_path: Path) -> None:
    stored, checkpoint = gemma3_tensors(len(PIECES)), Checkpoint(convert(gemma3, tmp_path))
    for ours, theirs in {
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.self_attn.q_norm.weight": "blk.0.attn_q_norm.weight",
        "model.layers.1.pre_feedforward_layernorm.weight": "blk.1.ffn_norm.weight",
        "model.layers.1.post_feedforward_layernorm.weight": "blk.1.post_ffw_norm.weight",
    }.items():
        np.testing.assert_allclose(checkpoint.tensor(ours), stored[theirs] - 1, atol=1e-6)
    queries = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(queries, stored["blk.0.attn_q.weight"])


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    kinds = {
        "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.F16,
        "blk.0.ffn_down.weight": gguf.GGMLQuantizationType.BF16,
    }
    checkpoint = Checkpoint(convert(write_llama_gguf(tmp_path / "q.gguf", quantized=kinds), tmp_path))
    stored = llama_tensors()
    assert checkpoint.shape("model.embed_tokens.weight") == stored["token_embd.weight"].shape
    np.testing.assert_allclose(checkpoint.tensor("model.embed_tokens.weight"), stored["token_embd.weight"], atol=0.03)
    up, down = (checkpoint.tensor(f"model.layers.0.mlp.{name}_proj.weight") for name in ("up", "down"))
    np.testing.assert_allclose(up, stored["blk.0.ffn_up.weight"], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(down, stored["blk.0.ffn_down.weight"], rtol=1e-2)


def test_llama_config_states_the_geometry(llama: Path, tmp_path: Path) -> None:
    config = Checkpoint(convert(llama, tmp_path)).config
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": len(BYTE_TOKENS),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_an_output_matrix_unties_the_embeddings(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    checkpoint = Checkpoint(convert(write_llama_gguf(tmp_path / "untied.gguf", tensors), tmp_path))
    assert checkpoint.config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight"), tensors["output.weight"])


def test_an_end_of_turn_token_joins_the_end_tokens(tmp_path: Path) -> None:
    source = write_llama_gguf(tmp_path / "eot.gguf", extra={"tokenizer.ggml.eot_token_id": 0})
    assert Tokenizer.from_directory(convert(source, tmp_path)).eos_token_ids == (0, 2)


def test_so_does_one_that_ends_a_message_that_a_tool_answers(tmp_path: Path) -> None:
    """As GLM's ``<|observation|>`` does."""
    extra = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 5}
    source = write_llama_gguf(tmp_path / "eom.gguf", extra=extra)
    assert Tokenizer.from_directory(convert(source, tmp_path)).eos_token_ids == (0, 2, 5)


def test_gemma_config_states_windows_and_both_thetas(gemma3: Path, tmp_path: Path) -> None:
    config = Checkpoint(convert(gemma3, tmp_path)).config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (16, HEAD_DIM)


@pytest.mark.parametrize("pattern", [2, [True, False]])
def test_gemma_window_pattern_may_be_a_period_or_flags(tmp_path: Path, pattern: object) -> None:
    source = write_gemma3_gguf(tmp_path / "p.gguf", {"gemma3.attention.sliding_window_pattern": pattern})
    config = Checkpoint(convert(source, tmp_path)).config
    assert config["layer_types"] == ["sliding_attention", "full_attention"]


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    extra = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = Checkpoint(convert(write_gemma3_gguf(tmp_path / "s.gguf", extra), tmp_path)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_llama3_frequency_factors_become_their_rope_scaling(tmp_path: Path) -> None:
    theta, factors = 500_000.0, []
    for index in range(0, HEAD_DIM, 2):  # as Llama 3.1 was published: low 1, high 4, original context 8192
        wavelength = 2 * np.pi * theta ** (index / HEAD_DIM)
        smooth = (8192 / wavelength - 1) / 3
        factors.append(1.0 if wavelength < 2048 else 8.0 if wavelength > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    assert 1 < factors[2] < 8
    tensors = {**llama_tensors(), "rope_freqs.weight": np.array(factors, np.float32)}
    checkpoint = Checkpoint(convert(write_llama_gguf(tmp_path / "l3.gguf", tensors, theta=theta), tmp_path))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert len(checkpoint.names) == len(tensors) - 1


def test_frequency_factors_of_another_origin_are_refused(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not Llama 3's"):
        convert(write_llama_gguf(tmp_path / "odd.gguf", tensors), tmp_path)


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'mamba'; GGUF files of afmoe, .*qwen3moe, .*smollm3 can be converted"):
        convert(write_llama_gguf(tmp_path / "m.gguf", architecture="mamba"), tmp_path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, r"lacks the metadata key 'llama\.expert_used_count'"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, r"lacks the tensor 'blk\.0\.ffn_gate_inp\.weight'"),
        ({"split.count": 3}, r"is one of 3 parts: .*llama-gguf-split --merge"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
    ],
)
def test_models_that_would_be_served_wrongly_are_refused(tmp_path: Path, extra: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        convert(write_llama_gguf(tmp_path / "x.gguf", extra=extra), tmp_path)


def test_a_tensor_the_architecture_does_not_have_is_refused(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "blk.0.attn_sinks.weight": np.zeros(HEADS, np.float32)}
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks\.weight"):
        convert(write_llama_gguf(tmp_path / "x.gguf", tensors), tmp_path)


def test_mixtral_files_of_another_age_are_told_apart(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "blk.0.ffn_gate.0.weight": np.zeros((64, 32), np.float32)}
    path = write_llama_gguf(
        tmp_path / "old.gguf", tensors, extra={"llama.expert_count": 8, "llama.expert_used_count": 2}
    )
    with pytest.raises(ModelError, match=r"old\.gguf has each expert in tensors of its own, .*download a newer one"):
        convert(path, tmp_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + b"\0" * 60, b"GGUF" + b"\xff" * 60])
def test_files_that_are_no_gguf_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.gguf"):
        convert(tmp_path / "x.gguf", tmp_path)


def test_without_the_package_that_reads_such_files_it_is_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs a package .*gguf.*: `pip install gguf`"):
        convert(llama, tmp_path)


@pytest.mark.parametrize("element", [gguf.GGUFValueType.UINT32, gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY])
def test_an_array_longer_than_the_file_is_refused_at_once(tmp_path: Path, element: gguf.GGUFValueType) -> None:
    header = b"GGUF" + struct.pack("<IQQQ3s", 3, 0, 1, 3, b"key")
    value = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, element, 1 << 40)
    (tmp_path / "x.gguf").write_bytes(header + value + bytes(8))
    with pytest.raises(ModelError, match=r"x\.gguf is truncated or corrupt"):
        convert(tmp_path / "x.gguf", tmp_path)


def test_a_file_cut_anywhere_is_refused_and_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    whole = llama.read_bytes()
    cuts = [1, 5, 20, *range(100, len(whole), len(whole) // 40), len(whole) - 64]
    cut_file = tmp_path / "cut.gguf"
    for length in cuts:
        cut_file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            convert(cut_file, tmp_path / "cache")
        assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_a_flipped_header_gives_a_model_error_or_a_model(llama: Path, tmp_path: Path) -> None:
    whole, draw, header = llama.read_bytes(), random.Random(5), GgufFile(llama).tensors["token_embd.weight"].offset
    path, messages = tmp_path / "flipped.gguf", []
    for attempt in range(200):
        broken = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(4, header)] = draw.randrange(256)
        path.write_bytes(broken)
        try:
            assert len(Checkpoint(convert(path, tmp_path / str(attempt))).names) > 0
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert [message for message in messages if "flipped.gguf" not in message] == []


def test_a_file_is_converted_once_until_it_changes(llama: Path, tmp_path: Path) -> None:
    first = convert(llama, tmp_path)
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert convert(llama, tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    write_llama_gguf(llama, llama_tensors(seed=1), extra={"general.name": "another"})
    assert convert(llama, tmp_path) != first


def test_a_conversion_that_runs_out_of_disk_can_be_repeated(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "write_safetensors", full_disk)
        with pytest.raises(ModelError, match="No space left on device; make room there"):
            convert(llama, tmp_path)
    assert "model.norm.weight" in Checkpoint(convert(llama, tmp_path))


def test_what_a_killed_conversion_left_is_swept_away(llama: Path, tmp_path: Path) -> None:
    directory = convert(llama, tmp_path / "first")
    leftover = tmp_path / "second" / "models" / f".{directory.name}.partial"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    (leftover / "junk").touch()
    assert not (convert(llama, tmp_path / "second") / "junk").exists()
    assert not leftover.exists()


def test_conversions_at_the_same_time_give_one_whole_directory(llama: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        directories = set(pool.map(lambda _: convert(llama, tmp_path), range(4)))
    assert len(directories) == 1
    assert len(Checkpoint(directories.pop()).names) == len(llama_tensors())


def test_byte_level_tokenizer_splits_digits_and_hides_control_tokens(llama: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(convert(llama, tmp_path))
    ids = tokenizer.encode("the the12<|im_end|>")
    assert [BYTE_TOKENS[token] for token in ids] == ["the", "Ġthe", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "the the12"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


def test_sentencepiece_tokenizer_merges_by_score(gemma3: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(convert(gemma3, tmp_path))
    pieces = [PIECES[token] for token in tokenizer.encode("ab abc\n\né€")]
    # "bc" scores above "ab", and no merge makes "abc" of "a" and "bc" before the better "bc" is made.
    assert pieces == ["<bos>", "ab", PIECES[261], "abc", "\n\n", "é", "<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(tokenizer.encode("ab abc\n\né€")) == "ab abc\n\né€"


def test_a_tokenizer_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    source = write_llama_gguf(tmp_path / "x.gguf")
    raw = source.read_bytes()
    source.write_bytes(raw.replace(b"smollm", b"smolxx"))
    with pytest.raises(ModelError, match=r"'smolxx'.*gpt-2, smollm, .*deepseek-v3, .*can be converted"):
        convert(source, tmp_path)


def test_metadata_reads_as_the_gguf_package_reads_it(llama: Path) -> None:
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(llama).fields.items()}
    ours = GgufFile(llama).metadata
    assert ours == {name: value for name, value in theirs.items() if not name.startswith("GGUF.")}
    assert json.dumps(ours)


class Stages(SilentProgress):
    """Remembers what was begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def stage(self, text: str) -> None:
        self.begun.append(text)


def test_what_cannot_be_served_is_told_before_its_weights_are_converted(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 32}
    scaling["llama.rope.scaling.factor"] = 0.0
    path, stages = write_llama_gguf(tmp_path / "yarn.gguf", extra=scaling), Stages()
    with pytest.raises(ModelError, match=r"yarn\.gguf cannot be served: rope scaling needs a positive number 'factor'"):
        converted_directory(path, tmp_path, stages)
    assert stages.begun == ["reading yarn.gguf"]


def test_more_layers_than_tensors_are_refused_before_anything_is_made_of_them(tmp_path: Path) -> None:
    path = write_gemma3_gguf(tmp_path / "deep.gguf", extra={"gemma3.block_count": 10**9})
    with pytest.raises(ModelError, match=r"block_count says 1000000000 layers, and there are \d+ tensors"):
        convert(path, tmp_path)
