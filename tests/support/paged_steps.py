"""Steps of several sequences over a paged cache, for models that are run without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headwise.cache_controller.planner import plan_head_groups
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cpu.attention import NumbaKernels
from headwise.kernels.gqa import gqa_layout
from headwise.runtime.models.base import Model, ModelConfig, PagedCache, Rotation, Shard

Step = Sequence[tuple[int, int]]
"""Sequences of a step, and how many tokens each is given."""


class PagedSequences:
    """Some sequences of a model's, with blocks in any order, of an arena that is NaN where nothing was written."""

    def __init__(
        self, config: ModelConfig, kernels: NumbaKernels, kv_dtype: str = "float32", count: int = 4, tokens: int = 128
    ) -> None:
        plan, self._block_size, draw = plan_head_groups(config.policies), 8, np.random.default_rng(3)
        self.config, self.kernels = config, kernels
        self.layout = gqa_layout(self._block_size, plan.slots, config.head_dim, kv_dtype)
        self.heads = [
            head_table(plan.placement(0, layer), config.policies[layer]) for layer in range(config.num_layers)
        ]
        self._groups, columns = len(plan.groups), -(-tokens // self._block_size)
        blocks = draw.permutation(count * self._groups * columns).astype(np.int32)
        self._tables = blocks.reshape(count, self._groups, columns)
        self.arena = np.full(blocks.size * self.layout.block_bytes, 0xFF, np.uint8)
        self._ids = draw.integers(0, config.vocab_size, (count, tokens)).astype(np.int32)
        self._lens = np.zeros(count, np.int32)

    def tokens(self, sequence: int) -> np.ndarray:
        """Those that the sequence was given so far."""
        return self._ids[sequence, : self._lens[sequence]]

    def copy_layer(self, layer: int, source: PagedSequences) -> None:
        """Take what another one has of a layer."""
        shape = (-1, self.layout.slots, self.layout.slot_bytes)
        mine, theirs, heads = self.arena.reshape(shape), source.arena.reshape(shape), self.heads[layer]
        for group, slot in zip(heads.group, heads.slot, strict=True):
            blocks = self._tables[:, group]
            mine[blocks, slot] = theirs[blocks, slot]

    def forward(self, model: Model, step: Step, attention: Callable[[PagedSequences, AttentionBatch], object]) -> list:
        """Hidden states of each sequence of a step."""
        spans = [(sequence, self._lens[sequence], self._lens[sequence] + count) for sequence, count in step]
        ids = np.concatenate([self._ids[sequence, start:stop] for sequence, start, stop in spans])
        positions = np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in spans])
        cu = np.cumsum([0, *(count for _, count in step)], dtype=np.int32)
        which = [sequence for sequence, _ in step]
        tables = np.ascontiguousarray(self._tables[which].reshape(len(step) * self._groups, -1))
        batch = AttentionBatch(cu, np.array([stop for *_, stop in spans], np.int32), tables, self._groups)
        hidden = model.forward(ids, positions, attention(self, batch))
        for sequence, _, stop in spans:
            self._lens[sequence] = stop
        return np.split(hidden.copy(), cu[1:-1])


def head_table(places: np.ndarray, policies: Sequence) -> HeadTable:
    """``places``: group and slot of each head of a layer."""
    columns = places[:, 0], places[:, 1], [policy.window for policy in policies], [policy.sink for policy in policies]
    return HeadTable(*(np.ascontiguousarray(column, np.int32) for column in columns))


@dataclass
class LayerByCall:
    """An `AttentionLayer` that is called for each layer, and has no cache to show."""

    sequences: PagedSequences
    batch: AttentionBatch

    def __call__(
        self,
        layer: int,
        query: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        rotation: Rotation,
        sink_logits: np.ndarray | None = None,
    ):
        s = self.sequences
        queries, keys, values = (np.ascontiguousarray(array) for array in (query, key, value))
        where = s.arena, s.layout, self.batch, s.heads[layer]
        s.kernels.write_kv_rope(queries, keys, values, *rotation, *where)
        out, config = np.empty_like(queries), s.config
        scoring = {"scale": config.attention_scale, "softcap": config.attention_softcap, "sink_logits": sink_logits}
        s.kernels.attend(queries, *where, **scoring, out=out)
        return out


@dataclass
class CacheShown(LayerByCall):
    """A `PagedAttentionLayer`, which is never to be called."""

    wait_layer: Callable[[int], None] | None = None

    def __call__(self, *args: object):
        raise AssertionError("a fused decoder reads and writes the cache itself")

    def paged(self) -> PagedCache:
        s = self.sequences
        return PagedCache(s.arena, s.layout, self.batch, s.heads, self.wait_layer)


def only_shard(config: ModelConfig) -> Shard:
    return Shard.of(config, plan_head_groups(config.policies), 0)
