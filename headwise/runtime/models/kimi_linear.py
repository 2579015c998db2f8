"""Kimi-Linear: Kimi Delta Attention (KDA) in three of four layers, latent attention in the others; routed experts.

Nothing is rotated: latent attention knows of positions what the layers before it make of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.fused import Attention, KimiDelta
from headwise.kernels.kda_base import KdaProjected, KdaWeights
from headwise.runtime.models.base import AttentionLayer, Rotation
from headwise.runtime.models.decoder_weights import merged
from headwise.runtime.models.deepseek import Deepseek
from headwise.runtime.models.drafting import DraftingNames
from headwise.runtime.models.layers import Layer, Linear
from headwise.runtime.models.states_config import KdaConfig
from headwise.runtime.models.weight_view import RenamedWeights
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import Tensor

Floats = NDArray[np.float32]
Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class KdaProjections:
    """One rank's part of Kimi Delta Attention.

    into:          to `KdaProjected.numbers`, of which the last ones, twice ``rank``, are what those two are given:
    decays, gates: to `KdaProjected.decays` and `KdaProjected.gates`
    between:       what is computed with before `out`
    """

    into: Linear
    decays: Linear
    gates: Linear
    between: KdaWeights
    out: Linear


class KimiLinear(Deepseek):
    """The decoder with latent attention, and a second kind of layers.

    Tensor parallel: each rank has some heads of these, all the same numbers that decays and gates are made of, and all
    latents.
    """

    drafting_names: ClassVar[DraftingNames | None] = None
    """None of its published models has such a layer."""

    def view(self, weights: Weights) -> Weights:
        return RenamedWeights(weights, {name: _name_here(name) for name in weights.names})

    @property
    def _kda(self) -> KdaConfig:
        assert isinstance(self.config.states, KdaConfig), "parsed so"
        return self.config.states

    # ---- weights ----

    def load_attention(self, layer: int, at: str) -> Any:
        if layer in self._kda.layers:
            return self._load_kda(self._shard.kv_heads[layer], at)
        return super().load_attention(layer, at)

    def _load_kda(self, heads: tuple[int, ...], at: str) -> KdaProjections:
        kda, sizes, upload = self._kda, self._kda.sizes, self.ops.upload
        own, rank, hidden = list(heads), [(0, kda.rank)], self.config.hidden_size
        keys, values, one = (_ranges(heads, each) for each in (sizes.key_dim, sizes.value_dim, 1))
        speeds = self._floats(f"{at}A_log", (kda.members,))
        bias = self._floats(f"{at}dt_bias", (kda.members, sizes.key_dim))
        return KdaProjections(
            into=self._rows_alone(
                {"q_proj": keys, "k_proj": keys, "v_proj": values, "b_proj": one, "f_a_proj": rank, "g_a_proj": rank},
                at,
                hidden,
            ),
            decays=self._rows_alone({"f_b_proj": keys}, at, kda.rank),
            gates=self._rows_alone({"g_b_proj": values}, at, kda.rank),
            between=KdaWeights(
                convolution=upload(self._convolution(own, at)),
                speed=upload(np.exp(speeds[own])),
                bias=upload(np.ascontiguousarray(bias[own])),
                norm=upload(self._floats(f"{at}o_norm.weight", (sizes.value_dim,))),
                eps=self.config.rms_norm_eps,
            ),
            out=self._columns_alone(f"{at}o_proj", values, hidden),
        )

    def _convolution(self, heads: list[int], at: str) -> Floats:
        """See `KdaWeights.convolution`."""
        kda, sizes, found = self._kda, self._kda.sizes, []
        for part, size in (("q", sizes.key_dim), ("k", sizes.key_dim), ("v", sizes.value_dim)):
            taps = self._weights.tensor(f"{at}{part}_conv1d.weight")
            self._check_shape(f"{at}{part}_conv1d.weight", taps.shape, (kda.members * size, 1, sizes.convolution))
            found.append(taps.reshape(kda.members, size, sizes.convolution)[heads])
        return np.ascontiguousarray(np.concatenate(found, axis=1).transpose(0, 2, 1), np.float32)

    def _floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Numbers of a checkpoint, which may have them in another shape."""
        found = self._weights.tensor(name)
        if found.size != np.prod(shape):
            self._check_shape(name, found.shape, shape)
        return np.ascontiguousarray(found.reshape(shape), np.float32)

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ModelError(
                f"{name} has the shape {shape}, config.json says {expected}: weights and config.json do not belong "
                "together"
            )

    def _rows_alone(self, parts: dict[str, Ranges], at: str, inputs: int) -> Linear:
        """Output rows of several projections as one weight, which no adapter changes."""
        where = [(f"{at}{name}", start, stop) for name, ranges in parts.items() for start, stop in merged(ranges)]
        rows = sum(stop - start for _, start, stop in where)

        def weight() -> Any:
            found = self._rows(where)
            self._check(f"{at}{' + '.join(parts)}", found.shape, (rows, inputs))
            return self.ops.linear_weight(found)

        made_of = " + ".join(f"{name}.weight[{start}:{stop}]" for name, start, stop in where)
        return Linear(self._prepare(made_of, weight))

    def _columns_alone(self, name: str, ranges: Ranges, outputs: int) -> Linear:
        """Input columns of a projection, which no adapter changes."""
        parts = merged(ranges)
        expected = outputs, sum(stop - start for start, stop in parts)

        def weight() -> Any:
            found = self._columns(f"{name}.weight", parts)
            self._check(name, found.shape, expected)
            return self.ops.linear_weight(found)

        made_of = " + ".join(f"{name}.weight[:, {start}:{stop}]" for start, stop in parts)
        return Linear(self._prepare(made_of, weight))

    # ---- computation ----

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        if not isinstance(attention, KdaProjections):
            return super().fusible_attention(index, attention)
        return KimiDelta(
            into=attention.into.weight,
            decays=attention.decays.weight,
            gates=attention.gates.weight,
            between=attention.between,
            out=attention.out.weight,
        )

    def attend(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        rotation: Rotation,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        weights = layer.attention
        if not isinstance(weights, KdaProjections):
            return super().attend(index, layer, x, rotation, attention, wanted)
        made, rank = self._linear(x, weights.into), self._kda.rank
        told = made[:, -2 * rank : -rank], made[:, -rank:]
        numbers, decays, gates = (
            self.ops.kernel_array(part)
            for part in (made, self._linear(told[0], weights.decays), self._linear(told[1], weights.gates))
        )
        seen = attention(index, KdaProjected(numbers, decays, gates, weights.between), wanted=wanted)
        return self.projected(seen, weights.out)


def _ranges(heads: Sequence[int], each: int) -> Ranges:
    return [(head * each, (head + 1) * each) for head in heads]


_EXPERT = re.compile(r"(.*\.mlp\.experts\.\d+\.)w([123])\.weight")
_PARTS = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}


def _name_here(name: str) -> str:
    """What DeepSeek's checkpoints call it: published ones have experts in a module of their own, by other names."""
    plain = name.replace(".block_sparse_moe.", ".mlp.")
    match = _EXPERT.fullmatch(plain)
    return plain if match is None else f"{match[1]}{_PARTS[match[2]]}.weight"
