"""Attention steps on a device, ready: random caches in shuffled blocks, for timed sections of `gpu_checks.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from gpu.random_bytes import fill_blocks, random
from gpu.rig import Array, Rig, Work
from gpu.sizes import Heads
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, AttentionKernels, HeadTable
from headwise.kernels.cuda.kernels import CudaKernels
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.joint import joint_of

Window = tuple[int, int]
"""(window, sink); (0, 0) is full attention."""

FULL_ATTENTION: Window = (0, 0)


@dataclass(frozen=True)
class Step:
    """One layer's attention of one step.

    tables:    the block tables, in host memory
    sequences: (queries, context) of each
    windows:   of each KV head
    places:    (group, slot) of each KV head
    kv_bytes:  of the keys and values that somebody sees
    flops:     of the products of all visible (query, key) pairs
    kernels:   that compute it, if not the rig's
    """

    query: Array
    out: Array
    arena: Array
    layout: BlockLayout
    batch: AttentionBatch
    heads: HeadTable
    tables: NDArray[np.int32]
    sequences: Sequence[tuple[int, int]]
    windows: Sequence[Window]
    places: Sequence[tuple[int, int]]
    scale: float
    kv_bytes: int
    flops: int
    kernels: AttentionKernels | None = None

    def on(self, rig: Rig) -> Work:
        """The call that computes it."""
        attend = (self.kernels or rig.kernels).attend
        return partial(
            attend, self.query, self.arena, self.layout, self.batch, self.heads, scale=self.scale, softcap=0.0,
            out=self.out,
        )  # fmt: skip


def kernels_with(rig: Rig, tma: bool) -> AttentionKernels:
    """Those of an engine with ``prefill_tma``, or of one without."""
    return CudaKernels(replace(rig.parts, tma=tma))


def decode_step(
    rig: Rig,
    heads: Heads,
    batch: int,
    context: int,
    block_size: int,
    windows: Sequence[Window] = (),
    one_table: bool = False,
    kv_dtype: str = "",
) -> Step:
    """``batch`` sequences of ``context`` tokens, each with its last token as the query.

    ``one_table``: all heads share a block table, which holds every block; else there is one for each distinct window,
    and blocks that no query of its heads sees are not there. ``kv_dtype``: of the cache, if not that of ``heads``.
    """
    sequences = [(1, context)] * batch
    return _step(rig, heads, sequences, block_size, windows, recycled=True, one_table=one_table, kv_dtype=kv_dtype)


def skewed_step(rig: Rig, heads: Heads, batch: int, contexts: tuple[int, int], block_size: int) -> Step:
    """A decode of ``batch`` sequences, of which the last has the longer of two contexts, and all others the shorter."""
    short, long = contexts
    return _step(rig, heads, [(1, short)] * (batch - 1) + [(1, long)], block_size, (), recycled=True)


def joint_step(rig: Rig, heads: Heads, batch: int, context: int, shared: int, block_size: int) -> tuple[Step, Step]:
    """A decode of sequences whose ``shared`` first tokens are in the same blocks: read by each alone, and together."""
    step = _step(rig, heads, [(1, context)] * batch, block_size, (), recycled=True, shared=shared)
    joint = joint_of(np.array([0, *[shared] * (batch - 1)], np.int32), heads.q_heads // heads.kv_heads)
    assert joint is not None, "whole tiles are shared"
    own_bytes = step.kv_bytes // (batch * context)
    read = (batch * (context - shared) + shared) * own_bytes
    return step, replace(step, batch=replace(step.batch, joint=rig.upload(joint)), kv_bytes=read)


def prefill_step(
    rig: Rig, heads: Heads, tokens: int, block_size: int, windows: Sequence[Window] = (), recycled: bool = False
) -> Step:
    """A whole prompt at once."""
    return _step(rig, heads, [(tokens, tokens)], block_size, windows, recycled)


def half_windowed(heads: Heads, window: Window) -> list[Window]:
    """The first half of the KV heads full, the others with ``window``."""
    full = heads.kv_heads // 2
    return [FULL_ATTENTION] * full + [window] * (heads.kv_heads - full)


def step_bytes(heads: Heads, batch: int, context: int) -> int:
    """Bytes of KV of full attention."""
    return batch * context * heads.kv_heads * 2 * heads.head_dim * numpy_dtype(heads.dtype).itemsize


def _step(
    rig: Rig,
    heads: Heads,
    sequences: Sequence[tuple[int, int]],
    block_size: int,
    windows: Sequence[Window],
    recycled: bool,
    one_table: bool = False,
    kv_dtype: str = "",
    shared: int = 0,
) -> Step:
    """``sequences`` are (queries, context), ``windows`` one per KV head. A group for each distinct window.

    ``recycled``: blocks that no query of a group sees are not there; else they are, as without recycling. ``shared``:
    first tokens that are in the same blocks, of all sequences.
    """
    windows = list(windows) or [FULL_ATTENTION] * heads.kv_heads
    kept = [FULL_ATTENTION] * heads.kv_heads if one_table else windows
    groups, places = list(dict.fromkeys(kept)), places_of(kept)
    layout = gqa_layout(block_size, max(map(kept.count, groups)), heads.head_dim, kv_dtype or heads.dtype)
    tables = _tables(sequences, groups, block_size, recycled, rig.seed)
    tables[:, : shared // block_size] = tables[0, : shared // block_size]
    arena = fill_blocks(rig, rig.empty(int(tables.max() + 1) * layout.block_bytes), layout)
    queries = np.array([count for count, _ in sequences])
    cu_seqlens = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    shape = (int(cu_seqlens[-1]), heads.q_heads, heads.head_dim)
    seen = [_seen(count, context, window) for count, context in sequences for window in windows]
    token_bytes = sum(role.token_bytes for role in layout.roles)
    share = heads.q_heads // heads.kv_heads
    return Step(
        query=random(rig, shape, heads.dtype, salt=1),
        out=rig.upload(np.full(shape, np.nan, numpy_dtype(heads.dtype))),
        arena=arena,
        layout=layout,
        batch=AttentionBatch(
            rig.upload(cu_seqlens),
            rig.upload(np.array([context for _, context in sequences], np.int32)),
            rig.upload(tables),
            len(groups),
            max_query_len=int(queries.max()),
        ),
        heads=head_table(rig.upload, windows, places),
        tables=tables,
        sequences=sequences,
        windows=windows,
        places=places,
        scale=heads.scale,
        kv_bytes=token_bytes * sum(keys for keys, _ in seen),
        flops=4 * heads.head_dim * share * sum(pairs for _, pairs in seen),
    )


def places_of(windows: Sequence[Window]) -> list[tuple[int, int]]:
    """(group, slot) of KV heads that are packed into groups by their windows, in order of appearance."""
    groups = list(dict.fromkeys(windows))
    return [(groups.index(window), list(windows[:head]).count(window)) for head, window in enumerate(windows)]


def head_table(
    upload: Callable[[NDArray[np.int32]], Array], windows: Sequence[Window], places: Sequence[tuple[int, int]]
) -> HeadTable:
    """The table of KV heads with ``windows`` at ``places``."""
    columns = np.array([(*place, *window) for place, window in zip(places, windows, strict=True)], np.int32).T
    return HeadTable(*(upload(np.ascontiguousarray(column)) for column in columns))


def _tables(
    sequences: Sequence[tuple[int, int]], groups: Sequence[Window], block_size: int, recycled: bool, seed: int
) -> NDArray[np.int32]:
    """Block tables ``[sequences * groups, columns]`` of shuffled blocks, -1 where there is none."""
    columns = -(-max(context for _, context in sequences) // block_size)
    needed = np.zeros((len(sequences), len(groups), columns), dtype=bool)
    for index, (queries, context) in enumerate(sequences):
        for at, (window, sink) in enumerate(groups):
            held = np.arange(columns) * block_size < context
            if recycled and window:
                ends = (np.arange(columns) + 1) * block_size
                held &= (ends > context - queries - window + 1) | (ends - block_size < sink)
            needed[index, at] = held
    tables = np.full(needed.shape, -1, np.int32)
    tables[needed] = np.random.default_rng((seed, 3)).permutation(int(needed.sum()))
    return tables.reshape(-1, columns)


def _seen(queries: int, context: int, window: Window) -> tuple[int, int]:
    """(keys that some query sees, visible pairs) of one KV head."""
    positions = np.arange(context - queries, context, dtype=np.int64)
    if not window[0]:
        return context, int((positions + 1).sum())
    starts = np.maximum(positions - window[0] + 1, 0)
    pairs = positions + 1 - starts + np.minimum(window[1], starts)
    return context - int(starts[0]) + min(window[1], int(starts[0])), int(pairs.sum())
