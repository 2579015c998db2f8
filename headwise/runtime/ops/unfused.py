"""The operations that can be composed of others, for frameworks without fused kernels for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.experts import Mixture, route, tokens_by_expert
from headwise.kernels.fused import Activation
from headwise.runtime.ops.base import Fetch, Fetched, KernelArray, MlpWeights, Tensor, Weight
from headwise.runtime.ops.quantised import Matrix, as_floats


class GroupedExperts(Protocol):
    """A layer's experts, and the shared one, whose weights some operations prepared."""

    def mix(self, x: Tensor, logits: Tensor) -> Tensor:
        """See `TensorOps.mix_experts`."""


@dataclass(frozen=True)
class HostRoutedExperts:
    """Those of a layer, by tokens that the host deals out.

    grouped: all in one call; None: they are computed one after the other
    """

    mixture: Mixture
    routed: tuple[MlpWeights, ...]
    shared: MlpWeights | None
    grouped: GroupedExperts | None = None


class UnfusedOps(ABC):
    """The part of `TensorOps` that is the same wherever a weight is a tensor and an activation a separate operation."""

    leaves_biases = False

    def fetch(self, array: KernelArray) -> Fetch:
        return Fetched(self.host(array))

    @abstractmethod
    def tensor(self, array: NDArray[np.float32]) -> Tensor: ...

    @abstractmethod
    def linear_weight(self, weight: Matrix) -> Weight: ...

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, addend: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = x + (addend if bias is None else addend + bias)
        return total, self.rms_norm(total, weight, eps)

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def clamped_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def limited_silu_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def clipped_silu_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def squared_relu(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def numpy(self, tensor: Tensor) -> NDArray[Any]: ...

    @abstractmethod
    def host(self, array: KernelArray) -> NDArray[Any]: ...

    @abstractmethod
    def take_rows(self, x: Tensor, rows: NDArray[np.int64]) -> Tensor: ...

    @abstractmethod
    def scatter_add_rows(
        self, target: Tensor, rows: NDArray[np.int64], x: Tensor, weights: NDArray[np.float32]
    ) -> None: ...

    def linear_bias(self, bias: NDArray[np.float32]) -> Tensor:
        return self.tensor(bias)

    def gated_weight(self, weight: Matrix) -> Weight:
        return self.linear_weight(weight)

    def gated_bias(self, bias: NDArray[np.float32]) -> Tensor:
        return self.tensor(bias)

    def activated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: Activation) -> Tensor:
        return self.activated(self.linear(x, weight, bias), activation)

    def unactivated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self.linear(x, weight, bias)

    def float_weight(self, weight: NDArray[np.float32]) -> Weight:
        return self.linear_weight(weight)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        activations = {
            "silu": self.silu_mul,
            "gelu_tanh": self.gelu_tanh_mul,
            "clamped": self.clamped_mul,
            "limited_silu": self.limited_silu_mul,
            "clipped_silu": self.clipped_silu_mul,
            "relu2": self.squared_relu,
        }
        return activations[activation](x)

    def embedding_table(self, table: Matrix) -> Weight:
        return self.tensor(as_floats(table))

    def experts(self, mixture: Mixture, routed: Iterable[MlpWeights], shared: MlpWeights | None) -> Any:
        alone = tuple(routed)
        return HostRoutedExperts(mixture, alone, shared, self.grouped(mixture, alone, shared))

    def grouped(
        self, mixture: Mixture, routed: Sequence[MlpWeights], shared: MlpWeights | None
    ) -> GroupedExperts | None:
        """All of a layer's experts in one call; None: these operations cannot, or not these."""
        return None

    def mix_experts(self, x: Tensor, logits: Tensor, experts: Any, tokens: KernelArray | None = None) -> Tensor:
        if experts.grouped is not None:
            return experts.grouped.mix(x, logits)
        mixture = experts.mixture
        correction = np.float32(0) if mixture.correction is None else mixture.correction
        if experts.shared is None:
            total = self.tensor(np.zeros(x.shape, dtype=np.float32))
        else:
            total = self._mlp(x, experts.shared, mixture.activation)
        told = self.numpy(logits)
        told = told if mixture.logit_bias is None else told + mixture.logit_bias
        chosen, shares = route(told, correction, mixture.routing)
        shares = shares if mixture.scales is None else shares * mixture.scales[chosen]
        for expert, rows, weights in tokens_by_expert(chosen, shares):
            given = self.take_rows(x, rows)
            if mixture.weighs_input:
                given, weights = self._weighed(given, weights), np.ones_like(weights)
            part = self._mlp(given, experts.routed[expert], mixture.activation)
            self.scatter_add_rows(total, rows, part, weights)
        return total

    def _weighed(self, x: Tensor, weights: NDArray[np.float32]) -> Tensor:
        weighed = self.tensor(np.zeros(x.shape, dtype=np.float32))
        self.scatter_add_rows(weighed, np.arange(len(weights)), x, weights)
        return weighed

    def _mlp(self, x: Tensor, mlp: MlpWeights, activation: Activation) -> Tensor:
        gated = self.activated_linear(x, mlp.into.weight, mlp.into.bias, activation)
        return self.linear(gated, mlp.down.weight, mlp.down.bias)
