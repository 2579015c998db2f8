from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support.engine.machines import MACHINES, EngineMachine, MixedMachine
from support.engine.mixed_model import MixedLayer, MixedModel
from support.engine.simulated_engine import BLOCK, LetterTokenizer, make_engine, request, run
from support.engine.simulation import (
    EOS,
    VOCAB,
    SimulatedExecutor,
    Storage,
    continuation,
    simulated_card,
)
from support.index.model import Said, stated

from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.storage_tier import PROBE_S
from headwise.cache_controller.stored_blocks import AUDIT_S
from headwise.errors import EngineDiedError, InvalidRequestError, OverloadedError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.loader.detokenizer import ByteLevelDetokenizer
from headwise.runtime.protocol.copies import CopyReport
from headwise.runtime.protocol.messages import EngineLoad
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, GenerationResult, SamplingParams


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("max_batched_tokens", [1, 3, 64])
def test_chunks_and_batches_do_not_change_tokens(async_scheduling: bool, max_batched_tokens: int) -> None:
    engine, _ = make_engine(
        num_blocks=64, async_scheduling=async_scheduling, max_batched_tokens=max_batched_tokens, max_num_seqs=4
    )
    prompts = {f"r{i}": [i + 1] * (3 * i + 1) for i in range(7)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 9))
    results = run(engine)
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 9)
        assert results[name].finish_reason is FinishReason.LENGTH


def test_a_shared_prefix_is_computed_once_and_counted() -> None:
    engine, _ = make_engine()
    prompt = list(range(1, 14))
    engine.add(request("first", prompt, 3))
    assert run(engine)["first"].usage.cached_tokens == 0
    engine.add(request("second", prompt, 3))
    second = run(engine)["second"]
    assert second.usage.cached_tokens == 12
    assert second.token_ids == continuation(prompt, 3)


def test_one_tenants_salt_never_hits_anothers_blocks() -> None:
    engine, _ = make_engine()
    prompt = list(range(1, 14))
    engine.add(request("mine", prompt, 3, salt="a"))
    run(engine)
    engine.add(request("theirs", prompt, 3, salt="b"))
    assert run(engine)["theirs"].usage.cached_tokens == 0


def test_a_small_pool_preempts_and_every_request_still_gets_its_tokens() -> None:
    engine, _ = make_engine(num_blocks=9, prefix_caching=False)
    prompts = {f"r{i}": [i + 1] * 6 for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 20))
    results = run(engine)
    assert engine.stats()["requests"]["preemptions"] > 0
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 20)


def test_a_more_urgent_request_takes_the_place_of_a_running_one() -> None:
    engine, _ = make_engine(num_blocks=8)
    engine.add(request("slow", [1] * 8, 20, priority=1))
    for _ in range(3):
        engine.step(None)
    engine.add(request("urgent", [2] * 8, 20, priority=0))
    order = []
    while engine.has_work():
        order += [delta.request_id for delta in engine.step(None) if delta.finish_reason]
    assert order == ["urgent", "slow"]


def test_a_more_urgent_request_goes_before_the_next_chunk_of_a_prompt() -> None:
    engine, _ = make_engine(num_blocks=64, max_batched_tokens=8, async_scheduling=False)
    engine.add(request("long", [1] * 60, 5, priority=1))
    engine.step(None)
    engine.add(request("urgent", [2] * 6, 2, priority=0))
    deltas = [delta for _ in range(2) for delta in engine.step(None)]
    assert [delta.request_id for delta in deltas] == ["urgent", "urgent"]
    assert run(engine)["long"].token_ids == continuation([1] * 60, 5)
    assert engine.stats()["requests"]["preemptions"] == 0


def test_text_stops_before_a_stop_string_that_spans_tokens() -> None:
    engine, _ = make_engine()
    expected = LetterTokenizer().push(continuation([5, 6], 8))
    engine.add(request("r", [5, 6], 30, stop=(expected[3:6],)))
    result = run(engine)["r"]
    assert result.text == expected[: expected.index(expected[3:6])]
    assert result.finish_reason is FinishReason.STOP


def test_a_stop_id_ends_a_request_while_the_next_step_is_in_flight() -> None:
    engine, _ = make_engine()
    tokens = continuation([5, 6], 8)
    engine.add(request("r", [5, 6], 30, stop_token_ids=(tokens[4],)))
    result = run(engine)["r"]
    assert result.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert result.finish_reason is FinishReason.STOP


