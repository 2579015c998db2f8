"""What attention tells compiled code of a layer's heads in every step, and plans for in every layer: made once."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu import records
from headwise.kernels.cpu.attention_plan import Plan, Planner
from headwise.kernels.cpu.records import address_of, place_of
from headwise.kernels.latest import MOST_TABLES, OfEach, OfLatest

Plans = dict[tuple[int, int], OfLatest[AttentionBatch, Plan]]
"""Of the latest batch, by query heads over each KV head and the numbers of a key."""


@dataclass(frozen=True)
class Heads:
    """Of one table, and its layer's sinks. layer: their `records.LAYER`, which lies at ``layer_at``"""

    table: HeadTable
    layer: NDArray[np.int64]
    layer_at: int
    plans: Plans

    def plan(self, share: int, dim: int, batch: AttentionBatch) -> Plan:
        """That of a batch for ``share`` query heads over each. Valid until the next one is made in its place."""
        plan = self.plans.get((share, dim))
        if plan is None:
            table = self.table
            plan = OfLatest(Planner(table.window, table.sink, share, dim, table.both_ways).plan)
            self.plans[share, dim] = plan
        return plan(batch)


class KnownHeads(threading.local):
    """Of one thread, as plans are."""

    def __init__(self) -> None:
        self.of = OfEach(self._heads_of, MOST_TABLES)
        self._plans: dict[tuple[bytes, bytes, bool], Plans] = {}

    def _heads_of(self, table: HeadTable, sink_logits: NDArray[np.float32] | None) -> Heads:
        """Raises TypeError: an array is not one that compiled code reads."""
        arrays = (table.group, table.slot, table.window, table.sink)
        sinks: Any = (0, 0) if sink_logits is None else (address_of(sink_logits, np.float32), sink_logits.size)
        places = [(address_of(array, np.int32), array.size) for array in arrays]
        layer = records.filled(records.LAYER, heads=places, sink_logits=sinks)
        if len(self._plans) == MOST_TABLES:
            self._plans.clear()
        seeing = table.window.tobytes(), table.sink.tobytes(), table.both_ways
        plans = self._plans.setdefault(seeing, {})  # those of heads that see as much
        return Heads(table, layer, place_of(layer), plans)
