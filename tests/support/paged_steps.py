"""Steps of several sequences over a paged cache, for models that are run without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.planner import plan_head_groups
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.runtime.models.attention.base import LayerCache
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.attention.wanted import ending_at
from headwise.runtime.models.base import Model, PagedCache
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.shard import Shard
from headwise.runtime.ops.base import Tensor

Step = Sequence[tuple[int, int]]
"""Sequences of a step, and how many tokens each is given."""


class PagedSequences:
    """Some sequences of a model's, with blocks in any order, of an arena that is NaN where nothing was written."""

    def __init__(self, model: Model, kv_dtype: str = "float32", count: int = 4, tokens: int = 128) -> None:
        config, self._block_size, draw = model.config, 8, np.random.default_rng(3)
        variant, self.ops = attention_of(config), model.ops
        self.attention = variant.over_cache(model.ops, variant.host_kernels("numba", 2))
        of_one = [variant.layout(self._block_size, 1, kv_dtype, layer) for layer in range(config.num_layers)]
        plan = plan_head_groups(config.policies, sizes=[layout.slot_bytes for layout in of_one])
        self.layouts = [_filling(layout, plan.block_bytes) for layout in of_one]
        kept = [config.heads_of(layer).cache_layer for layer in range(config.num_layers)]
        self.heads = [head_table(plan.placement(0, layer), config.policies[layer]) for layer in kept]
        self._groups, columns = len(plan.groups), -(-tokens // self._block_size)
        blocks = draw.permutation(count * self._groups * columns).astype(np.int32)
        self._tables = blocks.reshape(count, self._groups, columns)
        self.arena = np.full(blocks.size * plan.block_bytes, 0xFF, np.uint8)
        self._ids = draw.integers(0, config.vocab_size, (count, tokens)).astype(np.int32)
        self._lens = np.zeros(count, np.int32)

    def tokens(self, sequence: int) -> np.ndarray:
        """Those that the sequence was given so far."""
        return self._ids[sequence, : self._lens[sequence]]

    def copy_layer(self, layer: int, source: PagedSequences) -> None:
        """Take what another one has of a layer."""
        layout = self.layouts[layer]
        shape = (-1, layout.slots, layout.slot_bytes)
        mine, theirs, heads = self.arena.reshape(shape), source.arena.reshape(shape), self.heads[layer]
        for group, slot in zip(heads.group, heads.slot, strict=True):
            blocks = self._tables[:, group]
            mine[blocks, slot] = theirs[blocks, slot]

    def forward(self, model: Model, step: Step, attention: Callable[[PagedSequences, AttentionBatch], object]) -> list:
        """Hidden states of each sequence of a step."""
        return np.split(self.rows(model, step, attention), np.cumsum([count for _, count in step])[:-1])

    def rows(
        self,
        model: Model,
        step: Step,
        attention: Callable[[PagedSequences, AttentionBatch], object],
        *wanted: np.ndarray | None,
    ) -> np.ndarray:
        """Hidden states of a step, or of its ``wanted`` rows."""
        spans = [(sequence, self._lens[sequence], self._lens[sequence] + count) for sequence, count in step]
        ids = np.concatenate([self._ids[sequence, start:stop] for sequence, start, stop in spans])
        positions = np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in spans])
        cu = np.cumsum([0, *(count for _, count in step)], dtype=np.int32)
        which = [sequence for sequence, _ in step]
        tables = np.ascontiguousarray(self._tables[which].reshape(len(step) * self._groups, -1))
        batch = AttentionBatch(cu, np.array([stop for *_, stop in spans], np.int32), tables, self._groups)
        more = (None, *wanted) if wanted else ()
        hidden = model.ops.numpy(model.forward(ids, positions, attention(self, batch), *more))
        for sequence, _, stop in spans:
            self._lens[sequence] = stop
        return hidden.copy()


def _filling(layout: BlockLayout, block_bytes: int) -> BlockLayout:
    slots, tail = divmod(block_bytes, layout.slot_bytes)
    return replace(layout, slots=slots, tail_bytes=tail)


def head_table(places: np.ndarray, policies: Sequence) -> HeadTable:
    """``places``: group and slot of each head of a layer."""
    columns = places[:, 0], places[:, 1], [policy.window for policy in policies], [policy.sink for policy in policies]
    return HeadTable(*(np.ascontiguousarray(column, np.int32) for column in columns))


@dataclass
class LayerByCall:
    """An `AttentionLayer` that is called for each layer, and has no cache to show."""

    sequences: PagedSequences
    batch: AttentionBatch

    def __call__(self, layer: int, *projected: Any, wanted: np.ndarray | None = None) -> Tensor:
        s = self.sequences
        cache = LayerCache(s.arena, s.layouts[layer], self.batch, s.heads[layer], lambda: None, wanted=wanted)
        return s.attention(cache, *projected)

    def ending_at(self, rows: np.ndarray) -> LayerByCall:
        return replace(self, batch=ending_at(self.batch, rows, self.sequences.ops))


@dataclass
class CacheShown(LayerByCall):
    """A `PagedAttentionLayer`, which is never to be called."""

    wait_layer: Callable[[int], None] | None = None

    def __call__(self, *args: object, **named: object):
        raise AssertionError("a fused decoder reads and writes the cache itself")

    def paged(self) -> PagedCache:
        s = self.sequences
        return PagedCache(s.arena, s.layouts, self.batch, s.heads, self.wait_layer)


@dataclass
class EitherWay(LayerByCall):
    """A `PagedAttentionLayer` for decoders that take some steps by its cache and some by calls."""

    def paged(self) -> PagedCache:
        s = self.sequences
        return PagedCache(s.arena, s.layouts, self.batch, s.heads, None)


def only_shard(config: ModelConfig) -> Shard:
    return Shard.of(config, plan_head_groups(config.policies), 0)