def test_a_request_starts_while_a_finished_one_is_still_in_a_step_in_flight() -> None:
    engine, executor = make_engine(num_blocks=32, eager=False)
    engine.add(request("stops", [5, 6], 30, stop_token_ids=(continuation([5, 6], 1)[0],)))
    engine.step(0)
    executor.finish_one()
    assert [delta.finish_reason for delta in engine.step(0)] == [FinishReason.STOP]
    assert len(executor.queue) == 1  # the step that was sent before the end was known
    engine.add(request("next", [7, 8], 3))
    engine.step(0)
    assert [new.request_id for new in executor.queue[-1].new_sequences] == ["next"]
    assert run(engine)["next"].token_ids == continuation([7, 8], 3)


def test_an_abort_frees_its_blocks_and_leaves_the_others_alone() -> None:
    engine, _ = make_engine(num_blocks=32, eager=False)
    engine.add(request("stays", [1] * 5, 12))
    engine.add(request("goes", [2] * 5, 12))
    assert engine.step(0) == []
    engine.abort("goes")
    engine.abort("never came")
    results = run(engine)
    assert results["goes"].finish_reason is FinishReason.ABORT
    assert results["stays"].token_ids == continuation([1] * 5, 12)


def test_a_failed_step_fails_its_requests_and_no_other() -> None:
    engine, executor = make_engine(num_blocks=32, max_batched_tokens=5, async_scheduling=False)
    engine.add(request("fails", [1] * 5, 4))
    engine.add(request("works", [2] * 5, 4))
    executor.model.fails = ValueError("boom")
    deltas = engine.step(None)
    why = "ValueError in step 1: boom"
    assert [(d.request_id, d.finish_reason, d.error) for d in deltas] == [("fails", FinishReason.ERROR, why)]
    assert run(engine)["works"].token_ids == continuation([2] * 5, 4)


def test_a_request_whose_logits_are_no_numbers_fails_and_the_others_of_its_batch_go_on() -> None:
    engine, executor = make_engine(num_blocks=32)
    executor.model.breaks = lambda tokens: tokens[0] == 2 and len(tokens) == 8
    for first in (1, 2, 3):
        engine.add(request(f"r{first}", [first] * 5, 9))
    deltas = [delta for _ in range(100) if engine.has_work() for delta in engine.step(None)]
    errors = {delta.request_id: delta.error for delta in deltas if delta.finish_reason is FinishReason.ERROR}
    assert errors == {"r2": "the logits are not finite: the model or its cache is broken"}
    for first, count in ((1, 9), (2, 3), (3, 9)):
        tokens = [token for delta in deltas if delta.request_id == f"r{first}" for token in delta.token_ids]
        assert tokens == continuation([first] * 5, count)
    assert engine.stats()["requests"]["failed"] == 1
    assert engine.cache.pool.num_held == 0


@pytest.mark.parametrize("tiers", [{}, {"host_blocks": 64, "write_policy": "write_through"}])
def test_what_a_request_computed_before_its_logits_were_no_numbers_serves_nobody(tiers: dict[str, Any]) -> None:
    engine, executor = make_engine((FULL, HeadPolicy(window=5)), num_blocks=64, **tiers)
    shared, prompt = list(range(1, 10)), [*range(1, 10), *range(20, 40)]
    engine.add(request("before", shared, 1))
    run(engine)
    engine.add(request("broken", prompt, 9))
    executor.model.breaks = lambda tokens: len(tokens) > len(prompt) + 4
    deltas = [delta for _ in range(100) if engine.has_work() for delta in engine.step(None)]
    assert deltas[-1].finish_reason is FinishReason.ERROR
    engine.cache.check_integrity()
    executor.model.breaks = lambda tokens: False
    engine.add(request("again", prompt, 9))
    answer = run(engine)["again"]
    assert answer.token_ids == continuation(prompt, 9)
    assert answer.usage.cached_tokens == 8  # of the blocks that were there before


def test_what_a_request_computed_before_its_logits_were_no_numbers_is_deleted_from_storage(tmp_path: Path) -> None:
    shared, prompt = list(range(1, 10)), [*range(1, 10), *range(20, 40)]
    policies = (FULL, HeadPolicy(window=5))
    tiers: dict[str, Any] = {
        "host_blocks": 64, "write_policy": "write_through", "prefetch": "wait_complete", "storage_timeout_s": 1e6
    }  # fmt: skip
    engine, executor = make_engine(policies, num_blocks=64, storage=tmp_path, **tiers)
    engine.add(request("before", shared, 1))
    run(engine)
    engine.add(request("broken", prompt, 9))
    executor.model.breaks = lambda tokens: len(tokens) > len(prompt) + 4
    deltas = [delta for _ in range(100) if engine.has_work() for delta in engine.step(None)]
    assert deltas[-1].finish_reason is FinishReason.ERROR
    for _ in range(100):  # until the copies are through
        engine.step(0)
    engine.cache.check_integrity()
    executor.close()
    later, _ = make_engine(policies, num_blocks=64, storage=tmp_path, **tiers)
    later.add(request("again", prompt, 9))
    answer = run(later)["again"]
    assert answer.token_ids == continuation(prompt, 9)
    assert answer.usage.cached_tokens == 8  # of the blocks that were there before


