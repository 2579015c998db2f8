"""The attention kernels of a GPU: Triton's attention and the KV write in CUDA C++, as one."""

from __future__ import annotations

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.attention import AttentionShape, TritonAttention, Tuning
from headwise.kernels.cuda.gqa_ranks import RanksAttention, RanksShape
from headwise.kernels.cuda.kv_write import CudaKvWrite
from headwise.kernels.cuda.launch import Array
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.token_ranks import TokenRanks


class CudaKernels:
    """`BiasingKernels`, `JointKernels` and `SharedRotatingKernels` on device arrays; all calls only enqueue, on the
    current stream."""

    sees_chunks = True
    adds_biases = True

    def __init__(self, parts: GpuParts) -> None:
        self.name = "cuda (prompts by TMA)" if parts.tma else "cuda"
        self._attention = TritonAttention(parts.launcher, parts.allocate, Tuning(tma=parts.tma))
        self._of_ranks = RanksAttention(parts, self._attention)
        self._write = CudaKvWrite(parts.programs)

    @property
    def joint_share(self) -> int:
        """See `JointKernels`."""
        return self._attention.joint_share

    def prepare(self, layout: BlockLayout, shape: AttentionShape, kv_heads: int) -> None:
        """Compile or load all that calls for layers of this shape need, whose blocks are of ``layout``, and which have
        so many KV heads at most.

        Raises:
            ConfigError: it is not supported.
        """
        self._attention.prepare([shape], kv_heads)
        self._write.prepare(layout, numpy_dtype(shape.q_dtype))

    def prepare_shared(self, layout: BlockLayout, shape: RanksShape) -> None:
        """The same for layers whose KV head ranks keep together; ``layout`` is of blocks of one's own tokens."""
        self._of_ranks.prepare(shape)
        self._write.prepare(layout, numpy_dtype(shape.own.q_dtype))

    def write_kv(
        self, key: Array, value: Array, arena: Array, layout: BlockLayout, batch: AttentionBatch, heads: HeadTable
    ) -> None:
        """See `AttentionKernels.write_kv`."""
        self._write.write_kv(key, value, arena, layout, batch, heads)

    def write_kv_rope(
        self,
        query: Array,
        key: Array,
        value: Array,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        bias: Array | None = None,
    ) -> None:
        """See `BiasingKernels.write_kv_rope`."""
        self._write.write_kv_rope(query, key, value, cosines, sines, arena, layout, batch, heads, bias)

    def attend(
        self,
        query: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        softcap: float,
        out: Array,
        sink_logits: Array | None = None,
    ) -> None:
        """See `AttentionKernels.attend`."""
        self._attention.attend(
            query, arena, layout, batch, heads, scale=scale, softcap=softcap, out=out, sink_logits=sink_logits
        )

    def write_own(
        self,
        key: Array,
        value: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """See `SharedKernels.write_own`."""
        self._write.write_kv(key, value, arena, layout, batch, heads, share)

    def write_own_rope(
        self,
        query: Array,
        key: Array,
        value: Array,
        cosines: Array,
        sines: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
        bias: Array | None = None,
    ) -> None:
        """See `SharedRotatingKernels.write_own_rope`."""
        self._write.write_kv_rope(query, key, value, cosines, sines, arena, layout, batch, heads, bias, share)

    def attend_shared(
        self,
        query: Array,
        arena: Array,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        softcap: float,
        out: Array,
        sink_logits: Array | None = None,
    ) -> None:
        """See `SharedKernels.attend_shared`. A visible token whose block is ``-1`` is treated as not visible."""
        self._of_ranks.attend(
            query, arena, layout, batch, heads, ranks, scale=scale, softcap=softcap, out=out, sink_logits=sink_logits
        )
