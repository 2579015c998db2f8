"""Turned heads, and the write of keys that all heads share (DeepSeek-V4), on a GPU: the host half of `turned.cu`."""

from __future__ import annotations

from headwise.cache_controller.layout import BlockLayout
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch
from headwise.kernels.compressed_base import Kept
from headwise.kernels.cuda.elementwise import VECTOR_BYTES
from headwise.kernels.cuda.entries import variant_of
from headwise.kernels.cuda.latents import rows_of
from headwise.kernels.cuda.launch import Array, Kernel, addresses_of
from headwise.kernels.cuda.programs import Programs
from headwise.kernels.mla import LATENT, LATENT_SCALE, has_scales

SOURCE, KERNEL = "turned.cu", "turn_rows"
THREADS = 128


class CudaTurned:
    """One launch each, on the current stream. All is float16, bfloat16 or float32, and of one dtype, but for a cache in
    int8 or E4M3; tokens may lie apart. Grids depend on shapes alone; tokens beyond ``cu_seqlens_q[-1]`` are padding,
    and are turned, too.

    Raises:
        ConfigError: there is no variant for a dtype, or an array that the kernel cannot read.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def prepare(self, dtype: str, kept: str) -> Kernel:
        """Compile or load what calls on arrays of ``dtype`` need that are kept in ``kept``, so that they only enqueue.
        Those that keep nothing need what keeps ``dtype``."""
        if (dtype, kept) not in self._kernels:
            self._kernels[dtype, kept] = self._programs(SOURCE, variant_of(dtype, kept)).kernel(KERNEL, THREADS)
        return self._kernels[dtype, kept]

    def turn(self, rows: Array, cosines: Array, sines: Array, turning: int) -> None:
        """Turn ``rows [tokens, heads, size]`` in place: elements ``i < turning`` with those of number ``i + size / 2``.

        cosines, sines: float32 ``[tokens, 1, angles]``, of which as many count
        """
        kernel = self.prepare(rows.dtype.name, rows.dtype.name)
        self._launch(kernel, rows, None, cosines, sines, turning, (0, 0, 0, 0), (None,) * 6, (0, 0, 0, 0))

    def write(
        self,
        query: Array,
        key: Array,
        cosines: Array,
        sines: Array,
        turning: int,
        arena: Array,
        kept: Kept,
        batch: AttentionBatch,
    ) -> None:
        """The same of ``query``; and store ``key [tokens, size]``, turned likewise."""
        layout, tables = kept.layout, batch.block_tables
        check_kept(layout, key, turning)
        places = arena, batch.cu_seqlens_q, batch.seq_lens, tables, kept.heads.group, kept.heads.slot
        at = layout.role_offsets
        offsets = layout.block_bytes, layout.slot_bytes, at[LATENT], at.get(LATENT_SCALE, 0)
        stride = tables.strides[0] // tables.itemsize
        sizes = batch.seq_lens.shape[0], batch.groups, stride, layout.block_size
        kernel = self.prepare(query.dtype.name, layout.roles[0].dtype)
        self._launch(kernel, query, key, cosines, sines, turning, offsets, places, sizes)

    def _launch(
        self,
        kernel: Kernel,
        rows: Array,
        key: Array | None,
        cosines: Array,
        sines: Array,
        turning: int,
        offsets: tuple[int, int, int, int],
        places: tuple[Array | None, ...],
        sizes: tuple[int, int, int, int],
    ) -> None:
        tokens, heads, size = rows.shape
        if not tokens:
            return
        angles = check_angles(cosines, sines, tokens)
        check_turning(size, turning, rows.itemsize)
        if turning > angles or (key is not None and key.shape != (tokens, size)):
            raise ConfigError(f"{angles} angles, {turning} of which count, do not fit rows {rows.shape} and their keys")
        address, row_stride = rows_of("rows", rows, tokens)
        key_address, key_stride = (0, 0) if key is None else rows_of("key", key, tokens)
        kernel(
            (tokens, 1, 1),
            (
                address, key_address, *addresses_of(cosines, sines, *places), row_stride, key_stride, *offsets, *sizes,
                heads, size, angles, turning,
            ),
        )  # fmt: skip


def check_turning(size: int, turning: int, itemsize: int) -> None:
    """Raise ConfigError where halves of heads of ``size``, or what turns of them, are no whole vectors."""
    step = VECTOR_BYTES // itemsize
    if size % (2 * step) or turning % step or not 0 < turning <= size // 2:
        raise ConfigError(
            f"heads of {size} of which {2 * turning} elements turn are not supported on a GPU: only whole vectors of "
            f"{step} elements of each half; use device cpu"
        )


def check_angles(cosines: Array, sines: Array, tokens: int) -> int:
    """How many there are of each token. Raises ConfigError: these are none, or the kernel cannot read them."""
    angles: int = cosines.shape[-1]
    for name, array in (("cosines", cosines), ("sines", sines)):
        fits = array.shape in ((tokens, 1, angles), (tokens, angles)) and array.dtype.name == "float32"
        if not fits or not array.flags.c_contiguous or angles * array.itemsize % VECTOR_BYTES:
            raise ConfigError(f"{name} are {array.dtype} {list(array.shape)}: give float32 {[tokens, 1, angles]}")
    return angles


def check_kept(layout: BlockLayout, key: Array, turning: int) -> None:
    """Raise ConfigError where blocks of ``layout`` do not keep such keys, of each half of which so many turn."""
    (width,), (size,), kept = layout.roles[0].shape, key.shape[1:], layout.roles[0].dtype
    fits = width == size + 2 * turning if has_scales(layout) else width == size and kept == key.dtype.name
    if not fits:
        raise ConfigError(
            f"keys {key.dtype} {list(key.shape)}, {2 * turning} elements of which turn, are not what {layout.identity} "
            "keeps"
        )
