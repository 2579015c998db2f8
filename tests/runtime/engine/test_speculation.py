"""An engine whose steps check guesses: the same tokens in fewer steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.engine.proposed_always import ProposedAlways
from support.engine.simulated_engine import LetterTokenizer, make_engine, request, run
from support.engine.simulated_model import often_again, sure_of_one
from support.engine.simulation import SimulatedExecutor, continuation

from headwise.cache_controller.policy import FULL, STATE
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.batch import BatchRequest, StepResult
from headwise.runtime.protocol.request import FinishReason

PROMPT = [3, 1, 4, 1, 5, 9, 2] * 4


def made(speculation: int = 5, **config: Any) -> tuple[EngineCore, SimulatedExecutor]:
    """An engine whose model repeats its prompt, but not always."""
    engine, executor = make_engine(**{"num_blocks": 64, "speculation": speculation, "max_batched_tokens": 40, **config})
    executor.model.logits_of = partial(sure_of_one, following=often_again)
    return engine, executor


def said(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return continuation(prompt, count, often_again)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}])
def test_repeated_tokens_take_fewer_steps_and_are_the_same(sampling: dict[str, Any]) -> None:
    steps = []
    for speculation in (0, 5):
        engine, _ = made(speculation)
        engine.add(request("r", PROMPT, 40, **sampling))
        result = run(engine)["r"]
        assert (result.token_ids, result.finish_reason) == (said(40), FinishReason.LENGTH)
        assert result.text == LetterTokenizer().push(said(40))
        assert result.usage is not None
        assert result.usage.completion_tokens == engine.stats()["output_tokens"] == 40
        steps.append(engine.stats()["steps"])
    assert steps[1] < 0.7 * steps[0]
    found = engine.stats()["speculation"]
    assert found["drafted"] > found["accepted"] >= 40 - steps[1]


def test_steps_that_compute_right_guesses_once_more_are_measured_with_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where states are kept, nearly all steps of a text that repeats itself do."""
    tokens = []
    for policies in ((FULL,), (FULL, STATE)):
        engine, _ = made(policies=policies)
        assert engine.resources.speculator is not None
        taken, observe = list[int](), engine.resources.observe
        monkeypatch.setattr(engine.resources, "observe", lambda step, _, observe=observe: observe(step, 1e-3))
        monkeypatch.setattr(engine.resources.speculator, "took", lambda count, *_, to=taken: to.append(count))
        engine.add(request("r", PROMPT, 40))
        assert run(engine)["r"].token_ids == said(40)
        found = engine.stats()["speculation"]
        tokens.append(sum(taken) - found["drafted"])
    assert tokens[0] == 0
    assert 0 < tokens[1] <= found["accepted"]


def test_an_engine_that_does_not_guess_has_no_numbers_of_it() -> None:
    engine, _ = made(0)
    assert engine.stats()["speculation"] is None


@pytest.mark.parametrize("end", range(1, 20))
@pytest.mark.parametrize("kind", ["max_tokens", "stop_token_ids", "stop"])
def test_a_request_ends_at_the_same_token_wherever_that_comes_in_a_step(kind: str, end: int) -> None:
    """What was sampled behind it is forgotten."""
    engine, _ = made()
    expected = said(end)
    limits: dict[str, Any] = {}
    if kind == "stop_token_ids":
        limits = {"stop_token_ids": (expected[-1],)}
        expected = expected[: expected.index(expected[-1]) + 1]
    elif kind == "stop":
        limits = {"stop": (LetterTokenizer().push(expected[-2:]),)}
    engine.add(request("r", PROMPT, end if kind == "max_tokens" else 60, **limits))
    result = run(engine)["r"]
    assert result.finish_reason is (FinishReason.LENGTH if kind == "max_tokens" else FinishReason.STOP)
    if kind != "stop":
        assert result.token_ids == expected
    assert result.token_ids == said(len(result.token_ids))
    shown = LetterTokenizer().push(expected[:-1] if kind == "stop_token_ids" else expected)
    assert result.text == shown.partition(limits.get("stop", ("\n",))[0])[0]
    assert result.usage is not None
    assert result.usage.completion_tokens == len(result.token_ids)


def test_guesses_give_way_where_blocks_are_short_and_nobody_is_preempted_for_them() -> None:
    """Two sequences whose tokens fit exactly."""
    prompts = {"a": PROMPT[:14], "b": PROMPT[7:21]}
    engine, _ = made(num_blocks=10, prefix_caching=False)
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, 6))
    results = run(engine)
    for name, prompt in prompts.items():
        assert results[name].token_ids == said(6, prompt)
    assert engine.stats()["requests"]["preemptions"] == 0


def test_a_step_waits_for_the_tokens_of_the_one_before_where_guesses_of_the_next_are_likely() -> None:
    idle = []
    for repeats in (True, False):
        engine, executor = made(eager=False)
        if not repeats:
            executor.model.logits_of = sure_of_one
        engine.add(request("r", PROMPT, 30))
        ahead = []
        while engine.has_work():
            engine.step(0)
            ahead.append(len(executor.queue))
            executor.finish_one()
        assert max(ahead) == 2
        idle.append(ahead[1:-1].count(0))
    assert idle[0] > 5 > 2 > idle[1]


