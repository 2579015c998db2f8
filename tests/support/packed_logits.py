"""What a model says that is loaded as a worker does, and whose packed weights are kept."""

from __future__ import annotations

import numpy as np
from support.engine.dense_oracle import DenseAttention

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.loader.packed_cache import Limits
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.models.shard import Shard
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.ops.select import make_ops
from headwise.runtime.worker.model_loading import load_model

KEEP_ALL = Limits(least_s=0.0, spare_bytes=0)
IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


def load(config: EngineConfig) -> np.ndarray:
    """The logits of a model that is loaded as a worker does."""
    directory = resolve_model(config.model, config.cache_path, weights=False)
    card = read_model_card(config, directory)
    shard = Shard.of(card.config, card.plan, 0)
    ops = make_ops("numba", 1, config.dtype_name, config.weights_dtype_name)
    model = load_model(card, config, directory, ops, SingleRank(), shard, KEEP_ALL)
    attention = DenseAttention(model.config, shard, ops)
    found = model.logits(model.forward(IDS, np.arange(len(IDS), dtype=np.int32), attention))
    assert found is not None
    return found
