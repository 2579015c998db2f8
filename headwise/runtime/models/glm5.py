"""GLM-5: DeepSeek-V3.2's layers, whose indexers turn neighbours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.base import ModelConfig, RopeConfig
from headwise.runtime.models.deepseek_routing import ungrouped_moe
from headwise.runtime.models.deepseek_v32 import DeepseekV32, parse_indexed
from headwise.runtime.models.hf_config import HfConfig, integer
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


def parse(config: HfConfig) -> ModelConfig:
    _check_indexers(config)
    return parse_indexed({**_DEFAULTS, **config}, ARCHITECTURE, ungrouped_moe)


def _check_indexers(config: HfConfig) -> None:
    """Raise ModelError if layers are to go by what an earlier one's indexer has chosen."""
    for key, own in (("indexer_types", "full"), ("index_topk_pattern", "F")):
        kinds = config.get(key)
        if kinds is not None and (
            not isinstance(kinds, list | str) or {*map(shown, kinds)} - {shown(own), shown("full")}
        ):
            raise ModelError(
                f"config.json: {key!r} is {shown(kinds)}; {ARCHITECTURE} is served with an indexer in every layer"
            )
    if integer(config, "index_topk_freq", 1) > 1 and config.get("indexer_types") is None:
        raise ModelError(
            f"config.json: 'index_topk_freq' is {config['index_topk_freq']}; {ARCHITECTURE} is served with an indexer "
            "in every layer"
        )


class GlmMoeDsa(DeepseekV32):
    """DeepSeek-V3.2 whose indexers rotate neighbours ``(2i, 2i + 1)``, as its latents do."""

    def index_order(self) -> NDArray[np.int64]:
        rotated, dim = self.mla.rotated, self.indexer.head_dim
        turning = pairs_first(RopeConfig(1.0), rotated, of_neighbours=True)
        assert turning is not None, "neighbours are never in order"
        return np.concatenate([turning, np.arange(rotated, dim)])