def late_load(waits: int) -> tuple[EngineCore, SimulatedExecutor]:
    """An engine with a request in the works whose load is over after so many waits in vain."""
    engine, executor = make_engine(num_blocks=16, host_blocks=64, write_policy="write_through")
    engine.add(request("first", list(range(1, 14)), 3))
    run(engine)
    engine.cache.reset(("device",))
    executor.faults.late_loads = waits
    engine.add(request("second", list(range(1, 14)), 3))
    return engine, executor


def test_a_load_that_is_over_when_it_was_given_up_is_computed_anew() -> None:
    engine, _ = late_load(1)
    assert run(engine)["second"].token_ids == continuation(range(1, 14), 3)
    assert engine.stats()["host"]["failed_blocks"] == 3


def test_a_load_that_outlives_being_given_up_ends_the_worker() -> None:
    engine, _ = late_load(2)
    with pytest.raises(EngineDiedError, match="LayerSwapTimeoutError: a copy to the device of 3 blocks was given up"):
        run(engine)


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError("no device"), KeyError(3)])
def test_what_a_step_raises_while_its_copies_are_under_way_ends_the_worker(error: Exception) -> None:
    engine, executor = late_load(0)
    executor.model.fails = error
    with pytest.raises(EngineDiedError, match=f"rank 0 failed in step .*: {type(error).__name__}"):
        run(engine)


def test_a_result_without_word_of_the_loads_that_its_step_carried_is_not_believed() -> None:
    engine, executor = late_load(0)
    executor.changed = lambda batch, result: replace(result, copies=CopyReport(), error="it went wrong")
    with pytest.raises(EngineDiedError, match="nothing is known of the blocks that step"):
        run(engine)


def test_fail_all_ends_every_request_with_the_error() -> None:
    engine, _ = make_engine()
    for name in ("a", "b"):
        engine.add(request(name, [1, 2, 3], 9))
    engine.step(None)
    assert {(d.request_id, d.error) for d in engine.fail_all("worker 1 died") if d.error} == {
        ("a", "worker 1 died"),
        ("b", "worker 1 died"),
    }


def test_what_can_never_be_served_is_refused_with_what_fits() -> None:
    engine, _ = make_engine(num_blocks=4, max_queued=1)
    with pytest.raises(InvalidRequestError, match="20 tokens were asked for; at most 16 fit"):
        engine.add(request("big", [1] * 10, 10))
    engine.add(request("one", [1], 2))
    with pytest.raises(InvalidRequestError, match="'one' is already being served"):
        engine.add(request("one", [1], 2))
    with pytest.raises(OverloadedError, match="max_queued"):
        engine.add(request("two", [1], 2))
    assert run(engine)["one"].token_ids == continuation([1], 2)


class ByteTokenizer:
    """A token is one byte: of a two-byte character, or a letter."""

    eos_token_ids = (EOS,)

    def detokenizer(self, shown_tokens: tuple[str, ...] = ()) -> ByteLevelDetokenizer:
        return ByteLevelDetokenizer(lambda token: "\u00c3\u00a9abx"[token % 5])  # 0xC3 0xA9 are "é"


def sampling_engine() -> EngineCore:
    card = simulated_card([FULL, HeadPolicy(window=5, sink=2)], block_size=BLOCK, num_blocks=64, max_rows=4)
    config = EngineConfig(block_size=BLOCK, max_batched_tokens=16)
    executor = SimulatedExecutor(card)
    executor.model.logits_of = lambda tokens: np.random.default_rng(tokens).normal(0, 2, VOCAB).astype(np.float32)
    return EngineCore(config, card, ByteTokenizer(), executor, clock=lambda: 0.0)


CUT = {
    "greedy to its length": {"temperature": 0.0, "ignore_eos": True},
    "sampled, with logprobs": {"temperature": 1.3, "top_p": 0.9, "logprobs": 2},
    "to a stop string": {"temperature": 1.0, "stop": ("bb", "aé", "xxb")},
    "to a stop id": {"temperature": 1.0, "stop_token_ids": (11, 23, 54, 77, 91)},
    "to the model's end": {"temperature": 2.0},
}


