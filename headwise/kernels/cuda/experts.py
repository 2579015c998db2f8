"""Mixtures of experts on a GPU, from a router's logits to the sum: the host half of `experts.cu` and `experts_jit.py`,
and for weights that are codes of `packed_experts.cu` and `packed_experts_jit.py`.

Five launches a layer, known from shapes alone: a token's experts are chosen, its assignments sorted by expert,
multiplied with the experts' ``gate | up`` (or up alone) and with their down projections, and added up. Shared experts
are experts that every token is assigned to, so they are computed beside the others, in the same launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda import packed
from headwise.kernels.cuda.elementwise import NUMBERS, VECTOR_BYTES
from headwise.kernels.cuda.launch import Array, Kernel, TritonLauncher, Variant, addresses_of
from headwise.kernels.cuda.packed import TYPES, CodesTile, PackedForm, PackedMatrix, code_type, constants_of, typed
from headwise.kernels.cuda.programs import Defines, Programs
from headwise.kernels.cuda.tiles import ProductTile, expert_tiles
from headwise.kernels.experts import SCORED_BY, Routing
from headwise.kernels.fused import Activation, is_gated

SOURCE, MODULE, PACKED_MODULE = "experts.cu", "experts_jit", "packed_experts_jit"
THREADS, SORT_THREADS = 128, 1024
WARP = 32
MOST_ASSIGNED = 32
"""Experts of a token, shared ones included: a lane of its warp keeps each."""
MOST_EXPERTS = 1024
"""To choose from: a lane keeps 32 scores."""

PACKED_SOURCE, PACKED_KERNEL = "packed_experts.cu", "multiply_packed_experts"
FEW_ROWS, _FEW_COLUMNS, _FEW_WARPS = 16, 16, 4
"""Of a tile that `packed_experts.cu` multiplies: rows; columns, twice as many where there are no gates; and warps."""

_FEW = {bits: CodesTile(FEW_ROWS, 2, ahead, most_warps=_FEW_WARPS) for bits, ahead in ((8, 2), (4, 1))}
"""By bits of a code."""

_ACTIVATIONS = {
    "": "None", "silu": "Silu", "gelu_tanh": "GeluTanh", "clamped": "Clamped", "limited_silu": "LimitedSilu",
    "clipped_silu": "ClippedSilu", "relu2": "Relu2",
}  # fmt: skip
"""What `packed_experts.cu` calls each."""

_PLACES = (
    "bias:x", "shares:*fp32", "out:x", "order:*i32", "tile_expert:*i32", "width:i32", "depth:i32", "per_row:i32",
)  # fmt: skip
_SIGNATURE = ("x:x", "weight:x", *_PLACES)
_PACKED_SIGNATURE = ("x:x", "codes:codes", "scale:*fp32", "minimum:*fp32", *_PLACES)
"""`packed_experts.cu` has the same parameters, and ``group_steps`` behind them."""


@dataclass(frozen=True)
class ExpertShape:
    """What the machine code of a layer's experts depends on besides the card.

    hidden: width of tokens; inner: of an expert, on this rank
    shared: experts that every token goes to, of the same size
    has_bias: whether projections have biases
    weighs_input: an expert is given tokens times their weights; else what it makes of them is multiplied
    up_codes, down_codes: of the weights before and behind the activation, where these are codes; None: of ``dtype``
    """

    routing: Routing
    shared: int
    hidden: int
    inner: int
    activation: Activation
    dtype: str
    has_bias: bool = False
    weighs_input: bool = False
    up_codes: PackedForm | None = None
    down_codes: PackedForm | None = None

    @property
    def assigned(self) -> int:
        """Experts of a token."""
        return self.routing.per_token + self.shared

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """``gate | up``, and what comes of both, or of up where there is no gate; and down."""
        return (
            Projection(self.inner, self.hidden, self.assigned, self.activation, self.up_codes),
            Projection(self.hidden, self.inner, 1, "", self.down_codes),
        )


@dataclass(frozen=True)
class Projection:
    """A product of rows of ``depth`` with each expert's weights.

    per_row:    assignments of a row
    activation: of what comes of it; "": there is none
    codes:      the form of weights; None: they are of the shape's dtype
    """

    width: int
    depth: int
    per_row: int
    activation: str
    codes: PackedForm | None

    @property
    def is_gated(self) -> bool:
        """Whether weights are twice as wide as what comes of it."""
        return is_gated(self.activation)

    def takes_codes(self, rows: int) -> bool:
        """Whether `packed_experts.cu` multiplies tiles of so many rows."""
        return self.codes is not None and packed.multiplies_codes(self.codes) and rows == FEW_ROWS


@dataclass(frozen=True)
class StackedExperts:
    """A layer's experts, shared ones last, ``E`` in all.

    into:       ``[E, 2 * inner, hidden]``, gates before ups, or ``[E, inner, hidden]`` where there are none; as codes,
                if ``shape`` says so
    down:       ``[E, hidden, inner]``, likewise
    biases:     ``[E, 2 * inner]`` (or ``inner``) and ``[E, hidden]``, of the same dtype; None where there are none
    correction, scales, logit_bias: see `headwise.runtime.ops.base.Mixture`, on the device
    """

    shape: ExpertShape
    into: Array | PackedMatrix
    down: Array | PackedMatrix
    into_bias: Array | None
    down_bias: Array | None
    correction: Array | None
    scales: Array | None
    logit_bias: Array | None = None


@dataclass(frozen=True)
class _Product:
    """How a projection's tiles of some rows are multiplied.

    names:   of the arrays that the kernel is given, in their order
    numbers: what it is given behind them
    columns: blocks of a tile
    """

    kernel: Kernel
    names: tuple[str, ...]
    numbers: tuple[np.int32, ...]
    columns: int

    def __call__(self, tiles: int, arrays: dict[str, Array | None]) -> None:
        """Enqueue it. arrays: see `experts_jit.multiply_experts` and `packed_experts.cu`"""
        addresses = addresses_of(*[arrays[name] for name in self.names])
        self.kernel((tiles * self.columns, 1, 1), (*addresses, *self.numbers))


@dataclass(frozen=True)
class _Kernels:
    """products: with ``gate | up`` and with down, by the rows of a tile"""

    choose: Kernel
    sort: Kernel
    add: Kernel
    products: dict[int, tuple[_Product, _Product]]


def check_experts(shape: ExpertShape) -> None:
    """Whether the kernels serve such a mixture.

    Raises:
        ConfigError: they do not; says what is at fault and what is allowed.
    """
    itemsize = numpy_dtype(shape.dtype).itemsize
    if shape.assigned > MOST_ASSIGNED or shape.routing.experts > MOST_EXPERTS or shape.routing.groups > WARP:
        raise ConfigError(
            f"{shape.assigned} of {shape.routing.experts} experts in {shape.routing.groups} groups for each token are "
            f"not supported on a GPU: at most {MOST_ASSIGNED} of {MOST_EXPERTS} in {WARP} groups; use device cpu"
        )
    if shape.hidden * itemsize % VECTOR_BYTES:
        raise ConfigError(
            f"hidden size {shape.hidden} of {shape.dtype} is no whole number of {VECTOR_BYTES} bytes, as experts on a "
            "GPU need: use device cpu"
        )


def variants_of(shape: ExpertShape, sm: int) -> Iterator[Variant]:
    """All Triton kernels of such a layer on a card of compute capability ``sm``."""
    for tile in expert_tiles(shape.dtype, sm):
        for projection in shape.projections:
            if not projection.takes_codes(tile.rows):
                yield _variant(shape, tile, projection)


def programs_of(shape: ExpertShape) -> Iterator[tuple[str, Defines]]:
    """The CUDA C++ files of such a layer, with their macros."""
    yield SOURCE, defines_of(shape)
    for projection in shape.projections:
        if projection.takes_codes(FEW_ROWS):
            yield PACKED_SOURCE, _defines_of_codes(shape, projection)


def _defines_of_codes(shape: ExpertShape, projection: Projection) -> Defines:
    assert projection.codes is not None
    return {
        **packed.defines_of(projection.codes, _FEW[projection.codes.bits]),
        "ACTIVATION": _ACTIVATIONS[projection.activation],
        "BIAS": int(shape.has_bias),
        "WEIGHS": int(_weighs(shape, projection)),
    }


def _weighs(shape: ExpertShape, projection: Projection) -> bool:
    """Whether rows are multiplied by their shares there."""
    return shape.weighs_input == bool(projection.activation)


def defines_of(shape: ExpertShape) -> Defines:
    """The macros of `experts.cu` for such a layer."""
    routing = shape.routing
    return {
        "NUMBER": NUMBERS[shape.dtype],
        "EXPERTS": routing.experts,
        "CHOSEN": routing.per_token,
        "SHARED": shape.shared,
        "SCORED_BY": SCORED_BY.index(routing.scored_by),
        "GROUPS": routing.groups,
        "GROUPS_USED": routing.groups_per_token,
        "GROUP_BEST": routing.best_of_group,
    }


def most_tiles(assignments: int, experts: int, rows: int) -> int:
    """Tiles of ``rows`` that assignments take at most, where every expert's begin with a tile of their own."""
    return (assignments + min(experts, assignments) * (rows - 1)) // rows


