"""How near headwise comes to what this machine's CPU can do: memory for decode, matrix products for prefill.

    python benchmarks/roofline.py [--quick] [--model gemma3-270m] [--dtype bfloat16] [--rounds 5]

`decode_fraction` is the bytes that a decode step of one sequence has to read, over the time of a step, over the rate at
which all cores read memory (the sum of a large float32 array). Those bytes are what `headwise info` says: the matrices
of the layers and the LM head as they are kept in `weights_dtype`, and the keys and values of the visible context.

`prefill_fraction` is the FLOP/s until the first token of a prompt, over the best rate of a matrix product of any size
and implementation that is measured here. With T tokens, P weights in the layers' matrices, and heads of size D:

    2 P T  +  2 vocabulary hidden  +  sum over layers and query heads of 4 D (keys that each of T tokens sees, summed)

A demo model's are measured once more from the blocks of its GGUF file (`gguf` in the JSON), where nothing is asked of
the engine's configuration.

The engine runs in a process of its own, which stands still while the machine is measured; all of it round by round, and
memory before and after the decode. The last line is JSON, with medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from runtimes.control import Process, tell, warm_up
from runtimes.ours import add_engine_options, engine_fields, headwise_spec
from runtimes.scenarios import Scenario, decode_rate, prefill_rate

from headwise.cache_controller.policy import HeadPolicy
from headwise.kernels.cpu.matmul import matmul, pack_float
from headwise.runtime.cli.terminal import progress
from headwise.runtime.config.decode_reads import cache_reads, decode_reads
from headwise.runtime.config.device import resolve_device
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card
from headwise.runtime.loader.aliases import ALIASES
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.resolve import resolve_model

SETTLE_S = 0.2
"""Idle threads of a BLAS look for work for so long before they sleep."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    array_mib: of the array that is summed
    side:      of the largest matrices that are multiplied
    repeats:   of each of these, a round
    context:   tokens before the decode steps
    kv_cache:  all of which an engine touches at its start
    """

    rounds: int = 5
    array_mib: int = 512
    side: int = 2048
    repeats: int = 5
    context: int = 256
    steps: int = 128
    prompt: int = 1800
    kv_cache: str = "1GiB"


FULL = Size()
QUICK = Size(rounds=2, steps=64)
SMOKE = Size(rounds=1, array_mib=16, side=128, repeats=1, context=16, steps=4, prompt=32, kv_cache="128MiB")


# ---- the machine ----


@numba.njit(parallel=True, fastmath=True, nogil=True)
def parallel_sum(parts: NDArray[np.float32]) -> float:
    """The sum of ``[parts, n]``, a part a thread at a time."""
    total = 0.0
    for part in numba.prange(len(parts)):
        share = np.float32(0)
        for index in range(parts.shape[1]):
            share += parts[part, index]
        total += float(share)
    return total


def seconds_of(call: Callable[[], object], repeats: int) -> list[float]:
    """Of a warm call."""
    call()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


@cache
def array_to_read(mib: int) -> NDArray[np.float32]:
    return np.ones((64, mib * 2**20 // (64 * 4)), np.float32)


def read_rate(size: Size) -> float:
    """Bytes a second that all cores read from memory, the median of several times."""
    array = array_to_read(size.array_mib)
    return array.nbytes / statistics.median(seconds_of(lambda: parallel_sum(array), size.repeats))


def best_gemm_rate(hidden: int, intermediate: int, size: Size) -> float:
    """FLOP/s of the fastest matrix product: the highest rate of all implementations and sizes."""
    shapes = [(size.side, size.side, size.side), (512, hidden, 2 * intermediate), (512, intermediate, hidden)]
    return max(rate for m, k, n in shapes for rate in _gemm_rates(m, k, n, size.repeats))


def _gemm_rates(m: int, k: int, n: int, repeats: int) -> Iterator[float]:
    """FLOP/s of each implementation for ``[m, k] @ [k, n]``: NumPy's in float32, our own in bfloat16."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    out = np.empty((m, n), np.float32)
    yield 2 * m * k * n / min(seconds_of(lambda: np.matmul(a, b, out=out), repeats))
    weight, threads = pack_float(np.ascontiguousarray(b.T), "bfloat16"), len(os.sched_getaffinity(0))
    yield 2 * m * k * n / min(seconds_of(lambda: matmul(a, weight, threads, out=out), repeats))


# ---- the model ----


@dataclass(frozen=True)
class Work:
    """What a forward pass takes.

    matrices:     weights in the layers' matrices
    weight_bytes: that a decode step reads
    """

    card: ModelCard
    matrices: int
    weight_bytes: int

    @classmethod
    def of(cls, config: EngineConfig, directory: Path) -> Work:
        card = read_model_card(config, directory, identify=False)
        if card.config.moe is not None:
            raise SystemExit(f"{card.model} is a mixture of experts: which weights take part depends on the tokens")
        weights = Checkpoint(directory)
        shapes = [weights.shape(name) for name in weights.names if ".layers." in name]
        matrices = sum(prod(shape) for shape in shapes if len(shape) == 2)
        return cls(card, matrices, decode_reads(config, card, directory).weights)

    def decode_bytes(self, context: int) -> int:
        """Read by a step of one sequence with ``context`` tokens."""
        return self.weight_bytes + cache_reads(self.card, context)

    def prefill_flops(self, tokens: int) -> float:
        """Of a prompt, and its first token."""
        config = self.card.config
        share = config.num_heads // config.num_kv_heads
        pairs = sum(
            np.minimum(np.arange(1, tokens + 1), _reach(policy, tokens)).sum()
            for layer in config.policies
            for policy in layer
        )
        head = 2 * config.vocab_size * config.hidden_size
        return float(2 * self.matrices * tokens + head + 4 * config.head_dim * share * pairs)


