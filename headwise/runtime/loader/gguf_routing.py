"""What GGUF says of experts that are chosen as DeepSeek-V3 does: by sigmoids, to which a correction is added."""

from __future__ import annotations

from typing import Any

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import SHARED_EXPERT, feed_forward
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer, shortest
from headwise.runtime.models.model_config import ModelConfig

SOFTMAX, SIGMOID = 1, 2
"""What GGUF calls the functions that make scores of a router's results."""
CORRECTION = "exp_probs_b.bias"


def sigmoid_routing(source: GgufFile, name: str) -> dict[str, Any]:
    """Fields of ``config.json`` that models with such experts share; raises `ModelError` on another function."""
    # Files of before there was the key have models with sigmoids only.
    function = source.get(f"{name}.expert_gating_func", 0) or SIGMOID
    if function != SIGMOID:
        raise ModelError(f"{source.path}: {name}.expert_gating_func must be sigmoid ({SIGMOID}), got {function!r}")
    groups = count(source, f"{name}.expert_group_count") or 1
    return {
        "num_experts_per_tok": integer(source, f"{name}.expert_used_count"),
        "moe_intermediate_size": integer(source, f"{name}.expert_feed_forward_length"),
        "routed_scaling_factor": weights_scale(source, name),
        "norm_topk_prob": bool(source.get(f"{name}.expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": count(source, f"{name}.expert_group_used_count") or groups,
    }


def weights_scale(source: GgufFile, name: str) -> float:
    """What experts' weights are multiplied with; 0 says the same as no key."""
    return shortest(float(source.get(f"{name}.expert_weights_scale", 0.0)) or 1.0)


def corrected_feed_forward(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """What a layer needs for its MLP, or its experts, with the correction and experts that all tokens go through."""
    shared = SHARED_EXPERT if config.moe is not None and config.moe.num_shared_experts else ()
    return feed_forward(config, layer, (*shared, CORRECTION))
