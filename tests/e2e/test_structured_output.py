"""Every answer has the form that was asked for, whatever the engine does meanwhile."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.engine.loaded_model import LoadedModel

from headwise.errors import InvalidRequestError
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, GenerationResult, SamplingParams

pytestmark = pytest.mark.model

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "references" / "json_schemas.json").read_text())
MAX_TOKENS = 100
"""Enough for the longest answer that a schema of the set allows."""
ROOMY = {"kv_cache": "128MiB", "max_model_len": 512, "block_size": 16, "max_num_seqs": 64}
SCARCE = {**ROOMY, "kv_cache": "8MiB", "max_model_len": 128, "block_size": 4, "prefix_caching": False}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel("smollm2-135m", weights_dtype="gguf")  # faster


def prepared(loaded: LoadedModel, name: str, prompt: str, **params: Any) -> GenerateRequest:
    return loaded.preprocessor.prepare(
        prompt=prompt, sampling=SamplingParams(**{"max_tokens": MAX_TOKENS, **params}), request_id=name
    )


def asked(loaded: LoadedModel, names: list[str], temperature: float) -> list[GenerateRequest]:
    """A request for each schema."""
    return [
        prepared(
            loaded,
            name,
            f"JSON for: {name}\n",
            temperature=temperature,
            seed=seed,
            guided={"json_schema": SCHEMAS[name]},
        )
        for seed, name in enumerate(names)
    ]


def finish(engine: EngineCore, requests: list[GenerateRequest]) -> dict[str, GenerationResult]:
    results = {request.request_id: GenerationResult(request.request_id) for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for delta in engine.step(None):
            assert delta.error is None, (delta.request_id, delta.error)
            results[delta.request_id].add(delta)
    return results


def served(loaded: LoadedModel, requests: list[GenerateRequest], **changes: Any) -> dict[str, GenerationResult]:
    engine, executor = loaded.engine(**changes)
    try:
        return finish(engine, requests)
    finally:
        executor.close()


def assert_valid(results: dict[str, GenerationResult]) -> None:
    for name, result in results.items():
        assert result.finish_reason is FinishReason.STOP, (name, result.text)
        jsonschema.validate(
            json.loads(result.text), SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )


def test_there_are_a_hundred_schemas_and_all_are_schemas() -> None:
    assert len(SCHEMAS) >= 100
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("temperature", "every"), [(1.0, 3), *(pytest.param(heat, 1, marks=pytest.mark.soak) for heat in (0.0, 1.0))]
)
def test_answers_are_valid_by_their_schemas(loaded: LoadedModel, temperature: float, every: int) -> None:
    assert_valid(served(loaded, asked(loaded, list(SCHEMAS)[::every], temperature), **ROOMY))


def test_answers_are_valid_when_requests_are_preempted(loaded: LoadedModel) -> None:
    names = [name for name in SCHEMAS if "object" in json.dumps(SCHEMAS[name])][-20:]
    engine, executor = loaded.engine(**SCARCE)
    results = finish(engine, asked(loaded, names, 1.0))
    executor.close()
    assert engine.stats()["requests"]["preemptions"] > 0
    assert_valid(results)


def test_answers_are_valid_behind_what_a_lost_engine_has_said(loaded: LoadedModel) -> None:
    """Whatever the token at which it was lost."""
    requests = asked(loaded, ["person"] * 1, 1.0)
    whole = served(loaded, requests, **ROOMY)["person"]
    cuts = range(1, len(whole.token_ids))
    moved = [
        replace(requests[0], request_id=f"at {cut}", output_token_ids=tuple(whole.token_ids[:cut])) for cut in cuts
    ]
    results = served(loaded, moved, **ROOMY)
    for cut in cuts:
        tokens = whole.token_ids[:cut] + results[f"at {cut}"].token_ids
        jsonschema.validate(json.loads(loaded.preprocessor.tokenizer.decode(tokens)), SCHEMAS["person"])


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[0-9]{3}-[a-z]{2,4}"}, "[0-9]{3}-[a-z]{2,4}"),
    ({"regex": "(été|🙂){1,2}"}, "(été|🙂){1,2}"),
    ({"choice": ["yes", "no", 'say "hi"', "two\nlines"]}, '(yes|no|say "hi"|two\nlines)'),
    (
        {"grammar": 'start: sum "=" NUM\nsum: NUM ("+" NUM)*\nNUM: /[0-9]{1,2}/'},
        "[0-9]{1,2}(\\+[0-9]{1,2})*=[0-9]{1,2}",
    ),
    ({"json_object": True}, "\\{.*\\}"),
]


@pytest.mark.parametrize(
    "others",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 3, "top_p": 0.9, "logprobs": 3},
        {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 1, "logit_bias": {7: 5}, "min_tokens": 6},
    ],
)
def test_other_forms_are_kept_beside_other_parameters(loaded: LoadedModel, others: dict[str, Any]) -> None:
    requests = [
        prepared(loaded, str(index), "Answer: ", guided=form, max_tokens=40, **others)
        for index, (form, _) in enumerate(FORMS)
    ]
    for name, result in served(loaded, requests, **ROOMY).items():
        _, pattern = FORMS[int(name)]
        if result.finish_reason is FinishReason.STOP:
            assert re.fullmatch(pattern, result.text, re.DOTALL), result.text
        else:  # no form that is bounded
            assert name in "34"
            assert result.finish_reason is FinishReason.LENGTH
        assert len(result.logprobs) == ("logprobs" in others) * result.usage.completion_tokens


def test_those_who_share_its_batch_say_what_they_say_without_it(loaded: LoadedModel) -> None:
    plain = [
        prepared(loaded, f"plain {i}", f"The number {i} is", temperature=0, max_tokens=8, ignore_eos=True)
        for i in range(3)
    ]
    alone = served(loaded, plain, **ROOMY)
    mixed = served(loaded, [*asked(loaded, list(SCHEMAS)[-3:], 1.0), *plain], **ROOMY)
    for request in plain:
        assert mixed[request.request_id].token_ids == alone[request.request_id].token_ids


def test_what_its_form_does_not_allow_ends_a_request_alone(loaded: LoadedModel) -> None:
    """A client may say anything of what a lost engine has produced."""
    good, bad = asked(loaded, ["person", "book"], 1.0)
    engine, executor = loaded.engine(**ROOMY)
    engine.add(good)
    engine.add(replace(bad, output_token_ids=(1000, 1001)))
    errors, result = {}, GenerationResult("person")
    while engine.has_work():
        for delta in engine.step(None):
            errors[delta.request_id] = delta.error
            if delta.request_id == "person":
                result.add(delta)
    executor.close()
    assert "the output's form cannot be kept" in errors["book"]
    assert errors["person"] is None
    assert_valid({"person": result})


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"json_schema": {"type": "strin"}}, "json_schema cannot be used: .*strin"),
        ({"json_schema": '{"type":'}, "json_schema cannot be used: EOF"),
        ({"json_schema": {"not": {"type": "string"}}}, "json_schema cannot be used: .*not"),
        ({"json_schema": {"$ref": "http://127.0.0.1:1/x"}}, "json_schema cannot be used: .*not present"),
        ({"json_schema": "[" * 30_000}, "json_schema cannot be used: .*recursion"),
        ({"regex": "[0-9"}, "regex cannot be used: .*unclosed character class"),
        ({"grammar": "start: nothing"}, "grammar cannot be used: .*unknown name"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused_with_the_reason(
    loaded: LoadedModel, form: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        prepared(loaded, "r", "Answer: ", guided=form)
