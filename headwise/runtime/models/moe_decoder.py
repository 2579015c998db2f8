"""The shared decoder with a mixture of experts for the MLP in some layers, and what such models share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.decoder import Decoder, Linear
from headwise.runtime.models.hf_config import HfConfig, check_served
from headwise.runtime.models.moe import MoeMlp, route, tokens_by_expert
from headwise.runtime.ops.base import Tensor

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "n_group": (None, 1),
    "routed_scaling_factor": (None, 1.0),
}
"""Fields by which other models route otherwise."""

NORM_MIN = 1e-20
"""For routing weights that are divided by their sum, whatever it is: of the likeliest experts it is never so small."""


class MoeDecoder(Decoder):
    """Routed and shared experts for the MLP in some layers.

    Tensor parallel: every rank routes all tokens and computes its part of every expert, so that the sum over experts
    and the sum over ranks are one all-reduce.
    """

    router_name: ClassVar[str] = "gate"
    shared_name: ClassVar[str] = "shared_experts"
    """Of a layer's router and of the experts that every token goes through, below its MLP."""
    router_bias: ClassVar[bool] = False

    def load_mlp(self, layer: int, at: str) -> Any:
        moe = self.config.moe
        if moe is None or layer not in moe.layers:
            return super().load_mlp(layer, at)
        correction, name = self.correction(at), f"{at}{self.router_name}"
        router, expected = self._weights.tensor(f"{name}.weight"), (moe.num_experts, self.config.hidden_size)
        if router.shape != expected or np.size(correction) not in (1, moe.num_experts):
            raise ModelError(
                f"{name}.weight has the shape {router.shape} and its correction bias {np.size(correction)} experts, "
                f"config.json says {expected}: weights and config.json do not belong together"
            )
        bias = self.ops.linear_bias(self._weights.tensor(f"{name}.bias")) if self.router_bias else None
        experts = (self.gated_mlp(f"{at}experts.{expert}.", moe.expert_size) for expert in range(moe.num_experts))
        shared_size = moe.num_shared_experts * moe.expert_size
        return MoeMlp(
            config=moe,
            router=Linear(self._prepare(f"{name}.weight", lambda: self.ops.linear_weight(router)), bias),
            correction=correction,
            experts=tuple(experts),
            shared=self.gated_mlp(f"{at}{self.shared_name}.", shared_size) if shared_size else None,
        )

    def correction(self, at: str) -> NDArray[np.float32] | np.float32:
        """See `MoeMlp.correction`, of the layer whose MLP is named ``at...``."""
        return np.float32(0)

    def feed_forward(self, mlp: Any, x: Tensor) -> Tensor:
        if not isinstance(mlp, MoeMlp):
            return super().feed_forward(mlp, x)
        total = self._shared(mlp, x)
        for expert, tokens, weights in tokens_by_expert(*self._route(mlp, x)):
            part = super().feed_forward(mlp.experts[expert], self.ops.take_rows(x, tokens))
            self.ops.scatter_add_rows(total, tokens, part, weights)
        return total

    def _shared(self, mlp: MoeMlp, x: Tensor) -> Tensor:
        if mlp.shared is not None and mlp.shared_gate is None:
            return super().feed_forward(mlp.shared, x)
        total = self.ops.tensor(np.zeros(x.shape, dtype=np.float32))
        if mlp.shared is not None and mlp.shared_gate is not None:
            shares = sigmoid(self.ops.numpy(self._linear(x, mlp.shared_gate))[:, 0])
            self.ops.scatter_add_rows(total, np.arange(len(shares)), super().feed_forward(mlp.shared, x), shares)
        return total

    def _route(self, mlp: MoeMlp, x: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        logits = self.ops.numpy(self._linear(x, mlp.router))
        return route(logits, mlp.correction, mlp.config.experts_per_token, mlp.config.norm_min)


def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """``1 / (1 + exp(-x))``, without overflow."""
    return np.asarray(0.5 * np.tanh(0.5 * x) + 0.5, np.float32)


def check_routing(config: HfConfig, per_token: Mapping[str, int], experts: Mapping[str, int]) -> None:
    """Raise ModelError if a token goes to more experts than there are (a field each), or they are chosen otherwise."""
    check_served(config, _SERVED_VALUES)
    ((chosen_key, chosen),), ((known_key, known),) = per_token.items(), experts.items()
    if chosen > known:
        raise ModelError(f"config.json: {chosen_key!r} {chosen} is more than {known_key!r} {known}")
