"""Engines whose ranks run by themselves, each on a thread, and have steps from a channel: stages of a pipeline work on
different steps at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.engine.ranks import Ranks
from support.waiting import PATIENCE_S

from headwise.errors import EngineDiedError
from headwise.runtime.config.block_storage import open_lookup
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.protocol.step_channel import ZmqExecutor, serve_steps
from headwise.runtime.worker.worker import ModelWorker


@dataclass
class StagedEngine:
    """core: over ``ranks``, which an ``executor`` gives its steps
    failures: what ranks died of, by rank
    """

    core: EngineCore
    preprocessor: Preprocessor
    ranks: Ranks
    executor: ZmqExecutor
    failures: dict[int, str] = field(default_factory=dict)


@contextmanager
def staged_engine(
    config: EngineConfig,
    *,
    step_timeout_s: float = PATIENCE_S,
    prepare: Callable[[Ranks], object] = lambda ranks: None,
) -> Iterator[StagedEngine]:
    """``prepare`` is given the ranks before they have a step."""
    ranks, preprocessor = Ranks(config, Path(config.model)), Preprocessor.open(config)
    prepare(ranks)
    executor = ZmqExecutor(
        "tcp://127.0.0.1:*", config.ranks, step_timeout_s, start_timeout_s=PATIENCE_S,
        sampling=config.ranks - config.tp_size,
    )  # fmt: skip
    lookup = open_lookup(config, preprocessor.card)
    core = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor, lookup=lookup)
    engine, stop = StagedEngine(core, preprocessor, ranks, executor), threading.Event()

    def serve(worker: ModelWorker) -> None:
        try:
            serve_steps(worker, executor.endpoint, worker.rank, stop.is_set)
        except EngineDiedError as error:
            engine.failures[worker.rank] = str(error)

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in ranks.workers]
    for thread in threads:
        thread.start()
    try:
        executor.wait_ready(PATIENCE_S)
        yield engine
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        executor.close()
        ranks.close()
        if lookup is not None:
            lookup.close()
