"""A mixture of experts of random numbers, in Qwen 3's architecture: see `random_weights`.

Its routers, which are float32 as llama.cpp's converter leaves them, send tokens to all experts alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.random_weights import RandomFile

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

    def write(self, target: Path, vocabulary_of: Path) -> None:
        """See `random_weights.RandomModel`."""
        file = RandomFile(target, ARCHITECTURE, self.name, vocabulary_of)
        _add_sizes(file.writer, self)
        file.matrix("token_embd.weight", file.vocabulary, self.hidden)
        for layer in range(self.layers):
            _add_layer(file, f"blk.{layer}.", self)
        file.norms(self.hidden, "output_norm")
        file.close()


FULL, TINY = Sizes(), Sizes(layers=2, hidden=128, experts=6, per_token=2, size=64)


def _add_layer(file: RandomFile, at: str, sizes: Sizes) -> None:
    hidden = sizes.hidden
    file.matrix(f"{at}attn_q.weight", HEADS * HEAD_DIM, hidden)
    for name in ("attn_k", "attn_v"):
        file.matrix(f"{at}{name}.weight", KV_HEADS * HEAD_DIM, hidden)
    file.matrix(f"{at}attn_output.weight", hidden, HEADS * HEAD_DIM)
    file.norms(HEAD_DIM, f"{at}attn_q_norm", f"{at}attn_k_norm")
    file.norms(hidden, f"{at}attn_norm", f"{at}ffn_norm")
    file.floats(f"{at}ffn_gate_inp.weight", file.normal(sizes.experts, hidden) / np.float32(np.sqrt(hidden)))
    for name in ("ffn_gate_exps", "ffn_up_exps"):
        file.matrix(f"{at}{name}.weight", sizes.experts, sizes.size, hidden)
    file.matrix(f"{at}ffn_down_exps.weight", sizes.experts, hidden, sizes.size)


def _add_sizes(writer: Any, sizes: Sizes) -> None:
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
