"""Attention against the card's bandwidth, torch and FlashInfer: the sections decode, heads, prefill of `gpu_checks.py`.

A step is checked before it is timed: of what is wrong, no time is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from gpu.bench import Bench
from gpu.cases import (
    Step,
    decode_step,
    half_windowed,
    joint_step,
    kernels_with,
    prefill_step,
    skewed_step,
    step_bytes,
)
from gpu.peers import FlashInfer, Sdpa, Tensor, Torch, open_peers
from gpu.rig import Work
from gpu.sizes import Heads
from gpu.spot_check import CLOSE, WrongError, check_step

from headwise.kernels.cuda.attention import OLDEST_SM_E4M3, AttentionShape, variants_of
from headwise.kernels.cuda.tiles import tma_tile
from headwise.kernels.gqa import QUANTISED
from headwise.kernels.nibbles import INT4

E4M3 = "float8_e4m3fn"
QUANTISED_DTYPES = (*QUANTISED, INT4)
"""Of caches that are timed beside that of the model's own dtype."""

ROOM = 4
"""Device memory that a comparison takes, over that of the keys and values: gathered, and once more meanwhile."""

Peers = dict[str, Callable[[], tuple[Work, Tensor]]]
"""By name: what makes the call, and its result."""


def decode(bench: Bench) -> None:
    """Bytes of KV per second over a copy's, and over the memory's peak; and times against torch's and FlashInfer's."""
    rig, sizes, rows = bench.rig, bench.sizes, bench.rows
    peers = open_peers()
    rows.add("copy_bandwidth", bench.bandwidth / 1e12, "TB/s", note="read and written, device to device")
    if (peak := rig.peak_bandwidth()) is None:
        rows.skip("peak_bandwidth", "the driver does not tell of the memory's clock")
    else:
        rows.add("peak_bandwidth", peak / 1e12, "TB/s", note="two transfers a clock of the memory, over its whole bus")
        rows.add("copy_of_peak", bench.bandwidth / peak)
    rows.add("read_bandwidth", bench.read_bandwidth / 1e12, "TB/s", note="of a kernel that only reads")
    if peers[0] is None:
        rows.skip("over_torch", "torch is not installed")
    if peers[1] is None:
        rows.skip("over_flashinfer", "flashinfer is not installed")
    for batch in reversed(sizes.batches):
        for context in reversed(sizes.contexts):
            with rows.case(f"b{batch}_c{context}") as begin:
                begin()
                _decode_case(bench, peers, batch, context)
    with rows.case("skewed") as begin:
        begin()
        _skewed_case(bench)
    for batch, context, shared in sizes.together:
        with rows.case(f"together_b{batch}_c{shared}") as begin:
            begin()
            _together_case(bench, batch, context, shared)
    with rows.case("quantised") as begin:
        begin()
        _quantised_cases(bench)
    with rows.case("also") as begin:
        begin()
        _other_cases(bench)
    rows.state("clocks", bench.rig.clocks())


def _skewed_case(bench: Bench) -> None:
    """One long sequence among short ones."""
    batch, *contexts = bench.sizes.skewed
    step = skewed_step(bench.rig, bench.sizes.attention, batch, (contexts[0], contexts[1]), bench.sizes.block_size)
    error = check_step(bench.rig, step)
    seconds = bench.seconds({"ours": step.on(bench.rig)})["ours"]
    note = f"one of {contexts[1]} tokens among {batch - 1} of {contexts[0]}, {seconds * 1e6:.1f} us"
    note += f", {error:.1e} from NumPy"
    _add_rate(bench, "skewed", step.kv_bytes / seconds, least=0.85, note=note)


def _together_case(bench: Bench, batch: int, context: int, shared: int) -> None:
    """Sequences that go on from one prefix: reading it once, over reading it each for itself."""
    alone, together = joint_step(bench.rig, bench.sizes.attention, batch, context, shared, bench.sizes.block_size)
    errors = [check_step(bench.rig, step) for step in (alone, together)]
    seconds = bench.seconds({"alone": alone.on(bench.rig), "together": together.on(bench.rig)})
    own, joint = seconds["alone"], seconds["together"]
    note = f"{batch} of {context} tokens, {own * 1e6:.1f} us alone, {joint * 1e6:.1f} us, {max(errors):.1e} from NumPy"
    name = f"together_b{batch}_c{shared}"
    bench.rows.add(f"{name}_over_alone", own / joint, least=1.0, note=note)
    bench.rows.add(f"{name}_of_bandwidth", together.kv_bytes / joint / bench.bandwidth, note="what is read, once")


