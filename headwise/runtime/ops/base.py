"""The tensor operations a model is written in.

A model file names no framework. Tensors are opaque but for what NumPy, CuPy and Paddle share: ``+``, ``*``,
``.shape``, ``.reshape(shape)`` and basic slicing. Shapes: ``T`` tokens, ``H`` heads, ``D`` head size, ``N`` features.
A *kernel array* is of the type that attention kernels on the device take: NumPy's on a CPU, CuPy's on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.fused import Activation, DecoderLayer, DecoderShape, FusedDecoder
from headwise.runtime.ops.quantised import Matrix

Tensor = Any
KernelArray = Any
Weight = Any
"""A linear layer's weight in whatever form `TensorOps.linear_weight` made of it."""


class StepUpload(Protocol):
    """Brings a step's arrays to the device: on a GPU in one copy, and on a CPU they are there."""

    def __call__(self, *arrays: NDArray[np.int32]) -> Sequence[KernelArray]:
        """Kernel arrays, valid until the next call; the same ones as in the last call if the shapes are."""


class TensorOps(Protocol):
    """itemsize: bytes of an element of weights and activations"""

    name: str
    itemsize: int

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """A float32 array as a tensor of the model's dtype on the device; shares memory with float32 on a CPU."""

    def norm_weight(self, array: NDArray[np.float32]) -> Tensor:
        """The weight of a norm, kept in float32."""

    def upload(self, array: NDArray[Any]) -> KernelArray:
        """An array of a step's numbers as a kernel array, its dtype kept; the same array on a CPU."""

    def step_upload(self, capacity: int = 0) -> StepUpload:
        """An object that uploads steps' arrays to the device.

        As long as the arrays of a call have at most ``capacity`` elements together, equal shapes have equal places,
        whatever came between.
        """

    def numpy(self, tensor: Tensor) -> NDArray[Any]:
        """The tensor as a float32 array in host memory; shares memory where the device is the CPU."""

    def kernel_array(self, tensor: Tensor) -> KernelArray:
        """The tensor, C-contiguous; on a GPU there may be gaps between the rows of its first axis."""

    def from_kernel_array(self, array: KernelArray) -> Tensor:
        """The reverse of `kernel_array`; never copies."""

    def empty_like(self, array: KernelArray) -> KernelArray:
        """A kernel array of the same shape and dtype, with anything in it."""

    def empty_bytes(self, num_bytes: int) -> KernelArray:
        """``uint8 [num_bytes]`` on the device, with anything in it."""

    def give_back_memory(self) -> None:
        """Return freed memory to the system: allocators keep much of it for later."""

    def linear_weight(self, weight: Matrix) -> Weight:
        """Prepare a weight stored as ``[out, in]``."""

    def linear_bias(self, bias: NDArray[np.float32]) -> Tensor:
        """Prepare the bias of such a weight."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """``x [T, in] @ weight.T + bias -> [T, out]``."""

    def gated_weight(self, weight: Matrix) -> Weight:
        """Prepare ``gate | up [2 * N, in]`` for `gated_linear`."""

    def gated_bias(self, bias: NDArray[np.float32]) -> Tensor:
        """Prepare the bias of such a weight."""

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: Activation) -> Tensor:
        """``activation(gate) * up`` of ``gate | up = x [T, in] @ weight.T + bias [T, 2 * N] -> [T, N]``."""

    def embedding_table(self, table: Matrix) -> Weight:
        """Prepare ``table [V, N]`` for `embedding` and `tied_weight`."""

    def embedding(self, table: Weight, ids: KernelArray, scale: float = 1.0) -> Tensor:
        """Rows ``ids int32 [T]`` of ``table [V, N]``, times ``scale`` in the table's dtype."""

    def tied_weight(self, table: Weight, start: int, stop: int) -> Weight:
        """Rows ``start`` to ``stop`` of the embedding ``table`` as a linear layer's weight, in the same memory."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x**2, -1) + eps) * weight`` over the last axis; ``x`` may be ``[T, N]`` or ``[T, H, D]``."""

    def add_rms_norm(self, x: Tensor, addend: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``x + addend`` of ``[T, N]``, and `rms_norm` of it."""

    def rotation(self, positions: KernelArray, inverse: KernelArray) -> tuple[KernelArray, KernelArray]:
        """Cosine and sine of ``positions int32 [T]`` times ``inverse float32 [D / 2]``: float32 ``[T, 1, D / 2]``."""

    def rope(self, x: Tensor, cos: KernelArray, sin: KernelArray) -> Tensor:
        """Rotate ``x [T, H, D]`` by halves (the Hugging Face convention): ``cos``, ``sin`` are ``[T, 1, D / 2]``."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``gate_up [T, 2 * N] = gate | up``."""

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """``gelu(gate) * up`` with the tanh approximation, of ``gate_up [T, 2 * N] = gate | up``."""

    def take_rows(self, x: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Rows ``rows`` of ``x [T, N]``."""

    def scatter_add_rows(
        self, target: Tensor, rows: NDArray[np.int64], x: Tensor, weights: NDArray[np.float32]
    ) -> None:
        """Add ``weights[i] * x[i]`` of ``x [R, N]`` to row ``rows[i]`` of ``target [T, N]``, in place.

        ``rows`` names no row twice, and ``target`` is the result of an operation, never a weight.
        """

    def greedy(self, logits: Tensor) -> tuple[KernelArray, KernelArray]:
        """Of each row of ``logits [R, V]``, the index (int32) of its largest element, or of its first NaN, and that
        element (float32)."""

    def host(self, array: KernelArray) -> NDArray[Any]:
        """A kernel array in host memory; the same array on a CPU."""


@runtime_checkable
class FusingOps(TensorOps, Protocol):
    """Operations that can do many layers of a decoder in one call."""

    def fuse(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> FusedDecoder:
        """Layers whose weights these operations made."""


@dataclass(frozen=True)
class PackedParts:
    """A packed weight in parts that a file can hold.

    elements: numbers in the weight
    facts:    what must be known of it beside its arrays
    arrays:   C-contiguous, none of them empty
    """

    elements: int
    facts: Mapping[str, str | int | bool]
    arrays: Mapping[str, NDArray[Any]]


@runtime_checkable
class PackingOps(TensorOps, Protocol):
    """Operations whose weights are copies in an order of their own, which can be kept on disk.

    packed_format: another one wherever the same weight would be packed differently
    """

    packed_format: str

    def parts_of(self, weight: Weight) -> PackedParts:
        """A weight in parts, in the same memory."""

    def weight_of(self, parts: PackedParts) -> Weight:
        """The reverse; arrays may be read-only, and begin at multiples of 64 bytes.

        Raises:
            ValueError: these are no parts of a weight.
        """


@runtime_checkable
class CapturingOps(TensorOps, Protocol):
    """Operations of a device that can do much work in one go."""

    def capture(self, work: Callable[[], Sequence[KernelArray]]) -> Callable[[], Sequence[KernelArray]]:
        """A function that repeats ``work`` in one launch: it uses the same memory and returns the same arrays.

        ``work`` only enqueues, and was called before, so that all it needs is there. All that is captured shares the
        memory that it computes with: arrays that one such call returned are valid until the next one.
        """
