"""gpt-oss: windows in every other layer, a learned sink for each query head, experts that may be stored as MXFP4.

MXFP4 (OCP Microscaling Formats, version 1.0): 4-bit floats (sign, two bits of exponent, one of mantissa), of which 32
neighbours share a power of two. A checkpoint has two tensors for each layer's projections: ``..._blocks``
``[experts, rows, columns / 32, 16]``, two numbers a byte, the first in its low half; and ``..._scales``
``[experts, rows, columns / 32]``, exponents biased by 127.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import (
    HfConfig,
    check_served,
    decoder_config,
    mapping,
    named_layer_types,
    positive,
    rope,
)
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe_decoder import MoeDecoder, local_experts
from headwise.runtime.models.weight_view import WeightView
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.fp4 import GROUP, in_integers, may_be_packed, powers_of_two
from headwise.runtime.ops.quantised import GroupQuantised, Matrix, as_float32

ARCHITECTURE = "GptOssForCausalLM"

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {"swiglu_limit": (None, 7.0), "swiglu_alpha": (None, 1.702)}
_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
}
"""Those of Hugging Face's ``GptOssConfig``."""


def parse(config: HfConfig) -> ModelConfig:
    check_served(config, _SERVED_VALUES)
    own = {**_DEFAULTS, **config}
    if mapping(config, "quantization_config").get("quant_method") == "mxfp4":
        own["quantization_config"] = None

    def default(layer: int) -> str:
        return "full_attention" if layer % 2 else "sliding_attention"

    decoder = decoder_config(
        own,
        ARCHITECTURE,
        layer_types=named_layer_types(own, default),
        ropes=lambda kind: rope(own),
        window=positive(own, "sliding_window", default=128),
        mlp_bias=True,
        sink_logits=True,
    )
    return local_experts(own, decoder, experts=128, per_token=4)


class GptOssWeights(WeightView):
    """A checkpoint's experts one by one; gate and up, whose rows alternate there, apart.

    Experts are stored as MXFP4, or as floats with inputs before outputs; or else one by one, as they come from GGUF.
    """

    _EXPERT = re.compile(r"(?P<at>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.(?P<what>weight|bias)")

    def __init__(self, source: Weights, config: ModelConfig) -> None:
        super().__init__(source)
        self._known = frozenset(source.names)
        self._sizes = {"gate_up": (2 * config.intermediate_size, config.hidden_size)}
        self._sizes["down"] = config.hidden_size, config.intermediate_size

    def tensor(self, name: str) -> NDArray[np.float32]:
        match = self._joined(name)
        return super().tensor(name) if match is None else self._part(match)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        match = self._joined(name)
        return super().rows(name, start, stop) if match is None else self._part(match)[start:stop]

    def columns(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        match = self._joined(name)
        return super().columns(name, start, stop) if match is None else self._part(match)[:, start:stop]

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        if name in self._known:
            return self._source.kept_rows(name, start, stop)
        if self._EXPERT.fullmatch(name) is None:
            return super().kept_rows(name, start, stop)
        matrix = self._quantised(name)
        return None if matrix is None else matrix.rows(start, stop)

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        """Of experts that are joined, None where the range cuts through a group."""
        if name in self._known:
            return self._source.kept_columns(name, start, stop)
        if self._EXPERT.fullmatch(name) is None:
            return super().kept_columns(name, start, stop)
        matrix = None if start % GROUP or stop % GROUP else self._quantised(name)
        return None if matrix is None else matrix.columns(start, stop)

    def _joined(self, name: str) -> re.Match[str] | None:
        """Which expert's part it is, of experts that the checkpoint has joined."""
        return None if name in self._known else self._EXPERT.fullmatch(name)

    def _quantised(self, name: str) -> GroupQuantised | None:
        match = self._joined(name)
        matrix = None if match is None or match["what"] == "bias" else self._matrix(match)
        return matrix if isinstance(matrix, GroupQuantised) else None

    def _part(self, match: re.Match[str]) -> NDArray[np.float32]:
        """An expert's matrix or bias."""
        if match["what"] == "weight":
            return as_float32(self._matrix(match))
        expert, (fused, rows) = int(match["expert"]), _fused(match)
        bias: NDArray[np.float32] = self._source.rows(f"{match['at']}.{fused}_proj_bias", expert, expert + 1)[0][rows]
        return bias

    def _matrix(self, match: re.Match[str]) -> Matrix:
        expert, (fused, rows) = int(match["expert"]), _fused(match)
        name = f"{match['at']}.{fused}_proj"
        if f"{name}_blocks" in self._known:
            return self._mxfp4(name, expert, self._sizes[fused], rows)
        matrix: NDArray[np.float32] = self._source.rows(name, expert, expert + 1)[0].T
        self._check(name, matrix.shape, self._sizes[fused])
        return matrix[rows]

    def _mxfp4(self, name: str, expert: int, size: tuple[int, int], rows: slice) -> Matrix:
        blocks = self._source.byte_rows(f"{name}_blocks", expert, expert + 1)[0]
        exponents = self._source.byte_rows(f"{name}_scales", expert, expert + 1)[0]
        groups = size[0], size[1] // GROUP
        self._check(f"{name}_blocks", blocks.shape, (*groups, GROUP // 2))
        self._check(f"{name}_scales", exponents.shape, groups)
        halves, scales = blocks[rows], powers_of_two(exponents[rows])
        matrix = in_integers(halves.reshape(len(halves), -1), scales)
        return matrix if may_be_packed(scales) else matrix.dequantised()

    @staticmethod
    def _check(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ModelError(
                f"an expert of {name} has the shape {list(shape)}, config.json says {list(expected)}: weights and "
                "config.json do not belong together"
            )


def _fused(match: re.Match[str]) -> tuple[str, slice]:
    """The projection that an expert's one is stored in, and its rows there."""
    if match["kind"] == "down":
        return "down", slice(None)
    return "gate_up", slice(0 if match["kind"] == "gate" else 1, None, 2)


class GptOss(MoeDecoder):
    """The shared decoder with experts, over `GptOssWeights`."""

    router_name: ClassVar[str] = "router"
    router_bias: ClassVar[bool] = True
    activation = "clamped"

    def view(self, weights: Weights) -> Weights:
        return GptOssWeights(weights, self.config)