SEEDS = (0, 2)


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 3))])
@pytest.mark.parametrize("how", CUT)
def test_a_request_that_lost_its_engine_goes_on_elsewhere_as_if_nothing_had_been(how: str, seed: int) -> None:
    whole = GenerateRequest("r", np.arange(1, 12, dtype=np.int32), SamplingParams(max_tokens=30, seed=seed, **CUT[how]))
    engine = sampling_engine()
    engine.add(whole)
    uncut = [delta for _ in range(100) if engine.has_work() for delta in engine.step(None)]
    expected = concatenated(uncut)
    assert how != "greedy to its length" or expected.finish_reason is FinishReason.LENGTH
    for cut in range(len(uncut) + 1):
        told = uncut[: min(cut, len(uncut) - 1)]  # at the last cut only the end itself was lost
        other = sampling_engine()
        other.add(replace(whole, output_token_ids=tuple(expected.token_ids[:cut])))
        rest = [delta for _ in range(100) if other.has_work() for delta in other.step(None)]
        got = concatenated([*told, *rest])
        assert (got.text, got.finish_reason, got.usage) == (expected.text, expected.finish_reason, expected.usage)
        assert [t for delta in rest for t in delta.token_ids] == expected.token_ids[cut:]
        assert [each for delta in rest for each in delta.logprobs] == expected.logprobs[cut:]
        other.cache.check_integrity()
        assert other.cache.pool.num_held == 0


def test_the_cuts_above_are_at_the_places_that_matter() -> None:
    """Within a character, within a stop string, and at ends of every kind."""
    reasons, held_back, within = set(), 0, 0
    for seed in SEEDS:
        for sampling in CUT.values():
            engine = sampling_engine()
            params = SamplingParams(max_tokens=30, seed=seed, **sampling)
            engine.add(GenerateRequest("r", np.arange(1, 12, dtype=np.int32), params))
            deltas = [delta for _ in range(100) if engine.has_work() for delta in engine.step(None)]
            reasons.add((len(params.stop), len(params.stop_token_ids), deltas[-1].finish_reason))
            held_back += sum(bool(params.stop) and not d.text and d.token_ids[0] % 5 > 1 for d in deltas)
            within += sum(d.token_ids[0] % 5 == 0 for d in deltas)
    assert {(3, 0, FinishReason.STOP), (0, 5, FinishReason.STOP), (0, 0, FinishReason.STOP)} <= reasons
    assert held_back > 3
    assert within > 20


def concatenated(deltas) -> GenerationResult:
    result = GenerationResult("r")
    for delta in deltas:
        result.add(delta)
    return result


@pytest.mark.parametrize("bad", [{"prompt_token_ids": np.array([VOCAB], np.int32)}, {"output_token_ids": (VOCAB,)}])
def test_a_token_that_the_model_does_not_have_is_refused(bad) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match=f"token id {VOCAB} is not in the model's vocabulary"):
        engine.add(replace(request("r", [1], 9), **bad))
    assert not engine.has_work()


def test_an_engine_tells_how_much_it_has_to_do_and_what_is_cached_is_nothing_to_do() -> None:
    engine, executor = make_engine(num_blocks=64, eager=False, max_rows=1)
    prompt = list(range(1, 14))
    engine.add(request("first", prompt, 3))
    assert (engine.load().waiting, engine.load().running, engine.load().queued_tokens) == (1, 0, 13)
    engine.step(0)
    assert (engine.load().waiting, engine.load().running) == (0, 1)
    assert engine.load().used_blocks > 0
    executor.eager = True
    run(engine)
    assert engine.load() == EngineLoad(total_blocks=64)
    executor.eager = False
    engine.add(request("other", [50] * 9, 3))
    engine.step(0)
    engine.add(request("second", prompt, 3))
    assert engine.load().queued_tokens == 1  # of 13 tokens, 12 are cached
    executor.eager = True
    engine.operate("sleep")
    for _ in range(9):
        engine.step(None)
    assert not engine.load().accepts


def test_speeds_are_measured_by_prompts_and_by_steps_that_decode() -> None:
    engine, executor = make_engine(max_batched_tokens=64, async_scheduling=False)
    executor.changed = lambda batch, result: replace(result, compute_s=0.5 if batch.num_tokens == 1 else 2.0)
    engine.add(request("r", [1] * 10, 3))
    run(engine)
    assert (engine.load().prefill_token_s, engine.load().decode_step_s) == (0.2, 0.5)


