"""Whole models on CuPy: the sections model and smollm2 of `gpu_checks.py`."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from gpu.bench import Bench
from gpu.checkpoint import LLAMA, MOE, kv_token_bytes, random_models, weight_bytes, write_checkpoint
from gpu.engine import Serving, engine_config, greedy, random_prompts, sampled, serving, tokens_until_all_decode
from gpu.sizes import FULL

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.kernels.cuda.likeliest import THREADS, CudaLikeliest
from headwise.kernels.cuda.sampling import SCRATCH_BYTES, CudaSampling, rows_of, thresholds_of
from headwise.runtime.client import local_engine
from headwise.runtime.client.local_engine import LocalEngine
from headwise.runtime.client.worker_process import WorkerProcess, has_channel
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.protocol.request import SamplingParams

BATCHED_TOKENS = 8192
"""Token budget of a step: prompts are computed in few."""

MOST_DRAW_US = 60.0
"""For 64 rows of 128k scores with top-k, top-p or both."""


GRAPHS, OVERLAP, EAGER = "graphs", "overlap", "eager"
WAYS: dict[str, dict[str, Any]] = {GRAPHS: {}, OVERLAP: {"overlap_kernels": True}, EAGER: {"cuda_graphs": False}}
"""How steps of one model are run, and what an engine is told for it."""

MOST_HOST_US = 100.0
"""Of the worker's thread for a decode step, calls into CuPy and the driver included."""


def model(bench: Bench) -> None:
    """Steps of a random Llama-3.2-1B, by CUDA graphs, by these with kernels that overlap, and without: decode against
    its memory traffic, and prefill."""
    sizes, rig = bench.sizes, bench.rig
    config = random_models(sizes, bench.options.layers)[LLAMA]
    directory = write_checkpoint(rig.work / LLAMA, config)
    longest = sizes.decode_context + _output_tokens(bench, max(sizes.decode_batches)) + sizes.block_size
    host_batches, _ = sizes.host_at
    shared = {
        "block_size": sizes.block_size,
        "max_num_seqs": max(*sizes.decode_batches, *host_batches),
        "max_batched_tokens": BATCHED_TOKENS,
        "max_model_len": longest,
        "kv_cache": str(max(sizes.decode_batches) * (longest + 2 * sizes.block_size) * kv_token_bytes(config)),
    }
    bandwidth, tokens = bench.bandwidth, {}
    for name, fields in WAYS.items():
        with bench.rows.case(name) as begin:
            begin()
            began = time.perf_counter()
            with serving(rig, engine_config(rig, directory, **shared, **fields)) as opened:
                bench.rows.add(f"{name}_start", time.perf_counter() - began, "s", note="until the engine is ready")
                tokens[name] = [
                    _decode(bench, opened, config, name, batch, bandwidth) for batch in sizes.decode_batches
                ]
                if name != OVERLAP:
                    _prefill(bench, opened, config, name)
                if name == GRAPHS:
                    _decode(bench, opened, config, "sampled", max(sizes.decode_batches), bandwidth, sampled)
                    for batch in host_batches:
                        _host(bench, opened, config, batch)
                captured = opened.captured_graphs
                bench.rows.check(f"{name}_recorded", (name != EAGER) == (captured > 0), f"{captured} graphs")
    for name in (GRAPHS, OVERLAP):
        if {name, EAGER} <= tokens.keys():
            _same_tokens(bench, name, tokens[name], tokens[EAGER])
    with bench.rows.case("draw") as begin:
        begin()
        _sampling(bench, max(sizes.decode_batches), config["vocab_size"])


def _same_tokens(bench: Bench, name: str, found: Sequence[Any], expected: Sequence[Any]) -> None:
    pairs = [pair for both in zip(found, expected, strict=True) for pair in zip(*both, strict=True)]
    same = sum(one == other for one, other in pairs) / len(pairs)
    bench.rows.add(f"{name}_same_tokens", same, note="sequences; random weights leave many tokens nearly equal")


