"""A model of random numbers in Granite 4's architecture, with state space models: see `random_weights`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.random_weights import RandomFile

ARCHITECTURE = "granitehybrid"
INTERVAL = 4
"""Of layers with attention."""

CONVOLUTION = 4


@dataclass(frozen=True)
class Sizes:
    """state_heads, state_head_dim, state: of a state space model, whose heads are one group"""

    layers: int = 12
    hidden: int = 1024
    size: int = 3584
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    state_heads: int = 32
    state_head_dim: int = 64
    state: int = 128

    @property
    def name(self) -> str:
        return f"state-space-{self.layers}x{self.hidden}"

    @property
    def inner(self) -> int:
        return self.state_heads * self.state_head_dim

    def has_attention(self, layer: int) -> bool:
        return (layer + 1) % INTERVAL == 0

    def write(self, target: Path, vocabulary_of: Path) -> None:
        """See `random_weights.RandomModel`."""
        file = RandomFile(target, ARCHITECTURE, self.name, vocabulary_of)
        _add_sizes(file.writer, self, file.vocabulary)
        file.matrix("token_embd.weight", file.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"blk.{layer}."
            if self.has_attention(layer):
                _add_attention(file, at, self)
            else:
                _add_state_space(file, at, self)
            file.norms(self.hidden, f"{at}attn_norm", f"{at}ffn_norm")
            for name in ("ffn_gate", "ffn_up"):
                file.matrix(f"{at}{name}.weight", self.size, self.hidden)
            file.matrix(f"{at}ffn_down.weight", self.hidden, self.size)
        file.norms(self.hidden, "output_norm")
        file.close()


FULL = Sizes()
TINY = Sizes(
    layers=4, hidden=128, size=256, heads=4, kv_heads=2, head_dim=32, state_heads=8, state_head_dim=32, state=32
)


def _add_attention(file: RandomFile, at: str, sizes: Sizes) -> None:
    file.matrix(f"{at}attn_q.weight", sizes.heads * sizes.head_dim, sizes.hidden)
    for name in ("attn_k", "attn_v"):
        file.matrix(f"{at}{name}.weight", sizes.kv_heads * sizes.head_dim, sizes.hidden)
    file.matrix(f"{at}attn_output.weight", sizes.hidden, sizes.heads * sizes.head_dim)


def _add_state_space(file: RandomFile, at: str, sizes: Sizes) -> None:
    """States that forget half within some tens of tokens."""
    heads, channels = sizes.state_heads, sizes.inner + 2 * sizes.state
    file.matrix(f"{at}ssm_in.weight", sizes.inner + channels + heads, sizes.hidden)
    file.floats(f"{at}ssm_a", np.full((heads, 1), -0.02, np.float32))
    file.floats(f"{at}ssm_d", np.ones((heads, 1), np.float32))
    file.floats(f"{at}ssm_dt.bias", file.normal(heads))
    file.floats(f"{at}ssm_conv1d.weight", file.normal(channels, CONVOLUTION) / np.float32(2))
    file.floats(f"{at}ssm_conv1d.bias", np.zeros(channels, np.float32))
    file.floats(f"{at}ssm_norm.weight", np.ones((1, sizes.inner), np.float32))
    file.matrix(f"{at}ssm_out.weight", sizes.hidden, sizes.inner)


def _add_sizes(writer: Any, sizes: Sizes, vocabulary: int) -> None:
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(8192)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.size)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv([sizes.kv_heads * sizes.has_attention(layer) for layer in range(sizes.layers)])
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_scaling_finetuned(False)
    writer.add_attention_scale(1 / sizes.head_dim)
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_state_size(sizes.state)
    writer.add_ssm_group_count(1)
    writer.add_ssm_time_step_rank(sizes.state_heads)
    writer.add_ssm_inner_size(sizes.inner)