def test_a_step_in_which_the_worker_was_suspended_says_little_of_its_speed() -> None:
    engine, executor = make_engine(num_blocks=99, max_batched_tokens=64, async_scheduling=False)
    seconds = {"suspended": 3600.0}
    executor.changed = lambda batch, result: replace(result, compute_s=seconds.get(name, 0.01 * batch.num_tokens))
    for name in ("first", "second", "suspended", "last"):
        engine.add(request(name, [len(name)] * 64, 1))
        run(engine)
    assert engine.load().prefill_token_s < 0.05


def test_copies_that_once_were_slow_are_tried_again() -> None:
    engine, executor = make_engine(num_blocks=16, host_blocks=64, write_policy="write_through")
    prompt = list(range(1, 14))
    executor.changed = lambda batch, result: replace(result, compute_s=0.01 * batch.num_tokens)
    cached = []
    for name in ("computed", "slow", "slow as before", "tried again"):
        engine.add(request(name, prompt, 3))
        cached.append(run(engine)[name].usage.cached_tokens)
        engine.cache.reset(("device",))
        if name == "computed":
            engine.cache.costs.observe(load_s=1e3)
        if name == "slow as before":
            engine._clock.skip(3600.0)
    assert cached == [0, 0, 0, 12]


def test_the_few_tokens_of_a_step_that_had_a_hit_are_no_measure_of_a_long_prompt() -> None:
    engine, executor = make_engine(num_blocks=99, max_batched_tokens=400, async_scheduling=False)
    executor.changed = lambda batch, result: replace(result, compute_s=1.0 + 0.01 * batch.num_tokens)
    engine.add(request("long", [1] * 200, 1))
    run(engine)
    for name in range(5):
        engine.add(request(f"{name}", [2 + name] * 4, 1))
        run(engine)
    assert engine.load().prefill_token_s == pytest.approx(8.2 / 220, rel=0.1)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=25, stateful_step_count=50)


