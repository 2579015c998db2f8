"""The shared decoder with a mixture of experts for the MLP in some layers, and what such models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.kernels.experts import NORM_MIN, Mixture
from headwise.kernels.fused import DenseLayer, GatedShare, MixedLayer
from headwise.runtime.models.base import AttentionLayer, Embeds
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import MOST_EXPERTS, HfConfig, check_served, positive
from headwise.runtime.models.layers import DenseMlp, Linear
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.moe import LatentExperts, MoeMlp
from headwise.runtime.models.moe_config import MoeConfig
from headwise.runtime.ops.base import KernelArray, Tensor

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "n_group": (None, 1),
    "routed_scaling_factor": (None, 1.0),
}
"""Fields by which other models route otherwise."""


class MoeDecoder(Decoder):
    """Routed and shared experts for the MLP in some layers.

    Tensor parallel: every rank routes all tokens and computes its part of every expert, so that the sum over experts
    and the sum over ranks are one all-reduce.
    """

    router_name: ClassVar[str] = "gate"
    shared_name: ClassVar[str] = "shared_experts"
    """Of a layer's router and of the experts that every token goes through, below its MLP."""
    router_bias: ClassVar[bool] = False
    latent_names: ClassVar[tuple[str, str]] = ("fc1_latent_proj", "fc2_latent_proj")
    """Of projections to what experts are given, and back, where that is not the hidden state."""

    def load_mlp(self, layer: int, at: str) -> Any:
        moe = self.config.moe
        if moe is None or layer not in moe.layers:
            return super().load_mlp(layer, at)
        made = self.routed_mlp(moe, layer, at, None if moe.latent_size else self._shared(at, moe))
        if moe.latent_size:
            return replace(made, latent=self._latent(at, moe))
        return self._with_gated_shared(made, at, moe.gated_shared_size) if moe.gated_shared_size else made

    def routed_mlp(self, moe: MoeConfig, layer: int, at: str, shared: DenseMlp | None) -> MoeMlp:
        """A router and its experts, named ``at...``, and with them what every token goes through."""
        correction, name = self.correction(layer, at), f"{at}{self.router_name}"
        router, expected = self._weights.tensor(f"{name}.weight"), (moe.num_experts, self.config.hidden_size)
        corrected = moe.num_experts if correction is None else len(correction)
        if router.shape != expected or corrected != moe.num_experts:
            raise ModelError(
                f"{name}.weight has the shape {router.shape} and its correction bias {corrected} experts, config.json "
                f"says {expected}: weights and config.json do not belong together"
            )
        bias, mixture = self._router_bias(f"{name}.bias", moe), self.mixture(moe, correction)
        leaves = self.ops.leaves_biases
        routed = (self.dense_mlp(f"{at}experts.{expert}.", moe.expert_size) for expert in range(moe.num_experts))
        return MoeMlp(
            router=Linear(
                self._prepare(f"{name}.weight", lambda: self.ops.linear_weight(router)),
                None if bias is None or leaves else self.ops.linear_bias(bias),
            ),
            experts=self.ops.experts(
                replace(mixture, logit_bias=bias) if leaves else mixture,
                routed,
                shared,
            ),
        )

    def _shared(self, at: str, moe: MoeConfig) -> DenseMlp | None:
        size = moe.shared_size
        return self.dense_mlp(f"{at}{self.shared_name}.", size, moe.shared_parts) if size else None

    def _latent(self, at: str, moe: MoeConfig) -> LatentExperts:
        (into, out), hidden = (f"{at}{name}" for name in self.latent_names), self.config.hidden_size
        return LatentExperts(
            into=self._split_rows([(into, [(0, moe.latent_size)])], has_bias=False),
            out=self._split_rows([(out, [(0, hidden)])], has_bias=False),
            shared=self._shared(at, moe),
        )

    def _with_gated_shared(self, made: MoeMlp, at: str, size: int) -> MoeMlp:
        name = f"{at}shared_expert_gate.weight"
        gate = self._weights.tensor(name)
        if gate.shape != (1, self.config.hidden_size):
            raise ModelError(
                f"{name} has the shape {gate.shape}, config.json says {(1, self.config.hidden_size)}: weights and "
                "config.json do not belong together"
            )
        return replace(
            made,
            gated_shared=self.dense_mlp(f"{at}shared_expert.", size),
            shared_gate=Linear(self._prepare(name, lambda: self.ops.linear_weight(gate))),
        )

    def _router_bias(self, name: str, moe: MoeConfig) -> NDArray[np.float32] | None:
        if not self.router_bias:
            return None
        bias = self._weights.tensor(name)
        if bias.shape != (moe.num_experts,):
            raise ModelError(
                f"{name} has the shape {list(bias.shape)}, config.json says {moe.num_experts} experts: weights and "
                "config.json do not belong together"
            )
        return bias

    def correction(self, layer: int, at: str) -> NDArray[np.float32] | None:
        """See `Mixture.correction`, of a layer whose MLP is named ``at...``."""
        return None

    def mixture(self, moe: MoeConfig, correction: NDArray[np.float32] | None) -> Mixture:
        """What a layer's experts are besides their weights."""
        return Mixture(moe.routing, self.activation, correction)

    def forward(
        self,
        token_ids: KernelArray,
        positions: KernelArray,
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        self._tokens = tokens_of(attention)  # for the layers of this pass
        return super().forward(token_ids, positions, attention, embeds, wanted, stream)

    def draft(
        self,
        following: KernelArray,
        positions: KernelArray,
        hidden: Tensor,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
        embeds: Embeds | None = None,
    ) -> Tensor:
        self._tokens = tokens_of(attention)
        return super().draft(following, positions, hidden, attention, wanted, embeds)

    def fusible_mlp(self, mlp: Any) -> DenseLayer | MixedLayer | None:
        if not isinstance(mlp, MoeMlp):
            return super().fusible_mlp(mlp)
        if mlp.latent is not None:
            return None
        shared = None
        if mlp.gated_shared is not None and mlp.shared_gate is not None:
            gated = super().fusible_mlp(mlp.gated_shared)
            assert isinstance(gated, DenseLayer)
            shared = GatedShare(gated, mlp.shared_gate.weight)
        return MixedLayer(mlp.router.weight, mlp.experts, mlp.router.bias, shared)

    def feed_forward(self, mlp: Any, x: Tensor) -> Tensor:
        if not isinstance(mlp, MoeMlp):
            return super().feed_forward(mlp, x)
        if mlp.latent is not None:
            return self._through_latents(mlp, mlp.latent, x)
        total = self.ops.mix_experts(x, self._linear(x, mlp.router), mlp.experts, self._tokens)
        if mlp.gated_shared is not None and mlp.shared_gate is not None:
            shared = super().feed_forward(mlp.gated_shared, x)
            total = total + self.ops.sigmoid_mul(shared, self._linear(x, mlp.shared_gate))
        return total

    def _through_latents(self, mlp: MoeMlp, latent: LatentExperts, x: Tensor) -> Tensor:
        """A rank's part: what it adds up of latents is projected by all of ``out``, since sums of parts are so, too."""
        logits = self._linear(x, mlp.router)
        mixed = self.ops.mix_experts(self._linear(x, latent.into), logits, mlp.experts, self._tokens)
        total = self._linear(mixed, latent.out)
        return total if latent.shared is None else total + super().feed_forward(latent.shared, x)


def tokens_of(attention: AttentionLayer) -> KernelArray | None:
    """See `PagedAttentionLayer.tokens`; None where the layer does not say."""
    told: Callable[[], KernelArray | None] | None = getattr(attention, "tokens", None)
    return None if told is None else told()


def local_experts(config: HfConfig, decoder: ModelConfig, *, experts: int, per_token: int) -> ModelConfig:
    """``decoder`` with experts in every layer, each as large as its MLP, by Mixtral's names; and their defaults."""
    num_experts = positive(config, "num_local_experts", default=experts, most=MOST_EXPERTS)
    chosen = positive(config, "num_experts_per_tok", default=per_token)
    check_routing(config, {"num_experts_per_tok": chosen}, {"num_local_experts": num_experts})
    moe = MoeConfig(
        layers=tuple(range(decoder.num_layers)),
        num_experts=num_experts,
        experts_per_token=chosen,
        expert_size=decoder.intermediate_size,
        num_shared_experts=0,
        norm_min=NORM_MIN,
    )
    return replace(decoder, moe=moe)


def check_routing(config: HfConfig, per_token: Mapping[str, int], experts: Mapping[str, int]) -> None:
    """Raise ModelError if a token goes to more experts than there are (a field each), or they are chosen otherwise."""
    check_served(config, _SERVED_VALUES)
    ((chosen_key, chosen),), ((known_key, known),) = per_token.items(), experts.items()
    if chosen > known:
        raise ModelError(f"config.json: {chosen_key!r} {chosen} is more than {known_key!r} {known}")
