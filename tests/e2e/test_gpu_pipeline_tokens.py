"""Stages of a pipeline on GPUs, emulated: by graphs, their tokens are those of Hugging Face transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engine.loaded_model import GREEDY, serve
from support.engine.ranks import Ranks
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.reference import answers, assert_same
from support.tiny_checkpoints import checkpoint

from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

TOKENS = 4


def ranks_that_say_the_reference_tokens(model: str, **changes: Any) -> Ranks:
    given = {"kv_cache": "16MiB", "max_model_len": 256, "max_num_seqs": 4, "pipeline_parallel_size": 2, **changes}
    directory = checkpoint(model)
    config = EngineConfig(model=str(directory), device="cuda", dtype="float32", **given)
    ranks = Ranks(config, Path(directory), device=lambda: EmulatedGpu(LIBRARIES, "float32"))
    preprocessor, executor = Preprocessor.open(config), LocalExecutor(ranks)
    engine = EngineCore(config, preprocessor.card, preprocessor.tokenizer, executor)
    wanted = sorted(answers(model), key=lambda answer: len(answer.prompt_ids))[:2]
    greedy = replace(GREEDY, max_tokens=TOKENS)
    results = serve(engine, preprocessor, wanted, {answer.name: greedy for answer in wanted})
    for answer in wanted:
        assert_same(answer.first(TOKENS), results[answer.name].token_ids)
    executor.close()
    ranks.close()
    return ranks


@pytest.mark.parametrize(
    "model", ["qwen3", "gpt-oss", "deepseek-v3", "kimi-linear", "gemma4", "qwen3-next", "nemotron-h"]
)
def test_stages_say_the_reference_tokens_by_graphs(model: str) -> None:
    ranks = ranks_that_say_the_reference_tokens(model)
    for worker in ranks.workers:
        print(worker.describe())
