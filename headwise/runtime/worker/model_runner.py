"""Runs one rank's model over the cache: as graphs, as one call of all layers, or layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.cache_controller import CacheController
from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable, HostLengths, JointKernels
from headwise.kernels.joint import joint_of
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.models.attention.base import CachedAttention, LayerCache
from headwise.runtime.models.attention.wanted import ending_at
from headwise.runtime.models.base import Model, PagedAttentionLayer, PagedCache
from headwise.runtime.ops.base import Fetch, KernelArray, Tensor
from headwise.runtime.ops.stage_links import StageLinks
from headwise.runtime.protocol.batch import UP_TO_THEMSELVES, BatchRequest
from headwise.runtime.worker.decode_graphs import DecodeGraphs, Scored
from headwise.runtime.worker.device import Device
from headwise.runtime.worker.drafts import Spread, spread
from headwise.runtime.worker.next_tokens import NOTHING
from headwise.runtime.worker.prefill_graphs import PrefillGraphs, StepGraphs
from headwise.runtime.worker.row_adapters import AdaptersOfRows


@dataclass(frozen=True)
class Loads:
    """Of blocks into the cache, while steps go on.

    is_loading: whether some are under way
    wait:       until a layer's are there
    """

    is_loading: Callable[[], bool]
    wait: Callable[[int], None]


@dataclass(frozen=True)
class DeviceStep:
    """A step on the device: its tokens, int32 ``[T]``, their positions, as `TensorOps.rotation` takes them, the rows of
    its sequences, int32 ``[n]``, and what attention is told."""

    tokens: KernelArray
    positions: KernelArray
    rows: KernelArray
    batch: AttentionBatch


class ModelRunner:
    """Over one arena.

    heads:   of caches of the layers of this rank's stage, see `ModelConfig.caches_of`: the layers' first
    links:   to other stages' ranks
    last:    tokens of the steps before
    graphs:  decode steps, where they are graphs
    prefill: other steps, likewise
    kept:    of a model that drafts: what `Model.draft` is given of all tokens that `forward` computed last
    passed:  of another stage than the last: a number of what it gave the next one last, which comes when that is there
    """

    def __init__(
        self,
        card: ModelCard,
        model: Model,
        device: Device,
        attention: CachedAttention,
        cache: CacheController,
        heads: Mapping[int, HeadTable],
        adapters: AdaptersOfRows,
        loads: Loads,
        links: StageLinks,
    ) -> None:
        self.model, self.cache = model, cache
        self.last = device.last_sampled(card.spec.max_rows)
        self.graphs: DecodeGraphs | None = None
        self.prefill: PrefillGraphs | None = None
        self.kept: Tensor = None
        self.passed: Fetch = NOTHING
        self._card, self._ops, self._kernels = card, device.ops, device.kernels
        self._attention, self._heads, self._adapters, self._loads = attention, heads, adapters, loads
        self._of_caches = tuple(card.layouts[cache] for cache in heads), tuple(heads.values())
        self._links, self.is_last, self._axes = links, links.is_last, card.config.axes
        self._upload, self._upload_joint = self._ops.step_upload(), self._ops.step_upload()

    # ---- steps ----

    def is_plain_decode(self, batch: BatchRequest) -> bool:
        """Whether a token is sampled behind each one, of no more than there may be sequences, and nothing is being
        loaded meanwhile."""
        is_decode = batch.samples_behind_each and not self._is_enqueued_anew(batch) and not self._adapters.are_in(batch)
        return is_decode and 0 < batch.num_tokens <= self._card.spec.max_rows and not self._loads.is_loading()

    def decode(self, graphs: DecodeGraphs, batch: BatchRequest) -> Scored:
        """A step that `is_plain_decode`, with its table updates. Another stage than the last gives the next one what
        comes of it."""
        each = spread(batch)
        tokens, updates = self.last.inputs(batch), batch.table_updates
        self._links.receive(batch.num_tokens)
        positions = each.turned(each.starts, self._axes)
        scored = graphs.step(
            tokens, positions, each.starts + 1, each.rows, updates, each.follows, self._joint_of(each)
        )  # fmt: skip
        if not self.is_last and scored.hidden is not None:
            self._pass_on(self._ops.from_kernel_array(scored.hidden[: batch.num_tokens]))
        return scored

    def _pass_on(self, stream: Tensor) -> None:
        """Give the next stage the residual stream behind a step's layers."""
        self._links.send(stream)
        if not self._links.holds_host:  # else it was waited for
            self.passed = self._ops.fetch(self._ops.kernel_array(stream[:1, :1]))

    def score(self, token_ids: KernelArray, positions: KernelArray, step: AttentionBatch) -> Scored:
        """What a decode step computes; only enqueues."""
        stream = self._links.place(len(token_ids))
        hidden = self.model.forward(token_ids, positions, self.attention(step), stream=stream)
        if not self.is_last:
            return Scored(None, None, hidden=self._ops.kernel_array(hidden))
        scores = self.model.scores(hidden)
        drafts = self._card.config.draft_layers > 0
        kept = self._ops.kernel_array(self.model.for_drafts(hidden)) if drafts else None
        return Scored(scores, None if scores is None else self._ops.greedy(scores), hidden=kept)

    def forward(self, batch: BatchRequest, wanted: NDArray[np.int64] | None = None) -> Tensor | None:
        """Hidden states of the step's tokens, or of the ``wanted`` ones, by place in the step; maybe None for none. Of
        another stage than the last, which gives the next one what comes of it: None."""
        if self._adapters.are_in(batch):
            return self._forward_adapted(batch, wanted)
        return self._forward_with(batch, wanted, self._graphs_of(batch, wanted))

    @staticmethod
    def _is_enqueued_anew(batch: BatchRequest) -> bool:
        """Whether no graph has what the step needs: embeddings, which come from the host, or tokens that see others
        behind themselves."""
        return batch.embeds is not None or len(batch.sees) > 0

    def _forward_adapted(self, batch: BatchRequest, wanted: NDArray[np.int64] | None) -> Tensor | None:
        """The same of a step of which some rows go by adapters: without graphs."""
        self.model.adapted = self._adapters.of(batch)
        try:
            return self._forward_with(batch, wanted, None)
        finally:
            self.model.adapted = None

    def _forward_with(
        self, batch: BatchRequest, wanted: NDArray[np.int64] | None, graphs: StepGraphs | None
    ) -> Tensor | None:
        upload: Callable[..., Sequence[KernelArray]] = self._upload
        if graphs is not None:
            upload = partial(graphs.upload, wanted=wanted)
        step = self.on_device(spread(batch), self.last.inputs(batch), upload, batch.sees)
        self.last.fill(step.tokens, step.batch.cu_seqlens_q, step.rows)
        stream = self._links.receive(batch.num_tokens)
        if graphs is not None:
            hidden = graphs.forward(self.attend, step.batch, batch.num_tokens, wanted)
        else:
            given = None if batch.embeds is None else (batch.embeds.rows, batch.embeds.values)
            hidden = self.model.forward(step.tokens, step.positions, self.attention(step.batch), given, wanted, stream)
        if not self.is_last:
            self._pass_on(hidden)
            return None
        if self._card.config.draft_layers:
            self.kept = self.model.for_drafts(hidden) if graphs is None else graphs.kept
        return hidden

    def on_device(
        self,
        each: Spread,
        tokens: NDArray[np.int32],
        upload: Callable[..., Sequence[KernelArray]],
        sees: NDArray[np.int32] = UP_TO_THEMSELVES,
    ) -> DeviceStep:
        """These sequences, of ``tokens [T]``, and their block tables.

        upload: as `TensorOps.step_upload` gives it
        sees:   see `BatchRequest`
        """
        seq_lens = each.starts + each.query_lens
        positions, cu_seqlens = each.positions(len(tokens))
        told: dict[str, NDArray[np.int32]] = {}
        if each.follows is not None and self._card.has_states:
            told["follows_on_device"] = each.follows
        if len(sees):
            told["sees"] = sees
        given = upload(tokens, each.turned(positions, self._axes), cu_seqlens, seq_lens, each.rows, *told.values())
        on_device, places, begins, lengths, rows, *behind = given
        more = dict(zip(told, behind, strict=True))
        tables = self.cache.tables
        gathered = tables.gather(rows, lengths, tables.shape.columns(int(seq_lens.max())))
        known, longest = HostLengths(cu_seqlens, seq_lens), int(each.query_lens.max())
        if (joint := self._joint_of(each)) is not None:
            (more["joint"],) = self._upload_joint(joint)
        batch = AttentionBatch(
            begins, lengths, gathered, tables.shape.groups, longest, known, each.follows, each.shared, **more
        )  # fmt: skip
        return DeviceStep(on_device, places, rows, batch)

    @property
    def joint_share(self) -> int:
        """See `JointKernels`."""
        return self._kernels.joint_share if isinstance(self._kernels, JointKernels) else 0

    def _joint_of(self, each: Spread) -> NDArray[np.int32] | None:
        """What kernels of a device read together of a step."""
        share = 0 if each.shared is None else self.joint_share
        return joint_of(each.shared, share) if each.shared is not None and share else None

    def _graphs_of(self, batch: BatchRequest, wanted: NDArray[np.int64] | None) -> StepGraphs | None:
        """Those that a step runs by, if it has no embeddings, which come from the host, and they give all rows where
        all are wanted."""
        graphs = None if self.prefill is None or self._is_enqueued_anew(batch) else self.prefill.of(batch.num_tokens)
        return None if graphs is not None and graphs.wanted and wanted is None else graphs

    # ---- attention ----

    def attention(self, step: AttentionBatch) -> PagedAttentionLayer:
        """What the model calls in each layer of a step."""
        return _PagedAttention(self, step)

    def attend(
        self,
        step: AttentionBatch,
        layer: int,
        projected: Sequence[Any],
        out: KernelArray | None = None,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """A layer's attention over the cache, to which it writes what the step adds. out, wanted: see `LayerCache`"""
        sides = self._card.config.sides_of(layer)

        def wait() -> None:
            for each in (layer, *sides):
                self._loads.wait(each)

        layout, heads = self._where(layer)
        cache = LayerCache(self.cache.arena, layout, step, heads, wait, out, wanted, tuple(map(self._where, sides)))
        return self._attention(cache, *projected)

    def _where(self, layer: int) -> tuple[BlockLayout, HeadTable]:
        """Where this rank's members of a layer, or of a cache beside it, lie."""
        return self._card.layouts[layer], self._heads[layer]

    def paged_cache(self, step: AttentionBatch) -> PagedCache | None:
        """The cache, for models with kernels of their own over it: where others were asked for, or ranks keep tokens
        together, there is none."""
        if self._kernels.name != "numba" or self._card.token_parts > 1:
            return None
        wait = self._loads.wait if self._loads.is_loading() else None
        layouts, heads = self._of_caches
        return PagedCache(self.cache.arena, layouts, step, heads, wait)

    def ending_at(self, step: AttentionBatch, rows: NDArray[np.int64]) -> AttentionBatch:
        """See `PagedAttentionLayer.ending_at`."""
        return ending_at(step, rows, self._ops)


class _PagedAttention:
    """The `PagedAttentionLayer` of one step."""

    def __init__(self, runner: ModelRunner, step: AttentionBatch) -> None:
        self._runner = runner
        self._step = step

    def __call__(self, layer: int, *projected: Any, wanted: NDArray[np.int64] | None = None) -> Tensor:
        return self._runner.attend(self._step, layer, projected, wanted=wanted)

    def paged(self) -> PagedCache | None:
        return self._runner.paged_cache(self._step)

    def ending_at(self, rows: NDArray[np.int64]) -> _PagedAttention:
        return _PagedAttention(self._runner, self._runner.ending_at(self._step, rows))

    def tokens(self) -> KernelArray | None:
        return self._step.cu_seqlens_q[-1:]
