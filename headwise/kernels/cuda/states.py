"""What the host halves of recurrent states on a GPU share: how states are cut, and what tells kernels of the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.launch import Array, TritonLauncher, Variant, address_of
from headwise.kernels.state_layout import RECURRENT, StateSizes, state_layout

CHUNK = 64
"""Tokens of a prompt that are computed at once; in blocks of fewer as many, since states are left at their ends."""

CONVOLVED = 16
"""Tokens of a program that convolves, or norms."""

COLUMNS, CARRIED = 32, 4096
"""Columns of a value head's state that one program carries through a prompt, and numbers, at most."""

MOST_DIM = 256
"""Of keys, and of values: a program keeps a value head's state in registers."""

MOST_SHARE = 16
"""Value heads of a member, all of which one program decodes."""

TYPES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
"""Of what is projected, in signatures, where they say ``x``."""

IN_CACHE = (
    "cu_seqlens_q:*i32 seq_lens:*i32 block_tables:*i32 head_group:*i32 head_slot:*i32 {} groups:i32 max_blocks:i32 "
    "block_bytes:i64 slot_bytes:i64"
)
"""The part of signatures that `cache_arguments` are for."""

_STAGES = {"carry": 2}
_MULTIPLES = (
    "projected", "decays", "gates", "out", "arena", "convolution", "convolution_bias", "norm", "query", "key",
    "started", "lasting", "value", "among", "solved", "seen", "block_bytes", "slot_bytes",
)  # fmt: skip
"""Parameters on multiples of 16 (bytes), wherever they are ones."""


Shape = TypeVar("Shape")
"""What the machine code of a layer depends on besides the card."""


class StateLaunches(ABC, Generic[Shape]):
    """Kernels of layers with states on device arrays, on the current stream.

    They read no device array on the host: what is launched depends on the shapes of a step and its ``max_query_len``
    alone, so decode steps can be captured in a CUDA graph and replayed with other lengths; those allocate nothing.

    ``allocate(nbytes)`` gives device memory as a flat uint8 array.
    """

    name = "cuda"

    def __init__(self, launcher: TritonLauncher, allocate: Callable[[int], Array]) -> None:
        self.launcher, self.allocate = launcher, allocate

    @abstractmethod
    def variants(self, shape: Shape) -> Mapping[str, Variant]:
        """All that a layer of ``shape`` launches on this card, by the kernels' names.

        Raises:
            ConfigError: the shape is not supported.
        """

    def prepare(self, shapes: Iterable[Shape]) -> None:
        """Compile or load all that calls of ``shapes`` need, so that they only enqueue.

        Raises:
            ConfigError: a shape is not supported.
        """
        for shape in shapes:
            for variant in self.variants(shape).values():
                self.launcher.prepare(variant)

    def rooms(self, tokens: int, of_token: Mapping[str, int]) -> dict[str, Array]:
        """Memory for what launches pass on: so many bytes of each token."""
        return {name: self.allocate(tokens * nbytes) for name, nbytes in of_token.items()}

    def take_on(
        self, shape: Shape, batch: AttentionBatch, tokens: int, heads: int, arguments: dict[str, np.generic]
    ) -> None:
        """Take states of so many ``heads`` on by a step's tokens: those of decodes by a launch of ``step``, or of
        ``walk`` where they may follow each other, behind the others, which may write whatever is in the rows of
        decodes."""
        sequences = batch.cu_seqlens_q.shape[0] - 1
        longest = 1 if tokens == 1 else batch.max_query_len
        decodes = longest == 1 or sequences > 1
        if longest != 1:
            fewest = np.int32(2 if decodes else 1)
            self.chunks(shape, tokens, sequences, arguments | {"fewest_queries": fewest})
        if decodes:
            decode = "step" if batch.follows_on_device is None else "walk"
            self.launch(shape, decode, (sequences * heads, 1, 1), arguments)

    @abstractmethod
    def chunks(self, shape: Shape, tokens: int, sequences: int, arguments: dict[str, np.generic]) -> None:
        """Take states of all sequences of several tokens on."""

    def launch(
        self, shape: Shape, kernel: str, grid: tuple[int, int, int], arguments: Mapping[str, np.generic]
    ) -> None:
        variant = self.variants(shape)[kernel]
        self.launcher.launch(variant, grid, [arguments[name] for name, _ in variant.signature])