def _add_rate(bench: Bench, name: str, rate: float, least: float | None, note: str) -> None:
    """Bytes per second: of a copy in the same run, which is the aim's measure, and of the memory's peak."""
    bench.rows.add(f"{name}_of_bandwidth", rate / bench.bandwidth, least=least, note=note)
    if (peak := bench.rig.peak_bandwidth()) is not None:
        bench.rows.add(f"{name}_of_peak", rate / peak, note=f"{rate / 1e12:.3f} of {peak / 1e12:.3f} TB/s")


def _quantised_cases(bench: Bench) -> None:
    """Caches of fewer bits, of as many tokens: bytes read of bandwidth, and the time against the model's own dtype."""
    rig, sizes, (batch, context) = bench.rig, bench.sizes, bench.sizes.quantised_at
    dtypes = [dtype for dtype in QUANTISED_DTYPES if dtype != E4M3 or rig.target.sm >= OLDEST_SM_E4M3]
    steps = {
        dtype: decode_step(rig, sizes.attention, batch, context, sizes.block_size, kv_dtype=dtype)
        for dtype in (sizes.attention.dtype, *dtypes)
    }
    errors = {dtype: check_step(rig, step) for dtype, step in steps.items()}
    seconds = bench.seconds({dtype: step.on(rig) for dtype, step in steps.items()})
    wide = seconds[sizes.attention.dtype]
    for dtype in dtypes:
        note = f"{seconds[dtype] * 1e6:.1f} us, {errors[dtype]:.1e} from NumPy"
        rate = steps[dtype].kv_bytes / seconds[dtype]
        _add_rate(bench, dtype, rate, least=0.8 if dtype in QUANTISED else None, note=note)
        bench.rows.add(f"{dtype}_over_own", wide / seconds[dtype], note=f"{sizes.attention.dtype}: {wide * 1e6:.1f} us")


def _other_cases(bench: Bench) -> None:
    """Other head sizes, caches and batches, for docs/gpu.md."""
    rig, sizes = bench.rig, bench.sizes
    head_dims, dtypes, batches = sizes.also_at
    for head_dim, dtype, (batch, context) in product(head_dims, dtypes, batches):
        heads = replace(sizes.attention, head_dim=head_dim)
        step = decode_step(rig, heads, batch, context, sizes.block_size, kv_dtype=dtype)
        error = check_step(rig, step)
        seconds = bench.seconds({"ours": step.on(rig)})["ours"]
        note = f"{seconds * 1e6:.1f} us for {step.kv_bytes / 2**20:.0f} MiB, {error:.1e} from NumPy"
        name = f"d{head_dim}_{dtype}_b{batch}_c{context}_of_bandwidth"
        bench.rows.add(name, step.kv_bytes / seconds / bench.bandwidth, note=note)


def _decode_case(bench: Bench, peers: tuple[Torch | None, FlashInfer | None], batch: int, context: int) -> None:
    rig, sizes, rows, name = bench.rig, bench.sizes, bench.rows, f"b{batch}_c{context}"
    needed = step_bytes(sizes.attention, batch, context)
    if rig.free_bytes() < ROOM * needed:
        rows.skip(name, f"the card has less than {ROOM * needed / 2**30:.0f} GiB free")
        return
    step = decode_step(rig, sizes.attention, batch, context, sizes.block_size)
    error = check_step(rig, step)
    torch, _ = peers
    fills = step.kv_bytes >= sizes.fills_card
    works, apart = _with_peers(bench, step, name, torch, _decode_peers(bench, name, peers, step, fills))
    seconds = bench.seconds(works)
    note = f"{seconds['ours'] * 1e6:.1f} us for {step.kv_bytes / 2**20:.0f} MiB of KV, {error:.1e} from NumPy"
    _add_rate(bench, name, step.kv_bytes / seconds["ours"], _least(bench, batch, context, fills), note)
    for peer, distance in apart.items():
        note = f"{peer} {seconds[peer] * 1e6:.1f} us, outputs {distance:.1e} apart"
        aim = None if peer == "cudnn" else 1.0
        rows.add(f"{name}_over_{peer}", seconds[peer] / seconds["ours"], least=aim, note=note)


