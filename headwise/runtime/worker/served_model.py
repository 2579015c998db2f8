"""The model that a rank serves, and the cache that it computes over: loaded, let go of, and changed for others."""

from __future__ import annotations

from dataclasses import replace

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, with_pool
from headwise.runtime.models.attention.base import CachedAttention
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.base import Model
from headwise.runtime.models.shard import Shard
from headwise.runtime.models.weights import PreparedWeights
from headwise.runtime.ops.comm import CollectiveRanks
from headwise.runtime.protocol.weights import WeightsToLoad
from headwise.runtime.worker.guides import Guides
from headwise.runtime.worker.let_go import LetGo
from headwise.runtime.worker.model_runner import Loads, ModelRunner
from headwise.runtime.worker.model_source import ModelSource, tried
from headwise.runtime.worker.prefill_graphs import PrefillGraphs
from headwise.runtime.worker.rank import Rank
from headwise.runtime.worker.rank_graphs import RankGraphs, told_graphs
from headwise.runtime.worker.row_adapters import AdaptersOfRows
from headwise.runtime.worker.step_computer import StepComputer
from headwise.runtime.worker.worker_parts import WorkerParts

_OTHER_RANK = "another rank cannot have them"


class ServedModel:
    """Of one rank. Nobody else may hold its parts for longer than a step: their memory must be free for what takes
    their place.

    source:    what the model is, or asleep will be, loaded from
    is_asleep: there are neither model nor steps
    model:     with weights
    attention: over the cache
    prefill:   other steps than decodes, where they are graphs
    steps:     over the arena, once there is one
    """

    model: Model
    steps: StepComputer

    def __init__(
        self,
        rank: Rank,
        source: ModelSource,
        started_with: EngineConfig,
        parts: WorkerParts,
        guides: Guides,
        loads: Loads,
    ) -> None:
        """
        started_with: what other weights are served by, too
        guides, loads: of the steps

        Raises:
            ModelError: the model cannot be loaded, or is another one by now.
        """
        self.source, self.is_asleep = source, False
        self._rank, self._started_with, self._parts = rank, started_with, parts
        self._guides, self._loads = guides, loads
        self._prepared = PreparedWeights()
        self._gone = LetGo(parts.collect)
        self.attention = _over_cache(rank, source.card)
        self.model = self._load()
        self.prefill: PrefillGraphs | None = None
        self._adapters = AdaptersOfRows(self._adapter_names, self.card.spec.max_rows)

    @property
    def config(self) -> EngineConfig:
        """With the adapters that are served."""
        return self.source.config

    @property
    def card(self) -> ModelCard:
        """With the weights and adapters that are served."""
        return self.source.card

    @property
    def runner(self) -> ModelRunner:
        """That of the steps."""
        return self.steps.runner

    @property
    def told_graphs(self) -> str:
        """Which steps are graphs, or why none is, for the log."""
        return told_graphs(self.runner.graphs, self.prefill) or self._graphs.lacking

    @property
    def _graphs(self) -> RankGraphs:
        return RankGraphs(self._rank, self.source)

    @property
    def _adapter_names(self) -> list[str]:
        return [name for name, _ in self.card.adapters]

    def _load(self) -> Model:
        shard = Shard.of(self.card.config, self.card.plan, self._rank.number)
        where, own = self.source.directory, (self._rank.ops, self._rank.collectives, shard)
        return self._parts.load_model(self.card, self.config, where, *own, prepared=self._prepared)

    # ---- cache ----

    def initialize_cache(self) -> None:
        """Allocate the arena, of a pool that is measured where it has no size yet, and make all steps ready.

        Raises:
            ConfigError: there is no room for the pool.
        """
        if not self.card.spec.num_blocks:
            self.source = replace(self.source, card=with_pool(self.card, self.config, self._measure_pool()))
        if self.prefill is None:
            self._record_prefill()
        self._allocate_arena()
        self.steps.warm_up()
        self._record_decode()

    def _measure_pool(self) -> int:
        """Bytes for the pool: what the largest step and graphs leave of the device, on the rank that has the least."""
        self._allocate_arena()
        self.steps.try_largest()
        self._record_prefill()  # these stay; the others are over no blocks, and those to come are as large
        self._record_decode()
        spare = self._rank.device.spare_bytes() >> 20  # MiB: exact up to 16 TiB
        self._let_go_of_cache()  # its tables are made anew beside the pool
        return self._rank.agreement.least(spare) << 20

    def _allocate_arena(self) -> None:
        own = self.source, self.model, self.attention, self._adapters
        self.steps = StepComputer(self._rank, *own, self._guides, self._loads)
        self._give_graphs()

    def _give_graphs(self) -> None:
        """Have steps run by the model's graphs: of decodes, those that are recorded next."""
        self.runner.prefill, self.runner.graphs = self.prefill, self._graphs.decode(self.runner)

    def _record_prefill(self) -> None:
        self.prefill = self._graphs.prefill(self.model, self.attention)

    def _record_decode(self) -> None:
        if self.runner.graphs is not None:
            self.runner.graphs.record()

    # ---- sleep ----

    def sleep(self) -> None:
        """Let go of weights and arena."""
        self.is_asleep = True
        self._gone.note(self.prefill, self.runner, self.model)
        self.prefill = None
        self._let_go_of_cache()
        del self.model
        self._forget_weights()

    def wake(self) -> None:
        """Load the weights again, and start with an empty arena.

        Raises:
            ModelError: they cannot be loaded, or are other ones by now.
        """
        self.model = self._load()
        self.initialize_cache()
        self.is_asleep = False

    def _let_go_of_cache(self) -> None:
        self._gone.note(self.runner.graphs, self.runner.cache.arena)
        self.runner.graphs = None  # which hold the runner
        del self.steps

    def _forget_weights(self) -> None:
        """Of a model that is no more."""
        self._gone.note(*self._prepared.weights)
        self._prepared.clear()
        self._give_back_memory()

    def _give_back_memory(self) -> None:
        self._gone.see_them_gone()
        self._rank.ops.give_back_memory()

    # ---- other weights ----

    def change_weights(self, weights: WeightsToLoad) -> str:
        """Load others in place of the model's; what the arena and the host have stays. Asleep: when it wakes.

        Returns why they cannot be had; empty: they are there. Else the model has what it had: where only adapters are
        others it is made beside the other one, of the same weights; else there is no room for both, and it is loaded
        again.
        """
        found, why = tried(lambda: self._parts.source_of(weights, self._started_with, self.card))
        if not self._rank.agreement.is_so(not why) or found is None:
            return why or _OTHER_RANK
        former = self.source
        is_same = found.has_weights_of(former)
        self.source = found
        if self.is_asleep:
            self._adapters.rename(self._adapter_names)
            return ""
        if not is_same:
            self._let_go_of_model()
            self._forget_weights()
        model, why = tried(self._load)
        if not self._rank.agreement.is_so(not why) or model is None:
            del model
            self.source = former
            if not is_same:
                self._forget_weights()
                self._use(self._load())
            return why or _OTHER_RANK
        if is_same:
            self._let_go_of_model()
            self._give_back_memory()
        self._use(model)
        return ""

    def _let_go_of_model(self) -> None:
        runner = self.runner
        self._gone.note(self.prefill, runner.graphs, self.model)
        self.prefill = runner.prefill = runner.graphs = None  # which hold it
        del self.model, runner.model

    def _use(self, model: Model) -> None:
        """Go on with this one."""
        self.model = self.runner.model = model
        self._adapters.rename(self._adapter_names)
        self._record_prefill()
        self._give_graphs()
        self._record_decode()


def _over_cache(rank: Rank, card: ModelCard) -> CachedAttention:
    parts = card.token_parts
    ranks = CollectiveRanks(rank.collectives, rank.comm.rank, parts) if parts > 1 else None
    return attention_of(card.config).over_cache(rank.ops, rank.device.kernels, ranks)
