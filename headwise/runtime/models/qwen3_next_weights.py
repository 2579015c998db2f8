"""Checkpoints of Qwen3-Next and Qwen3.5 by the names, and in the order of rows, that one decoder asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.states_config import DeltaConfig
from headwise.runtime.models.weight_view import Reader, WeightView, taken
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.quantised import GroupQuantised, Matrix

Floats = NDArray[np.float32]


class GatedHeadWeights(WeightView):
    """``q_proj``, which has each head's query and then its gate, as ``q_proj`` and ``q_gate``."""

    def __init__(self, source: Weights, config: ModelConfig) -> None:
        super().__init__(source)
        self._dim = config.head_dim

    def read_rows(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        at, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in ("q_proj", "q_gate"):
            return super().read_rows(source, name, start, stop)
        both = super().read_rows(source, f"{at}.q_proj.weight", 2 * start, 2 * stop)
        query, gate = np.split(both.reshape(-1, 2 * self._dim, both.shape[1]), 2, axis=1)
        return np.ascontiguousarray((query if part == "q_proj" else gate).reshape(-1, both.shape[1]))

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        at, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in ("q_proj", "q_gate"):
            return self._source.kept_rows(name, start, stop)
        both = self._source.kept_rows(f"{at}.q_proj.weight", 2 * start, 2 * stop)
        rows = np.arange(2 * (stop - start)).reshape(-1, 2, self._dim)[:, 0 if part == "q_proj" else 1]
        return None if both is None else taken(both, rows.reshape(-1))

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._source.kept_columns(name, start, stop)


class JoinedDeltaWeights(WeightView):
    """Qwen3.5's projections into a delta-net, each of all heads, joined head by head as Qwen3-Next has them.

    ``in_proj_qkvz``: ``[query | key | values | gates]`` of each key head; ``in_proj_ba``: ``[rates | decays]``.
    """

    def __init__(self, source: Weights, delta: DeltaConfig) -> None:
        super().__init__(source)
        sizes, heads = delta.sizes, delta.members
        values = sizes.share * sizes.value_dim
        keys = heads * sizes.key_dim
        self._parts = {
            "in_proj_qkvz": [
                ("in_proj_qkv", 0, sizes.key_dim),
                ("in_proj_qkv", keys, sizes.key_dim),
                ("in_proj_qkv", 2 * keys, values),
                ("in_proj_z", 0, values),
            ],
            "in_proj_ba": [("in_proj_b", 0, sizes.share), ("in_proj_a", 0, sizes.share)],
        }

    def read_rows(self, source: Reader, name: str, start: int, stop: int) -> NDArray[Any]:
        at, _, joined = name.removesuffix(".weight").rpartition(".")
        parts = self._parts.get(joined)
        if parts is None:
            return super().read_rows(source, name, start, stop)
        each = sum(count for _, _, count in parts)
        first, last = start // each, stop // each
        found = []
        for part, behind, count in parts:
            rows = super().read_rows(source, f"{at}.{part}.weight", behind + first * count, behind + last * count)
            if len(rows) != (last - first) * count:
                raise ModelError(f"{at}.{part}.weight has too few rows: weights and config.json do not belong together")
            found.append(rows.reshape(last - first, count, rows.shape[1]))
        return np.concatenate(found, axis=1).reshape(stop - start, -1)

    def kept_rows(self, name: str, start: int, stop: int) -> Matrix | None:
        """Joined parts as codes, if all of them are kept so, else in the dtype that they are stored in."""
        at, _, joined = name.removesuffix(".weight").rpartition(".")
        parts = self._parts.get(joined)
        if parts is None:
            return self._source.kept_rows(name, start, stop)
        each = sum(count for _, _, count in parts)
        first, last = start // each, stop // each
        found, places, at_row = [], [], 0
        for part, behind, count in parts:
            kept = self._source.kept_rows(f"{at}.{part}.weight", behind + first * count, behind + last * count)
            if not isinstance(kept, GroupQuantised):
                return super().kept_rows(name, start, stop)
            found.append(kept)
            places.append(at_row + np.arange((last - first) * count).reshape(last - first, count))
            at_row += kept.shape[0]
        return GroupQuantised.concatenate(found, 0).taken(np.concatenate(places, axis=1).reshape(-1))

    def kept_columns(self, name: str, start: int, stop: int) -> Matrix | None:
        return self._source.kept_columns(name, start, stop)
