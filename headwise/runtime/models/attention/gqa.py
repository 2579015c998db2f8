"""Grouped-query attention: a member is the keys and values of one KV head, which some query heads share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionKernels, RotatingKernels
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.select import make_kernels
from headwise.runtime.models.attention.base import LayerCache, Serving
from headwise.runtime.models.base import ModelConfig, Rotation
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps

CPU_INT8_HEAD_MULTIPLE = 16
"""Of the head size, for the CPU's kernels to read int8 keys and values: the lanes of a vector."""


@dataclass(frozen=True)
class GroupedQueryAttention:
    """`AttentionVariant` of a model of this geometry."""

    config: ModelConfig
    is_replicated = False

    def layout(self, block_size: int, slots: int, kv_dtype: str) -> BlockLayout:
        return gqa_layout(block_size, slots, self.config.head_dim, kv_dtype)

    def check(self, serving: Serving) -> None:
        """See `AttentionVariant.check`: a CPU's kernels have no quantised cache for some sizes of heads."""
        if serving.device != "cpu" or serving.kernels == "reference" or serving.kv_dtype != "int8":
            return
        if self.config.head_dim % CPU_INT8_HEAD_MULTIPLE:
            raise ConfigError(
                f"kv_dtype int8 on a CPU takes heads of a multiple of {CPU_INT8_HEAD_MULTIPLE}, those of "
                f"{serving.model} have {self.config.head_dim}: choose kv_dtype bfloat16"
            )

    def host_kernels(self, name: str, threads: int) -> AttentionKernels:
        return make_kernels(name, threads)

    def over_cache(self, ops: TensorOps, kernels: Any) -> GroupedQueryOverCache:
        return GroupedQueryOverCache(ops, kernels, self.config.attention_scale, self.config.attention_softcap)

    def weight_elements(self) -> int:
        c = self.config
        return 2 * c.hidden_size * c.head_dim * (c.num_heads + c.num_kv_heads)

    def geometry(self) -> str:
        c = self.config
        return f"{c.num_heads} query and {c.num_kv_heads} KV heads of {c.head_dim}"

    def members(self, count: int) -> str:
        return f"{count} (layer, KV head) pairs"


class GroupedQueryOverCache:
    """`CachedAttention` of queries, keys and values that are not rotated yet."""

    def __init__(self, ops: TensorOps, kernels: AttentionKernels, scale: float, softcap: float) -> None:
        self._ops, self._kernels = ops, kernels
        self._rotating = kernels if isinstance(kernels, RotatingKernels) else None
        self._scale, self._softcap = scale, softcap

    def __call__(
        self,
        cache: LayerCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: Rotation,
        sink_logits: KernelArray | None = None,
    ) -> Tensor:
        """``query [T, q_heads, D]``, ``key`` and ``value [T, kv_heads, D]`` of this rank -> ``[T, q_heads, D]``.

        ``sink_logits`` are as for `AttentionKernels.attend`.
        """
        ops = self._ops
        if self._rotating is None:
            query, key = ops.rope(query, *rotation), ops.rope(key, *rotation)
        queries, keys, values = (ops.kernel_array(tensor) for tensor in (query, key, value))
        where = cache.arena, cache.layout, cache.batch, cache.heads
        if self._rotating is None:
            self._kernels.write_kv(keys, values, *where)
        else:
            cosines, sines = rotation
            self._rotating.write_kv_rope(queries, keys, values, cosines, sines, *where)
        cache.wait()
        out = ops.empty_like(queries)
        self._kernels.attend(
            queries, *where, scale=self._scale, softcap=self._softcap, out=out, sink_logits=sink_logits
        )
        return ops.from_kernel_array(out)
