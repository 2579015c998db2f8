"""Computes a rank's steps over one arena: the model's pass, the tokens that come of it, and drafts behind these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_tables import TableShape
from headwise.cache_controller.cache_controller import CacheController
from headwise.kernels.base import HeadTable
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.models.attention.base import CachedAttention
from headwise.runtime.models.base import Model
from headwise.runtime.ops.base import KernelArray, Tensor
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.worker.begun_step import Computed
from headwise.runtime.worker.decode_graphs import Scored
from headwise.runtime.worker.device import Device
from headwise.runtime.worker.drafts import SampledRows
from headwise.runtime.worker.guides import Guides
from headwise.runtime.worker.logit_editor import LogitEditor
from headwise.runtime.worker.model_drafts import ModelDrafts
from headwise.runtime.worker.model_runner import Loads, ModelRunner
from headwise.runtime.worker.model_source import ModelSource
from headwise.runtime.worker.next_tokens import Chosen, NextTokens
from headwise.runtime.worker.prompt_scorer import PromptScorer
from headwise.runtime.worker.rank import Rank
from headwise.runtime.worker.returned_tokens import ReturnedTokens
from headwise.runtime.worker.row_adapters import AdaptersOfRows

_NO_UPDATE: NDArray[np.int32] = np.empty((0, 4), dtype=np.int32)


class StepComputer:
    """Of one rank, over an arena of its own. What is sampled, drafted and asked of a sequence is known by its row.

    runner: has the arena, and the model, in whose place another one may come
    """

    def __init__(
        self,
        rank: Rank,
        source: ModelSource,
        model: Model,
        attention: CachedAttention,
        adapters: AdaptersOfRows,
        guides: Guides,
        loads: Loads,
    ) -> None:
        """Allocates the arena. source: of ``model``"""
        card, config, ops, device = source.card, source.config, rank.ops, rank.device
        self._card, self._config, self._ops, self._adapters = card, config, ops, adapters
        cache = _empty_cache(card, device)
        heads = {number: _head_table(card, rank, number) for number in card.config.caches_of(rank.layers)}
        self.runner = ModelRunner(card, model, device, attention, cache, heads, adapters, loads, rank.links)
        last, editor = self.runner.last, LogitEditor(card.config.vocab_size, guides)
        self._tokens = NextTokens(ops, rank.comm, rank.collectives, last, device.sampler, editor)
        self._prompts = PromptScorer(ops, config.most_seqs)
        has_drafts = card.config.draft_layers and self.runner.is_last
        self._drafts = ModelDrafts(ops, rank.collectives, self.runner) if has_drafts else None
        self._returned: ReturnedTokens | None = None
        if rank.tokens_link is not None and rank.links.is_first:
            self._returned = ReturnedTokens(rank.tokens_link, last, card.spec.max_rows, config.steps_in_flight)

    def settle(self) -> None:
        """Take the tokens that are on their way from the last stage. Raises `StageLostError` if they do not come."""
        if self._returned is not None:
            self._returned.settle()

    # ---- steps ----

    def compute(self, batch: BatchRequest) -> Computed:
        """A step's forward pass and what comes of it, which may run on when this returns.

        Raises:
            ValueError, ArithmeticError: this step cannot be computed; others can.
            StageLostError: another stage does not take part.
        """
        runner = self.runner
        if self._returned is not None and len(batch.rows):
            self._returned.before(batch)
        if batch.new_sequences:
            self._open(batch)
        if runner.graphs is not None and runner.is_plain_decode(batch):
            scored = runner.decode(runner.graphs, batch)
            return self._completed(batch, scored, scored.hidden) if runner.is_last else Computed(passed=runner.passed)
        runner.cache.tables.apply(batch.table_updates)
        if not len(batch.rows):  # sent for the sake of copies, or of a command
            return Computed()
        if not runner.is_last:
            runner.forward(batch)
            return Computed(passed=runner.passed)
        if batch.samples_behind_each:
            hidden = runner.forward(batch)
            return self._completed(batch, hidden, runner.kept)
        return self._with_prompts(batch)

    def _open(self, batch: BatchRequest) -> None:
        """Give the step's new sequences their rows."""
        self.runner.cache.tables.open_rows(new.row for new in batch.new_sequences)
        self._adapters.open(batch.new_sequences)
        if self.runner.is_last:
            self._prompts.open(batch.new_sequences)
            self._tokens.open(batch.new_sequences)

    def _with_prompts(self, batch: BatchRequest) -> Computed:
        """A step of the last stage that computes tokens behind which nothing is sampled."""
        runner, places = self.runner, SampledRows.of(batch).places(batch)
        asks_prompt = self._prompts.wants(batch)
        if not asks_prompt and self._drafts is None:
            sampling = runner.forward(batch, places)
            return self._completed(batch, sampling if len(places) else None)
        hidden = runner.forward(batch)
        prompt_logprobs, unusable = self._prompts.scores(runner.model, batch, hidden) if asks_prompt else ({}, ())
        sampling = self._ops.take_rows(hidden, places) if len(places) else None
        completed = self._completed(batch, sampling, runner.kept)
        return replace(completed, unusable=unusable, prompt_logprobs=prompt_logprobs)

    def _completed(self, batch: BatchRequest, sampling: Tensor | Scored | None, kept: Tensor = None) -> Computed:
        """A step's tokens, which `NextTokens` chooses by ``sampling``; and what the model drafts behind them, of what
        was ``kept`` for that of all of the step's tokens."""
        chosen = self._tokens.choose(batch, self.runner.model, sampling)
        if self._drafts is None:
            return Computed(chosen)
        return Computed(chosen, self._drafts.behind(batch, chosen, kept))

    # ---- steps that nothing comes of ----

    def warm_up(self) -> None:
        """Run a prefill and a decode on row 0 into the first blocks, one for each group: no sequence holds them yet."""
        groups = len(self._card.plan.groups)
        table = np.array([[0, group, 0, group] for group in range(groups)], dtype=np.int32)
        for count, updates in ((min(2, self._card.layout.block_size), table), (1, _NO_UPDATE)):
            batch = _trial(count, updates)
            self.runner.cache.tables.apply(batch.table_updates)
            self._try(batch, np.arange(count))
        self.runner.cache.tables.open_rows([0])

    def try_largest(self) -> None:
        """Run the largest step that there may be, without blocks: none is written or read."""
        tokens = min(self._config.most_batched_tokens, self._card.max_model_len)
        self._try(_trial(tokens, _NO_UPDATE), np.arange(min(self._config.most_seqs, tokens)))

    def _try(self, batch: BatchRequest, rows: NDArray[np.int64]) -> None:
        """Run a step up to logits of these rows."""
        hidden = self.runner.forward(batch)
        if not self.runner.is_last:
            return
        self.runner.model.logits(self._ops.take_rows(hidden, rows))
        if self._drafts is not None:
            self._drafts.behind(batch, Chosen(), self.runner.kept)


