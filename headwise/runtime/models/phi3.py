"""Phi-3, 3.5 and 4: Llama, with fused projections and LongRoPE; in Phi-4-mini only a part of each head is rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.base import ModelConfig, RopeConfig
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import HfConfig, decoder_config, mapping, number, rope
from headwise.runtime.models.mistral import window_everywhere
from headwise.runtime.models.rope import pairs_first
from headwise.runtime.models.weight_view import Reader, WeightView, taken
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.quantised import Matrix

ARCHITECTURE = "Phi3ForCausalLM"

_PARTIAL = "partial_rotary_factor"
_ROPE_FIELDS = ("rope_scaling", "rope_parameters")


def parse(config: HfConfig) -> ModelConfig:
    share = number(config, _PARTIAL, number(mapping(config, "rope_parameters"), _PARTIAL, 1.0))
    own = {"rms_norm_eps": 1e-5, **config, **{key: _rope_fields(config, key) for key in _ROPE_FIELDS}}
    own.pop(_PARTIAL, None)

    def layer_rope(kind: str) -> RopeConfig:
        return replace(rope(own), share=share)

    return decoder_config(own, ARCHITECTURE, ropes=layer_rope, **window_everywhere(own))


def _rope_fields(config: HfConfig, key: str) -> HfConfig:
    """A mapping of the rotary embedding's fields. Older checkpoints call LongRoPE "su", the oldest "yarn"."""
    fields = {name: value for name, value in mapping(config, key).items() if name != _PARTIAL}
    renamed = {name: "longrope" for name in ("rope_type", "type") if fields.get(name) == "yarn"}
    return {**fields, **renamed}


class Phi3Weights(WeightView):
    """A checkpoint's fused projections one by one, each head's rotated elements in pairs (see `pairs_first`).

    ``qkv_proj`` has the rows of queries, keys and values one below the other, ``gate_up_proj`` those of gate and up.
    """

    def __init__(self, source: Weights, config: ModelConfig) -> None:
        super().__init__(source)
        q, kv = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
        self._at = {
            "q_proj": ("qkv_proj", 0),
            "k_proj": ("qkv_proj", q),
            "v_proj": ("qkv_proj", q + kv),
            "gate_proj": ("gate_up_proj", 0),
            "up_proj": ("gate_up_proj", config.intermediate_size),
        }
        self._order = pairs_first(config.ropes[0], config.head_dim)

    def read_rows(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        at, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in self._at:
            return super().read_rows(source, name, start, stop)
        fused, first = self._at[part]
        rows = super().read_rows(source, f"{at}.{fused}.weight", first + start, first + stop)
        if self._order is None or part not in ("q_proj", "k_proj"):
            return rows
        heads = rows.reshape(-1, len(self._order), rows.shape[1])
        return heads[:, self._order].reshape(rows.shape)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        at, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in self._at:
            return self._source.kept_rows(name, start, stop)
        fused, first = self._at[part]
        kept = self._source.kept_rows(f"{at}.{fused}.weight", first + start, first + stop)
        if kept is None or self._order is None or part not in ("q_proj", "k_proj"):
            return kept
        dim = len(self._order)
        return taken(kept, (np.arange(0, stop - start, dim)[:, None] + self._order).reshape(-1))

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._source.kept_columns(name, start, stop)


class Phi3(Decoder):
    """The shared decoder over `Phi3Weights`."""

    def view(self, weights: Weights) -> Weights:
        return Phi3Weights(weights, self.config)
