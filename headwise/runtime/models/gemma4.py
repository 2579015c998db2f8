"""Gemma 4 (text): larger heads in full layers, layers that share a cache, embeddings per layer, experts beside MLPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.experts import Mixture
from headwise.kernels.fused import (
    NOTHING,
    Attention,
    BesideExperts,
    Besides,
    DecoderLayer,
    DenseLayer,
    GroupedQueries,
    MixedLayer,
)
from headwise.kernels.fused import SideInput as FusedSide
from headwise.runtime.models.base import AttentionLayer, Embeds, PagedAttentionLayer, PagedCache
from headwise.runtime.models.gemma2 import Gemma2
from headwise.runtime.models.gemma4_config import ARCHITECTURES, Gemma4Config, parse
from headwise.runtime.models.layers import Layer, Linear, Residual
from headwise.runtime.models.moe_decoder import tokens_of
from headwise.runtime.models.weight_view import ExpertWeights
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import Experts, KernelArray, Tensor, Weight
from headwise.runtime.ops.quantised import Matrix

__all__ = ["ARCHITECTURES", "Gemma4", "parse"]


@dataclass(frozen=True)
class SideInput:
    """What adds a token's own embedding of a layer to the residual stream. Whole on every rank.

    gate, out: to its size, and back to the hidden size
    after:     norm of what is added
    """

    gate: Linear
    out: Linear
    after: Tensor


@dataclass(frozen=True)
class ExpertsBeside:
    """The mixture of experts beside a layer's MLP; both are normed before they are added up.

    choose:      norm of the residual stream for the router
    before:      norm of the residual stream for the experts
    after:       norm of what they make, and after_mlp of what the MLP does
    """

    choose: Tensor
    router: Linear
    experts: Experts
    before: Tensor
    after: Tensor
    after_mlp: Tensor


@dataclass(frozen=True)
class Gemma4Layer(Layer):
    """scalar: factor on the residual stream behind the layer"""

    scalar: float
    side: SideInput | None
    experts: ExpertsBeside | None


@dataclass(frozen=True)
class SideEmbedding:
    """A token's embeddings of all layers: its own, and what is projected from its embedding. Whole on every rank."""

    table: Weight
    projection: Linear
    norm: Tensor