@pytest.mark.parametrize("examples", [6, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("machine", [*MACHINES, pytest.param(EngineMachine, marks=pytest.mark.soak)])
def test_tiers_never_change_a_token_and_the_books_balance(machine, examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=50))


def test_members_of_two_sizes_that_live_together_are_one_group_over_all_tiers() -> None:
    """In its blocks those of the one size lie behind those of the other; few models that are drawn are so."""
    machine = MixedMachine()
    machine.draw_a_model(model=MixedModel((MixedLayer((FULL,), 3), MixedLayer((FULL,), 1)), spare=0))
    (group,) = machine.engine.card.plan.groups
    assert [run.size for run in group.runs] == [3 * 16, 16]
    machine.overlap(is_late=False)
    machine.arrive(count=3, family=1, length=1, priority=0)
    machine.all_end_and_the_device_forgets()
    machine.what_left_the_device_is_asked_for_again(family=1, length=20, is_on_host=True)
    machine.teardown()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_prefix_that_left_the_device_comes_back_from_the_host(policy: str) -> None:
    engine, _ = make_engine(num_blocks=16, host_blocks=64, write_policy=policy)
    prompt = list(range(1, 14))
    for name in ("first", "second"):
        engine.add(request(name, prompt, 3))
        run(engine)
    for other in range(6):
        engine.add(request(f"other{other}", [50 + other] * 20, 3))
        run(engine)
    device = engine.stats()["cache"]["hit_tokens"]
    engine.add(request("third", prompt, 3))
    third = run(engine)["third"]
    assert third.usage.cached_tokens == 12
    assert third.token_ids == continuation(prompt, 3)
    assert engine.stats()["cache"]["hit_tokens"] == device + 12
    assert engine.stats()["cache"]["host_hit_tokens"] > 0
    assert engine.stats()["host"]["loaded_blocks"] > 0


def test_a_load_that_never_comes_is_computed_anew_and_forgotten() -> None:
    engine, executor = make_engine(num_blocks=8, host_blocks=32, write_policy="write_through")
    prompt = list(range(1, 14))
    engine.add(request("first", prompt, 3))
    run(engine)
    engine.cache.pool.evict_all()
    executor.faults.lose_load = lambda: True
    engine.add(request("second", prompt, 3))
    second = run(engine)["second"]
    assert second.token_ids == continuation(prompt, 3)
    stats = engine.stats()
    assert stats["host"]["failed_blocks"] == 3
    assert stats["requests"]["preemptions"] == 1


def test_a_prompt_that_comes_from_the_host_waits_for_the_blocks_that_copies_hold() -> None:
    engine, executor = make_engine(num_blocks=16, host_blocks=64, write_policy="write_through")
    on_host, other = ([first + i % 7 for i in range(61)] for first in (3, 13))
    engine.add(request("on the host", on_host, 2))
    run(engine)
    engine.cache.reset(("device",))
    executor.faults.store_steps = 10_000
    engine.add(request("other", other, 2))
    while engine.has_requests:
        engine.step(None)
    assert engine.cache.num_available < 15
    engine.add(request("again", on_host, 2))
    for _ in range(10):
        assert engine.step(None) == []
    executor.faults.store_steps = 0
    assert run(engine)["again"].token_ids == continuation(on_host, 2)
    assert engine.cache.stats().host_hit_tokens == 60


def test_a_command_carries_the_tables_of_a_request_that_waits_within_the_batch() -> None:
    engine, executor = make_engine(num_blocks=16, host_blocks=64, write_policy="write_through", storage={}, eager=False)
    prompt = [3 + i % 7 for i in range(61)]  # 15 blocks, and one more for its last token
    engine.add(request("on the host", prompt, 1))
    run(engine)
    engine.cache.reset(("device",))
    executor.faults.store_steps = 10_000
    engine.add(request("one block is being stored", [11, 12, 13, 14, 15], 1))
    while engine.has_requests:
        engine.step(0)
        executor.finish_one()
    engine.step(0)
    assert len(executor.queue) == 1, "a step is under way when the next one could be sent"
    engine.add(request("again", prompt, 3))
    engine.step(0)
    assert [sequence.id for sequence in engine.resources.running] == ["again"]
    assert len(executor.queue) == 1, "there is no block for its last token"
    reset = engine.operate("reset_cache", "storage")
    engine.step(0)
    assert [new.request_id for new in executor.queue[-1].new_sequences] == ["again"]
    executor.faults.store_steps = 0
    assert run(engine)["again"].token_ids == continuation(prompt, 3)
    assert reset.is_done


def test_a_load_that_fails_for_a_request_that_no_step_has_carried_stops_no_other() -> None:
    engine, executor = make_engine(
        num_blocks=32, max_rows=2, host_blocks=64, write_policy="write_through", async_scheduling=False
    )
    first, second = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17, 18, 19]
    engine.add(request("on the host", second, 1))
    run(engine)
    engine.cache.reset(("device",))
    engine.add(request("filler", [21], 1))
    engine.add(request("other", first, 30))  # in the last row
    while len(engine.resources.running) != 1:
        engine.step(None)
    extend, executor.faults.lose_load = engine.cache.extend, lambda: True
    engine.cache.extend = lambda rows, tokens: len(rows) != 1 and extend(rows, tokens)  # no room for a newcomer
    engine.add(request("late", second, 1))
    while not engine.cache.host.stats().failed_blocks:
        engine.step(None)
    engine.cache.extend, executor.faults.lose_load = extend, lambda: False
    results = run(engine)
    assert results["other"].finish_reason is FinishReason.LENGTH
    assert results["late"].token_ids == continuation(second, 1)


def test_a_new_engine_is_warm_from_storage() -> None:
    storage: Storage = {}
    prompt = list(range(1, 14))
    first, _ = make_engine(num_blocks=16, host_blocks=64, storage=storage, write_policy="write_through")
    first.add(request("first", prompt, 3))
    run(first)
    assert len(storage) == 3
    second, _ = make_engine(num_blocks=16, host_blocks=64, storage=storage)
    second.add(request("second", prompt, 3))
    result = run(second)["second"]
    assert result.usage.cached_tokens == 12
    assert result.token_ids == continuation(prompt, 3)
    stats = second.stats()["storage"]
    assert (stats["fetched_blocks"], stats["hit_tokens"], stats["missed_blocks"]) == (3, 12, 0)


def test_two_requests_share_one_fetch() -> None:
    storage: Storage = {}
    prompt = list(range(1, 14))
    first, _ = make_engine(num_blocks=16, host_blocks=64, storage=storage, write_policy="write_through")
    first.add(request("first", prompt, 3))
    run(first)
    second, executor = make_engine(num_blocks=16, host_blocks=64, storage=storage)
    executor.faults.storage_steps = 3
    for name in ("a", "b"):
        second.add(request(name, prompt, 3))
    results = run(second)
    assert [results[name].usage.cached_tokens for name in ("a", "b")] == [12, 12]
    assert second.stats()["storage"]["fetched_blocks"] == 3


