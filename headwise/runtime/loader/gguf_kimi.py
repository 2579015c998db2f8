"""GGUF's Kimi-Linear: Kimi Delta Attention in most layers, latent attention in the others, experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import Architecture, Config, experts_at
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import count, integer
from headwise.runtime.loader.gguf_latents import LATENT_NAMES, up_projections
from headwise.runtime.loader.gguf_part import Part, made_of
from headwise.runtime.loader.gguf_routing import corrected_feed_forward, sigmoid_routing
from headwise.runtime.loader.gguf_states import check_size, decay_logarithms, of_some_layers, reshaped
from headwise.runtime.models.model_config import ModelConfig

_NAME = "kimi-linear"
_CONVOLUTIONS = {f"ssm_conv1d_{part}.weight": f"{part}_conv1d.weight" for part in "qkv"}
_PROJECTED = {
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_norm": "self_attn.o_norm",
}


def _config(source: GgufFile) -> dict[str, Any]:
    heads, rotated = (integer(source, f"{_NAME}.{key}") for key in ("attention.head_count", "rope.dimension_count"))
    size = integer(source, f"{_NAME}.attention.key_length_mla")
    if size <= rotated:
        raise ModelError(f"{source.path}: {_NAME} has heads of {size} elements, of which {rotated} are rotated")
    kept = list(enumerate(of_some_layers(source, f"{_NAME}.attention.head_count_kv", "with states"), 1))
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_act": "silu",
        "head_dim": None,
        "num_key_value_heads": heads,
        "q_lora_rank": source.get(f"{_NAME}.attention.q_lora_rank") or None,
        "kv_lora_rank": integer(source, f"{_NAME}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": integer(source, f"{_NAME}.attention.value_length_mla"),
        "linear_attn_config": {
            "kda_layers": [layer for layer, found in kept if not found],
            "full_attn_layers": [layer for layer, found in kept if found],
            "num_heads": heads,
            "head_dim": integer(source, f"{_NAME}.kda.head_dim"),
            "short_conv_kernel_size": integer(source, f"{_NAME}.ssm.conv_kernel"),
        },
        "first_k_dense_replace": count(source, f"{_NAME}.leading_dense_block_count"),
        "num_local_experts": integer(source, f"{_NAME}.expert_count"),
        "n_shared_experts": count(source, f"{_NAME}.expert_shared_count"),
        # llama.cpp divides weights by their sum, whatever a file says of that.
        **sigmoid_routing(source, _NAME),
        "norm_topk_prob": True,
    }


# ---- weights ----


def _made(source: GgufFile, config: Config) -> Iterable[Part]:
    """Up-projections of latents, and what of states has another shape, or is other numbers, in GGUF; sizes of the
    projections around states are checked on the way."""
    own, hidden = config["linear_attn_config"], config["hidden_size"]
    yield from up_projections(source, config, [layer - 1 for layer in own["full_attn_layers"]])
    heads, dim, width = own["num_heads"], own["head_dim"], own["short_conv_kernel_size"]
    inner = heads * dim
    shapes = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v"), (inner, hidden)),
        **dict.fromkeys(("ssm_f_a", "ssm_g_a"), (dim, hidden)),
        **dict.fromkeys(("ssm_f_b", "ssm_g_b"), (inner, dim)),
        "ssm_beta": (heads, hidden),
        "attn_output": (hidden, inner),
        "ssm_norm": (dim,),
    }
    for layer in own["kda_layers"]:
        at, hf = f"blk.{layer - 1}.", f"model.layers.{layer - 1}.self_attn."
        for stem, shape in shapes.items():
            check_size(source, f"{at}{stem}.weight", shape)
        for name, convolution in _CONVOLUTIONS.items():
            yield reshaped(source, f"{at}{name}", f"{hf}{convolution}", (inner, 1, width))
        decays = f"{at}ssm_a"
        check_size(source, decays, (heads,))
        yield made_of(source, f"{hf}A_log", (heads,), (decays,), partial(decay_logarithms, source, decays))
        yield reshaped(source, f"{at}ssm_dt.bias", f"{hf}dt_bias", (inner,))


def _needed(config: ModelConfig, layer: int) -> tuple[str, ...]:
    assert config.mla is not None, "parsed so"
    assert config.states is not None, "parsed so"
    fed = ("attn_norm", "attn_output", "ffn_norm", *corrected_feed_forward(config, layer))
    if layer in config.states.layers:
        return ("attn_q", "attn_k", "attn_v", *_PROJECTED, *_CONVOLUTIONS, "ssm_a", "ssm_dt.bias", *fed)
    queries = ("attn_q",) if config.mla.q_rank is None else ("attn_q_a", "attn_q_a_norm", "attn_q_b")
    return (*queries, "attn_kv_a_mqa", "attn_kv_a_norm", *fed)


KIMI: Mapping[str, Architecture] = {
    _NAME: Architecture(
        _config, {**LATENT_NAMES, **_PROJECTED}, _needed, experts=experts_at("mlp.experts"), made=_made
    ),
}
