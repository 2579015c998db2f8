"""Copies between device and host beside a forward pass, through the real `TransferManager`: the section copies."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from gpu.bench import Bench
from gpu.cases import decode_step, prefill_step
from gpu.random_bytes import fill
from gpu.rig import Array, Rig
from gpu.sizes import Heads
from gpu.spot_check import WrongError
from numpy.typing import NDArray

from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.planner import plan_head_groups
from headwise.kernels.gqa import gqa_layout
from headwise.runtime.models.registry import model_config
from headwise.runtime.worker.kv_offload import layer_ranges
from headwise.transfer.transfer_manager import TransferManager

LONGEST_S = 20.0
CHECKED_EVERY = 11
"""Blocks: of so many that were copied, one is compared."""

DRAWN_BYTES = (64 << 20) - 1
"""Random bytes of host arenas; an odd number, so that no two blocks have the same."""

COMPUTE_OVER_LOAD = 1.2
"""A layer's computation takes so much longer than its load: what cannot be hidden then is the first layer."""

DECODE_OVER_COPIES = 0.6
"""A decode that is timed beside copies takes no longer than this part of what is left of them when they are all
enqueued, so that all of it is beside them."""

BESIDE = 0.5
"""Of the rounds, so many at least must have had copies to their end, or they prove nothing."""


