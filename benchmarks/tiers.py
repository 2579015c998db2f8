"""What each tier of the cache saves, and what it costs the running batch.

    python benchmarks/tiers.py [--quick] [--storage DIRECTORY] [--mooncake HOST:PORT]

1. Time to first token of requests with a prefix of 4,000 tokens: cold; then with the prefix on the device, on the host
   alone, in storage alone. `host_over_cold` and `file_over_cold` are medians over several prefixes.
2. Layer by layer against load-then-compute: the same prefixes from the host, in turns. `waited_over_load` is the time
   that forward passes stood still for loads over the time the loads took.
3. A decoding batch while a prefix is loaded and another stored every second, in turns with a quiet one: `tpot_ratio`.
4. Conversations whose prefixes take four times the device's cache, in turns of one request: requests per second with
   the host tier, with the device alone, and without prefix caching.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from prompts import tokens
from smoke import lightly

from headwise.cache_controller.host_tier import HostTier
from headwise.kernels.select import make_block_copy
from headwise.runtime.client.local_engine import LocalEngine
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.protocol.request import GenerationResult, SamplingParams
from headwise.runtime.worker.device import COPY_THREADS
from headwise.runtime.worker.kv_offload import KVOffload, layer_ranges
from headwise.runtime.worker.worker import ModelWorker
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.transfer_manager import TransferManager


@dataclass(frozen=True)
class Size:
    """How much is measured.

    prefix_tokens: of each prefix
    own_tokens:    of each request behind its prefix
    prefixes:      of which the medians are taken
    turns_s:       seconds of a turn of decoding, with copies and without
    turns:         such turns, of either kind
    decoding:      sequences that decode, each with a prompt of ``decoding_tokens``
    most_tokens:   that each of them may generate: more than the turns last
    conversations: each has a prefix of ``history_tokens``, and asks ``questions`` times
                   for ``answer_tokens``
    device, host:  memory of these tiers, all of which an engine touches at its start
    """

    prefix_tokens: int = 4000
    own_tokens: int = 128
    prefixes: int = 5
    turns_s: float = 1.0
    turns: int = 20
    decoding: int = 8
    decoding_tokens: int = 512
    most_tokens: int = 4000
    conversations: int = 8
    history_tokens: int = 1024
    questions: int = 3
    answer_tokens: int = 16
    device: str = "1GiB"
    host: str = "2GiB"


FULL = Size()
QUICK = Size(
    prefix_tokens=64,
    own_tokens=16,
    prefixes=1,
    turns_s=0.1,
    turns=1,
    decoding=2,
    decoding_tokens=16,
    most_tokens=1000,
    conversations=4,
    history_tokens=32,
    questions=1,
    answer_tokens=4,
    device="64MiB",
    host="64MiB",
)
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def base_config(size: Size, **changes: Any) -> EngineConfig:
    tiers = {"kv_cache": size.device, "host_cache": size.host, "write_policy": "write_through"}
    config = EngineConfig(**{"model": "smollm2-135m", **tiers, **changes})
    return lightly(config) if size is QUICK else config


def serve(engine: LocalEngine, prompt: Sequence[int]) -> GenerationResult:
    """Serve one request; all copies are through when this returns."""
    return engine.generate([prompt], FIRST)[0]


def show(*cells: object) -> None:
    print("".join(f"{cell:>14.3f}" if isinstance(cell, float) else f"{cell:>14}" for cell in cells), flush=True)


# ---- 1. time to first token ----


def time_tiers(config: EngineConfig, name: str, size: Size, seed: int) -> dict[str, float]:
    """Seconds to the first token, medians over prefixes: cold, device, host, and ``name``, the storage."""
    rng = np.random.default_rng(seed)
    emptied: dict[str, list[str]] = {"cold": [], "device": [], "host": ["device"], name: ["device", "host"]}
    seconds: dict[str, list[float]] = {tier: [] for tier in emptied}
    with LocalEngine(config) as engine:
        block_size = engine.core.cache.block_size
        serve(engine, tokens(rng, min(600, size.prefix_tokens)))  # the kernels' first calls
        for _ in range(size.prefixes):
            prefix = tokens(rng, size.prefix_tokens)
            for tier, tiers in emptied.items():
                for emptied_tier in tiers:
                    engine.reset_cache(emptied_tier)
                result = serve(engine, prefix + tokens(rng, size.own_tokens))
                expected = 0 if tier == "cold" else size.prefix_tokens // block_size * block_size
                if result.usage.cached_tokens != expected:
                    raise SystemExit(f"{tier}: {result.usage.cached_tokens} of {expected} tokens came from the cache")
                seconds[tier].append(result.timings.ttft_s)
    return {tier: statistics.median(values) for tier, values in seconds.items()}


# ---- 2. layer by layer ----


def load_then_compute(engine: LocalEngine) -> AbstractContextManager[object]:
    """Let every layer wait for the last one's load: the first does, so nothing is computed before all is loaded."""
    copies, last = copies_of(engine._worker), engine.core.card.config.num_layers - 1
    wait_layer = copies.wait_layer
    return patch.object(copies, "wait_layer", lambda layer: wait_layer(last))