def test_prompts_are_computed_beside_guesses() -> None:
    engine, _ = made()
    engine.add(request("first", PROMPT, 40))
    for _ in range(4):
        engine.step(None)
    engine.add(request("second", [*PROMPT, *PROMPT, 8], 10))
    results = run(engine)
    assert results["second"].token_ids == said(10, [*PROMPT, *PROMPT, 8])


def test_a_request_that_asks_for_each_tokens_logprob_gets_them_beside_one_that_is_guessed() -> None:
    engine, _ = made()
    engine.add(request("guessed", PROMPT, 30))
    engine.add(request("asks", PROMPT, 30, logprobs=1))
    results = run(engine)
    assert results["guessed"].token_ids == results["asks"].token_ids == said(30)
    assert len(results["asks"].logprobs) == 30
    assert engine.stats()["speculation"]["accepted"] > 0


def test_steps_with_guesses_are_no_measure_of_prompts() -> None:
    engine, executor = made()
    engine.add(request("r", PROMPT, 2))
    executor.changed = lambda batch, result: _took(result, 1e-3 * batch.num_tokens)
    run(engine)
    measured = engine.resources.step_times.prefill_token_s
    executor.changed = lambda batch, result: _took(result, 1.0 if len(batch.drafts) else 1e-3 * batch.num_tokens)
    engine.add(request("again", PROMPT, 30))
    run(engine)
    assert engine.resources.step_times.prefill_token_s == pytest.approx(measured)


def _took(result: Any, seconds: float) -> Any:
    return replace(result, compute_s=seconds)


def drafting(speculation: int = 4, **config: Any) -> tuple[EngineCore, SimulatedExecutor]:
    """An engine whose model repeats nothing, and drafts."""
    return make_engine(
        **{
            "num_blocks": 48 * (1 + (STATE in config.get("policies", ()))),
            "speculation": speculation,
            "max_batched_tokens": 40,
            "drafts": True,
            **config,
        }
    )


def watched(executor: SimulatedExecutor) -> list[BatchRequest]:
    """What the executor is sent from here on."""
    sent, changed = list[BatchRequest](), executor.changed

    def noted(batch: BatchRequest, result: StepResult) -> StepResult:
        sent.append(batch)
        return changed(batch, result)

    executor.changed = noted
    return sent


@pytest.mark.parametrize("proposed", [0, 2])
def test_the_host_waits_for_what_was_sampled_only_where_a_step_has_drafts_itself(proposed: int) -> None:
    """On a GPU the next step begins while the tokens of the last one are on their way."""
    engine, executor = drafting(is_late=True, eager=False, drafts=True)
    engine.resources.speculator = ProposedAlways(proposed, 64)
    engine.add(request("r", PROMPT[:4], 6))
    engine.step(0)
    batch = executor.queue.popleft()
    assert not len(batch.drafts)
    assert batch.proposals.tolist() == ([proposed] if proposed else [])
    begun = executor.worker.begin(batch)
    assert not begun.is_done
    assert begun.result().token_ids.tolist() == continuation(PROMPT[:4], 1)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("policies", [(FULL,), (FULL, STATE)])
def test_the_model_s_own_drafts_save_steps_where_nothing_is_repeated(
    policies: Any, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    for speculation in (0, 4):
        engine, _ = drafting(speculation, policies=policies, is_late=is_late, drafts=speculation > 0)
        observe = engine.resources.observe
        monkeypatch.setattr(engine.resources, "observe", lambda step, _, observe=observe: observe(step, 20e-3))
        engine.add(request("r", PROMPT, 64))
        assert run(engine)["r"].token_ids == continuation(PROMPT, 64)
        steps.append(engine.stats()["steps"])
    assert steps[1] < 0.7 * steps[0]
    found = engine.stats()["speculation"]
    assert found["drafted"] > found["accepted"] > 20


def test_a_prompt_in_chunks_tells_the_model_what_follows_each() -> None:
    """`TokenModel.draft` looks whether what it has kept is right."""
    engine, executor = drafting(max_batched_tokens=20)
    prompt, sent = list(range(1, 29)), watched(executor)
    engine.add(request("r", prompt, 20))
    assert run(engine)["r"].token_ids == continuation(prompt, 20)
    assert [batch.following.tolist() for batch in sent[:2]] == [[prompt[10]], [prompt[20]]]
    assert sent[0].proposals.tolist() == []
    assert sent[2].sample.all()
    assert sent[2].proposals.tolist() == [1], "with a chance of 0.5, as nothing is known yet"


def test_where_there_is_no_room_for_further_drafts_there_is_one() -> None:
    """Blocks of 4 tokens that the prompts fill: a second draft would begin another one."""
    engine, executor = drafting(num_blocks=4, max_rows=1, prefix_caching=False)
    sent = watched(executor)
    engine.resources.speculator = ProposedAlways(4, 64)
    engine.add(request("r", PROMPT[:8], 8))
    assert run(engine)["r"].token_ids == continuation(PROMPT[:8], 8)
    for batch in sent:
        ends = batch.starts + batch.query_lens
        assert all(end + count - 1 <= 16 for end, count in zip(ends, batch.proposals, strict=len(batch.proposals) > 0))
    assert max(int(batch.proposals.max(initial=0)) for batch in sent) == 4
