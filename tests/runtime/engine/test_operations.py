"""Sleep, wake and reset of an engine whose worker is simulated."""

from __future__ import annotations

import pytest
from support.engine.simulated_engine import make_engine, request, run
from support.engine.simulation import VOCAB, SimulatedExecutor, Storage, continuation

from headwise.errors import ConfigError, EngineDiedError, InvalidRequestError, ModelError, OverloadedError
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.operations import Operation
from headwise.runtime.protocol.request import FinishReason, GenerationResult

PROMPT = list(range(1, 14))


def finish(engine: EngineCore, operation: Operation) -> dict[str, GenerationResult]:
    """Step until an operation is done; what requests said meanwhile."""
    results: dict[str, GenerationResult] = {}
    for _ in range(1000):
        if operation.is_done:
            return results
        for delta in engine.step(None):
            results.setdefault(delta.request_id, GenerationResult(delta.request_id)).add(delta)
    raise AssertionError(f"{operation} does not come to an end")


def served(engine: EngineCore, name: str = "r", prompt: list[int] = PROMPT) -> GenerationResult:
    engine.add(request(name, prompt, 3))
    return run(engine)[name]


def asleep(**options: object) -> tuple[EngineCore, SimulatedExecutor]:
    """An engine that sleeps, and has served `PROMPT` before."""
    engine, executor = make_engine(**options)
    served(engine)
    finish(engine, engine.operate("sleep"))
    return engine, executor


def test_running_requests_pause_and_go_on_with_the_tokens_they_have() -> None:
    engine, executor = make_engine(num_blocks=32)
    for name in ("a", "b"):
        engine.add(request(name, [ord(name) % VOCAB] * 9, 12))
    said: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(4):
        for delta in engine.step(None):
            said[delta.request_id] += delta.token_ids
    for name, result in finish(engine, engine.operate("sleep")).items():
        said[name] += result.token_ids
    assert executor.is_asleep
    assert 0 < len(said["a"]) < 12
    assert not engine.has_work()
    assert engine.step(None) == []
    stats = engine.stats()
    assert stats["state"] == "asleep"
    assert (stats["requests"]["running"], stats["requests"]["waiting"]) == (0, 2)
    assert stats["requests"]["preemptions"] == 0
    assert stats["cache"]["free_blocks"] == 32
    engine.operate("wake")
    for name, result in run(engine).items():
        assert said[name] + result.token_ids == continuation([ord(name) % VOCAB] * 9, 12)
        assert result.finish_reason is FinishReason.LENGTH
    assert engine.stats()["state"] == "awake"


def test_requests_that_come_while_asleep_wait_up_to_max_queued() -> None:
    engine, _ = asleep(max_queued=2)
    for name in ("a", "b"):
        engine.add(request(name, PROMPT, 3))
    with pytest.raises(OverloadedError, match="max_queued"):
        engine.add(request("c", PROMPT, 3))
    engine.abort("a")
    assert [(d.request_id, d.finish_reason) for d in engine.step(None)] == [("a", FinishReason.ABORT)]
    engine.operate("wake")
    assert run(engine)["b"].token_ids == continuation(PROMPT, 3)


def test_both_can_be_asked_for_twice_and_are_carried_out_in_order() -> None:
    engine, executor = make_engine()
    engine.add(request("r", PROMPT, 3))
    asked = [engine.operate(action) for action in ("wake", "sleep", "sleep", "wake", "sleep", "wake", "wake")]
    assert run(engine)["r"].token_ids == continuation(PROMPT, 3)
    assert all(operation.is_done for operation in asked)
    assert not executor.is_asleep


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_what_the_device_cached_comes_back_from_the_host(policy: str) -> None:
    engine, _ = asleep(num_blocks=16, host_blocks=16, write_policy=policy)
    engine.operate("wake")
    again = served(engine, "again")
    assert again.usage.cached_tokens == 12
    assert again.token_ids == continuation(PROMPT, 3)


def test_without_a_host_what_was_cached_is_computed_again() -> None:
    engine, _ = asleep()
    engine.operate("wake")
    again = served(engine, "again")
    assert again.usage.cached_tokens == 0
    assert again.token_ids == continuation(PROMPT, 3)


def test_a_full_host_keeps_what_was_used_last() -> None:
    """What is on the device alone takes the place of what is on the host alone, not of what is on both."""
    engine, _ = make_engine(num_blocks=16, host_blocks=6, write_policy="write_through")
    old, kept = [20] * 13, [30] * 13
    for name, prompt in (("old", old), ("kept", kept)):
        served(engine, name, prompt)
    assert engine.stats()["host"]["cached_blocks"] == 6
    engine.cache.reset(("device",))
    served(engine, "kept again", kept)
    engine.cache.host.threshold = 10**6  # nothing is written through any more
    served(engine, "new")
    finish(engine, engine.operate("sleep"))
    engine.operate("wake")
    cached = {
        name: served(engine, f"{name}/after", p).usage.cached_tokens for name, p in (("kept", kept), ("new", PROMPT))
    }
    assert cached == {"kept": 12, "new": 12}


