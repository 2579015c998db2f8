"""Rotary embedding in GGUF files: the order of queries' and keys' rows, and Llama 3's scaling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_architecture import Config
from headwise.runtime.loader.gguf_file import GgufFile
from headwise.runtime.loader.gguf_keys import integer, rope_scaling, shortest, theta

# What was published for Llama 3.1 to 3.3, and 4, and EXAONE 4. GGUF keeps only the frequency factors that follow from
# it.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
ROPE_FREQS = "rope_freqs.weight"


def undo_neighbours(name: str, values: NDArray[Any], config: Config) -> NDArray[Any]:
    """`Architecture.undo` where converters reorder the rows of Q and K. RoPE rotates pairs of them: neighbours in
    llama.cpp; in Hugging Face row ``i`` of a head's first half with row ``i`` of its second."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(config[heads], config["head_dim"] // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def head_size(source: GgufFile, name: str) -> int:
    """Elements of a head: where no key says, those of the hidden size that each of them has."""
    even = integer(source, f"{name}.embedding_length") // integer(source, f"{name}.attention.head_count")
    return integer(source, f"{name}.attention.key_length", even)


def whole_rope(source: GgufFile, name: str) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``, maybe Llama 3's; raises `ModelError` if a part of a head is rotated."""
    head_dim = head_size(source, name)
    rotary = integer(source, f"{name}.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ModelError(f"{source.path} rotates {rotary} of {head_dim} dimensions per head; only all can be served")
    base = theta(source, name)
    return {
        "rope_theta": base,
        "rope_scaling": _llama3_scaling(source, base, head_dim) or rope_scaling(source, name),
    }


def rotated_share(source: GgufFile, name: str) -> float:
    """The share of a head's elements that is rotated; raises `ModelError` if it is more than a head has."""
    head_dim = head_size(source, name)
    rotary = integer(source, f"{name}.rope.dimension_count", head_dim)
    if rotary > head_dim:
        raise ModelError(f"{source.path}: {name}.rope.dimension_count {rotary} is more than a head's {head_dim}")
    return rotary / head_dim


def _llama3_scaling(source: GgufFile, base: float, head_dim: int) -> dict[str, Any] | None:
    """The ``llama3`` RoPE scaling that the factors in ``rope_freqs.weight`` follow from; None without that tensor."""
    if ROPE_FREQS not in source.tensors:
        return None
    factors = source.tensor(ROPE_FREQS)
    scaling = {
        "rope_type": "llama3",
        "factor": shortest(float(factors.max())),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }
    expected = _llama3_factors(base, head_dim, float(factors.max()))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError(
            f"{source.path}: rope_freqs.weight is not Llama 3's scaling (low 1, high 4, original context 8192); "
            "use the model's Hugging Face directory, whose config.json states its scaling"
        )
    return scaling


def _llama3_factors(base: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """The divisors of the ``head_dim / 2`` RoPE frequencies (Llama 3.1's ``apply_scaling``)."""
    wavelength = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    share = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    share = np.clip(share, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / factor + share))
