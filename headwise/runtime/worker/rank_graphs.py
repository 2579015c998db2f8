"""Which steps of a rank are CUDA graphs, and why others are not."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.runtime.config.decode_reads import layer_elements
from headwise.runtime.models.attention.base import CachedAttention
from headwise.runtime.models.base import Model
from headwise.runtime.ops.base import CapturingOps
from headwise.runtime.worker.decode_graphs import DecodeGraphs
from headwise.runtime.worker.model_runner import ModelRunner
from headwise.runtime.worker.model_source import ModelSource
from headwise.runtime.worker.prefill_graphs import PrefillGraphs, worthwhile_tokens
from headwise.runtime.worker.rank import Rank


@dataclass(frozen=True)
class RankGraphs:
    """Makes those of a rank, for the model of ``source``."""

    rank: Rank
    source: ModelSource

    @property
    def lacking(self) -> str:
        """Why no step is a graph, which must be nothing but launches; empty: steps are."""
        config, ops = self.source.config, self.rank.ops
        has_experts = self.source.card.config.moe is not None
        reasons = {
            "on a CPU": not config.on_gpu,
            "cuda_graphs is off": not config.cuda_graphs,
            f"tensors of {ops.name} cannot be recorded": not isinstance(ops, CapturingOps),
            "ranks reduce through host memory": not self.rank.collectives.captures,
            "experts need the host": has_experts and isinstance(ops, CapturingOps) and not ops.captures_experts,
        }
        return next((f"none ({reason})" for reason, holds in reasons.items() if holds), "")

    def decode(self, runner: ModelRunner) -> DecodeGraphs | None:
        """Of decode steps over this model and arena, to be recorded; None: these are no graphs."""
        ops = self.rank.ops
        if self.lacking or not isinstance(ops, CapturingOps):
            return None
        parts = ops, runner.score, runner.cache.tables, runner.last, self.rank.agreement.is_so
        axes = self.source.card.config.axes
        return DecodeGraphs(*parts, self._tells_follows, axes, reads_jointly=runner.joint_share > 0)

    def prefill(self, model: Model, attention: CachedAttention) -> PrefillGraphs | None:
        """Of other steps by this model, recorded, which needs no cache; None: these are no graphs."""
        config, model_config = self.source.config, self.source.card.config
        ops, layers = self.rank.ops, self.rank.layers
        if self.lacking or not config.prefill_graphs or not isinstance(ops, CapturingOps):
            return None
        graphs = PrefillGraphs(
            ops,
            min(self._most_prefill(), config.most_batched_tokens),
            config.most_sampled,
            self.rank.agreement.is_so,
            gives_all=model_config.draft_layers > 0,
            followers=config.speculation * config.most_seqs if self._tells_follows else 0,
            links=self.rank.links,
            layers=len(range(model_config.decoder_layers)[layers.start : layers.stop]),
            axes=model_config.axes,
        )
        graphs.record(model, attention)
        return graphs

    @property
    def _tells_follows(self) -> bool:
        """Whether kernels are to know of each step which sequences follow others: they keep states, and may get
        drafts."""
        return self.source.card.has_states and self.source.config.speculation > 0

    def _most_prefill(self) -> int:
        """Most tokens of steps by graphs: those asked for, or an estimate's, which is the least of all ranks'."""
        config = self.source.config
        if config.prefill_graphs > 0:
            return config.prefill_graphs
        elements = layer_elements(self.source.card.config) / config.ranks
        most = worthwhile_tokens(elements, len(self.rank.layers), self.rank.device.products_per_s)
        return self.rank.agreement.least(min(most, config.most_batched_tokens))


def told_graphs(decode: DecodeGraphs | None, prefill: PrefillGraphs | None) -> str:
    """Those that there are, in words; empty: none."""
    told = [] if decode is None else [f"{decode.captured} of decode steps"]
    if prefill is not None and prefill.sizes:
        sizes = prefill.sizes
        told.append(f"{prefill.captured} of {len(sizes)} sizes of prefill, from {sizes[0]} to {sizes[-1]} tokens")
    elif decode is not None:
        told.append("none of prefill")
    return ", ".join(told)
