"""Which steps of a worker are CUDA graphs, and why others are not."""

from __future__ import annotations

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.ops.base import CapturingOps, TensorOps
from headwise.runtime.ops.comm import Collectives
from headwise.runtime.worker.decode_graphs import DecodeGraphs
from headwise.runtime.worker.prefill_graphs import PrefillGraphs


def without_graphs(config: EngineConfig, ops: TensorOps, collectives: Collectives, has_experts: bool) -> str:
    """Why no step is a graph, which must be nothing but launches; empty: steps are."""
    reasons = {
        "on a CPU": not config.on_gpu,
        "cuda_graphs is off": not config.cuda_graphs,
        f"tensors of {ops.name} cannot be recorded": not isinstance(ops, CapturingOps),
        "ranks reduce through host memory": not collectives.captures,
        "experts need the host": has_experts and isinstance(ops, CapturingOps) and not ops.captures_experts,
    }
    return next((f"none ({reason})" for reason, holds in reasons.items() if holds), "")


def told_graphs(decode: DecodeGraphs | None, prefill: PrefillGraphs | None) -> str:
    """Those that there are, in words; empty: none."""
    told = [] if decode is None else [f"{decode.captured} of decode steps"]
    if prefill is not None and prefill.sizes:
        sizes = prefill.sizes
        told.append(f"{prefill.captured} of {len(sizes)} sizes of prefill, from {sizes[0]} to {sizes[-1]} tokens")
    elif decode is not None:
        told.append("none of prefill")
    return ", ".join(told)
