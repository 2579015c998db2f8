"""Weights of few bits that `gpu_checks.py` compiles and checks: products with codes, of dense layers and of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gpu.bench import Bench
from gpu.mixtures import experts_of
from numpy.typing import NDArray

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.cubins import Target
from headwise.kernels.cuda.experts import ExpertShape
from headwise.kernels.cuda.packed import form_of
from headwise.kernels.cuda.precompile import precompile
from headwise.kernels.experts import Routing
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.quantised import GroupQuantised, Matrix

DTYPE, GROUP, HIDDEN, INNER, EXPERTS, DEEP = "bfloat16", 64, 256, 128, 5, 4096
KINDS = {"int8": (np.int8, -128, 128, 8), "int4": (np.uint8, 0, 16, 4), "fp8": (np.uint8, 0, 256, 8)}
"""Values of ``weights_dtype``, and their codes: dtype, least, most and one, bits. Those of 4 bits have minima."""

_TOLERANCE = 2e-2
_NO_NUMBER = 0x7F


def compile_codes(kind: str, target: Target, directory: Path) -> int:
    """The number of kernels of one of `KINDS`."""
    bits = KINDS[kind][3]
    up, down = (form_of(DTYPE, bits, GROUP, bits == 4, depth, kind == "fp8") for depth in (HIDDEN, INNER))
    routing = Routing(EXPERTS, 2, 1e-12)
    shape = ExpertShape(routing, 1, HIDDEN, INNER, "silu", DTYPE, up_codes=up, down_codes=down)
    return len(list(precompile([], [target], directory, [shape], packed_forms=[up])))


def check_codes(bench: Bench, rng: np.random.Generator) -> None:
    """Products with codes of each kind, for few rows and many, against NumPy's with the numbers that they stand for;
    and of few rows with numbers of 16 bits."""
    dense, mixed = ((1, 37, 100), (3, 60, 400)) if bench.sizes.long else ((3,), (3,))
    with bench.rows.case("own_products") as begin:
        begin()
        given = {"device": "cuda", "dtype": DTYPE, "overlap_kernels": True, "cache_dir": str(bench.rig.work)}
        device = bench.rig.device(EngineConfig.from_dict(given))
        with device.current():
            for rows in (1, 8, 13) if bench.sizes.long else (3,):
                x, floats = _rounded(rng, rows, HIDDEN), _rounded(rng, 323, HIDDEN)
                found, wanted = (_product(ops, x, floats) for ops in (device.ops, NumpyOps()))
                bench.rows.check_error(f"linear_own_{rows}", _distance(found, wanted), _TOLERANCE)
    for kind in KINDS:
        with bench.rows.case(f"codes_{kind}") as begin:
            begin()
            given = {"device": "cuda", "dtype": DTYPE, "weights_dtype": kind, "cache_dir": str(bench.rig.work)}
            device, exact = bench.rig.device(EngineConfig.from_dict(given)), NumpyOps()
            matrix = draw_codes(kind, rng, 320, HIDDEN)
            up = [draw_codes(kind, rng, 2 * INNER, HIDDEN) for _ in range(EXPERTS + 1)]
            down = [draw_codes(kind, rng, HIDDEN, INNER) for _ in up]
            with device.current():
                for rows in dense:
                    x = _rounded(rng, rows, HIDDEN)
                    found, wanted = (_product(ops, x, matrix) for ops in (device.ops, exact))
                    bench.rows.check_error(f"linear_{kind}_{rows}", _distance(found, wanted), _TOLERANCE)
                for rows in (20, 64, 150) if bench.sizes.long else ():  # tiles that many blocks share
                    x, deep = _rounded(rng, rows, DEEP), draw_codes(kind, rng, 328, DEEP)
                    found, wanted = (_product(ops, x, deep) for ops in (device.ops, exact))
                    bench.rows.check_error(f"linear_{kind}_deep_{rows}", _distance(found, wanted), _TOLERANCE)
                for rows in mixed:
                    x, logits = _rounded(rng, rows, HIDDEN), _rounded(rng, rows, EXPERTS)
                    found, wanted = (_mixed(ops, x, logits, up, down) for ops in (device.ops, exact))
                    bench.rows.check_error(f"experts_{kind}_{rows}", _distance(found, wanted), _TOLERANCE)


def draw_codes(kind: str, rng: np.random.Generator, width: int, depth: int) -> GroupQuantised:
    """A matrix of one of `KINDS`, in groups of `GROUP`."""
    dtype, least, end, bits = KINDS[kind]
    codes: NDArray[Any] = rng.integers(least, end, (width, depth)).astype(dtype)
    is_float = kind == "fp8"
    if is_float:
        codes[codes & _NO_NUMBER == _NO_NUMBER] = 0
    most = 448 if is_float else end
    scale = (rng.uniform(0.5, 2, (width, depth // GROUP)) / most / depth**0.5).astype(np.float32)
    minimum = rng.standard_normal(scale.shape).astype(np.float32) / 32 if bits == 4 else None
    return GroupQuantised(codes, scale, minimum, GROUP, bits, is_float)


def _product(ops: TensorOps, x: NDArray[np.float32], matrix: Matrix) -> NDArray[np.float32]:
    return ops.numpy(ops.linear(ops.tensor(x), ops.linear_weight(matrix)))


def _mixed(
    ops: TensorOps,
    x: NDArray[np.float32],
    logits: NDArray[np.float32],
    up: list[GroupQuantised],
    down: list[GroupQuantised],
) -> NDArray[np.float32]:
    return ops.numpy(ops.mix_experts(ops.tensor(x), ops.tensor(logits), experts_of(ops, up, down)))


def _rounded(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Numbers that `DTYPE` has."""
    return rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(DTYPE)).astype(np.float32)


def _distance(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Relative; NaN if anything is NaN."""
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))
