"""What latent attention is made of, and what chooses the tokens that it sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@lru_cache(maxsize=64)  # each layer of a step asks for it
def _others(layers: frozenset[int], count: int) -> tuple[int, ...]:
    """Of so many layers, those that are not among these."""
    return tuple(layer for layer in range(count) if layer not in layers)


@dataclass(frozen=True)
class IndexerConfig:
    """What chooses the tokens that a layer's latent attention sees (DSA).

    heads, head_dim: of the indexer (``index_n_heads``, ``index_head_dim``)
    top:             tokens that are chosen for a query, at most (``index_topk``)
    shared:          layers that have none, and see what the last one before them with one has chosen. Then keys of
                     indexers have caches of their own, beside those of latents
    """

    heads: int
    head_dim: int
    top: int
    shared: frozenset[int] = frozenset()

    def layers(self, count: int) -> tuple[int, ...]:
        """Of so many layers, those with an indexer."""
        return _others(self.shared, count)


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention: sizes of what heads and latents are made of.

    rank:      numbers of a latent that keys and values are made of (``kv_lora_rank``)
    rotated:   numbers of a key that carry its position, which heads share (``qk_rope_head_dim``)
    plain:     those of a head's own key, without a position (``qk_nope_head_dim``)
    value_dim: of a head's value
    q_rank:    numbers that a token's queries are made of (``q_lora_rank``); None: of its whole hidden state
    indexer:   None: attention sees all tokens
    in_halves: of what is rotated, the elements ``(i, i + D / 2)`` turn together, not neighbours
    """

    rank: int
    rotated: int
    plain: int
    value_dim: int
    q_rank: int | None
    indexer: IndexerConfig | None = None
    in_halves: bool = False

    @property
    def width(self) -> int:
        """Numbers of a latent in the cache."""
        return self.rank + self.rotated

    def turning_halves(self) -> MlaConfig:
        """The same ``in_halves``."""
        return replace(self, in_halves=True)
