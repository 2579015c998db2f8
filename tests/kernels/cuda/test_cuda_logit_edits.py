"""Editing logits in CUDA C++: executed on a CPU by `cuda_shim`, compiled for GPUs by NVRTC."""

from __future__ import annotations

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.machine_code import TARGETS, machine_code, spilled

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.elementwise import variant_of
from headwise.kernels.cuda.logit_edits import SOURCE, CudaLogitEdits
from headwise.runtime.worker.logit_edits import LogitEdits, Ragged

DTYPES = ("float16", "bfloat16", "float32")


def random_edits(rng: np.random.Generator, rows: int, vocab: int, masks: int) -> LogitEdits:
    def ragged(values: object) -> Ragged:
        tokens = [rng.permutation(vocab)[: rng.integers(0, vocab // 2 + 1)].astype(np.int32) for _ in range(rows)]
        return Ragged.of([(each, values(len(each))) for each in tokens], values(0).dtype)

    def biases(size: int) -> np.ndarray:
        return np.where(rng.random(size) < 0.1, -np.inf, rng.standard_normal(size)).astype(np.float32)

    return LogitEdits(
        mask_of=rng.integers(-1, masks, rows, dtype=np.int32),
        masks=rng.integers(0, 2**32, (masks, -(-vocab // 32)), dtype=np.uint32),
        biases=ragged(biases),
        seen=ragged(lambda size: rng.integers(0, 4, size, dtype=np.int32)),
        penalties=np.stack([rng.uniform(0.5, 2, rows), *rng.uniform(-2, 2, (2, rows))], axis=1).astype(np.float32),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab", "masks"), [(1, 1, 1), (3, 31, 2), (4, 33, 0), (5, 700, 3)])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("backwards", [False, True])
def test_logits_are_those_of_the_host(
    dtype: str, rows: int, vocab: int, masks: int, cap: float, backwards: bool
) -> None:
    rng = np.random.default_rng(vocab)
    shim = ShimPrograms()
    shim.backwards = backwards
    scores = (rng.standard_normal((rows, vocab + 3)) * 4).astype(numpy_dtype(dtype))[:, :vocab]  # gaps between rows
    edits = random_edits(rng, rows, vocab, masks)
    expected = scores.astype(np.float32)
    expected = np.float32(cap) * np.tanh(expected / np.float32(cap)) if cap else expected.copy()
    edits.apply(expected)
    found = np.full((rows, vocab), np.nan, np.float32)
    columns = (
        edits.mask_of, edits.masks, edits.biases.begins, edits.biases.tokens, edits.biases.values,
        edits.seen.begins, edits.seen.tokens, edits.seen.values, edits.penalties,
    )  # fmt: skip
    CudaLogitEdits(shim, scores.dtype, threads=64).edit(scores, cap, found, *columns)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm", TARGETS)
def test_it_compiles_without_spills(dtype: str, sm: int) -> None:
    assert spilled(machine_code(SOURCE, variant_of(numpy_dtype(dtype)), sm)) == []
