"""Every way to multiply some rows with a weight of few bits, or of 16, timed: who chooses tiles, and the rows from
which on another kernel pays, chooses by this. The section tiles of `gpu_checks.py`, run only where it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from gpu.bench import Bench
from gpu.codes import DTYPE, KINDS
from gpu.products import FLOATS, OWN, device_of, draw

from headwise.kernels.cuda.launch import Array
from headwise.kernels.cuda.packed import FEW_ROWS, PLAIN, CodesTile, CudaPacked, PackedMatrix, plain
from headwise.kernels.cuda.packed_many import TOKENS, CudaPackedMany

FEW = {
    8: (
        CodesTile(8, 1, 2, warps=24), CodesTile(8, 2, 2), CodesTile(16, 1, 2, warps=24), CodesTile(16, 2, 2),
    ),
    4: (CodesTile(8, 2, 1), CodesTile(8, 1, 2, warps=24), CodesTile(16, 1, 2), CodesTile(16, 2, 1)),
    PLAIN: (
        CodesTile(8, 1, 4, least_blocks=2), CodesTile(8, 1, 8), CodesTile(8, 2, 4), CodesTile(8, 2, 2, warps=24),
        CodesTile(16, 1, 2, least_blocks=2), CodesTile(16, 2, 2),
    ),
}  # fmt: skip
"""By bits of a code: what `PRODUCT_TILES` might have."""

Way = Callable[[Array], object]


def tiles(bench: Bench) -> None:
    """Microseconds of each way, by kind of weight and rows. What a way does not take is left out."""
    for kind in (OWN, *KINDS):
        with bench.rows.case(kind) as begin:
            begin()
            _ways_of(bench, kind)
    bench.rows.state("clocks", bench.rig.clocks())


def _ways_of(bench: Bench, kind: str) -> None:
    rng, device = np.random.default_rng(bench.rig.seed), device_of(bench, kind)
    matrix, _ = draw(kind, rng, bench.sizes.weight)
    with device.current():
        weight = device.ops.linear_weight(matrix)
        packed = weight if isinstance(weight, PackedMatrix) else plain(weight.T, DTYPE)
        assert packed is not None, "a weight of whole vectors"
        ops = device_of(bench, FLOATS).ops
        floats = ops.linear_weight(draw(FLOATS, rng, bench.sizes.weight)[0])
        few, many = list(_few(bench, packed)), list(_many(bench, packed))
        whole = CudaPacked(bench.rig.parts.launcher, bench.rig.parts.programs, bench.rig.parts.empty)
        whole.prepare(packed.form)
        for rows in bench.sizes.tile_rows:
            x = device.ops.tensor(rng.standard_normal((rows, bench.sizes.weight[1]), dtype=np.float32))
            ways: dict[str, Way] = {FLOATS: partial(ops.linear, weight=floats)}
            ways |= {name: partial(one.multiply, matrix=packed) for name, one in few if rows <= FEW_ROWS}
            ways |= {name: partial(one.multiply, matrix=packed) for name, one in many if one.takes(packed, rows)}
            if kind != OWN and rows > FEW_ROWS:
                ways["expanded"] = lambda x: ops.linear(x, whole.expand(packed, x.dtype).T)
            taken = bench.seconds({name: partial(way, x) for name, way in ways.items()})
            for name, seconds in taken.items():
                bench.rows.add(f"{kind}_{rows}_{name}", seconds * 1e6, "us")


def _few(bench: Bench, packed: PackedMatrix) -> Iterator[tuple[str, CudaPacked]]:
    parts, bits = bench.rig.parts, packed.form.bits
    for tile in FEW[bits] if bench.sizes.long else FEW[bits][:1]:
        one = CudaPacked(parts.launcher, parts.programs, parts.empty, {bits: {FEW_ROWS: tile}})
        one.prepare(packed.form)
        yield f"{tile.tokens}x{16 * tile.tiles}_{tile.ahead}_{tile.warps}_{tile.least_blocks}", one


def _many(bench: Bench, packed: PackedMatrix) -> Iterator[tuple[str, CudaPackedMany]]:
    """Of fewer rows, too, than it is used for."""
    parts = bench.rig.parts
    if packed.form.bits == PLAIN:
        return
    for tokens in TOKENS:
        one = CudaPackedMany(parts.launcher, parts.programs, parts.empty, (tokens,), least_rows=1, most_rows=1 << 10)
        one.prepare(packed.form)
        yield f"many_{tokens}", one
