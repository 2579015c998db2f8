"""Published models, at their published sizes, come back from the keys that GGUF has for them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.tiny_gguf_keys import layers_of
from support.tiny_ggufs import keys_of

from headwise.runtime.loader.gguf_config import build_config
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.models.gemma4_config import Gemma4Config
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import model_config
from headwise.runtime.models.rope import inverse_frequencies, rotation_scale

PUBLISHED = Path(__file__).parents[2] / "support" / "published"
ARCHITECTURES = {
    **dict.fromkeys(("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2"), "deepseek2"),
    "deepseek-v3.2": "deepseek32",
    "ernie-4.5-21b-a3b": "ernie4_5-moe",
    **dict.fromkeys(("gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e2b", "gemma-4-e4b"), "gemma4"),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "gpt-oss"),
    **dict.fromkeys(("granite-3.3-8b", "granite-4.0-micro"), "granite"),
    **dict.fromkeys(("granite-4.0-h-tiny", "granite-4.0-h-small"), "granitehybrid"),
    "kimi-linear-48b-a3b": "kimi-linear",
    **dict.fromkeys(("llama-4-scout", "llama-4-maverick"), "llama4"),
    "mixtral-8x7b": "llama",
    "nemotron-3-nano-30b-a3b": "nemotron_h_moe",
    "nemotron-nano-9b-v2": "nemotron_h",
    "qwen3-30b-a3b": "qwen3moe",
    "qwen3-next-80b-a3b": "qwen3next",
    "qwen3.5-27b": "qwen35",
    **dict.fromkeys(("qwen3.5-35b-a3b", "qwen3.5-397b-a17b"), "qwen35moe"),
}
NOT_GEOMETRY = ("ropes", "eos_token_ids", "bos_token_id", "attention_scale")
NOT_TOLD = {
    **dict.fromkeys(("gemma-4-26b-a4b", "gemma-4-31b"), "both_ways"),
    **dict.fromkeys(("granite-4.0-h-tiny", "granite-4.0-h-small"), "max_position"),
    "granite-4.0-micro": "architecture",
}
"""Fields that files do not tell: that images see both ways, how long texts of models may be that rotate nothing, and
which of two names for one and the same a model was published by."""


def flat(published: dict[str, Any]) -> dict[str, Any]:
    """A published config as converters read it: the text's part, with the fields of its rotary embedding on top."""
    found = {**published, **published.get("text_config", {})}
    ropes = found.get("rope_parameters") or {}
    found = {**{key: ropes[key] for key in ("rope_theta", "partial_rotary_factor") if key in ropes}, **found}
    if found.get("num_global_key_value_heads") is None:
        found["num_global_key_value_heads"] = found.get("num_key_value_heads")
    return found


def write_header(path: Path, architecture: str, config: dict[str, Any], model: ModelConfig) -> GgufFile:
    """A file with all keys, and room for the tensors that the config hangs on."""
    scaling, freqs = config.get("rope_scaling") or {}, None
    if scaling.get("rope_type") == "llama3":
        inverse = inverse_frequencies(model.ropes[0], model.head_dim)
        plain = config["rope_theta"] ** -(np.arange(0, model.head_dim, 2) / model.head_dim)
        freqs, config = (plain / inverse).astype(np.float32), {**config, "rope_scaling": None}
    if isinstance(model, Gemma4Config):
        pairs = config["global_head_dim"] // 2
        freqs = np.where(np.arange(pairs) < pairs // 4, np.float32(1), np.float32(1e30))
    layers = range(layers_of(config))
    shapes = {"token_embd.weight": (model.vocab_size, model.hidden_size)}
    shapes |= {} if model.tie_embeddings else {"output.weight": (1, 1)}
    shapes |= {f"blk.{layer}.attn_norm.weight": (1,) for layer in layers}
    shapes |= {f"blk.{layer}.ffn_gate_inp.weight": (1, 1) for layer in (model.moe.layers if model.moe else ())}
    shapes |= {"blk.0.attn_q.bias": (1,)} if model.attention_bias else {}
    if isinstance(model, Gemma4Config):
        shapes |= {f"blk.{at}.attn_v.weight": (1, 1) for at in layers if not model.values_are_keys[at]}
    writer = gguf.GGUFWriter(path, architecture)
    keys_of(writer, config, architecture)
    if freqs is not None:
        writer.add_tensor_info("rope_freqs.weight", freqs.shape, freqs.dtype, freqs.nbytes)
    for name, shape in shapes.items():
        writer.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.seek(-file.tell() % 32, 1)
        file.write(b"" if freqs is None else freqs.tobytes())
        file.truncate(file.tell() + 4 * sum(int(np.prod(shape)) + 32 for shape in shapes.values()))  # nothing on disk
    return GgufFile(path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_published_model_comes_back_from_its_keys(name: str, tmp_path: Path) -> None:
    published = json.loads((PUBLISHED / f"{name}.json").read_text())
    expected = model_config(published)
    found = model_config(
        build_config(write_header(tmp_path / "x.gguf", ARCHITECTURES[name], flat(published), expected))
    )
    for field in fields(expected):
        if field.name not in (*NOT_GEOMETRY, NOT_TOLD.get(name)):
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert found.attention_scale == pytest.approx(expected.attention_scale)
    for layer, (ours, theirs) in enumerate(zip(found.ropes, expected.ropes, strict=True)):
        dim = expected.heads_of(layer).head_dim
        np.testing.assert_allclose(inverse_frequencies(ours, dim), inverse_frequencies(theirs, dim), rtol=1e-5)
        scales = [rotation_scale(rope, dim) for rope in (ours, theirs)]
        assert (scales[0] is None) == (scales[1] is None)
        np.testing.assert_allclose(*(1.0 if scale is None else scale for scale in scales), rtol=1e-6)
