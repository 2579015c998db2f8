"""Decoders that norm the queries of all heads as one, and the keys of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from headwise.errors import ModelError
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.layers import Layer
from headwise.runtime.ops.base import KernelArray, Tensor


class WholeNormDecoder(Decoder):
    """The shared decoder with such norms.

    Tensor parallel: a rank has the weights of its own heads, and one more sum over the ranks, of a few numbers for each
    token, tells each how large all of them are together.
    """

    norm_names: ClassVar[Mapping[str, str]] = {
        **Decoder.norm_names,
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    }

    def load_norm(self, layer: int, norm: str, name: str) -> Tensor:
        if norm not in ("query", "key"):
            return super().load_norm(layer, norm, name)
        heads, shard, whole = self.config.heads_of(layer), self._shard, self._weights.tensor(name)
        count, dim = (self.config.num_heads if norm == "query" else heads.kv_heads), heads.head_dim
        if whole.shape != (count * dim,):
            raise ModelError(
                f"{name} has the shape {list(whole.shape)}, config.json says {count} heads of {dim}: weights and "
                "config.json do not belong together"
            )
        own = [(head, head + 1) for head in shard.kv_heads[layer]]
        parts = shard.query_heads(self.config, layer) if norm == "query" else own
        return self.ops.norm_weight(np.concatenate([whole[start * dim : stop * dim] for start, stop in parts]))

    def normed_heads(self, layer: Layer, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        norms = layer.norms
        if self._shard.size == 1:
            return self._as_one(query, norms.query), self._as_one(key, norms.key)
        ops, config = self.ops, self.config
        copies = self._shard.sharing[0].ranks if self._shard.sharing else 1  # of a key, on as many ranks
        queries, keys = ops.kernel_array(query), ops.kernel_array(key)
        sums = np.concatenate([_squares(queries), _squares(keys) / np.float32(copies)], axis=1)
        sums = ops.kernel_array(self.reduce(ops.from_kernel_array(sums)))
        counts = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        means = (sums[:, which].astype(np.float32) / np.float32(count) for which, count in enumerate(counts))
        by_query, by_key = (1 / np.sqrt(mean + np.float32(config.rms_norm_eps)) for mean in means)
        return self._scaled(queries, by_query, norms.query), self._scaled(keys, by_key, norms.key)

    def _as_one(self, heads: Tensor, weight: Tensor) -> Tensor:
        shape = heads.shape
        return self.norm(heads.reshape([shape[0], -1]), weight).reshape(shape)

    def _scaled(self, heads: KernelArray, factors: KernelArray, weight: Tensor) -> Tensor:
        weights = self.ops.kernel_array(weight).reshape(1, *heads.shape[1:]).astype(np.float32)
        scaled = heads.astype(np.float32) * factors.reshape(-1, 1, 1) * weights
        return self.ops.from_kernel_array(scaled.astype(heads.dtype))


def _squares(heads: KernelArray) -> KernelArray:
    """Sums of the squares of all heads of a token, float32 ``[T, 1]``."""
    rows = heads.reshape(len(heads), -1).astype(np.float32)
    return (rows * rows).sum(axis=1, keepdims=True)
