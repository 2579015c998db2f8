"""Gated delta-nets on a GPU, in Triton's interpreter: as by the definition, on poisoned arenas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.delta_scene import DeltaCase, DeltaScene

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.base import AttentionBatch, HeadTable
from headwise.kernels.cuda.delta import CudaDelta
from headwise.kernels.cuda.interpreter import InterpreterLauncher
from headwise.kernels.delta import DeltaSizes
from headwise.kernels.delta_base import DeltaInputs, DeltaWeights
from headwise.kernels.delta_gates import gated_norm


class Projected:
    """`DeltaKernels` by what is projected: gates are such that the norm is undone by `normed`."""

    name = "cuda"

    def __init__(self, dtype: str = "float32") -> None:
        self.kernels = CudaDelta(InterpreterLauncher(), lambda nbytes: np.full(nbytes, 0xFF, np.uint8))

    def attend_delta(
        self,
        inputs: DeltaInputs,
        arena: np.ndarray,
        layout: BlockLayout,
        batch: AttentionBatch,
        heads: HeadTable,
        *,
        out,
    ) -> None:
        tokens, key_heads, share, value_dim = out.shape
        gates = np.ones((tokens, key_heads, share * value_dim), np.float32)
        rates, decays = np.log(inputs.rate / (1 - inputs.rate)), np.log(np.expm1(-inputs.decay))
        numbers = np.concatenate(
            [
                np.concatenate([inputs.mixed, gates], axis=2).reshape(tokens, -1),
                np.concatenate([rates, decays], axis=2).reshape(tokens, -1),
            ],
            axis=1,
        ).astype(np.float32)
        longest = int(np.diff(batch.cu_seqlens_q).max())
        each = np.zeros((key_heads, share), np.float32)
        weights = DeltaWeights(inputs.weights, each + 1, each, np.ones(value_dim, np.float32), 1e-2)
        made = np.full((tokens, out[0].size), np.nan, np.float32)
        batch = replace(batch, max_query_len=longest)
        self.kernels.attend_projected(numbers, weights, arena, layout, batch, heads, out=made)
        out[...] = made.reshape(out.shape)


def normed(seen: np.ndarray) -> np.ndarray:
    value_dim = seen.shape[-1]
    weights = DeltaWeights(None, None, None, np.ones(value_dim, np.float32), 1e-2)
    flat = seen.reshape(len(seen), -1, value_dim)
    return gated_norm(flat, np.ones_like(flat), weights).reshape(seen.shape)


def assert_right(case: DeltaCase, atol: float = 5e-5) -> None:
    scene = DeltaScene(case)
    for found, expected in zip(scene.run(Projected()), scene.expected(), strict=True):
        np.testing.assert_allclose(found, normed(expected), rtol=0, atol=atol)


def test_x() -> None:
    assert_right(DeltaCase(((5, 1, 1), (0, 20, 1))))
    assert_right(DeltaCase(((5, 1, 40), (17, 1, 2)), block_size=16))
    assert_right(DeltaCase(((70, 1, 140), (17, 1, 2)), block_size=64))
    assert_right(DeltaCase(((1, 1, 1, 1, 1, 1, 1), (63, 2, 3, 1, 1, 1, 1)), block_size=64))
    assert_right(DeltaCase(((70, 1, 1),), DeltaSizes(20, 36, 3, 3), heads=3, block_size=4))
