"""Rotary position embedding: inverse frequencies and their scalings.

RoPE: Su et al., arXiv 2104.09864. Linear scaling: Chen et al., arXiv 2306.15595. Llama 3 scaling: the wavelength rule
published with Llama 3.1. YaRN: Peng et al., arXiv 2309.00071. LongRoPE: Ding et al., arXiv 2402.13753. All computed in
float32 like the Hugging Face implementations they must agree with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import AXES, RopeConfig
from headwise.runtime.models.values import finite_number, shown

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_ALIASES = {"su": "longrope", "mrope": "default"}
"""Text has the same three positions for each token as M-RoPE, so that it is plain RoPE."""

_LEAST, _MOST = 1e-9, 1e12
"""Of a scaling's numbers: what is made of them stays finite."""

_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""YaRN's defaults: dimensions that turn more often than this within the trained length keep their frequency; those
that turn less often than that get a lower one."""


def inverse_frequencies(config: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """``float32 [head_dim / 2]``: those of the pairs that are rotated, then zeros.

    Dynamic scaling changes nothing within the model's own length, and longer sequences are not served.

    Raises:
        ModelError: the scaling is not supported, lacks a field, or is out of float32's range.
    """
    if config.is_none:
        return np.zeros(head_dim // 2, np.float32)
    with np.errstate(all="ignore"):
        scaled = _scaled(config, rotated_elements(config, head_dim))
    if not np.isfinite(scaled).all():
        raise ModelError(
            f"rope theta {config.theta:g} and scaling {shown(config.scaling)} in config.json give no finite frequencies"
        )
    return _padded(scaled, head_dim, 0.0)


def turning(config: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """Inverse frequencies as `TensorOps.rotation` takes them: by pair, ``float32 [head_dim / 2]``, or by position and
    pair, ``[3, head_dim / 2]``, with zeros where another position turns the pair."""
    inverse = inverse_frequencies(config, head_dim)
    if not config.axes:
        return inverse
    by_axis = np.zeros((AXES, len(inverse)), np.float32)
    pairs = np.arange(len(config.axes))
    by_axis[config.axes, pairs] = inverse[pairs]
    return by_axis


def rotation_scale(config: RopeConfig, head_dim: int) -> NDArray[np.float32] | None:
    """What cosines and sines are multiplied with, ``float32 [head_dim / 2]``; None where that is 1.

    YaRN and LongRoPE make up for the flatter attention over longer contexts so.
    """
    factor = _attention_factor(config)
    if factor == 1.0:
        return None
    return _padded(np.full(rotated_elements(config, head_dim) // 2, factor, np.float32), head_dim, 1.0)


def rotated_elements(config: RopeConfig, head_dim: int) -> int:
    """How many of a head's elements are rotated; raises ModelError if these make no pairs."""
    rotated = int(head_dim * config.share)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise ModelError(
            f"config.json: 'partial_rotary_factor' {config.share:g} rotates {rotated} of a head's {head_dim} elements; "
            "it must be an even number of them"
        )
    return rotated


def pairs_first(config: RopeConfig, head_dim: int, *, of_neighbours: bool = False) -> NDArray[np.int64] | None:
    """The order of a head's elements in which element ``i`` turns with ``i + head_dim / 2``; None if it is theirs.

    Where only the first elements are rotated, these turn with one another; the others are put behind them, in the place
    of pairs that `inverse_frequencies` does not turn.

    of_neighbours: the model turns ``(2i, 2i + 1)``, not ``(i, i + rotated / 2)``
    """
    rotated = rotated_elements(config, head_dim)
    if rotated == head_dim and not of_neighbours:
        return None
    turning, rest = np.split(np.arange(head_dim), [rotated])
    first, second = turning.reshape(-1, 2).T if of_neighbours else np.split(turning, 2)
    left, right = np.split(rest, 2)
    return np.concatenate([first, left, second, right])


def served_up_to(config: ModelConfig, tokens: int) -> ModelConfig:
    """The model as it is served for sequences of up to ``tokens`` tokens.

    LongRoPE has frequencies for short sequences and others for long ones. Keys that are cached were rotated by either,
    and a sequence must not change over: the longest sequence that is served decides for all of them.
    """
    ropes = tuple(
        replace(rope, is_long=tokens > _need(rope.scaling, "original_max_position_embeddings"))
        if scaling_kind(rope.scaling) == "longrope"
        else rope
        for rope in config.ropes
    )
    return replace(config, ropes=ropes)


