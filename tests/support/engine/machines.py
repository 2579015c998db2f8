"""Requests that come, end and are given up in any order, over an engine with simulated workers and tiers.

State machines for Hypothesis: after every step of a random sequence the books balance, tokens are right so far, and the
index is told the truth.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engine.mixed_engine import make_mixed_engine
from support.engine.mixed_model import MixedLayer, MixedModel, mixed_models
from support.engine.simulated_copies import holds
from support.engine.simulated_engine import BLOCK, make_engine, request, run
from support.engine.simulated_model import often_again, sure_of_one
from support.engine.simulation import SimulatedExecutor, SimulatedLookup, Storage, continuation
from support.index.model import Heard, assert_match_serves, servable_depths, stated

from headwise.cache_controller.block_hash import extend_hashes, hash_seed
from headwise.cache_controller.leases import Leases
from headwise.cache_controller.memories import HOST
from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.cache_controller.stored_blocks import AUDIT_S
from headwise.errors import EngineDiedError
from headwise.prompt_turns import Present
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.operations import NewWeights
from headwise.runtime.protocol.batch import LAST_SAMPLED
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, Retention
from headwise.runtime.protocol.weights import Weights

BROKEN_FAMILY, BREAKS_AT = 3, 12
"""The model has no numbers for what comes after so many tokens of that family of prompts."""

NO_ROOM = "no room for 9 tokens"
FAULTS = NO_ROOM, "a copy to the device of"
"""What an engine may die of: rules have it happen."""


class EngineMachine(RuleBasedStateMachine):
    """Requests come, steps end late, clients leave; tokens and books must be right whatever the order."""

    policies: ClassVar = (FULL, HeadPolicy(window=5, sink=2))
    host: ClassVar[dict[str, object]] = {}
    tiers: ClassVar = ("device", "all")
    num_blocks: ClassVar = 28
    ahead: ClassVar = 1
    """For how many times ``speculation`` tokens there may be room behind a sequence's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self.weights = 0
        self._open()
        self.requests: dict[str, GenerateRequest] = {}
        self.broken: set[str] = set()
        self.paths: dict[str, list[bytes]] = {}
        self.expected: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}

    def _open(self) -> None:
        options = {"max_rows": 3, "eager": False, "is_late": self.is_late, "max_batched_tokens": 9, **self.host}
        self.engine, self.executor = self._make_engine(options)
        self.heard = Heard(self.engine.cache)

    def _make_engine(self, options: dict[str, Any]) -> tuple[EngineCore, SimulatedExecutor]:
        engine, executor = make_engine(self.policies, num_blocks=self.num_blocks, **options)
        executor.model.breaks = lambda tokens: tokens[0] // 10 == BROKEN_FAMILY and len(tokens) >= BREAKS_AT
        return engine, executor

    def _continuation(self, prompt: list[int], count: int) -> list[int]:
        """What the model says after ``prompt``."""
        return continuation(prompt, count)

    def _is_broken(self, family: int, length: int) -> bool:
        """Whether the model has no numbers within so many tokens of that family."""
        return family == BROKEN_FAMILY and length > BREAKS_AT

    @initialize(is_late=st.booleans())
    def overlap(self, is_late: bool) -> None:
        """Whether steps begin before the last ones have ended."""
        self.is_late = is_late
        self._open()

    @rule(
        family=st.integers(1, BROKEN_FAMILY),
        length=st.integers(1, 30),
        count=st.integers(1, 12),
        priority=st.integers(0, 1),
        retention=st.sampled_from([None, Retention(2.0), Retention(3600.0, 9)]),
        salt=st.sampled_from(["", "a tenant's"]),
    )
    def arrive(
        self,
        family: int,
        length: int,
        count: int,
        priority: int,
        retention: Retention | None = None,
        salt: str = "",
    ) -> None:
        self._arrive(family, length, count, priority, retention, salt)

    def _arrive(
        self,
        family: int,
        length: int,
        count: int,
        priority: int = 0,
        retention: Retention | None = None,
        salt: str = "",
    ) -> None:
        name = f"r{len(self.expected)}"
        count = min(count, self.engine.card.max_model_len - length)
        prompt = [family * 10 + i % 7 for i in range(length)]
        plain = self._request(name, prompt, count, priority)
        self.requests[name] = replace(plain, retention=retention, cache_salt=salt)
        self.engine.add(self.requests[name])
        if self._is_broken(family, length + count):
            self.broken.add(name)
            count = max(0, BREAKS_AT - length)
        self.expected[name], self.got[name] = self._continuation(prompt, count), []
        self.paths[name] = []
        tokens = np.array([*prompt, *self.expected[name]], dtype=np.int32)
        tokens[: len(prompt)] = self.requests[name].prompt_token_ids
        seed, items = hash_seed(self.engine.card.identity, salt, ""), self.requests[name].extra_keys
        extend_hashes(self.paths[name], seed, tokens, BLOCK, items)

    def _request(self, name: str, prompt: list[int], count: int, priority: int) -> GenerateRequest:
        return request(name, prompt, count, priority=priority)

    @rule()
    def step(self) -> None:
        self._step(0)

    def _step(self, timeout_s: float | None) -> None:
        try:
            self._take(self.engine.step(timeout_s))
        except EngineDiedError as error:
            if not any(fault in str(error) for fault in FAULTS):
                raise
            self.engine.fail_all(str(error))
            self._start_anew()

    def _start_anew(self) -> None:
        """With new workers and an empty cache; clients send again what did not end, with what they have of it."""
        self._open()
        for name in self.requests.keys() - self.ended.keys():
            self.engine.add(replace(self.requests[name], output_token_ids=tuple(self.got[name])))

    @rule()
    def the_worker_has_no_memory_for_a_step(self) -> None:
        self.executor.model.fails = MemoryError(NO_ROOM)

    @rule()
    def nobody_looks_for_an_hour(self) -> None:
        self.engine._clock.skip(3600.0)

    @precondition(lambda self: self.executor.queue)
    @rule()
    def a_step_ends(self) -> None:
        self.executor.finish_one()

    @rule(action=st.sampled_from(["sleep", "wake", "wake"]))
    def sleep_or_wake(self, action: str) -> None:
        self.engine.operate(action)

    @rule(keeps_running=st.booleans(), at_once=st.booleans())
    def other_weights_come(self, keeps_running: bool, at_once: bool) -> None:
        """Which say the same, but what others have computed is not theirs."""
        self.weights += 1
        version = str(self.weights)
        card = replace(self.engine.card, identity=f"simulated {version}", weights=version)
        operation, engine = (
            self.engine.change_weights(NewWeights(Weights(version, version), card, keeps_running)),
            self.engine,
        )
        while at_once and not operation.is_done and self.engine is engine:
            self._step(None)

    @rule(data=st.data())
    def forget(self, data) -> None:
        self.engine.operate("reset_cache", data.draw(st.sampled_from(self.tiers)))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.expected))))

    @invariant()
    def books_balance_and_no_step_in_flight_touches_a_free_block(self) -> None:
        self.engine.cache.check_integrity()
        self.executor.poison(self.engine.cache.pool.free_blocks)
        if self.engine.cache.host.is_there:
            self.executor.poison_host(self.engine.cache.host.pool.free_blocks)
        is_state = self.engine.cache.windows.is_state
        for row in (sequence.row for sequence in self.engine.resources.running):
            tables = self.engine.cache.tables[row] >= 0
            held = int(
                tables[~is_state].sum() + tables[is_state].any(axis=1).sum()
            )  # checkpoints only where there is room
            length = int(self.engine.resources.table.length[row]) + self.ahead * self.engine.config.speculation
            assert held <= self.engine.cache.peak_blocks(length)
        for batch in self.executor.queue:
            assert self.engine.cache._open[batch.rows].all()

    @invariant()
    def the_index_is_told_the_truth(self) -> None:
        cache = self.engine.cache
        self.heard.hear(self.engine.drain_index_updates())
        is_at_rest = not cache._open.any()
        assert not is_at_rest or self.heard.said == stated(cache.resident_paths())
        for name in sorted(self.paths)[-3:]:
            path = self.paths[name]
            served = servable_depths(cache, path)
            assert_match_serves(cache, path, served)
            said = self.heard.depths(path)
            assert all(claimed <= depth for claimed, depth in zip(said, served, strict=True))
            assert not is_at_rest or said == served
        if self.executor.is_asleep:
            has_full = bool(
                cache.windows.is_full.any()
            )  # without, a device is said to have all that there is a node of
            device = [can_go_on for (tier, _), can_go_on in self.heard.said.items() if tier == "device"]
            assert not any(has_full or can_go_on for can_go_on in device)
            assert self.engine.cache.pool.num_free == self.engine.cache.pool.num_blocks

    @invariant()
    def tenants_are_those_of_what_waits_for_its_turn(self) -> None:
        waiting = self.engine.resources.waiting
        present = Present().with_more((each.tenant, each.lacking) for each in waiting._queue.items())
        assert waiting.present.tenants == present.tenants

    @invariant()
    def tokens_are_right_so_far(self) -> None:
        for name, tokens in self.got.items():
            assert tokens == self.expected[name][: len(tokens)]

    def _take(self, deltas) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ended
            self.got[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                self.ended[delta.request_id] = delta.finish_reason

    def _come_to_rest(self) -> None:
        for _ in range(5_000):
            if not self.engine.has_work():
                break
            self._step(None)

    def teardown(self) -> None:
        self.engine.operate("wake")
        self._come_to_rest()
        if self.ended.keys() != self.expected.keys():  # an engine that was started anew while it slept
            self._come_to_rest()
        assert self.ended.keys() == self.expected.keys()
        for name, reason in self.ended.items():
            assert reason is FinishReason.ABORT or self.got[name] == self.expected[name]
            assert reason is not FinishReason.ERROR or name in self.broken
            assert reason is not FinishReason.LENGTH or name not in self.broken
        assert self.engine.cache.pool.num_held == 0


class SpeculatingMachine(EngineMachine):
    """A model that repeats its prompt, but not always; steps have guesses of that, some of which are wrong."""

    host: ClassVar = {"speculation": 5, "max_batched_tokens": 20}

    def _make_engine(self, options: dict[str, Any]) -> tuple[EngineCore, SimulatedExecutor]:
        engine, executor = super()._make_engine(options)
        executor.model.logits_of = partial(sure_of_one, following=often_again)
        return engine, executor

    def _continuation(self, prompt: list[int], count: int) -> list[int]:
        return continuation(prompt, count, often_again)


class DraftingMachine(SpeculatingMachine):
    """Guesses are of the model's own layer, too, which has a place of its own in each block."""

    num_blocks: ClassVar = 40
    ahead: ClassVar = 2

    def _make_engine(self, options: dict[str, Any]) -> tuple[EngineCore, SimulatedExecutor]:
        return super()._make_engine({**options, "drafts": True})


class StatesMachine(EngineMachine):
    """A state beside attention, with checkpoints after every second block."""

    policies: ClassVar = (FULL, STATE)
    host: ClassVar = {"checkpoint_tokens": 8}


class TieredMachine(EngineMachine):
    """The same with a host tier, whose copies are late and fail at times."""

    host: ClassVar = {"host_blocks": 40, "write_policy": "write_through"}

    @rule(steps=st.integers(0, 3))
    def copies_take(self, steps: int) -> None:
        self.executor.faults.store_steps = steps

    @rule(data=st.randoms(use_true_random=False), load=st.sampled_from([0, 0.3]), store=st.sampled_from([0, 0.3]))
    def copies_fail(self, data, load: float, store: float) -> None:
        self.executor.faults.lose_load = lambda: data.random() < load
        self.executor.faults.lose_store = lambda: data.random() < store

    @rule(waits=st.integers(1, 3))
    def a_load_is_late(self, waits: int) -> None:
        """Given up, and over once that is waited for; or not even then."""
        self.executor.faults.late_loads = waits

    @rule()
    def all_end_and_the_device_forgets(self) -> None:
        self._come_to_rest()
        self.engine.cache.pool.evict_all()

    @precondition(lambda self: self.paths)
    @rule(data=st.data(), is_growing=st.booleans())
    def another_engine_asks_for_a_lease(self, data, is_growing: bool) -> None:
        path = self.paths[data.draw(st.sampled_from(sorted(self.paths)))]
        groups = len(self.engine.card.plan.groups)
        wanted = np.array([[data.draw(st.booleans()) for _ in range(groups)] for _ in path], dtype=np.bool_)
        wanted = wanted.reshape(-1, groups)
        self.leases.ask(b"%d" % len(self.leases), path, wanted, self.engine._clock() + 5.0, is_growing)

    @rule(data=st.data(), ends=st.booleans())
    def a_reader_is_done_or_silent(self, data, ends: bool) -> None:
        for lease in list(self.leases._leases.values()):
            if lease.is_growing and data.draw(st.booleans()):
                self.leases.grown(lease.name)
            elif ends and data.draw(st.booleans()):
                assert self.leases.end(lease.name, lease.grant) is not lease.is_void
        self.leases.advance(self.engine._clock())

    @property
    def leases(self) -> Leases:
        return self.engine.cache.host.leases

    @invariant()
    def what_is_leased_stays_what_it_is(self) -> None:
        """Read as other engines read it, without a word."""
        leased, arena = {}, self.executor._copies._arena.array.reshape(self.engine.cache.host.pool.num_blocks, -1)
        for lease in self.leases._leases.values():
            for column, group, block, memory in lease.blocks.tolist():
                assert memory == HOST, "nobody who reads a device is here"
                key = lease.grant, lease.hashes[column], group
                leased[key] = self.read.get(key, arena[block].tobytes())
                assert arena[block].tobytes() == leased[key]
                assert holds(arena, block, arena.shape[1])
        self.read = leased

    def _open(self) -> None:
        super()._open()
        self.read: dict[tuple[int, bytes, int], bytes] = {}

    def teardown(self) -> None:
        self.executor.faults.lose_load = lambda: False
        self._end_leases()
        super().teardown()
        self._end_leases()
        assert self.engine.cache.host.pool.num_held == 0

    def _end_leases(self) -> None:
        for lease in list(self.leases._leases.values()):
            self.leases.end(lease.name, lease.grant)


class SpeculatingStatesMachine(SpeculatingMachine):
    """A state beside attention, of which none is left behind guesses."""

    policies: ClassVar = (FULL, STATE)
    host: ClassVar = {**SpeculatingMachine.host, "checkpoint_tokens": 8}


class SpeculatingTieredMachine(SpeculatingMachine, TieredMachine):
    """The same with a host tier."""

    host: ClassVar = {**SpeculatingMachine.host, "host_blocks": 40, "write_policy": "write_back"}


class DraftingStatesMachine(DraftingMachine):
    """The same beside states."""

    policies: ClassVar = (FULL, STATE)
    host: ClassVar = SpeculatingStatesMachine.host


class DraftingTieredMachine(DraftingMachine, TieredMachine):
    """The same with a host tier."""

    host: ClassVar = SpeculatingTieredMachine.host


class SelectiveMachine(TieredMachine):
    host: ClassVar = {"host_blocks": 40, "write_policy": "write_through_selective"}


class WriteBackMachine(TieredMachine):
    host: ClassVar = {"host_blocks": 40, "write_policy": "write_back"}


@cache
def served_before(policies) -> Storage:
    """What storage has of the machine's families after an engine served them."""
    storage: Storage = {}
    engine, _ = make_engine(policies, num_blocks=90, host_blocks=90, storage=storage, write_policy="write_through")
    for length in (9, 17, 30):
        for family in (1, 2):
            engine.add(request(f"{family} {length}", [family * 10 + i % 7 for i in range(length)], 1))
            run(engine)
    return storage


class StoredMachine(TieredMachine):
    """The same with storage behind the host, that is late, fails, loses blocks, and hangs at times."""

    host: ClassVar = {"host_blocks": 40, "write_policy": "write_through", "prefetch": "wait_complete"}
    tiers: ClassVar = ("device", "storage", "all")

    def __init__(self) -> None:
        self.host = {**self.host, "storage": self._storage()}
        super().__init__()

    def _storage(self) -> Storage:
        """What is stored when the first engine starts."""
        return dict(served_before(self.policies))

    @property
    def lookup(self) -> SimulatedLookup:
        return self.engine._lookup

    @rule(steps=st.sampled_from([0, 1, 3, None]))
    def storage_takes(self, steps: int | None) -> None:
        self.executor.faults.storage_steps = steps

    @rule(data=st.randoms(use_true_random=False), fetch=st.sampled_from([0, 0.3]), put=st.sampled_from([0, 0.3]))
    def storage_fails(self, data, fetch: float, put: float) -> None:
        self.executor.faults.lose_fetch = lambda: data.random() < fetch
        self.executor.faults.lose_put = lambda: data.random() < put

    @rule(data=st.randoms(use_true_random=False))
    def storage_loses_blocks(self, data) -> None:
        for key in list(self.executor.storage):
            if data.random() < 0.3:
                del self.executor.storage[key]

    @rule(hangs=st.booleans())
    def the_lookup_hangs(self, hangs: bool) -> None:
        self.lookup.hangs = hangs

    @rule()
    def the_engine_starts_anew(self) -> None:
        """All end, device and host forget: what is served after that came from storage."""
        self.all_end_and_the_device_forgets()
        self.engine.cache.reset()

    def teardown(self) -> None:
        self._end_leases()
        EngineMachine.teardown(self)  # also while storage hangs
        self.executor.faults.storage_steps = 0
        self.executor.faults.late_loads, self.executor.model.fails = 0, None  # what was to come still
        while self.engine.cache.host.pool.num_held:
            self.engine.add(request("last" + str(self.engine._clock()), [90], 2))
            self.executor.faults.lose_load = lambda: False
            run(self.engine)
        assert self.engine.cache.host.pool.num_held == 0
        self._what_storage_is_said_to_have_is_there()

    def _what_storage_is_said_to_have_is_there(self) -> None:
        """Whatever it lost, once the engine had time to ask again, although no request came."""
        self.lookup.hangs = False
        until = self.engine._clock() + 2 * AUDIT_S + 1
        while self.engine._clock() < until:
            self.heard.hear(self.engine.drain_index_updates())
        tree = self.engine.cache.tree
        for block_hash, node in tree.nodes.items():
            for group in np.flatnonzero(tree.storage.held[node]).tolist():
                assert (block_hash, group) in self.executor.storage
        self.the_index_is_told_the_truth()


class TieredStatesMachine(TieredMachine):
    policies: ClassVar = (FULL, STATE)
    host: ClassVar = {"host_blocks": 40, "write_policy": "write_through_selective", "checkpoint_tokens": 8}


class StoredStatesMachine(StoredMachine):
    policies: ClassVar = (FULL, STATE, HeadPolicy(window=5))
    num_blocks: ClassVar = 40
    host: ClassVar = {**StoredMachine.host, "checkpoint_tokens": 8}


class BestEffortMachine(StoredMachine):
    host: ClassVar = {"host_blocks": 40, "write_policy": "write_through_selective", "prefetch": "best_effort"}


class TimeoutMachine(StoredMachine):
    host: ClassVar = {"host_blocks": 20, "write_policy": "write_back", "prefetch_timeout_s": 1.5}


class CrowdedMachine(StoredMachine):
    """A request may take all of the device, and have to wait within the batch for what a copy holds of it."""

    policies: ClassVar = (FULL,)
    num_blocks: ClassVar = 8

    @rule(family=st.integers(1, 2), length=st.integers(29, 31), forget=st.booleans())
    def one_as_long_as_the_device_arrives(self, family: int, length: int, forget: bool) -> None:
        self._arrive(family, length, 1)
        self._step(0)
        if forget:
            self.engine.operate("reset_cache", "storage")
            self._step(0)

    @rule(length=st.integers(4, 6))
    def a_copy_keeps_a_block(self, length: int) -> None:
        self.all_end_and_the_device_forgets()
        self.executor.faults.store_steps = 9
        self._arrive(4, length, 1)
        while self.engine.has_requests and self.engine.has_work():
            self._step(0)
            self.executor.finish_one()
        self._step(0)


class PipelinedMachine(EngineMachine):
    """The same, scheduled for workers in three stages: up to four steps are on their way, at most two of a sequence
    that decodes; and where there are drafts, each has known tokens alone."""

    host: ClassVar = {"pipeline_parallel_size": 3, "max_batched_tokens": 18}

    @invariant()
    def few_steps_are_on_their_way(self) -> None:
        assert len(self.executor.queue) <= 4
        sampled = [row for batch in self.executor.queue for row in batch.rows[batch.sample].tolist()]
        most = 1 if self.engine.config.speculation else 2
        assert all(sampled.count(row) <= most for row in sampled)
        if self.engine.config.speculation:
            assert all((batch.token_ids != LAST_SAMPLED).all() for batch in self.executor.queue)


class PipelinedStatesMachine(PipelinedMachine, SpeculatingStatesMachine):
    """The same, with states beside attention, and guesses."""

    host: ClassVar = {**SpeculatingMachine.host, **PipelinedMachine.host}


class PipelinedDraftingMachine(PipelinedMachine, DraftingTieredMachine):
    """The same with a host tier, and drafts of the model's own."""

    host: ClassVar = {**DraftingTieredMachine.host, **PipelinedMachine.host}


class PipelinedStoredMachine(PipelinedMachine, SpeculatingMachine, StoredMachine):
    """The same with host and storage."""

    host: ClassVar = {**SpeculatingMachine.host, **StoredMachine.host, **PipelinedMachine.host}


class MixedMachine(StoredMachine):
    """The same over a model that is drawn: layers with members of any kinds, sizes and policies."""

    model = MixedModel((MixedLayer((FULL,), 1),))
    host: ClassVar = {**StoredMachine.host, "checkpoint_tokens": 8}

    def _storage(self) -> Storage:
        return {}

    def _make_engine(self, options: dict[str, Any]) -> tuple[EngineCore, SimulatedExecutor]:
        model = self.model
        engine, executor = make_mixed_engine(model, **options)
        executor.model.breaks = lambda seen: self._tells_broken(seen[0]) and model.tokens_of(seen) >= BREAKS_AT
        return engine, executor

    def _tells_broken(self, first: int) -> bool:
        return self.model.always_sees_the_first and first // 10 == BROKEN_FAMILY

    @initialize(model=mixed_models())
    def draw_a_model(self, model: MixedModel) -> None:
        self.model = model
        self.host["storage"].clear()
        self._open()

    @rule(family=st.integers(1, 2), length=st.integers(5, 30), is_on_host=st.booleans())
    def what_left_the_device_is_asked_for_again(self, family: int, length: int, is_on_host: bool) -> None:
        for _ in range(2):
            if is_on_host:
                self.all_end_and_the_device_forgets()
            else:
                self.the_engine_starts_anew()
            self._arrive(family, length, 2)
            for _ in range(6):
                self._step(0)
                self.executor.finish_one()

    def _continuation(self, prompt: list[int], count: int) -> list[int]:
        return self.model.continuation(prompt, count)

    def _is_broken(self, family: int, length: int) -> bool:
        return self.model.always_sees_the_first and super()._is_broken(family, length)


MACHINES = [
    SpeculatingMachine,
    SpeculatingStatesMachine,
    SpeculatingTieredMachine,
    DraftingMachine,
    DraftingStatesMachine,
    DraftingTieredMachine,
    StatesMachine,
    TieredStatesMachine,
    StoredStatesMachine,
    TieredMachine,
    SelectiveMachine,
    WriteBackMachine,
    StoredMachine,
    BestEffortMachine,
    TimeoutMachine,
    CrowdedMachine,
    PipelinedMachine,
    PipelinedStatesMachine,
    PipelinedDraftingMachine,
    PipelinedStoredMachine,
    MixedMachine,
]