def test_copies_that_fail_do_not_keep_an_engine_awake() -> None:
    engine, executor = make_engine(num_blocks=16, host_blocks=16, write_policy="write_back")
    served(engine)
    executor.faults.lose_store = lambda: True
    finish(engine, engine.operate("sleep"))
    assert engine.stats()["host"]["cached_blocks"] == 0
    engine.operate("wake")
    assert served(engine, "again").token_ids == continuation(PROMPT, 3)


def test_storage_that_hangs_does_not_keep_an_engine_awake() -> None:
    engine, executor = make_engine(num_blocks=16, host_blocks=16, write_policy="write_through", storage={})
    executor.faults.storage_steps = None
    engine.add(request("r", PROMPT, 3))
    while engine.stats()["storage"]["queued_puts"] < 3:
        engine.step(None)
    finish(engine, engine.operate("sleep"))
    executor.faults.storage_steps = 0
    for _ in range(5):
        engine.step(None)  # asleep, what is on its way from host to storage still comes to its end
    assert len(executor.storage) == 3


def test_the_store_hears_that_nothing_is_on_the_device_any_more() -> None:
    engine, _ = make_engine(num_blocks=16, host_blocks=16, write_policy="write_back")
    served(engine)
    resident: dict[str, set[bytes]] = {"device": set(), "host": set()}
    for operation in ("none", "sleep", "reset_cache"):
        if operation != "none":
            finish(engine, engine.operate(operation))
        for update in engine.drain_index_updates():
            tier = resident[update.tier]
            (tier.update if update.resident else tier.difference_update)(update.block_hashes)
        counts = {tier: len(hashes) for tier, hashes in resident.items()}
        assert (
            counts
            == {
                "none": {"device": 3, "host": 0},
                "sleep": {"device": 0, "host": 3},
                "reset_cache": {"device": 0, "host": 0},
            }[operation]
        )


def test_a_wake_that_fails_is_the_engine_s_death() -> None:
    engine, executor = asleep()
    executor.fail_wake = ModelError("the checkpoint is gone")
    engine.operate("wake")
    with pytest.raises(EngineDiedError, match="rank 0 could not wake: the checkpoint is gone"):
        run(engine)


# ---- reset ----


def test_a_reset_forgets_a_tier_and_leaves_the_others() -> None:
    storage: Storage = {}
    engine, executor = make_engine(num_blocks=16, host_blocks=16, write_policy="write_through", storage=storage)
    executor.faults.storage_steps = 0
    served(engine)
    blocks = {}
    for tier in ("device", "host", "storage", "all"):
        operation = engine.operate("reset_cache", tier)
        finish(engine, operation)
        assert operation.has_emptied_storage == (tier in ("storage", "all"))
        stats = engine.stats()
        blocks[tier] = operation.blocks, stats["cache"]["cached_blocks"], stats["host"]["cached_blocks"], len(storage)
        assert engine.load().device_resets == {"all": 2}.get(tier, 1)
    assert blocks == {"device": (3, 0, 3, 3), "host": (3, 0, 0, 3), "storage": (3, 0, 0, 0), "all": (0, 0, 0, 0)}
    assert served(engine, "again").usage.cached_tokens == 0


def test_a_reset_takes_nothing_from_running_requests() -> None:
    engine, _ = make_engine(num_blocks=32)
    served(engine)
    served(engine, "other", [60] * 9)
    said = []
    engine.add(request("runs", PROMPT, 20))
    for _ in range(4):
        said += [token for delta in engine.step(None) for token in delta.token_ids]
    operation = engine.operate("reset_cache")
    said += finish(engine, operation)["runs"].token_ids
    assert operation.blocks == 2  # the other's
    assert said + run(engine)["runs"].token_ids == continuation(PROMPT, 20)


def finish_reset(engine: EngineCore, tier: str) -> int:
    operation = engine.operate("reset_cache", tier)
    finish(engine, operation)
    return operation.blocks


@pytest.mark.parametrize("tier", ["host", "storage"])
def test_a_tier_that_there_is_not_is_named(tier: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(ConfigError, match=f"no {tier} tier"):
        engine.operate("reset_cache", tier)
    assert finish_reset(engine, "all") == 0


@pytest.mark.parametrize(("action", "tier"), [("sleeep", "all"), ("reset_cache", "gpu")])
def test_what_can_not_be_asked_for_is_refused_with_what_can(action: str, tier: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="must be one of"):
        engine.operate(action, tier)
    assert not engine.has_work()
