"""A mixture of experts of random numbers, as a GGUF file: there is none that is small and comes in a package.

What it says means nothing; it takes as long to compute as one that was trained. Its routers send tokens to all experts
alike, and all matrices are Q4_0 but the routers, which are float32, as llama.cpp's converter leaves them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ARCHITECTURE = "qwen3moe"
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 12, 1024, 16, 4, 64
EXPERTS, PER_TOKEN, SIZE = 64, 8, 384
NAME = f"mixture-{EXPERTS}x{SIZE}"
_BLOCK = np.dtype([("scale", "<f2"), ("codes", "u1", (16,))])
"""Of 32 numbers in Q4_0: ``scale * (code - 8)``."""
_DEVIATION = 4.6
"""Of codes that are drawn evenly from 16."""


def write_mixture(target: Path, vocabulary_of: Path) -> None:
    """vocabulary_of: a GGUF file whose tokenizer it gets"""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

    source = GGUFReader(vocabulary_of)
    writer = GGUFWriter(target, ARCHITECTURE)
    _add_sizes(writer)
    for name, field in source.fields.items():
        if name.startswith("tokenizer.") and "chat_template" not in name:
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    draw = np.random.default_rng(0)

    def matrix(name: str, *shape: int) -> None:
        data = _q4_0(draw, shape)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.Q4_0)

    def floats(name: str, values: NDArray[np.float32]) -> None:
        writer.add_tensor(name, values)

    matrix("token_embd.weight", len(source.fields["tokenizer.ggml.tokens"].data), HIDDEN)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        matrix(f"{at}attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        for name in ("attn_k", "attn_v"):
            matrix(f"{at}{name}.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{at}attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        for name in ("attn_q_norm", "attn_k_norm"):
            floats(f"{at}{name}.weight", np.ones(HEAD_DIM, np.float32))
        for name in ("attn_norm", "ffn_norm"):
            floats(f"{at}{name}.weight", np.ones(HIDDEN, np.float32))
        router = draw.standard_normal((EXPERTS, HIDDEN), np.float32) / np.float32(np.sqrt(HIDDEN))
        floats(f"{at}ffn_gate_inp.weight", router)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            matrix(f"{at}{name}.weight", EXPERTS, SIZE, HIDDEN)
        matrix(f"{at}ffn_down_exps.weight", EXPERTS, HIDDEN, SIZE)
    floats("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any) -> None:
    writer.add_name(NAME)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(SIZE * PER_TOKEN)
    writer.add_expert_feed_forward_length(SIZE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(PER_TOKEN)


def _q4_0(draw: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Numbers whose products with normed rows are about 1, as bytes ``[..., inputs / 32 * 18]``."""
    blocks = np.empty((*shape[:-1], shape[-1] // 32), _BLOCK)
    blocks["scale"] = 1 / (_DEVIATION * np.sqrt(shape[-1]))
    blocks["codes"] = draw.integers(0, 256, blocks["codes"].shape, np.uint8)
    return blocks.view(np.uint8)
