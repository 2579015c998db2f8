"""Layers with recurrent states, and attention in the others, over KV heads or latents: what rules of states share.

A member of such a layer is the state of one key and the value heads that share it: tensor-parallel ranks are dealt
members as they are dealt KV heads, also where the other layers' latents are on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.state_layout import state_layout
from headwise.kernels.token_ranks import TokenRanks
from headwise.runtime.models.attention.base import AttentionVariant, CachedAttention, Kernels, LayerCache, Serving
from headwise.runtime.models.attention.gqa import GroupedQueryAttention
from headwise.runtime.models.attention.mla import LatentAttention
from headwise.runtime.models.attention.wanted import wanted_rows
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.shard import fitting_sizes
from headwise.runtime.models.states_config import StatesConfig
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps

S = TypeVar("S", bound=StatesConfig)
K = TypeVar("K")


@dataclass(frozen=True)
class MixedKernels(Generic[K]):
    """Kernels of both kinds of layers."""

    attention: Kernels
    states: K

    @property
    def name(self) -> str:
        return self.attention.name


@dataclass(frozen=True)
class StatesAttention(ABC, Generic[S]):
    """`AttentionVariant` of a model of this geometry."""

    config: ModelConfig
    states: S
    rule: ClassVar[str]
    """What has the states, in words."""
    member: ClassVar[tuple[str, str]]
    """What a member is, one and several."""

    @cached_property
    def _others(self) -> AttentionVariant:
        if self.config.mla is not None:
            return LatentAttention(self.config, self.config.mla)
        return GroupedQueryAttention(self.config)

    @property
    def is_replicated(self) -> bool:
        """Of what the other layers keep."""
        return self._others.is_replicated

    def layout(self, block_size: int, slots: int, kv_dtype: str, layer: int = 0) -> BlockLayout:
        if layer in self.states.layers:
            return state_layout(block_size, slots, self.states.sizes)
        return self._others.layout(block_size, slots, kv_dtype, layer)

    def token_parts(self, layer: int, tp_size: int, most: int) -> int:
        return 1 if layer in self.states.layers else self._others.token_parts(layer, tp_size, most)

    def check(self, serving: Serving) -> None:
        """See `AttentionVariant.check`."""
        if serving.device == "cuda" and serving.tensor_ops == "paddle":
            raise ConfigError(
                f"{serving.model} keeps recurrent states ({self.rule}), which tensor_ops paddle does not compute "
                "on a GPU: choose tensor_ops cupy, or device cpu"
            )
        self._others.check(serving)
        if self.states.members % serving.tp_size:
            raise ConfigError(
                f"tp_size {serving.tp_size} does not divide the {self.states.members} {self.member[1]} of this model's "
                f"{self.rule}, whose states ranks do not share; sizes that fit: {fitting_sizes(self.config)}"
            )

    def host_kernels(self, name: str, threads: int) -> MixedKernels[Any]:
        return MixedKernels(self._others.host_kernels(name, threads), self.rule_kernels(name, threads))

    @abstractmethod
    def rule_kernels(self, name: str, threads: int) -> Any:
        """Those of the states, of `host_kernels`."""

    def gpu_kernels(
        self, parts: GpuParts, layouts: Sequence[BlockLayout], tp_size: int, dtype: str
    ) -> MixedKernels[Any]:
        """See `AttentionVariant.gpu_kernels`."""
        with_attention = [layout for layer, layout in enumerate(layouts) if layer not in self.states.layers]
        states = self.gpu_rule_kernels(parts, layouts[self.states.layers[0]], tp_size, dtype)
        return MixedKernels(self._others.gpu_kernels(parts, with_attention, tp_size, dtype), states)

    @abstractmethod
    def gpu_rule_kernels(self, parts: GpuParts, layout: BlockLayout, tp_size: int, dtype: str) -> Any:
        """Those of the states, of `gpu_kernels`."""

    def over_cache(self, ops: TensorOps, kernels: Any, ranks: TokenRanks | None = None) -> CachedAttention:
        return self.states_over_cache(ops, kernels.states, self._others.over_cache(ops, kernels.attention, ranks))

    @abstractmethod
    def states_over_cache(self, ops: TensorOps, kernels: Any, others: CachedAttention) -> CachedAttention: ...

    def weight_elements(self, layer: int = 0) -> int:
        if layer in self.states.layers:
            return self.config.hidden_size * self.states.members * self.numbers_of_member
        return self._others.weight_elements(layer) + self.more_of_attention

    @property
    @abstractmethod
    def numbers_of_member(self) -> int:
        """Rows and columns of a layer's projections that are a member's."""

    @property
    def more_of_attention(self) -> int:
        """Elements of matrices of layers with attention beside those that it has elsewhere."""
        return 0

    def geometry(self) -> str:
        count = len(self.states.layers)
        return f"{count} of them {self.rule} of {self.heads}, the others with {self._others.geometry()}"

    @property
    @abstractmethod
    def heads(self) -> str:
        """Of a layer with states, in words."""

    def members(self, count: int, policy: HeadPolicy) -> str:
        return f"{count} (layer, {self.member[0]}) pairs" if policy.is_state else self._others.members(count, policy)


class StatesOverCache(ABC, Generic[K]):
    """`CachedAttention` of either kind of layer: one with states projects its input to ``projected_type``."""

    projected_type: ClassVar[type]

    def __init__(self, ops: TensorOps, kernels: K, others: CachedAttention) -> None:
        self.ops, self.kernels, self._others = ops, kernels, others

    def __call__(self, cache: LayerCache, *projected: Any) -> Tensor:
        """Of a layer with states, what this rank's value heads see, ``[T, value_heads * value_dim]``."""
        first = projected[0]
        if not self._is_own(first):
            return self._others(cache, *projected)
        cache.wait()  # states are read first
        seen = self.result_of(first) if cache.out is None else cache.out
        self.take_on(cache, first, seen)  # of all rows, of which states are made
        return self.ops.from_kernel_array(wanted_rows(seen, cache.wanted, self.ops))

    def result_of(self, *projected: Any) -> KernelArray:
        """See `CachedAttention.result_of`."""
        first = projected[0]
        if not self._is_own(first):
            return self._others.result_of(*projected)
        return self.ops.empty_like(first.numbers, (first.numbers.shape[0], self.values_of(first)))

    def _is_own(self, projected: Any) -> bool:
        return isinstance(projected, self.projected_type)

    @abstractmethod
    def values_of(self, projected: Any) -> int:
        """Numbers that come of a token."""

    @abstractmethod
    def take_on(self, cache: LayerCache, projected: Any, out: KernelArray) -> None:
        """Take the states on by a step's tokens, into ``out [T, values]``."""
