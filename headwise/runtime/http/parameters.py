"""Which fields a request may have, and what becomes of them: sampling, refused unless neutral, or of no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwise.errors import InvalidRequestError
from headwise.runtime.http.errors import invalid
from headwise.runtime.protocol.request import SamplingParams


def _same(value: Any) -> Any:
    return value


SAMPLING: dict[str, Callable[[Any], Any]] = {
    "temperature": _same,
    "top_p": _same,
    "top_k": lambda value: 0 if value == -1 else value,  # vLLM's word for all
    "min_p": _same,
    "seed": _same,
    "stop": _same,
    "stop_token_ids": _same,
    "ignore_eos": _same,
}
"""Fields that are those of `SamplingParams` by the same name, and how their values are written there."""

_NEVER: tuple[Any, ...] = ()
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": _NEVER,
    "best_of": (1,),
    "chat_template": _NEVER,
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": _NEVER,
    "guided_grammar": _NEVER,
    "guided_json": _NEVER,
    "guided_regex": _NEVER,
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": _NEVER,
    "presence_penalty": (0,),
    "prompt_logprobs": _NEVER,
    "reasoning_effort": _NEVER,
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": _NEVER,
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": _NEVER,
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": _NEVER,
}
"""Fields that are not served yet: refused unless they say what happens anyway."""

WITHOUT_EFFECT = frozenset(("metadata", "safety_identifier", "service_tier", "store", "user"))
"""Fields that change no answer."""


def sampling_of(fields: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    """What these fields of a request say of sampling; None counts as not given. Raises `ApiError` for all others."""
    given: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    for name, value in fields.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in SAMPLING:
            given[name] = SAMPLING[name](value)
        elif name not in NEUTRAL:
            raise invalid(f"{name!r:.80} is no parameter of this endpoint", name[:80])
        elif not any(_is(value, neutral) for neutral in NEUTRAL[name]):
            raise invalid(f"{name} is not served yet: leave it out", name)
    try:
        return SamplingParams(**given)
    except InvalidRequestError as error:
        raise invalid(str(error), _at_fault(given)) from None


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
