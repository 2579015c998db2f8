"""Which part of a model a rank has, and how many ranks can have one."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.cache_controller.head_groups import HeadGroupPlan, Sharing
from headwise.cache_controller.planner import can_be_dealt
from headwise.runtime.models.model_config import ModelConfig


def valid_tp_sizes(config: ModelConfig) -> list[int]:
    """Tensor-parallel sizes with which each rank has a query head and a part of every MLP, and that fit all KV heads.

    See `can_be_dealt`: they divide each number of KV heads, or are more. They divide the members of recurrent states.
    """
    members = 0 if config.states is None else config.states.members
    return [
        size
        for size in range(1, config.num_heads + 1)
        if not members % size
        and all(can_be_split(total, size) for total in config.mlp_sizes)
        and all(can_be_dealt(count, size) for count in config.kv_head_counts)
    ]


_SHOWN_SIZES = 32


def fitting_sizes(config: ModelConfig) -> str:
    """`valid_tp_sizes` for an error's line: all, or the first and how many more up to which."""
    sizes = valid_tp_sizes(config)
    first = ", ".join(map(str, sizes[:_SHOWN_SIZES]))
    more = len(sizes) - _SHOWN_SIZES
    return f"[{first}]" if more <= 0 else f"[{first}] and {more} more up to {sizes[-1]}"


_UNITS = (256, 128, 64, 32)
"""Columns of an MLP that stay together where ranks cannot have equally many: so many do groups of codes have."""


_EVEN = 8
"""With so many units a rank, none has over an eighth more than another."""


def can_be_split(total: int, ranks: int) -> bool:
    """Whether each rank can have a part of an MLP of intermediate size ``total``."""
    return total >= ranks


def split(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """From and to which of an MLP's ``total`` columns are a rank's: equally many, or whole units that differ by one.

    A unit is the largest of `_UNITS` of which each rank has `_EVEN`, or else the smallest; where there are not enough
    of those, a column.
    """
    unit = 1
    if total % ranks:
        dividing = [size for size in _UNITS if not total % size and total >= size * ranks]
        unit = next((size for size in dividing if total >= size * ranks * _EVEN), dividing[-1] if dividing else 1)
    units = total // unit
    return units * rank // ranks * unit, units * (rank + 1) // ranks * unit


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model.

    rank, size: among the tensor-parallel ranks that have the same layers
    kv_heads: ``[num_layers]`` tuples of the global KV heads dealt to this rank, in ascending order, of the layer whose
              cache each uses; their query heads go with them, or a part of these where other ranks keep them, too
    sharing:  ``[num_layers]``, which part; empty: all of them are this rank's own
    stage:    of a pipeline, whose layers these are, those that draft included; None: there is one, of all layers

    Ranks may have different numbers of query heads where they share KV heads, but each of its own KV heads has as many.
    """

    rank: int
    size: int
    kv_heads: tuple[tuple[int, ...], ...]
    sharing: tuple[Sharing, ...] = ()
    stage: range | None = None

    @classmethod
    def of(cls, config: ModelConfig, plan: HeadGroupPlan, rank: int) -> Shard:
        """What the plan of a model deals to a rank, of all stages' ranks."""
        heads, sharing = config.by_cache_layer(plan.kv_heads(rank)), config.by_cache_layer(plan.sharing(rank))
        stage = plan.stages[rank // plan.tp_size] if len(plan.stages) > 1 else None
        return cls(rank % plan.tp_size, plan.tp_size, heads, sharing, stage)

    def layers(self, config: ModelConfig) -> range:
        """Layers of the decoder that are this rank's."""
        every = range(config.decoder_layers)
        return every if self.stage is None else every[self.stage.start : self.stage.stop]

    def is_first(self, config: ModelConfig) -> bool:
        """Whether tokens' embeddings enter here, not what an earlier stage made of them."""
        return self.layers(config).start == 0

    def is_last(self, config: ModelConfig) -> bool:
        """Whether what comes out of its layers is scored here, and not given to another stage."""
        return self.layers(config).stop == config.decoder_layers

    def query_heads(self, config: ModelConfig, layer: int) -> list[tuple[int, int]]:
        """Ranges of a layer's query heads that are this rank's, in the order of its KV heads."""
        share = config.query_heads_of(layer) // config.heads_of(layer).kv_heads
        part = (self.sharing[layer] if self.sharing else Sharing(0, 1)).of(share)
        return [(head * share + part.start, head * share + part.stop) for head in self.kv_heads[layer]]

    def columns(self, total: int) -> tuple[int, int]:
        """From and to which of an MLP's ``total`` columns are this rank's."""
        return split(total, self.rank, self.size)
