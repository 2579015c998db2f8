"""The attention kernels of a GPU: Triton's attention and the KV write in CUDA C++, as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.attention import AttentionShape, TritonAttention, Tuning
from headwise.kernels.cuda.kv_write import CudaKvWrite
from headwise.kernels.cuda.launch import TritonLauncher
from headwise.kernels.cuda.programs import Programs

Array = Any


class CudaKernels:
    """`RotatingKernels` on device arrays; all calls only enqueue, on the current stream.

    ``allocate(nbytes)`` gives device memory as a flat uint8 array; ``tma`` is `Tuning.tma`.
    """

    sees_chunks = True
    adds_biases = True

    def __init__(
        self, launcher: TritonLauncher, programs: Programs, allocate: Callable[[int], Array], tma: bool = False
    ) -> None:
        self.name = "cuda (prompts by TMA)" if tma else "cuda"
        self._attention = TritonAttention(launcher, allocate, Tuning(tma=tma))
        self._write = CudaKvWrite(programs)

    def prepare(self, layout: BlockLayout, shape: AttentionShape) -> None:
        """Compile or load all that calls for layers of this shape need, whose blocks are of ``layout``.

        Raises:
            ConfigError: it is not supported.
        """
        self._attention.prepare([shape])
        self._write.prepare(layout, numpy_dtype(shape.q_dtype))

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
