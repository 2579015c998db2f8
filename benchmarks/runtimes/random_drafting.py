"""A model of random numbers with a layer that drafts, in MiMo's architecture, as a directory.

What attention and MLPs add to the residual stream is so little that a token's successor hangs on that token alone: so a
layer that drafts, which is given the next token, can be made to be right about as often as asked. It takes as long to
compute as a model that was trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.bfloat16 import to_bits
from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

Floats = NDArray[np.float32]

KV_HEADS, HEAD_DIM = 2, 64
LITTLE = 1e-3
"""What layers add, of what they were given."""
CONFIGURATION = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""What vLLM needs besides, as transformers does not know the architecture."""

TRIED = 768
"""Tokens by which it is found how much noise leaves a share of drafts right."""
FINDING = 12
"""Halvings."""


@dataclass(frozen=True)
class Sizes:
    layers: int = 20
    hidden: int = 1024
    size: int = 4096

    @property
    def name(self) -> str:
        return f"drafting-{self.layers}x{self.hidden}x{self.size}"

    def config(self, vocabulary: int) -> dict[str, object]:
        return {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.size,
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": self.hidden // HEAD_DIM,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "attention_bias": True,
            "use_sliding_window": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "eos_token_id": None,
            "pad_token_id": None,
            "torch_dtype": "bfloat16",
        }

    def shapes(self, vocabulary: int) -> dict[str, tuple[int, ...]]:
        """Of all weights, by name, those of the layer that drafts last."""
        hidden = self.hidden
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocabulary, hidden),
            "lm_head.weight": (vocabulary, hidden),
            "model.norm.weight": (hidden,),
        }
        drafting = "model.mtp_layers.0."
        for at in (*(f"model.layers.{layer}." for layer in range(self.layers)), drafting):
            found |= self._layer(at)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            found[f"{drafting}{name}.weight"] = (hidden,)
        found[f"{drafting}input_proj.weight"] = (hidden, 2 * hidden)
        return found

    def _layer(self, at: str) -> dict[str, tuple[int, ...]]:
        hidden, found = self.hidden, dict[str, tuple[int, ...]]()
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = (hidden,)
        for name, rows in (("q", hidden), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            found[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            found[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        found[f"{at}self_attn.o_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            found[f"{at}mlp.{name}_proj.weight"] = (self.size, hidden)
        found[f"{at}mlp.down_proj.weight"] = (hidden, self.size)
        return found


FULL, TINY = Sizes(), Sizes(layers=2, hidden=128, size=256)


def write(sizes: Sizes, right: float, target: Path, tokenizer_of: Path) -> None:
    """A model of which the share ``right`` of drafts is right, with another one's tokenizer, in bfloat16."""
    for path in tokenizer_of.glob("tokenizer*.json"):
        shutil.copyfile(path, target / path.name)
    vocabulary = int(json.loads((tokenizer_of / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    (target / "config.json").write_text(json.dumps(sizes.config(vocabulary)), encoding="utf-8")
    (target / "configuration_mimo.py").write_text(CONFIGURATION, encoding="utf-8")
    shapes = sizes.shapes(vocabulary)
    forms = {name: TensorForm("BF16", shape) for name, shape in shapes.items()}
    write_safetensors(target / "model.safetensors", forms, map(to_bits, _weights(shapes, right)))


def _weights(shapes: dict[str, tuple[int, ...]], right: float) -> Iterator[Floats]:
    draw, tables = np.random.default_rng(0), list[Floats]()
    for name, shape in shapes.items():
        if name.endswith(("norm.weight", "layernorm.weight")):
            yield np.ones(shape, np.float32)
        elif name.endswith("bias"):
            yield np.zeros(shape, np.float32)
        elif name.endswith("input_proj.weight"):
            yield _join(tables[0], tables[1], draw, right)
        else:
            values = draw.standard_normal(shape, np.float32)
            if len(tables) < 2:
                tables.append(values)
            is_added = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = 1.0 if name.endswith("embed_tokens.weight") else (LITTLE if is_added else 1.0) / shape[1] ** 0.5
            yield values * np.float32(scale)


def _join(embeddings: Floats, heads: Floats, draw: np.random.Generator, right: float) -> Floats:
    """The projection of ``[hidden state | embedding]``: the latter as it is, and of the former as much noise as leaves
    that share of ``TRIED`` drafts right."""
    hidden = embeddings.shape[1]
    noise = draw.standard_normal((hidden, hidden), np.float32) / np.float32(hidden**0.5)
    tokens = draw.integers(0, len(embeddings), (2, TRIED))
    known, before = _normed(embeddings[tokens[0]]), _normed(embeddings[tokens[1]]) @ noise.T
    expected = (known @ heads.T).argmax(axis=1)
    low, high = 0.0, 16.0
    for _ in range(FINDING):
        middle = (low + high) / 2
        found = ((known + np.float32(middle) * before) @ heads.T).argmax(axis=1)
        low, high = (middle, high) if float((found == expected).mean()) > right else (low, middle)
    return np.concatenate([np.float32(low) * noise, np.eye(hidden, dtype=np.float32)], axis=1)


def _normed(rows: Floats) -> Floats:
    normed: Floats = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
    return normed
