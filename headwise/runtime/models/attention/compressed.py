"""Attention to a window, and behind it to entries that stand for several tokens each (DeepSeek-V4).

A layer has up to three members, each in a cache of its own: its tokens' keys, rows that entries are made of, and
entries. Tensor parallel: query heads are dealt out, and all that is kept is on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.compressed import entries_layout, keys_layout, rows_layout
from headwise.kernels.compressed_base import (
    Entries,
    EntryMaking,
    Kept,
    PlainCompressedKernels,
    TurningCompressedKernels,
)
from headwise.kernels.compressed_rows import QUANTISED
from headwise.kernels.cuda.compressed_kernels import CudaCompressedKernels
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.turned import check_turning
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.select import make_compressed_kernels
from headwise.kernels.token_ranks import TokenRanks
from headwise.runtime.models.attention.base import CachedAttention, LayerCache, Serving
from headwise.runtime.models.attention.mla import heads_of_ranks
from headwise.runtime.models.attention.wanted import of_wanted
from headwise.runtime.models.base import Rotation
from headwise.runtime.models.compressed_config import CompressedConfig, SideCache
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps

CPU_SIZE_MULTIPLE = 32
"""Of numbers of a key, and of one of an indexer, for the CPU's kernels to read them as whole vectors."""


MOST_PADDING = 0.05
"""Of entries that an indexer chooses, so that others that lie side by side are as large."""


