"""How fast weights are read by products of few rows, as decodes have, of a dense layer and of experts: the section
products of `gpu_checks.py`."""

from __future__ import annotations

from functools import partial

import numpy as np
from gpu.bench import Bench
from gpu.codes import DTYPE, KINDS, draw_codes
from gpu.mixtures import experts_of

from headwise.kernels.cuda.packed import PLAIN_ROWS
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.ops.quantised import Matrix
from headwise.runtime.worker.device import Device

FLOATS, OWN = "floats", "own"
"""Weights of 16 bits, times them by cuBLAS and by headwise's own kernel."""


def products(bench: Bench) -> None:
    """Bytes of a weight over the time of a product and a copy's bandwidth; of codes, too, how much faster it is than
    the same in floats, by cuBLAS. Then so much of a layer of experts, from the router's logits to their sum."""
    seconds = dict[tuple[str, int], float]()
    for kind in (FLOATS, OWN, *KINDS):
        with bench.rows.case(kind) as begin:
            begin()
            _dense(bench, kind, seconds)
    seconds.clear()
    for kind in (FLOATS, *KINDS):
        with bench.rows.case(f"experts_{kind}") as begin:
            begin()
            _experts(bench, kind, seconds)
    bench.rows.state("clocks", bench.rig.clocks())


def _dense(bench: Bench, kind: str, seconds: dict[tuple[str, int], float]) -> None:
    rows, device, rng = bench.rows, device_of(bench, kind), np.random.default_rng(bench.rig.seed)
    matrix, num_bytes = draw(kind, rng, bench.sizes.weight)
    with device.current():
        weight = device.ops.linear_weight(matrix)
        for count in bench.sizes.few_rows:
            if kind == OWN and count > PLAIN_ROWS:
                break
            x = device.ops.tensor(rng.standard_normal((count, bench.sizes.weight[1]), dtype=np.float32))
            taken = bench.seconds({"ours": partial(device.ops.linear, x, weight)})["ours"]
            note = f"{taken * 1e6:.1f} us, {num_bytes / 2**20:.0f} MiB"
            rows.add(f"{kind}_{count}_of_bandwidth", num_bytes / taken / bench.bandwidth, note=note)
            _over_floats(bench, f"{kind}_{count}", kind, count, seconds, taken)


def _experts(bench: Bench, kind: str, seconds: dict[tuple[str, int], float]) -> None:
    rows, device, rng = bench.rows, device_of(bench, kind), np.random.default_rng(bench.rig.seed)
    count, hidden, inner = bench.sizes.experts
    with device.current():
        every = [draw(kind, rng, (2 * inner, hidden))[0] for _ in range(count + 1)]
        experts = experts_of(device.ops, every, [draw(kind, rng, (hidden, inner))[0] for _ in every])
        for tokens in bench.sizes.few_rows:
            x, logits = (
                device.ops.tensor(rng.standard_normal((tokens, width), dtype=np.float32)) for width in (hidden, count)
            )
            taken = bench.seconds({"ours": partial(device.ops.mix_experts, x, logits, experts)})["ours"]
            note = f"{tokens} tokens, of {count} experts two for each and a shared one, {hidden} x {inner}"
            rows.add(f"experts_{kind}_{tokens}", taken * 1e6, "us", note=note)
            _over_floats(bench, f"experts_{kind}_{tokens}", kind, tokens, seconds, taken)


def _over_floats(
    bench: Bench, name: str, kind: str, count: int, seconds: dict[tuple[str, int], float], taken: float
) -> None:
    seconds[kind, count] = taken
    if kind != FLOATS and (FLOATS, count) in seconds:
        bench.rows.add(f"{name}_over_floats", seconds[FLOATS, count] / taken)


def device_of(bench: Bench, kind: str) -> Device:
    given = {"device": "cuda", "dtype": DTYPE, "cache_dir": str(bench.rig.work)}
    told = {FLOATS: {}, OWN: {"overlap_kernels": True}}.get(kind, {"weights_dtype": kind})
    return bench.rig.device(EngineConfig.from_dict(given | told))


def draw(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Matrix, int]:
    """A matrix ``[width, depth]``, and its bytes on the device."""
    if kind in (FLOATS, OWN):
        return rng.standard_normal(shape, dtype=np.float32), 2 * shape[0] * shape[1]
    codes = draw_codes(kind, rng, *shape)
    scales = codes.scale.nbytes * (1 if codes.minimum is None else 2)
    return codes, codes.codes.size * codes.bits // 8 + scales
