"""DeepSeek-V3.2: V3 with an indexer (DSA) in each layer, which chooses the tokens that its attention sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.policy import FULL
from headwise.errors import ModelError
from headwise.kernels.dsa_base import IndexKeys, IndexQueries
from headwise.kernels.fused import Attention
from headwise.runtime.models.attention.dsa import Choosing
from headwise.runtime.models.deepseek import MOST_RANK, Deepseek, LatentProjections, parse_latents
from headwise.runtime.models.deepseek_routing import GroupedMoeConfig, v3_moe
from headwise.runtime.models.hf_config import HfConfig, named_layer_types, positive
from headwise.runtime.models.layers import Linear
from headwise.runtime.models.mla_config import IndexerConfig
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.values import shown
from headwise.runtime.ops.base import KernelArray, Tensor

ARCHITECTURE = "DeepseekV32ForCausalLM"

_INDEXED = "indexed_attention"
_OWN, _SHARED = "full", "shared"

Floats = NDArray[np.float32]


def parse(config: HfConfig) -> ModelConfig:
    return parse_indexed(config, ARCHITECTURE, v3_moe)


def parse_indexed(
    config: HfConfig,
    architecture: str,
    read_moe: Callable[[HfConfig, int], GroupedMoeConfig],
    shared: Callable[[int], frozenset[int]] = lambda num_layers: frozenset(),
) -> ModelConfig:
    """As `parse_latents`, with an indexer in every layer but those that are ``shared(num_layers)``."""
    decoder = parse_latents(config, architecture, read_moe)
    kinds = {named_layer_types(config, lambda layer: _INDEXED)(layer) for layer in range(decoder.num_layers)}
    if kinds != {_INDEXED}:
        raise ModelError(f"config.json: layer types {shown(sorted(kinds))} are not supported; known is {_INDEXED!r}")
    mla = decoder.mla
    assert mla is not None, "parsed so"
    if mla.q_rank is None:
        raise ModelError("config.json: 'q_lora_rank' must be a positive integer: an indexer's queries are made of it")
    indexer = IndexerConfig(
        heads=positive(config, "index_n_heads", default=64, most=MOST_RANK),
        head_dim=positive(config, "index_head_dim", default=128, most=MOST_RANK),
        top=positive(config, "index_topk", default=2048),
        shared=shared(decoder.num_layers),
    )
    if indexer.head_dim < mla.rotated:
        raise ModelError(
            f"config.json: 'index_head_dim' {indexer.head_dim} is less than 'qk_rope_head_dim' {mla.rotated}, the part "
            "of an indexer's head that is rotated"
        )
    beside = len(indexer.layers(decoder.num_layers)) if indexer.shared else 0
    return replace(decoder, mla=replace(mla, indexer=indexer), policies=(*decoder.policies, *((FULL,),) * beside))


def shared_indexers(config: HfConfig, num_layers: int) -> frozenset[int] | None:
    """The layers that ``indexer_types`` names ``shared``; None: the field is missing. Raises ModelError naming it."""
    kinds = config.get("indexer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) < num_layers or not {*map(str, kinds)} <= {_OWN, _SHARED}:
        raise ModelError(
            f"config.json: 'indexer_types' must name {num_layers} layers {_OWN!r} or {_SHARED!r}, got {shown(kinds)}"
        )
    return after_the_first(frozenset(layer for layer in range(num_layers) if kinds[layer] == _SHARED))


def after_the_first(shared: frozenset[int]) -> frozenset[int]:
    """``shared``, or ModelError where the first layer is to see what an earlier one's indexer has chosen."""
    if 0 in shared:
        raise ModelError("config.json: the first layer must have an indexer of its own, and is to share another one's")
    return shared


@dataclass(frozen=True)
class IndexedProjections(LatentProjections):
    """The same with a layer's indexer, whole on every rank.

    index_queries: of all its heads, out of ``q_rank`` numbers
    index_into:    a token's key, and the weights of heads: ``[key | weights]``
    key_norm:      weight and bias of the layer norm of keys
    """

    index_queries: Linear
    index_into: Linear
    key_norm: tuple[KernelArray, KernelArray]


class DeepseekV32(Deepseek):
    """DeepSeek-V3 over `IndexedProjections`.

    The indexer rotates the elements ``(i, i + D / 2)``, as the rope operation does: its rows keep their order. Layers
    that see what an earlier one's has chosen have none.
    """

    def index_order(self) -> NDArray[np.int64]:
        """Of an indexer's head's elements, that in which the rope operation turns the pairs that the model turns."""
        return np.arange(self.indexer.head_dim)

    @property
    def key_norm_eps(self) -> float:
        """Of the layer norm of an indexer's keys."""
        return 1e-6

    @property
    def indexer(self) -> IndexerConfig:
        indexer = self.mla.indexer
        assert indexer is not None, "parsed so"
        return indexer

    def load_attention(self, layer: int, at: str) -> LatentProjections:
        found, indexer, hidden = super().load_attention(layer, at), self.indexer, self.config.hidden_size
        if layer in indexer.shared:
            return found
        at, dim = f"{at}indexer.", indexer.head_dim

        def into() -> Floats:
            key = self._index_part(f"{at}wk.weight", (dim, hidden))[order]
            return np.concatenate([key, self._index_part(f"{at}weights_proj.weight", (indexer.heads, hidden))])

        def queries() -> Floats:
            rows = self._index_part(f"{at}wq_b.weight", (indexer.heads * dim, self.mla.q_rank))
            return rows.reshape(indexer.heads, dim, -1)[:, order].reshape(rows.shape)

        def norm_part(name: str) -> KernelArray:
            return ops.kernel_array(ops.norm_weight(self._index_part(f"{at}k_norm.{name}", (dim,))[order]))

        prepare, ops, order = self._prepare, self.ops, self.index_order()
        return IndexedProjections(
            **vars(found),
            index_queries=Linear(prepare(f"{at}wq_b.weight", lambda: ops.linear_weight(queries()))),
            index_into=Linear(prepare(f"{at}wk + weights_proj", lambda: ops.linear_weight(into()))),
            key_norm=(norm_part("weight"), norm_part("bias")),
        )

    def _index_part(self, name: str, expected: tuple[int | None, ...]) -> Floats:
        found = self._weights.tensor(name)
        if found.shape != expected:
            raise ModelError(
                f"{name} has the shape {found.shape} where config.json says {expected}: weights and config.json do not "
                "belong together"
            )
        return found

    # ---- computation ----

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        return None  # what chooses tokens is not a part of fused layers, nor is what sees them alone

    def choosing(self, index: int, weights: LatentProjections, x: Tensor, ranked: Tensor) -> tuple[Choosing]:
        asked = self._asked(weights, x, ranked) if isinstance(weights, IndexedProjections) else None
        return (Choosing(asked, is_kept=index + 1 in self.indexer.shared),)

    def _asked(self, weights: IndexedProjections, x: Tensor, ranked: Tensor) -> tuple[IndexQueries, IndexKeys]:
        indexer, tokens = self.indexer, x.shape[0]
        queries = self.ops.kernel_array(self._linear(ranked, weights.index_queries))
        made = self._linear(x, weights.index_into)
        rows, of_heads = made[:, : indexer.head_dim], made[:, indexer.head_dim :]
        asked = IndexQueries(
            queries.reshape(tokens, indexer.heads, indexer.head_dim), self.ops.kernel_array(of_heads), indexer.top
        )
        return asked, IndexKeys(self.ops.kernel_array(rows), *weights.key_norm, self.key_norm_eps)
