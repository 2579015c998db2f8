"""Tensor operations of a GPU but for the arrays' module: what `ArrayOps` does in many passes is one kernel here."""

from __future__ import annotations

import mmap
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cuda.elementwise import CudaElementwise
from headwise.kernels.cuda.programs import Programs
from headwise.runtime.ops.array_ops import Array, ArrayOps


class GpuOps(ArrayOps):
    """`ArrayOps` with the kernels of `CudaElementwise`, wherever these take the arrays.

    Raises:
        ConfigError: there are no kernels for ``dtype``.
    """

    def __init__(self, xp: Any, dtype: np.dtype[Any], programs: Programs) -> None:
        super().__init__(xp, dtype)
        self._kernels = CudaElementwise(programs)
        self._kernels.prepare(dtype)
        self._mapped = _MappedUploads()

    def tensor(self, array: NDArray[Any]) -> Array:
        """See `TensorOps.tensor`. A part of a mapped file (tied embeddings) is uploaded once for all its users."""
        tensor = self._mapped.get(array)
        if tensor is None:
            tensor = super().tensor(array)
            self._mapped.add(array, tensor)
        return tensor

    def embedding(self, table: Array, ids: Array, scale: float = 1.0) -> Array:
        out = self.xp.empty((*ids.shape, *table.shape[1:]), self.dtype)
        # The factor is rounded to the dtype, too, as arithmetic on arrays does.
        if self._kernels.gather_rows(table, ids, out, float(self.dtype.type(scale))):
            return out
        return super().embedding(table, ids, scale)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        out = self.xp.empty(x.shape, self.dtype)
        return out if self._kernels.rms_norm(x, weight, eps, out) else super().rms_norm(x, weight, eps)

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        out = self.xp.empty(x.shape, self.dtype)
        return out if self._kernels.rotate(x, cos, sin, out) else super().rope(x, cos, sin)

    def silu_mul(self, gate_up: Array) -> Array:
        out = self._gated(gate_up, "silu")
        return super().silu_mul(gate_up) if out is None else out

    def gelu_tanh_mul(self, gate_up: Array) -> Array:
        out = self._gated(gate_up, "gelu_tanh")
        return super().gelu_tanh_mul(gate_up) if out is None else out

    def _gated(self, gate_up: Array, activation: str) -> Array | None:
        out = self.xp.empty((gate_up.shape[0], gate_up.shape[1] // 2), self.dtype)
        return out if self._kernels.gated(gate_up, out, activation) else None


class _MappedUploads:
    """Tensors still in use that were made of parts of mapped files, by the part.

    Only a part of a read-only mapping that is still the same one says by its address what it holds: other host memory
    may have been freed, or written, since.
    """

    def __init__(self) -> None:
        self._tensors: WeakValueDictionary[tuple[Any, ...], Array] = WeakValueDictionary()

    def get(self, array: NDArray[Any]) -> Array | None:
        key = _mapped_part(array)
        return None if key is None else self._tensors.get(key)

    def add(self, array: NDArray[Any], tensor: Array) -> None:
        key = _mapped_part(array)
        if key is not None:
            self._tensors[key] = tensor


def _mapped_part(array: NDArray[Any]) -> tuple[Any, ...] | None:
    """Says which part of which mapping a read-only array is; None for one of other memory.

    A weak reference is equal to another if both mappings live and are one, or if it is the same object: so the key of
    a mapping that has gone is never found again.
    """
    if array.flags.writeable:
        return None
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap.mmap):
        return None
    return ref(base), array.ctypes.data, array.shape, array.strides, array.dtype
