"""Which way rows are multiplied with weights of few bits on a GPU, by their number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.gpu.cuda_shim import LIBRARIES

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from support.gpu.emulated_gpu import EmulatedGpu

from headwise.kernels.cuda.packed import FEW_ROWS, CudaPacked
from headwise.kernels.cuda.packed_many import MANY_ROWS, CudaPackedMany


def test_rows_are_multiplied_with_codes_up_to_some_hundreds_and_with_floats_of_them_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops, ways = EmulatedGpu(Path(LIBRARIES), "bfloat16", "int8").ops, []
    for kernels, name in ((CudaPacked, "multiply"), (CudaPackedMany, "multiply"), (CudaPacked, "expand")):
        real = getattr(kernels, name)

        def watched(self, *given, real=real, way=(kernels, name)):
            ways.append(way)
            return real(self, *given)

        monkeypatch.setattr(kernels, name, watched)
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((48, 128), np.float32)
    weight = ops.linear_weight(matrix)
    few, many, floats = (CudaPacked, "multiply"), (CudaPackedMany, "multiply"), (CudaPacked, "expand")
    for rows, way in ((1, few), (FEW_ROWS, few), (FEW_ROWS + 1, many), (MANY_ROWS, many), (MANY_ROWS + 1, floats)):
        x = rng.standard_normal((rows, 128), np.float32)
        ways.clear()
        found = ops.numpy(ops.linear(ops.tensor(x), weight))
        assert ways == [way], rows
        np.testing.assert_allclose(found, x @ matrix.T, rtol=0, atol=0.03 * np.abs(x @ matrix.T).max())
