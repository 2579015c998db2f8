"""Batches of latent attention on arenas poisoned with NaN, and the answer of an oracle that knows nothing of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.bfloat16 import to_bits, to_float32
from headwise.kernels.mla import QUANTISED_LATENTS, latent_layout
from headwise.kernels.mla_base import LatentKernels, UpProjections
from headwise.kernels.mla_nibbles import pack_latents, stored_twice, unpack_latents
from headwise.kernels.mla_quantised import dequantise_latents, quantise_latents
from headwise.kernels.nibbles import GROUP, INT4


@dataclass(frozen=True)
class LatentCase:
    """A batch to attend to; ``policy`` is (window, sink); ``query_lens <= seq_lens``."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    policy: tuple[int, int] = (0, 0)
    heads: int = 3
    rank: int = 32
    plain: int = 8
    rotated: int = 16
    value_dim: int = 12
    block_size: int = 16
    slots: int = 3
    dtype: str = "float32"
    rotated_size: float = 1.0
    has_sinks: bool = False
    seed: int = 0


Case = TypeVar("Case", bound=LatentCase)


def kept_in(dtype: str, case: Case) -> Case:
    """The case over a cache of that dtype; in int4 with latents of whole groups."""
    width = case.rank + case.rotated
    return replace(case, dtype=dtype, rank=case.rank + (-width % GROUP if dtype == INT4 else 0))


class LatentScene:
    """A case with random latents, which `write` puts into an arena that was all NaN, and the answer."""

    def __init__(self, case: LatentCase) -> None:
        self.case, draw = case, np.random.default_rng(case.seed)

        def random(*shape: int) -> np.ndarray:
            return draw.standard_normal(shape).astype(np.float32)

        width, tokens = case.rank + case.rotated, sum(case.query_lens)
        self.latents = [random(length, width) for length in case.seq_lens]
        for latents in self.latents:
            latents[:, case.rank :] *= np.float32(case.rotated_size)
        self.query = random(tokens, case.heads, case.plain + case.rotated)
        self.up = UpProjections(
            random(case.heads, case.plain, case.rank), random(case.heads, case.rank, case.value_dim)
        )
        if case.has_sinks:  # among the scores of some tokens
            sinks = np.random.default_rng(case.seed + 2).uniform(-2, 4, case.heads).astype(np.float32)
            self.up = replace(self.up, sink_logits=sinks)
        self.scale = 0.3 * (case.plain + case.rotated) ** -0.5
        self.layout = latent_layout(case.block_size, case.slots, width, case.dtype, case.rotated)
        window, sink = case.policy
        self.heads = HeadTable(*(np.array([value], np.int32) for value in (1, draw.integers(case.slots), window, sink)))
        columns = -(-max(case.seq_lens) // case.block_size)
        needed = len(case.seq_lens) * columns
        self.arena = np.full((needed + 1) * self.layout.block_bytes, 0xFF, np.uint8)
        # Two groups, of which the first has nothing to do with this layer.
        tables = np.full((len(case.seq_lens), 2, columns), -1, np.int32)
        tables[:, 1] = draw.permutation(needed).reshape(len(case.seq_lens), columns) + 1
        for sequence in range(len(case.seq_lens)):
            seen = self.visible(sequence).any(axis=0)
            for block in range(columns):
                if not seen[block * case.block_size : (block + 1) * case.block_size].any():
                    tables[sequence, 1, block] = -1
        cu = np.cumsum([0, *case.query_lens], dtype=np.int32)
        tables = tables.reshape(-1, columns)
        self.batch = AttentionBatch(cu, np.array(case.seq_lens, np.int32), tables, 2)

    def write(self, kernels: LatentKernels) -> None:
        """Write all latents, as prefills of whole sequences."""
        lens = self.case.seq_lens
        cu = np.cumsum([0, *lens], dtype=np.int32)
        whole = AttentionBatch(cu, self.batch.seq_lens, self.batch.block_tables, 2)
        kernels.write_latent(np.concatenate(self.latents), self.arena, self.layout, whole, self.heads)

    def attend(self, kernels: LatentKernels) -> np.ndarray:
        out = np.full((len(self.query), self.case.heads, self.case.value_dim), np.nan, np.float32)
        kernels.attend_latent(
            self.query, self.up, self.arena, self.layout, self.batch, self.heads, scale=self.scale, out=out
        )
        return out

    def visible(self, sequence: int) -> np.ndarray:
        """``bool [queries, keys]`` by the rule of the contract, spelled out token by token."""
        (window, sink), length, queries = self.case.policy, self.case.seq_lens[sequence], self.case.query_lens[sequence]
        rule = [
            [k <= p and (window == 0 or p - k < window or k < sink) for k in range(length)]
            for p in range(length - queries, length)
        ]
        return np.array(rule, dtype=bool).reshape(queries, length)

    def _as_stored(self, latents: np.ndarray) -> np.ndarray:
        rotated = self.case.rotated
        if self.case.dtype == INT4:
            return unpack_latents(*pack_latents(latents, stored_twice(rotated)), stored_twice(rotated))
        if self.case.dtype in QUANTISED_LATENTS:
            return dequantise_latents(*quantise_latents(latents, rotated, self.case.dtype), rotated)
        return to_float32(to_bits(latents)) if self.case.dtype == "bfloat16" else latents

    def expected(self) -> np.ndarray:
        """Dense attention in float64 with each head's own keys and values."""
        case, up = self.case, self.up
        out = np.empty((len(self.query), case.heads, case.value_dim))
        for sequence, queries in enumerate(case.query_lens):
            first = int(self.batch.cu_seqlens_q[sequence])
            stored = self.latents[sequence]
            latents = self._as_stored(stored).astype(np.float64)
            for head in range(case.heads):
                key = np.hstack([latents[:, : case.rank] @ up.key[head].T, latents[:, case.rank :]])
                scores = self.scale * self.query[first : first + queries, head].astype(np.float64) @ key.T
                weights = np.exp(scores) * self.visible(sequence)
                value = latents[:, : case.rank] @ up.value[head]
                total = weights.sum(axis=1, keepdims=True)
                if up.sink_logits is not None:
                    total += np.exp(np.float64(up.sink_logits[head]))
                out[first : first + queries, head] = weights / total @ value
        return out
