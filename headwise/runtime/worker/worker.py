"""One rank: its weights, its KV shard, and the execution of steps on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from headwise.errors import ConfigError, EngineDiedError, first_line
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.loader.grammar import Vocabulary
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.ops.comm import Communicator
from headwise.runtime.ops.stage_links import HostLink, StageLostError
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
from headwise.runtime.worker.device import Device, open_device
from headwise.runtime.worker.guides import Guides
from headwise.runtime.worker.kv_offload import KVOffload
from headwise.runtime.worker.model_runner import Loads
from headwise.runtime.worker.model_source import ModelSource
from headwise.runtime.worker.rank import Rank
from headwise.runtime.worker.returned_tokens import give_back
from headwise.runtime.worker.served_model import ServedModel
from headwise.runtime.worker.worker_parts import WorkerParts
from headwise.transfer.connectors.select import PeerAccess

_Part = TypeVar("_Part")


class ModelWorker:
    """Loads one rank's part of the model and executes the engine's batches, in order.

    Holds no policy: which blocks, which rows and which tokens is the engine's business.

    served: the model, and its cache on the device
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
        self._peers, self._parts = peers, parts or WorkerParts()
        source = ModelSource(config, model_dir, self._parts.read_card(config, model_dir))
        if comm.size != config.tp_size or (link is None) != (config.pipeline_parallel_size == 1):
            raise ConfigError(
                f"tp_size {config.tp_size} and pipeline_parallel_size {config.pipeline_parallel_size} are "
                f"{config.ranks} ranks, and this worker is alone, as that of an engine without Ray is: leave them out, "
                "or serve by `headwise serve`"
            )
        self._device = device or open_device(config, threads_per_worker(config))
        if weights is not None:
            source = self._parts.source_of(weights, config, source.card)
        self._device.check(source.card, source.directory)
        vocab_size = source.card.config.vocab_size
        self._guides = Guides(lambda: Vocabulary(Tokenizer.from_directory(model_dir), vocab_size))
        self._copies: KVOffload | None = None
        with self._device.current():
            self._own = Rank.connected(rank, self._device, comm, link, source)
            loads = Loads(self._is_loading, self._wait_layer)
            self.served = ServedModel(self._own, source, config, self._parts, self._guides, loads)
        self._before: RunningStep | None = None
        self._ended = 0.0

    @property
    def card(self) -> ModelCard:
        """With the weights and adapters that are served, and the pool once it is measured."""
        return self.served.card

    def describe(self) -> str:
        """What was chosen at start, for the log."""
        config, card, own, ops = self.served.config, self.card, self._own, self._device.ops
        plan, spec = card.plan, card.spec
        last = min(own.layers.stop, card.config.num_layers) - 1
        return (
            f"rank {self.rank}: device={self._device.name} tensors={ops.name} gemm={ops.products} "
            f"kernels={self._device.kernels.name} "
            f"dtype={config.dtype_name} weights_dtype={config.weights_dtype_name} "
            f"kv_dtype={config.kv_dtype_name} collectives={own.collectives.name} "
            f"groups={len(plan.groups)} slots={plan.slots_text} context_parallel={card.token_parts} "
            f"layers={own.layers.start}-{last} stages={self._stages_text()} "
            f"blocks={spec.num_blocks} x {card.layout.block_bytes} bytes "
            f"host_blocks={spec.num_host_blocks} storage={config.storage or 'none'} "
            f"peers={'none' if self._copies is None else self._copies.transports} "
            f"speculation={self._speculation()} "
            f"adapters={','.join(name for name, _ in card.adapters) or 'none'} "
            f"graphs={self.served.told_graphs}"
        )

    def _stages_text(self) -> str:
        count, links = len(self.card.plan.stages), self._own.links
        return f"{count} by {links.name}" if links.name else str(count)

    def _speculation(self) -> str:
        speculation = self.served.config.speculation
        by_model = " with mtp" if self.card.config.draft_layers else ""
        by_model = " with eagle3" if self.card.config.eagle is not None else by_model
        return f"{speculation}{by_model}" if speculation else "none"

    def initialize_cache(self) -> None:
        """Allocate the arena and compile or load every kernel, so that the first request need not wait for that."""
        self.close()
        with self._device.current():
            self.served.initialize_cache()
            if self.card.spec.num_host_blocks:
                where = self.rank, self._device, self.served.runner.cache.arena
                peers = {} if self._peers is None else {"peers": self._peers}
                self._copies = self._parts.open_copies(self.served.config, self.card, *where, **peers)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.card.spec.num_blocks

    @property
    def exports(self) -> tuple[bytes, ...]:
        """See `KVOffload.exports`."""
        return () if self._copies is None else self._copies.exports

    def close(self) -> None:
        """Finish copies to and from the host, and let go of its memory. May be called again."""
        self._guides.close()
        if self._copies is not None:
            with self._device.current():
                self._copies.close()
            self._copies = None

    def _is_loading(self) -> bool:
        """Whether copies to the device are under way."""
        return self._copies is not None and self._copies.is_loading

    def _wait_layer(self, layer: int) -> None:
        if self._copies is not None:
            self._copies.wait_layer(layer)

    # ---- commands ----

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
                return 0, self.served.change_weights(weights)
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
        self.served.steps.settle()
        if self._copies is not None:
            self._copies.attach_device(None)
        self.served.sleep()

    def _wake(self) -> None:
        """Load the weights again, and start with an empty arena."""
        self.served.wake()
        if self._copies is not None:
            self._copies.attach_device(self.served.runner.cache.arena)

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
            if not self.served.is_asleep:
                computed = self.served.steps.compute(batch)
        except (ValueError, ArithmeticError) as error:
            if self.served.config.ranks > 1:
                raise  # the others are still within the step: with the next one, this rank's part of it would be mixed
            failure = f"{type(error).__name__} in step {batch.step_id}: {error}"

        def end() -> StepResult:
            return self._within(batch.step_id, lambda: self._end(batch, started, computed, forgotten, failure))

        before, self._before = self._before, BegunStep(computed, end)
        # A host that waits for other stages, in the next step, would meanwhile tell nothing of this one.
        if self._is_loading() or computed.is_done or self._own.links.holds_host:
            if before is not None:
                before.result()
            self._before.result()
        return self._before

    def _end(self, batch: BatchRequest, started: float, computed: Computed, forgotten: int, failure: str) -> StepResult:
        token_ids, accepted, broken = computed.tokens(batch)
        if failure:
            token_ids = np.empty(0, np.int32)
        if self._own.tokens_link is not None and self._own.links.is_last:
            give_back(self._own.tokens_link, token_ids[computed.chosen.wanted])
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
