"""A mixture of experts, as a layer has it."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.runtime.models.layers import DenseMlp, Linear
from headwise.runtime.ops.base import Experts


@dataclass(frozen=True)
class MoeMlp:
    """One rank's weights of a mixture of experts; the router is whole on every rank.

    experts:      each split over the ranks like a dense MLP; with them the shared one, unless it has a gate
    gated_shared: what every token goes through as far as a sigmoid of ``shared_gate``'s result lets it, if anything
    """

    router: Linear
    experts: Experts
    gated_shared: DenseMlp | None = None
    shared_gate: Linear | None = None
    latent: LatentExperts | None = None


@dataclass(frozen=True)
class LatentExperts:
    """Experts that are given latents of tokens, and make some, which are added up before they are projected back.

    into, out: whole on each rank
    shared:    what tokens go through besides, as they are
    """

    into: Linear
    out: Linear
    shared: DenseMlp | None
