"""A tiny model with a windowed head, which engines on a CPU and on an emulated GPU serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from support.random_ernie import MOE, draw_weights
from support.random_models import random_weights
from support.tiny_models import byte_level_tokenizer, write_tokenizer_directory

from headwise import EngineConfig, LocalEngine
from headwise.runtime.models.registry import model_config
from headwise.runtime.protocol.request import GenerateRequest, GenerationResult, SamplingParams
from headwise.runtime.worker.worker import ModelWorker

TINY = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 263,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "window_size": 24,
    "sink_size": 4,
    "head_wise_swa_ratio": 0.5,
}
"""Of its two KV heads, one sees a window."""
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 200, 70)]


def write_model(directory: Path, **config: object) -> Path:
    """``config``: of the model's, besides `TINY`."""
    write_tokenizer_directory(directory, byte_level_tokenizer())
    (directory / "config.json").write_text(json.dumps(TINY | config))
    weights = random_weights(model_config(TINY | config))
    named = {name: weights.tensor(name) for name in weights.names if not name.endswith(".bias")}
    save_file(named, directory / "model.safetensors")
    return directory


def write_other_weights(directory: Path, model: Path) -> Path:
    """Those of the ``model`` that `write_model` wrote, each matrix with its rows in another order."""
    named = load_file(model / "model.safetensors")
    save_file({name: np.roll(each, 1, axis=0) for name, each in named.items()}, directory / "model.safetensors")
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    return directory


def write_moe_model(directory: Path) -> Path:
    """As `write_model`, with experts in both layers."""
    config = MOE | TINY | {name: MOE[name] for name in MOE if name.startswith(("moe", "arch"))}
    config |= {"moe_layer_start_index": 0, "tie_word_embeddings": True}
    write_tokenizer_directory(directory, byte_level_tokenizer())
    (directory / "config.json").write_text(json.dumps(config))
    save_file(draw_weights(config), directory / "model.safetensors")
    return directory


def answers(engine: LocalEngine) -> list[tuple[list[int], int]]:
    """Tokens of several prompts at once, then of one of them again; and how many of each prompt's were cached."""
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with engine:
        results = engine.generate([PROMPT, PROMPT[:9], PROMPT[5:40]], greedy)
        results += engine.generate([[*PROMPT, 7, 8, 9]], greedy)
    return [(list(result.token_ids), result.usage.cached_tokens if result.usage else -1) for result in results]


SHORT_PROMPTS = [PROMPT[40:45], PROMPT[:9], PROMPT[20:31]]
"""In the order in which they are computed, whichever `prompt_order` is."""


def lose_numbers(worker: ModelWorker) -> None:
    """Let the second of the three sequences that decode together have no logits, once: they came in this order."""
    model, lost = worker.served.model, list[bool]()

    def losing(real: Callable[[np.ndarray], np.ndarray | None], hidden: np.ndarray) -> np.ndarray | None:
        found = real(hidden)
        if found is not None and hidden.shape[0] >= 3 and not lost:
            lost.append(True)
            found[1] = np.nan
        return found

    for name in ("scores", "step_scores"):  # of graphs, and of all other steps
        setattr(model, name, partial(losing, getattr(model, name)))


def tokens_and_errors(engine: LocalEngine, params: SamplingParams) -> list[tuple[list[int], str | None]]:
    """What becomes of `SHORT_PROMPTS`, served together."""
    results = {f"r{index}": GenerationResult(f"r{index}") for index in range(len(SHORT_PROMPTS))}
    errors: dict[str, str | None] = {}
    for name, prompt in zip(results, SHORT_PROMPTS, strict=True):
        engine.core.add(GenerateRequest(name, np.array(prompt, np.int32), params, cache_salt="another"))
    while engine.core.has_work():
        for delta in engine.core.step(None):
            results[delta.request_id].add(delta)
            errors[delta.request_id] = delta.error
    return [(result.token_ids, errors[name]) for name, result in results.items()]


def configuration(model: Path, **changes: object) -> EngineConfig:
    """On one thread, as `BASE` of `support.engine.loaded_model` is, and for its reason."""
    sizes = {"block_size": 8, "max_batched_tokens": 64, "max_num_seqs": 8, "cpu_threads": 1}
    values = {"model": str(model), **sizes, **changes}
    return EngineConfig.from_dict(values)
