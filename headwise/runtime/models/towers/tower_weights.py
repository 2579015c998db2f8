"""Reads a tower's weights out of a checkpoint, and what stands beside images in a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ModelError
from headwise.runtime.models.hf_config import integer, text_of
from headwise.runtime.models.towers.base import TowerParts
from headwise.runtime.models.weights import Weights
from headwise.runtime.ops.base import KernelArray, Tensor, TensorOps, Weight

_EMBEDDING = "embed_tokens.weight"


class TowerWeights:
    """Weights by their names from one of these ``beginnings`` on: what is before them differs between versions.

    All methods raise `ModelError` where a tensor is missing, or is not of the shape that the config says.
    """

    def __init__(self, weights: Weights, ops: TensorOps, beginnings: Sequence[str]) -> None:
        self._weights, self.ops = weights, ops
        self._names: dict[str, str] = {}
        for name in sorted(weights.names, key=len, reverse=True):  # of those that end alike the shortest counts
            for first in (*beginnings, _EMBEDDING):
                at = name.find(first)
                if at >= 0:
                    self._names[name[at:]] = name

    def array(self, name: str, *shape: int) -> NDArray[np.float32]:
        found = self._weights.tensor(self._full(name))
        if found.size != int(np.prod(shape)) or found.shape[0] != shape[0]:
            raise ModelError(f"{self._full(name)!r} has the shape {found.shape}, its config.json says {shape}")
        whole: NDArray[np.float32] = found.reshape(shape)
        return whole

    def number(self, name: str) -> float:
        return float(self._weights.tensor(self._full(name)).reshape(()))

    def linear(self, name: str, outputs: int, inputs: int) -> Weight:
        return self.matrix(self.array(name, outputs, inputs))

    def matrix(self, array: NDArray[np.float32]) -> Weight:
        return self.ops.linear_weight(np.ascontiguousarray(array))

    def vector(self, array: NDArray[np.float32]) -> Tensor:
        return self.ops.linear_bias(np.ascontiguousarray(array))

    def norm(self, name: str, size: int) -> Tensor:
        return self.ops.norm_weight(self.array(name, size))

    def bias(self, name: str, size: int) -> Tensor:
        return self.vector(self.array(name, size))

    def kernel_array(self, name: str, *shape: int) -> KernelArray:
        """Float32, where the operations compute."""
        return self.ops.upload(np.ascontiguousarray(self.array(name, *shape), np.float32))

    def text_embedding(self, token: int) -> NDArray[np.float32]:
        """``float32 [hidden]``: that of the model's text."""
        row: NDArray[np.float32] = self._weights.rows(self._full(_EMBEDDING), token, token + 1)[0]
        return row

    def _full(self, name: str) -> str:
        if name not in self._names:
            raise ModelError(f"the checkpoint lacks the tensor {name!r}, which its images need: fetch the model again")
        return self._names[name]


def control_tokens(parts: TowerParts, names: Sequence[str]) -> dict[str, int]:
    """The ids of the tokens that stand for images and around them. Raises `ModelError` where one is missing."""
    vocabulary = integer(text_of(parts.config), "vocab_size", 2**31 - 1, least=1)
    found: dict[str, int] = {}
    for name in names:
        token = parts.token_id(name)
        if token is None or token >= vocabulary:
            raise ModelError(f"the model's tokenizer has no control token {name}, which its images need")
        found[name] = token
    return found
