"""Two ranks that keep latents together (`context_parallel_size: 2`), against two that keep all of them each.

    python benchmarks/context_parallel.py [--quick | --smoke] [--rounds 3] [--ray HOST:PORT]

The same requests go to both, of a model of random weights in DeepSeek-V2's architecture, with the same memory for the
cache on every rank. In each round both are started, the one that begins by turns:

fit_ratio       tokens that the cache holds
requests_ratio  requests a second of conversations whose prefixes, together, fit in the cache of one of the two
prefill_ratio   tokens a second of a prompt
decode_ratio    tokens a second of decodes, by how many requests are decoded at once

Each is of ranks that keep latents together over the others', the median over the rounds. `same_tokens` says whether
all requests got the same tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu.checkpoint import Shape, write_checkpoint
from smoke import asked
from timed_requests import VOCABULARY, ask, decode, ids, prefill

from headwise import EngineConfig
from headwise.runtime.config.model_card import read_model_card

PARTS = (1, 2)


@dataclass(frozen=True)
class Size:
    """How much is measured.

    conversations: with prefixes of ``prefix`` tokens, of which each is asked for ``questions`` times, by turns
    prompt:        tokens of the prompt that is timed
    decoded:       requests that are decoded at once, of ``context`` tokens each, and ``answer`` more
    """

    layers: int = 16
    hidden: int = 1024
    heads: int = 16
    kv_cache: str = "64MiB"
    conversations: int = 3
    prefix: int = 2000
    questions: int = 3
    prompt: int = 3000
    decoded: tuple[int, ...] = (1, 4)
    context: int = 400
    answer: int = 64


FULL = Size()
QUICK = replace(FULL, questions=2, answer=16)
SMOKE = Size(2, 64, 4, "2MiB", conversations=2, prefix=300, questions=1, prompt=300, context=60, answer=8)


@dataclass
class Seen:
    """Of one deployment: tokens that fit, requests and tokens a second, and what was said."""

    fit: int = 0
    requests: float = 0.0
    prefill: float = 0.0
    decode: dict[int, float] = field(default_factory=dict)
    said: list[list[int]] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer questions, one round: a minute")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, one round, beside one rank of this process: seconds"
    )
    parser.add_argument("--ray", help="address of a running Ray cluster; by default one is started")
    args = parser.parse_args(arguments)
    size = SMOKE if args.smoke else QUICK if args.quick else FULL
    rounds = 1 if args.smoke or args.quick else args.rounds
    print(f"{'parts':>5} {'tokens fit':>10} {'requests/s':>10} {'prefill':>8} {'decode of ' + str(size.decoded):>20}")
    found: list[dict[int, Seen]] = []
    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory) / "latents", config_of(size), tensors=list(tensors_of(size)))
        for turn in range(rounds):
            found.append({})
            for parts in PARTS[:: -1 if turn % 2 else 1]:
                found[-1][parts] = seen = measured(model, size, parts, args.ray, here=args.smoke and parts == 1)
                speeds = ", ".join(f"{speed:.0f}" for speed in seen.decode.values())
                numbers = f"{parts:>5} {seen.fit:>10,} {seen.requests:>10.2f} {seen.prefill:>8.0f}"
                print(f"{numbers} {speeds:>20}", flush=True)
    print(json.dumps({"rounds": rounds, **ratios(found)}))


def ratios(found: Sequence[dict[int, Seen]]) -> dict[str, Any]:
    """Medians over the rounds, of ranks that keep latents together over the others'."""

    def over(of: Callable[[Seen], float]) -> float:
        return statistics.median(of(each[PARTS[1]]) / of(each[PARTS[0]]) for each in found)

    counts = list(found[0][PARTS[0]].decode)
    return {
        "fit_ratio": over(lambda seen: seen.fit),
        "requests_ratio": over(lambda seen: seen.requests),
        "prefill_ratio": over(lambda seen: seen.prefill),
        "decode_ratio": {str(count): over(partial(_decode_of, count)) for count in counts},
        "same_tokens": all(each[PARTS[0]].said == each[PARTS[1]].said for each in found),
    }


def _decode_of(count: int, seen: Seen) -> float:
    return seen.decode[count]


def measured(model: Path, size: Size, parts: int, ray: str | None, here: bool = False) -> Seen:
    """here: of one rank of this process, which keeps as much as each of two that keep all of them do"""
    config = EngineConfig(
        model=str(model),
        port=0,
        standby=False,
        dtype="float32",
        kv_dtype="bfloat16",
        tp_size=2,
        context_parallel_size=parts,
        cpu_threads=1,
        kv_cache=size.kv_cache,
        max_replicas=1,
        max_model_len=max(size.prompt, size.prefix + 16) + size.answer,
    )
    seen, draw = Seen(), np.random.default_rng(0)
    with asked(config, ray, here=here) as client:
        card = read_model_card(config, model, identify=False)
        seen.fit = card.spec.num_blocks // len(card.plan.groups) * card.layout.block_size
        ask(client, [ids(draw, 100)], 4)  # the kernels' first calls
        seen.prefill = prefill(client, ids(draw, size.prompt), seen.said)
        for count in size.decoded:
            seen.decode[count] = decode(client, [ids(draw, size.context) for _ in range(count)], size.answer, seen.said)
        prefixes = [ids(draw, size.prefix) for _ in range(size.conversations)]
        for prefix in prefixes:
            seen.said += ask(client, [prefix], 1)
        began = time.perf_counter()
        for _ in range(size.questions):
            for prefix in prefixes:
                seen.said += ask(client, [[*prefix, *ids(draw, 16)]], 4)
        seen.requests = size.questions * size.conversations / (time.perf_counter() - began)
    return seen


# ---- a model with latents ----


def config_of(size: Size) -> dict[str, Any]:
    is_tiny = size.hidden < 256
    rank, rotated, plain = (64, 16, 32) if is_tiny else (512, 64, 128)
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": plain,
        "v_head_dim": plain,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "n_routed_experts": None,
    }


def tensors_of(size: Size) -> Iterator[tuple[str, Shape]]:
    config = config_of(size)
    hidden, inner, heads = size.hidden, config["intermediate_size"], size.heads
    rank, rotated, plain = (config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(size.layers):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}self_attn.q_proj.weight", (heads * (plain + rotated), hidden)
        yield f"{at}self_attn.kv_a_proj_with_mqa.weight", (rank + rotated, hidden)
        yield f"{at}self_attn.kv_a_layernorm.weight", (rank,)
        yield f"{at}self_attn.kv_b_proj.weight", (heads * 2 * plain, rank)
        yield f"{at}self_attn.o_proj.weight", (hidden, heads * plain)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
        yield f"{at}mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}mlp.up_proj.weight", (inner, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


if __name__ == "__main__":
    main()
