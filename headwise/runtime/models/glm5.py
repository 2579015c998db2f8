"""GLM-5: DeepSeek-V3.2's layers, whose indexers turn neighbours, and several of which may share one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.deepseek_routing import ungrouped_moe
from headwise.runtime.models.deepseek_v32 import DeepseekV32, after_the_first, parse_indexed, shared_indexers
from headwise.runtime.models.hf_config import HfConfig, integer, positive
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.values import shown

ARCHITECTURE = "GlmMoeDsaForCausalLM"

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 3,
    "index_n_heads": 32,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
}
"""Those of Hugging Face's ``GlmMoeDsaConfig``."""
_KINDS = {"F": "full", "S": "shared"}


def parse(config: HfConfig) -> ModelConfig:
    own = {**_DEFAULTS, **config}
    return parse_indexed(own, ARCHITECTURE, ungrouped_moe, lambda num_layers: _shared(own, num_layers))


def _shared(config: HfConfig, num_layers: int) -> frozenset[int]:
    """Layers without an indexer: as they are named, by a pattern, or but every so many-th."""
    named, pattern = shared_indexers(config, num_layers), config.get("index_topk_pattern")
    if named is not None:
        return named
    if pattern is not None:
        if not isinstance(pattern, str | list) or not all(letter in ("F", "S") for letter in pattern):
            raise ModelError(
                f"config.json: 'index_topk_pattern' must be an F or S for each layer, got {shown(pattern)}"
            )
        return shared_indexers({"indexer_types": [_KINDS[letter] for letter in pattern]}, num_layers) or frozenset()
    every, offset = positive(config, "index_topk_freq", default=1), integer(config, "index_skip_topk_offset", 2)
    layers = range(num_layers)
    return after_the_first(frozenset(layer for layer in layers if max(layer - offset + 1, 0) % every))


class GlmMoeDsa(DeepseekV32):
    """DeepSeek-V3.2 whose indexers rotate neighbours ``(2i, 2i + 1)``, as its latents do."""

    def index_order(self) -> NDArray[np.int64]:
        rotated, dim = self.mla.rotated, self.indexer.head_dim
        turning = pairs_first(RopeConfig(1.0), rotated, of_neighbours=True)
        assert turning is not None, "neighbours are never in order"
        return np.concatenate([turning, np.arange(rotated, dim)])
