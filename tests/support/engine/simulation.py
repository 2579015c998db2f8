"""The real worker around a simulated model, for tests of the engine: its "KV cache" holds token ids, in real blocks.

What it says next depends on every token that the block tables lead to, so any mistake in tables, hashing, eviction,
copying or scheduling changes the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from support.engine.simulated_copies import (
    DEVICE_POISON,
    HOST_POISON,
    DictionaryStorage,
    Faults,
    SteppedStream,
)
from support.engine.simulated_copies import Storage as Storage
from support.engine.simulated_model import VOCAB, SimulatedDevice, TokenModel, next_token

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import EngineDiedError, ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import CacheSpec, ModelCard
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.running_step import RunningStep, StepRunner
from headwise.runtime.protocol.shared_rows import SharedRowReader
from headwise.runtime.protocol.step_channel import WorkerFailed, failure_of
from headwise.runtime.worker.drafts import spread
from headwise.runtime.worker.kv_offload import KVOffload
from headwise.runtime.worker.worker import ModelWorker
from headwise.runtime.worker.worker_parts import WorkerParts
from headwise.storage.backends.base import BlockStorage
from headwise.transfer.cpu_stream import CpuStream

EOS = 0

_CONFIG = EngineConfig()


def continuation(
    prompt: Sequence[int], count: int, following: Callable[[Sequence[int]], int] = next_token
) -> list[int]:
    """What the simulated model says after ``prompt``."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


