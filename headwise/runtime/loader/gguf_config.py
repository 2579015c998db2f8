"""A GGUF file's metadata as a Hugging Face ``config.json``, and the names its tensors have there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_file import GgufFile

# What Meta published for Llama 3.1 to 3.3. GGUF keeps only the frequency factors that follow from it.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_PATTERN = 6
_GEMMA3_27B_LAYERS = 62
_GEMMA2_27B_LAYERS = 46

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_NAMES = {**_LAYER_NAMES, "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_NAMES = {**_LLAMA_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_FACTORS = {kind: f"rope_factors_{kind}.weight" for kind in ("long", "short")}
_IN_CONFIG = ("rope_freqs.weight", *_FACTORS.values())
"""Tensors that become part of the config."""


@dataclass(frozen=True)
class Architecture:
    """How a model of one GGUF architecture becomes a Hugging Face model.

    config:      the keys of ``config.json`` that are the architecture's own
    layer_names: GGUF name within a layer -> Hugging Face name within a layer
    undo:        ``(GGUF name, values, config) -> values``: takes back what the GGUF converter did to a tensor. In a
                 matrix it only reorders rows, so that it serves for its codes, scales and minima, too
    """

    config: Callable[[GgufFile], dict[str, Any]]
    layer_names: Mapping[str, str]
    undo: Callable[[str, NDArray[Any], Mapping[str, Any]], NDArray[Any]]


def architecture_of(source: GgufFile) -> Architecture:
    """The file's architecture.

    Raises:
        ModelError: it is none of `ARCHITECTURES`, a mixture of experts, or the file is one part of several.
    """
    name = source.require("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{source.path} holds a model of architecture {name!r}; GGUF files of {known} can be converted"
        )
    if source.get("split.count", 1) > 1:
        raise ModelError(f"{source.path} is one of several parts; join them with `llama-gguf-split --merge`")
    if source.get(f"{name}.expert_count", 0):
        raise ModelError(f"{source.path} is a mixture of experts, which cannot be served; use a dense model")
    return ARCHITECTURES[name]


def build_config(source: GgufFile) -> dict[str, Any]:
    """The ``config.json`` that describes a GGUF file's model; raises `ModelError` if its metadata do not say enough."""
    name = source.require("general.architecture")
    heads = _integer(source, f"{name}.attention.head_count")
    hidden = _integer(source, f"{name}.embedding_length")
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{source.path} lacks the tensor 'token_embd.weight'; download it again")
    if _integer(source, f"{name}.block_count") > len(source.tensors):
        raise ModelError(
            f"{source.path}: {name}.block_count says {source.get(f'{name}.block_count')} layers, and there are "
            f"{len(source.tensors)} tensors; download it again"
        )
    common = {
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": _integer(source, f"{name}.feed_forward_length"),
        "num_hidden_layers": _integer(source, f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(source, f"{name}.attention.head_count_kv", heads),
        "head_dim": _integer(source, f"{name}.attention.key_length", hidden // heads),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _integer(source, f"{name}.context_length"),
        "rms_norm_eps": _shortest(source.require(f"{name}.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": "blk.0.attn_q.bias" in source.tensors,
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(source),
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
    }
    return {**common, **architecture_of(source).config(source)}


def hf_tensor_name(name: str, source: GgufFile) -> str | None:
    """The Hugging Face name of a GGUF tensor; ``None`` for one that became part of the config.

    Raises:
        ModelError: the architecture has no such tensor.
    """
    if name in _IN_CONFIG:
        return None
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    inner = architecture_of(source).layer_names.get(layer[2]) if layer else None
    if layer is None or inner is None:
        raise ModelError(
            f"{source.path}: the tensor {name!r} is no part of a {source.require('general.architecture')} model as "
            "headwise knows it; serving without it would be wrong"
        )
    return f"model.layers.{layer[1]}.{inner}.{kind}"


def _llama(source: GgufFile) -> dict[str, Any]:
    head_dim = _integer(
        source,
        "llama.attention.key_length",
        _integer(source, "llama.embedding_length") // _integer(source, "llama.attention.head_count"),
    )
    rotary = _integer(source, "llama.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ModelError(f"{source.path} rotates {rotary} of {head_dim} dimensions per head; only all can be served")
    theta = float(source.get("llama.rope.freq_base", 10_000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": "blk.0.ffn_gate.bias" in source.tensors,
        "rope_theta": theta,
        "rope_scaling": _llama3_scaling(source, theta, head_dim) or _rope_scaling(source, "llama"),
    }


def _qwen(name: str, architecture: str) -> Callable[[GgufFile], dict[str, Any]]:
    def config(source: GgufFile) -> dict[str, Any]:
        return {
            "architectures": [architecture],
            "model_type": name,
            "hidden_act": "silu",
            "rope_theta": float(source.get(f"{name}.rope.freq_base", 10_000.0)),
            "rope_scaling": _rope_scaling(source, name),
            "use_sliding_window": False,
        }

    return config


def _gemma2(source: GgufFile) -> dict[str, Any]:
    layers, heads = _integer(source, "gemma2.block_count"), _integer(source, "gemma2.attention.head_count")
    head_dim = _integer(source, "gemma2.attention.key_length", 256)
    # As with Gemma 3, the largest model alone scales by its hidden size per head.
    scalar = _integer(source, "gemma2.embedding_length") // heads if layers == _GEMMA2_27B_LAYERS else head_dim
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": _integer(source, "gemma2.attention.sliding_window"),
        "rope_theta": float(source.get("gemma2.rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(source, "gemma2"),
        "attn_logit_softcapping": source.get("gemma2.attn_logit_softcapping"),
        "final_logit_softcapping": source.get("gemma2.final_logit_softcapping"),
    }


def _phi3(source: GgufFile) -> dict[str, Any]:
    hidden, heads = _integer(source, "phi3.embedding_length"), _integer(source, "phi3.attention.head_count")
    head_dim = hidden // heads
    rotated = _integer(source, "phi3.rope.dimension_count", head_dim)
    longest = _integer(source, "phi3.context_length")
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "partial_rotary_factor": rotated / head_dim,
        "original_max_position_embeddings": _integer(source, "phi3.rope.scaling.original_context_length", longest),
        "rope_theta": float(source.get("phi3.rope.freq_base", 10_000.0)),
        "rope_scaling": _longrope_scaling(source),
        "sliding_window": source.get("phi3.attention.sliding_window") or None,
    }


def _longrope_scaling(source: GgufFile) -> dict[str, Any] | None:
    """The ``longrope`` scaling whose factors are tensors in a GGUF file; None without them."""
    if not any(name in source.tensors for name in _FACTORS.values()):
        return None
    factors = {f"{kind}_factor": source.tensor(name).tolist() for kind, name in _FACTORS.items()}
    return {"rope_type": "longrope", **factors, "attention_factor": source.get("phi3.rope.scaling.attn_factor")}


def _gemma3(source: GgufFile) -> dict[str, Any]:
    layers, heads = _integer(source, "gemma3.block_count"), _integer(source, "gemma3.attention.head_count")
    head_dim = _integer(source, "gemma3.attention.key_length", 256)
    # The 27B model alone scales by its hidden size per head; GGUF does not say so, llama.cpp knows it by its depth.
    scalar = _integer(source, "gemma3.embedding_length") // heads if layers == _GEMMA3_27B_LAYERS else head_dim
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": _integer(source, "gemma3.attention.sliding_window"),
        "layer_types": _gemma3_layer_types(source, layers),
        "rope_theta": float(source.get("gemma3.rope.freq_base", 1_000_000.0)),
        "rope_local_base_freq": float(source.get("gemma3.rope.freq_base_swa", _GEMMA3_LOCAL_THETA)),
        "rope_scaling": _rope_scaling(source, "gemma3"),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": source.get("gemma3.final_logit_softcapping"),
    }


def _gemma3_layer_types(source: GgufFile, layers: int) -> list[str]:
    """Each layer's attention. In GGUF ``sliding_window_pattern`` is a period (every n-th layer is full), or a flag for
    each layer: whether it slides."""
    pattern = source.get("gemma3.attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if len(pattern) != layers:
        raise ModelError(f"{source.path}: the sliding window pattern covers {len(pattern)} of {layers} layers")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _rope_scaling(source: GgufFile, name: str) -> dict[str, Any] | None:
    kind = source.get(f"{name}.rope.scaling.type", "none")
    factor = float(source.get(f"{name}.rope.scaling.factor", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = _integer(source, f"{name}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{source.path} scales RoPE by {kind!r}; linear, yarn and Llama 3's can be converted")


def _llama3_scaling(source: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The ``llama3`` RoPE scaling that the factors in ``rope_freqs.weight`` follow from; None without that tensor."""
    if "rope_freqs.weight" not in source.tensors:
        return None
    factors = source.tensor("rope_freqs.weight")
    scaling = {
        "rope_type": "llama3",
        "factor": _shortest(float(factors.max())),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }
    expected = _llama3_factors(theta, head_dim, float(factors.max()))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError(
            f"{source.path}: rope_freqs.weight is not Llama 3's scaling (low 1, high 4, original context 8192); "
            "use the model's Hugging Face directory, whose config.json states its scaling"
        )
    return scaling


def _llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """The divisors of the ``head_dim / 2`` RoPE frequencies (Llama 3.1's ``apply_scaling``)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    share = np.clip(share, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / factor + share))


def _undo_llama(name: str, values: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    """Reorder the rows of Q and K. RoPE rotates pairs of them: neighbours in llama.cpp; in Hugging Face row ``i`` of a
    head's first half with row ``i`` of its second."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(config[heads], config["head_dim"] // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _undo_nothing(name: str, values: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    return values


def _undo_gemma(name: str, values: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    """Take 1 from the weights of norms. Gemma's norms multiply by ``1 + weight``, and GGUF stores that sum."""
    return values - np.float32(1.0) if name.endswith("norm.weight") else values


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama, _LLAMA_NAMES, _undo_llama),
    "gemma2": Architecture(_gemma2, _GEMMA2_NAMES, _undo_gemma),
    "gemma3": Architecture(_gemma3, {**_GEMMA2_NAMES, **_HEAD_NORMS}, _undo_gemma),
    "phi3": Architecture(_phi3, _PHI3_NAMES, _undo_nothing),
    "qwen2": Architecture(_qwen("qwen2", "Qwen2ForCausalLM"), _LLAMA_NAMES, _undo_nothing),
    "qwen3": Architecture(_qwen("qwen3", "Qwen3ForCausalLM"), {**_LLAMA_NAMES, **_HEAD_NORMS}, _undo_nothing),
}


def _integer(source: GgufFile, key: str, default: int | None = None) -> int:
    value = source.require(key) if default is None else source.get(key, default)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"{source.path}: {key} must be one positive integer for all layers, got {value!r}")
    return value


def _eos(source: GgufFile) -> int | list[int] | None:
    """Ids of the tokens that end the output: end of text and, where it differs, end of turn."""
    ids = [source.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    known = list(dict.fromkeys(token for token in ids if token is not None))
    return known if len(known) > 1 else next(iter(known), None)


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
