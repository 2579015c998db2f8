"""What a prompt takes of which only wanted rows are computed where nothing is kept any more, against all rows of all
layers.

One engine computes the same prompts both ways, in turns; the second way is what it does for who wants the prompt's own
log-probabilities. Of the models one has layers that share the caches of earlier ones: random weights in the geometry of
Gemma 4 E2B, at half of its width.

    python benchmarks/wanted_rows.py [--quick] [--rounds 11]

The last line is JSON: `cases`, each with its model and tokens, tokens a second both ways, and `ratio`, the median over
the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from gpu.checkpoint import Shape, write_checkpoint

from headwise import EngineConfig, LocalEngine, SamplingParams

SHARED = "shared"
"""The model that `shared_config` describes."""

FULL = (("smollm2-135m", 1800), ("gemma3-270m", 1800), ("gemma3-270m", 12_000), (SHARED, 1800))
QUICK = (("smollm2-135m", 96), (SHARED, 96))
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """Medians of a prompt of so many tokens. wanted, all_rows: tokens a second; ratio: of both"""

    model: str
    tokens: int
    wanted: float
    all_rows: float
    ratio: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="short prompts, one round: seconds")
    args = parser.parse_args(arguments)
    rounds = 1 if args.quick else args.rounds
    print(f"{'model':>14} {'tokens':>7} {'wanted, tok/s':>14} {'all, tok/s':>11} {'ratio':>6}")
    cases = []
    with tempfile.TemporaryDirectory() as directory:
        for model, prompts in groupby(QUICK if args.quick else FULL, key=lambda case: case[0]):
            where = model if model != SHARED else str(write_shared(Path(directory), is_tiny=args.quick))
            cases += list(measured(model, where, [tokens for _, tokens in prompts], rounds))
    print(json.dumps({"rounds": rounds, "cases": [asdict(case) for case in cases]}))


def measured(model: str, where: str, prompts: Sequence[int], rounds: int) -> Iterator[Case]:
    """Cases of one model, of prompts of so many tokens."""
    config = EngineConfig(model=where, dtype="bfloat16", prefix_caching=False, max_model_len=max(prompts) + 1)
    with LocalEngine(config, worker_process=False) as engine:
        draw = np.random.default_rng(0)
        for tokens in prompts:
            wanted, every = list[float](), list[float]()
            for turn in range(rounds + 1):
                ids = draw.integers(1, 256, tokens).tolist()
                for times, is_all in ((wanted, False), (every, True)):
                    seconds = time_of(engine, ids, is_all)
                    if turn:  # the first one warms up
                        times.append(tokens / seconds)
            ratio = statistics.median(fast / slow for fast, slow in zip(wanted, every, strict=True))
            case = Case(model, tokens, statistics.median(wanted), statistics.median(every), ratio)
            print(f"{model:>14} {tokens:>7} {case.wanted:>14.0f} {case.all_rows:>11.0f} {ratio:>6.2f}", flush=True)
            yield case


def time_of(engine: LocalEngine, ids: list[int], is_all: bool) -> float:
    """Seconds until the prompt's first token."""
    prompts = engine._worker.served.steps._prompts
    with patch.object(prompts, "wants", lambda batch: True) if is_all else nullcontext():
        began = time.perf_counter()
        engine.generate([ids], ONE)
        return time.perf_counter() - began


# ---- a model whose last layers share caches ----


def shared_config(*, is_tiny: bool) -> dict[str, Any]:
    """Gemma 4 E2B at half of its width, with a small vocabulary; or a tiny one of the same shape."""
    hidden, head_dim, layers, shared = (64, 32, 10, 5) if is_tiny else (768, 256, 35, 20)
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_kv_shared_layers": shared,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * (layers // 5),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "global_head_dim": 2 * head_dim,
        "attention_k_eq_v": False,
        "sliding_window": 512,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": hidden // 4,
        "vocab_size": 4096,
        "vocab_size_per_layer_input": 4096,
        "max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
    }


def write_shared(directory: Path, *, is_tiny: bool) -> Path:
    """A checkpoint of `shared_config`."""
    config = shared_config(is_tiny=is_tiny)
    return write_checkpoint(directory / SHARED, config, tensors=list(_tensors(config)))


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, side, layers = config["hidden_size"], config["hidden_size_per_layer_input"], config["num_hidden_layers"]
    vocabulary, kept = config["vocab_size"], layers - config["num_kv_shared_layers"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "model.embed_tokens_per_layer.weight", (vocabulary, layers * side)
    yield "model.per_layer_model_projection.weight", (layers * side, hidden)
    yield "model.per_layer_projection_norm.weight", (side,)
    for layer, kind in enumerate(config["layer_types"]):
        at, is_full = f"model.layers.{layer}.", kind == "full_attention"
        head_dim = config["global_head_dim" if is_full else "head_dim"]
        queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        yield f"{at}self_attn.q_proj.weight", (queries, hidden)
        yield f"{at}self_attn.q_norm.weight", (head_dim,)
        yield f"{at}self_attn.o_proj.weight", (hidden, queries)
        if layer < kept:
            yield f"{at}self_attn.k_proj.weight", (keys, hidden)
            yield f"{at}self_attn.v_proj.weight", (keys, hidden)
            yield f"{at}self_attn.k_norm.weight", (head_dim,)
        inner = config["intermediate_size"] * (1 if layer < kept else 2)
        yield f"{at}mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}mlp.up_proj.weight", (inner, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, inner)
        yield f"{at}per_layer_input_gate.weight", (side, hidden)
        yield f"{at}per_layer_projection.weight", (hidden, side)
        yield f"{at}layer_scalar", (1,)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{at}{name}_layernorm.weight", (hidden,)
        yield f"{at}post_per_layer_input_norm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


if __name__ == "__main__":
    main()
