"""Reads the ``config.json`` of a Hunyuan 4 (HY V4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise.kernels.fused import SILU_LIMIT
from headwise.runtime.models.deepseek_routing import ungrouped_moe
from headwise.runtime.models.deepseek_v32 import parse_indexed, shared_indexers
from headwise.runtime.models.hf_config import HfConfig, check_served, number, positive
from headwise.runtime.models.hyper import HyperModelConfig
from headwise.runtime.models.identity_hyper import IdentityHyperConfig

ARCHITECTURE = "HYV4ForCausalLM"

_MOST_STREAMS = 64
_SERVED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "tie_word_embeddings": (None, False),
    "swiglu_limit": (None, SILU_LIMIT),
    "gated_mla": (None, True),
    "gating_type": (None, "elementwise"),
    "learnable_sink": (None, True),
    "enable_ihc": (None, True),
    "rope_interleave": (None, False),
}
_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "moe_intermediate_size": 768,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "index_n_heads": 16,
}
"""Those of Hugging Face's ``HYV4Config``."""
_SPARSE_KINDS = ("indexed_attention", "deepseek_sparse_attention")
"""What ``layer_types`` may call layers, all of which are alike."""


@dataclass(frozen=True)
class HyV4Config(HyperModelConfig):
    """`IdentityHyperConfig` says how its layers are connected."""

    @property
    def side_elements(self) -> int:
        """See `HyperModelConfig.side_elements`; and of heads' gates."""
        assert self.mla is not None, "parsed so"
        return super().side_elements + self.num_layers * self.num_heads * self.mla.value_dim * self.hidden_size


def parse(config: HfConfig) -> HyV4Config:
    check_served(config, _SERVED_VALUES)
    own = {**_DEFAULTS, **config, "rope_interleave": True}  # a row's order is told by `MlaConfig.in_halves`
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and {*map(str, kinds)} <= {*_SPARSE_KINDS}:
        own["layer_types"] = ["indexed_attention"] * len(kinds)
    decoder = parse_indexed(own, ARCHITECTURE, ungrouped_moe, lambda num_layers: _shared(own, num_layers))
    mla = decoder.mla
    assert mla is not None, "parsed so"
    fields = {**vars(decoder), "mla": mla.turning_halves(), "sink_logits": True}
    return HyV4Config(**fields, hyper=_hyper(own, decoder.rms_norm_eps))


def _shared(config: HfConfig, num_layers: int) -> frozenset[int]:
    """Layers without an indexer: as they are named, or all but the first and every fourth from the second one on."""
    named = shared_indexers(config, num_layers)
    return frozenset(layer for layer in range(1, num_layers) if (layer - 1) % 4) if named is None else named


def _hyper(config: HfConfig, norm_eps: float) -> IdentityHyperConfig:
    return IdentityHyperConfig(
        streams=positive(config, "hc_mult", default=4, most=_MOST_STREAMS),
        iterations=0,
        eps=number(config, "hc_eps", 1e-6),
        norm_eps=norm_eps,
        magnitude=number(config, "hc_magnitude", 2.0),
    )
