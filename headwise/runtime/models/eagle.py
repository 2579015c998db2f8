"""EAGLE-3 (arXiv 2503.01840): a head beside a decoder, trained apart from it, that drafts tokens.

It has one layer. What that is given of a token is made of the residual stream before several layers of the decoder, or,
of a token that was drafted itself, is what the layer made of the one before; and the embedding of the token that comes
next. It drafts tokens of a vocabulary of its own, the usual ones of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.base import AttentionLayer, Embeds
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.decoder_weights import merged
from headwise.runtime.models.layers import Linear, Residual
from headwise.runtime.models.model_config import EagleConfig, ModelConfig
from headwise.runtime.models.shard import Shard
from headwise.runtime.models.weights import Prepare, Weights
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps, Weight
from headwise.runtime.ops.comm import Collectives

_EMBEDDING, _JOIN, _TARGETS = "embed_tokens.weight", "fc", "d2t"
_LAYERS = ("midlayer.", "layers.0.")
"""What names of the layer's weights begin with, in one checkpoint or another."""


class StoredWeights(Weights, Protocol):
    """`Weights` whose shapes are known, and integers of which can be read as such."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored(self, name: str) -> NDArray[Any]: ...


@dataclass(frozen=True)
class EagleAttention:
    """One rank's part of the layer's attention.

    of_embedding, of_hidden: their sum is queries, keys and values
    """

    of_embedding: Linear
    of_hidden: Linear
    out: Linear


class Eagle(Decoder):
    """One rank's part of a head: a decoder of one layer, which is the last one of those that the ``target`` has keys
    and values of, and which is asked to `draft` alone.

    Tensor parallel: as a decoder's layer and its LM head; what is made of the residual stream is whole on every rank.
    """

    def __init__(
        self,
        target: ModelConfig,
        weights: StoredWeights,
        ops: TensorOps,
        collectives: Collectives,
        shard: Shard,
        prepare: Prepare,
        embedding: Weight,
    ) -> None:
        """
        shard:     of the target
        embedding: the target's, for heads without one
        """
        assert target.eagle is not None, "its config has a head"
        self._eagle: EagleConfig = target.eagle
        self._stored, self._place = weights, target.decoder_layers
        self._so_far: Tensor = None
        has_own = _EMBEDDING in weights.names

        def prepared(name: str, make: Callable[[], Weight]) -> Weight:
            return embedding if name == _EMBEDDING and not has_own else prepare(f"draft_model {name}", make)

        own = replace(self._eagle.layer, ropes=target.ropes[-1:])
        mine = Shard(shard.rank, shard.size, shard.kv_heads[-1:], shard.sharing[-1:])
        super().__init__(own, weights, ops, collectives, mine, prepared)
        del self._stored

    # ---- loading ----

    def _find_prefix(self, weights: Weights) -> str:
        return ""

    def _layer_at(self, layer: int) -> str:
        found = (at for at in _LAYERS if any(name.startswith(at) for name in self._stored.names))
        at = next(found, None)
        if at is None:
            raise ModelError(f"the weights of the draft head have no layer: none is named {' or '.join(_LAYERS)}...")
        return at

    def load_attention(self, layer: int, at: str) -> EagleAttention:
        config, shard, hidden = self.config, self._shard, self.config.hidden_size
        dim, q = config.head_dim, shard.query_heads(config, layer)
        of_queries = [(start * dim, stop * dim) for start, stop in q]
        of_keys = [(head * dim, (head + 1) * dim) for head in shard.kv_heads[layer]]
        query, *others = (f"{at}{name}" for name in self.projections(layer))
        every = [(query, config.num_heads, of_queries), *((name, config.num_kv_heads, of_keys) for name in others)]
        for name, heads, _ in every:
            self._check_shape(f"{name}.weight", (heads * dim, 2 * hidden))
        where = [(name, *part) for name, _, parts in every for part in merged(parts)]
        of_embedding, of_hidden = (self._part(where, first, first + hidden) for first in (0, hidden))
        return EagleAttention(of_embedding, of_hidden, self._split_columns(f"{at}o_proj", of_queries, has_bias=False))

    def _part(self, where: list[tuple[str, int, int]], first: int, stop: int) -> Linear:
        """These columns of rows of several projections, as one weight."""
        made_of = " + ".join(f"{name}.weight[{begin}:{end}, {first}:{stop}]" for name, begin, end in where)

        def weight() -> Weight:
            rows = self._rows(where)
            assert isinstance(rows, np.ndarray), "heads that are quantised are refused"
            return self.ops.linear_weight(rows[:, first:stop])

        return Linear(self._prepare(made_of, weight))

    def load_more(self) -> None:
        eagle, hidden = self._eagle, self.config.hidden_size
        self._check_shape(f"{_JOIN}.weight", (hidden, len(eagle.taken) * hidden))
        self._join = {
            layer: self._inputs_of(_JOIN, place * hidden, (place + 1) * hidden)
            for place, layer in enumerate(eagle.taken)
        }
        at = self._layer_at(0)
        self._hidden_norm = self._norm(f"{at}hidden_norm.weight")
        self._targets = self._load_targets()

    def _load_targets(self) -> KernelArray | None:
        """int32 ``[draft vocabulary]``: the model's token that each one drafted is; None: the same one."""
        eagle, every = self._eagle, self.config.vocab_size
        if _TARGETS not in self._stored.names:
            if eagle.vocab_size == every:
                return None
            raise ModelError(
                f"the draft head's weights lack {_TARGETS!r}: which of {every} tokens its {eagle.vocab_size} are"
            )
        self._check_shape(_TARGETS, (eagle.vocab_size,))
        targets = self._stored.stored(_TARGETS).astype(np.int64) + np.arange(eagle.vocab_size)
        if targets.min() < 0 or targets.max() >= every:
            raise ModelError(f"the draft head's {_TARGETS!r} has tokens {targets.min()} to {targets.max()}, of {every}")
        return self.ops.upload(targets.astype(np.int32))

    def _load_lm_head(self) -> Linear:
        name, total, shard = self._lm_head_name(), self._eagle.vocab_size, self._shard
        self._check_shape(f"{name}.weight", (total, self.config.hidden_size))
        start, stop = (total * rank // shard.size for rank in (shard.rank, shard.rank + 1))
        return self._split_rows([(name, [(start, stop)])], has_bias=False)

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if (shape := self._stored.shape(name)) != expected:
            raise ModelError(
                f"{name} of the draft head has the shape {shape}, its config.json says {expected}: weights and "
                "config.json do not belong together"
            )

    # ---- steps ----

    @property
    def taken(self) -> Sequence[int]:
        """See `DraftHead.taken`."""
        return self._eagle.taken

    def take(self, layer: int, x: Tensor) -> None:
        """See `DraftHead.take`: what is made of it is summed up, so nothing of it need be kept."""
        part = self._linear(x, self._join[layer])
        self._so_far = part if layer == self.taken[0] else self._so_far + part

    def given(self) -> Tensor:
        """See `DraftHead.given`."""
        found, self._so_far = self._so_far, None
        return found

    def draft(
        self,
        following: KernelArray,
        positions: KernelArray,
        hidden: Tensor,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
        embeds: Embeds | None = None,
    ) -> Tensor:
        """What the layer makes, before the norm that is in front of the LM head."""
        (layer,), (rotation,) = self._layers, self.rotations(positions)
        weights, embedding = layer.attention, self.embedded(following, embeds)
        normed = self.norm(hidden, self._hidden_norm)
        projected = self._linear(self.norm(embedding, layer.norms.before_attention), weights.of_embedding)
        query, key, value = self._heads(projected + self._linear(normed, weights.of_hidden))
        seen = attention(self._place, query, key, value, rotation, None, wanted=wanted)
        before = normed if self._eagle.norms_residual else hidden
        if wanted is not None:
            before = self.rows_of(before, wanted)
        if not before.shape[0]:
            return before
        attended = self.projected(seen, weights.out)
        return self.behind(layer, Residual(before, before), attended, None).x

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[T, q_heads, D]``, keys and values ``[T, kv_heads, D]``."""
        dim, kv_heads = self.config.head_dim, len(self._shard.kv_heads[0])
        heads = qkv.reshape([qkv.shape[0], -1, dim])
        q_heads = heads.shape[1] - 2 * kv_heads
        return heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads], heads[:, q_heads + kv_heads :]

    def drafted(self, made: Tensor) -> tuple[KernelArray, KernelArray] | None:
        """See `Model.drafted`: the model's tokens, of scores of the head's."""
        scores = self.scores(self.norm(made, self._final_norm))
        if scores is None:
            return None
        tokens, best = self.ops.greedy(scores)
        return (tokens if self._targets is None else self._targets[tokens]), best
