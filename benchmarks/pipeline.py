"""Two stages of a pipeline (`pipeline_parallel_size: 2`), against one rank, two tensor-parallel ranks, and vLLM's.

    python benchmarks/pipeline.py [--quick | --smoke] [--rounds 3] [--ray HOST:PORT]

Each rank has one thread, and ours have the same memory for the cache. The same requests go to all, of a model of random
weights in Llama's architecture, in bfloat16. In each round all are started, in turn; vLLM, of two stages and of one,
is left out where it is not installed (`make peers`):

fit      tokens that the cache holds
prefill  tokens a second of a prompt, which is computed in chunks
decode   tokens a second of decodes, by how many requests are decoded at once

``over_one``, ``over_tensors`` and ``over_vllm`` are ratios of our stages to one rank, to two tensor-parallel ones and
to vLLM's stages, and ``vllm_over_one`` those of vLLM's to its one rank: medians over the rounds. ``same_first`` is the
share of requests that got the same first token from all of ours. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gpu.checkpoint import write_checkpoint
from peers import PEERS_PYTHON, peers
from runtimes.control import Process, Spec
from runtimes.model_files import ModelFiles
from runtimes.process import Served
from runtimes.scenarios import prefill_rate
from smoke import asked
from timed_requests import VOCABULARY, ask, decode, ids, prefill

from headwise import EngineConfig
from headwise.runtime.config.model_card import read_model_card

ONE, TENSORS, STAGES = "one rank", "two TP ranks", "two stages"
VLLM_ONE, VLLM_STAGES = "vLLM, one", "vLLM, stages"
RANKS = {ONE: (1, 1), TENSORS: (2, 1), STAGES: (1, 2)}
"""`tp_size` and `pipeline_parallel_size` of each of ours."""
VLLM = {VLLM_ONE: 1, VLLM_STAGES: 2}
CHUNK = 1024
"""Tokens of a step; where there are stages, a prompt has half of it in one, as it has in ours."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    prompt:  tokens of the prompt that is timed
    decoded: requests that are decoded at once, of ``context`` tokens each, and ``answer`` more
    """

    layers: int = 16
    hidden: int = 1024
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    kv_cache: str = "256MiB"
    prompt: int = 6000
    decoded: tuple[int, ...] = (1, 4, 16)
    context: int = 400
    answer: int = 64


FULL = Size()
QUICK = replace(FULL, prompt=2000, answer=16)
SMOKE = Size(2, 64, "float32", "4MiB", prompt=300, decoded=(1, 4), context=60, answer=8)


@dataclass
class Seen:
    """Of one deployment: tokens that fit, tokens a second, and what was said, in our own."""

    fit: int = 0
    prefill: float = 0.0
    decode: dict[int, float] = field(default_factory=dict)
    said: list[list[int]] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer tokens, one round: a minute")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one round, two of ours alone: seconds")
    parser.add_argument("--ray", help="address of a running Ray cluster; by default one is started")
    args = parser.parse_args(arguments)
    size = SMOKE if args.smoke else QUICK if args.quick else FULL
    rounds = 1 if args.smoke or args.quick else args.rounds
    names = [ONE, STAGES] if args.smoke else [*RANKS, *(VLLM if PEERS_PYTHON.exists() else ())]
    print(f"{'':>12} {'tokens fit':>10} {'prefill':>8} {'decode of ' + str(size.decoded):>24}")
    found: list[dict[str, Seen]] = []
    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory) / "llama", config_of(size))
        for turn in range(rounds):
            found.append({})
            for name in names[:: -1 if turn % 2 else 1]:
                here = args.smoke and name == ONE  # nothing is said about its speed
                ours = name in RANKS
                seen = measured(model, size, name, args.ray, here) if ours else measured_vllm(model, size, name)
                found[-1][name] = seen
                speeds = ", ".join(f"{speed:.1f}" for speed in seen.decode.values())
                print(f"{name:>12} {seen.fit:>10,} {seen.prefill:>8.0f} {speeds:>24}", flush=True)
    print(json.dumps({"rounds": rounds, **ratios(found)}))


def ratios(found: Sequence[dict[str, Seen]]) -> dict[str, Any]:
    """Medians over the rounds, of stages over others."""

    def over(stages: str, other: str, of: Callable[[Seen], float]) -> float:
        return statistics.median(of(each[stages]) / of(each[other]) for each in found)

    def speeds(stages: str, other: str) -> dict[str, Any]:
        counts = found[0][other].decode
        return {
            "prefill": over(stages, other, lambda seen: seen.prefill),
            "decode": {str(count): over(stages, other, partial(_decode_of, count)) for count in counts},
        }

    ours = {
        key: {"fit": over(STAGES, other, lambda seen: seen.fit), **speeds(STAGES, other)}
        for key, other in (("over_one", ONE), ("over_tensors", TENSORS))
        if other in found[0]
    }
    if VLLM_STAGES in found[0]:
        ours |= {"over_vllm": speeds(STAGES, VLLM_STAGES), "vllm_over_one": speeds(VLLM_STAGES, VLLM_ONE)}
    said = zip(*(seen.said for name, seen in found[0].items() if name in RANKS), strict=True)
    return {**ours, "same_first": statistics.mean(len({tokens[0] for tokens in each}) == 1 for each in said)}


def _decode_of(count: int, seen: Seen) -> float:
    return seen.decode[count]


def measured(model: Path, size: Size, name: str, ray: str | None, here: bool = False) -> Seen:
    tp_size, stages = RANKS[name]
    config = EngineConfig(
        model=str(model),
        port=0,
        standby=False,
        dtype=size.dtype,
        cpu_threads=1,
        max_batched_tokens=CHUNK,
        kv_cache=size.kv_cache,
        max_replicas=1,
        max_model_len=size.prompt + size.answer,
        tp_size=tp_size,
        pipeline_parallel_size=stages,
    )
    seen, draw = Seen(), np.random.default_rng(0)
    with asked(config, ray, here=here) as client:
        card = read_model_card(config, model, identify=False)
        seen.fit = card.spec.num_blocks // len(card.plan.groups) * card.layout.block_size
        ask(client, [ids(draw, 100)], 4)  # the kernels' first calls
        seen.prefill = prefill(client, ids(draw, size.prompt), seen.said)
        for count in size.decoded:
            prompts = [ids(draw, size.context) for _ in range(count)]
            seen.decode[count] = decode(client, prompts, size.answer, seen.said)
    return seen


def measured_vllm(model: Path, size: Size, name: str) -> Seen:
    stages, most = VLLM[name], size.prompt + size.answer
    (spec,) = peers(PEERS_PYTHON, ("vllm_bf16",), ModelFiles(name, model, model), most, slots=16).values()
    options = {**spec.options, "stages": stages, "chunk": CHUNK // stages}
    cores = sorted(os.sched_getaffinity(0))[:stages]
    environment = {**spec.environment, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))}
    seen, draw = Seen(), np.random.default_rng(0)
    with Process(name, Spec(spec.module, spec.python, options, environment)) as process:
        process.serve([ids(draw, 100)], 4)
        seen.prefill = prefill_rate(process.serve([ids(draw, size.prompt)], 1), size.prompt)
        for count in size.decoded:
            prompts = [ids(draw, size.context) for _ in range(count)]
            process.serve(prompts, 1)
            seen.decode[count] = count / statistics.mean(map(_tpot, process.serve(prompts, size.answer)))
    return seen


def _tpot(one: Served) -> float:
    """Seconds of a token behind the first."""
    return (one.marks[-1][0] - one.marks[0][0]) / (one.count - 1)


def config_of(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // 64 * 2 if size.hidden < 256 else 16,
        "num_key_value_heads": 2 if size.hidden < 256 else 4,
        "head_dim": 32 if size.hidden < 256 else 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }


if __name__ == "__main__":
    main()