def _reach(policy: HeadPolicy, everything: float) -> float:
    """Most tokens that a query sees."""
    return everything if policy.is_full else policy.window + policy.sink


# ---- rounds ----


@dataclass(frozen=True)
class Round:
    """Rates of one round: bytes and FLOP a second, tokens a second."""

    read: float
    gemm: float
    decode: float
    prefill: float


def measure(process: Process, work: Work, size: Size) -> list[Round]:
    decode = Scenario("decode", "decode", 1, size.context, size.steps, decode_rate)
    prefill = Scenario("prefill", "prefill", 1, size.prompt, 1, prefill_rate)
    warm_up(process, [decode, prefill])
    config, found = work.card.config, []
    for number in range(size.rounds):
        gemm, before = best_gemm_rate(config.hidden_size, config.intermediate_size, size), read_rate(size)
        time.sleep(SETTLE_S)
        decoded = process.measure(decode, number)[0]
        # Before and after: what other machines of the same memory leave of it changes from second to second.
        read = (before + read_rate(size)) / 2
        rates = decoded, process.measure(prefill, number)[0]
        found.append(Round(read, gemm, *rates))
        tell(
            f"round {number + 1} of {size.rounds}: memory {read / 1e9:.1f} GB/s, matrix products {gemm / 1e9:.0f} "
            f"GFLOP/s, decode {rates[0]:.1f} tok/s, prefill {rates[1]:.0f} tok/s"
        )
    return found


def report(rounds: Sequence[Round], work: Work, size: Size) -> dict[str, Any]:
    bytes_ = work.decode_bytes(size.context + size.steps // 2)
    flops = work.prefill_flops(size.prompt) / size.prompt
    return {
        "decode_fraction": statistics.median(bytes_ * one.decode / one.read for one in rounds),
        "prefill_fraction": statistics.median(flops * one.prefill / one.gemm for one in rounds),
        "read_gb_s": statistics.median(one.read for one in rounds) / 1e9,
        "gemm_gflop_s": statistics.median(one.gemm for one in rounds) / 1e9,
        "decode_tok_s": statistics.median(one.decode for one in rounds),
        "prefill_tok_s": statistics.median(one.prefill for one in rounds),
        "decode_mb": bytes_ / 1e6,
        "prefill_mflop_a_token": flops / 1e6,
    }


def show(found: dict[str, Any], size: Size) -> None:
    print(f"\n{'':>28} {'tokens/s':>10} {'each takes':>14} {'rate':>14} {'the machine':>14} {'fraction':>9}")
    for what, rate, each, unit, limit, share in (
        (f"decode at {size.context} tokens", "decode_tok_s", "decode_mb", "GB", "read_gb_s", "decode_fraction"),
        (
            f"prefill of {size.prompt:,} tokens", "prefill_tok_s", "prefill_mflop_a_token", "GFLOP", "gemm_gflop_s",
            "prefill_fraction",
        ),
    ):  # fmt: skip
        cells = f"{found[each]:.0f} M{unit[1:]}", f"{found[rate] * found[each] / 1e3:.1f} {unit}/s"
        print(
            f"{what:>28} {found[rate]:>10.1f} {cells[0]:>14} {cells[1]:>14} {found[limit]:>8.1f} {unit}/s "
            f"{found[share]:>9.2f}"
        )
    print()


def measured(fields: dict[str, Any], size: Size) -> dict[str, Any]:
    """Figures of an engine with these fields of its configuration, shown as a table, too."""
    config = resolve_device(EngineConfig.from_dict(fields), 0)
    with progress() as bar:
        directory = resolve_model(config.model, config.cache_path, bar)
    work = Work.of(config, directory)
    tell("loading headwise")
    with Process("headwise", headwise_spec(**fields)) as process:
        tell(f"loaded: {process.about['chosen']}")
        found = report(measure(process, work, size), work, size)
    show(found, size)
    return {**found, "dtype": config.dtype_name, "weights_dtype": config.weights_dtype_name}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int)
    add_engine_options(parser)
    parser.add_argument("--quick", action="store_true", help="two rounds: a minute")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: seconds, figures of no worth")
    args = parser.parse_args(arguments)
    size = SMOKE if args.smoke else QUICK if args.quick else FULL
    size = Size(**{**vars(size), **({"rounds": args.rounds} if args.rounds else {})})
    fields = {"model": args.model, "max_model_len": 2048, "kv_cache": size.kv_cache, **engine_fields(args)}
    found = measured(fields, size)
    if args.model in ALIASES and not args.engine:
        found["gguf"] = measured({**fields, "weights_dtype": "gguf"}, size)
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({**found, "model": args.model, "rounds": size.rounds, "cores": cores}))


if __name__ == "__main__":
    main()
