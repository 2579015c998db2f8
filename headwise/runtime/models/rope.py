"""Rotary position embedding: inverse frequencies and their scalings.

RoPE: Su et al., arXiv 2104.09864. Linear scaling: Chen et al., arXiv 2306.15595. Llama 3 scaling: the wavelength rule
published with Llama 3.1. All computed in float32 like the Hugging Face implementations they must agree with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.base import RopeConfig
from headwise.runtime.models.values import finite_number, shown

SUPPORTED = ("default", "linear", "llama3")


def inverse_frequencies(config: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """``float32 [head_dim / 2]``; raises ModelError on a scaling that is not supported, or out of float32's range."""
    with np.errstate(all="ignore"):
        scaled = _scaled(config, head_dim)
    if not np.isfinite(scaled).all():
        raise ModelError(
            f"rope theta {config.theta:g} and scaling {shown(config.scaling)} in config.json give no finite frequencies"
        )
    return scaled


def _scaled(config: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse: NDArray[np.float32] = (1.0 / np.power(np.float32(config.theta), exponents)).astype(np.float32)
    kind = scaling_kind(config.scaling)
    if kind == "linear":
        return inverse / np.float32(_need(config.scaling, "factor"))
    if kind == "llama3":
        return _llama3(inverse, config.scaling or {})
    return inverse


def scaling_kind(scaling: Mapping[str, Any] | None) -> str:
    """The type of a ``rope_scaling`` mapping, checked to be supported."""
    kind = "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SUPPORTED:
        raise ModelError(f"rope scaling {shown(kind)} is not supported; supported are {', '.join(SUPPORTED)}")
    return str(kind)


def _llama3(inverse: NDArray[np.float32], scaling: Mapping[str, Any]) -> NDArray[np.float32]:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    factor, low = _need(scaling, "factor"), _need(scaling, "low_freq_factor")
    high, trained = _need(scaling, "high_freq_factor"), _need(scaling, "original_max_position_embeddings")
    if low >= high:
        raise ModelError(f"rope scaling: low_freq_factor {low:g} must be less than high_freq_factor {high:g}")
    wavelength = 2 * math.pi / inverse
    blend = (trained / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = np.where(wavelength > trained / low, inverse / factor, blended)
    return np.where(wavelength < trained / high, inverse, scaled).astype(np.float32)


def _need(scaling: Mapping[str, Any] | None, key: str) -> float:
    value = (scaling or {}).get(key)
    found = finite_number(value)
    if found is None or found <= 0:
        raise ModelError(f"rope scaling needs a positive number {key!r} in config.json, got {shown(value)}")
    return found