@pytest.mark.parametrize("prefetch", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("lookup_hangs", [True, False])
def test_storage_that_hangs_holds_up_nobody_for_long(prefetch: str, lookup_hangs: bool) -> None:
    storage: Storage = {}
    prompt = list(range(1, 14))
    first, _ = make_engine(num_blocks=16, host_blocks=64, storage=storage, write_policy="write_through")
    first.add(request("first", prompt, 3))
    run(first)
    second, executor = make_engine(
        num_blocks=16, host_blocks=64, storage=storage, prefetch=prefetch, storage_timeout_s=2.0
    )
    executor.faults.storage_steps = None
    second._lookup.hangs = lookup_hangs
    second.add(request("second", prompt, 3))
    result = run(second)["second"]
    assert result.usage.cached_tokens == 0
    assert result.token_ids == continuation(prompt, 3)


@pytest.mark.parametrize("before", ["nothing", "a request", "an aborted request", "an unanswered request"])
def test_storage_of_an_engine_that_was_idle_for_long_does_not_count_as_stalled(before: str) -> None:
    storage: Storage = {}
    prompts = [list(range(first, first + 13)) for first in (1, 21, 41)]
    warm, _ = make_engine(num_blocks=32, host_blocks=64, storage=storage, write_policy="write_through")
    for index, prompt in enumerate(prompts):
        warm.add(request(f"warm{index}", prompt, 3))
    run(warm)
    engine, _ = make_engine(num_blocks=32, host_blocks=64, storage=storage)
    if before != "nothing":
        engine._lookup.hangs = before in ("an aborted request", "an unanswered request")
        engine.add(request("before", [70] * 13, 3))
        engine.step(0)
        if before == "an aborted request":
            engine.abort("before")
        run(engine)
    engine._clock.skip(3600.0)
    engine._lookup.hangs = True
    for index, prompt in enumerate(prompts):
        engine.add(request(f"r{index}", prompt, 3))
        engine.step(0)
    engine._lookup.hangs = False
    assert [result.usage.cached_tokens for _, result in sorted(run(engine).items())] == [12, 12, 12]


def test_a_stalled_storage_is_used_again_once_it_answers() -> None:
    engine, executor = make_engine(
        num_blocks=16, host_blocks=64, storage={}, write_policy="write_through", storage_timeout_s=2.0
    )
    executor.faults.storage_steps = None
    engine.add(request("first", list(range(1, 14)), 3))
    run(engine)
    assert engine.stats()["storage"]["is_stalled"]
    executor.faults.storage_steps = 0
    engine.add(request("second", list(range(20, 33)), 3))
    run(engine)
    assert not engine.stats()["storage"]["is_stalled"]
    assert len(executor.storage) == 6
    assert engine.cache.host.pool.num_held == 0


def test_a_storage_that_goes_on_while_the_engine_is_idle_is_used_at_the_next_request() -> None:
    storage: Storage = {}
    engine, executor, said = stored_engine(storage, storage_timeout_s=2.0)
    executor.faults.storage_steps = None
    engine.add(request("first", PROMPT, 3))
    run(engine)
    assert engine.stats()["storage"]["is_stalled"]
    executor.faults.storage_steps = 0
    until = engine._clock() + 2 * PROBE_S
    while engine._clock() < until:
        said_of_storage(engine, said)
        if engine.has_work():
            engine.step(0)
    assert not engine.stats()["storage"]["is_stalled"]
    assert engine.cache.host.pool.num_held == 0
    assert not engine.has_work()


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_a_preempted_request_comes_back_from_the_host(policy: str) -> None:
    engine, _ = make_engine(num_blocks=12, host_blocks=64, write_policy=policy)
    prompts = {f"r{i}": [i + 1] * 6 for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 20))
    results = run(engine)
    stats = engine.stats()
    assert stats["requests"]["preemptions"] > 0
    assert stats["host"]["loaded_blocks"] > 0
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 20)


# ---- what the index hears of storage ----


PROMPT = list(range(1, 14))


def said_of_storage(engine: EngineCore, said: Said | None = None) -> list[int]:
    """Of how many blocks the index knows that storage has them: now, after what it was told before."""
    stated(engine.drain_index_updates(), said)
    return sorted(resumable for (tier, _), resumable in said.items() if tier == "storage")


def stored_engine(storage: Storage, **config) -> tuple[EngineCore, SimulatedExecutor, Said]:
    config = {"num_blocks": 16, "host_blocks": 64, "write_policy": "write_through", **config}
    return (*make_engine(storage=storage, **config), {})


def pass_time(engine: EngineCore, said: Said, seconds: float) -> list[int]:
    until = engine._clock() + seconds
    while engine._clock() < until:
        known = said_of_storage(engine, said)
    return known


