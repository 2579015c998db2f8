"""The state machines of `machines`, over a model whose items' tokens see one another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from support.engine.machines import EngineMachine, PipelinedMachine, SpeculatingMachine, TieredMachine
from support.engine.simulated_engine import request
from support.engine.simulation import SimulatedExecutor

from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.protocol.prompt_items import PromptItem, placed
from headwise.runtime.protocol.request import GenerateRequest


class WholeItemsMachine(EngineMachine):
    """Prompts have items whose tokens see one another: no step ends inside one, and says of its tokens that they see
    all of it."""

    host: ClassVar[dict[str, object]] = {"both_ways": True}
    longest: ClassVar = 5

    def _make_engine(self, options: dict[str, Any]) -> tuple[EngineCore, SimulatedExecutor]:
        engine, executor = super()._make_engine(options)
        self.rows: dict[int, GenerateRequest] = {}
        submit = executor.submit

        def checked(batch: BatchRequest) -> None:
            self._check(batch)
            submit(batch)

        executor.submit = checked
        return engine, executor

    def _request(self, name: str, prompt: list[int], count: int, priority: int) -> GenerateRequest:
        items, at, family = [], 1 + prompt[0] % 4, prompt[0] // 10
        while at < len(prompt):
            length = min(1 + (at * family) % self.longest, len(prompt) - at)
            items.append(PromptItem(at, length, embeds=np.array(prompt[at : at + length], np.float32)[:, None]))
            at += length + at % 3
        ids = np.array(prompt, np.int32)
        for item in items:
            ids[item.offset : item.offset + item.length] = 2
        shown = placed(items, len(ids))
        plain = request(name, ids, count, priority=priority)
        return replace(plain, extra_keys=shown.extra_keys, embeds=shown.embeds)

    def _check(self, batch: BatchRequest) -> None:
        self.rows |= {new.row: self.requests[new.request_id] for new in batch.new_sequences}
        expected: list[int] = []
        for row, start, count in zip(
            batch.rows.tolist(), batch.starts.tolist(), batch.query_lens.tolist(), strict=True
        ):
            items, stop = self.rows[row].extra_keys, start + count
            assert not [item for item in items if item.start < stop < item.end]
            ends = {at: each.end for each in items for at in range(each.start, each.end)}
            expected += [ends.get(at, at + 1) for at in range(start, stop)]
        alone = np.repeat(batch.starts - np.cumsum(batch.query_lens) + batch.query_lens, batch.query_lens)
        told = batch.sees if len(batch.sees) else np.arange(1, len(alone) + 1) + alone
        assert told.tolist() == expected


class CrowdedItemsMachine(WholeItemsMachine):
    """Beside what decodes a step has no room for the longest items."""

    host: ClassVar[dict[str, object]] = {"both_ways": True, "async_scheduling": False, "max_batched_tokens": 5}


class TieredItemsMachine(WholeItemsMachine, TieredMachine):
    """The same with a host tier."""

    host: ClassVar[dict[str, object]] = {**TieredMachine.host, "both_ways": True}


class SpeculatingItemsMachine(WholeItemsMachine, SpeculatingMachine):
    """The same beside guesses."""

    host: ClassVar[dict[str, object]] = {**SpeculatingMachine.host, "both_ways": True}


class PipelinedItemsMachine(WholeItemsMachine, PipelinedMachine):
    """The same through a pipeline."""

    host: ClassVar[dict[str, object]] = {**PipelinedMachine.host, "both_ways": True}


ITEM_MACHINES = [
    WholeItemsMachine,
    CrowdedItemsMachine,
    TieredItemsMachine,
    SpeculatingItemsMachine,
    PipelinedItemsMachine,
]
