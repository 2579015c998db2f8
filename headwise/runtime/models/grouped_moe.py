"""The shared decoder with experts that are chosen as DeepSeek-V3 does, and what such models share."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.models.deepseek_routing import GroupedMoeConfig
from headwise.runtime.models.moe_decoder import MoeDecoder


class GroupedMoeDecoder(MoeDecoder):
    """Experts, routed as `GroupedMoeConfig` says."""

    correction_name: ClassVar[str] = "gate.e_score_correction_bias"
    """Below a layer's MLP."""

    def correction(self, layer: int, at: str) -> NDArray[np.float32] | None:
        moe = self.config.moe
        assert isinstance(moe, GroupedMoeConfig), "parsed so"
        return self._weights.tensor(f"{at}{self.correction_name}") if moe.has_correction else None