def test_the_index_hears_what_was_written_to_storage_and_what_a_new_engine_finds_there() -> None:
    storage: Storage = {}
    engine, _, said = stored_engine(storage)
    engine.add(request("first", PROMPT, 3))
    run(engine)
    assert said_of_storage(engine, said) == [1, 1, 1]
    engine, _, said = stored_engine(storage)
    assert said_of_storage(engine, said) == []
    engine.add(request("second", PROMPT, 3))
    run(engine)
    assert said_of_storage(engine, said) == [1, 1, 1]


def test_the_index_hears_what_storage_lost_though_no_request_comes() -> None:
    storage: Storage = {}
    engine, _, said = stored_engine(storage)
    engine.add(request("first", PROMPT, 3))
    run(engine)
    engine.cache.reset()
    storage.clear()  # somebody deletes the directory
    assert said_of_storage(engine, said) == [1, 1, 1]
    assert pass_time(engine, said, 2 * AUDIT_S) == []
    assert said == {}
    assert engine.cache.tree.nodes == {}


def test_a_write_that_a_reset_overtook_is_not_believed() -> None:
    storage: Storage = {}
    engine, executor, said = stored_engine(storage)
    engine.add(request("first", PROMPT, 3))
    while not engine.cache.host.storage.stats().queued_puts:
        engine.step(None)
    executor.faults.storage_steps = 3
    overtaken = engine.stats()["storage"]["queued_puts"]
    operation = engine.operate("reset_cache", "storage")
    run(engine)
    assert operation.is_done
    assert engine.stats()["storage"]["put_blocks"] == 3
    assert len(said_of_storage(engine, said)) == 3 - overtaken
    assert overtaken > 0


def test_nothing_is_audited_while_storage_is_stalled_or_a_request_asks() -> None:
    storage: Storage = {}
    engine, _, said = stored_engine(storage, storage_timeout_s=1.0)
    engine.add(request("first", PROMPT, 3))
    run(engine)
    pass_time(engine, said, 2 * AUDIT_S)
    audits = engine._lookup.in_background
    assert audits > 0
    engine._lookup.hangs = True
    engine.cache.reset()
    engine.add(request("second", PROMPT, 3))
    pass_time(engine, said, 2 * AUDIT_S)
    assert not engine.stats()["storage"]["is_stalled"]
    assert engine._lookup.in_background == audits
    run(engine)
    assert engine.stats()["storage"]["is_stalled"]
    pass_time(engine, said, 2 * AUDIT_S)
    assert engine._lookup.in_background == audits
    engine._lookup.hangs = False
    pass_time(engine, said, 2 * AUDIT_S)
    assert engine._lookup.in_background > audits


def test_an_answer_may_come_when_its_request_has_outgrown_the_question() -> None:
    storage: Storage = {}
    engine, _, said = stored_engine(storage, prefetch="best_effort")
    engine._lookup.hangs = True
    engine.add(request("first", PROMPT, 12))
    for _ in range(8):
        engine.step(None)
    engine._lookup.hangs = False
    assert run(engine)["first"].finish_reason is FinishReason.LENGTH
    assert len(said_of_storage(engine, said)) == 6


def test_answers_to_a_core_that_died_are_not_taken_for_those_to_the_next() -> None:
    storage: Storage = {}
    engine, _, said = stored_engine(storage)
    engine.add(request("first", PROMPT, 3))
    run(engine)
    lookup = engine._lookup
    lookup.hangs = True
    pass_time(engine, said, 2 * AUDIT_S)  # an audit
    engine.cache.reset()
    engine.add(request("second", PROMPT, 3))
    engine.step(0)
    assert len(lookup._asked) == 2
    engine, _, said = stored_engine(storage)
    engine._lookup = engine.resources.waiting.prefetcher._lookup = lookup
    lookup.hangs = False
    engine.add(request("second", [*PROMPT, 14, 15, 16, 17], 3))
    assert run(engine)["second"].usage.cached_tokens == 12
    pass_time(engine, said, 2 * AUDIT_S)
    assert said_of_storage(engine, said) == [1, 1, 1, 1]


def test_storage_is_asked_again_although_the_request_was_aborted_to_which_it_never_answered() -> None:
    storage: Storage = {}
    engine, _, _ = stored_engine(storage)
    engine.add(request("first", PROMPT, 3))
    run(engine)
    engine.cache.reset()
    engine._lookup.hangs = True
    engine.add(request("other", [50] * 20, 3))
    engine.add(request("second", PROMPT, 3))
    while not engine.stats()["storage"]["is_stalled"]:
        engine.step(None)
    run(engine)
    engine._lookup.hangs = False
    engine.step(0)
    engine.add(request("third", PROMPT, 3))
    assert run(engine)["third"].usage.cached_tokens == 12
