"""Scenes of attention in other dtypes than float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.attention_scene import Case, Scene

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.gqa import QUANTISED, gqa_layout, kv_views, quantise, scale_views
from headwise.kernels.nibbles import INT4, pack


@dataclass(frozen=True)
class Dtypes:
    query: str = "float32"
    kv: str = "float32"


class TypedScene(Scene):
    """A scene in other dtypes: what was poisoned stays so."""

    def __init__(self, case: Case, dtypes: Dtypes) -> None:
        super().__init__(case)
        self.query = self.query.astype(numpy_dtype(dtypes.query))
        exact = kv_views(self.arena, self.layout)
        num_blocks = exact[0].shape[0]
        self.layout = gqa_layout(case.block_size, self.slots, case.head_dim, dtypes.kv, case.value_dim or None)
        self.arena = np.full(num_blocks * self.layout.block_bytes, 0xFF, np.uint8)  # NaN in every float there is
        written = ~np.isnan(exact[0][..., 0])
        for role, rows in enumerate(exact):
            stored = rows[written]
            if dtypes.kv in (*QUANTISED, INT4):
                made = pack(stored) if dtypes.kv == INT4 else quantise(stored, dtypes.kv)
                stored, scale_views(self.arena, self.layout)[role][written] = made
            kv_views(self.arena, self.layout)[role][written] = stored

    def answer(self, kernels: Any) -> np.ndarray:
        out = np.full(self.room, 7.0, self.query.dtype)
        arguments = (self.query, self.arena, self.layout, self.batch, self.heads)
        scores = {"scale": self.scale, "softcap": self.case.softcap, "sink_logits": self.sink_logits}
        kernels.attend(*arguments, **scores, out=out)
        return out.astype(np.float64)
