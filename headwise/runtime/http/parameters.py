"""Which fields a request may have, and what becomes of them: sampling, refused unless neutral, or of no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwise.errors import InvalidRequestError
from headwise.runtime.http.errors import invalid
from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.protocol.values import as_number


def _same(value: Any) -> Any:
    return value


MAX_TEMPERATURE = 2.0
"""As OpenAI's and vLLM's; our own client may give more."""

SAMPLING: dict[str, Callable[[Any], Any]] = {
    "temperature": lambda value: as_number("temperature", value, 0.0, MAX_TEMPERATURE),
    "top_p": _same,
    "top_k": lambda value: 0 if value == -1 else value,  # vLLM's word for all
    "min_p": _same,
    "seed": _same,
    "stop": _same,
    "stop_token_ids": _same,
    "ignore_eos": _same,
    "presence_penalty": _same,
    "frequency_penalty": _same,
    "repetition_penalty": _same,
    "logit_bias": _same,
    "min_tokens": _same,
}
"""Fields that are those of `SamplingParams` by the same name, and how their values are written there."""


def _response_format(value: Any) -> Any:
    """OpenAI's: text, any JSON object, or one that a schema describes."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise InvalidRequestError(
            "response_format must have a type: text, json_object, or json_schema with json_schema.schema"
        )
    return {"json_schema": described["schema"]}


def _structured_outputs(value: Any) -> Any:
    """vLLM's: forms by name, of which one is given."""
    given = {name: form for name, form in value.items() if form is not None} if isinstance(value, dict) else {}
    if not given or not given.keys() <= {"json", "json_object", "regex", "choice", "grammar"}:
        raise InvalidRequestError("structured_outputs must have one of json, json_object, regex, choice and grammar")
    return {"json_schema" if name == "json" else name: form for name, form in given.items()}


FORMS: dict[str, Callable[[Any], Any]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": lambda value: {"json_schema": value},
    "guided_regex": lambda value: {"regex": value},
    "guided_choice": lambda value: {"choice": value},
    "guided_grammar": lambda value: {"grammar": value},
}
"""Fields that say what form an answer must have, and how `SamplingParams.guided` says it; None: it may have any."""

_NEVER: tuple[Any, ...] = ()
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": _NEVER,
    "chat_template": _NEVER,
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": _NEVER,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": _NEVER,
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": _NEVER,
}
"""Fields that are not served yet: refused unless they say what happens anyway."""

WITHOUT_EFFECT = frozenset(("metadata", "safety_identifier", "service_tier", "store", "user"))
"""Fields that change no answer."""


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def effort_variables(effort: str | None, name: str) -> dict[str, Any]:
    """What a chat template is told of how much is to be thought before an answer: templates that know of it call it so,
    and others only whether anything is. Raises `ApiError`.

    name: of the field
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise invalid(f"{name}: the effort must be one of {', '.join(EFFORTS)}, got {effort!r:.80}", name)
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def sampling_of(fields: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    """What these fields of a request say of sampling; None counts as not given. Raises `ApiError` for all others."""
    given: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    for name, value in fields.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in SAMPLING:
            given[name] = _read(name, value)
        elif name in FORMS:
            _add_form(given, name, value)
        elif name not in NEUTRAL:
            raise invalid(f"{name!r:.80} is no parameter of this endpoint", name[:80])
        elif not any(_is(value, neutral) for neutral in NEUTRAL[name]):
            raise invalid(f"{name} is not served yet: leave it out", name)
    try:
        return SamplingParams(**given)
    except InvalidRequestError as error:
        raise invalid(str(error), _at_fault(given)) from None


def _read(name: str, value: Any) -> Any:
    try:
        return SAMPLING[name](value)
    except InvalidRequestError as error:
        raise invalid(str(error), name) from None


def _add_form(given: dict[str, Any], name: str, value: Any) -> None:
    """Add what a field says of an answer's form; raises `ApiError`, also if another one did."""
    try:
        form = Guided.of(FORMS[name](value))
    except InvalidRequestError as error:
        raise invalid(str(error), name) from None
    if form is not None and "guided" in given:
        raise invalid(f"an answer has one form, and {name} is the second that is asked for: leave one out", name)
    if form is not None:
        given["guided"] = form


def _is(value: Any, neutral: Any) -> bool:
    """Equal as JSON is: there, false is no 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _at_fault(given: Mapping[str, Any]) -> str | None:
    """The first of these values that no sampling can have."""
    for name, value in given.items():
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError:
            return name
    return None
