"""A rank's model, out of its directory, or out of weights that an earlier start packed."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import (
    NUMERICS_VERSION,
    ModelCard,
    check_draft_unchanged,
    check_same,
    check_unchanged,
)
from headwise.runtime.loader.adapters import AdapterFile
from headwise.runtime.loader.draft_model import DraftModel
from headwise.runtime.loader.packed_cache import DIRECTORY, LIMITS, Limits, PackedKey, PackedWeights
from headwise.runtime.loader.progress import LogProgress
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.models.base import Model
from headwise.runtime.models.registry import build_model
from headwise.runtime.models.shard import Shard
from headwise.runtime.models.weights import Prepare, PreparedWeights, make_anew
from headwise.runtime.ops.base import PackingOps, TensorOps
from headwise.runtime.ops.comm import Collectives

log = logging.getLogger(__name__)

_RUNTIME = Path(__file__).parents[1]
_PACKAGES = ("loader", "models", "ops")
"""Whose code decides which rows a weight is made of, in which order, and what becomes of their numbers. How they are
packed then is told by `PackingOps.packed_format`."""


def load_model(
    card: ModelCard,
    config: EngineConfig,
    directory: Path,
    ops: TensorOps,
    collectives: Collectives,
    shard: Shard,
    limits: Limits = LIMITS,
    prepared: PreparedWeights | None = None,
) -> Model:
    """A rank's part of the card's model. Raises `ModelError` if it cannot be loaded, or is another one by now.

    limits:   of what is kept on disk, where the configuration wants it
    prepared: its weights, as far as they are there already; those that are made are there, too, then
    """
    keeps = numpy_dtype(config.dtype_name) if config.on_gpu else None  # a CPU packs what it has
    weights = open_weights(
        directory,
        blocks=config.computes_from_blocks,
        keeps=keeps,
        keeps_codes=config.keeps_codes,
        keeps_fp8=config.keeps_fp8,
    )
    packed = None
    if config.packed_cache and isinstance(ops, PackingOps) and not prepared:
        place, key = config.cache_path / DIRECTORY, packed_key(card, config, ops, shard)
        packed = PackedWeights(place, key, ops, lambda: weights.num_elements // shard.size, limits, LogProgress(log))
    prepare: Prepare = packed.prepare if packed else make_anew
    prepare = prepare if prepared is None else prepared.remembering(prepare)
    adapters = [AdapterFile(name, path) for name, path in config.adapter_paths.items()]
    head = DraftModel(config.draft_model, config.cache_path) if config.draft_model else None
    beside = None if head is None else head.weights(keeps)
    model = build_model(card.config, weights, ops, collectives, shard, prepare, adapters, beside)
    check_same(card, adapters)
    check_unchanged(card, config, directory)  # blocks of what is cached are named by the card
    if head is not None:
        check_draft_unchanged(card, config, head.directory)
    if packed:
        packed.keep()
    return model


def packed_key(card: ModelCard, config: EngineConfig, ops: PackingOps, shard: Shard) -> PackedKey:
    """What decides how a rank's weights are packed. The kind of CPU does not: only how they are multiplied."""
    settings = {
        "format": ops.packed_format,
        "numerics": NUMERICS_VERSION,
        "blocks": card.blocks,
        "dtype": config.dtype_name,
        "weights_dtype": config.weights_dtype_name,
        "kv_heads": shard.kv_heads,  # which a rank is dealt depends on what each may see
    }
    if card.config.mla is None and any(sharing.ranks > 1 for sharing in shard.sharing):
        settings["sharing"] = shard.sharing  # of latents it is the rank
    if card.drafting:
        settings["drafting"] = card.drafting
    return PackedKey(card.weights, settings, shard.rank, shard.size, recipe())


@cache
def recipe() -> str:
    """A digest of the sources of `_PACKAGES`: it changes with whatever could make other weights of the same files."""
    from headwise.kernels.cpu.machine_code import digest  # brings Numba, which whoever packs weights has

    return "-".join(digest(_RUNTIME / package) for package in _PACKAGES)
