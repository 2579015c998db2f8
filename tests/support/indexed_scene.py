"""Batches of latent attention with an indexer on arenas poisoned with NaN, and the answer by lists and sorting.

Keys lie beside latents, or apart from them, behind those of all layers.

The indexer's numbers are small integers: scores are exact in every precision, so what is chosen is never in doubt, and
many are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from support.latent_scene import LatentCase, LatentScene

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch
from headwise.kernels.dsa import index_layout, indexed_layout
from headwise.kernels.dsa_base import Chosen, IndexedKernels, IndexQueries
from headwise.kernels.mla import latent_layout

LARGEST = {"int8": 127, "float8_e4m3fn": 448, "int4": 127}
"""Of the quantised dtypes, the largest number that each stores of a key: int4 has those in int8."""


@dataclass(frozen=True)
class IndexedCase(LatentCase):
    index_heads: int = 3
    index_dim: int = 32
    top: int = 20
    is_apart: bool = False

    def layouts(self, parts: int = 1) -> tuple[BlockLayout, BlockLayout]:
        """Of latents, and of keys, on one of so many ranks that keep tokens together."""
        width = self.rank + self.rotated
        if not self.is_apart:
            together = indexed_layout(self.block_size, self.slots, width, self.index_dim, self.dtype, self.rotated)
            return (replace(together, parts=parts),) * 2
        latents = replace(latent_layout(self.block_size, self.slots, width, self.dtype, self.rotated), parts=parts)
        keys = replace(index_layout(self.block_size, 2, self.index_dim, self.dtype), parts=parts)
        return replace(latents, tail_bytes=keys.block_bytes), replace(keys, lead_bytes=latents.block_bytes)


class IndexedScene(LatentScene):
    """A case with random latents and keys, which `write` puts into an arena that was all NaN, and the answer."""

    case: IndexedCase

    def __init__(self, case: IndexedCase) -> None:
        super().__init__(case)
        draw, tokens = np.random.default_rng(case.seed + 1), sum(case.query_lens)

        def integers(most: int, *shape: int) -> np.ndarray:
            return draw.integers(-most, most + 1, shape).astype(np.float32)

        self.keys = [integers(2, length, case.index_dim) for length in case.seq_lens]
        query, weights = integers(2, tokens, case.index_heads, case.index_dim), integers(3, tokens, case.index_heads)
        if (largest := LARGEST.get(case.dtype)) is not None:  # scales are 1, and queries look away from what makes them
            query[..., 0] = 0
            for keys in self.keys:
                keys[:, 0] = largest
        self.index = IndexQueries(query, weights / 2, case.top)
        self.layout, self.key_layout = case.layouts()
        slot = np.ones(1, np.int32) if case.is_apart else self.heads.slot
        self.key_heads = replace(self.heads, slot=slot)
        self.arena = np.full((self.batch.block_tables.max() + 2) * self.layout.block_bytes, 0xFF, np.uint8)

    def write(self, kernels: IndexedKernels) -> None:
        super().write(kernels)
        cu = np.cumsum([0, *self.case.seq_lens], dtype=np.int32)
        whole = AttentionBatch(cu, self.batch.seq_lens, self.batch.block_tables, 2)
        kernels.write_index(np.concatenate(self.keys), self.arena, self.key_layout, whole, self.key_heads)

    def choose(self, kernels: IndexedKernels) -> Chosen:
        return kernels.choose(self.index, self.arena, self.key_layout, self.batch, self.key_heads)

    def attend(self, kernels: IndexedKernels) -> np.ndarray:
        return self.attend_to(kernels, self.choose(kernels))

    def attend_to(self, kernels: IndexedKernels, chosen: Chosen) -> np.ndarray:
        out = np.full((len(self.query), self.case.heads, self.case.value_dim), np.nan, np.float32)
        where = self.arena, self.layout, self.batch, self.heads
        kernels.attend_chosen(self.query, self.up, chosen, *where, scale=self.scale, out=out)
        return out

    def next_layer(self) -> IndexedScene:
        """One that sees what is chosen here, of latents of its own in the slot behind."""
        found = IndexedScene(replace(self.case, seed=self.case.seed + 1))
        found.index, found.keys, found.batch, found.arena = self.index, self.keys, self.batch, self.arena
        found.heads = replace(self.heads, slot=(self.heads.slot + 1) % self.case.slots)
        return found

    def visible(self, sequence: int) -> np.ndarray:
        """``bool [queries, keys]``: of what the latents' rule lets a query see, the best."""
        rule, first = super().visible(sequence), int(np.sum(self.case.query_lens[:sequence]))
        if not hasattr(self, "keys"):  # while blocks are mapped: the indexer looks at all that the rule lets it see
            return rule
        for row, seen in enumerate(rule):
            query, weights = self.index.query[first + row], self.index.weights[first + row]
            scores = (np.maximum(self.keys[sequence] @ query.T, 0) @ weights).tolist()
            ranked = sorted(np.flatnonzero(seen).tolist(), key=lambda key: (-scores[key], key))
            seen[ranked[self.case.top :]] = False
        return rule
