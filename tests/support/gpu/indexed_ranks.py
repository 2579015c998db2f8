"""Ranks that keep latents and an indexer's keys together, as threads: see `support.gpu.latent_ranks`."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.gpu.interpreted_latents import indexed_kernels
from support.gpu.latent_ranks import RanksScene
from support.indexed_scene import IndexedScene

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

    def write(self) -> None:
        super().write()
        self.scene.keys = [keys.astype(np.float32) for keys in self.scene.keys]

    def write_own(self, part: int, *where: Any) -> None:
        super().write_own(part, *where)
        self.kernels[part].write_index_own(np.concatenate(self.scene.keys), *where)

    def attend_shared(self, part: int, *where: Any, **more: Any) -> None:
        self.kernels[part].attend_chosen_shared(self.queries[part], self.ups[part], self.index, *where, **more)
