"""EXAONE 4 and K-EXAONE: where some layers have windows, the others rotate nothing. K-EXAONE has experts.

EXAONE 4 norms what attention and MLP add, and not what they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.deepseek_routing import RoutedFields, ungrouped_moe
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, named_layer_types, positive
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.olmo import NORMS_BEHIND
from headwise.runtime.models.qwen import Qwen3
from headwise.runtime.models.windows import FULL, full_every, rotated_in_windows

DENSE, MOE = "Exaone4ForCausalLM", "ExaoneMoeForCausalLM"
"""The second before transformers had the model."""

_MOE_DEFAULTS = {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
"""Those of Hugging Face's ``ExaoneMoeConfig``."""
_FIELDS = RoutedFields("num_experts", shared="num_shared_experts")


def parse(config: HfConfig) -> ModelConfig:
    return _parse(config, DENSE)


def parse_moe(config: HfConfig) -> ModelConfig:
    decoder = _parse(config, MOE)
    return replace(decoder, moe=ungrouped_moe({**_MOE_DEFAULTS, **config}, decoder.num_layers, _FIELDS))


def _parse(config: HfConfig, architecture: str) -> ModelConfig:
    own = {"rms_norm_eps": 1e-5, "sliding_window": 4096, **config}
    window = 0 if own["sliding_window"] is None else positive(own, "sliding_window")
    if not window:
        return decoder_config(own, architecture, layer_types=named_layer_types(own, lambda layer: FULL))
    every = 4 if own.get("layer_types") else positive(own, "sliding_window_pattern", default=4)
    return decoder_config(
        own, architecture, layer_types=full_every(own, every), ropes=rotated_in_windows(own), window=window
    )


class Exaone4(Decoder):
    norm_names: ClassVar[Mapping[str, str]] = NORMS_BEHIND


class ExaoneMoe(GroupedMoeDecoder):
    """Routed and shared experts for the MLP in most layers, and norms before attention and MLP."""

    norm_names: ClassVar[Mapping[str, str]] = Qwen3.norm_names
    correction_name: ClassVar[str] = "e_score_correction_bias"