def _empty_cache(card: ModelCard, device: Device) -> CacheController:
    """An arena of the card's pool, and block tables over it."""
    spec = card.spec
    arena = device.ops.empty_bytes(spec.num_blocks * card.layout.block_bytes)
    shape = TableShape(spec.max_rows, len(card.plan.groups), spec.max_blocks, card.layout.block_size)
    return CacheController(card.layout, arena, device.block_tables(shape))


def _head_table(card: ModelCard, rank: Rank, layer: int) -> HeadTable:
    """Of a layer, or of a cache beside one."""
    plan, model = card.plan, card.config
    kept = model.heads_of(layer).cache_layer if layer < model.num_layers else layer
    places = plan.placement(rank.number, kept)
    policies = [model.policies[kept][head] for head in plan.kv_heads(rank.number)[kept]]

    def column(values: Any) -> KernelArray:
        return rank.ops.upload(np.ascontiguousarray(values, dtype=np.int32))

    return HeadTable(
        group=column(places[:, 0]),
        slot=column(places[:, 1]),
        window=column([policy.window for policy in policies]),
        sink=column([policy.sink for policy in policies]),
        both_ways=model.sees_both_ways(layer),
    )


def _trial(tokens: int, updates: NDArray[np.int32]) -> BatchRequest:
    """A step of a made-up sequence in row 0, without sampling."""
    return BatchRequest(
        step_id=0,
        rows=np.zeros(1, np.int32),
        starts=np.zeros(1, np.int32),
        query_lens=np.array([tokens], np.int32),
        token_ids=np.zeros(tokens, np.int32),
        sample=np.zeros(1, np.bool_),
        table_updates=updates,
    )
