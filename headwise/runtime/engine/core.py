"""The engine: keeps steps in flight, commits their results, and turns tokens into text for the requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from headwise.cache_controller.cache_manager import CacheManager
from headwise.cache_controller.head_exchange import HeadExchange
from headwise.cache_controller.kv_events import IndexUpdate
from headwise.errors import InvalidRequestError, OverloadedError
from headwise.prompt_turns import ShareOf
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.config.peer_blocks import exchange_with
from headwise.runtime.engine.arriving_embeds import ArrivingEmbeds
from headwise.runtime.engine.departure import Departure
from headwise.runtime.engine.operations import EVERY_TIER, NewWeights, Operation, Operations, State
from headwise.runtime.engine.output import OutputText
from headwise.runtime.engine.parts import (
    host_config_of,
    lending_of,
    peer_loads_of,
    pipeline_of,
    prefetcher_of,
    speculator_of,
    taking_of,
    turns_of,
)
from headwise.runtime.engine.peers.base import Ask, Peers, Takers
from headwise.runtime.engine.peers.prefills import Prefills
from headwise.runtime.engine.prefetcher import Lookup
from headwise.runtime.engine.resource_manager import ResourceManager
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.engine.steps_in_flight import ScheduledStep
from headwise.runtime.engine.whole_items import check_whole_items
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.protocol.batch import SLEEP, StepResult
from headwise.runtime.protocol.executor import Executor
from headwise.runtime.protocol.lease_messages import AskLease, EndLease, LeaseEmbeds, Offer
from headwise.runtime.protocol.messages import EngineLoad
from headwise.runtime.protocol.prompt_items import (
    EmbedsPlace,
    check_embed_places,
    check_embeds,
    embed_bytes,
    embed_places,
)
from headwise.runtime.protocol.request import FinishReason, GenerateRequest, OutputDelta, Timings, TokenLogprobs, Usage
from headwise.runtime.protocol.shared_rows import moved
from headwise.runtime.protocol.weights import FIRST, Weights
from headwise.transfer.shared_buffers import SharedBuffers
from headwise.transfer.stats import TransferStats

Exchange = Callable[[EngineConfig, ModelCard, int], HeadExchange]
ASK_WAIT_S = 0.05
"""Longest wait for storage to say what it has, when there is nothing else to do."""

OVERDUE, OVERDUE_SHARE = 4.0, 0.25
"""A step may never end that takes so many times what steps of its size took, and this share of `load_timeout_s`."""


class EngineCore:
    """One replica's requests and cache state; nobody else writes them. Single-threaded.

    With asynchronous scheduling two steps are in flight: step n + 1 is planned and sent while step n runs, with
    the tokens that n will sample standing in as placeholders that the workers fill in.
    """

    def __init__(
        self,
        config: EngineConfig,
        card: ModelCard,
        tokenizer: Tokenizer,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        lookup: Lookup | None = None,
        peers: Peers | None = None,
        exchange: Exchange = exchange_with,
        weights: Weights = FIRST,
    ) -> None:
        """
        lookup:   what storage has; None: there is none
        peers:    the other engines; None: this one neither asks nor is asked for blocks
        exchange: says how blocks of engines with so many ranks fill those of this one
        weights:  that workers have, and the card is of
        """
        self.config = config
        self.card = card
        self._tokenizer = tokenizer
        self._executor = executor
        self._clock = clock
        self.cache = CacheManager(
            card.kept,
            block_size=card.layout.block_size,
            num_blocks=card.spec.num_blocks,
            max_rows=card.spec.max_rows,
            max_blocks=card.spec.max_blocks,
            step_tokens=config.tokens_in_flight,
            prefix_caching=config.prefix_caching,
            checkpoint_tokens=config.checkpoint_tokens,
            protected_share=config.retained_share,
            host=host_config_of(config, card),
        )
        self._peer_loads = peer_loads_of(config, self.cache, executor, peers, partial(exchange, config, card))
        self._lending = lending_of(config, self.cache, executor, peers, self._stands_still)
        self._taking = taking_of(config, self.cache, self._peer_loads, peers)
        self._peers = peers
        self._buffers = SharedBuffers() if executor.shares_memory else None
        self.resources = ResourceManager(
            self.cache,
            max_rows=card.spec.max_rows,
            max_batched_tokens=config.most_batched_tokens,
            prefill_chunk=config.prefill_chunk,
            pipeline=pipeline_of(config),
            speculator=speculator_of(config, card),
            prefetcher=prefetcher_of(config, self.cache, lookup),
            peer_loads=self._peer_loads,
            whole_items=any(card.config.both_ways),
            buffers=self._buffers,
            turns=turns_of(config),
        )
        self.arriving = ArrivingEmbeds() if self._buffers is None else ArrivingEmbeds(self._buffers.allocate)
        self._prefills: Prefills | None = None
        if self._lending is not None and peers is not None:
            self._prefills = Prefills(
                self._lending,
                peers,
                self.arriving,
                card.layout.block_size,
                check=self._check_for_another,
                add=self._add_for_another,
                abort=self.abort,
                timeout_s=config.load_timeout_s,
            )
        self.weights = weights
        self._operations = Operations(self.resources, lambda: self.card.identity, self._have_changed)
        self._lookup = lookup
        self._depth = config.steps_in_flight
        self._steps: deque[ScheduledStep] = deque()
        self._live: dict[str, Sequence] = {}
        self._texts: dict[str, OutputText] = {}
        self._outbox: list[OutputDelta] = []
        self._arrivals = 0
        self._embed_bytes, self._most_embed_bytes = 0, config.embed_memory_bytes
        self._counts = {"finished": 0, "aborted": 0, "failed": 0, "steps": 0, "tokens_out": 0}
        self._compute_s = 0.0
        self._last_step = clock()  # when one was over, or began where none was under way
        self._departure: Departure | None = None

    # ---- requests in ----

    def cached_tokens(self, request: GenerateRequest) -> int:
        """How many of a request's first tokens it would find on the device and the host now, and not compute."""
        if len(request.prompt_token_ids) > self.card.max_model_len:  # nobody hashes what is refused
            return 0
        seed = self.card.hash_seed(request.cache_salt, request.lora_id)
        asked = Sequence(request, seed, (0, 0), 0, 0.0, output=list(request.output_token_ids))
        return self.resources.cached_tokens(asked)

    def take_lacking(self) -> list[str]:
        """Requests that cannot go on without embeddings that were left out: they are to be aborted."""
        return self.resources.take_lacking()

    def add(self, request: GenerateRequest, *, knows_embeds: bool = False, lacks: int = 0) -> None:
        """Queue a request; raises `InvalidRequestError` or `OverloadedError`, and then nothing was changed.

        One that comes with output goes on behind it, as after a preemption; what it has is not said again.

        knows_embeds: the numbers of its embeddings were checked as they came
        lacks:        see `Sequence`
        """
        self.check(request, embed_places(request.embeds), lacks)
        if not knows_embeds:
            check_embeds(request.extra_keys, request.embeds)
        if self._buffers is not None:
            request = replace(request, embeds=moved(self._buffers, request.embeds))
        length = _most_tokens(request)
        self._arrivals += 1
        output = OutputText(self._tokenizer, request.sampling)
        sequence = Sequence(
            request,
            self.card.hash_seed(request.cache_salt, request.lora_id),
            arrival=(request.priority, self._arrivals),
            max_length=length,
            arrived=self._clock(),
            output=list(request.output_token_ids),
            ends=output.ends,
            prompt_told=request.prompt_told,
            lacks=lacks,
        )
        self._live[request.request_id], self._texts[request.request_id] = sequence, output
        self._embed_bytes += embed_bytes(request.embeds)
        if sequence.is_prompt_asked and not sequence.prompt_told:
            self._tell_prompt(sequence, (None,))  # nothing is before the first token
        text, reason = self._ending(sequence, *output.replay(request.output_token_ids))
        if reason is None:
            self.resources.add(sequence, self._clock())
        else:  # only the last delta was lost
            self._counts["finished"] += 1
            self._end(sequence, reason, text=text)

    def check(self, request: GenerateRequest, embeds: Items[EmbedsPlace], lacks: int = 0) -> None:
        """Raise what `add` would raise of a request with such embeddings, whatever their numbers are."""
        length = _most_tokens(request)
        if request.request_id in self._live:
            raise InvalidRequestError(f"request id {request.request_id!r} is already being served; ids must differ")
        if not len(request.prompt_token_ids):
            raise InvalidRequestError("the prompt is empty")
        if length > self.card.max_model_len:
            raise InvalidRequestError(f"{length} tokens were asked for; at most {self.card.max_model_len} fit")
        biased = request.sampling.logit_bias
        highest = max(int(request.prompt_token_ids.max()), *request.output_token_ids, *biased, 0)
        if highest >= self.card.config.vocab_size:
            raise InvalidRequestError(
                f"token id {highest} is not in the model's vocabulary of {self.card.config.vocab_size}"
            )
        self.card.check_adapter(request.lora_id)
        lacking = self.card.config.missing_for_images
        if embeds and lacking:
            raise InvalidRequestError(
                f"this model's images need {lacking}, which is not served: leave the items' embeddings out"
            )
        if self.card.config.axes == 1 and any(each.columns for each in request.extra_keys):
            raise InvalidRequestError("this model gives a token one position: leave the items' columns out")
        kept = [key for key in request.extra_keys if key.end > lacks]
        check_embed_places(kept, embeds, self.card.config.embed_size)
        if any(self.card.config.both_ways):
            check_whole_items(request, self.config, self.card.token_parts)
        self._check_room(sum(each.num_bytes for each in embeds), self._embed_bytes + self.arriving.num_bytes)
        if len(self.resources.waiting) >= self.config.max_queued:
            raise OverloadedError(
                f"{self.config.max_queued} requests are waiting already (max_queued); try again later"
            )

    def _check_room(self, num_bytes: int, held: int) -> None:
        """Raise where there is no room for so many bytes of embeddings, which are kept until their request ends: a
        preempted one is computed anew. held: bytes of those of other requests"""
        most = self._most_embed_bytes
        if num_bytes > most:
            raise InvalidRequestError(
                f"the embeddings of the prompt have {num_bytes} bytes; the engine keeps {most} of all requests "
                "(embed_memory)"
            )
        if num_bytes and held + num_bytes > most:
            raise OverloadedError(
                f"requests with embeddings of {held} bytes are served or wait already, of at most {most} "
                "(embed_memory); try again later"
            )

    def abort(self, request_id: str) -> None:
        """End a request at once, in whatever state it is; unknown and finished ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._counts["aborted"] += 1
            self._end(sequence, FinishReason.ABORT)

    def operate(self, action: str, tier: str = EVERY_TIER) -> Operation:
        """Begin to ``sleep``, to ``wake`` or to ``reset_cache`` of a tier; `step` carries it out.

        Asleep, the engine holds neither weights nor device memory, and requests wait. Raises `InvalidRequestError`,
        or `ConfigError` for a tier that there is not.
        """
        return self._operations.ask(action, tier)

    def change_weights(self, new: NewWeights) -> Operation:
        """Begin to have other weights of the same model; `step` carries it out. Requests go on, and nothing that was
        cached by others serves them any more. Asleep, the engine has them when it wakes."""
        return self._operations.change_weights(new)

    def _have_changed(self, new: NewWeights) -> None:
        self.card, self.weights = self.card.renewed(new.card), new.weights
        names = dict(new.card.adapters)
        for sequence in list(self._live.values()):
            request = sequence.request
            if request.lora_id and request.lora_id not in names:
                self._fail(sequence, f"adapter {request.lora_id!r:.80} is served no more")
                continue
            seed = self.card.hash_seed(request.cache_salt, request.lora_id)
            if seed != sequence.hash_seed:
                self.resources.reseed(sequence, seed, self._clock())

    # ---- the end ----

    def not_begun(self) -> list[str]:
        """The requests of which nothing was computed here, and those that cannot run because the engine sleeps."""
        is_awake = self._operations.state is State.AWAKE
        return [name for name, sequence in self._live.items() if sequence.first_scheduled is None or not is_awake]

    def hand_over(self, hashes: list[bytes] | None, takers: Takers | None = None, storable: int | None = None) -> None:
        """Have storage and other engines get these blocks, as far as they are cached here and those lack them; None:
        all that is cached. When the last request has ended, they get what was computed since, too. `step` and
        `serve_peers` carry it out.

        storable: how many of these blocks, the first ones, storage gets; None: all
        """
        self._departure = Departure(self.cache, hashes, self._peers, takers, self.config.load_timeout_s, storable)

    @property
    def is_handing_over(self) -> bool:
        """Whether storage or another engine has yet to get something."""
        return self._departure is not None and not self._departure.is_over

    # ---- other engines ----

    def asked(self, reader: bytes, message: Ask) -> None:
        """Another engine asks for blocks of this one's cache, whose epoch it knows. Raises `InvalidRequestError`."""
        if isinstance(message, Offer):
            self._offered(reader, message)
        elif self._prefills is not None and isinstance(message, AskLease) and message.prompt is not None:
            self._prefills.begin(reader, message, message.prompt, self._clock())
        elif self._prefills is not None and isinstance(message, LeaseEmbeds):
            self._prefills.take(reader, message, self._clock())
        elif self._lending is not None:
            if self._prefills is not None and isinstance(message, EndLease):
                self._prefills.forget(message.lease)
            self._lending.take(reader, message, self._clock())

    def _offered(self, reader: bytes, offer: Offer) -> None:
        if self._taking is None:
            return
        if self._operations.state is State.AWAKE and self._departure is None:
            self._taking.take(reader, offer, self._clock())
        else:
            self._taking.refuse(reader, offer)

    def _check_for_another(self, request: GenerateRequest, embeds: Items[EmbedsPlace]) -> None:
        """Of a request of which only the blocks matter; see `check`."""
        if self._operations.state is not State.AWAKE:
            raise OverloadedError("the engine sleeps")
        self.check(request, embeds)

    def _add_for_another(self, request: GenerateRequest) -> Sequence:
        """Queue it; its embeddings were checked as they came."""
        self._check_for_another(request, embed_places(request.embeds))
        self.add(request, knows_embeds=True)
        return self._live[request.request_id]

    def refuse(self, reader: bytes, message: Ask) -> None:
        """Another engine asks for blocks of a cache that is no more."""
        if isinstance(message, Offer):
            if self._taking is not None:
                self._taking.refuse(reader, message)
        elif self._lending is not None:
            self._lending.refuse(reader, message)

    def serve_peers(self) -> None:
        """Take in what other engines have answered, and tell them what is due. To be called also while there is nothing
        to do."""
        now = self._clock()
        if self._lending is not None:
            self._lending.advance(now)
        if self._prefills:
            self._prefills.end_unleased(now)
            if self._operations.state is not State.AWAKE:
                self._prefills.end_all()
        if self._peer_loads is not None:
            self.resources.waiting.advance(now)
        if self._taking is not None:
            self._taking.advance(now)
        if self._departure is not None:
            self._departure.give(not self._live, now)

    # ---- steps ----

    @property
    def has_requests(self) -> bool:
        return bool(self._live)

    def has_work(self) -> bool:
        """Whether `step` has something to do: requests of an engine that is asleep are nothing to do."""
        may_run = self._live and self._operations.state is not State.ASLEEP
        is_busy = self._operations.is_busy or self.resources.copies.is_busy or self.is_handing_over
        return bool(may_run or self._steps or self._outbox or is_busy)

    def step(self, timeout_s: float | None) -> list[OutputDelta]:
        """Keep the workers busy and commit the next finished step, waiting at most ``timeout_s`` for it.

        ``None`` waits for as long as the workers live. Raises `EngineDiedError` once a worker is lost.
        """
        if self._departure is not None:
            self._departure.store(is_last=not self._live)
        while len(self._steps) < self._depth:
            step = self._operations.next_step(self._clock())
            if step is None:
                break
            self._executor.submit(step.batch)
            if not self._steps:
                self._last_step = self._clock()
            self._steps.append(step)
        if self._steps and not self._outbox:
            result = self._executor.poll(timeout_s)
            if result is not None:
                self._commit(self._steps.popleft(), result)
        elif self._lookup is not None and self.resources.waiting.is_asking_storage and not self._outbox:
            self._lookup.wait(ASK_WAIT_S if timeout_s is None else min(timeout_s, ASK_WAIT_S))
        outputs, self._outbox = self._outbox, []
        return outputs

    def _stands_still(self, now: float) -> bool:
        """Whether the step under way takes much longer than steps of its size do."""
        if not self._steps:
            return False
        times, batch = self.resources.step_times, self._steps[0].batch
        usual_s = times.decode_step_s + batch.num_tokens * times.prefill_token_s
        return now > self._last_step + max(OVERDUE_SHARE * self.config.load_timeout_s, OVERDUE * usual_s)

    def _commit(self, step: ScheduledStep, result: StepResult) -> None:
        self._last_step = self._clock()
        if step.batch.command:
            self._operations.obeyed(step.batch.command, result)
            if step.batch.command == SLEEP and self._lending is not None:
                self._lending.slept()
        else:
            self._counts["steps"] += 1
            self._compute_s += result.compute_s
            if result.error is None and not result.prompt_logprobs:
                self.resources.observe(step, result.compute_s)
        if result.error is not None:
            for sequence in step.sequences:
                self._fail(sequence, result.error)
            self.resources.copies_done(step, result)
            self.resources.step_done(step)
            return
        self.resources.copies_done(step, result)
        for index, why in result.broken.items():
            if self.resources.is_wanted(step, index):
                self.resources.forget_computed(step.sequences[index])
                self._fail(step.sequences[index], why)
        for index, logprobs in result.prompt_logprobs.items():
            if self.resources.is_wanted(step, index):
                self._tell_prompt(step.sequences[index], logprobs)
        drafts = result.accepted.tolist() if len(result.accepted) else [0] * len(step.sequences)
        for index in self.resources.commit(step, result.token_ids, result.accepted, result.proposed):
            sequence = step.sequences[index]
            self._take(sequence, sequence.output[-1 - drafts[index] :], result.logprobs.get(index))

    def _tell_prompt(self, sequence: Sequence, logprobs: tuple[TokenLogprobs | None, ...]) -> None:
        """Tell the log-probabilities of the prompt's next tokens."""
        begin = sequence.prompt_told
        sequence.prompt_told += len(logprobs)
        tokens = tuple(sequence.tokens(begin, sequence.prompt_told).tolist())
        self._outbox.append(OutputDelta(sequence.id, prompt_token_ids=tokens, prompt_logprobs=logprobs))

    def _take(self, sequence: Sequence, tokens: list[int], logprobs: TokenLogprobs | None) -> None:
        """Say that tokens were sampled, and end the request with the one that ends it: later ones are forgotten."""
        now = self._clock()
        if sequence.first_token is None:
            sequence.first_token = now
        text, reason, taken = self._texts[sequence.id].push_all(tokens)
        if taken < len(tokens):
            del sequence.output[taken - len(tokens) :]
        self._counts["tokens_out"] += taken
        text, reason = self._ending(sequence, text, reason)
        told, delta_logprobs = tuple(tokens[:taken]), () if logprobs is None else (logprobs,)
        version = self.weights.version
        news, sequence.weights = "" if version == sequence.weights else version, version
        if reason is None:
            self._outbox.append(OutputDelta(sequence.id, told, text, delta_logprobs, weights=news))
        else:
            self._counts["finished"] += 1
            self._end(sequence, reason, token_ids=told, text=text, logprobs=delta_logprobs, weights=news)

    def _ending(self, sequence: Sequence, text: str, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """What the latest token made of the text, and how the request ends with it: also by its length."""
        if reason is None and sequence.num_tokens >= sequence.max_length:
            return text + self._texts[sequence.id].flush(), FinishReason.LENGTH
        return text, reason

    def _fail(self, sequence: Sequence, error: str) -> None:
        if not sequence.finished:
            self._counts["failed"] += 1
            self._end(sequence, FinishReason.ERROR, error=error)

    def _end(self, sequence: Sequence, reason: FinishReason, **last: Any) -> None:
        """The only way a request ends: the last delta is sent, and its blocks go back."""
        sequence.finished = True
        del self._live[sequence.id]
        stop = self._texts.pop(sequence.id).stopped_by
        self._embed_bytes -= embed_bytes(sequence.request.embeds)
        self.resources.leave(sequence)
        if self._prefills is not None and self._prefills.ended(sequence.id):
            return
        self._outbox.append(
            OutputDelta(
                sequence.id,
                finish_reason=reason,
                usage=_usage(sequence),
                timings=self._timings(sequence),
                stop=stop,
                **last,
            )
        )

    def _timings(self, sequence: Sequence) -> Timings:
        now = self._clock()
        started = now if sequence.first_scheduled is None else sequence.first_scheduled
        first = now if sequence.first_token is None else sequence.first_token
        after_first = max(1, sequence.num_sampled_here - 1)
        return Timings(
            queue_s=started - sequence.arrived,
            ttft_s=first - sequence.arrived,
            tpot_s=(now - first) / after_first,
            total_s=now - sequence.arrived,
        )

    # ---- the outside ----

    def fail_all(self, error: str) -> list[OutputDelta]:
        """End every request with ``error``, after a worker was lost. The engine must not be stepped again."""
        self.resources.drop_steps()
        for sequence in list(self._live.values()):
            self._fail(sequence, error)
        outputs, self._outbox = self._outbox, []
        return outputs

    def drain_index_updates(self) -> list[IndexUpdate]:
        """What the attention store must hear of since the last call. To be called also while there is nothing to do."""
        self.resources.waiting.audit_storage(self._clock())
        return self.cache.drain_index_updates()

    def share_by(self, share_of: ShareOf) -> None:
        """Tenants' prompts have these shares of the engine from now on."""
        self.resources.share_by(share_of)

    def load(self) -> EngineLoad:
        """What decides how soon a further request would be served here."""
        cache = self.cache.stats()
        return EngineLoad(
            waiting=len(self.resources.waiting),
            running=len(self.resources.running),
            queued_tokens=self.resources.queued_tokens(),
            used_blocks=cache.held_blocks,
            total_blocks=cache.total_blocks,
            prefill_token_s=self.resources.step_times.prefill_token_s,
            decode_step_s=self.resources.step_times.decode_step_s,
            host_token_s=self.cache.costs.host_token_s,
            storage_token_s=self.cache.costs.storage_token_s,
            peer_token_s=self.cache.costs.peer_token_s,
            accepts=self._operations.state is State.AWAKE,
            held_back=self.resources.waiting.num_held,
            device_resets=self._operations.device_resets,
            prompts=self.resources.waiting_prompts(),
        )

    def stats(self) -> dict[str, Any]:
        """Plain data: requests by state, cache blocks, prefix hits, steps."""
        host, storage = self.cache.host.stats(), self.cache.host.storage.stats()
        return {
            "model": self.card.model,
            "state": self._operations.state.value,
            "weights": self.weights.version,
            "requests": {
                "waiting": len(self.resources.waiting),
                "running": len(self.resources.running),
                "preemptions": self.resources.num_preemptions,
                **{name: self._counts[name] for name in ("finished", "aborted", "failed")},
            },
            "cache": asdict(self.cache.stats()),
            "host": None if host is None else asdict(host),
            "storage": None if storage is None else asdict(storage),
            "peers": self._peer_stats(),
            "decode_reads": {
                "tokens": self.resources.steps.joint_reads.read_tokens,
                "spared": self.resources.steps.joint_reads.spared_tokens,
            },
            "speculation": self._speculation_stats(),
            "transfers": {name: _speed(transfer) for name, transfer in self.resources.copies.transfers.items()},
            "steps": self._counts["steps"],
            "output_tokens": self._counts["tokens_out"],
            "compute_s": self._compute_s,
        }

    def _speculation_stats(self) -> dict[str, Any] | None:
        speculator = self.resources.speculator
        return None if speculator is None else {"drafted": speculator.drafted, "accepted": speculator.accepted}

    def _peer_stats(self) -> dict[str, Any] | None:
        if self._peer_loads is None or self._lending is None:
            return None
        taken = {} if self._taking is None else self._taking.stats()
        given = 0 if self._departure is None else self._departure.given
        return {**self._peer_loads.stats(), **taken, "given_blocks": given, "lent": self._lending.stats()}


def _most_tokens(request: GenerateRequest) -> int:
    """That a request's sequence may have in the end."""
    return len(request.prompt_token_ids) + (request.sampling.max_tokens or 1)


def _speed(transfer: TransferStats) -> dict[str, float]:
    return {**asdict(transfer), "hidden_s": transfer.hidden_s, "bytes_per_s": transfer.bytes_per_s}


def _usage(sequence: Sequence) -> Usage:
    cached = min(sequence.cached_tokens, sequence.num_prompt)
    return Usage(sequence.num_prompt, cached, len(sequence.output))
