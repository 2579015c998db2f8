"""Attention with some of a step's queries alone: all tokens are written, and few rows are wanted of what is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.runtime.models.attention.base import LayerCache
from headwise.runtime.ops.base import KernelArray, TensorOps


def of_wanted(cache: LayerCache, queries: KernelArray, ops: TensorOps) -> tuple[LayerCache, KernelArray]:
    """The cache for the wanted ones of ``queries [T, ...]``, and these: all, where none are named."""
    wanted = cache.wanted
    found = wanted_rows(queries, wanted, ops)
    if wanted is None or not len(wanted):
        return cache, found
    return replace(cache, batch=ending_at(cache.batch, wanted, ops), wanted=None), found


def wanted_rows(rows: KernelArray, wanted: NDArray[np.int64] | None, ops: TensorOps) -> KernelArray:
    """The wanted ones of ``rows [T, ...]``; None: all."""
    if wanted is None:
        return rows
    return rows[ops.upload(wanted)] if len(wanted) else rows[:0]


def ending_at(batch: AttentionBatch, rows: NDArray[np.int64], ops: TensorOps) -> AttentionBatch:
    """A sequence for each of these query rows, ascending, whose one query it is: it ends there. So they must see none
    behind themselves: those that are sampled from are the last ones of their sequences."""
    on_host = batch.on_host or HostLengths(batch.cu_seqlens_q, batch.seq_lens)
    which = np.searchsorted(on_host.cu_seqlens_q, rows, side="right") - 1
    behind = on_host.cu_seqlens_q[which + 1] - 1 - rows
    begins, lengths = np.arange(len(rows) + 1, dtype=np.int32), (on_host.seq_lens[which] - behind).astype(np.int32)
    tables = (which[:, None] * batch.groups + np.arange(batch.groups)).ravel()
    return AttentionBatch(
        ops.upload(begins),
        ops.upload(lengths),
        batch.block_tables[ops.upload(tables)],
        batch.groups,
        max_query_len=1,
        on_host=HostLengths(begins, lengths),
        shared=None if batch.shared is None else _shared_of(batch.shared, which),
    )


def _shared_of(shared: NDArray[np.int32], which: NDArray[np.int64]) -> NDArray[np.int32]:
    """`AttentionBatch.shared` of some of its sequences, ascending: the first ones that are left of groups share
    nothing with the one before them."""
    group = np.cumsum(shared == 0)[which]
    found: NDArray[np.int32] = np.where(np.diff(group, prepend=-1) == 0, shared[which], 0).astype(np.int32)
    return found