class CudaExperts:
    """Mixtures of experts on device arrays, on the current stream.

    Nothing is read on the host, and launches are decided by shapes alone, so they can be captured in a CUDA graph and
    replayed with tokens that go elsewhere.

    empty: ``empty(shape, dtype)`` gives an uninitialised array on the device
    """

    def __init__(
        self, launcher: TritonLauncher, programs: Programs, empty: Callable[[tuple[int, ...], Any], Array]
    ) -> None:
        self._launcher, self._programs, self._empty = launcher, programs, empty
        self._kernels: dict[ExpertShape, _Kernels] = {}

    def prepare(self, shape: ExpertShape) -> None:
        """Compile or load all that calls with experts of ``shape`` need, so that they only enqueue.

        Raises:
            ConfigError: the shape is not supported.
        """
        if shape in self._kernels:
            return
        check_experts(shape)
        program, (up, down) = self._programs(SOURCE, defines_of(shape)), shape.projections
        self._kernels[shape] = _Kernels(
            program.kernel("choose_experts", THREADS),
            program.kernel("sort_by_expert", SORT_THREADS),
            program.kernel("add_parts", THREADS),
            {
                tile.rows: (self._product(shape, tile, up), self._product(shape, tile, down))
                for tile in expert_tiles(shape.dtype, self._launcher.sm)
            },
        )

    def _product(self, shape: ExpertShape, tile: ProductTile, projection: Projection) -> _Product:
        codes, sizes = projection.codes, [projection.width, projection.depth, projection.per_row]
        signature: tuple[str, ...] = _SIGNATURE if codes is None else _PACKED_SIGNATURE
        if codes is not None and projection.takes_codes(tile.rows):
            program = self._programs(PACKED_SOURCE, _defines_of_codes(shape, projection))
            kernel = program.kernel(PACKED_KERNEL, _FEW_WARPS * WARP)
            columns = _FEW_COLUMNS if projection.is_gated else 2 * _FEW_COLUMNS
            sizes.append(packed.group_steps(codes, projection.depth))
        else:
            variant = _variant(shape, tile, projection)
            kernel, columns = self._launcher.prepare(variant), dict(variant.constants)["BLOCK_N"]
        names = tuple(parameter.partition(":")[0] for parameter in signature if not parameter.endswith(":i32"))
        return _Product(kernel, names, tuple(map(np.int32, sizes)), -(-projection.width // columns))

    def mix(self, x: Array, logits: Array, experts: StackedExperts, tokens: Array) -> Array:
        """What experts make of ``x [T, hidden]``, by router ``logits [T, experts]``.

        ``x`` is C-contiguous, as are the rows of ``logits``, which have its dtype. Rows from ``tokens``, int32 ``[1]``,
        on are padding: they are assigned to no expert and become zeros.
        """
        shape, rows = experts.shape, x.shape[0]
        kernels, assignments = self._kernels[shape], rows * shape.assigned
        chosen, shares = self._choose(kernels, logits, experts, tokens)
        count, sizes = shape.routing.experts + shape.shared, expert_tiles(shape.dtype, self._launcher.sm)
        tile = [size for size in sizes if assignments >= count * size.least_rows][-1]
        tiles = most_tiles(assignments, count, tile.rows)
        order, tile_expert = self._empty((tiles, tile.rows), np.int32), self._empty((tiles,), np.int32)
        kernels.sort(
            (1 if tiles else 0, 1, 1),
            (*addresses_of(chosen, order, tile_expert), assignments, tiles, tile.rows),
        )
        between = self._empty((assignments, shape.inner), x.dtype)
        parts = self._empty((assignments, shape.hidden), x.dtype)
        placed = {"shares": shares, "order": order, "tile_expert": tile_expert}
        into = {"x": x, **_weights(experts.into), "bias": experts.into_bias, "out": between}
        down = {"x": between, **_weights(experts.down), "bias": experts.down_bias, "out": parts}
        for multiply, arrays in zip(kernels.products[tile.rows], (into, down), strict=True):
            multiply(tiles, {**arrays, **placed})
        out = self._empty(x.shape, x.dtype)
        vectors = shape.hidden * x.dtype.itemsize // VECTOR_BYTES
        kernels.add(
            (-(-rows * vectors // THREADS), 1, 1),
            (*addresses_of(parts, chosen, out), rows * vectors, vectors),
        )
        return out

    def _choose(self, kernels: _Kernels, logits: Array, experts: StackedExperts, tokens: Array) -> tuple[Array, Array]:
        shape, rows, routing = experts.shape, logits.shape[0], experts.shape.routing
        chosen = self._empty((rows, shape.assigned), np.int32)
        shares = self._empty((rows, shape.assigned), np.float32)
        kernels.choose(
            (-(-rows * WARP // THREADS), 1, 1),
            (
                *addresses_of(logits, experts.logit_bias, experts.correction, experts.scales, tokens, chosen, shares),
                logits.strides[0], rows,
                -1 if routing.norm_min is None else routing.norm_min, routing.scale,
            ),
        )  # fmt: skip
        return chosen, shares


def _weights(weight: Array | PackedMatrix) -> dict[str, Array | None]:
    """By the names of parameters."""
    if isinstance(weight, PackedMatrix):
        return {"codes": weight.codes, "scale": weight.scale, "minimum": weight.minimum}
    return {"weight": weight}


def _variant(shape: ExpertShape, tile: ProductTile, projection: Projection) -> Variant:
    codes, columns = projection.codes, tile.gated_columns if projection.is_gated else tile.columns
    sizes = {"width": projection.width, "depth": projection.depth}
    multiples = [name for name, number in sizes.items() if number % 16 == 0]
    common = (
        ("ACTIVATION", projection.activation), ("GATED", projection.is_gated), ("BIAS", shape.has_bias),
        ("WEIGHS", _weighs(shape, projection)),
    )  # fmt: skip
    block: tuple[tuple[str, Any], ...] = (("BLOCK_M", tile.rows), ("BLOCK_N", columns))
    if codes is None:
        signature = typed(_SIGNATURE, {"x": TYPES[shape.dtype]})
        block += (("BLOCK_K", tile.depth), ("EVEN", projection.depth % tile.depth == 0))
    else:
        signature = typed(_PACKED_SIGNATURE, {"x": TYPES[shape.dtype], "codes": code_type(codes)})
        block += constants_of(codes, tile.depth)
    return Variant(
        kernel="multiply_experts" if codes is None else PACKED_KERNEL,
        signature=signature,
        constants=(*block, *common),
        multiples=(*(name for name, type_ in signature if type_.startswith("*")), *multiples),
        num_warps=tile.warps,
        num_stages=tile.stages,
        module=MODULE if codes is None else PACKED_MODULE,
    )
