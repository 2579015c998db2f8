"""Attention against the card's bandwidth, torch and FlashInfer: the sections decode, heads and prefill of `gpu.py`."""

from __future__ import annotations

from gpu_cases import Step, decode_step, half_windowed, prefill_step, step_bytes
from gpu_peers import FlashInfer, Torch, open_peers
from gpu_rig import Bench, Work

ROOM = 4
"""Device memory that a comparison takes, over that of the keys and values: gathered, and once more meanwhile."""


def decode(bench: Bench) -> None:
    """Bytes of KV per second over the card's copy bandwidth, and times against torch's and FlashInfer's."""
    sizes, rows = bench.sizes, bench.rows
    peers = open_peers()
    rows.add("copy_bandwidth", bench.bandwidth / 1e12, "TB/s", note="read and written, device to device")
    if peers[0] is None:
        rows.skip("over_torch", "torch is not installed")
    if peers[1] is None:
        rows.skip("over_flashinfer", "flashinfer is not installed")
    for context in sizes.contexts:
        for batch in sizes.batches:
            with rows.case(f"b{batch}_c{context}"):
                _decode_case(bench, peers, batch, context)


def _decode_case(bench: Bench, peers: tuple[Torch | None, FlashInfer | None], batch: int, context: int) -> None:
    rig, sizes, rows, name = bench.rig, bench.sizes, bench.rows, f"b{batch}_c{context}"
    needed = step_bytes(sizes.attention, batch, context)
    if rig.free_bytes() < ROOM * needed:
        rows.skip(name, f"the card has less than {ROOM * needed / 2**30:.0f} GiB free")
        return
    step = decode_step(rig, sizes.attention, batch, context, sizes.block_size)
    works = {"ours": step.on(rig)}
    torch, flashinfer = peers
    error = None
    if torch is not None:
        with rows.case(f"{name}_torch"):
            works["torch"], result = torch.attention(step, causal=False)
            error = _checked(bench, step, torch, result)
    if torch is not None and flashinfer is not None:
        with rows.case(f"{name}_flashinfer"):
            works["flashinfer"], _ = flashinfer.decode(step)
    seconds = bench.seconds(works)
    fills = step.kv_bytes >= sizes.fills_card
    rows.add(
        f"{name}_of_bandwidth", step.kv_bytes / seconds["ours"] / bench.bandwidth, least=0.85 if fills else None,
        note=f"{seconds['ours'] * 1e6:.1f} us for {step.kv_bytes / 2**20:.0f} MiB of KV",
    )  # fmt: skip
    for peer in ("torch", "flashinfer"):
        if peer in seconds:
            off = f", outputs {error:.1e} apart" if peer == "torch" and error is not None else ""
            note = f"{peer} {seconds[peer] * 1e6:.1f} us{off}"
            rows.add(f"{name}_over_{peer}", seconds[peer] / seconds["ours"], least=1.0, note=note)


CLOSE = 0.02
"""Relative distance of two results in bfloat16."""


def _checked(bench: Bench, step: Step, torch: Torch, result: object) -> float:
    """How far our output is from torch's."""
    step.on(bench.rig)()
    bench.rig.synchronize()
    error = torch.error(step, result)
    if not error < CLOSE:
        raise ValueError(f"outputs are {error:.2e} apart, more than {CLOSE:g}")
    return error


def heads(bench: Bench) -> None:
    """One table for all heads, all full, against a table per window with half of the heads windowed."""
    sizes, rig = bench.sizes, bench.rig
    batch, context = sizes.heads_at
    heads, windows = sizes.attention, half_windowed(sizes.attention, sizes.window)
    uniform = decode_step(rig, heads, batch, context, sizes.block_size)
    per_head = decode_step(rig, heads, batch, context, sizes.block_size, windows)
    _compare(bench, "decode", uniform, per_head, 0.55, f"batch {batch}, context {context}")
    del uniform, per_head
    prompt = sizes.prompts[-1]
    uniform = prefill_step(rig, heads, prompt, sizes.block_size)
    per_head = prefill_step(rig, heads, prompt, sizes.block_size, windows)
    _compare(bench, "prefill", uniform, per_head, None, f"{prompt} tokens, nothing recycled")


def _compare(bench: Bench, name: str, uniform: Step, per_head: Step, most: float | None, at: str) -> None:
    seconds = bench.seconds({"uniform": uniform.on(bench.rig), "per_head": per_head.on(bench.rig)})
    live = per_head.kv_bytes / uniform.kv_bytes if name == "decode" else per_head.flops / uniform.flops
    window, sink = bench.sizes.window
    note = f"{at}, window {window} and sink {sink}: {live:.3f} of the work; uniform {seconds['uniform'] * 1e3:.3f} ms"
    bench.rows.add(f"{name}_over_uniform", seconds["per_head"] / seconds["uniform"], most=most, note=note)


def prefill(bench: Bench) -> None:
    """TFLOP/s of a whole prompt against torch's flash SDPA."""
    sizes, rig, rows = bench.sizes, bench.rig, bench.rows
    torch, _ = open_peers()
    if torch is None:
        rows.skip("over_torch", "torch is not installed")
    for tokens in sizes.prompts:
        with rows.case(f"t{tokens}"):
            step = prefill_step(rig, sizes.attention, tokens, sizes.block_size)
            works: dict[str, Work] = {"ours": step.on(rig)}
            error = None
            if torch is not None:
                with rows.case(f"t{tokens}_torch"):
                    works["torch"], result = torch.attention(step, causal=True)
                    error = _checked(bench, step, torch, result)
            seconds = bench.seconds(works)
            rows.add(f"t{tokens}", step.flops / seconds["ours"] / 1e12, "TFLOP/s")
            if "torch" in seconds:
                note = f"torch {step.flops / seconds['torch'] / 1e12:.0f} TFLOP/s, outputs {error or 0:.1e} apart"
                rows.add(f"t{tokens}_over_torch", seconds["torch"] / seconds["ours"], least=0.75, note=note)
