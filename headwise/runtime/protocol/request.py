"""Requests, their sampling parameters and their results: plain data that crosses process boundaries."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import InvalidRequestError
from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.prompt_items import PromptEmbeds
from headwise.runtime.protocol.values import (
    as_flag,
    as_integer,
    as_items,
    as_number,
    as_numbers_by_token,
    as_optional_integer,
    check_text,
)

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_SAMPLES = 128
MAX_SHOWN_TOKENS = 32
MAX_RETAIN_S = 7 * 86400.0


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

    temperature: 0 takes the likeliest token; otherwise logits are divided by it
    top_k:       keep the k most likely tokens; 0 keeps all
    top_p:       keep the smallest set of tokens whose probability reaches p, in (0, 1]
    min_p:       drop tokens less likely than p times the most likely one, in [0, 1]
    seed:        of the counter-based generator; None draws one per request
    max_tokens:  most tokens to produce; None goes on to the model's length
    fit_max_tokens: where so many do not fit behind the prompt, produce as many as do; else the request is refused
    stop:        strings that end the text (not part of it)
    stop_token_ids: token ids that end the output, besides the model's own end tokens
    logprobs:    also return the log-probabilities of this many most likely tokens, and of the chosen one
    prompt_logprobs: the same of the prompt's tokens; they are computed, cached or not
    ignore_eos:  go on past the model's end tokens
    presence_penalty:   subtracted from the logits of tokens that are in the output, in [-2, 2]
    frequency_penalty:  subtracted from a token's logit once for each time that it is in the output, in [-2, 2]
    repetition_penalty: logits of tokens in prompt or output are divided by it where positive, else multiplied; 1: off
    logit_bias:  token id -> what is added to its logit, in [-100, 100]
    min_tokens:  no end token, stop id or stop string ends the output before it has so many tokens
    n:           samples of each prompt, with seeds derived from ``seed``: see `samples`
    guided:      the form that the output must have: a `Guided`, or a mapping such as ``{"json_schema": {...}}``
    shown_tokens: control tokens, by what they are written as, that are part of the output's text; others give none

    First ``guided`` forbids tokens. Then come biases, then the penalties for repetition, frequency and presence, then
    temperature and filters.
    Log-probabilities are the model's own, before all of this.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    n: int = 1
    guided: Guided | None = None
    prompt_logprobs: int | None = None
    shown_tokens: tuple[str, ...] = ()
    fit_max_tokens: bool = False

    def __post_init__(self) -> None:
        """Convert every value to a plain Python type: the wire accepts no others."""
        given: Any = self.stop
        stop = (given,) if isinstance(given, str) else given
        values = {
            "temperature": as_number("temperature", self.temperature, 0.0, 100.0),
            "top_p": as_number("top_p", self.top_p, 0.0, 1.0, open_low=True),
            "min_p": as_number("min_p", self.min_p, 0.0, 1.0),
            "top_k": as_integer("top_k", self.top_k, 0, 2**31 - 1),
            "seed": as_optional_integer("seed", self.seed, 0, 2**63 - 1),
            "max_tokens": as_optional_integer("max_tokens", self.max_tokens, 1, 2**31 - 1),
            "logprobs": as_optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": as_optional_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            "stop": as_items("stop", stop, "stop strings", MAX_STOP_STRINGS),
            "stop_token_ids": tuple(
                as_integer("stop_token_ids", token, 0, 2**31 - 1)
                for token in as_items("stop_token_ids", self.stop_token_ids, "stop token ids", MAX_STOP_TOKEN_IDS)
            ),
            "ignore_eos": as_flag("ignore_eos", self.ignore_eos),
            "presence_penalty": as_number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": as_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": as_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            "logit_bias": as_numbers_by_token("logit_bias", self.logit_bias, -100.0, 100.0, MAX_LOGIT_BIASES),
            "min_tokens": as_integer("min_tokens", self.min_tokens, 0, 2**31 - 1),
            "n": as_integer("n", self.n, 1, MAX_SAMPLES),
            "guided": Guided.of(self.guided),
            "fit_max_tokens": as_flag("fit_max_tokens", self.fit_max_tokens),
            "shown_tokens": as_items("shown_tokens", self.shown_tokens, "tokens", MAX_SHOWN_TOKENS),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_texts()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.guided is not None and self.ignore_eos:
            raise InvalidRequestError("guided output ends where its form does: leave ignore_eos out")

    def _check_texts(self) -> None:
        for token in self.shown_tokens:
            if not isinstance(token, str) or not 0 < len(token) <= MAX_STOP_CHARACTERS:
                raise InvalidRequestError(
                    f"a shown token must be a string of 1 to {MAX_STOP_CHARACTERS} characters, got {token!r:.80}"
                )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"a stop string must be a non-empty string, got {text!r}")
            if len(text) > MAX_STOP_CHARACTERS:
                raise InvalidRequestError(
                    f"a stop string has {len(text)} characters; at most {MAX_STOP_CHARACTERS} are allowed"
                )
            check_text("a stop string", text)

    @property
    def greedy(self) -> bool:
        """Whether each token is the model's likeliest one: nothing is drawn, and no logit is changed."""
        return self.temperature == 0.0 and not self.edits_logits

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before a token is chosen from them."""
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0 or self.guided is not None

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far, besides by the model."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def samples(self) -> list[SamplingParams]:
        """The parameters of each of the ``n`` samples, as of requests of their own: the first has this one's seed."""
        return [replace(self, n=1, seed=_derived_seed(self.seed, index)) for index in range(self.n)]

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
class PeerHint:
    """Another engine that has more of a request's prefix than the one chosen for it. Advice: the engine looks up where
    that one is, and asks it.

    engine, epoch: the engine's name, and the epoch of its cache
    tokens:        of the prefix that it could serve
    prefills:      it is to compute the prompt for this request
    """

    engine: str
    epoch: int
    tokens: int
    prefills: bool = False


