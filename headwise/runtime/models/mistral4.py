"""Mistral 4: DeepSeek-V3's latent attention whose queries grow with their position, and experts chosen by a softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from headwise.errors import ModelError
from headwise.runtime.models.deepseek import Deepseek, parse_latents
from headwise.runtime.models.deepseek_routing import softmax_moe
from headwise.runtime.models.drafting import DraftingNames
from headwise.runtime.models.hf_config import HfConfig, flag, mapping, positive, split_share
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.tempered import TemperedDecoder, temper_of_scaling
from headwise.runtime.models.weight_view import ExpertWeights
from headwise.runtime.models.weights import Weights

ARCHITECTURE = "Mistral4ForCausalLM"

_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
"""Those of Hugging Face's ``Mistral4Config``."""


def parse(config: HfConfig) -> ModelConfig:
    own = {**_DEFAULTS, **config}
    scaling = mapping(config, "rope_parameters") or mapping(config, "rope_scaling") or _DEFAULTS["rope_parameters"]
    in_halves = not flag(own, "rope_interleave", default=True)
    rotated, size = positive(own, "qk_rope_head_dim"), positive(own, "qk_nope_head_dim") + own["qk_rope_head_dim"]
    plain, share = split_share({**own, "rope_parameters": scaling, "rope_interleave": True}, default=rotated / size)
    if int(size * share) != rotated:
        raise ModelError(
            f"config.json: 'partial_rotary_factor' {share:g} of a head's {size} elements is not 'qk_rope_head_dim' "
            f"{rotated}, which are rotated"
        )
    decoder = parse_latents(plain, ARCHITECTURE, softmax_moe)
    mla = decoder.mla
    assert mla is not None, "parsed so"
    temper = temper_of_scaling(scaling, decoder.num_layers)
    return replace(decoder, mla=replace(mla, in_halves=in_halves), temper=temper)


class Mistral4(Deepseek, TemperedDecoder):
    drafting_names: ClassVar[DraftingNames | None] = None

    def view(self, weights: Weights) -> Weights:
        return ExpertWeights(weights)
