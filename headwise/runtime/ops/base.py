"""The tensor operations a model is written in.

A model file names no framework. Of a tensor it may use only what NumPy, CuPy and Paddle share: ``+``, ``*``,
``.shape``, ``.reshape(shape)`` and basic slicing. A *kernel array* is an array that attention kernels take: NumPy's on
a CPU, CuPy's on a GPU.

Shapes: ``T`` tokens, ``H`` heads, ``D`` head size, ``N`` features, ``V`` vocabulary, ``R`` rows. Tensors are of the
dtype that the operations were made for; what is float32 in all cases is said to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.experts import Mixture
from headwise.kernels.fused import Activation, DecoderLayer, DecoderShape, FusedDecoder
from headwise.runtime.ops.quantised import Matrix

Tensor = Any
KernelArray = Any
Weight = Any
"""A prepared weight: whatever `TensorOps.linear_weight`, `gated_weight` or `embedding_table` returned."""


Experts = Any
"""What `TensorOps.experts` made of the experts of a layer."""


class LinearWeights(Protocol):
    """What `TensorOps.linear` or `activated_linear` multiplies with: a prepared weight and bias."""

    @property
    def weight(self) -> Weight: ...

    @property
    def bias(self) -> Tensor | None: ...


class MlpWeights(Protocol):
    """An MLP: ``gate | up``, prepared by `TensorOps.gated_weight`, or up alone, by `TensorOps.linear_weight`, where
    the activation is not gated; and what its result is projected by."""

    @property
    def into(self) -> LinearWeights: ...

    @property
    def down(self) -> LinearWeights: ...


class StepUpload(Protocol):
    """Copies a step's arrays to the device: all in one copy to a GPU; on a CPU nothing is copied."""

    def __call__(self, *arrays: NDArray[np.int32]) -> Sequence[KernelArray]:
        """Kernel arrays of the same shapes, valid until the next call.

        If the shapes are those of the last call, the arrays returned on a GPU are, too.
        """


class Fetch(Protocol):
    """An array on its way to host memory."""

    @property
    def is_done(self) -> bool:
        """Whether `get` need not wait."""

    def get(self) -> NDArray[Any]:
        """Wait for it: the array in host memory."""


@dataclass(frozen=True)
class Fetched:
    """A `Fetch` of what is in host memory already."""

    array: NDArray[Any]
    is_done: bool = True

    def get(self) -> NDArray[Any]:
        return self.array


