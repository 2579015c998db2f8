"""One rank: its weights, its KV shard, and the execution of steps on them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_tables import TableShape
from headwise.cache_controller.cache_controller import CacheController
from headwise.errors import ConfigError, EngineDiedError, first_line
from headwise.kernels.base import HeadTable
from headwise.runtime.config.decode_reads import layer_elements
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card, with_pool
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.loader.grammar import Vocabulary
from headwise.runtime.loader.resolve import resolve_weights
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.models.attention.base import CachedAttention
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.base import Model
from headwise.runtime.models.shard import Shard
from headwise.runtime.models.weights import PreparedWeights
from headwise.runtime.ops.base import CapturingOps, KernelArray, Tensor, TensorOps
from headwise.runtime.ops.comm import CollectiveRanks, Collectives, Communicator
from headwise.runtime.ops.stage_links import HostLink, LinkedStage, StageLinks, StageLostError
from headwise.runtime.protocol.batch import (
    CHANGE_WEIGHTS,
    RESET_STORAGE,
    SLEEP,
    WAKE,
    BatchRequest,
    StepResult,
)
from headwise.runtime.protocol.copies import NO_REPORT
from headwise.runtime.protocol.running_step import RunningStep
from headwise.runtime.protocol.weights import WeightsToLoad
from headwise.runtime.worker.begun_step import BegunStep, Computed
from headwise.runtime.worker.decode_graphs import DecodeGraphs, Scored, padded_rows
from headwise.runtime.worker.device import Device, open_device
from headwise.runtime.worker.drafts import SampledRows
from headwise.runtime.worker.guides import Guides
from headwise.runtime.worker.kv_offload import KVOffload
from headwise.runtime.worker.let_go import LetGo
from headwise.runtime.worker.logit_editor import LogitEditor
from headwise.runtime.worker.model_drafts import ModelDrafts
from headwise.runtime.worker.model_loading import load_model
from headwise.runtime.worker.model_runner import Loads, ModelRunner
from headwise.runtime.worker.model_source import ModelSource, source_of, tried
from headwise.runtime.worker.next_tokens import Chosen, NextTokens
from headwise.runtime.worker.prefill_graphs import PrefillGraphs, padded_tokens, worthwhile_tokens
from headwise.runtime.worker.prompt_scorer import PromptScorer
from headwise.runtime.worker.returned_tokens import ReturnedTokens, give_back
from headwise.runtime.worker.row_adapters import AdaptersOfRows
from headwise.runtime.worker.which_graphs import told_graphs, without_graphs
from headwise.transfer.connectors.select import PeerAccess

_Part = TypeVar("_Part")
_OTHER_RANK = "another rank cannot have them"
_NO_UPDATE: NDArray[np.int32] = np.empty((0, 4), dtype=np.int32)


class LoadModel(Protocol):
    """See `load_model`."""

    def __call__(
        self,
        card: ModelCard,
        config: EngineConfig,
        directory: Path,
        ops: TensorOps,
        collectives: Collectives,
        shard: Shard,
        *,
        prepared: PreparedWeights,
    ) -> Model: ...


@dataclass(frozen=True)
class WorkerParts:
    """The parts of a worker that tests and simulations replace.

    clock:   in seconds, to measure steps
    collect: has the garbage collector look for what is gone but for what holds each other
    """

    read_card: Callable[[EngineConfig, Path], ModelCard] = read_model_card
    load_model: LoadModel = load_model
    open_copies: Callable[..., KVOffload] = KVOffload
    find_weights: Callable[[str, Path], Path] = resolve_weights
    clock: Callable[[], float] = time.perf_counter
    collect: Callable[[], Any] = gc.collect


class ModelWorker:
    """Loads one rank's part of the model and executes the engine's batches, in order.

    Holds no policy: which blocks, which rows and which tokens is the engine's business.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        rank: int,
        comm: Communicator,
        device: Device | None = None,
        parts: WorkerParts | None = None,
        peers: PeerAccess | None = None,
        link: HostLink | None = None,
        weights: WeightsToLoad | None = None,
    ) -> None:
        """
        rank:   of all stages' ranks
        comm:   of those of this one's stage
        device: the configured one, unless another is given
        peers:  how workers of other engines reach this one; None: there are none
        link:   to the ranks in its place in the next stage and the one before, which of the first stage is the last
                one; None: there are none
        weights: in place of those in ``model_dir``

        Raises:
            ModelError: these are other ones than the engine has read.
            ConfigError: what is configured cannot be had here, or is of more ranks than these.
        """
        self.rank = rank
        self._config = self._first_config = config
        self._model_dir = model_dir
        self._parts = parts or WorkerParts()
        self._peers = peers
        self._tokens_link = link if config.returns_tokens else None
        self.card: ModelCard = self._parts.read_card(config, model_dir)
        self._comm = comm
        if comm.size != config.tp_size or (link is None) != (config.pipeline_parallel_size == 1):
            raise ConfigError(
                f"tp_size {config.tp_size} and pipeline_parallel_size {config.pipeline_parallel_size} are "
                f"{config.ranks} ranks, and this worker is alone, as that of an engine without Ray is: leave them out, "
                "or serve by `headwise serve`"
            )
        self._device = device or open_device(config, threads_per_worker(config))
        self._ops = self._device.ops
        self._prepared = PreparedWeights()
        self._gone = LetGo(self._parts.collect)
        if weights is not None:
            self._take(self._source_of(weights))
        self._device.check(self.card, self._model_dir)
        self._kernels = self._device.kernels
        self._layers = self.card.plan.stages[rank // self.card.plan.tp_size]
        with self._device.current():
            self._collectives = self._device.collectives(comm)
            self._links = StageLinks() if link is None else self._device.stage_links(link, self._linked_stage())
            self._attention = self._over_cache()
            self._model = self._load_model()
        self._guides = Guides(lambda: Vocabulary(Tokenizer.from_directory(model_dir), self.card.config.vocab_size))
        self._prefill: PrefillGraphs | None = None
        self._copies: KVOffload | None = None
        self._is_asleep = False
        self._before: RunningStep | None = None
        self._ended = 0.0
        self._adapters = AdaptersOfRows([name for name, _ in self.card.adapters], self.card.spec.max_rows)

    def _linked_stage(self) -> LinkedStage:
        model, layers = self.card.config, self._layers
        rows = max(padded_tokens(self._config.most_batched_tokens), padded_rows(self.card.spec.max_rows))
        return LinkedStage(self.rank, model.stream_size, rows, layers.start == 0, layers.stop == model.num_layers)

    def _over_cache(self) -> CachedAttention:
        parts = self.card.token_parts
        ranks = CollectiveRanks(self._collectives, self._comm.rank, parts) if parts > 1 else None
        return attention_of(self.card.config).over_cache(self._ops, self._kernels, ranks)

    def _load_model(self) -> Model:
        shard = Shard.of(self.card.config, self.card.plan, self.rank)
        where = self.card, self._config, self._model_dir
        return self._parts.load_model(*where, self._ops, self._collectives, shard, prepared=self._prepared)

    def _head_table(self, layer: int) -> HeadTable:
        """Of a layer, or of a cache beside one."""
        plan, model = self.card.plan, self.card.config
        kept = model.heads_of(layer).cache_layer if layer < model.num_layers else layer
        places = plan.placement(self.rank, kept)
        policies = [model.policies[kept][head] for head in plan.kv_heads(self.rank)[kept]]

        def column(values: Any) -> KernelArray:
            return self._ops.upload(np.ascontiguousarray(values, dtype=np.int32))

        return HeadTable(
            group=column(places[:, 0]),
            slot=column(places[:, 1]),
            window=column([policy.window for policy in policies]),
            sink=column([policy.sink for policy in policies]),
            both_ways=model.sees_both_ways(layer),
        )

    def describe(self) -> str:
        """What was chosen at start, for the log."""
        plan, spec = self.card.plan, self.card.spec
        last = min(self._layers.stop, self.card.config.num_layers) - 1
        return (
            f"rank {self.rank}: device={self._device.name} tensors={self._ops.name} gemm={self._ops.products} "
            f"kernels={self._kernels.name} "
            f"dtype={self._config.dtype_name} weights_dtype={self._config.weights_dtype_name} "
            f"kv_dtype={self._config.kv_dtype_name} collectives={self._collectives.name} "
            f"groups={len(plan.groups)} slots={plan.slots_text} context_parallel={self.card.token_parts} "
            f"layers={self._layers.start}-{last} stages={self._stages_text()} "
            f"blocks={spec.num_blocks} x {self.card.layout.block_bytes} bytes "
            f"host_blocks={spec.num_host_blocks} storage={self._config.storage or 'none'} "
            f"peers={'none' if self._copies is None else self._copies.transports} "
            f"speculation={self._speculation()} "
            f"adapters={','.join(name for name, _ in self.card.adapters) or 'none'} "
            f"graphs={told_graphs(self._runner.graphs, self._prefill) or self._without_graphs()}"
        )

    def _stages_text(self) -> str:
        count = len(self.card.plan.stages)
        return f"{count} by {self._links.name}" if self._links.name else str(count)

    def _speculation(self) -> str:
        by_model = " with mtp" if self.card.config.draft_layers else ""
        by_model = " with eagle3" if self.card.config.eagle is not None else by_model
        return f"{self._config.speculation}{by_model}" if self._config.speculation else "none"

    def initialize_cache(self) -> None:
        """Allocate the arena and compile or load every kernel, so that the first request need not wait for that."""
        self.close()
        with self._device.current():
            if not self.card.spec.num_blocks:
                self.card = with_pool(self.card, self._config, self._measure_pool())
            if self._prefill is None:
                self._record_prefill()
            self._allocate_arena()
            self._warm_up()
            self._record_decode()
            if self.card.spec.num_host_blocks:
                where = self.rank, self._device, self._runner.cache.arena
                peers = {} if self._peers is None else {"peers": self._peers}
                self._copies = self._parts.open_copies(self._config, self.card, *where, **peers)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.card.spec.num_blocks

    @property
    def exports(self) -> tuple[bytes, ...]:
        """See `KVOffload.exports`."""
        return () if self._copies is None else self._copies.exports

    def _measure_pool(self) -> int:
        """Bytes for the pool: what the largest step and graphs leave of the device, on the rank that has the least."""
        self._allocate_arena()
        tokens = min(self._config.most_batched_tokens, self.card.max_model_len)
        batch = _trial(tokens, _NO_UPDATE)  # without blocks: none is written or read
        rows = np.arange(min(self._config.most_seqs, tokens))
        self._try(batch, rows)
        self._record_prefill()  # these stay; the others are over no blocks, and those to come are as large
        self._record_decode()
        spare = self._device.spare_bytes() >> 20  # MiB: exact up to 16 TiB
        self._let_go_of_cache()  # its tables are made anew beside the pool
        return self._least_of_ranks(spare) << 20

    def _allocate_arena(self) -> None:
        card, spec = self.card, self.card.spec
        arena = self._ops.empty_bytes(spec.num_blocks * card.layout.block_bytes)
        shape = TableShape(spec.max_rows, len(card.plan.groups), spec.max_blocks, card.layout.block_size)
        cache = CacheController(card.layout, arena, self._device.block_tables(shape))
        heads = {number: self._head_table(number) for number in card.config.caches_of(self._layers)}
        loads = Loads(lambda: self._copies is not None and self._copies.is_loading, self._wait_layer)
        own = self._model, self._device, self._attention, cache, heads, self._adapters
        runner = ModelRunner(card, *own, loads, self._links)
        runner.prefill, runner.graphs = self._prefill, self._make_graphs(runner)
        editor = LogitEditor(card.config.vocab_size, self._guides)
        self._tokens = NextTokens(self._ops, self._comm, self._collectives, runner.last, self._device.sampler, editor)
        self._prompts = PromptScorer(self._ops, self._config.most_seqs)
        has_drafts = card.config.draft_layers and runner.is_last
        self._drafts = ModelDrafts(self._ops, self._collectives, runner) if has_drafts else None
        self._runner = runner
        self._returned: ReturnedTokens | None = None
        if self._tokens_link is not None and self._links.is_first:
            in_flight = self._config.steps_in_flight
            self._returned = ReturnedTokens(self._tokens_link, runner.last, spec.max_rows, in_flight)

    def _wait_layer(self, layer: int) -> None:
        if self._copies is not None:
            self._copies.wait_layer(layer)

    def _make_graphs(self, runner: ModelRunner) -> DecodeGraphs | None:
        """Graphs over this model and arena, where steps can be graphs."""
        if self._without_graphs() or not isinstance(self._ops, CapturingOps):
            return None
        parts = self._ops, runner.score, runner.cache.tables, runner.last, self._is_so_on_all_ranks
        axes = self.card.config.axes
        return DecodeGraphs(*parts, self._tells_follows, axes, reads_jointly=runner.joint_share > 0)

    @property
    def _tells_follows(self) -> bool:
        """Whether kernels are to know of each step which sequences follow others: they keep states, and may get
        drafts."""
        return self.card.has_states and self._config.speculation > 0

    def _without_graphs(self) -> str:
        return without_graphs(self._config, self._ops, self._collectives, self.card.config.moe is not None)

    def _record_decode(self) -> None:
        if self._runner.graphs is not None:
            self._runner.graphs.record()

    def _record_prefill(self) -> None:
        """Record prefill over this model, which needs no cache."""
        if self._without_graphs() or not self._config.prefill_graphs or not isinstance(self._ops, CapturingOps):
            return
        most = min(self._most_prefill(), self._config.most_batched_tokens)
        self._prefill = PrefillGraphs(
            self._ops,
            most,
            self._config.most_sampled,
            self._is_so_on_all_ranks,
            gives_all=self.card.config.draft_layers > 0,
            followers=self._config.speculation * self._config.most_seqs if self._tells_follows else 0,
            links=self._links,
            layers=len(range(self.card.config.decoder_layers)[self._layers.start : self._layers.stop]),
            axes=self.card.config.axes,
        )
        self._prefill.record(self._model, self._attention)

    def _most_prefill(self) -> int:
        """Most tokens of steps by graphs: those asked for, or an estimate's, which is the least of all ranks'."""
        if self._config.prefill_graphs > 0:
            return self._config.prefill_graphs
        elements = layer_elements(self.card.config) / self._config.ranks
        most = worthwhile_tokens(elements, len(self._layers), self._device.products_per_s)
        return self._least_of_ranks(min(most, self._config.most_batched_tokens))

    def _least_of_ranks(self, number: int) -> int:
        """The same on all ranks. Up to 2**24, exactly."""
        gathered = self._comm.gather(np.array([[number]], dtype=np.float32))
        least = None if gathered is None else np.array([gathered.min()], dtype=np.int32)
        return int(self._comm.broadcast(least, (1,))[0])

    def _is_so_on_all_ranks(self, is_so: bool) -> bool:
        not_so = self._comm.all_reduce(np.array([not is_so], dtype=np.float32))
        return not not_so.any()

    def close(self) -> None:
        """Finish copies to and from the host, and let go of its memory. May be called again."""
        self._guides.close()
        if self._copies is not None:
            with self._device.current():
                self._copies.close()
            self._copies = None

    def _warm_up(self) -> None:
        """Run a prefill and a decode on row 0 into the first blocks, one for each group: no sequence holds them yet."""
        groups = len(self.card.plan.groups)
        table = np.array([[0, group, 0, group] for group in range(groups)], dtype=np.int32)
        for count, updates in ((min(2, self.card.layout.block_size), table), (1, _NO_UPDATE)):
            batch = _trial(count, updates)
            self._runner.cache.tables.apply(batch.table_updates)
            self._try(batch, np.arange(count))
        self._runner.cache.tables.open_rows([0])

    def _try(self, batch: BatchRequest, rows: NDArray[np.int64]) -> None:
        """Run a step that nothing comes of, up to logits of these rows."""
        hidden = self._runner.forward(batch)
        if not self._runner.is_last:
            return
        self._model.logits(self._ops.take_rows(hidden, rows))
        if self._drafts is not None:
            self._drafts.behind(batch, Chosen(), self._runner.kept)

    # ---- sleep ----

    def _obey(self, command: str, weights: WeightsToLoad | None) -> tuple[int, str]:
        """Carry out a batch's command; the number of blocks that it had storage forget, and why it was refused on all
        ranks, which have what they had then; empty: it was not.

        Raises `EngineDiedError` if it failed: ranks must never differ in what they hold.
        """
        try:
            if command == SLEEP:
                self._sleep()
            elif command == WAKE:
                self._wake()
            elif command == CHANGE_WEIGHTS and weights is not None:
                return 0, self._change_weights(weights)
            elif command == RESET_STORAGE and self._copies is not None:
                return self._copies.reset_storage(), ""
            else:
                raise ValueError(f"a worker without host_cache has no storage to obey {command!r}")
        except Exception as error:
            named = command.replace("_", " ")
            raise EngineDiedError(f"rank {self.rank} could not {named}: {error}") from error
        return 0, ""

    def _sleep(self) -> None:
        """Let go of weights and arena. What the host has stays, and its copies to and from storage go on."""
        if self._returned is not None:
            self._returned.settle()
        if self._copies is not None:
            self._copies.attach_device(None)
        self._is_asleep = True
        self._gone.note(self._prefill, self._runner, self._model)
        self._prefill = None
        self._let_go_of_cache()
        del self._model
        self._forget_weights()

    def _forget_weights(self) -> None:
        """Of a model that is no more."""
        self._gone.note(*self._prepared.weights)
        self._prepared.clear()
        self._give_back_memory()

    def _give_back_memory(self) -> None:
        self._gone.see_them_gone()
        self._ops.give_back_memory()

    def _let_go_of_cache(self) -> None:
        self._gone.note(self._runner.graphs, self._runner.cache.arena)
        self._runner.graphs = None  # which hold the runner
        del self._runner, self._drafts, self._tokens

    def _wake(self) -> None:
        """Load the weights again, and start with an empty arena."""
        self._model = self._load_model()
        self._record_prefill()
        self._allocate_arena()
        self._is_asleep = False
        self._warm_up()
        self._record_decode()
        if self._copies is not None:
            self._copies.attach_device(self._runner.cache.arena)

    def _source_of(self, weights: WeightsToLoad) -> ModelSource:
        """See `source_of`."""
        return source_of(weights, self._first_config, self.card, self._parts.find_weights, self._parts.read_card)

    def _take(self, source: ModelSource) -> None:
        """From now on the model is loaded from there."""
        self._config, self._model_dir, self.card = source.config, source.directory, source.card

    def _change_weights(self, weights: WeightsToLoad) -> str:
        """Load others in place of the model's; what the arena and the host have stays. Asleep: when it wakes.

        Returns why they cannot be had; empty: they are there. Else the model has what it had: where only adapters are
        others it is made beside the other one, of the same weights; else there is no room for both, and it is loaded
        again.
        """
        found, why = tried(lambda: self._source_of(weights))
        if not self._is_so_on_all_ranks(not why) or found is None:
            return why or _OTHER_RANK
        former = ModelSource(self._config, self._model_dir, self.card)
        is_same = found.has_weights_of(former)
        self._take(found)
        if self._is_asleep:
            self._adapters.rename([name for name, _ in self.card.adapters])
            return ""
        if not is_same:
            self._let_go_of_model()
            self._forget_weights()
        model, why = tried(self._load_model)
        if not self._is_so_on_all_ranks(not why) or model is None:
            del model
            self._take(former)
            if not is_same:
                self._forget_weights()
                self._use(self._load_model())
            return why or _OTHER_RANK
        if is_same:
            self._let_go_of_model()
            self._give_back_memory()
        self._use(model)
        return ""

    def _let_go_of_model(self) -> None:
        runner = self._runner
        self._gone.note(self._prefill, runner.graphs, self._model)
        self._prefill = runner.prefill = runner.graphs = None  # which hold it
        del self._model, runner.model

    def _use(self, model: Model) -> None:
        """Go on with this one."""
        self._model = self._runner.model = model
        self._adapters.rename([name for name, _ in self.card.adapters])
        self._record_prefill()
        self._runner.prefill, self._runner.graphs = self._prefill, self._make_graphs(self._runner)
        self._record_decode()

    # ---- steps ----

    def execute(self, batch: BatchRequest) -> StepResult:
        """Run one step to its end, see `begin`."""
        return self.begin(batch).result()

    def begin(self, batch: BatchRequest) -> RunningStep:
        """Begin one step. What fails the step alone, or some of its sequences, is reported in the result.

        A step that is on the device only, whose tokens are chosen there, may still run; the next one then follows it
        there. All others are over.

        Raises:
            EngineDiedError: whatever else went wrong, then or in `RunningStep.result`. Copies may be under way, to
                blocks that the engine would give to others, and other ranks may wait for this one: it must not be asked
                for anything more.
        """
        return self._within(batch.step_id, lambda: self._begin(batch))

    def _within(self, step_id: int, part: Callable[[], _Part]) -> _Part:
        """A part of a step, on the device."""
        try:
            with self._device.current():
                return part()
        except StageLostError as error:
            before = (self.rank - self.card.plan.tp_size) % self.card.plan.ranks
            raise EngineDiedError(f"rank {self.rank} waits in step {step_id} for rank {before}: {error}") from error
        except EngineDiedError:
            raise
        except Exception as error:
            raise EngineDiedError(
                f"rank {self.rank} failed in step {step_id}: {type(error).__name__}: {first_line(error)}"
            ) from error

    def _begin(self, batch: BatchRequest) -> RunningStep:
        if self._before is not None and (batch.command or len(batch.cache_swap_metadata.loads)):
            self._before.result()  # what comes now is not in the order of the device's stream
        started, forgotten, computed, failure = self._parts.clock(), 0, Computed(), ""
        if self._copies is not None:
            self._copies.start(batch)
        if batch.command:
            forgotten, failure = self._obey(batch.command, batch.weights)
        try:
            if not self._is_asleep:
                computed = self._compute(batch)
        except (ValueError, ArithmeticError) as error:
            if self._config.ranks > 1:
                raise  # the others are still within the step: with the next one, this rank's part of it would be mixed
            failure = f"{type(error).__name__} in step {batch.step_id}: {error}"

        def end() -> StepResult:
            return self._within(batch.step_id, lambda: self._end(batch, started, computed, forgotten, failure))

        before, self._before = self._before, BegunStep(computed, end)
        is_loading = self._copies is not None and self._copies.is_loading
        # A host that waits for other stages, in the next step, would meanwhile tell nothing of this one.
        if is_loading or computed.is_done or self._links.holds_host:
            if before is not None:
                before.result()
            self._before.result()
        return self._before

    def _end(self, batch: BatchRequest, started: float, computed: Computed, forgotten: int, failure: str) -> StepResult:
        token_ids, accepted, broken = computed.tokens(batch)
        if failure:
            token_ids = np.empty(0, np.int32)
        if self._tokens_link is not None and self._links.is_last:
            give_back(self._tokens_link, token_ids[computed.chosen.wanted])
        copies = self._copies.finish(batch) if self._copies is not None else NO_REPORT
        ended = self._parts.clock()
        compute_s, self._ended = ended - max(started, self._ended), ended
        return StepResult(
            batch.step_id,
            self.rank,
            token_ids,
            computed.chosen.logprobs,
            broken,
            copies=copies,
            forgotten=forgotten,
            compute_s=compute_s,
            error=failure or None,
            prompt_logprobs=computed.prompt_logprobs,
            accepted=accepted,
            proposed=computed.drafted.of(len(batch.rows)),
        )

    def _compute(self, batch: BatchRequest) -> Computed:
        runner = self._runner
        if self._returned is not None and len(batch.rows):
            self._returned.before(batch)
        if batch.new_sequences:
            runner.cache.tables.open_rows(new.row for new in batch.new_sequences)
            self._adapters.open(batch.new_sequences)
            if runner.is_last:
                self._prompts.open(batch.new_sequences)
                self._tokens.open(batch.new_sequences)
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
        places = SampledRows.of(batch).places(batch)
        asks_prompt = self._prompts.wants(batch)
        if not asks_prompt and self._drafts is None:
            sampling = runner.forward(batch, places)
            return self._completed(batch, sampling if len(places) else None)
        hidden = runner.forward(batch)
        prompt_logprobs, unusable = self._prompts.scores(self._model, batch, hidden) if asks_prompt else ({}, ())
        sampling = self._ops.take_rows(hidden, places) if len(places) else None
        return replace(
            self._completed(batch, sampling, runner.kept), unusable=unusable, prompt_logprobs=prompt_logprobs
        )

    def _completed(self, batch: BatchRequest, sampling: Tensor | Scored | None, kept: Tensor = None) -> Computed:
        """A step's tokens, which `NextTokens` chooses by ``sampling``; and what the model drafts behind them, of what
        was ``kept`` for that of all of the step's tokens."""
        chosen = self._tokens.choose(batch, self._model, sampling)
        if self._drafts is None:
            return Computed(chosen)
        return Computed(chosen, self._drafts.behind(batch, chosen, kept))


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