class Gemma4(Gemma2):
    """Gemma 2's norms around attention and MLP, with queries, keys and values normed, too, and no offset of weights.

    A token goes through a layer as ``scalar * (x + side input)``, of ``x`` behind attention and MLP.
    """

    config: Gemma4Config
    norm_offset = 0.0
    norm_names: ClassVar[Mapping[str, str]] = {
        **Gemma2.norm_names,
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    }
    _layers: Sequence[Gemma4Layer]

    # ---- weights ----

    def view(self, weights: Weights) -> Weights:
        return weights if self.config.moe is None else ExpertWeights(weights)

    def norms_of(self, layer: int) -> Mapping[str, str]:
        names = dict(self.norm_names)
        if not self._keeps(layer):
            del names["key"]
        return names

    def projections(self, layer: int) -> Sequence[str]:
        if not self._keeps(layer):
            return ("q_proj",)
        return ("q_proj", "k_proj") if self.config.values_are_keys[layer] else super().projections(layer)

    def _keeps(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own."""
        return self.config.heads_of(layer).cache_layer == layer

    def _load_layer(self, layer: int) -> Gemma4Layer:
        at = f"{self.prefix}layers.{layer}."
        return Gemma4Layer(
            **vars(super()._load_layer(layer)),
            scalar=float(self._weights.tensor(f"{at}layer_scalar").reshape(-1)[0]),
            side=self._load_side(at) if self.config.side_size else None,
            experts=self._load_experts(at) if self.config.moe else None,
        )

    def _load_side(self, at: str) -> SideInput:
        size, hidden = self.config.side_size, self.config.hidden_size
        return SideInput(
            gate=self._whole(f"{at}per_layer_input_gate", (size, hidden)),
            out=self._whole(f"{at}per_layer_projection", (hidden, size)),
            after=self._norm(f"{at}post_per_layer_input_norm.weight"),
        )

    def _load_experts(self, at: str) -> ExpertsBeside:
        moe, hidden = self.config.moe, self.config.hidden_size
        assert moe is not None
        scales = self._weights.tensor(f"{at}router.per_expert_scale")
        experts = (self.dense_mlp(f"{at}experts.{expert}.", moe.expert_size) for expert in range(moe.num_experts))
        return ExpertsBeside(
            choose=self.ops.norm_weight(self._weights.tensor(f"{at}router.scale") * np.float32(hidden**-0.5)),
            router=self._whole(f"{at}router.proj", (moe.num_experts, hidden)),
            experts=self.ops.experts(Mixture(moe.routing, self.activation, scales=scales), experts, None),
            before=self._norm(f"{at}pre_feedforward_layernorm_2.weight"),
            after=self._norm(f"{at}post_feedforward_layernorm_2.weight"),
            after_mlp=self._norm(f"{at}post_feedforward_layernorm_1.weight"),
        )

    def load_more(self) -> None:
        config, ops = self.config, self.ops
        dims = {config.heads_of(layer).head_dim for layer in range(config.num_layers)}
        self._value_norms = {dim: ops.norm_weight(np.ones(dim, np.float32)) for dim in dims}
        self._side: SideEmbedding | None = None
        if not config.side_size:
            return
        name, width = f"{self.prefix}embed_tokens_per_layer.weight", config.num_layers * config.side_size
        self._side = SideEmbedding(
            table=self._prepare(name, lambda: ops.embedding_table(self._checked(name, (config.vocab_size, width)))),
            projection=self._whole(f"{self.prefix}per_layer_model_projection", (width, config.hidden_size)),
            norm=self._norm(f"{self.prefix}per_layer_projection_norm.weight"),
        )

    def _whole(self, name: str, shape: tuple[int, int]) -> Linear:
        """A projection that every rank has whole."""
        name = f"{name}.weight"
        return Linear(self._prepare(name, lambda: self.ops.linear_weight(self._checked(name, shape))))

    def _checked(self, name: str, shape: tuple[int, int]) -> Matrix:
        kept = self._weights.kept_rows(name, 0, shape[0])
        weight = self._weights.tensor(name) if kept is None else kept
        if weight.shape != shape:
            raise ModelError(
                f"{name} has the shape {list(weight.shape)}, config.json says {list(shape)}: weights and config.json "
                "do not belong together"
            )
        return weight

    # ---- computation ----

    def fusible(self, index: int, layer: Layer) -> DecoderLayer | None:
        found = super().fusible(index, layer)
        if found is None or not isinstance(layer, Gemma4Layer):
            return None
        side, beside, mlp = layer.side, layer.experts, found.mlp
        if beside is not None and isinstance(mlp, DenseLayer):
            mixed = MixedLayer(beside.router.weight, beside.experts)
            mlp = BesideExperts(mlp, mixed, beside.choose, beside.before, beside.after, beside.after_mlp)
        told = None if side is None else FusedSide(side.gate.weight, side.out.weight, side.after)
        return replace(found, mlp=mlp, side=told, scale=layer.scalar)

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        found = super().fusible_attention(index, attention)
        if isinstance(found, GroupedQueries) and self._keeps(index):
            return replace(found, value_norm=self._value_norms[found.head_dim])
        return found

    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        self._tokens = tokens_of(attention)  # for the layers of this pass
        wanted = wanted if self._is_last else None
        cache = self.fused_over(attention)
        if cache is not None:
            return self._run_fused(token_ids, positions, embeds, cache, wanted, stream)
        taken, wanted = self.taken_last(wanted)
        rotations, x = self.rotations(positions), self.embedded(token_ids, embeds) if stream is None else stream
        sides = None if self._side is None else self._side_inputs(self._side, token_ids, x)
        for index, layer in zip(self._places, self._layers, strict=True):
            normed = self.norm(x, layer.norms.before_attention)
            rows = wanted if index == self.last_kept else None
            attended = self.attend(index, layer, normed, rotations[self.rotation_of[index]], attention, rows)
            if rows is not None:
                if not len(rows):
                    return x[:0]
                x, rotations = self.ops.take_rows(x, rows), self.rotations(positions[self.ops.upload(rows)])
                sides = None if sides is None else self._sides_of(sides, rows)
                attention = cast(PagedAttentionLayer, attention).ending_at(rows)
                self._tokens = tokens_of(attention)
            x = self._fed(layer, self.after_attention(layer, x, attended))
            if sides is not None and layer.side is not None:
                x = x + self._from_side(layer.side, x, sides[:, index])
            x = x * layer.scalar
        return x if self._final_norm is None else self.rows_of(self.norm(x, self._final_norm), taken)

    def query_key_value(self, index: int, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dim, kv_heads = self.config.heads_of(index).head_dim, len(self._shard.kv_heads[index])
        rows, norms = self._linear(x, layer.attention.qkv).reshape([x.shape[0], -1, dim]), layer.norms
        q_heads = rows.shape[1] - (len(self.projections(index)) - 1) * kv_heads
        query = self.norm(rows[:, :q_heads], norms.query)
        if norms.key is None:
            return query, None, None
        key = self.norm(rows[:, q_heads : q_heads + kv_heads], norms.key)
        return query, key, self.norm(rows[:, rows.shape[1] - kv_heads :], self._value_norms[dim])

    def _fed(self, layer: Gemma4Layer, residual: Residual) -> Tensor:
        """The residual stream behind the MLP, and the experts beside it."""
        fed = self.mlp(layer, residual.normed)
        if layer.experts is not None:
            mixed = self._mixed(layer.experts, residual.x)
            fed = self.norm(fed, layer.experts.after_mlp) + self.norm(mixed, layer.experts.after)
        return residual.x + self.norm(fed, layer.norms.after_mlp)

    def _mixed(self, experts: ExpertsBeside, x: Tensor) -> Tensor:
        """What a token's experts make of the residual stream ``x [T, hidden]``, summed over the ranks."""
        logits = self._linear(self.norm(x, experts.choose), experts.router)
        given = self.norm(x, experts.before)
        return self.reduce(self.ops.mix_experts(given, logits, experts.experts, self._tokens))

    def besides(self, token_ids: KernelArray, positions: KernelArray, x: Tensor, cache: PagedCache) -> Besides:
        return NOTHING if self._side is None else Besides(sides=self._side_inputs(self._side, token_ids, x))

    def _side_inputs(self, side: SideEmbedding, token_ids: KernelArray, x: Tensor) -> Tensor:
        """``[T, layers, side size]``: what each layer is told of a token, whose embedding is ``x [T, hidden]``."""
        config, shape = self.config, [x.shape[0], self.config.num_layers, self.config.side_size]
        projected = (self._linear(x, side.projection) * config.hidden_size**-0.5).reshape(shape)
        own = self.ops.embedding(side.table, token_ids, config.side_size**0.5).reshape(shape)
        return (self.norm(projected, side.norm) + own) * 2**-0.5

    def _sides_of(self, sides: Tensor, rows: NDArray[np.int64]) -> Tensor:
        tokens, *shape = sides.shape
        return self.ops.take_rows(sides.reshape([tokens, -1]), rows).reshape([len(rows), *shape])

    def _from_side(self, side: SideInput, x: Tensor, told: Tensor) -> Tensor:
        """What a layer's ``told [T, side size]`` adds to the residual stream ``x``."""
        ops, size = self.ops, self.config.side_size
        gate = ops.kernel_array(self._linear(x, side.gate))
        joined = ops.empty_like(gate, (x.shape[0], 2 * size))
        joined[:, :size], joined[:, size:] = gate, ops.kernel_array(told)
        gated = ops.gelu_tanh_mul(ops.from_kernel_array(joined))
        return self.norm(self._linear(gated, side.out), side.after)
