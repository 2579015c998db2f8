"""Attention to a window, and behind it to entries that stand for several tokens each (DeepSeek-V4).

A layer has up to three members, each in a cache of its own: its tokens' keys, rows that entries are made of, and
entries. Tensor parallel: query heads are dealt out, and all that is kept is on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.compressed import entries_layout, rows_layout
from headwise.kernels.compressed_base import CompressedKernels, Entries, EntryMaking, Kept
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.select import make_compressed_kernels
from headwise.kernels.token_ranks import TokenRanks
from headwise.runtime.models.attention.base import CachedAttention, Kernels, LayerCache, Serving
from headwise.runtime.models.attention.wanted import of_wanted
from headwise.runtime.models.base import ModelConfig, Rotation
from headwise.runtime.models.compressed_config import CompressedConfig
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps

CPU_SIZE_MULTIPLE = 32
"""Of numbers of a key, and of one of an indexer, for the CPU's kernels to read them as whole vectors."""


@dataclass(frozen=True)
class CompressedAttention:
    """`AttentionVariant` of a model of this geometry."""

    config: ModelConfig
    compressed: CompressedConfig
    is_replicated = True

    def layout(self, block_size: int, slots: int, kv_dtype: str, layer: int = 0) -> BlockLayout:
        own, cache = self.compressed, self.compressed.cache_of(layer)
        if cache is None:
            return rows_layout(block_size, slots, own.head_dim, kv_dtype)
        first = cache.layers[0]
        if cache.kind == "rows":
            return rows_layout(block_size, slots, own.row_width(first), kv_dtype)
        rate = own.rates[first]
        if own.is_indexed(first):
            return entries_layout(block_size, slots, own.head_dim, rate, kv_dtype, own.index_dim)
        indexed = next((layer for layer in range(len(own.rates)) if own.is_indexed(layer)), None)
        least = 0
        if indexed is not None:
            least = entries_layout(block_size, 1, own.head_dim, own.indexed, kv_dtype, own.index_dim).slot_bytes
        width = len(cache.layers) * own.head_dim
        return entries_layout(block_size, slots, width, rate, kv_dtype, least_bytes=least)

    def check(self, serving: Serving) -> None:
        """See `AttentionVariant.check`."""
        own, heads = self.compressed, self.config.num_heads
        self.layout(1, 1, serving.kv_dtype)
        if serving.device == "cuda":
            raise ConfigError(
                f"{serving.model} compresses its cache (DeepSeek-V4), for which there are no kernels of a GPU yet: "
                "choose device cpu"
            )
        if serving.tp_size > heads:
            raise ConfigError(
                f"tp_size {serving.tp_size} is more than the {heads} query heads of {serving.model}: choose up to that"
            )
        serving.check_context(self, self.config.num_layers)
        odd = [size for size in (own.head_dim, own.index_dim) if size % CPU_SIZE_MULTIPLE]
        if serving.kernels != "reference" and odd:
            raise ConfigError(
                f"the kernels of a CPU take keys of a multiple of {CPU_SIZE_MULTIPLE} numbers, those of "
                f"{serving.model} have {odd[0]}: choose kernels reference"
            )

    def token_parts(self, layer: int, tp_size: int, most: int) -> int:
        return 1

    def host_kernels(self, name: str, threads: int) -> CompressedKernels:
        return make_compressed_kernels(name, threads)

    def gpu_kernels(self, parts: GpuParts, layouts: Sequence[BlockLayout], tp_size: int, dtype: str) -> Kernels:
        raise ConfigError("there are no kernels of a GPU for compressed attention: choose device cpu")

    def over_cache(self, ops: TensorOps, kernels: Any, ranks: TokenRanks | None = None) -> CachedAttention:
        return CompressedOverCache(ops, kernels, self.config.attention_scale)

    def weight_elements(self, layer: int = 0) -> int:
        own, hidden, heads = self.compressed, self.config.hidden_size, self.config.num_heads
        if layer >= len(own.rates):
            return 0
        size = heads * own.head_dim
        queries = own.q_rank * (hidden + size) + hidden * own.head_dim
        out = size * own.out_rank + own.out_groups * own.out_rank * hidden
        rows = hidden * own.row_width(layer) if own.rates[layer] else 0
        asking = own.index_heads * (own.q_rank * own.index_dim + hidden) if own.is_indexed(layer) else 0
        return queries + out + rows + asking

    def geometry(self) -> str:
        own = self.compressed
        rates = " or ".join(map(str, sorted({rate for rate in own.rates if rate})))
        text = f"{self.config.num_heads} query heads of {own.head_dim} over {own.window} tokens and entries of {rates}"
        if not own.indexed:
            return text
        indexer = f"an indexer of {own.index_heads} heads of {own.index_dim} chooses {own.index_top}"
        return f"{text}; of those of {own.indexed} {indexer}"

    def members(self, count: int, policy: HeadPolicy) -> str:
        if policy.is_full:
            return f"{count} times entries, some of several layers"
        own = self.compressed
        of_rows = {2 * rate if rate == own.indexed else rate for rate in own.rates if rate}
        kinds = ["keys"] * (policy.window == own.window) + ["rows for entries"] * (policy.window in of_rows)
        return f"{count} layers' {' or '.join(kinds)}"