@dataclass(frozen=True)
class Traffic:
    """Blocks of one model to load and to store, half of each arena, from anywhere to anywhere.

    loads:  ``int32 [m, 3]`` (group, host block, device block)
    stores: ``int32 [m, 2]`` (device block, host block)
    """

    rig: Rig
    manager: TransferManager
    layout: BlockLayout
    device: Array
    host: NDArray[np.uint8]
    loads: NDArray[np.int32]
    stores: NDArray[np.int32]
    layers: int
    piece_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all loads, and of all stores."""
        return len(self.loads) * self.layout.block_bytes

    def load(self) -> None:
        self.manager.load(self.loads)
        self.finish()

    def store(self) -> None:
        self.manager.store(self.stores)
        self.finish()

    def both(self) -> None:
        self.start_both()
        self.finish()

    def start_both(self) -> None:
        self.manager.load(self.loads)
        self.manager.store(self.stores)

    def finish(self) -> None:
        """Wait for all copies; raises if one failed."""
        if not self.manager.drain(LONGEST_S):
            raise TimeoutError(f"copies are not over after {LONGEST_S:g} s")
        failed = len(self.manager.finish_loads()) + len(self.manager.finished_stores().failed)
        if failed:
            raise RuntimeError(f"copies of {failed} blocks failed: see the log above")

    def differing(self) -> int:
        """Blocks, of some loaded and stored ones, that are not what they were copied from."""
        size, host, device = self.layout.block_bytes, self.host, self.device
        pairs = [*self.loads[::CHECKED_EVERY, 1:].tolist(), *self.stores[::CHECKED_EVERY, ::-1].tolist()]
        return sum(
            not np.array_equal(host[h * size : (h + 1) * size], self.rig.download(device[d * size : (d + 1) * size]))
            for h, d in pairs
        )


@contextmanager
def open_traffic(bench: Bench, block_size: int) -> Iterator[Traffic]:
    """Arenas, pinned, and a `TransferManager` between them."""
    rig, sizes = bench.rig, bench.sizes.copies
    config = model_config(sizes.model)
    plan = plan_head_groups(config.policies)
    layout = gqa_layout(block_size, plan.slots, config.head_dim, "bfloat16")
    ranges = layer_ranges(plan, [layout] * plan.num_layers, 0)
    blocks = sizes.num_bytes // layout.block_bytes // 2 * 2
    device, host = rig.empty(blocks * layout.block_bytes), rig.host_arena(blocks * layout.block_bytes)
    host.wait_ready()
    bench.rows.check(f"block{block_size}_pinned", host.is_pinned or not rig.pins, f"NUMA node {host.numa_node}")
    fill(rig, device, salt=4)
    rng, half = np.random.default_rng((rig.seed, 6)), blocks // 2
    drawn = rng.integers(0, 256, min(host.array.size, DRAWN_BYTES), dtype=np.uint8)
    for at in range(0, host.array.size, len(drawn)):
        host.array[at : at + len(drawn)] = drawn[: host.array.size - at]
    groups = np.arange(half) % len(plan.groups)
    loads = np.stack([groups, rng.permutation(half), rng.permutation(half)], axis=1).astype(np.int32)
    stores = np.stack([half + rng.permutation(half), half + rng.permutation(half)], axis=1).astype(np.int32)
    copy = rig.block_copy()
    bench.rows.state(f"block{block_size}_ways", f"the copy engines from {copy.crossover_bytes} bytes a piece on")
    manager = TransferManager(
        layout, ranges, device, host.array, copy=copy, input_stream=rig.copy_stream("load"),
        output_stream=rig.copy_stream("store"), load_timeout_s=LONGEST_S,
        piece_bytes=copy.piece_bytes,
    )  # fmt: skip
    piece = int((ranges[..., 1] - ranges[..., 0]).max())
    try:
        yield Traffic(rig, manager, layout, device, host.array, loads, stores, config.num_layers, piece)
    finally:
        manager.close()
        host.close()


def copies(bench: Bench) -> None:
    """Against plain pinned copies of as many bytes; behind a forward pass; beside a decode."""
    for block_size in bench.sizes.copies.block_sizes:
        with bench.rows.case(f"block{block_size}") as begin:
            begin()
            with open_traffic(bench, block_size) as traffic:
                _check(bench, traffic)
                _over_plain(bench, traffic)
                with bench.rows.case(f"block{block_size}_hidden") as begin_hidden:
                    begin_hidden()
                    _hidden(bench, traffic)
                with bench.rows.case(f"block{block_size}_decode") as begin_decode:
                    begin_decode()
                    _interference(bench, traffic)


def _check(bench: Bench, traffic: Traffic) -> None:
    """Copy once, both ways at once; what copies wrong bytes is not timed."""
    traffic.both()
    differing = traffic.differing()
    if differing:
        raise WrongError(f"{differing} of the copied blocks that were compared are not what they were copied from")
    bench.rows.check(f"block{traffic.layout.block_size}_right", True)


def _over_plain(bench: Bench, traffic: Traffic) -> None:
    rig, size, block_size = bench.rig, traffic.num_bytes, traffic.layout.block_size
    device, host = traffic.device, traffic.host
    down, up = (device[:size], host[:size]), (host[size : 2 * size], device[size : 2 * size])
    seconds = wall_seconds(
        rig,
        {
            "h2d": traffic.load,
            "plain_h2d": lambda: rig.copy_side_by_side(down),
            "d2h": traffic.store,
            "plain_d2h": lambda: rig.copy_side_by_side(up),
            "both": traffic.both,
            "plain_both": lambda: rig.copy_side_by_side(down, up),
        },
        bench.sizes.rounds,
    )
    for name, pieces in (
        ("h2d", f"layers of {traffic.piece_bytes >> 10} KiB"),
        ("d2h", f"blocks of {traffic.layout.block_bytes >> 10} KiB"),
        ("both", "both ways at once"),
    ):
        moved = size * (2 if name == "both" else 1)
        rates = [moved / seconds[way] / 1e9 for way in (name, f"plain_{name}")]
        note = f"{pieces}: {rates[0]:.1f} GB/s, plain {rates[1]:.1f}"
        bench.rows.add(f"block{block_size}_{name}", rates[0] / rates[1], least=0.9, note=note)


def wall_seconds(rig: Rig, works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of works that wait until they are done. They take turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            rig.synchronize()
            began = time.perf_counter()
            work()
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _hidden(bench: Bench, traffic: Traffic) -> None:
    """A forward pass that waits for each layer, with a load under way and without.

    What the host takes to enqueue the load is part of it: the forward pass begins after that.
    """
    rig, sizes, manager, enqueued = bench.rig, bench.sizes.copies, traffic.manager, []
    layer = prefill_step(rig, _heads(bench), sizes.layer_tokens, bench.sizes.block_size).on(rig)

    def load() -> None:
        manager.finish_loads()
        began = time.perf_counter()
        manager.load(traffic.loads)
        enqueued.append(time.perf_counter() - began)

    def load_alone() -> None:
        load()
        manager.wait_layer(traffic.layers - 1)

    seconds = bench.seconds({"layer": layer, "load": load_alone}, rounds=min(3, bench.sizes.rounds), ahead=False)
    repeats = max(1, math.ceil(COMPUTE_OVER_LOAD * seconds["load"] / traffic.layers / seconds["layer"]))
    repeats = min(repeats, bench.sizes.most_repeats)

    def forward() -> None:
        for index in range(traffic.layers):
            manager.wait_layer(index)
            for _ in range(repeats):
                layer()

    def load_and_forward() -> None:
        load()
        forward()

    seconds = bench.seconds({"load": load_alone, "forward": forward, "both": load_and_forward}, ahead=False)
    traffic.finish()
    shown = (seconds["both"] - seconds["forward"]) / seconds["load"]
    note = ", ".join(f"{name} {taken * 1e3:.2f} ms" for name, taken in seconds.items())
    note += f", of which the host takes {statistics.median(enqueued) * 1e3:.2f} ms to enqueue the load"
    bench.rows.add(f"block{traffic.layout.block_size}_hidden", 1 - shown, least=0.9, note=note)


def _interference(bench: Bench, traffic: Traffic) -> None:
    """The time of decode steps with loads and stores beside them, over that without."""
    rig, sizes, name = bench.rig, bench.sizes.copies, f"block{traffic.layout.block_size}_decode"
    batch, context = sizes.step
    step = decode_step(rig, _heads(bench), batch, context, bench.sizes.block_size).on(rig)
    taken = bench.seconds({"step": step}, rounds=min(3, bench.sizes.rounds))["step"]
    steps = min(max(1, int(DECODE_OVER_COPIES * _left_of_copies(rig, traffic) / taken)), bench.sizes.most_repeats * 16)

    def timed() -> tuple[object, object]:
        begin = rig.mark()
        for _ in range(steps):
            step()
        return begin, rig.mark()

    alone, beside, diluted = [], [], 0
    for _ in range(bench.sizes.rounds):
        rig.flush()
        marks = timed()
        rig.synchronize()
        alone.append(rig.seconds_between(*marks))
        traffic.start_both()
        rig.flush()
        marks = timed()
        rig.wait(marks[1])
        diluted += traffic.manager.drain(0.0)
        traffic.finish()
        beside.append(rig.seconds_between(*marks))
    rounds, ratio = bench.sizes.rounds, statistics.median(beside) / statistics.median(alone)
    note = f"{steps} steps of batch {batch} and context {context}; copies ended before them {diluted} times of {rounds}"
    if rig.pins and diluted > BESIDE * rounds:
        bench.rows.fail(name, f"{note}: {ratio:.3f} proves nothing")
        return
    bench.rows.add(name, ratio, most=1.1, note=note)


def _left_of_copies(rig: Rig, traffic: Traffic) -> float:
    """Seconds that loads and stores together go on after the host has enqueued them."""
    left = []
    for _ in range(3):
        rig.synchronize()
        traffic.start_both()
        began = time.perf_counter()
        traffic.finish()
        left.append(time.perf_counter() - began)
    return statistics.median(left)


def _heads(bench: Bench) -> Heads:
    model = bench.sizes.copies.model
    return Heads(model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"])