class TensorOps(Protocol):
    """The contract of a framework's operations.

    name:     for logs
    products: whose matrix products they are, for logs
    itemsize: bytes of an element of weights; on a GPU of activations, too
    leaves_biases: whether biases of products had better be added by who takes these: those of queries, keys and values
                   where they are rotated, a router's where experts are chosen, others where the residual stream is
    """

    name: str
    products: str
    itemsize: int
    leaves_biases: bool

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """An array of float32, or of the bits of bfloat16 (uint16), as a tensor on the device. May share its memory
        where nothing must be copied or converted."""

    def norm_weight(self, array: NDArray[np.float32]) -> Tensor:
        """The weight of a norm, as a float32 tensor on the device."""

    def upload(self, array: NDArray[Any]) -> KernelArray:
        """A host array as a kernel array of the same dtype; on a CPU the same array. One that is there stays so."""

    def step_upload(self, capacity: int = 0) -> StepUpload:
        """An object that copies steps' arrays to the device.

        As long as the arrays of each call have at most ``capacity`` elements together, calls with equal shapes return
        arrays at equal addresses, whatever calls came between. CUDA graphs need that.
        """

    def numpy(self, tensor: Tensor) -> NDArray[Any]:
        """The tensor as a float32 array in host memory; on a CPU it may share the tensor's memory."""

    def kernel_array(self, tensor: Tensor) -> KernelArray:
        """The tensor as a kernel array, copied only if its layout requires it.

        It is C-contiguous, except that on a GPU the rows of its first axis may lie apart.
        """

    def from_kernel_array(self, array: KernelArray) -> Tensor:
        """The reverse of `kernel_array`, for arrays that these operations made. A whole tensor's is not copied."""

    def empty_like(self, array: KernelArray, shape: tuple[int, ...] | None = None) -> KernelArray:
        """An uninitialised kernel array of the same dtype, and of the same shape unless another is given."""

    def empty_bytes(self, num_bytes: int) -> KernelArray:
        """A kernel array ``uint8 [num_bytes]``, uninitialised."""

    def give_back_memory(self) -> None:
        """Return freed memory to the operating system or the device: allocators keep much of it for later."""

    def linear_weight(self, weight: Matrix) -> Weight:
        """Prepare a weight ``[out, in]`` for `linear`. Raises `ConfigError` if its shape does not suit its dtype."""

    def linear_bias(self, bias: NDArray[np.float32]) -> Tensor:
        """Prepare a bias ``[out]`` for `linear`."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """``x [T, in] @ weight.T + bias -> [T, out]``."""

    def gated_weight(self, weight: Matrix) -> Weight:
        """Prepare a weight ``gate | up [2 * N, in]`` for `activated_linear`; otherwise as `linear_weight`, which
        prepares those of activations without a gate."""

    def gated_bias(self, bias: NDArray[np.float32]) -> Tensor:
        """Prepare a bias ``gate | up [2 * N]`` for `activated_linear`; `linear_bias` does where there is no gate."""

    def activated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: Activation) -> Tensor:
        """``gate | up [T, 2 * N] = x [T, in] @ weight.T + bias``; returns ``activation(gate) * up [T, N]``.

        Of an activation without a gate (`headwise.kernels.fused.is_gated`), ``up [T, N]`` is the product, and
        ``activation(up)`` the result.
        """

    def unactivated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """What `activated_linear` gives to its activation: ``gate | up [T, 2 * N]``, or ``up [T, N]``."""

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """``activation(gate) * up [T, N]`` of ``x [T, 2 * N] = gate | up``; without a gate, ``activation(x)``."""

    def float_weight(self, weight: NDArray[np.float32]) -> Weight:
        """As `linear_weight`, of floats whatever others are kept as."""

    def embedding_table(self, table: Matrix) -> Weight:
        """Prepare ``table [V, N]`` for `embedding` and `tied_weight`."""

    def embedding(self, table: Weight, ids: KernelArray, scale: float = 1.0) -> Tensor:
        """Rows ``ids int32 [T]`` of ``table [V, N]``, times ``scale`` (rounded to the model's dtype): ``[T, N]``."""

    def tied_weight(self, table: Weight, start: int, stop: int) -> Weight:
        """Rows ``start`` to ``stop`` of the embedding ``table`` as a weight for `linear`.

        It shares the table's memory; for some ranges on a CPU it is a copy.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x**2, -1) + eps) * weight`` over the last axis; ``x`` may be ``[T, N]`` or ``[T, H, N]``.

        ``weight [N]``, or with ``x [T, H, N]`` ``[H, N]``: each head its own.
        """

    def add_rms_norm(
        self, x: Tensor, addend: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``x + (addend + bias)`` of ``[T, N]``, and `rms_norm` of it. ``bias [N]`` is one of `linear_bias`."""

    def rotation(
        self, positions: KernelArray, inverse: KernelArray, scale: KernelArray | None = None
    ) -> tuple[KernelArray, KernelArray]:
        """Cosine and sine of RoPE's angles, each float32 ``[T, 1, D / 2]``, times ``scale float32 [D / 2]`` if given.

        The angles, in radians, are ``positions int32 [T]`` times the inverse frequencies ``inverse float32 [D / 2]``;
        of tokens that have three positions, ``int32 [T, 3]`` by ``float32 [3, D / 2]``.
        """

    def rope(self, x: Tensor, cos: KernelArray, sin: KernelArray) -> Tensor:
        """Rotate ``x [T, H, D]`` by the cosines and sines of `rotation`.

        Element ``i`` of a head is rotated with ``i + D / 2``, as Hugging Face has it, not with its neighbour.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``gate_up [T, 2 * N] = gate | up``."""

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """``gelu(gate) * up`` with the tanh approximation, of ``gate_up [T, 2 * N] = gate | up``."""

    def clamped_mul(self, gate_up: Tensor) -> Tensor:
        """``clamped(gate, up)`` of ``gate_up [T, 2 * N] = gate | up``: see `Activation`."""

    def limited_silu_mul(self, gate_up: Tensor) -> Tensor:
        """``limited_silu(gate, up)`` of ``gate_up [T, 2 * N] = gate | up``: see `Activation`."""

    def clipped_silu_mul(self, gate_up: Tensor) -> Tensor:
        """``clipped_silu(gate, up)`` of ``gate_up [T, 2 * N] = gate | up``: see `Activation`."""

    def squared_relu(self, x: Tensor) -> Tensor:
        """``max(x, 0) ** 2`` of ``x [T, N]``; NaN stays NaN."""

    def experts(self, mixture: Mixture, routed: Iterable[MlpWeights], shared: MlpWeights | None) -> Experts:
        """Prepare the experts of a layer, or a rank's part of each, for `mix_experts`.

        ``routed`` are `Routing.experts` many, taken one by one, and may be given up once they are; ``shared`` is what
        every token goes through besides.
        """

    def mix_experts(self, x: Tensor, logits: Tensor, experts: Experts, tokens: KernelArray | None = None) -> Tensor:
        """What a token's experts make of it, by their weights, and the shared one: ``[T, N]`` of ``x [T, N]``.

        logits: of the router, ``[T, experts]``
        tokens: int32 ``[1]``: rows from this one on are padding, of which nothing may be asked of any expert, and
                anything may come; None: there is none. A CPU may compute them
        """

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """``x [T, N] * sigmoid(gate)`` for ``gate [T, N]``, or ``[T, 1]``."""

    def take_rows(self, x: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Rows ``rows [R]`` of ``x [T, N]``, as a copy ``[R, N]``."""

    def put_rows(self, target: Tensor, rows: NDArray[np.int32], values: NDArray[Any]) -> None:
        """Overwrite the rows ``rows [R]`` of ``target [T, N]`` with ``values [R, N]``, in place; they are as `tensor`
        takes them.

        The caller sees to it that ``rows`` names no row twice, and that ``target`` is an operation's result.
        """

    def scatter_add_rows(
        self, target: Tensor, rows: NDArray[np.int64], x: Tensor, weights: NDArray[np.float32]
    ) -> None:
        """Add ``weights[i] * x[i]`` to row ``rows[i]`` of ``target [T, N]``, in place.

        ``x`` is ``[R, N]``, ``rows`` and ``weights`` are ``[R]``. The caller sees to it that ``rows`` names no row
        twice, and that ``target`` is the result of an operation, never a weight.
        """

    def greedy(self, logits: Tensor) -> tuple[KernelArray, KernelArray]:
        """Index and value of the largest element in each row of ``logits [R, V]``: int32 ``[R]`` and float32 ``[R]``.

        In a row with NaN, they are those of its first NaN.
        """

    def host(self, array: KernelArray) -> NDArray[Any]:
        """A kernel array in host memory, once all that writes to it is done; on a CPU the same array."""

    def fetch(self, array: KernelArray) -> Fetch:
        """The same, without waiting: what the array holds once all that was enqueued so far is done."""


@runtime_checkable
class FusingOps(TensorOps, Protocol):
    """Operations that can compute many layers of a decoder in one call."""

    def fuse(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> FusedDecoder | None:
        """A decoder of ``layers``, whose weights and experts these operations prepared; None: not of these experts."""


@runtime_checkable
class StreamingOps(TensorOps, Protocol):
    """Operations that compute in a few kernels what models with hyper-connections have besides others.

    Streams are a kernel array ``[T, n, N]``. See `headwise.runtime.models.hyper`.
    """

    def prepare_streams(self, count: int) -> None:
        """Compile or load what as many streams need, and `named_logits`, so that calls only enqueue."""

    def takes_streams(self, streams: KernelArray) -> bool:
        """Whether there are kernels for as many of this size."""

    def mixed_streams(
        self,
        streams: KernelArray,
        weight: Weight,
        base: KernelArray,
        scale: KernelArray,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> tuple[Tensor, KernelArray, KernelArray]:
        """What a part of a layer is given, ``[T, N]``; and by which numbers, float32 ``[T, n]`` and ``[T, n, n]``, what
        it makes is given to streams, and these to each other.

        weight:      of `float_weight`, ``[(2 + n) * n, n * N]``
        base, scale: float32 ``[(2 + n) * n]`` and ``[3]``
        iterations, eps: of Sinkhorn-Knopp; norm_eps: of the norm of all streams as one
        """

    def joined_streams(
        self,
        streams: KernelArray,
        weight: Weight,
        base: KernelArray,
        scale: KernelArray,
        *,
        eps: float,
        norm_eps: float,
    ) -> Tensor:
        """One of all streams, ``[T, N]``. ``weight [n, n * N]``, ``base [n]``, ``scale [1]``: as of `mixed_streams`"""

    def put_streams(self, streams: KernelArray, made: Tensor, given: KernelArray, between: KernelArray) -> None:
        """Mix ``streams``, in place, and add to each its share of what a part of a layer has ``made [T, N]``."""

    def named_logits(self, logits: Tensor, table: KernelArray, ids: KernelArray, never: float) -> Tensor:
        """``logits [T, experts]``, but ``never`` of experts that ``table[ids]`` does not name: int64 ``[V, k]`` and
        int32 ``[T]``."""


@dataclass(frozen=True)
class PackedParts:
    """A packed weight, taken apart for a file to hold.

    elements: number of elements of the weight, without padding
    facts:    what else must be known to put it together: name -> value
    arrays:   name -> C-contiguous array, none of them empty
    """

    elements: int
    facts: Mapping[str, str | int | bool]
    arrays: Mapping[str, NDArray[Any]]


@runtime_checkable
class PackingOps(TensorOps, Protocol):
    """Operations that pack weights: they copy them into a layout of their own, which can be kept on disk.

    packed_format: names the layout; it changes whenever the same weight would be packed into other bytes
    """

    packed_format: str

    def parts_of(self, weight: Weight) -> PackedParts:
        """A weight taken apart; the arrays share its memory."""

    def weight_of(self, parts: PackedParts) -> Weight:
        """The reverse of `parts_of`. Arrays must begin at multiples of 64 bytes, and may be read-only.

        Raises:
            ValueError: these are not the parts of a weight.
        """


Cut = Callable[[], None]
"""Called where one graph is to end and the next one to begin."""

Between = Callable[[int], bool]
"""Called behind each graph but the last one, with its number. Says whether the next one is wanted."""


@runtime_checkable
class CapturingOps(TensorOps, Protocol):
    """Operations of a GPU that can record work, and launch it again as one (CUDA graphs).

    captures_experts: whether `mix_experts` only enqueues
    """

    captures_experts: bool

    def capture(self, work: Callable[[], Sequence[KernelArray]]) -> Callable[[], Sequence[KernelArray]]:
        """Record ``work``. Returns a function that repeats it in one launch, in the same memory and the same results.

        ``work`` must only enqueue, and do no harm: it may be run once before, so that all it needs is compiled and
        loaded. All recorded work shares one pool of memory: the arrays that a function returned are valid until the
        next one runs.
        """

    def capture_pieces(
        self, work: Callable[[Cut], Sequence[KernelArray]]
    ) -> Callable[[Between], Sequence[KernelArray]]:
        """The same of work that says where it is to be cut into pieces, each of which is one launch.

        What is between two pieces is enqueued anew each time, by the function that is called there. Arrays that it
        reads or writes must be in use at the cut; it is to know them by `borrowed`. Where it wants no more pieces,
        nothing can be read of the results.
        """

    def borrowed(self, array: KernelArray) -> KernelArray:
        """The same array, which does not keep its memory from others."""
