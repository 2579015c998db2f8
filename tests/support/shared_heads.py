"""A KV head that ranks keep together, on poisoned arenas of each one's tokens, and dense attention to all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.attention_scene import Case, Scene
from support.ranks_in_threads import on_each

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.shared_base import SharedKernels
from headwise.kernels.token_ranks import TokenRanks


class SharedScene(Scene):
    """A case of one KV head, which ``parts`` ranks keep together, and whose query heads they share.

    dtype: of what kernels are given
    """

    def __init__(self, case: Case, parts: int, dtype: str = "float32") -> None:
        super().__init__(case)
        assert case.policies == ((0, 0),)
        self.parts, self.dtype = parts, numpy_dtype(dtype)
        blocks = len(self.arena) // self.layout.block_bytes
        self.layout = replace(self.layout, parts=parts)
        self.arenas = [np.full(blocks * self.layout.block_bytes, 0xFF, np.uint8) for _ in range(parts)]

    def write_shared(self, kernels: SharedKernels) -> None:
        """Prompts first, then what the batch asks with."""
        ends = self.case.seq_lens
        before = np.subtract(ends, self.case.query_lens)
        for starts, stops in (([0] * len(ends), before), (before, ends)):
            cu = np.cumsum([0, *np.subtract(stops, starts)], dtype=np.int32)
            batch = replace(self.batch, cu_seqlens_q=cu, seq_lens=np.array(stops, np.int32))
            key, value = (
                np.concatenate([kv[role][a:b] for kv, a, b in zip(self.kv, starts, stops, strict=True)])
                for role in range(2)
            )
            for part, arena in enumerate(self.arenas):
                where = arena, self.layout.own, batch, self.heads, TokenShare(part, self.parts)
                kernels.write_own(key.astype(self.dtype), value.astype(self.dtype), *where)

    def attend_on(self, ranks: TokenRanks, kernels: SharedKernels) -> np.ndarray:
        share = self.case.share // self.parts
        some = slice(ranks.share.part * share, (ranks.share.part + 1) * share)
        query = self.laid_out(self.query[:, some])
        out = self.laid_out(np.full((*query.shape[:2], self.room[2]), np.nan))
        kernels.attend_shared(
            query, self.arenas[ranks.share.part], self.layout.own, self.batch, self.heads, ranks,
            scale=self.scale, softcap=self.case.softcap, out=out,
            sink_logits=None if self.sink_logits is None else np.ascontiguousarray(self.sink_logits[some]),
        )  # fmt: skip
        return out

    def laid_out(self, rows: np.ndarray) -> np.ndarray:
        """``rows [tokens, heads, size]`` as kernels are given them."""
        return np.ascontiguousarray(rows, self.dtype)

    def attend_together(self, kernels: SharedKernels) -> np.ndarray:
        return np.concatenate(on_each(self.parts, lambda ranks: self.attend_on(ranks, kernels)), axis=1)
