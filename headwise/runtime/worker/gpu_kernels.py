"""The kernels of a GPU for a model's attention variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwise.kernels.cuda.delta import CudaDelta, DeltaShape
from headwise.kernels.cuda.kernels import CudaKernels
from headwise.kernels.cuda.launch import Array, TritonLauncher
from headwise.kernels.cuda.programs import Programs
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.models.attention.base import Kernels
from headwise.runtime.models.attention.delta import MixedKernels


@dataclass(frozen=True)
class KernelParts:
    """What kernels are made with. allocate: ``allocate(nbytes)`` gives device memory as a flat uint8 array"""

    launcher: TritonLauncher
    programs: Programs
    allocate: Callable[[int], Array]

    def attention(self) -> CudaKernels:
        """Those of grouped-query attention."""
        return CudaKernels(self.launcher, self.programs, self.allocate)

    def delta(self) -> CudaDelta:
        """Those of gated delta-nets."""
        return CudaDelta(self.launcher, self.allocate)


def gpu_kernels(card: ModelCard, dtype: str, tp_size: int, parts: KernelParts) -> Kernels:
    """Those of the card's model, made ready for one of ``tp_size`` ranks that computes in ``dtype``.

    Raises:
        ConfigError: there are none for this model.
    """
    model = card.config
    attention = parts.attention()
    kv_heads, share = model.num_kv_heads // tp_size, model.num_heads // model.num_kv_heads
    layout = card.layouts[model.attention_layer]
    attention.prepare(layout, share * kv_heads, kv_heads, dtype, model.attention_softcap, model.sink_logits)
    if model.delta is None:
        return attention
    delta = parts.delta()
    delta.prepare([DeltaShape.of(card.layouts[model.delta.layers[0]], model.delta.key_heads // tp_size, dtype)])
    return MixedKernels(attention, delta)
