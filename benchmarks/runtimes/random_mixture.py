"""A mixture of experts of random numbers, as a GGUF file: there is none that is small and comes in a package.

What it says means nothing; it takes as long to compute as one that was trained. Its routers send tokens to all experts
alike, and all matrices are Q4_0 but the routers, which are float32, as llama.cpp's converter leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ARCHITECTURE = "qwen3moe"
HEADS, KV_HEADS, HEAD_DIM = 16, 4, 64


@dataclass(frozen=True)
class Sizes:
    layers: int = 12
    hidden: int = 1024
    experts: int = 64
    per_token: int = 8
    size: int = 384

    @property
    def name(self) -> str:
        return f"mixture-{self.layers}x{self.experts}x{self.size}"


FULL, TINY = Sizes(), Sizes(layers=2, hidden=128, experts=6, per_token=2, size=64)
_BLOCK = np.dtype([("scale", "<f2"), ("codes", "u1", (16,))])
"""Of 32 numbers in Q4_0: ``scale * (code - 8)``."""
_DEVIATION = 4.6
"""Of codes that are drawn evenly from 16."""


def write_mixture(target: Path, sizes: Sizes, vocabulary_of: Path) -> None:
    """vocabulary_of: a GGUF file whose tokenizer it gets"""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

    source = GGUFReader(vocabulary_of)
    writer = GGUFWriter(target, ARCHITECTURE)
    _add_sizes(writer, sizes)
    for name, field in source.fields.items():
        if name.startswith("tokenizer.") and "chat_template" not in name:
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    draw, hidden = np.random.default_rng(0), sizes.hidden

    def matrix(name: str, *shape: int) -> None:
        data = _q4_0(draw, shape)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.Q4_0)

    def floats(name: str, values: NDArray[np.float32]) -> None:
        writer.add_tensor(name, values)

    matrix("token_embd.weight", len(source.fields["tokenizer.ggml.tokens"].data), hidden)
    for layer in range(sizes.layers):
        at = f"blk.{layer}."
        matrix(f"{at}attn_q.weight", HEADS * HEAD_DIM, hidden)
        for name in ("attn_k", "attn_v"):
            matrix(f"{at}{name}.weight", KV_HEADS * HEAD_DIM, hidden)
        matrix(f"{at}attn_output.weight", hidden, HEADS * HEAD_DIM)
        for name in ("attn_q_norm", "attn_k_norm"):
            floats(f"{at}{name}.weight", np.ones(HEAD_DIM, np.float32))
        for name in ("attn_norm", "ffn_norm"):
            floats(f"{at}{name}.weight", np.ones(hidden, np.float32))
        router = draw.standard_normal((sizes.experts, hidden), np.float32) / np.float32(np.sqrt(hidden))
        floats(f"{at}ffn_gate_inp.weight", router)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            matrix(f"{at}{name}.weight", sizes.experts, sizes.size, hidden)
        matrix(f"{at}ffn_down_exps.weight", sizes.experts, hidden, sizes.size)
    floats("output_norm.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, sizes: Sizes) -> None:
    writer.add_name(sizes.name)
    writer.add_context_length(8192)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.size * sizes.per_token)
    writer.add_expert_feed_forward_length(sizes.size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(sizes.experts)
    writer.add_expert_used_count(sizes.per_token)


def _q4_0(draw: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Numbers whose products with normed rows are about 1, as bytes ``[..., inputs / 32 * 18]``."""
    blocks = np.empty((*shape[:-1], shape[-1] // 32), _BLOCK)
    blocks["scale"] = 1 / (_DEVIATION * np.sqrt(shape[-1]))
    blocks["codes"] = draw.integers(0, 256, blocks["codes"].shape, np.uint8)
    return blocks.view(np.uint8)
