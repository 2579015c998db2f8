"""Attention on CPU cores, compiled by Numba: one layer at a time (`attention_jit` and `kv_write_jit` are compiled)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import attention_calls_jit, records
from headwise.kernels.cpu.attention_jit import FIRST_ITEM
from headwise.kernels.cpu.attention_pass import HEAD_DIM_STEP, CacheKernels, PlanTable, score_factor
from headwise.kernels.cpu.attention_plan import THREAD_COST
from headwise.kernels.cpu.known_heads import KnownHeads
from headwise.kernels.cpu.pool import check_threads, pool_of_this_process
from headwise.kernels.cpu.records import address_of, place_of
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.latest import OfEach
from headwise.kernels.shared_context import SharedContext, attend_shared, seen_by_all
from headwise.kernels.token_ranks import TokenRanks, own_rows

THREAD_TOKENS = 32
"""Tokens to be written that are worth waking a thread for."""

MOST_LAYOUTS = 8
"""That are remembered; a model has one for each size of its heads."""

Floats = NDArray[np.float32]

_FLOAT_BYTES = 4


class NumbaKernels:
    """`RotatingKernels` for float32 arrays in host memory, callable from any thread.

    KV is of any dtype of `attention_pass.STORED`.

    Making the first one in a process loads the kernels for ``kv_dtype``, if one is given, and on a machine's first ever
    use compiles them (some seconds; the machine code is kept on disk). Those of other KV are loaded by `prepare`, or
    when first called with it. ``query``, ``key`` and ``value`` are float32 with contiguous
    rows, which may lie apart; ``out`` is C-contiguous float32, the arrays of batch and heads C-contiguous int32.

    Over float32 KV all is float32. Over KV of fewer bits queries and probabilities are rounded to bfloat16 where the
    CPU has AVX512-BF16 (else not; with AMX those of several tokens alone), and one token's over int8 to 15 bits of
    their row's largest where it has AVX512-BW; sums are float32, or exact integers.

    Raises:
        ConfigError: ``threads`` is not between 1 and the number of cores this process may use, or there are no kernels
            for ``kv_dtype``.
    """

    name = "numba"
    _compile = staticmethod(CacheKernels.of)

    def __init__(self, threads: int, kv_dtype: str | None = "float32") -> None:
        self._kernels_of = OfEach(self._compile, MOST_LAYOUTS)
        self._heads = KnownHeads()
        self._own_rows = OfEach(own_rows, most=1)  # the same for all layers of a step
        self.set_threads(threads)
        if kv_dtype is not None:
            self.prepare(kv_dtype)

    def set_threads(self, threads: int) -> None:
        """Use at most ``threads`` threads from the next call on; small calls use fewer."""
        check_threads(threads)
        self._threads = threads

    def prepare(self, kv_dtype: str) -> None:
        """Load the kernels of KV of this dtype.

        Raises:
            ConfigError: there are none for this dtype.
        """
        CacheKernels.of(gqa_layout(block_size=1, slots=1, head_dim=2 * HEAD_DIM_STEP, dtype=kv_dtype))

    def write_kv(
        self,
        key: NDArray[np.float32],
        value: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        """See `AttentionKernels.write_kv`."""
        nothing, no_angles = key[:, :0], np.zeros((len(key), 0), np.float32)
        self._write_rows(nothing, key, value, no_angles, no_angles, arena, layout, batch, heads)

    def write_kv_rope(
        self,
        query: NDArray[np.float32],
        key: NDArray[np.float32],
        value: NDArray[np.float32],
        cosines: NDArray[np.float32],
        sines: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        """See `RotatingKernels.write_kv_rope`."""
        cosines, sines = (angles.reshape(len(angles), -1) for angles in (cosines, sines))
        self._write_rows(query, key, value, cosines, sines, arena, layout, batch, heads)

    def _write_rows(
        self,
        query: NDArray[np.float32],
        key: NDArray[np.float32],
        value: NDArray[np.float32],
        cosines: NDArray[np.float32],
        sines: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
    ) -> None:
        rows, half, dim = len(key), cosines.shape[1], key.shape[2]
        if half > 0 and (2 * half != dim or query.shape[2] != dim or not len(query) == len(cosines) == rows):
            raise ValueError("query, cosines and sines do not fit the keys")
        if cosines.shape != sines.shape:
            raise ValueError("cosines and sines do not fit each other")
        if key.shape[:2] != value.shape[:2]:
            raise ValueError("keys and values do not fit each other")
        kernels, layer_at = self._kernels_of(layout), self._heads.of(heads, None).layer_at
        _check(rows, key.shape[1], (dim, value.shape[2]), kernels, batch, heads)
        tokens, scratch = int(batch.cu_seqlens_q[-1]), np.empty((self._threads, dim), np.float32)
        own = kernels.a_pass(
            arena, batch, rows=rows, q_heads=query.shape[1], kv_heads=key.shape[1], dim=dim,
            value_dim=value.shape[2], **_rows("query", query),
            **_rows("key", key), **_rows("value", value), cosines=address_of(cosines, np.float32),
            sines=address_of(sines, np.float32), half=half, scratch=place_of(scratch), scratch_floats=dim,
        )  # fmt: skip
        workers, counters = max(1, min(self._threads, tokens // THREAD_TOKENS)), np.zeros(1, np.int64)
        call = records.filled(
            records.CALL, function=kernels.write.address, own=place_of(own), layer=layer_at,
            counters=place_of(counters), rows=tokens, piece=THREAD_TOKENS,
        )  # fmt: skip
        pool_of_this_process().run(attention_calls_jit.write().address, workers, place_of(call))

    def attend(
        self,
        query: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        scale: float,
        softcap: float,
        out: NDArray[np.float32],
        sink_logits: NDArray[np.float32] | None = None,
        lse: NDArray[np.float32] | None = None,
    ) -> None:
        """See `AttentionKernels.attend`. A visible token whose block is ``-1`` is treated as not visible.

        A sequence's results do not depend on the batch that it is part of, nor on the number of threads. ``lse``, if
        given, C-contiguous float32 ``[tokens, q_heads]``, takes the logarithm, to base 2, of each softmax's sum without
        a sink's share; ``-inf`` where nothing is seen.
        """
        rows, q_heads, dim = query.shape
        kv_heads = len(heads.group)
        if out.shape[:2] != query.shape[:2] or q_heads % kv_heads:
            raise ValueError(f"query {query.shape}, out {out.shape} and {kv_heads} KV heads do not fit each other")
        if sink_logits is not None and sink_logits.shape != (q_heads,):
            raise ValueError(f"sink_logits {sink_logits.shape} do not fit {q_heads} query heads")
        if lse is not None and lse.shape != (rows, q_heads):
            raise ValueError(f"lse {lse.shape} does not fit {rows} rows of {q_heads} query heads")
        kernels, share = self._kernels_of(layout), q_heads // kv_heads
        _check(rows, kv_heads, (dim, out.shape[2]), kernels, batch, heads)
        known = self._heads.of(heads, sink_logits)
        plan = known.plan(share, dim, batch)
        workers, plans = max(1, min(self._threads, len(plan.parts), plan.cost // THREAD_COST)), PlanTable.of([plan])
        scratch, partials = plans.scratch(workers, share, kernels), plans.partials(dim)
        counters = np.zeros(FIRST_ITEM + len(plan.items), np.int64)
        own = kernels.a_pass(
            arena, batch, rows=rows, q_heads=q_heads, kv_heads=kv_heads, dim=dim, value_dim=out.shape[2],
            **_rows("query", query),
            out=address_of(out, np.float32), plans=place_of(plans.table), partials=place_of(partials),
            partial_rows=plan.partial_rows, scratch=place_of(scratch), scratch_floats=scratch.shape[1],
            lse=0 if lse is None else address_of(lse, np.float32), factor=score_factor(scale, softcap), softcap=softcap,
        )  # fmt: skip
        call = records.filled(
            records.CALL, function=kernels.attend.address, own=place_of(own), layer=known.layer_at,
            counters=place_of(counters),
        )  # fmt: skip
        pool_of_this_process().run(attention_calls_jit.attend().address, workers, place_of(call))

    def write_own(
        self,
        key: NDArray[np.float32],
        value: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        share: TokenShare,
    ) -> None:
        """See `SharedKernels.write_own`."""
        rows, own = self._own_rows(batch, share)
        if len(rows):
            self.write_kv(key[rows], value[rows], arena, layout, own, heads)

    def attend_shared(
        self,
        query: NDArray[np.float32],
        arena: NDArray[np.uint8],
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        ranks: TokenRanks,
        *,
        scale: float,
        softcap: float,
        out: NDArray[np.float32],
        sink_logits: NDArray[np.float32] | None = None,
    ) -> None:
        """See `SharedKernels.attend_shared`."""
        (q_heads, dim), value_dim = query.shape[1:], out.shape[2]

        def attend(whole: SharedContext) -> None:
            self.attend(
                query[whole.rows], whole.arena, whole.layout, whole.batch, whole.heads, scale=scale, softcap=softcap,
                out=out[whole.rows], sink_logits=sink_logits,
            )  # fmt: skip

        def attend_own(every: Floats, own: AttentionBatch) -> tuple[Floats, Floats]:
            seen, lse = np.empty((*every.shape[:2], value_dim), np.float32), np.empty(every.shape[:2], np.float32)
            self.attend(every, arena, layout, own, heads, scale=scale, softcap=softcap, out=seen, lse=lse)
            return seen, lse

        def attend_rows(rows: NDArray[np.int64]) -> None:
            out[rows] = seen_by_all(query[rows], value_dim, batch, rows, ranks, attend_own, sink_logits)

        row_bytes = 4 * ranks.share.parts * q_heads * dim
        attend_shared(ranks, (arena, layout, batch, heads), row_bytes, attend, attend_rows)


class TokenKernels(NumbaKernels):
    """The same over single tokens' latents: entries of tables are their places, in `attention_pass.token_step`."""

    _compile = staticmethod(CacheKernels.of_tokens)


