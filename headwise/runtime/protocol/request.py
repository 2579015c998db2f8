"""Requests, their sampling parameters and their results: plain data that crosses process boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20


class FinishReason(str, Enum):
    STOP = "stop"
    """The model ended its turn, or a stop string or stop id was produced."""
    LENGTH = "length"
    """`max_tokens` or the model's length was reached."""
    ABORT = "abort"
    """The client cancelled the request."""
    ERROR = "error"
    """The request failed; the error says why."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. The defaults sample from the model's own distribution.

    temperature: 0 is greedy; otherwise logits are divided by it
    top_k:       keep the k most likely tokens; 0 keeps all
    top_p:       keep the smallest set of tokens whose probability reaches p, in (0, 1]
    min_p:       drop tokens less likely than p times the most likely one, in [0, 1]
    seed:        of the counter-based generator; None draws one per request
    max_tokens:  most tokens to produce; None goes on to the model's length
    stop:        strings that end the text (not part of it)
    stop_token_ids: token ids that end the output, besides the model's own end tokens
    logprobs:    also return the log-probabilities of this many most likely tokens, and of the chosen one
    ignore_eos:  go on past the model's end tokens
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Convert every value to a plain Python type: the wire accepts no others."""
        given: Any = self.stop
        stop = (given,) if isinstance(given, str) else given
        values = {
            "temperature": _number("temperature", self.temperature, 0.0, 100.0),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, open_low=True),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "top_k": as_integer("top_k", self.top_k, 0, 2**31 - 1),
            "seed": _optional("seed", self.seed, 0, 2**63 - 1),
            "max_tokens": _optional("max_tokens", self.max_tokens, 1, 2**31 - 1),
            "logprobs": _optional("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "stop": _tuple("stop", stop, "stop strings", MAX_STOP_STRINGS),
            "stop_token_ids": tuple(
                as_integer("stop_token_ids", token, 0, 2**31 - 1)
                for token in _tuple("stop_token_ids", self.stop_token_ids, "stop token ids", MAX_STOP_TOKEN_IDS)
            ),
            "ignore_eos": _flag("ignore_eos", self.ignore_eos),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_stop()

    def _check_stop(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"a stop string must be a non-empty string, got {text!r}")
            if len(text) > MAX_STOP_CHARACTERS:
                raise InvalidRequestError(
                    f"a stop string has {len(text)} characters; at most {MAX_STOP_CHARACTERS} are allowed"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; raises `InvalidRequestError` on unknown names or bad values."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(name) for name in set(data) - known)
        if unknown:
            raise InvalidRequestError(
                f"unknown sampling parameter {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(**data)

    @classmethod
    def of(cls, sampling: object, options: Mapping[str, Any] | None = None) -> SamplingParams:
        """Parameters from a user's input: nothing, parameters, or a mapping; ``options`` take precedence.

        Raises `InvalidRequestError`.
        """
        if sampling is None:
            given: Mapping[str, Any] = {}
        elif isinstance(sampling, SamplingParams):
            given = asdict(sampling)
        elif isinstance(sampling, Mapping):
            given = sampling
        else:
            raise InvalidRequestError(
                f'sampling must be SamplingParams or a mapping such as {{"temperature": 0}}, got {sampling!r:.80}'
            )
        return cls.from_wire({**given, **(options or {})})


@dataclass(frozen=True)
class GenerateRequest:
    """One request, as an engine accepts it.

    prompt_token_ids: ``int32 [n]``, n >= 1
    priority:   lower is served first; equal priorities are first come, first served
    cache_salt: only requests with the same salt share cache blocks
    lora_id, extra_keys: further identity of the cached blocks. An extra key is ``(start, end, hash)``: a
                multimodal item over the tokens ``[start, end)``.
    output_token_ids: tokens that a lost engine had already produced: generation continues behind them
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    lora_id: str = ""
    extra_keys: tuple[tuple[int, int, str], ...] = ()
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of the chosen token, and of the most likely ones as (token id, log-probability)."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Usage:
    """Token counts of a finished request; ``cached_tokens`` of the prompt were served from the cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds: waiting before the first step, arrival to first token, mean time per token after the first."""

    queue_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class OutputDelta:
    """What one engine step added to a request. ``finish_reason`` is set on the last delta of a request only."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass
class GenerationResult:
    """A finished generation, as clients get it."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()

    def add(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.usage = delta.usage or self.usage
            self.timings = delta.timings or self.timings


def as_token_ids(tokens: Sequence[int] | NDArray[Any]) -> NDArray[np.int32]:
    """Token ids as ``int32 [n]``; raises `InvalidRequestError` if they are not integers of that range."""
    try:
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError
        if array.size and (array.min() < 0 or array.max() > 2**31 - 1):
            raise TypeError
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError("prompt token ids must be one flat list of integers from 0 to 2**31 - 1") from None
    return array.astype(np.int32)


def as_integer(name: str, value: Any, low: int, high: int) -> int:
    """A Python or NumPy integer as a Python int; raises `InvalidRequestError` on anything else, or out of range."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, got {value!r:.80}")
    return int(value)


def as_priority(value: Any) -> int:
    """A request's priority; raises `InvalidRequestError`."""
    return as_integer("priority", value, -(2**31) + 1, 2**31 - 1)


def as_string(name: str, value: Any) -> str:
    """A string as a plain Python string; raises `InvalidRequestError` for anything else."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string, got {value!r:.80}")
    return str(value)


def _optional(name: str, value: Any, low: int, high: int) -> int | None:
    return None if value is None else as_integer(name, value, low, high)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    ok = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not ok or not low <= value <= high or (open_low and value == low):  # also catches NaN
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r:.80}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InvalidRequestError(f"{name} must be True or False, got {value!r:.80}")
    return bool(value)


def _tuple(name: str, value: Any, what: str, most: int) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{name} must be a list, got {value!r:.80}")
    if len(value) > most:
        raise InvalidRequestError(f"{len(value)} {what} were given; at most {most} are allowed")
    return tuple(str(each) if isinstance(each, str) else each for each in value)
