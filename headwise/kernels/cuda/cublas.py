"""Matrix products by cuBLAS, asked directly: CuPy 14 refuses to call it on a stream that is being captured in a graph.

Sources: cuBLAS 12.9 and 13.1, "cublasGemmEx", "cublasGemmStridedBatchedEx", "cublasSetWorkspace" and "CUDA
Graphs Support".
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from headwise.errors import ConfigError, first_line
from headwise.kernels.cuda.driver import cupy_stream
from headwise.kernels.cuda.launch import address_of

Array = Any

NUMBERS = {"float16": 2, "bfloat16": 14, "float32": 0}
"""``cudaDataType`` of each dtype."""

WORKSPACE_BYTES = 32 << 20
"""What NVIDIA recommends for Hopper, and more than for others. Without, graphs would allocate one at each launch."""

_FLOAT32 = NUMBERS["float32"]
_AS_IT_IS, _TRANSPOSED = 0, 1
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
_PARAMETERS = {
    "cublasCreate_v2": (_POINTER,),
    "cublasDestroy_v2": (_POINTER,),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasSetWorkspace_v2": (_POINTER, _POINTER, ctypes.c_size_t),
    "cublasGemmEx": (
        _POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _INT,
        _POINTER, _POINTER, _INT, _INT, _INT, _INT,
    ),
    "cublasGemmStridedBatchedEx": (
        _POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _INT, _INT, _LONG, _POINTER, _INT, _INT, _LONG,
        _POINTER, _POINTER, _INT, _INT, _LONG, _INT, _INT, _INT,
    ),
}  # fmt: skip


@cache
def number_of(dtype: np.dtype[Any]) -> int | None:
    """What cuBLAS calls a dtype, whose own name takes a microsecond to ask for."""
    return NUMBERS.get(str(dtype))


class Cublas:
    """Products of device matrices on the current stream, by one thread at a time. Sums are in float32.

    A product only enqueues, once there was one on its stream. What it uses is kept: graphs may have recorded it.

    allocate:       gives device memory as a flat uint8 array
    library:        cuBLAS; by default the one that CuPy uses
    current_stream: tells the ``cudaStream_t``; by default CuPy's

    Raises:
        ConfigError: cuBLAS cannot be loaded, or does not start.
    """

    def __init__(
        self,
        allocate: Callable[[int], Array],
        library: Any | None = None,
        current_stream: Callable[[], int] | None = None,
    ) -> None:
        self._allocate = allocate
        self._library = _typed(library or _library())
        self._current_stream = current_stream or cupy_stream()
        self._workspaces: dict[int, Array] = {}
        self._stream: int | None = None
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        handle = ctypes.c_void_p()
        status = self._library.cublasCreate_v2(ctypes.addressof(handle))
        if status:
            raise ConfigError(f"cuBLAS does not start ({self._reason(status)}): is there memory left on the GPU?")
        self._handle = handle.value
        # Not at exit: the driver may be gone by then, and takes all with it.
        weakref.finalize(self, self._library.cublasDestroy_v2, self._handle).atexit = False

    def product(self, x: Array, weight: Array, out: Array) -> bool:
        """``out [T, N] = x [T, K] @ weight [K, N]``; ``out`` is C-contiguous; all three are of one dtype, or ``out`` is
        float32.

        Answers whether it was enqueued. It is not, and nothing is done, where a matrix is empty, or has neither rows
        nor columns whose elements lie side by side, or the dtypes or shapes do not belong together.

        Raises:
            RuntimeError: cuBLAS does not take what it should.
        """
        number, of_out = number_of(x.dtype), number_of(out.dtype)
        # To cuBLAS a matrix is columns, which makes of each of these its transpose: out.T = weight.T @ x.T.
        left, right = _operand(weight), _operand(x)
        if (
            number is None
            or left is None
            or right is None
            or not (x.dtype == weight.dtype and of_out in (number, _FLOAT32) and out.flags.c_contiguous)
            or not (x.shape[1] == weight.shape[0] and out.shape == (x.shape[0], weight.shape[1]))
        ):
            return False
        self._use(self._current_stream())
        (tokens, inner), width = x.shape, weight.shape[1]
        status = self._library.cublasGemmEx(
            self._handle, left[0], right[0], width, tokens, inner,
            ctypes.addressof(self._one), address_of(weight), number, left[1], address_of(x), number, right[1],
            ctypes.addressof(self._zero), address_of(out), of_out, width, _COMPUTE_32F, _DEFAULT_ALGORITHM,
        )  # fmt: skip
        if status:
            raise RuntimeError(
                f"cuBLAS cannot multiply {x.dtype} {list(x.shape)} by {list(weight.shape)}: {self._reason(status)}"
            )
        return True

    def products_of_heads(self, x: Array, weights: Array, out: Array) -> None:
        """``out [T, H, N] = x [T, H, K] @ weights [H, K, N]``, head by head, all of one dtype.

        ``weights`` are C-contiguous, or transposed matrices that are; of ``x`` and ``out`` each head's numbers lie side
        by side, and ``x`` may be the same for all heads. No array is empty.

        Raises:
            ValueError: the arrays do not belong together, or cannot be read.
            RuntimeError: cuBLAS does not take what it should.
        """
        number, (tokens, heads, inner), width = number_of(x.dtype), x.shape, weights.shape[-1]
        belong = weights.shape == (heads, inner, width) and out.shape == (tokens, heads, width)
        if (
            number is None
            or not (belong and x.dtype == weights.dtype == out.dtype)
            or not (weights.flags.c_contiguous or weights.transpose(0, 2, 1).flags.c_contiguous)
            or x.strides[2] != x.itemsize
            or out.strides[2] != out.itemsize
        ):
            raise ValueError(
                f"{x.dtype} {list(x.shape)} cannot be multiplied by {weights.dtype} {list(weights.shape)} into "
                f"{out.dtype} {list(out.shape)}, head by head"
            )
        self._use(self._current_stream())
        size = x.itemsize
        (x_row, x_head), (out_row, out_head) = ((a.strides[0] // size, a.strides[1] // size) for a in (x, out))
        operation, leading = (_AS_IT_IS, width) if weights.flags.c_contiguous else (_TRANSPOSED, inner)
        status = self._library.cublasGemmStridedBatchedEx(
            self._handle, operation, _AS_IT_IS, width, tokens, inner, ctypes.addressof(self._one),
            address_of(weights), number, leading, inner * width, address_of(x), number, max(x_row, inner), x_head,
            ctypes.addressof(self._zero), address_of(out), number, max(out_row, width), out_head, heads,
            _COMPUTE_32F, _DEFAULT_ALGORITHM,
        )  # fmt: skip
        if status:
            raise RuntimeError(
                f"cuBLAS cannot multiply {x.dtype} {list(x.shape)} by {list(weights.shape)}: {self._reason(status)}"
            )

    def _use(self, stream: int) -> None:
        if stream == self._stream:
            return
        if stream not in self._workspaces:
            self._workspaces[stream] = self._allocate(WORKSPACE_BYTES)
        workspace = address_of(self._workspaces[stream])
        # In this order: the first lets go of the workspace.
        status = self._library.cublasSetStream_v2(self._handle, stream) or self._library.cublasSetWorkspace_v2(
            self._handle, workspace, WORKSPACE_BYTES
        )
        if status:
            raise RuntimeError(f"cuBLAS does not take the current stream: {self._reason(status)}")
        self._stream = stream

    def _reason(self, status: int) -> str:
        return f"cublasStatus_t {status}, {self._library.cublasGetStatusString(status).decode()}"


def _operand(matrix: Array) -> tuple[int, int] | None:
    """(operation, leading dimension) by which cuBLAS reads the transpose of ``matrix``; None if it cannot."""
    if len(matrix.shape) != 2 or 0 in matrix.shape:
        return None
    rows, columns = matrix.shape
    row_stride, column_stride = (stride // matrix.dtype.itemsize for stride in matrix.strides)
    # The stride of a dimension of one says nothing.
    if column_stride == 1 or columns == 1:
        leading = columns if rows == 1 else row_stride
        return (_AS_IT_IS, leading) if leading >= columns else None
    if row_stride == 1 or rows == 1:
        return (_TRANSPOSED, column_stride) if column_stride >= rows else None
    return None


def _typed(library: Any) -> Any:
    for name, parameters in _PARAMETERS.items():
        getattr(library, name).argtypes = parameters
    library.cublasGetStatusString.restype = ctypes.c_char_p
    return library


def _library() -> Any:
    try:
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        raise ConfigError(
            f"cuBLAS cannot be loaded ({first_line(error)}): install CuPy with it, as cupy-cuda12x[ctk] or "
            "cupy-cuda13x[ctk]"
        ) from error
    return ctypes.CDLL(cublas.__file__)  # where a name is not its own, that of the library it is linked with is found
