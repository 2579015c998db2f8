"""The contract of attention variants. Whoever serves a model asks its variant, and knows no variant by name.

A model's layer projects its input, in whatever way the variant attends with, and calls the `AttentionLayer` that it was
given with the result. Over a paged cache that call comes to the variant's `CachedAttention`, with the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.policy import HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.token_ranks import TokenRanks
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps


class Kernels(Protocol):
    """Some device's kernels of a variant. name: for logs"""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class LayerCache:
    """A layer's part of the cache, in one step.

    layout: of blocks of the layer's members
    heads: where the rank's members of the layer lie
    wait:  to be called once the step's own tokens are written, before any are read: others may still be on their way
    out:   what attention sees goes there; None: to an array of its own
    wanted: which rows are wanted of that, ascending, where ``out`` is not given; None: all
    sides: the same of the caches that the layer has besides: see `ModelConfig.sides_of`
    """

    arena: KernelArray
    layout: BlockLayout
    batch: AttentionBatch
    heads: HeadTable
    wait: Callable[[], None]
    out: KernelArray | None = None
    wanted: NDArray[np.int64] | None = None
    sides: tuple[tuple[BlockLayout, HeadTable], ...] = ()


class CachedAttention(Protocol):
    """A variant's attention over a paged cache.

    Rows of what is projected that are behind the batch's last token are padding: none of it is written, and anything
    may come of it.
    """

    def __call__(self, cache: LayerCache, *projected: Any) -> Tensor:
        """Write what is kept of the step's tokens, wait, and attend: ``[T, q_heads, size of a head's values]``, or as
        many rows as are wanted.

        ``projected`` is what the model's layer made of its input.
        """

    def result_of(self, *projected: Any) -> KernelArray:
        """An uninitialised array for what comes of ``projected``: a `LayerCache.out`."""


@dataclass(frozen=True)
class Serving:
    """What a variant must know of a deployment to say whether it can be served so, as it is configured.

    model: its name, for errors
    context_parallel_size: ranks that keep each token's members together
    """

    model: str
    tp_size: int
    device: str
    kernels: str
    kv_dtype: str
    tensor_ops: str = "auto"
    context_parallel_size: int = 1
    dtype: str = "bfloat16"

    def check_context(self, variant: AttentionVariant, layers: int) -> None:
        """Raise ConfigError where ranks are to keep tokens together, and would of no layer."""
        asked = self.context_parallel_size

        def is_shared(most: int) -> bool:
            return any(variant.token_parts(layer, self.tp_size, most) > 1 for layer in range(layers))

        if asked == 1 or is_shared(asked):
            return
        fitting = [str(most) for most in range(2, self.tp_size + 1) if self.tp_size % most == 0 and is_shared(most)]
        raise ConfigError(
            f"context_parallel_size {asked}: of no layer of {self.model} would {asked} of {self.tp_size} ranks have "
            "copies of the same latents, or of a KV head without a window, and equally many query heads; "
            + (f"choose {' or '.join(fitting)}" if fitting else "leave it out")
        )


def check_power_of_two(serving: Serving) -> None:
    """Raise ConfigError where a GPU's kernels are to take blocks of tokens that ranks keep together, and cannot."""
    parts = serving.context_parallel_size
    if serving.device == "cuda" and parts & (parts - 1):
        raise ConfigError(
            f"context_parallel_size {parts} of KV heads, or of latents with an indexer, is not supported on a GPU: "
            "choose a power of two"
        )


class AttentionVariant(Protocol):
    """A model's attention.

    is_replicated: every rank keeps all members but states, or its part of all tokens of these, and query heads alone
                   are dealt to the ranks; else ranks are dealt members, with the query heads that use them. States are
                   always dealt
    """

    @property
    def is_replicated(self) -> bool: ...

    def layout(self, block_size: int, slots: int, kv_dtype: str, layer: int = 0) -> BlockLayout:
        """What lies in a block of ``slots`` members of a layer; raises ConfigError if this dtype cannot keep any."""

    def token_parts(self, layer: int, tp_size: int, most: int) -> int:
        """How many ranks keep tokens of a layer's members together, where ``most`` are asked to: as many, or 1."""

    def check(self, serving: Serving) -> None:
        """Raise ConfigError, with the remedy, if there are no kernels for this, or ranks cannot share it."""

    def host_kernels(self, name: str, threads: int) -> Kernels:
        """The kernels called ``name`` for host memory; see `headwise.kernels.select`."""

    def gpu_kernels(self, parts: GpuParts, layouts: Sequence[BlockLayout], tp_size: int, dtype: str) -> Kernels:
        """Kernels for a GPU's memory, on the current device, made ready: nothing is compiled when they are called.

        layouts: of each layer's blocks
        dtype:   of weights and activations

        Raises:
            ConfigError: they do not serve this model, or not on this card.
        """

    def over_cache(self, ops: TensorOps, kernels: Any, ranks: TokenRanks | None = None) -> CachedAttention:
        """Attention by ``kernels`` that a device has for this variant, for tensors of ``ops``.

        ranks: that keep tokens together; None: each keeps all of its members'
        """

    def weight_elements(self, layer: int = 0) -> int:
        """Numbers in the matrices of a layer's attention, over all ranks."""

    def geometry(self) -> str:
        """In words, its heads and their sizes."""

    def members(self, count: int, policy: HeadPolicy) -> str:
        """In words, ``count`` of what layers keep with this policy."""
