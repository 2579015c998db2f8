"""Measures a head pattern: how much of each KV head's attention goes past the sink and the recent tokens.

Whole inputs run through the model, one at a time. Attention is computed by the serving kernels over a cache of one
layer's tokens, so memory is that of a single layer; for a sample of the query positions the attention weights
themselves are computed beside it, in tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.head_pattern import HeadPattern, Policies
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.runtime.calibration.passkeys import PasskeyInput
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.loader.progress import Progress
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.models.attention.base import Kernels, LayerCache
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.base import AttentionLayer, Model
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import build_model
from headwise.runtime.models.shard import Shard
from headwise.runtime.ops.base import Tensor, TensorOps
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.select import make_ops

TILE_BYTES = 32 << 20
"""Attention weights held at a time while measuring."""

QUANTILE = 0.9
"""A query head's far attention is this quantile over the measured positions: it counts if it is needed now and then.

By trial on SmolLM2 135M (sparsities 0.5 and 0.75): means over positions cost more perplexity, and means over the query
heads of a KV head much more, since they hide the one that retrieves among those that do not. So a KV head's score is
that of the query head that looks farthest.
"""

OTHER_ROWS = 64
"""Ordinary query positions measured per input."""


@dataclass(frozen=True)
class DenseModel:
    """A model with its weights on one rank, without an engine around it."""

    name: str
    identity: str
    config: ModelConfig
    model: Model
    ops: TensorOps
    kernels: Kernels
    tokenizer: Tokenizer

    @classmethod
    def load(cls, config: EngineConfig, directory: Path) -> DenseModel:
        card = read_model_card(config, directory)
        geometry, ops = card.config, make_ops(config.tensor_ops)
        variant = attention_of(geometry)
        if variant.is_replicated:
            raise ConfigError(f"{card.model} keeps no keys of single heads (MLA): there is no head pattern to measure")
        if card.has_states:
            raise ConfigError(f"{card.model} keeps states in some layers: no pattern of such is measured yet")
        if geometry.chunk:
            raise ConfigError(f"{card.model} has chunked attention: no pattern of such is measured yet")
        if geometry.layer_heads or geometry.query_heads:
            raise ConfigError(
                f"{card.model} has layers of unlike heads or with a shared cache: no pattern of such is measured yet"
            )
        shard = Shard(0, 1, tuple(tuple(range(geometry.num_kv_heads)) for _ in range(geometry.num_layers)))
        return cls(
            card.model,
            card.weights,
            geometry,
            build_model(geometry, open_weights(directory), ops, SingleRank(), shard),
            ops,
            variant.host_kernels(config.kernels, threads_per_worker(config)),
            Tokenizer.from_directory(directory),
        )

    def forward(self, token_ids: NDArray[np.int32], attention: AttentionLayer) -> Tensor:
        """Hidden states ``[tokens, hidden]`` of one sequence from its start."""
        return self.model.forward(token_ids, np.arange(len(token_ids), dtype=np.int32), attention)

    def logits(self, hidden: Tensor, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """``[len(rows), vocab_size]``"""
        logits = self.model.logits(self.ops.take_rows(hidden, rows))
        assert logits is not None, "the only rank has the logits"
        return logits


class SequenceAttention:
    """An `AttentionLayer` for one whole sequence: each layer's KV takes the place of the layer's before it."""

    BLOCK_SIZE = 64

    def __init__(self, model: DenseModel, policies: Policies, tokens: int) -> None:
        self._policies = policies
        variant, blocks = attention_of(model.config), -(-tokens // self.BLOCK_SIZE)
        self._attention = variant.over_cache(model.ops, model.kernels)
        self._layout = variant.layout(self.BLOCK_SIZE, model.config.num_kv_heads, "float32")
        self._arena = np.empty(blocks * self._layout.block_bytes, dtype=np.uint8)
        self._batch = AttentionBatch(
            cu_seqlens_q=np.array([0, tokens], dtype=np.int32),
            seq_lens=np.array([tokens], dtype=np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            groups=1,
        )

    def __call__(self, layer: int, *projected: Any, wanted: NDArray[np.int64] | None = None) -> Tensor:
        heads = _head_table(self._policies[layer])
        cache = LayerCache(self._arena, self._layout, self._batch, heads, wait=lambda: None, wanted=wanted)
        return self._attention(cache, *projected)


def measure_pattern(
    model: DenseModel, inputs: Sequence[PasskeyInput], sink: int, window: int, created_by: str, progress: Progress
) -> HeadPattern:
    """Scores of all heads, from 0 to 1: the attention that each pays to what ``sink`` and ``window`` would hide.

    Raises `ConfigError` if the inputs are too short for anything to be hidden.
    """
    progress.stage("measuring attention")
    masses = []
    for done, item in enumerate(inputs):
        progress.update(done, len(inputs))
        masses.append(_far_attention(model, item, HeadPolicy(window, sink), seed=done))
    by_head = np.quantile(np.concatenate(masses, axis=-1), QUANTILE, axis=-1)
    by_kv_head = by_head.reshape(model.config.num_layers, model.config.num_kv_heads, -1).max(axis=-1)
    return HeadPattern(by_kv_head, "calibration", model.name, model.identity, created_by)


def _far_attention(model: DenseModel, item: PasskeyInput, streaming: HeadPolicy, seed: int) -> NDArray[np.float64]:
    """``[num_layers, num_heads, rows]``: attention past ``streaming`` where pass keys are retrieved, and elsewhere."""
    tokens, reach = len(item.token_ids), streaming.sink + streaming.window
    asked = int(item.retrieving.min())
    if asked <= reach:
        raise ConfigError(
            f"an input of {tokens} tokens is asked for its pass keys after {asked}, and sink and window reach over "
            f"{reach}: use longer inputs"
        )
    others = np.random.default_rng(seed).choice(np.arange(reach, asked), min(OTHER_ROWS, asked - reach), replace=False)
    rows = np.concatenate([item.retrieving, np.sort(others)])
    measuring = MeasuringAttention(SequenceAttention(model, model.config.policies, tokens), model, rows, streaming)
    model.forward(item.token_ids, measuring)
    return measuring.mass


class MeasuringAttention:
    """An `AttentionLayer` that attends as ``inner`` does and notes the attention of some query positions.

    mass: ``float64 [num_layers, num_heads, len(rows)]``, the share that goes past the ``sink`` first and the ``window``
          most recent tokens
    """

    def __init__(
        self, inner: AttentionLayer, model: DenseModel, rows: NDArray[np.int64], streaming: HeadPolicy
    ) -> None:
        self._inner, self._model, self._rows, self._streaming = inner, model, rows, streaming
        self.mass: NDArray[np.float64] = np.zeros((model.config.num_layers, model.config.num_heads, len(rows)))

    def __call__(self, layer: int, *projected: Any, wanted: NDArray[np.int64] | None = None) -> Tensor:
        query, key, _, rotation, *_ = projected
        ops, config = self._model.ops, self._model.config
        queries, keys = (ops.kernel_array(ops.rope(tensor, *rotation)) for tensor in (query, key))
        queries = queries[self._rows]
        share = config.num_heads // config.num_kv_heads
        for head, own in enumerate(config.policies[layer]):
            heads = slice(head * share, (head + 1) * share)
            self.mass[layer, heads] = outside_mass(
                queries[:, heads], self._rows, keys[:, head], own, self._streaming,
                config.attention_scale, config.attention_softcap,
            )  # fmt: skip
        return self._inner(layer, *projected, wanted=wanted)


def outside_mass(
    query: NDArray[np.float32],
    positions: NDArray[np.int64],
    key: NDArray[np.float32],
    own: HeadPolicy,
    streaming: HeadPolicy,
    scale: float,
    softcap: float = 0.0,
) -> NDArray[np.float64]:
    """Share of attention that queries under the policy ``own`` pay to tokens that ``streaming`` would hide.

    ``query [rows, heads, D]`` at ``positions [rows]``, ``key [tokens, D]`` -> ``[heads, rows]``.
    """
    rows, heads, _ = query.shape
    mass: NDArray[np.float64] = np.empty((heads, rows))
    tile = max(1, TILE_BYTES // (4 * heads * len(key)))
    for first in range(0, rows, tile):
        part = slice(first, min(first + tile, rows))
        scores = np.float32(scale) * np.einsum("rhd,kd->hrk", query[part], key, optimize=True)
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        distance = positions[part, None] - np.arange(len(key))
        scores = np.where(_visible(distance, own), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        hidden = np.where(_visible(distance, streaming), 0.0, weights)
        mass[:, part] = hidden.sum(axis=-1) / weights.sum(axis=-1)
    return mass


def _visible(distance: NDArray[np.int64], policy: HeadPolicy) -> NDArray[np.bool_]:
    """``bool [rows, keys]``, given ``query position - key position``: the rule of `HeadPolicy`."""
    if policy.is_full:
        return distance >= 0
    sink = np.arange(distance.shape[1]) < policy.sink
    return (distance >= 0) & ((distance < policy.window) | sink)


def _head_table(policies: Sequence[HeadPolicy]) -> HeadTable:
    count = len(policies)
    return HeadTable(
        group=np.zeros(count, dtype=np.int32),
        slot=np.arange(count, dtype=np.int32),
        window=np.array([policy.window for policy in policies], dtype=np.int32),
        sink=np.array([policy.sink for policy in policies], dtype=np.int32),
    )
