"""How fast weights are read by products of few rows, as decodes have: the section products of `gpu_checks.py`."""

from __future__ import annotations

from functools import partial

import numpy as np
from gpu.bench import Bench
from gpu.codes import DTYPE, KINDS, draw_codes

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.ops.quantised import Matrix

FLOATS = "floats"


def products(bench: Bench) -> None:
    """Bytes of a weight over the time of a product and a copy's bandwidth; of codes, too, how much faster it is than
    the same in floats, by cuBLAS."""
    rows, seconds = bench.rows, dict[tuple[str, int], float]()
    for kind in (FLOATS, *KINDS):
        with rows.case(kind) as begin:
            begin()
            given = {"device": "cuda", "dtype": DTYPE, "cache_dir": str(bench.rig.work)}
            device = bench.rig.device(
                EngineConfig.from_dict(given | ({} if kind == FLOATS else {"weights_dtype": kind}))
            )
            rng = np.random.default_rng(bench.rig.seed)
            matrix, num_bytes = _draw(kind, rng, bench.sizes.weight)
            with device.current():
                weight = device.ops.linear_weight(matrix)
                for count in bench.sizes.few_rows:
                    x = device.ops.tensor(rng.standard_normal((count, bench.sizes.weight[1]), dtype=np.float32))
                    taken = bench.seconds({"ours": partial(device.ops.linear, x, weight)})["ours"]
                    seconds[kind, count] = taken
                    note = f"{taken * 1e6:.1f} us, {num_bytes / 2**20:.0f} MiB"
                    rows.add(f"{kind}_{count}_of_bandwidth", num_bytes / taken / bench.bandwidth, note=note)
                    if kind != FLOATS and (FLOATS, count) in seconds:
                        rows.add(f"{kind}_{count}_over_floats", seconds[FLOATS, count] / taken)
    rows.state("clocks", bench.rig.clocks())


def _draw(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Matrix, int]:
    """A matrix ``[width, depth]``, and its bytes on the device."""
    if kind == FLOATS:
        return rng.standard_normal(shape, dtype=np.float32), 2 * shape[0] * shape[1]
    codes = draw_codes(kind, rng, *shape)
    scales = codes.scale.nbytes * (1 if codes.minimum is None else 2)
    return codes, codes.codes.size * codes.bits // 8 + scales