def copies_of(worker: ModelWorker) -> KVOffload:
    assert worker._copies is not None, "configured with a host cache"
    return worker._copies


def time_overlap(size: Size, seed: int) -> dict[str, float]:
    """Seconds of loading and of waiting for it, and to the first token, for both ways, medians over prefixes."""
    rng = np.random.default_rng(seed)
    rows: dict[str, list[tuple[float, float, float]]] = {"layers": [], "whole": []}
    with LocalEngine(base_config(size)) as engine:
        serve(engine, tokens(rng, min(600, size.prefix_tokens)))
        for _ in range(size.prefixes):
            prefix = tokens(rng, size.prefix_tokens)
            serve(engine, prefix)
            for way in rows:
                engine.reset_cache("device")
                before = engine.core.resources.copies.transfers.get("load")
                prompt = prefix + tokens(rng, size.own_tokens)
                if way == "whole":
                    with load_then_compute(engine):
                        result = serve(engine, prompt)
                else:
                    result = serve(engine, prompt)
                after = engine.core.resources.copies.transfers["load"]
                busy = after.busy_s - (before.busy_s if before else 0.0)
                waited = after.waited_s - (before.waited_s if before else 0.0)
                rows[way].append((busy, waited, result.timings.ttft_s))
    medians = {way: [statistics.median(column) for column in zip(*row, strict=True)] for way, row in rows.items()}
    return {f"{way}_{name}": value for way, row in medians.items() for name, value in zip(COLUMNS, row, strict=True)}


COLUMNS = ("load_s", "waited_s", "ttft_s")


# ---- 3. a batch that decodes meanwhile ----


def time_decoding(size: Size, seed: int) -> dict[str, float]:
    """Seconds of a decode step of some sequences, quiet and beside loads and stores, in turns.

    The copies are those of a second transfer manager, so that no request of their own takes part in the steps.
    """
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=size.most_tokens, ignore_eos=True)
    with LocalEngine(base_config(size)) as engine:
        core, worker = engine.core, engine._worker
        for _ in range(size.decoding):
            core.add(engine.preprocessor.prepare(prompt=tokens(rng, size.decoding_tokens), sampling=sampling))
        while min(len(sequence.output) for sequence in core._live.values()) < 2:
            core.step(None)
        blocks = size.prefix_tokens // core.cache.block_size
        assert isinstance(core.cache.host, HostTier), "configured with a host cache"
        device, host = core.cache.pool.allocate(2 * blocks), core.cache.host.pool.allocate(2 * blocks)
        loads = np.stack([np.zeros(blocks, np.int32), host[:blocks], device[:blocks]], axis=1)
        stores = np.stack([device[blocks:], host[blocks:]], axis=1)
        copies = second_manager(worker)
        steps: dict[str, list[float]] = {"quiet": [], "busy": []}
        for way in ["quiet", "busy"] * size.turns:
            began = time.perf_counter()
            if way == "busy":
                copies.load(loads)
                copies.store(stores)
            count = 0
            while time.perf_counter() - began < size.turns_s:
                core.step(None)
                count += 1
            steps[way].append((time.perf_counter() - began) / count)
            copies.finish_loads()
            copies.finished_stores()
        for request_id in list(core._live):
            core.abort(request_id)
        copies.close()
        worst = max(copies.load_stats().busy_s, copies.store_stats().busy_s) / len(steps["busy"])
    ratios = [busy / quiet for quiet, busy in zip(steps["quiet"], steps["busy"], strict=True)]
    return {
        "quiet_s": statistics.median(steps["quiet"]),
        "busy_s": statistics.median(steps["busy"]),
        "copying_s": worst,
        "ratio": statistics.median(ratios),
    }


