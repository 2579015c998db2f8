"""What a mixture of experts is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwise.kernels.experts import Routing


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts that stands for the MLP in some layers.

    layers:             those layers, ascending; the others have a dense MLP of `ModelConfig.intermediate_size`
    expert_size:        intermediate size of one expert
    num_shared_experts: experts that every token goes through besides its routed ones
    shared_expert_size: intermediate size of one of those; 0: that of a routed one
    norm_min:           least sum that a token's routing weights are divided by; None: they are not divided
    gated_shared_size:  intermediate size of what every token goes through as far as a gate of its own lets it; 0: none
    latent_size:        numbers of what routed experts are given of a token, and make; 0: the hidden size
    image_expert_size:  intermediate size of as many experts, with a router of their own, that tokens which came with
                        embeddings are routed to; 0: all tokens are routed to the same
    """

    layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    expert_size: int
    num_shared_experts: int
    norm_min: float | None
    shared_expert_size: int = field(default=0, kw_only=True)
    gated_shared_size: int = field(default=0, kw_only=True)
    latent_size: int = field(default=0, kw_only=True)
    image_expert_size: int = field(default=0, kw_only=True)

    @property
    def shared_size(self) -> int:
        """Intermediate size of all shared experts side by side, as checkpoints have them: as one MLP."""
        return self.num_shared_experts * (self.shared_expert_size or self.expert_size)

    @property
    def shared_parts(self) -> int:
        """As many experts of ``expert_size`` as that has room for; 1 where that is no whole number."""
        return 1 if self.shared_size % self.expert_size else self.shared_size // self.expert_size

    @property
    def routing(self) -> Routing:
        return Routing(self.num_experts, self.experts_per_token, self.norm_min)
