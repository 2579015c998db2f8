"""Other weights take the place of an engine's, whose worker is simulated: what was cached before serves nobody.

What is kept of a token says by which weights it was computed: see `TokenKernels.weights`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.simulated_engine import make_engine, request, run
from support.engine.simulation import SimulatedExecutor, Storage, continuation

from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.errors import EngineDiedError, ModelError
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.operations import NewWeights, Operation
from headwise.runtime.protocol.request import GenerationResult
from headwise.runtime.protocol.weights import Weights

PROMPT = list(range(1, 14))


def change(engine: EngineCore, number: int, *, keeps_running: bool = False) -> Operation:
    """Begin to have the weights of this number."""
    name = str(number)
    card = replace(engine.card, identity=f"simulated {name}", weights=name)
    return engine.change_weights(NewWeights(Weights(f"v{name}", name), card, keeps_running))


def finish(engine: EngineCore, operation: Operation, results: dict[str, GenerationResult] | None = None) -> None:
    for _ in range(1000):
        if operation.is_done:
            return
        step(engine, {} if results is None else results)
    raise AssertionError(f"{operation} does not come to an end")


def step(engine: EngineCore, results: dict[str, GenerationResult]) -> None:
    for delta in engine.step(None):
        results.setdefault(delta.request_id, GenerationResult(delta.request_id)).add(delta)


def after(count: int, **options: object) -> tuple[EngineCore, SimulatedExecutor, dict[str, GenerationResult]]:
    """An engine in which request ``r`` has said so many of twelve tokens."""
    engine, executor = make_engine(num_blocks=32, **options)
    results = {"r": GenerationResult("r")}
    engine.add(request("r", PROMPT, 12))
    while len(results["r"].token_ids) < count:
        step(engine, results)
    return engine, executor, results


def test_a_request_goes_on_and_says_which_tokens_are_by_which_weights() -> None:
    engine, _, results = after(5)
    result, told = results["r"], list[tuple[int, str]]()
    for number in (1, 2):
        finish(engine, change(engine, number), results)
        assert engine.stats()["weights"] == f"v{number}"
        assert engine.stats()["requests"]["running"] == 0
        assert result.weights == told
        told.append((len(result.token_ids), f"v{number}"))
        while len(result.token_ids) == told[-1][0]:
            step(engine, results)
        assert result.weights == told
    assert 5 <= told[0][0] < told[1][0] < 12
    rest = run(engine)["r"]
    assert result.token_ids + rest.token_ids == continuation(PROMPT, 12)
    assert rest.weights == []


def test_the_pool_stays_what_it_was_found_to_be() -> None:
    """Who has read the weights does not know of it."""
    engine, _, _ = after(3)
    known, card = engine.card, replace(engine.card, identity="x", weights="1", max_model_len=10**6)
    finish(
        engine,
        engine.change_weights(NewWeights(Weights("v1", "1"), replace(card, spec=replace(card.spec, num_blocks=0)))),
    )
    assert (engine.card.spec, engine.card.max_model_len) == (known.spec, known.max_model_len)
    assert engine.card.identity == "x"


def test_who_never_saw_other_weights_is_told_nothing() -> None:
    engine, _, results = after(5)
    assert results["r"].weights == run(engine)["r"].weights == []


def test_what_runs_may_keep_what_was_computed_of_it_and_is_nobody_else_s_then() -> None:
    engine, _, results = after(5)
    finish(engine, change(engine, 1, keeps_running=True), results)
    assert engine.stats()["requests"]["running"] == 1
    assert engine.stats()["requests"]["preemptions"] == 0
    computed = engine.resources.table.scheduled[engine.resources.running[0].row]
    assert computed >= len(PROMPT)
    while len(results["r"].token_ids) < 10:
        step(engine, results)
    longer = [*PROMPT, *results["r"].token_ids]
    engine.add(request("like it", longer, 3))  # else the kernels would find what other weights have computed
    assert run(engine)["like it"].token_ids == continuation(longer, 3)
    engine.add(request("again", PROMPT, 3))
    assert run(engine)["again"].usage.cached_tokens == 12


def test_what_keeps_what_it_has_is_computed_anew_once_it_was_preempted() -> None:
    engine, _, results = after(5)
    finish(engine, change(engine, 1, keeps_running=True), results)
    engine.operate("sleep")
    engine.operate("wake")
    for name, result in run(engine).items():
        assert results[name].token_ids + result.token_ids == continuation(PROMPT, 12)
    engine.add(request("again", PROMPT, 3))
    assert run(engine)["again"].usage.cached_tokens == 12


def test_nothing_that_was_cached_serves_others_but_what_storage_has_serves_the_same_weights_again() -> None:
    storage: Storage = {}
    engine, _ = make_engine(num_blocks=16, host_blocks=32, write_policy="write_through", storage=storage)

    def cached(name: str) -> int:
        engine.add(request(name, PROMPT, 3))
        result = run(engine)[name]
        assert result.token_ids == continuation(PROMPT, 3)
        return result.usage.cached_tokens

    base = engine.card
    assert [cached("a"), cached("b")] == [0, 12]
    finish(engine, change(engine, 1))
    assert engine.stats()["cache"]["cached_blocks"] == engine.stats()["host"]["cached_blocks"] == 0
    assert [cached("c"), cached("d")] == [0, 12]
    assert engine.load().device_resets == 1
    back = NewWeights(Weights("back", "0"), replace(base, weights="0"))
    finish(engine, engine.change_weights(back))
    assert cached("e") == 12


def test_an_engine_that_sleeps_has_them_when_it_wakes() -> None:
    engine, executor, results = after(3)
    finish(engine, engine.operate("sleep"), results)
    operation = change(engine, 1)
    finish(engine, operation, results)
    assert engine.stats()["state"] == "asleep"
    assert executor.is_asleep
    engine.operate("wake")
    result = run(engine)["r"]
    assert results["r"].token_ids + result.token_ids == continuation(PROMPT, 12)
    assert result.weights == [(0, "v1")]
    assert executor._device.kernels.weights == 1


def test_while_they_are_loaded_nothing_is_accepted_from_the_scheduler_and_requests_wait() -> None:
    engine, executor, _ = after(3, eager=False)
    operation = change(engine, 1)
    while executor.queue or engine.stats()["state"] != "changing weights":
        executor.finish_one()
        engine.step(0)
        if engine._steps and engine._steps[-1].batch.command:
            break
    assert not engine.load().accepts
    engine.add(request("new", PROMPT, 3))
    executor.finish_one()
    finish(engine, operation)
    assert engine.load().accepts
    assert run(engine)["new"].token_ids == continuation(PROMPT, 3)


@pytest.mark.parametrize("keeps_running", [False, True])
def test_weights_that_cannot_be_loaded_change_nothing(keeps_running: bool) -> None:
    engine, executor, results = after(3)
    executor.bad_weights = {"1"}
    operation = change(engine, 1, keeps_running=keeps_running)
    finish(engine, operation, results)
    assert operation.refusal == "weights 1 lack a tensor"
    assert (engine.stats()["state"], engine.stats()["weights"]) == ("awake", "")
    assert executor._device.kernels.weights == 0
    result = run(engine)["r"]
    assert results["r"].token_ids + result.token_ids == continuation(PROMPT, 12)
    assert results["r"].weights == result.weights == []
    engine.add(request("again", PROMPT, 3))
    assert run(engine)["again"].usage.cached_tokens == 12


@pytest.mark.parametrize("why", [ModelError("a tensor is missing"), ModelError("it changes")])
def test_where_those_before_cannot_be_loaded_either_it_is_the_engine_s_death(why: ModelError) -> None:
    engine, executor, _ = after(3)
    executor.fail_wake = why
    operation = change(engine, 1)
    with pytest.raises(EngineDiedError, match=f"rank 0 could not change weights: {why}"):
        finish(engine, operation)


OPERATIONS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(1, 2), st.integers(5, 24)),
    st.tuples(st.just("arrive"), st.integers(1, 2), st.integers(5, 24)),
    st.tuples(st.just("steps"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("steps"), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("change"), st.booleans(), st.booleans()),
)


@settings(max_examples=30)
@given(
    policies=st.sampled_from([(FULL,), (FULL, HeadPolicy(window=5, sink=2)), (FULL, STATE)]),
    host_blocks=st.sampled_from([0, 24]),
    is_late=st.booleans(),
    what=st.lists(OPERATIONS, min_size=4, max_size=24),
)
def test_no_sequence_goes_on_behind_what_other_weights_have_computed(policies, host_blocks, is_late, what) -> None:
    """Unless it ran meanwhile, and was to. Whatever the order, each says what it would have said."""
    options = {"checkpoint_tokens": 8} if STATE in policies else {}
    engine, _ = make_engine(policies, num_blocks=40, host_blocks=host_blocks, is_late=is_late, **options)
    results: dict[str, GenerationResult] = {}
    prompts: dict[str, list[int]] = {}
    for number, (kind, first, second) in enumerate(what, 1):
        if kind == "arrive":
            prompt = [first * 10 + at % 7 for at in range(second)]
            name = f"r{number}"
            prompts[name], results[name] = prompt, GenerationResult(name)
            engine.add(request(name, prompt, 8))
        elif kind == "change":
            operation = change(engine, number, keeps_running=first)
            if second:
                finish(engine, operation, results)
        else:
            for _ in range(first):
                step(engine, results)
        engine.cache.check_integrity()
    while engine.has_work():
        step(engine, results)
    for name, prompt in prompts.items():
        assert results[name].token_ids == continuation(prompt, 8)
    assert engine.cache.pool.num_held == 0
    engine.cache.check_integrity()
