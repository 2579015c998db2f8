"""A model of random numbers in Qwen 3.5's architecture, with gated delta-nets: see `random_weights`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.random_weights import RandomFile

ARCHITECTURE = "qwen35"
INTERVAL = 4
"""Of layers with attention."""

CONVOLUTION = 4


@dataclass(frozen=True)
class Sizes:
    """value heads are as many as key heads, and as large"""

    layers: int = 12
    hidden: int = 1024
    size: int = 3584
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 256
    key_heads: int = 16
    key_dim: int = 128

    @property
    def name(self) -> str:
        return f"hybrid-{self.layers}x{self.hidden}"

    def write(self, target: Path, vocabulary_of: Path) -> None:
        """See `random_weights.RandomModel`."""
        file = RandomFile(target, ARCHITECTURE, self.name, vocabulary_of)
        _add_sizes(file.writer, self)
        file.matrix("token_embd.weight", file.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"blk.{layer}."
            if (layer + 1) % INTERVAL:
                _add_delta_net(file, at, self)
            else:
                _add_attention(file, at, self)
            file.norms(self.hidden, f"{at}attn_norm", f"{at}post_attention_norm")
            for name in ("ffn_gate", "ffn_up"):
                file.matrix(f"{at}{name}.weight", self.size, self.hidden)
            file.matrix(f"{at}ffn_down.weight", self.hidden, self.size)
        file.norms(self.hidden, "output_norm")
        file.close()


FULL = Sizes()
TINY = Sizes(layers=4, hidden=128, size=256, heads=4, kv_heads=2, head_dim=64, key_heads=2, key_dim=32)


def _add_attention(file: RandomFile, at: str, sizes: Sizes) -> None:
    file.matrix(f"{at}attn_q.weight", 2 * sizes.heads * sizes.head_dim, sizes.hidden)  # with gates
    for name in ("attn_k", "attn_v"):
        file.matrix(f"{at}{name}.weight", sizes.kv_heads * sizes.head_dim, sizes.hidden)
    file.matrix(f"{at}attn_output.weight", sizes.hidden, sizes.heads * sizes.head_dim)
    file.norms(sizes.head_dim, f"{at}attn_q_norm", f"{at}attn_k_norm")


def _add_delta_net(file: RandomFile, at: str, sizes: Sizes) -> None:
    """States that forget half within some tens of tokens."""
    heads, values = sizes.key_heads, sizes.key_heads * sizes.key_dim
    file.matrix(f"{at}attn_qkv.weight", 3 * values, sizes.hidden)
    file.matrix(f"{at}attn_gate.weight", values, sizes.hidden)
    for name in ("ssm_beta", "ssm_alpha"):
        file.matrix(f"{at}{name}.weight", heads, sizes.hidden)
    file.floats(f"{at}ssm_a", np.full(heads, -0.02))
    file.floats(f"{at}ssm_dt.bias", file.normal(heads))
    file.floats(f"{at}ssm_conv1d.weight", file.normal(3 * values, CONVOLUTION) / np.float32(2))
    file.norms(sizes.key_dim, f"{at}ssm_norm")
    file.matrix(f"{at}ssm_out.weight", sizes.hidden, values)


def _add_sizes(writer: Any, sizes: Sizes) -> None:
    writer.add_context_length(8192)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.size)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(sizes.head_dim // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_state_size(sizes.key_dim)
    writer.add_ssm_group_count(sizes.key_heads)
    writer.add_ssm_time_step_rank(sizes.key_heads)
    writer.add_ssm_inner_size(sizes.key_heads * sizes.key_dim)
    writer.add_uint32(f"{ARCHITECTURE}.full_attention_interval", INTERVAL)