@dataclass(frozen=True)
class CompressedAttention:
    """`AttentionVariant` of a model of this geometry."""

    config: ModelConfig
    compressed: CompressedConfig
    is_replicated = True

    def layout(self, block_size: int, slots: int, kv_dtype: str, layer: int = 0) -> BlockLayout:
        own, cache = self.compressed, self.compressed.cache_of(layer)
        if cache is None:
            return keys_layout(block_size, slots, own.head_dim, kv_dtype, own.rotated // 2)
        if cache.kind == "rows":
            return rows_layout(block_size, slots, cache.width, kv_dtype)
        return self._entries(block_size, slots, kv_dtype, cache, self._least_bytes(block_size, kv_dtype, cache))

    def _least_bytes(self, block_size: int, kv_dtype: str, cache: SideCache) -> int:
        """Of a slot of entries: those of all layers are to fill blocks of the same bytes, if little is lost by it."""
        own = self.compressed
        firsts = {own.is_indexed(each.layers[0]): each for each in reversed(own.caches) if each.kind == "entries"}
        sizes = {is_indexed: self._entries(block_size, 1, kv_dtype, each) for is_indexed, each in firsts.items()}
        if len(sizes) < 2:
            return 0
        indexed, others = sizes[True].slot_bytes, sizes[False].slot_bytes
        is_close = indexed < others <= indexed * (1 + MOST_PADDING)
        return others if is_close and own.is_indexed(cache.layers[0]) else indexed

    def _entries(
        self, block_size: int, slots: int, kv_dtype: str, cache: SideCache, least_bytes: int = 0
    ) -> BlockLayout:
        own, first = self.compressed, cache.layers[0]
        index_dim, beside = own.index_dim if own.is_indexed(first) else 0, len(cache.layers)
        return entries_layout(
            block_size, slots, own.head_dim, own.rates[first], kv_dtype, own.rotated // 2, index_dim=index_dim,
            beside=beside, least_bytes=least_bytes,
        )  # fmt: skip

    def check(self, serving: Serving) -> None:
        """See `AttentionVariant.check`."""
        own, heads = self.compressed, self.config.num_heads
        self.layout(1, 1, serving.kv_dtype)
        if serving.device == "cuda" and serving.kv_dtype in QUANTISED and serving.dtype != "bfloat16":
            raise ConfigError(
                f"kv_dtype {serving.kv_dtype} of {serving.model} on a GPU takes dtype bfloat16, in which it keeps the "
                f"rows that entries are made of, not {serving.dtype}"
            )
        if serving.device == "cuda" and serving.tensor_ops == "paddle":
            raise ConfigError(
                f"tensor_ops paddle has no hyper-connections, which {serving.model} needs: choose tensor_ops cupy"
            )
        if serving.tp_size > heads:
            raise ConfigError(
                f"tp_size {serving.tp_size} is more than the {heads} query heads of {serving.model}: choose up to that"
            )
        serving.check_context(self, self.config.num_layers)
        odd = [size for size in (own.head_dim, own.index_dim) if size % CPU_SIZE_MULTIPLE]
        if serving.device != "cuda" and serving.kernels != "reference" and odd:
            raise ConfigError(
                f"the kernels of a CPU take keys of a multiple of {CPU_SIZE_MULTIPLE} numbers, those of "
                f"{serving.model} have {odd[0]}: choose kernels reference"
            )

    def token_parts(self, layer: int, tp_size: int, most: int) -> int:
        return 1

    def host_kernels(self, name: str, threads: int) -> PlainCompressedKernels:
        return make_compressed_kernels(name, threads)

    def gpu_kernels(
        self, parts: GpuParts, layouts: Sequence[BlockLayout], tp_size: int, dtype: str
    ) -> CudaCompressedKernels:
        """See `AttentionVariant.gpu_kernels`. ``layouts`` are of layers, and behind them of caches beside these."""
        kernels, own, count = CudaCompressedKernels(parts), self.compressed, len(self.compressed.rates)
        caches = zip(layouts[count:], own.caches, strict=True)
        made = {layout: cache.layers[0] for layout, cache in caches if cache.kind == "entries"}
        check_turning(own.head_dim, own.rotated // 2, numpy_dtype(dtype).itemsize)
        for heads in heads_of_ranks(self.config, tp_size):
            kernels.prepare(layouts[0], heads, own.head_dim, dtype)
            for layout, layer in made.items():
                index_heads = own.index_heads if own.is_indexed(layer) else 0
                kernels.prepare_entries(layouts[0], layout, heads, own.head_dim, dtype, index_heads, own.index_dim)
        return kernels

    def over_cache(self, ops: TensorOps, kernels: Any, ranks: TokenRanks | None = None) -> CachedAttention:
        return CompressedOverCache(ops, kernels, self.config.attention_scale, self.compressed.rotated)

    def weight_elements(self, layer: int = 0) -> int:
        own, hidden, heads = self.compressed, self.config.hidden_size, self.config.num_heads
        if layer >= len(own.rates):
            return 0
        size = heads * own.head_dim
        queries = own.q_rank * (hidden + size) + hidden * own.head_dim
        out = size * own.out_rank + own.out_groups * own.out_rank * hidden
        rows = hidden * sum(own.row_widths(layer)) if own.rates[layer] else 0
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
        in_pieces = own.pieces > 1 and "rows for entries" in kinds
        return f"{count} times {' or '.join(kinds)}{', in pieces' * in_pieces}"


@dataclass(frozen=True)
class Asking:
    """What a layer with entries gives of a step's tokens.

    rows:   ``[T, width]``, that entries are made of, side by side
    index:  what an indexer's queries ask with, not rotated yet; None: all entries are seen
    """

    rows: Tensor
    making: EntryMaking
    index: IndexQueries | None = None


class CompressedOverCache:
    """`CachedAttention` of queries and keys that are not rotated yet.

    rotated: elements of heads that are, and of an indexer's
    """

    def __init__(
        self, ops: TensorOps, kernels: PlainCompressedKernels | TurningCompressedKernels, scale: float, rotated: int
    ) -> None:
        self._ops, self._kernels, self._scale, self._angles = ops, kernels, scale, rotated // 2
        self._turning = kernels if isinstance(kernels, TurningCompressedKernels) else None
        self._plain = None if isinstance(kernels, TurningCompressedKernels) else kernels

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
        window, entries, index = Kept(cache.layout, cache.heads), None, None
        queries = self._written(cache, window, query, key, rotation)
        if asking is not None:
            *rows, made = (Kept(*side) for side in cache.sides)
            entries = Entries(asking.making, tuple(rows), made)
            kernels.write_pieces(ops.kernel_array(asking.rows), cache.arena, entries, cache.batch)
            index = None if asking.index is None else self._turned(asking.index, rotation)
        cache.wait()
        if entries is not None:
            kernels.make_entries(cache.arena, entries, cache.batch)
        if cache.wanted is not None:
            at = ops.upload(cache.wanted)
            back = back[0][at], back[1][at]
            index = None if index is None else index.of_rows(at)
        cache, queries = of_wanted(cache, queries, ops)
        seen = ops.empty_like(queries) if cache.out is None else cache.out
        if queries.shape[0]:
            kernels.attend(
                queries, cache.arena, window, entries, index, cache.batch, scale=self._scale, sink_logits=sink_logits,
                out=seen,
            )  # fmt: skip
        return self._turned_back(seen, back, is_given=cache.out is not None)

    def _written(self, cache: LayerCache, window: Kept, query: Tensor, key: Tensor, rotation: Rotation) -> KernelArray:
        """Rotated queries; the step's keys are in the cache."""
        ops = self._ops
        queries, (cosines, sines) = ops.kernel_array(query), rotation
        if self._turning is not None:
            self._turning.write_turned(
                queries, ops.kernel_array(key), cosines, sines, self._angles, cache.arena, window, cache.batch
            )
            return queries
        assert self._plain is not None
        keys = ops.kernel_array(ops.rope(key.reshape([key.shape[0], 1, -1]), *rotation))
        self._plain.write_rows(keys[:, 0], cache.arena, window, cache.batch)
        return ops.kernel_array(ops.rope(query, *rotation))

    def _turned(self, index: IndexQueries, rotation: Rotation) -> IndexQueries:
        """The same queries, rotated as an indexer's keys are: by as many angles as heads, else by none."""
        if self._turning is not None:
            self._turning.turn(index.query, *rotation, self._angles)
            return index
        ops, angles = self._ops, self._angles
        cosines, sines = (ops.empty_like(each, (*each.shape[:2], index.query.shape[2] // 2)) for each in rotation)
        cosines[:], sines[:] = 1, 0
        cosines[..., :angles], sines[..., :angles] = rotation[0][..., :angles], rotation[1][..., :angles]
        turned = ops.kernel_array(ops.rope(ops.from_kernel_array(index.query), cosines, sines))
        return replace(index, query=turned)

    def _turned_back(self, seen: KernelArray, back: Rotation, is_given: bool) -> Tensor:
        """``seen``, rotated by ``back``. is_given: it is to be there, too"""
        ops = self._ops
        if self._turning is not None:
            self._turning.turn(seen, *back, self._angles)
            return ops.from_kernel_array(seen)
        turned = ops.rope(ops.from_kernel_array(seen), *back)
        if is_given:
            seen[:] = ops.kernel_array(turned)
        return turned

    def result_of(self, *projected: Any) -> KernelArray:
        """See `CachedAttention.result_of`."""
        return self._ops.empty_like(self._ops.kernel_array(projected[0]))


def at_place(making: EntryMaking, place: int, head_dim: int) -> EntryMaking:
    """The same where entries lie at a place beside those of other layers."""
    return replace(making, begin=place * head_dim)
