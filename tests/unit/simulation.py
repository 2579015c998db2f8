"""A worker without a model, for tests of the engine: its "KV cache" holds token ids, in real blocks.

The next token is a function of every token that the block tables lead to, so any mistake in tables, hashing,
eviction or scheduling changes the output.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from headwise.cache_controller.block_tables import HostBlockTables, TableShape
from headwise.cache_controller.layout import BlockLayout, Role
from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import HeadPolicy
from headwise.cache_controller.storage_tier import NamedBlocks
from headwise.runtime.batch import LAST_SAMPLED, RESET_STORAGE, SLEEP, WAKE, BatchRequest, StepResult
from headwise.runtime.executor import CacheSpec
from headwise.runtime.model_card import ModelCard
from headwise.runtime.models.base import ModelConfig, RopeConfig

VOCAB = 97
EOS = 0

Storage = dict[tuple[bytes, int], np.ndarray]


def next_token(tokens: Sequence[int]) -> int:
    """The simulated model: never the end token, unless the tokens say so."""
    return zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes()) % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What the simulated model says after ``prompt``."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def simulated_card(
    policies: Sequence[HeadPolicy], *, block_size: int, num_blocks: int, max_rows: int, host_blocks: int = 0
) -> ModelCard:
    """A card with one layer and one KV head per policy."""
    plan = plan_head_groups([policies])
    layout = BlockLayout(block_size, plan.slots, (Role("token", (), "int32"),), alignment=4)
    max_len = num_blocks // len(plan.groups) * block_size
    model = ModelConfig(
        architecture="Simulated",
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=len(policies),
        num_kv_heads=len(policies),
        head_dim=1,
        vocab_size=VOCAB,
        max_position=max_len,
        rms_norm_eps=0.0,
        tie_embeddings=True,
        policies=(tuple(policies),),
        ropes=(RopeConfig(1.0),),
        attention_scale=1.0,
    )
    spec = CacheSpec(num_blocks, max_rows, -(-max_len // block_size), host_blocks)
    return ModelCard("simulated", "simulated", model, plan, layout, spec, max_len)


class SimulatedExecutor:
    """Executes batches in order, each when `finish_one` says so, or at once with ``eager``.

    Stores to the host read their device block late: ``store_steps`` steps after they were sent. ``lose_load`` and
    ``lose_store`` say whether a copy fails; what a step computes from a block that never came is nonsense.

    storage:       what is kept beyond the executor's life, by block hash and group
    storage_steps: how many steps puts and fetches take; None: they hang. ``lose_put`` and ``lose_fetch`` as above
    is_asleep:     it has given up its device memory, as it was told to
    """

    def __init__(self, card: ModelCard, *, eager: bool = True, storage: Storage | None = None) -> None:
        self.card = card
        self.storage = {} if storage is None else storage
        self.storage_steps: int | None = 1
        self.lose_put: Callable[[], bool] = lambda: False
        self.lose_fetch: Callable[[], bool] = lambda: False
        self._puts: deque[tuple[int, int, tuple[bytes, int]]] = deque()
        self._fetches: deque[tuple[int, int, tuple[bytes, int]]] = deque()
        self.eager = eager
        self.fail_next: str | None = None
        self.is_asleep = False
        blocks = card.spec.num_blocks
        self._arena = np.full((blocks, card.layout.block_size), -7, dtype=np.int32)
        spec = card.spec
        self._tables = HostBlockTables(
            TableShape(spec.max_rows, len(card.plan.groups), spec.max_blocks, card.layout.block_size)
        )
        self._host = np.full((card.spec.num_host_blocks, card.layout.block_size), -9, dtype=np.int32)
        self._stores: deque[tuple[int, int, int]] = deque()
        self._lost: set[int] = set()
        self.store_steps = 1
        self.lose_load: Callable[[], bool] = lambda: False
        self.lose_store: Callable[[], bool] = lambda: False
        self._last = np.zeros(card.spec.max_rows, dtype=np.int32)
        self.queue: deque[BatchRequest] = deque()
        self._results: deque[StepResult] = deque()

    def submit(self, batch: BatchRequest) -> None:
        self.queue.append(batch)

    def poll(self, timeout_s: float | None) -> StepResult | None:
        if self.eager or timeout_s is None:
            self.finish_one()
        return self._results.popleft() if self._results else None

    def finish_one(self) -> None:
        if self.queue:
            self._results.append(self._execute(self.queue.popleft()))

    def close(self) -> None:
        pass

    def poison(self, blocks: Sequence[int]) -> None:
        self._arena[list(blocks)] = -7

    def poison_host(self, blocks: Sequence[int]) -> None:
        self._host[list(blocks)] = -9

    def _execute(self, batch: BatchRequest) -> StepResult:
        self._tables.open_rows(new.row for new in batch.new_sequences)
        self._tables.apply(batch.table_updates)
        copies = {**self._load(batch), **self._store(batch), **self._put(batch), **self._fetch(batch)}
        assert not (self.is_asleep and len(batch.rows)), "a worker that is asleep cannot compute"
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            return StepResult(batch.step_id, 0, np.empty(0, np.int32), error=error, **copies)
        if batch.command:
            return StepResult(batch.step_id, 0, np.empty(0, np.int32), forgotten=self._obey(batch), **copies)
        return StepResult(batch.step_id, 0, self._compute(batch), **copies)

    def _obey(self, batch: BatchRequest) -> int:
        assert not len(batch.rows)
        if batch.command == RESET_STORAGE:
            count = len(self.storage)
            self.storage.clear()
            return count
        assert self.is_asleep == (batch.command == WAKE), f"{batch.command} came at the wrong time"
        assert not self._stores, "the device's memory is given up while it is copied"
        self._arena[:] = -7
        self._tables.array[:] = -1
        self.is_asleep = batch.command == SLEEP
        return 0

    def _load(self, batch: BatchRequest) -> dict[str, np.ndarray]:
        lost = []
        assert not (self.is_asleep and len(batch.cache_swap_metadata)), "there is no device to load to"
        for _, host, device in batch.cache_swap_metadata.tolist():
            if self.lose_load():
                lost.append(device)
                self._arena[device] = -7
            else:
                assert (self._host[host] >= 0).all(), f"host block {host} holds nothing"
                self._arena[device] = self._host[host]
                self._lost.discard(device)
        self._lost.update(lost)
        return {"failed_in": np.array(lost, dtype=np.int32)}

    def _store(self, batch: BatchRequest) -> dict[str, np.ndarray]:
        assert not (self.is_asleep and len(batch.cache_evict_metadata)), "there is no device to store from"
        self._stores.extend((batch.step_id, *pair) for pair in batch.cache_evict_metadata.tolist())
        done, failed = [], []
        while self._stores and self._stores[0][0] + self.store_steps <= batch.step_id:
            _, device, host = self._stores.popleft()
            if self.lose_store():
                failed.append(host)
            else:
                self._host[host] = self._arena[device]
                done.append(host)
        return {"swapped_out": np.array(done, dtype=np.int32), "failed_out": np.array(failed, dtype=np.int32)}

    def _put(self, batch: BatchRequest) -> dict[str, np.ndarray]:
        done, failed = [], []
        for host, key in self._due(self._puts, batch.step_id, batch.storage_puts):
            if self.lose_put():
                failed.append(host)
            else:
                assert (self._host[host] >= 0).all(), f"host block {host} holds nothing"
                self.storage.setdefault(key, self._host[host].copy())
                done.append(host)
        return {"put": np.array(done, dtype=np.int32), "not_put": np.array(failed, dtype=np.int32)}

    def _fetch(self, batch: BatchRequest) -> dict[str, np.ndarray]:
        done, failed = [], []
        for host, key in self._due(self._fetches, batch.step_id, batch.storage_fetches):
            if self.lose_fetch() or key not in self.storage:
                self._host[host] = -9
                failed.append(host)
            else:
                self._host[host] = self.storage[key]
                done.append(host)
        return {"fetched": np.array(done, dtype=np.int32), "missed": np.array(failed, dtype=np.int32)}

    def _due(self, queue: deque, step_id: int, new: NamedBlocks) -> list[tuple[int, tuple[bytes, int]]]:
        keys = zip(new.blocks.tolist(), new.hashes, strict=True)
        queue.extend((step_id, host, (block_hash, group)) for (group, host), block_hash in keys)
        due = []
        while queue and self.storage_steps is not None and queue[0][0] + self.storage_steps <= step_id:
            due.append(queue.popleft()[1:])
        return due

    def _compute(self, batch: BatchRequest) -> np.ndarray:
        inputs = np.split(batch.token_ids, np.cumsum(batch.query_lens)[:-1])
        sampled = np.full(len(batch.rows), -1, dtype=np.int32)
        for index, row in enumerate(batch.rows.tolist()):
            start, tokens = int(batch.starts[index]), inputs[index].copy()
            tokens[tokens == LAST_SAMPLED] = self._last[row]
            self._write(row, start, tokens)
            if self._lost.intersection(self._tables.array[row].ravel().tolist()):
                continue
            if batch.sample[index]:
                sampled[index] = next_token(self._read(row, start + len(tokens)))
                self._last[row] = sampled[index]
        return sampled

    def _write(self, row: int, start: int, tokens: np.ndarray) -> None:
        size = self.card.layout.block_size
        for position, token in enumerate(tokens.tolist(), start):
            for block in self._tables.array[row, :, position // size].tolist():
                if block >= 0:
                    self._arena[block, position % size] = token
                    if position % size == 0:
                        self._lost.discard(block)  # it was given to somebody else

    def _read(self, row: int, count: int) -> list[int]:
        """The tokens as the first group holds them; every group must hold the same where it may be looked at."""
        size = self.card.layout.block_size
        rows: list[list[int]] = []
        for group, policy in enumerate(self.card.plan.policies):
            tokens = []
            for position in range(count):
                visible = policy.is_full or position < policy.sink or count - 1 - position < policy.window
                block = int(self._tables.array[row, group, position // size])
                if visible:
                    assert block >= 0, f"group {group} of row {row} lost the block of token {position}"
                    tokens.append(int(self._arena[block, position % size]))
                else:
                    tokens.append(rows[0][position])
            rows.append(tokens)
        assert all(tokens == rows[0] for tokens in rows), "groups hold different tokens for one sequence"
        return rows[0]


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