@dataclass(frozen=True)
class Retention:
    """That what is cached of a request's prompt is to be kept, rather than what nobody has asked to keep.

    seconds: for so long, from the end of the request on
    tokens:  of the prompt, the first ones; 0: all
    """

    seconds: float
    tokens: int = 0

    def __post_init__(self) -> None:
        """Raises `InvalidRequestError`."""
        as_number("retain_s", self.seconds, 0, MAX_RETAIN_S, open_low=True)
        as_integer("retain_tokens", self.tokens, 0, 2**31 - 1)


def as_retention(seconds: Any, tokens: Any = 0) -> Retention | None:
    """What a caller asks for by ``retain_s`` and ``retain_tokens``; None: by 0 seconds for nothing. Raises
    `InvalidRequestError`."""
    seconds = as_number("retain_s", seconds, 0, MAX_RETAIN_S)
    tokens = as_integer("retain_tokens", tokens, 0, 2**31 - 1)
    if tokens and not seconds:
        raise InvalidRequestError(f"retain_tokens {tokens} says how much is kept: say for how long, too, by retain_s")
    return Retention(seconds, tokens) if seconds else None


@dataclass(frozen=True)
class GenerateRequest:
    """One request, as an engine accepts it.

    prompt_token_ids: ``int32 [n]``, n >= 1
    priority:   lower is served first; equal priorities are first come, first served
    cache_salt: only requests with the same salt share cache blocks
    lora_id: name of the adapter that it is computed with; empty: none
    extra_keys: further identity of the cached blocks: of the multimodal items, by their places, ascending
    embeds:     of those of these items that have embeddings, by their places
    output_token_ids: tokens that a lost engine had already produced: generation continues behind them
    prompt_told: tokens of the prompt of which a lost engine had already told the log-probabilities
    peer:       who has more of the prefix, if that is worth asking for
    retention:  of its prompt in the cache; None: none was asked for
    tenant:     whose it is, as the key says by which it came; empty: the key says nothing
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    lora_id: str = ""
    extra_keys: tuple[ExtraKey, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    prompt_told: int = 0
    peer: PeerHint | None = None
    embeds: tuple[PromptEmbeds, ...] = ()
    retention: Retention | None = None
    tenant: str = ""

    @property
    def owner(self) -> str:
        """Whose requests have one part together wherever some wait for others: its tenant's, or else those with its
        salt; empty: nobody's."""
        return self.tenant or self.cache_salt


def owner_digest(owner: str) -> str:
    """Tells owners apart where their names, which may be salts that nobody is to know, are not told."""
    return hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()


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
    """What one engine step added to a request. ``finish_reason`` is set on the last delta of a request only.

    prompt_token_ids, prompt_logprobs: the next tokens of the prompt, where their log-probabilities are asked for; the
                                       first token has none
    stop: the stop string that ended the output; empty: none did
    weights: version of the weights by which its tokens, and those that follow, were sampled; empty: it has not changed
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    stop: str = ""
    weights: str = ""


@dataclass
class GenerationResult:
    """A finished generation, as clients get it.

    prompt_token_ids, prompt_logprobs: of each token of the prompt, where they are asked for; the first one's is None
    stop: the stop string that ended the output; empty: none did
    weights: from which token of the output on it was sampled by weights of which version: see `Client.update_weights`;
             empty: by those of the start alone
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    stop: str = ""
    weights: list[tuple[int, str]] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        if delta.weights and delta.weights != (self.weights[-1][1] if self.weights else ""):
            self.weights.append((len(self.token_ids), delta.weights))
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.prompt_token_ids.extend(delta.prompt_token_ids)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.usage = delta.usage or self.usage
            self.timings = delta.timings or self.timings
            self.stop = delta.stop

    def drop_logprobs(self) -> None:
        """Forget the log-probabilities so far."""
        for values in (self.logprobs, self.prompt_logprobs, self.prompt_token_ids):
            values.clear()


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


def as_priority(value: Any) -> int:
    """A request's priority; raises `InvalidRequestError`."""
    return as_integer("priority", value, -(2**31) + 1, 2**31 - 1)


def as_string(name: str, value: Any) -> str:
    """A string as a plain Python string; raises `InvalidRequestError` for anything else, and half surrogate pairs."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string, got {value!r:.80}")
    check_text(name, value)
    return str(value)


def _derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of the sample of that index: 63 bits, the same in every release."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