def second_manager(worker: ModelWorker) -> TransferManager:
    card, copies = worker.card, copies_of(worker)
    return TransferManager(
        card.layout,
        layer_ranges(card.plan, card.layouts, 0),
        worker.served.runner.cache.arena,
        copies._arena.array,
        copy=make_block_copy("auto", COPY_THREADS),
        input_stream=CpuStream("load"),
        output_stream=CpuStream("store"),
    )


# ---- 4. more prefixes than the device holds ----


def time_conversations(size: Size, seed: int) -> dict[str, float]:
    """Requests per second with each cache, which take turns by request; the working set is four times the device's."""
    rng = np.random.default_rng(seed)
    sessions, card = size.conversations, Preprocessor.open(base_config(size)).card
    columns = -(-(size.history_tokens + size.own_tokens + size.answer_tokens) // card.layout.block_size)
    device = f"{-(-sessions * columns // 4) * len(card.plan.groups) * card.layout.block_bytes}B"
    ways = {
        "host": base_config(size, kv_cache=device),
        "device": base_config(size, kv_cache=device, host_cache="0"),
        "none": base_config(size, kv_cache=device, host_cache="0", prefix_caching=False),
    }
    prefixes = [tokens(rng, size.history_tokens) for _ in range(sessions)]
    order = [
        session for _ in range(size.questions) for session in random.Random(seed).sample(range(sessions), sessions)
    ]
    spent, sampling = dict.fromkeys(ways, 0.0), replace(FIRST, max_tokens=size.answer_tokens)
    with ExitStack() as stack:
        engines = {way: stack.enter_context(LocalEngine(config)) for way, config in ways.items()}
        for engine in engines.values():
            for prefix in prefixes:
                serve(engine, prefix)
        for session in order:
            prompt = prefixes[session] + tokens(rng, size.own_tokens)
            for way, engine in engines.items():
                began = time.perf_counter()
                engine.generate([prompt], sampling)
                spent[way] += time.perf_counter() - began
    return {way: len(order) / seconds for way, seconds in spent.items()}


# ---- all ----


def show_ttft(title: str, seconds: dict[str, float], size: Size) -> dict[str, float]:
    print(
        f"\n{title}: seconds to the first token, prefix of {size.prefix_tokens} tokens and {size.own_tokens} of its own"
    )
    show("", *seconds)
    show("seconds", *seconds.values())
    ratios = {tier: value / seconds["cold"] for tier, value in seconds.items()}
    show("over cold", *ratios.values())
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, help="directory for the file storage; default: a temporary one")
    parser.add_argument("--mooncake", help="HOST:PORT of a mooncake_master, to measure that storage, too")
    parser.add_argument("--quick", action="store_true", help="short prefixes, and one of each: seconds")
    args = parser.parse_args(arguments)
    size, result = QUICK if args.quick else FULL, dict[str, float]()
    with tempfile.TemporaryDirectory(dir=args.storage) as directory:
        storages: dict[str, str] = {"file": f"file://{directory}?capacity=8GiB"}
        if args.mooncake:
            storages["mooncake"] = f"mooncake://{args.mooncake}?segment=4GiB"
        for name, url in storages.items():
            seconds = time_tiers(base_config(size, storage=url), name, size, seed=1)
            ratios = show_ttft(name, seconds, size)
            found = {f"{tier}_over_cold": ratio for tier, ratio in ratios.items() if tier != "cold"}
            result = {"cold_s": seconds["cold"], **found, **result}

    overlap = time_overlap(size, seed=2)
    print("\nthe same prefixes from the host: layer by layer, and load-then-compute")
    show("", *COLUMNS)
    for way in ("layers", "whole"):
        show(way, *(overlap[f"{way}_{name}"] for name in COLUMNS))
    result["waited_over_load"] = overlap["layers_waited_s"] / overlap["layers_load_s"]

    decoding = time_decoding(size, seed=3)
    print(f"\n{size.decoding} sequences decode; every other turn a prefix is loaded and one is stored")
    show("", "quiet, s", "busy, s", "copying, s", "ratio")
    show("step", *decoding.values())
    result["tpot_ratio"] = decoding["ratio"]

    rates = time_conversations(size, seed=4)
    print("\nconversations that take four times the device's cache: requests per second")
    show("", *rates)
    show("rate", *rates.values())
    result |= {
        "host_over_device_rate": rates["host"] / rates["device"],
        "host_over_none_rate": rates["host"] / rates["none"],
    }
    print(json.dumps({**result, "prefix_tokens": size.prefix_tokens, "cores": len(os.sched_getaffinity(0))}))


if __name__ == "__main__":
    main()