def _check(
    rows: int, kv_heads: int, dims: tuple[int, int], kernels: CacheKernels, batch: AttentionBatch, heads: HeadTable
) -> None:
    """Raise ValueError where compiled code would read or write what is not there. dims: of keys, and of values"""
    sees = batch.sees_of(heads)
    if sees is not None and len(sees) < int(batch.cu_seqlens_q[-1]):
        raise ValueError(f"sees of {len(sees)} rows does not fit cu_seqlens_q up to {batch.cu_seqlens_q[-1]}")
    if int(batch.cu_seqlens_q[-1]) > rows or len(heads.group) != kv_heads:
        raise ValueError(
            f"{rows} rows of {kv_heads} KV heads, cu_seqlens_q up to {batch.cu_seqlens_q[-1]} and a table of "
            f"{len(heads.group)} heads do not fit each other"
        )
    for what, dim, most in zip(("head_dim", "size of values"), dims, (kernels.dim, kernels.value_dim), strict=True):
        if dim > most:
            raise ValueError(f"the {what} is {dim}, larger than that of the block layout, {most}")
    if dims[1] > dims[0]:
        raise ValueError(f"the size of values is {dims[1]}, larger than the head_dim {dims[0]}")


def _rows(name: str, array: NDArray[np.float32]) -> dict[str, int]:
    """Fields of a `records.PASS` for ``array [rows, heads, dim]``.

    Raises:
        ValueError: its rows are not contiguous.
    """
    if array.dtype != np.float32 or (array.size and array.strides[2] != _FLOAT_BYTES):
        raise ValueError(f"rows of {name} must be contiguous float32, got {array.dtype} with strides {array.strides}")
    row, head = (stride // _FLOAT_BYTES for stride in array.strides[:2])
    return {name: place_of(array), f"{name}_row": row, f"{name}_head": head}