def _least(bench: Bench, batch: int, context: int, fills: bool) -> float | None:
    """The aim of a decode's bandwidth."""
    if fills:
        return 0.85
    return 0.75 if batch == 1 and context >= bench.sizes.single_from else None


def _decode_peers(
    bench: Bench, name: str, libraries: tuple[Torch | None, FlashInfer | None], step: Step, fills: bool
) -> Peers:
    """cuDNN where the card is filled only: it plans each shape anew, for a second or more."""
    (torch, flashinfer), peers = libraries, Peers()
    if torch is not None:
        with bench.rows.case(f"{name}_gathered") as begin:
            begin()
            sdpa = Sdpa(torch, step, causal=False)
            peers |= {"torch": sdpa.flash, "cudnn": sdpa.cudnn} if fills else {"torch": sdpa.flash}
    if flashinfer is not None:
        peers["flashinfer"] = lambda: flashinfer.decode(step)
    return peers


def _with_peers(
    bench: Bench, step: Step, name: str, torch: Torch | None, peers: Peers
) -> tuple[dict[str, Work], dict[str, float]]:
    """Ours and the peers' calls, and how far each peer's result is from ours. One that fails is a row, and left out."""
    works, apart = {"ours": step.on(bench.rig)}, {}
    for peer, make in peers.items():
        with bench.rows.case(f"{name}_over_{peer}", optional=peer == "cudnn") as begin:
            begin()
            work, result = make()
            assert torch is not None
            error = torch.error(step, result)
            if not error < CLOSE:
                raise WrongError(f"outputs are {error:.2e} apart, more than {CLOSE:g}")
            works[peer], apart[peer] = work, error
    return works, apart


def heads(bench: Bench) -> None:
    """One table for all heads, all of which see everything, against a table per window with half of them windowed."""
    sizes, rig, heads = bench.sizes, bench.rig, bench.sizes.attention
    batch, context = sizes.heads_at
    windows, at = half_windowed(heads, sizes.window), f"batch {batch}, context {context}"
    with bench.rows.case("decode_over_uniform") as begin:
        begin()
        per_head = decode_step(rig, heads, batch, context, sizes.block_size, windows)
        uniform = decode_step(rig, heads, batch, context, sizes.block_size)
        _compare(bench, "decode_over_uniform", uniform, per_head, 0.55, at)
        uniform = decode_step(rig, heads, batch, context, sizes.block_size, windows, one_table=True)
        _compare(bench, "decode_over_one_table", uniform, per_head, None, f"{at}, windows in both")
        del uniform, per_head
    with bench.rows.case("prefill_over_uniform") as begin:
        begin()
        prompt = sizes.prompts[-1]
        uniform = prefill_step(rig, heads, prompt, sizes.block_size)
        per_head = prefill_step(rig, heads, prompt, sizes.block_size, windows)
        _compare(bench, "prefill_over_uniform", uniform, per_head, None, f"{prompt} tokens, nothing recycled")


def _compare(bench: Bench, name: str, uniform: Step, per_head: Step, most: float | None, at: str) -> None:
    error = max(check_step(bench.rig, step) for step in (uniform, per_head))
    seconds = bench.seconds({"uniform": uniform.on(bench.rig), "per_head": per_head.on(bench.rig)})
    is_decode = per_head.sequences[0][0] == 1
    live = per_head.kv_bytes / uniform.kv_bytes if is_decode else per_head.flops / uniform.flops
    window, sink = bench.sizes.window
    note = (
        f"{at}, window {window} and sink {sink}: {live:.3f} of the work; uniform {seconds['uniform'] * 1e3:.3f} ms, "
        f"{error:.1e} from NumPy"
    )
    bench.rows.add(name, seconds["per_head"] / seconds["uniform"], most=most, note=note)


