"""An engine whose worker is simulated, with tiny blocks and a clock of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.engine.simulation import (
    VOCAB,
    SimulatedExecutor,
    SimulatedLookup,
    Storage,
    simulated_card,
)

from headwise.cache_controller.joint_reads import JointReads
from headwise.cache_controller.policy import FULL
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.request import GenerateRequest, GenerationResult, SamplingParams
from headwise.storage.backends.base import StorageNamespace
from headwise.storage.backends.file import FileStorage
from headwise.storage.lookup import StorageLookup

BLOCK = 4

SOMEWHERE = {"storage": "file:///simulated?capacity=1GiB", "host_cache": "1KiB"}
"""The configuration of an engine with storage, which nobody opens."""


class LetterTokenizer:
    """Token t is one letter; nothing ends a text by itself."""

    eos_token_ids = (VOCAB + 1,)

    def detokenizer(self, shown_tokens: tuple[str, ...] = ()) -> LetterTokenizer:
        return self

    def push(self, ids) -> str:
        return "".join(chr(ord("!") + i) for i in ids)

    def flush(self) -> str:
        return ""


class Ticks:
    """A clock that goes on by a tenth of a second at every look."""

    def __init__(self) -> None:
        self._now = 1e9

    def __call__(self) -> float:
        self._now += 0.1
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds


def make_engine(
    policies=(FULL,),
    *,
    num_blocks=16,
    max_rows=4,
    host_blocks=0,
    eager=True,
    storage: Storage | Path | None = None,
    is_late=False,
    drafts=False,
    both_ways=False,
    **config,
) -> tuple[EngineCore, SimulatedExecutor]:  # fmt: skip
    config = {"max_batched_tokens": 16, **config}
    if storage is not None:
        config |= SOMEWHERE
    sizes = {"num_blocks": num_blocks, "max_rows": max_rows, "host_blocks": host_blocks}
    card = simulated_card(policies, block_size=BLOCK, drafts=drafts, both_ways=both_ways, **sizes)
    lookup: SimulatedLookup | StorageLookup | None = None
    if isinstance(storage, Path):
        executor = SimulatedExecutor(card, eager=eager, storage=_file_storage(storage, card), is_late=is_late)
        lookup = StorageLookup([_file_storage(storage, card)], len(card.plan.groups))
    else:
        executor = SimulatedExecutor(card, eager=eager, storage=storage, is_late=is_late)
        lookup = lookup_in(storage, card)
    return engine_over(executor, EngineConfig(block_size=BLOCK, **config), lookup), executor


def engine_over(
    executor: SimulatedExecutor, config: EngineConfig, lookup: SimulatedLookup | StorageLookup | None = None
) -> EngineCore:
    """An engine with a clock of its own, whose requests read together what they share, however little."""
    engine = EngineCore(config, executor.card, LetterTokenizer(), executor, clock=Ticks(), lookup=lookup)
    engine.resources.steps.joint_reads = JointReads(engine.cache, 1)
    return engine


def lookup_in(storage: Storage | None, card: ModelCard) -> SimulatedLookup | None:
    return None if storage is None else SimulatedLookup(storage, len(card.plan.groups))


def _file_storage(directory: Path, card: ModelCard) -> FileStorage:
    return FileStorage(directory, 1 << 26, StorageNamespace("simulated", "any"), card.layout.block_bytes)


def request(name: str, prompt, max_tokens: int, *, priority: int = 0, salt: str = "", **sampling) -> GenerateRequest:
    """Greedy, so that the device chooses, unless ``sampling`` says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "seed": 1, **sampling})
    return GenerateRequest(name, np.array(prompt, dtype=np.int32), params, priority, salt)


def run(engine: EngineCore) -> dict[str, GenerationResult]:
    results: dict[str, GenerationResult] = {}
    for _ in range(10_000):
        for delta in engine.step(None):
            results.setdefault(delta.request_id, GenerationResult(delta.request_id)).add(delta)
        if not engine.has_work():
            assert engine.cache.pool.num_held == 0
            engine.cache.check_integrity()
            return results
    raise AssertionError("the engine does not come to an end")
