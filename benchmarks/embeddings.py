"""Prompts that come with embeddings, as images and videos do: how much longer they wait than others.

    python benchmarks/embeddings.py [--quick]

An engine with one worker in a process of its own, of a model with wide layers that compute little, so that what is
between the two shows. Prompts of as many tokens, three ways in turn:

plain:  tokens alone
mapped: with embeddings, which the worker reads in the engine's memory
sent:   with embeddings, which the engine sends with each step, as to workers on other machines

Times to the first token, from when the engine has the request; medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.tiny_checkpoints import TINY_CONFIGS, write_checkpoint

from headwise import EngineConfig, LocalEngine, PromptItem, SamplingParams
from headwise.runtime.protocol.step_channel import ZmqExecutor

WIDTH, LAYERS, HEAD, INNER = 8192, 2, 64, 64
WAYS = ("plain", "mapped", "sent")


def wide_model(directory: Path) -> Path:
    """Of random weights."""
    config = {
        **TINY_CONFIGS["qwen3"],
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "vocab_size": 272,
        "max_position_embeddings": 1 << 16,
    }
    outputs = {"self_attn.q_proj": 2 * HEAD, "self_attn.k_proj": HEAD, "self_attn.v_proj": HEAD}
    outputs |= {"mlp.gate_proj": INNER, "mlp.up_proj": INNER}
    shapes = {"model.embed_tokens.weight": [272, WIDTH], "lm_head.weight": [272, WIDTH], "model.norm.weight": [WIDTH]}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}.weight": [size, WIDTH] for name, size in outputs.items()}
        shapes |= {f"{at}self_attn.o_proj.weight": [WIDTH, 2 * HEAD], f"{at}mlp.down_proj.weight": [WIDTH, INNER]}
        shapes |= {f"{at}self_attn.{name}_norm.weight": [HEAD] for name in "qk"}
        shapes |= {f"{at}{name}.weight": [WIDTH] for name in ("input_layernorm", "post_attention_layernorm")}
    written: Path = write_checkpoint(directory, config, shapes)
    return written


def waits(engine: LocalEngine, tokens: int, rounds: int, draw: np.random.Generator, with_embeds: bool) -> list[float]:
    """Seconds to the first token of prompts, none of which is cached."""
    found = []
    for _ in range(rounds):
        prompt: list[int] = draw.integers(0, 256, tokens).tolist()
        items: Any = ()
        if with_embeds:
            items = [PromptItem(0, tokens - 1, embeds=draw.standard_normal((tokens - 1, WIDTH), dtype=np.float32))]
        *_, last = engine.stream(prompt, SamplingParams(temperature=0, max_tokens=1), items=items)
        assert last.timings is not None
        found.append(last.timings.ttft_s)
    return found


def measure(model: Path, tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds to the first token, by way."""
    config = EngineConfig(model=str(model), dtype="float32", kv_cache="256MiB", cpu_threads=1, max_batched_tokens=2048)
    draw = np.random.default_rng(0)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with mock.patch.object(ZmqExecutor, "shares_memory", False):
        sending = LocalEngine(config, worker_process=True)
    with sending, LocalEngine(config, worker_process=True) as mapping:
        for engine in (sending, mapping):
            waits(engine, tokens, 1, draw, with_embeds=True)  # whatever comes first takes longer
        for _ in range(rounds):
            found["plain"] += waits(mapping, tokens, 1, draw, with_embeds=False)
            found["mapped"] += waits(mapping, tokens, 1, draw, with_embeds=True)
            found["sent"] += waits(sending, tokens, 1, draw, with_embeds=True)
    return {way: statistics.median(each) for way, each in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for tests")
    quick = parser.parse_args(arguments).quick
    logging.getLogger("headwise").setLevel(logging.WARNING)
    tokens, rounds = (256, 1) if quick else (8192, 9)
    mib = (tokens - 1) * WIDTH * 4 / 2**20
    with tempfile.TemporaryDirectory() as directory:
        found = measure(wide_model(Path(directory)), tokens, rounds)
    over = {way: found[way] / found["plain"] for way in WAYS}
    print(f"prompts of {tokens} tokens, {mib:.0f} MiB of embeddings, {rounds} rounds")
    print(f"{'':8}{'first token':>14}{'over plain':>14}")
    for way in WAYS:
        print(f"{way:8}{found[way] * 1e3:11.1f} ms{over[way]:14.3f}")
    ratios = {f"{way}_over_plain": round(over[way], 3) for way in WAYS[1:]}
    print(json.dumps({"plain_ttft_s": round(found["plain"], 4), **ratios, "mib": round(mib)}))


if __name__ == "__main__":
    main()