def prefill(bench: Bench) -> None:
    """TFLOP/s of a whole prompt against torch's flash SDPA."""
    sizes, rows = bench.sizes, bench.rows
    torch, _ = open_peers()
    if torch is None:
        rows.skip("over_torch", "torch is not installed")
    for tokens in sizes.prompts:
        with rows.case(f"t{tokens}") as begin:
            begin()
            _prefill_case(bench, torch, f"t{tokens}", sizes.attention, tokens)
    tokens, head_dims = sizes.head_dims
    for head_dim in head_dims:
        with rows.case(f"d{head_dim}") as begin:
            begin()
            _prefill_case(bench, torch, f"d{head_dim}", replace(sizes.attention, head_dim=head_dim), tokens)
    rows.state("clocks", bench.rig.clocks())


def _prefill_case(bench: Bench, torch: Torch | None, name: str, heads: Heads, tokens: int) -> None:
    rig, sizes, rows = bench.rig, bench.sizes, bench.rows
    step = prefill_step(rig, heads, tokens, sizes.block_size)
    error = check_step(rig, step)
    peers = Peers()
    if torch is not None:
        with rows.case(f"{name}_gathered") as begin:
            begin()
            sdpa = Sdpa(torch, step, causal=True)
            peers = {"torch": sdpa.flash, "cudnn": sdpa.cudnn}
    works, apart = _with_peers(bench, step, name, torch, peers)
    if torch is not None:
        works["matmul"] = torch.matmul(step, sizes.product)
    if is_by_tma := _is_by_tma(bench, heads):
        with rows.case(f"{name}_tma") as begin:
            begin()
            by_copies = replace(step, kernels=kernels_with(rig, tma=False))
            check_step(rig, by_copies)
            works["copies"] = by_copies.on(rig)
    seconds = bench.seconds(works)
    if "copies" in seconds:
        note = f"{step.flops / seconds['copies'] / 1e12:.0f} TFLOP/s without prefill_tma"
        rows.add(f"{name}_tma_speedup", seconds["copies"] / seconds["ours"], note=note)
    rows.add(name, step.flops / seconds["ours"] / 1e12, "TFLOP/s", note=f"{tokens} tokens, {error:.1e} from NumPy")
    _machine_code(bench, name, heads, is_by_tma)
    if "matmul" in seconds:
        at_best = 2 * sizes.product**3 / seconds["matmul"] / 1e12
        rows.add(f"{name}_matmul", at_best, "TFLOP/s", note=f"torch, {sizes.product} rows and columns: the card's best")
    for peer, distance in apart.items():
        note = f"{peer} {step.flops / seconds[peer] / 1e12:.0f} TFLOP/s, outputs {distance:.1e} apart"
        aim = 0.75 if peer == "torch" else None
        rows.add(f"{name}_over_{peer}", seconds[peer] / seconds["ours"], least=aim, note=note)


def _is_by_tma(bench: Bench, heads: Heads) -> bool:
    """Whether TMA brings a prompt's keys and values."""
    sm = bench.rig.parts.launcher.sm
    return tma_tile(heads.head_dim, heads.dtype, heads.dtype, sm, bench.sizes.block_size) is not None


def _machine_code(bench: Bench, name: str, heads: Heads, by_tma: bool) -> None:
    """What ptxas said of the kernel that computes prompts, if that is in the kernels' folder."""
    shape = AttentionShape(
        heads.q_heads // heads.kv_heads, heads.head_dim, bench.sizes.block_size, heads.dtype, heads.dtype
    )
    file = bench.rig.machine_code(variants_of(shape, bench.rig.target.sm, by_tma)[0])
    if file is None:
        return
    bench.rows.add(f"{name}_registers", file.registers, note=f"ptxas, of {file.path.stem}")
    bench.rows.add(f"{name}_spilled", file.spilled_bytes, "bytes")
    bench.rows.add(f"{name}_serialised", float(file.is_serialised), most=0.0, note="products wait for each other")
