"""All models through the kernels of a GPU, emulated, give the tokens of Hugging Face transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engine.loaded_model import GREEDY, MODELS
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.reference import answers, assert_same
from support.tiny_checkpoints import TINY_CONFIGS, checkpoint

from headwise import EngineConfig, LocalEngine

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

NO_KERNELS = ("deepseek", "qwen3-next", "qwen3.5")
"""For these there are none yet."""
SLOW = ("gpt-oss-mxfp4", "qwen3-moe", "gemma4")
"""They take the interpreter long, and others show the same of them."""
PROMPTS = {"llama4": 4}
"""Of which the last is longer than a chunk."""


@pytest.mark.parametrize(
    ("model", "prompts", "tokens"),
    [
        pytest.param(MODELS[1], 2, 3, marks=pytest.mark.model),
        *(pytest.param(model, 3, 4, marks=[pytest.mark.model, pytest.mark.soak]) for model in MODELS),
        *(
            pytest.param(model, PROMPTS.get(model, 3), 3, marks=[pytest.mark.soak] if model in SLOW else [])
            for model in TINY_CONFIGS
            if not model.startswith(NO_KERNELS)
        ),
    ],
)
def test_greedy_tokens_of_several_prompts_at_once(model: str, prompts: int, tokens: int) -> None:
    wanted = sorted(answers(model), key=lambda answer: len(answer.prompt_ids))[:prompts]
    directory = str(checkpoint(model)) if model in TINY_CONFIGS else model
    config = EngineConfig(model=directory, device="cuda", dtype="float32", kv_cache="64MiB", max_model_len=256)
    with LocalEngine(config, EmulatedGpu(LIBRARIES, "float32")) as engine:
        results = engine.generate([answer.prompt_ids for answer in wanted], replace(GREEDY, max_tokens=tokens))
    for answer, result in zip(wanted, results, strict=True):
        assert_same(answer.first(tokens), result.token_ids)
