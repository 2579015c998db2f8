"""Grouped-query attention: a member is the keys and values of one KV head, which some query heads share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.cache_controller.head_groups import Sharing
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.planner import can_be_dealt
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, AttentionKernels, BiasingKernels, HeadTable, RotatingKernels
from headwise.kernels.cuda.attention import AttentionShape, check_shape
from headwise.kernels.cuda.gqa_ranks import RanksShape
from headwise.kernels.cuda.kernels import CudaKernels
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.gqa import QUANTISED, gqa_layout
from headwise.kernels.select import make_kernels
from headwise.kernels.shared_base import SharedKernels, SharedRotatingKernels
from headwise.kernels.token_ranks import TokenRanks
from headwise.runtime.models.attention.base import CachedAttention, LayerCache, Serving, check_power_of_two
from headwise.runtime.models.attention.wanted import of_wanted
from headwise.runtime.models.base import Rotation
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.shard import fitting_sizes
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps

CPU_QUANTISED_HEAD_MULTIPLE = 16
"""Of the head size, for the CPU's kernels to read quantised keys and values: the lanes of a vector."""


@dataclass(frozen=True)
class GroupedQueryAttention:
    """`AttentionVariant` of a model of this geometry."""

    config: ModelConfig
    is_replicated = False

    def layout(self, block_size: int, slots: int, kv_dtype: str, layer: int = 0) -> BlockLayout:
        heads = self.config.heads_of(layer)
        return gqa_layout(block_size, slots, heads.head_dim, kv_dtype, heads.value_dim)

    def check(self, serving: Serving) -> None:
        """See `AttentionVariant.check`: ranks may not fit the heads, or kernels have no quantised cache of them."""
        check_heads_dealt(self.config, serving.tp_size)
        serving.check_context(self, self.config.num_layers)
        check_power_of_two(serving)
        if serving.device != "cpu" or serving.kernels == "reference" or serving.kv_dtype not in QUANTISED:
            return
        dims = sorted({dim for layer in range(self.config.num_layers) for dim in self.config.heads_of(layer).dims})
        odd = next((dim for dim in dims if dim % CPU_QUANTISED_HEAD_MULTIPLE), None)
        if odd is not None:
            raise ConfigError(
                f"kv_dtype {serving.kv_dtype} on a CPU takes heads of a multiple of {CPU_QUANTISED_HEAD_MULTIPLE}, "
                f"those of {serving.model} have {odd}: choose kv_dtype bfloat16"
            )

    def token_parts(self, layer: int, tp_size: int, most: int) -> int:
        """See `AttentionVariant.token_parts`: where so many ranks have the same head, all of which is kept, and equally
        many of its queries."""
        c = self.config
        heads = c.heads_of(layer)
        copies, rest = divmod(tp_size, heads.kv_heads)
        is_whole = all(policy.is_full for policy in c.policies[heads.cache_layer])
        return most if is_whole and not (rest or copies % most or c.query_heads_of(layer) % tp_size) else 1

    def host_kernels(self, name: str, threads: int) -> AttentionKernels:
        return make_kernels(name, threads)

    def gpu_kernels(
        self, parts: GpuParts, layouts: Sequence[BlockLayout], tp_size: int, dtype: str
    ) -> AttentionKernels:
        kernels = CudaKernels(parts)
        shapes = {
            (shape, layout.parts): layout.own
            for layer, layout in enumerate(layouts)
            for share in query_shares(self.config, layer, tp_size)
            for shape in self._shapes(layer, layout.own, share, tp_size, dtype)
            if layout.parts == 1 or not shape.both_ways
        }
        for (shape, keeping), layout in shapes.items():
            check_shape(shape, parts.launcher.sm)
            if keeping == 1:
                kernels.prepare(layout, shape, -(-max(self.config.kv_head_counts) // tp_size))
            else:
                kernels.prepare_shared(layout, RanksShape(shape, keeping))
        return kernels

    def _shapes(
        self, layer: int, layout: BlockLayout, share: int, tp_size: int, dtype: str
    ) -> Iterator[AttentionShape]:
        """What a layer asks of the kernels of a rank with ``share`` query heads over each of its KV heads."""
        c = self.config
        kv_heads = max(1, c.heads_of(layer).kv_heads // tp_size)
        for both_ways in (False, True) if c.sees_both_ways(layer) else (False,):
            yield AttentionShape.of(
                layout,
                share * kv_heads,
                kv_heads,
                dtype,
                c.attention_softcap,
                sink_logits=c.sink_logits,
                chunked=c.chunk > 0,
                both_ways=both_ways,
            )

    def over_cache(self, ops: TensorOps, kernels: Any, ranks: TokenRanks | None = None) -> CachedAttention:
        numbers = self.config.attention_scale, self.config.attention_softcap
        if ranks is None:
            return GroupedQueryOverCache(ops, kernels, *numbers)
        return SharedGroupedQueryOverCache(ops, kernels, *numbers, ranks)

    def weight_elements(self, layer: int = 0) -> int:
        c, heads = self.config, self.config.heads_of(layer)
        own = heads.kv_heads if heads.cache_layer == layer else 0
        return c.hidden_size * sum(heads.dims) * (c.query_heads_of(layer) + own)

    def geometry(self) -> str:
        c = self.config
        kinds = list(dict.fromkeys((heads.kv_heads, *heads.dims) for heads in map(c.heads_of, range(c.num_layers))))
        kv_heads = " or ".join(
            f"{count} KV heads of {dim}" + (f" (values {value})" if value != dim else "") for count, dim, value in kinds
        )
        shared = sum(heads.cache_layer != layer for layer, heads in enumerate(c.layer_heads))
        queries = " or ".join(map(str, dict.fromkeys(map(c.query_heads_of, range(c.num_layers)))))
        return f"{queries} query and {kv_heads}" + (f", {shared} layers use an earlier one's cache" if shared else "")

    def members(self, count: int, policy: HeadPolicy) -> str:
        return f"{count} (layer, KV head) pairs"


def query_shares(config: ModelConfig, layer: int, tp_size: int) -> list[int]:
    """Query heads over each of a rank's KV heads of a layer, ascending: ranks that share these may differ."""
    kv_heads = config.heads_of(layer).kv_heads
    share = config.query_heads_of(layer) // kv_heads
    keeping = {tp_size // kv_heads, -(-tp_size // kv_heads)} if tp_size > kv_heads else {1}
    return sorted({len(Sharing(part, ranks).of(share)) for ranks in keeping for part in range(ranks)})


def check_heads_dealt(config: ModelConfig, tp_size: int) -> None:
    """Raise ConfigError unless ranks can have equally many KV heads, or one each, and at least one query head."""
    if not all(can_be_dealt(count, tp_size) for count in config.kv_head_counts):
        heads = " or ".join(map(str, config.kv_head_counts))
        wrong = f"does not divide the model's {heads} KV heads, nor is it more than these"
    elif tp_size > config.num_heads:
        wrong = f"is more than the model's {config.num_heads} query heads"
    else:
        return
    raise ConfigError(f"tp_size {tp_size} {wrong}; sizes that fit: {fitting_sizes(config)}")


class GroupedQueryOverCache:
    """`CachedAttention` of queries, keys and values that are not rotated yet."""

    def __init__(self, ops: TensorOps, kernels: AttentionKernels, scale: float, softcap: float) -> None:
        self._ops, self._kernels = ops, kernels
        self._rotating = kernels if isinstance(kernels, RotatingKernels) else None
        self._biasing = kernels if isinstance(kernels, BiasingKernels) else None
        self._scale, self._softcap = scale, softcap

    def __call__(
        self,
        cache: LayerCache,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rotation: Rotation,
        sink_logits: KernelArray | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """``query [T, q_heads, D]``, ``key [T, kv_heads, D]`` and ``value [T, kv_heads, V]`` of this rank ->
        ``[T, q_heads, V]``, or of the wanted rows.

        Without keys and values the step's are there: an earlier layer wrote them. ``sink_logits`` are as for
        `AttentionKernels.attend`. ``bias`` is what queries, keys and values still lack, see `BiasingKernels`.
        """
        ops = self._ops
        if key is None or value is None:
            queries = ops.kernel_array(ops.rope(query, *rotation))
        else:
            queries = self.written(cache, query, key, value, rotation, bias)
        cache.wait()
        cache, queries = of_wanted(cache, queries, ops)
        seen = self._room(queries, value) if cache.out is None else cache.out
        if queries.shape[0]:
            self.attend(cache, queries, sink_logits, seen)
        return ops.from_kernel_array(seen)

    def written(
        self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, bias: Tensor | None
    ) -> KernelArray:
        """Rotated queries; the step's keys and values are in the cache."""
        ops, where = self._ops, (cache.arena, cache.layout, cache.batch, cache.heads)
        if self._rotating is None:
            queries, keys = (ops.kernel_array(ops.rope(tensor, *rotation)) for tensor in (query, key))
            self._kernels.write_kv(keys, ops.kernel_array(value), *where)
            return queries
        queries, keys, values = ops.kernel_array(query), ops.kernel_array(key), ops.kernel_array(value)
        cosines, sines = rotation
        if bias is None:
            self._rotating.write_kv_rope(queries, keys, values, cosines, sines, *where)
        else:
            assert self._biasing is not None, "operations leave no bias to kernels that do not add it"
            added = ops.kernel_array(bias)
            self._biasing.write_kv_rope(queries, keys, values, cosines, sines, *where, bias=added)
        return queries

    def attend(
        self, cache: LayerCache, queries: KernelArray, sink_logits: KernelArray | None, seen: KernelArray
    ) -> None:
        """What ``queries`` see of the cache, into ``seen``."""
        self._kernels.attend(
            queries, cache.arena, cache.layout, *self.seen(cache), scale=self._scale, softcap=self._softcap, out=seen,
            sink_logits=sink_logits,
        )  # fmt: skip

    def result_of(self, *projected: Any) -> KernelArray:
        """See `CachedAttention.result_of`."""
        query, _, value, *_ = projected
        return self._room(self._ops.kernel_array(query), value)

    def _room(self, queries: KernelArray, value: Tensor | None) -> KernelArray:
        """For what they see: means of values, which are as large as keys where these are an earlier layer's."""
        size = queries.shape[2] if value is None else value.shape[2]
        return self._ops.empty_like(queries, (*queries.shape[:2], size))

    def seen(self, cache: LayerCache) -> tuple[AttentionBatch, HeadTable]:
        """What the kernels attend to for this layer."""
        return cache.batch, cache.heads


class SharedGroupedQueryOverCache(GroupedQueryOverCache):
    """The same where some layers' KV head is kept by ``ranks`` together."""

    def __init__(self, ops: TensorOps, kernels: SharedKernels, scale: float, softcap: float, ranks: TokenRanks) -> None:
        super().__init__(ops, kernels, scale, softcap)
        self._sharing, self._ranks = kernels, ranks
        self._turning = kernels if isinstance(kernels, SharedRotatingKernels) else None

    def written(
        self, cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, bias: Tensor | None
    ) -> KernelArray:
        if cache.layout.parts == 1:
            return super().written(cache, query, key, value, rotation, bias)
        ops, where = self._ops, (cache.arena, cache.layout.own, cache.batch, cache.heads, self._ranks.share)
        if self._turning is None:
            queries, keys = (ops.kernel_array(ops.rope(tensor, *rotation)) for tensor in (query, key))
            self._sharing.write_own(keys, ops.kernel_array(value), *where)
            return queries
        queries, keys, values = ops.kernel_array(query), ops.kernel_array(key), ops.kernel_array(value)
        (cosines, sines), added = rotation, None if bias is None else ops.kernel_array(bias)
        self._turning.write_own_rope(queries, keys, values, cosines, sines, *where, bias=added)
        return queries

    def attend(
        self, cache: LayerCache, queries: KernelArray, sink_logits: KernelArray | None, seen: KernelArray
    ) -> None:
        if cache.layout.parts == 1:
            super().attend(cache, queries, sink_logits, seen)
            return
        self._sharing.attend_shared(
            queries, cache.arena, cache.layout.own, cache.batch, cache.heads, self._ranks, scale=self._scale,
            softcap=self._softcap, out=seen, sink_logits=sink_logits,
        )  # fmt: skip
