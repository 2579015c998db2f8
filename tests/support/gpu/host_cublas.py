"""cuBLAS on host memory, as strict as the real one: matrices are columns, and what it cannot read it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype

DTYPES = {0: "float32", 2: "float16", 14: "bfloat16"}
FLOAT32 = 0
INVALID_VALUE, NOT_SUPPORTED = 7, 15
HANDLE = 0x7000

_POINTER, _INT, _LONG, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_size_t


class HostCublas:
    """The functions of libcublas that products need, called through C. calls: their names, in order"""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._numbers = count(HANDLE)
        self._workspaces: dict[int, tuple[int, int] | None] = {}  # of each handle: ranks in one process have several
        gemm = (_POINTER, *[_INT] * 5, _POINTER, *[_POINTER, _INT, _INT] * 2, _POINTER, _POINTER, *[_INT] * 4)
        self.cublasCreate_v2 = self._exported(self._create, _POINTER)
        self.cublasDestroy_v2 = self._exported(self._destroy, _POINTER)
        self.cublasSetStream_v2 = self._exported(self._set_stream, _POINTER, _POINTER)
        self.cublasSetWorkspace_v2 = self._exported(self._set_workspace, _POINTER, _POINTER, _SIZE)
        self.cublasGemmEx = self._exported(self._gemm, *gemm)
        part = (_POINTER, _INT, _INT, _LONG)
        batched = (_POINTER, *[_INT] * 5, _POINTER, *part, *part, _POINTER, *part, *[_INT] * 3)
        self.cublasGemmStridedBatchedEx = self._exported(self._gemm_strided_batched, *batched)
        self.cublasGetStatusString = _StatusString()

    def _exported(self, function: Callable[..., int], *types: Any) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(function.__name__.lstrip("_"))
            try:
                return function(*arguments)
            except Exception:  # nothing may be raised through C
                return INVALID_VALUE

        return ctypes.CFUNCTYPE(_INT, *types)(call)

    @property
    def workspace(self) -> tuple[int, int] | None:
        """Address and bytes of what the one handle was given."""
        (found,) = self._workspaces.values()
        return found

    def _create(self, handle: int) -> int:
        made = ctypes.c_void_p.from_address(handle).value = next(self._numbers)
        self._workspaces[made] = None
        return 0

    def _destroy(self, handle: int) -> int:
        del self._workspaces[handle]
        return 0

    def _set_stream(self, handle: int, stream: int) -> int:
        assert handle in self._workspaces
        self._workspaces[handle] = None
        return 0

    def _set_workspace(self, handle: int, address: int, num_bytes: int) -> int:
        assert handle in self._workspaces
        self._workspaces[handle] = (address, num_bytes)
        return INVALID_VALUE if address % 256 else 0

    def _gemm(
        self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, a: int, type_a: int, lda: int,
        b: int, type_b: int, ldb: int, beta: int, c: int, type_c: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        assert self._workspaces[handle] is not None, "in a graph, cuBLAS would allocate a workspace of its own"
        if compute != 68 or type_a != type_b or type_c not in (type_a, FLOAT32) or algorithm != -1:
            return NOT_SUPPORTED
        scalars = [ctypes.c_float.from_address(at).value for at in (alpha, beta)]
        assert scalars == [1.0, 0.0]
        left, right = _operand(a, type_a, lda, m, k, op_a), _operand(b, type_b, ldb, k, n, op_b)
        with np.errstate(invalid="ignore"):  # what was never written may be multiplied, if nobody reads it
            product = left.astype(np.float32, copy=False) @ right.astype(np.float32, copy=False)
        _columns(c, type_c, ldc, m, n)[...] = product
        return 0

    def _gemm_strided_batched(
        self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int,
        a: int, type_a: int, lda: int, stride_a: int, b: int, type_b: int, ldb: int, stride_b: int,
        beta: int, c: int, type_c: int, ldc: int, stride_c: int, count: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        steps = [stride * numpy_dtype(DTYPES[type_a]).itemsize for stride in (stride_a, stride_b, stride_c)]
        for at in range(count):
            one, other, result = (start + at * step for start, step in zip((a, b, c), steps, strict=True))
            status = self._gemm(
                handle, op_a, op_b, m, n, k, alpha, one, type_a, lda, other, type_b, ldb, beta, result, type_c, ldc,
                compute, algorithm,
            )  # fmt: skip
            if status:
                return status
        return 0


def _operand(address: int, kind: int, leading: int, rows: int, columns: int, operation: int) -> NDArray[Any]:
    if operation == 1:
        return _columns(address, kind, leading, columns, rows).T
    assert operation == 0
    return _columns(address, kind, leading, rows, columns)


def _columns(address: int, kind: int, leading: int, rows: int, columns: int) -> NDArray[Any]:
    """``[rows, columns]`` whose columns are ``leading`` elements apart."""
    assert address
    assert min(rows, columns) > 0
    assert leading >= rows
    dtype = numpy_dtype(DTYPES[kind])
    size = ((columns - 1) * leading + rows) * dtype.itemsize
    memory = np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8).view(dtype)
    strides = (dtype.itemsize, leading * dtype.itemsize)
    return np.lib.stride_tricks.as_strided(memory, (rows, columns), strides, writeable=True)


class _StatusString:
    restype: Any = None

    def __call__(self, status: int) -> bytes:
        assert self.restype is ctypes.c_char_p, "a pointer cut to 32 bits"
        return b"an invalid value" if status == INVALID_VALUE else b"the functionality is not supported"


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins where a GPU's would."""
    memory = np.zeros(num_bytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    return memory[start : start + num_bytes]
