"""Ranks that keep latents and an indexer's keys together, as threads: see `support.gpu.latent_ranks`."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.gpu.interpreted_latents import indexed_kernels
from support.gpu.latent_ranks import RanksScene
from support.indexed_scene import IndexedScene

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.dsa_base import IndexQueries
from headwise.kernels.dsa_reference import ReferenceIndexedKernels


class IndexedRanksScene(RanksScene):
    """A scene's latents and keys over ``parts`` ranks, each of which has the scene's indexer."""

    scene: IndexedScene
    reference = ReferenceIndexedKernels()

    def __init__(self, scene: IndexedScene, parts: int, dtype: str = "float32", sms: int = 4) -> None:
        super().__init__(scene, parts, dtype, sms)
        asked = scene.index
        self.index = IndexQueries(self.narrow(asked.query), self.narrow(asked.weights), asked.top)
        scene.keys = [self.narrow(keys) for keys in scene.keys]

    def make_kernels(self, sms: int) -> Any:
        return indexed_kernels(sms=sms, score_bytes=1 << 10)

    def own_layout(self, scene: Any, parts: int) -> BlockLayout:
        latents, keys = scene.case.layouts(parts)
        self.key_layout = keys.own
        return latents.own

    def write(self) -> None:
        super().write()
        self.scene.keys = [keys.astype(np.float32) for keys in self.scene.keys]

    def write_own(self, part: int, *where: Any) -> None:
        super().write_own(part, *where)
        arena, layout, whole, heads, share = where
        keys = (self.key_layout, self.scene.key_heads) if self.scene.case.is_apart else (layout, heads)
        given = np.concatenate(self.scene.keys), arena, keys[0], whole, keys[1], share
        self.kernels[part].write_index_own(*given)

    def attend_shared(self, part: int, *where: Any, **more: Any) -> None:
        kernels, own = self.kernels[part], (self.queries[part], self.ups[part])
        arena, layout, batch, heads, ranks = where
        keys = (self.key_layout, self.scene.key_heads) if self.scene.case.is_apart else (layout, heads)
        chosen = kernels.choose_shared(*own, self.index, arena, keys[0], batch, keys[1], ranks)
        kernels.attend_chosen_shared(*own, chosen, *where, **more)