def scaling_kind(scaling: Mapping[str, Any] | None) -> str:
    """The type of a ``rope_scaling`` mapping, checked to be supported."""
    kind = "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in SUPPORTED:
        raise ModelError(f"rope scaling {shown(kind)} is not supported; supported are {', '.join(SUPPORTED)}")
    return str(kind)


def _scaled(config: RopeConfig, dim: int) -> NDArray[np.float32]:
    """Inverse frequencies of ``dim / 2`` pairs."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.power(np.float32(config.theta), exponents)
    inverse: NDArray[np.float32] = (1.0 / powers).astype(np.float32)
    kind, scaling = scaling_kind(config.scaling), config.scaling or {}
    if kind == "linear":
        return (inverse / np.float32(_need(scaling, "factor"))).astype(np.float32)
    if kind == "proportional":
        return _proportional(inverse, scaling)
    if kind == "llama3":
        return _llama3(inverse, scaling)
    if kind == "yarn":
        return _yarn(inverse, config.theta, scaling)
    if kind == "longrope":
        factors = _factors(scaling, "long_factor" if config.is_long else "short_factor", dim // 2)
        return np.asarray(1.0 / (factors * powers), np.float32)
    return inverse


def _padded(values: NDArray[np.float32], head_dim: int, value: float) -> NDArray[np.float32]:
    missing = head_dim // 2 - len(values)
    return np.concatenate([values, np.full(missing, value, np.float32)]) if missing else values


def _proportional(inverse: NDArray[np.float32], scaling: Mapping[str, Any]) -> NDArray[np.float32]:
    """The first pairs of a head turn, as fast as if all did; the others stand still."""
    share = _need({"partial_rotary_factor": 1.0, **scaling}, "partial_rotary_factor")
    turning = int(share * len(inverse))
    if not 0 < turning <= len(inverse):
        raise ModelError(
            f"rope scaling: partial_rotary_factor {share:g} turns {turning} of a head's {len(inverse)} pairs; it must "
            "be some of them"
        )
    factor = np.float32(_need({"factor": 1.0, **scaling}, "factor"))
    return np.where(np.arange(len(inverse)) < turning, inverse / factor, np.float32(0))


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


def _yarn(inverse: NDArray[np.float32], theta: float, scaling: Mapping[str, Any]) -> NDArray[np.float32]:
    """Frequencies that turn seldom within the trained length are divided by the factor, with a ramp to the others."""
    dim, factor = 2 * len(inverse), np.float32(_need(scaling, "factor"))
    trained = _need(scaling, "original_max_position_embeddings")
    fast, slow = (_need({**_BETAS, **scaling}, key) for key in _BETAS)
    if theta <= 1:
        raise ModelError(f"rope scaling yarn needs a 'rope_theta' above 1 in config.json, got {theta:g}")

    def dimension(turns: float) -> float:
        """The pair, as a fraction, that turns so often within the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if _is_true(scaling, "truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    return np.asarray(inverse / factor * ramp + inverse * (1 - ramp), np.float32)


def _attention_factor(config: RopeConfig) -> float:
    kind, scaling = scaling_kind(config.scaling), config.scaling or {}
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return _need(scaling, "attention_factor")
    factor = _need(scaling, "factor")
    if kind == "longrope":
        trained = _need(scaling, "original_max_position_embeddings")
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 and trained > 1 else 1.0
    if all(scaling.get(key) not in (None, 0) for key in ("mscale", "mscale_all_dim")):
        return _mscale(factor, _need(scaling, "mscale")) / _mscale(factor, _need(scaling, "mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(scaling: Mapping[str, Any], key: str, count: int) -> NDArray[np.float32]:
    values = scaling.get(key)
    found = [finite_number(value) for value in values] if isinstance(values, list) else []
    numbers = [value for value in found if value is not None and value > 0]
    if len(numbers) != count or len(found) != count:
        raise ModelError(
            f"rope scaling needs a list {key!r} of {count} positive numbers in config.json, one for each pair of "
            f"rotated elements, got {shown(values)}"
        )
    return np.array(numbers, np.float32)


def _need(scaling: Mapping[str, Any] | None, key: str) -> float:
    value = (scaling or {}).get(key)
    found = finite_number(value)
    if found is None or not _LEAST <= found <= _MOST:
        raise ModelError(
            f"rope scaling needs a positive number {key!r} in config.json, got {shown(value)}; it may be from "
            f"{_LEAST:g} to {_MOST:g}"
        )
    return found


def _is_true(scaling: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = scaling.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"rope scaling: {key!r} must be true or false in config.json, got {shown(value)}")
    return bool(value)  # null is false, as in Hugging Face's implementation