def moe(bench: Bench) -> None:
    """Decode steps of ERNIE-4.5-21B-A3B's geometry, in a few layers, against the weights that a step asks for."""
    sizes, rig = bench.sizes, bench.rig
    config = random_models(sizes, None)[MOE]
    directory = write_checkpoint(rig.work / MOE, config)
    longest = sizes.decode_context + _output_tokens(bench, max(sizes.decode_batches)) + sizes.block_size
    with serving(
        rig,
        engine_config(
            rig, directory, block_size=sizes.block_size, max_num_seqs=max(sizes.decode_batches),
            max_batched_tokens=BATCHED_TOKENS, max_model_len=longest,
            kv_cache=str(max(sizes.decode_batches) * (longest + 2 * sizes.block_size) * kv_token_bytes(config)),
        ),
    ) as opened:  # fmt: skip
        for batch in sizes.decode_batches:
            with bench.rows.case(f"b{batch}") as begin:
                begin()
                _decode(bench, opened, config, "step", batch, bench.bandwidth)
        bench.rows.check("recorded", opened.captured_graphs > 0, f"{opened.captured_graphs} graphs")


def _sampling(bench: Bench, rows: int, vocab: int) -> None:
    """Time of choosing a token for each of ``rows`` of scores: greedy, drawn, and by top-k, top-p and both."""
    rng = np.random.default_rng(bench.rig.seed)
    device = bench.rig.device(EngineConfig(device="cuda", cache_dir=str(bench.rig.work)))
    ops, columns = device.ops, np.ones(rows)
    ways = {"plain": (0, 1.0), "top_k": (50, 1.0), "top_p": (0, 0.9), "top_k_top_p": (50, 0.9)}
    threads = THREADS if bench.sizes.long else 64
    with device.current():
        dtype, scratch = numpy_dtype("bfloat16"), ops.upload(np.zeros(SCRATCH_BYTES // 4, np.int32))
        kernels = CudaSampling(bench.rig.programs, dtype, scratch, threads)
        likeliest = CudaLikeliest(
            bench.rig.programs, dtype, lambda count: ops.upload(np.zeros(count, np.uint8)), threads
        )
        scores = ops.tensor(3 * rng.standard_normal((rows, vocab), dtype=np.float32))
        chosen = ops.empty_bytes(8 * rows).view(np.int32)
        tokens, best = chosen[:rows], chosen[rows:].view(np.float32)

        def draw(top_k: int, top_p: float) -> Callable[[], object]:
            seeds, places = np.arange(rows, dtype=np.uint64), np.arange(rows)
            told = rows_of(0.8 * columns, np.full(rows, top_k, np.int32), top_p * columns, 0 * columns, seeds, places)
            table, thresholds = ops.upload(told.view(np.uint8)), thresholds_of(told)
            return lambda: kernels.draw(scores, table, thresholds, 0.0, tokens, best)

        works: dict[str, Callable[[], object]] = {name: draw(*values) for name, values in ways.items()}
        works["greedy"] = lambda: likeliest(scores, tokens, best)
        for name, seconds in bench.seconds(works).items():
            most = MOST_DRAW_US if bench.sizes.long and name.startswith("top") else None
            note = f"{rows} rows of {vocab} bfloat16 scores"
            bench.rows.add(f"draw_{name}", seconds * 1e6, "us", most=most, note=note)


def _output_tokens(bench: Bench, batch: int) -> int:
    before = tokens_until_all_decode(batch, bench.sizes.decode_context, BATCHED_TOKENS)
    return before + bench.sizes.warm_steps + bench.sizes.decode_steps


def _decode(
    bench: Bench,
    opened: Serving,
    config: Mapping[str, Any],
    name: str,
    batch: int,
    bandwidth: float,
    params: Callable[[int], SamplingParams] = greedy,
) -> list[list[int]]:
    """Time decode steps of ``batch`` sequences; their tokens."""
    sizes = bench.sizes
    prompts = random_prompts(batch, sizes.decode_context, config["vocab_size"], seed=batch)
    ids = opened.submit(prompts, _output_tokens(bench, batch), params)
    opened.until_first_tokens(ids)
    opened.decode_steps(sizes.warm_steps, batch)
    seconds = opened.decode_steps(sizes.decode_steps, batch)
    opened.finish()
    context = sizes.decode_context + sizes.warm_steps + sizes.decode_steps // 2
    traffic = weight_bytes(config, batch) + batch * context * kv_token_bytes(config)
    note = f"{seconds * 1e3:.2f} ms a step, {traffic / 1e9:.2f} GB, {batch / seconds:.0f} tokens/s"
    bench.rows.add(f"{name}_b{batch}_of_bandwidth", traffic / bandwidth / seconds, note=note)
    return [opened.tokens[request] for request in ids]


def _host(bench: Bench, opened: Serving, config: Mapping[str, Any], batch: int) -> None:
    """Time of the worker's Python for a decode step of ``batch`` sequences."""
    sizes, (_, context) = bench.sizes, bench.sizes.host_at
    count = tokens_until_all_decode(batch, context, BATCHED_TOKENS) + sizes.warm_steps + sizes.decode_steps
    ids = opened.submit(random_prompts(batch, context, config["vocab_size"], seed=batch), count)
    opened.until_first_tokens(ids)
    opened.decode_steps(sizes.warm_steps, batch)
    seconds = opened.host_seconds(sizes.decode_steps, batch)
    opened.finish()
    most = MOST_HOST_US if sizes.long else None
    in_all = seconds.pop("all")
    note = ", ".join(f"{name} {part * 1e6:.0f}" for name, part in seconds.items())
    bench.rows.add(f"host_b{batch}", in_all * 1e6, "us", most=most, note=f"of the worker's thread a step; {note}")


def _prefill(bench: Bench, opened: Serving, config: Mapping[str, Any], name: str) -> None:
    """Time of prompts, each alone."""
    for tokens in bench.sizes.prefills:
        times = []
        for prompt in random_prompts(bench.sizes.rounds, tokens, config["vocab_size"], seed=tokens):
            times.append(opened.until_first_tokens(opened.submit([prompt], 1)))
            opened.finish()
        note = f"until the first token, the best of {len(times)}"
        bench.rows.add(f"{name}_prefill_{tokens}", min(times) * 1e3, "ms", note=note)


# ---- real weights ----

TEXTS = (
    "The lighthouse keeper climbed the stairs one last time and",
    "In physics, the second law of thermodynamics says that",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Dear Maria, thank you for the letter you sent in June. I was",
)
CLOSE = 1e-3
"""Two tokens whose log-probabilities differ by less may change places with the order of a sum."""


def expected_tokens(directory: Path, cache_dir: Path, size: tuple[int, int], **fields: Any) -> dict[str, Any]:
    """Greedy tokens of `TEXTS` on the CPU in float32: prompts, tokens, and by how much each was the best."""
    prompts, count = size
    config = EngineConfig.from_dict(
        {"model": str(directory), "device": "cpu", "cache_dir": str(cache_dir), "prefix_caching": False, **fields}
    )
    with LocalEngine(config) as engine:
        ids = [engine.preprocessor.tokenizer.encode(text) for text in TEXTS[:prompts]]
        results = engine.generate(ids, replace(greedy(count), logprobs=2))
    margins = [[_margin(entry.top) for entry in result.logprobs] for result in results]
    tokens = [list(result.token_ids) for result in results]
    return {"sha256": sha256_of(directory), "prompts": ids, "tokens": tokens, "margins": margins}


def sha256_of(model: Path) -> str:
    """Of a GGUF file; empty for a directory."""
    return hashlib.sha256(model.read_bytes()).hexdigest() if model.is_file() else ""


def _margin(top: Sequence[tuple[int, float]]) -> float:
    best = sorted((value for _, value in top), reverse=True)
    return float(best[0] - best[1])


def make_expected(options: argparse.Namespace) -> int:
    """`--make-expected`: write the file that `--expect` reads."""
    if options.smollm2 is None:
        raise SystemExit("--make-expected needs --smollm2, the directory of the model")
    expected = expected_tokens(options.smollm2, Path(EngineConfig().cache_dir), FULL.greedy)
    options.make_expected.write_text(json.dumps(expected))
    print(
        f"{sum(map(len, expected['tokens']))} tokens of {len(expected['prompts'])} prompts in {options.make_expected}"
    )
    return 0


def smollm2(bench: Bench) -> None:
    """The same greedy tokens as on the CPU, from a worker in this process and from one in its own."""
    options, rows, rig = bench.options, bench.rows, bench.rig
    if options.smollm2 is None:
        rows.skip("same_tokens", "give --smollm2, a directory with the converted model")
        return
    if options.expect is not None:
        expected = json.loads(options.expect.read_text())
        check_file(options.smollm2, expected["sha256"])
    else:
        expected = expected_tokens(
            options.smollm2, rig.work, bench.sizes.greedy, tensor_ops="numpy", kernels="reference",
            block_size=bench.sizes.block_size, cpu_threads=0 if bench.sizes.long else 1,
        )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        with rows.case(f"tokens_{dtype}") as begin:
            begin()
            with serving(rig, _smollm2_config(bench, dtype)) as opened:
                margin = _tell_tokens(bench, f"tokens_{dtype}", opened.engine, expected)
            if dtype == "float32":
                rows.check("same_tokens", margin < CLOSE, "but where two were as good as equal" if margin else "")
    _of_a_process(bench, expected)


def _smollm2_config(bench: Bench, dtype: str) -> EngineConfig:
    fields = {"dtype": dtype, "block_size": bench.sizes.block_size, "kv_cache": "64MiB"}
    return engine_config(bench.rig, bench.options.smollm2.resolve(), **fields)


def _of_a_process(bench: Bench, expected: Mapping[str, Any]) -> None:
    """The same from a worker in a process of its own, as engines on a GPU have it."""
    rows, name = bench.rows, "tokens_of_a_process"
    if not has_channel():
        rows.skip(name, "pyzmq is not installed, by which steps reach a worker's process")
        return
    with rows.case(name) as begin:
        begin()
        config, opening = _smollm2_config(bench, "float32"), partial(WorkerProcess, open_device=bench.rig.open_device)
        with patch.object(local_engine, "WorkerProcess", opening), LocalEngine(config, worker_process=True) as engine:
            margin = _tell_tokens(bench, name, engine, expected)
        rows.check("same_tokens_of_a_process", margin < CLOSE)


def _tell_tokens(bench: Bench, name: str, engine: LocalEngine, expected: Mapping[str, Any]) -> float:
    """How many tokens of an engine are those expected; the widest margin where one is not, see `compare_tokens`."""
    count = len(expected["tokens"][0])
    found = [list(result.token_ids) for result in engine.generate(expected["prompts"], greedy(count))]
    equal, margin = compare_tokens(found, expected)
    note = f"of {count * len(found)} tokens up to the first that differs; widest margin there {margin:.1e}"
    bench.rows.add(name, equal, note=note)
    return margin


def check_file(model: Path, expected: str) -> None:
    """Whether a GGUF file is the one that tokens were made with: it may have travelled in pieces.

    Raises:
        ValueError: it is not.
    """
    found = sha256_of(model)
    if found and expected and found != expected:
        raise ValueError(
            f"{model} of {model.stat().st_size} bytes has SHA-256 {found[:16]}..., the tokens were made with "
            f"{expected[:16]}...: is a piece missing?"
        )


def compare_tokens(found: Sequence[Sequence[int]], expected: Mapping[str, Any]) -> tuple[int, float]:
    """Equal tokens before the first that differs, over all prompts; and the widest margin of those expected there."""
    equal, widest = 0, 0.0
    for tokens, wanted, margins in zip(found, expected["tokens"], expected["margins"], strict=True):
        at = next((i for i, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]), len(wanted))
        equal += at
        if at < len(wanted):
            widest = max(widest, margins[at])
    return equal, widest