@dataclass(frozen=True)
class Asking:
    """What a layer with entries gives of a step's tokens.

    rows:   ``[T, width]``, that entries are made of
    index:  what an indexer's queries ask with, rotated; None: all entries are seen
    """

    rows: Tensor
    making: EntryMaking
    index: IndexQueries | None = None


class CompressedOverCache:
    """`CachedAttention` of queries and keys that are not rotated yet."""

    def __init__(self, ops: TensorOps, kernels: CompressedKernels, scale: float) -> None:
        self._ops, self._kernels, self._scale = ops, kernels, scale

    def __call__(
        self,
        cache: LayerCache,
        query: Tensor,
        key: Tensor,
        rotation: Rotation,
        back: Rotation,
        sink_logits: KernelArray,
        asking: Asking | None = None,
    ) -> Tensor:
        """``query [T, q_heads, size]`` of this rank, ``key [T, size]`` -> ``[T, q_heads, size]``, or the wanted rows.

        back: rotates what is seen, which is keys, back to where it came from
        """
        ops, kernels = self._ops, self._kernels
        window = Kept(cache.layout, cache.heads)
        queries = ops.kernel_array(ops.rope(query, *rotation))
        keys = ops.kernel_array(ops.rope(key.reshape([key.shape[0], 1, -1]), *rotation))
        kernels.write_rows(keys[:, 0], cache.arena, window, cache.batch)
        entries = None
        if asking is not None:
            rows, made = (Kept(*side) for side in cache.sides)
            entries = Entries(asking.making, rows, made)
            kernels.write_rows(ops.kernel_array(asking.rows), cache.arena, rows, cache.batch)
        cache.wait()
        if entries is not None:
            kernels.make_entries(cache.arena, entries, cache.batch)
        wanted, index = cache.wanted, None if asking is None else asking.index
        if wanted is not None:
            at = ops.upload(wanted)
            back = back[0][at], back[1][at]
            index = None if index is None else index.of_rows(at)
        cache, queries = of_wanted(cache, queries, ops)
        seen = ops.empty_like(queries)
        if queries.shape[0]:
            kernels.attend(
                queries, cache.arena, window, entries, index, cache.batch, scale=self._scale, sink_logits=sink_logits,
                out=seen,
            )  # fmt: skip
        return ops.rope(ops.from_kernel_array(seen), *back)

    def result_of(self, *projected: Any) -> KernelArray:
        """See `CachedAttention.result_of`."""
        return self._ops.empty_like(self._ops.kernel_array(projected[0]))


def at_place(making: EntryMaking, place: int, head_dim: int) -> EntryMaking:
    """The same where entries lie at a place beside those of other layers."""
    return replace(making, begin=place * head_dim)
