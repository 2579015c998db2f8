"""All kernels that a model with entries of several tokens (DeepSeek-V4) needs on a GPU besides those of any model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.compressed_rows import QUANTISED
from headwise.kernels.cuda import dsa, entries, indexer, named_experts, streams, turned
from headwise.kernels.cuda.compressed import CompressedShape, check_compressed, variant_of
from headwise.kernels.cuda.dsa import IndexShape
from headwise.kernels.cuda.launch import Variant
from headwise.kernels.cuda.programs import Defines


@dataclass(frozen=True)
class CompressedModel:
    """
    heads:   query heads of the rank, of ``size`` numbers, of each half of which ``turning`` are rotated
    kv_dtype: of keys and entries
    rates:   tokens that entries of layers stand for, of each kind of them
    indexed: of these, that of layers whose entries an indexer chooses; 0: there are none
    index_heads, index_dim: of the indexer
    streams: of hyper-connections; 0: there are none
    """

    heads: int
    size: int
    block_size: int
    dtype: str
    kv_dtype: str
    turning: int
    rates: tuple[int, ...]
    indexed: int = 0
    index_heads: int = 0
    index_dim: int = 0
    streams: int = 0

    def variants(self, sm: int) -> Iterator[Variant]:
        """The Triton kernels. Raises ConfigError: they do not serve such a model."""
        for shape in self._shapes():
            check_compressed(shape, sm)
            yield variant_of(shape, sm)
        if self.indexed:
            block_entries = max(1, self.block_size // self.indexed)
            index = IndexShape(self.index_heads, self.index_dim, block_entries, self.dtype, self.kv_dtype)
            dsa.check_index(index)
            yield dsa.score_variant(index, sm)

    def _shapes(self) -> Iterator[CompressedShape]:
        turning = self.turning if self.kv_dtype in QUANTISED else 0
        every = self.heads, self.size, self.block_size, self.dtype, self.kv_dtype, turning
        yield CompressedShape(*every)
        for rate in self.rates:
            yield CompressedShape(*every, rate)
        if self.indexed:
            yield CompressedShape(*every, self.indexed, is_chosen=True)

    def programs(self) -> Iterator[tuple[str, Defines]]:
        """The CUDA C++ files, with their macros."""
        dtype = numpy_dtype(self.dtype)
        for kept in dict.fromkeys((self.dtype, self.kv_dtype)):
            yield turned.SOURCE, entries.variant_of(self.dtype, kept)
        if self.rates:
            yield entries.SOURCE, entries.variant_of(self.dtype, self.kv_dtype)
        if self.indexed:
            yield indexer.SOURCE, indexer.variant_of(self.dtype, self.kv_dtype)
        if self.streams in streams.COUNTS:
            yield streams.SOURCE, streams.variant_of(dtype, self.streams)
            yield named_experts.SOURCE, named_experts.variant_of(dtype)