def check_states(sizes: StateSizes, block_size: int, dtype: str, kind: str) -> None:
    """Whether kernels serve layers of some ``kind`` with such states.

    Raises:
        ConfigError: they do not; says what is at fault and what is allowed.
    """
    if dtype not in TYPES:
        raise ConfigError(f"dtype {dtype} is not supported on a GPU: choose one of {', '.join(TYPES)}")
    if max(sizes.key_dim, sizes.value_dim) > MOST_DIM or sizes.share > MOST_SHARE:
        raise ConfigError(
            f"{kind} with heads of {sizes.key_dim} and {sizes.value_dim}, {sizes.share} of which share a key head, "
            f"are not supported on a GPU: at most {MOST_DIM}, shared by {MOST_SHARE}; use device cpu"
        )
    if block_size & (block_size - 1) or block_size < sizes.convolution - 1:
        raise ConfigError(
            f"block_size {block_size} is not supported on a GPU for {kind} with a convolution over {sizes.convolution} "
            f"tokens: choose a power of two, {max(16, sizes.convolution)} or more"
        )


def variants_of_kernels(
    module: str,
    signatures: Mapping[str, str],
    constants: Mapping[str, str],
    sized: Mapping[str, int | float | str],
    dtype: str,
    warps: Mapping[str, int],
) -> dict[str, Variant]:
    """All kernels of states in a module, by name: see `variant_of`."""
    return {
        name: variant_of(module, name, signature, constants[name], sized, dtype, warps[name])
        for name, signature in signatures.items()
    }


def variant_of(
    module: str,
    kernel: str,
    signature: str,
    constants: str,
    sized: Mapping[str, int | float | str],
    dtype: str,
    num_warps: int,
) -> Variant:
    """A kernel of states for a ``dtype``.

    signature: ``name:type`` of each parameter, where the type ``x`` is the dtype's
    constants: names, whose values ``sized`` has
    """
    pairs = [parameter.split(":") for parameter in signature.split()]
    return Variant(
        kernel=kernel,
        signature=tuple((name, TYPES[dtype] if type_ == "x" else type_) for name, type_ in pairs),
        constants=tuple((constant, sized[constant]) for constant in constants.split()),
        multiples=tuple(name for name in _MULTIPLES if name in {parameter for parameter, _ in pairs}),
        num_warps=num_warps,
        num_stages=_STAGES.get(kernel, 1),
        module=module,
    )


def chunk_of(block_size: int) -> int:
    """Tokens of a prompt that are computed at once."""
    return min(CHUNK, block_size)


def rows_of(block_size: int) -> int:
    """Of the tiles that have a chunk: matrix instructions take 16 at least."""
    return max(16, chunk_of(block_size))


def columns_of(sizes: StateSizes) -> int:
    return min(COLUMNS, CARRIED // block_of(sizes.key_dim), block_of(sizes.value_dim))


def pieces_of(sizes: StateSizes) -> int:
    """Programs that carry a value head's state."""
    return -(-sizes.value_dim // columns_of(sizes))


def block_of(size: int) -> int:
    """Of a tile that holds ``size`` numbers."""
    return max(16, power_of_two(size))


def power_of_two(number: int) -> int:
    """The smallest power of two not below ``number``."""
    return 1 << (number - 1).bit_length()


def recurrent_at(sizes: StateSizes) -> int:
    """Where a member's matrices begin, in numbers; so in a block of any size."""
    return state_layout(1, 1, sizes).role_offsets[RECURRENT] // 4


def check_rows(projected: Array, out: Array, width: int, values: int) -> None:
    """Whether arrays have rows of ``width`` and of ``values``, without gaps and of one dtype.

    Raises:
        ValueError: they have not.
    """
    tokens = projected.shape[0]
    given, wanted = (projected.shape, out.shape), ((tokens, width), (tokens, values))
    if given != wanted or out.dtype != projected.dtype:
        raise ValueError(f"projected and out are {given}, {out.dtype}; this layout's are {wanted}, {projected.dtype}")
    if not (projected.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError("projected and out must have no gaps: pass contiguous copies")


def cache_arguments(layout: BlockLayout, batch: AttentionBatch, heads: HeadTable) -> dict[str, np.generic]:
    """Where sequences' tokens and states are."""
    follows = batch.follows_on_device
    return {
        **({} if follows is None else pointers(follows=follows)),
        **pointers(cu_seqlens_q=batch.cu_seqlens_q, seq_lens=batch.seq_lens, block_tables=batch.block_tables),
        **pointers(head_group=heads.group, head_slot=heads.slot),
        "batch": np.int32(batch.cu_seqlens_q.shape[0] - 1),
        "groups": np.int32(batch.groups),
        "max_blocks": np.int32(batch.block_tables.shape[1]),
        "block_bytes": np.int64(layout.block_bytes),
        "slot_bytes": np.int64(layout.slot_bytes),
    }


def pointers(**arrays: Array) -> dict[str, np.generic]:
    return {name: np.uint64(address_of(array)) for name, array in arrays.items()}


def tiles_of(tokens: int, sequences: int, size: int) -> int:
    """Of ``size`` tokens each, that `states_jit.find_chunk` deals to the sequences of a step."""
    return tokens // size + 2 * sequences
