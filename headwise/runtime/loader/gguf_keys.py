"""Reading values from a GGUF file's metadata that several architectures have."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.errors import ModelError
from headwise.runtime.loader.gguf_file import GgufFile


def integer(source: GgufFile, key: str, default: int | None = None) -> int:
    """A positive integer, which may be given for each layer if it is the same in all; raises `ModelError` naming it."""
    value = source.require(key) if default is None else source.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"{source.path}: {key} must be one positive integer for all layers, got {value!r}")
    return value


def count(source: GgufFile, key: str) -> int:
    """An integer that may be 0, or missing for 0; raises `ModelError` naming it."""
    value = source.get(key, 0)
    if not isinstance(value, int) or value < 0:
        raise ModelError(f"{source.path}: {key} must be an integer of at least 0, got {value!r}")
    return value


def theta(source: GgufFile, name: str, default: float = 10_000.0) -> float:
    """The base of rotary embedding of the architecture ``name``."""
    return float(source.get(f"{name}.rope.freq_base", default))


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def rope_scaling(source: GgufFile, name: str) -> dict[str, Any] | None:
    """What ``config.json`` says of a linear or YaRN scaling; None if there is none. Raises `ModelError` on others."""
    kind = source.get(f"{name}.rope.scaling.type", "none")
    factor = float(source.get(f"{name}.rope.scaling.factor", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = integer(source, f"{name}.rope.scaling.original_context_length")
        keys = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
        told = {ours: source.get(f"{name}.rope.scaling.{theirs}") for theirs, ours in keys.items()}
        known = {key: shortest(value) for key, value in told.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **known}
    raise ModelError(f"{source.path} scales RoPE by {kind!r}; linear, yarn and Llama 3's can be converted")


def placed_scaling(source: GgufFile, name: str) -> dict[str, Any] | None:
    """The same, with the parts of a head that positions in images rotate, where the model has such."""
    scaling, parts = rope_scaling(source, name), source.get(f"{name}.rope.dimension_sections", ())
    if not any(parts):
        return scaling
    sections = list(parts[:3]) if not any(parts[3:]) else list(parts)  # of four, the last is of other models
    return {**(scaling or {"rope_type": "default"}), "mrope_section": sections}


def served_layers(source: GgufFile) -> int:
    """Layers of the model itself: those behind them predict further tokens, which is not served."""
    name = source.require("general.architecture")
    layers = integer(source, f"{name}.block_count") - count(source, f"{name}.nextn_predict_layers")
    if layers < 1:
        raise ModelError(f"{source.path}: {name}.nextn_predict_layers leaves no layer of {name}.block_count")
    return layers


def layer_types(source: GgufFile, name: str, period: int) -> list[str]:
    """Each layer's attention. In GGUF ``sliding_window_pattern`` is a period (every n-th layer is full), or a flag for
    each layer: whether it slides. period: where the file does not say"""
    layers, pattern = served_layers(source), source.get(f"{name}.attention.sliding_window_pattern", period)
    if isinstance(pattern, int):
        if pattern < 1:
            raise ModelError(f"{source.path}: {name}.attention.sliding_window_pattern must be positive, got {pattern}")
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if len(pattern) not in (layers, integer(source, f"{name}.block_count")):
        raise ModelError(f"{source.path}: the sliding window pattern covers {len(pattern)} of {layers} layers")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern[:layers]]