def simulated_card(
    policies: Sequence[HeadPolicy],
    *,
    block_size: int,
    num_blocks: int,
    max_rows: int,
    host_blocks: int = 0,
    tp_size: int = 1,
    grouping: Literal["auto", "per_head_index"] = "auto",
    drafts: bool = False,
    both_ways: bool = False,
) -> ModelCard:
    """A card with one layer and one KV head per policy.

    drafts:    and another layer, of as many, for that
    both_ways: whether items' tokens see each other
    """
    layers = [tuple(policies), *([(FULL,) * len(policies)] if drafts else [])]
    plan = plan_head_groups(layers, tp_size, grouping)
    layout = BlockLayout(block_size, plan.slots, (Role("token", (), "int32"),), alignment=4)
    max_len = num_blocks // len(plan.groups) * block_size
    model = ModelConfig(
        architecture="Simulated",
        hidden_size=1,
        intermediate_size=1,
        num_layers=len(layers),
        num_heads=len(policies),
        num_kv_heads=len(policies),
        head_dim=1,
        vocab_size=VOCAB,
        max_position=max_len,
        rms_norm_eps=0.0,
        tie_embeddings=True,
        policies=tuple(layers),
        ropes=(RopeConfig(1.0),) * len(layers),
        attention_scale=1.0,
        draft_layers=len(layers) - 1,
        both_ways=(True,) if both_ways else (),
    )
    spec = CacheSpec(num_blocks, max_rows, -(-max_len // block_size), host_blocks)
    return ModelCard("simulated", "simulated", model, plan, (layout,) * len(layers), spec, max_len)


def of_rank(card: ModelCard, rank: int) -> ModelCard:
    """As if this rank's members were all that there are."""
    groups = tuple(replace(group, members=(group.members[rank],)) for group in card.plan.groups)
    return replace(card, plan=replace(card.plan, tp_size=1, groups=groups))


class SimulatedExecutor:
    """Executes batches in order, each when `finish_one` says so, or at once with ``eager``.

    worker:  a `ModelWorker`, which needs no files
    faults:  what goes wrong with its copies
    model:   what it computes with; the next one, after `sleep` and `wake`
    storage: what is kept beyond the executor's life, by block hash and group, or a storage; None: there is none
    exports: where its host could be read
    fail_wake: why the model cannot be loaded again; None if it can
    bad_weights: numbers of weights that cannot be loaded
    is_late: the device samples, and the next step begins before the last one has ended, as on a GPU
    changed: makes something else of a batch's result
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        eager: bool = True,
        storage: Storage | BlockStorage | None = None,
        is_late: bool = False,
    ) -> None:
        self.card = card
        self.eager = eager
        self.faults = Faults()
        self.exports: tuple[tuple[bytes, ...], ...] = ()
        self.storage = storage
        self.fail_wake: Exception | None = None
        self.bad_weights: set[str] = set()
        self.queue: deque[BatchRequest] = deque()
        self.changed: Callable[[BatchRequest, StepResult], StepResult] = lambda batch, result: result
        self._embeds = SharedRowReader()
        self._begun: deque[BatchRequest] = deque()
        self._went_on: set[int] = set()  # rows of sequences that were computed by other weights, too
        self._answers: deque[StepResult | WorkerFailed] = deque()
        states = [group for group, policy in enumerate(card.plan.policies) if policy.is_state]
        self._device = SimulatedDevice(self.faults, states, is_late)
        self.model = self._make_model()
        parts = WorkerParts(
            read_card=lambda config, directory: replace(
                card,
                weights=directory.name,
                adapters=tuple((name, str(path)) for name, path in config.adapter_paths.items()),
            ),
            load_model=lambda card, *arguments, prepared: self._load_model(card.weights),
            collect=lambda: None,  # which would look through all that tests have: the model is one and the same
            open_copies=self._open_copies,
            find_weights=lambda model, cache_dir: Path("" if model == _CONFIG.model else model),
            clock=lambda: 0.0,
        )
        self.worker = self._make_worker(parts)
        self.worker.initialize_cache()
        self._runner = StepRunner(self._begin, self._take, self._tell)

    def _make_model(self) -> TokenModel:
        return TokenModel(self.card.config, self._device.kernels)

    def _make_worker(self, parts: WorkerParts) -> ModelWorker:
        return ModelWorker(_CONFIG, Path(), 0, SingleRank(), self._device, parts)

    def _load_model(self, weights: str) -> TokenModel:
        if self.fail_wake is not None:
            raise self.fail_wake
        if weights in self.bad_weights:
            raise ModelError(f"weights {weights} lack a tensor")
        self._device.kernels.weights = int(weights or 0)
        return self.model

    def _open_copies(
        self, config: EngineConfig, card: ModelCard, rank: int, device: object, arena: object
    ) -> KVOffload:
        faults, copies = self.faults, self._device.copies
        storage, background = self.storage, CpuStream
        if not isinstance(storage, BlockStorage):
            background = lambda name: SteppedStream(faults, lambda: faults.storage_steps)  # noqa: E731
        if isinstance(storage, dict):
            storage = DictionaryStorage(storage, card.layout.block_bytes, faults, copies.violations)
        self._copies = KVOffload(config, card, rank, self._device, arena, storage=storage, background=background)
        return self._copies

    # ---- `Executor` ----

    shares_memory = True

    def submit(self, batch: BatchRequest) -> None:
        self.queue.append(batch)

    def poll(self, timeout_s: float | None) -> StepResult | None:
        if self.eager or timeout_s is None:
            self.finish_one()
        if not self._answers:
            return None
        if isinstance(answer := self._answers[0], WorkerFailed):
            raise EngineDiedError(answer.reason)
        self._answers.popleft()
        return answer

    def finish_one(self) -> None:
        told = len(self._answers)
        while len(self._answers) == told and (self.queue or self._runner.is_busy):
            if self._answers and isinstance(self._answers[-1], WorkerFailed):
                return
            try:
                self._runner.turn(0.0)
            except AssertionError:
                raise
            except Exception as error:
                self._answers.append(failure_of(error, 0))

    def _take(self, wait_s: float) -> BatchRequest | None:
        return self._embeds.resolved(self.queue.popleft()) if self.queue else None

    def _begin(self, batch: BatchRequest) -> RunningStep:
        assert not (self.is_asleep and len(batch.rows)), "a worker that is asleep cannot compute"
        self.faults.step = batch.step_id
        copies = self._device.copies
        copies.nonsense.update(batch.cache_swap_metadata.loads[:, 2].tolist())
        if batch.weights is not None:  # what runs may go on
            self._went_on = set(range(self.card.spec.max_rows))
        self._went_on -= {new.row for new in batch.new_sequences}
        self._device.kernels.mixed = [row in self._went_on for row in spread(batch).rows.tolist()]
        self._begun.append(batch)
        return self.worker.begin(batch)

    def _tell(self, result: StepResult) -> None:
        violations = self._device.copies.violations
        assert not violations, violations
        self._answers.append(self.changed(self._begun.popleft(), result))

    def close(self) -> None:
        self._copies.close()

    # ---- for tests ----

    @property
    def is_asleep(self) -> bool:
        """It has given up its device memory, as it was told to."""
        return self.worker.served.is_asleep

    def poison(self, blocks: Sequence[int] | NDArray[np.int32]) -> None:
        if not self.is_asleep:
            self._fill(blocks, DEVICE_POISON)

    def _fill(self, blocks: Sequence[int] | NDArray[np.int32], word: int) -> None:
        arena = self.worker.served.runner.cache.arena
        arena.reshape(self.card.spec.num_blocks, -1).view(np.int32)[list(blocks)] = word

    def poison_host(self, blocks: Sequence[int] | NDArray[np.int32]) -> None:
        arena = self._copies._arena.array
        arena.reshape(self.card.spec.num_host_blocks, -1).view(np.int32)[list(blocks)] = HOST_POISON


class SimulatedLookup:
    """Says what a storage has, at once; or nothing while it ``hangs``.

    in_background: questions of that kind so far
    """

    def __init__(self, storage: Storage, groups: int) -> None:
        self.hangs = False
        self.in_background = 0
        self._storage, self._groups = storage, groups
        self._asked: dict[str, list[bytes]] = {}

    def submit(self, key: str, hashes: Sequence[bytes], in_background: bool = False) -> None:
        self._asked[key] = list(hashes)
        self.in_background += in_background

    def poll(self) -> list[tuple[str, np.ndarray]]:
        if self.hangs:
            return []
        asked, self._asked = self._asked, {}
        return [
            (key, np.array([[(h, g) in self._storage for g in range(self._groups)] for h in hashes], dtype=np.bool_))
            for key, hashes in asked.items()
        ]

    def cancel(self, key: str) -> None:
        self._asked.pop(key, None)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._asked)

    def close(self) -> None:
        pass
