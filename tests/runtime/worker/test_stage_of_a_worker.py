"""A worker that is a stage of a pipeline: what it gives the next one, and what becomes of a step that fails in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.engine.loaded_model import BASE
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.tiny_checkpoints import checkpoint

from headwise import EngineConfig
from headwise.errors import EngineDiedError
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.batch import BatchRequest
from headwise.runtime.worker.network_link import NetworkLink
from headwise.runtime.worker.worker import ModelWorker

SEQUENCES = 3
CHANGES = {"kv_cache": "8MiB", "pipeline_parallel_size": 2, "max_num_seqs": 4, "max_model_len": 64}


@contextmanager
def first_stage(on_gpu: bool = False) -> Iterator[tuple[ModelWorker, NetworkLink]]:
    """A worker of the first stage, and the link of the one in its place in the next, past what it tried at start."""
    directory = checkpoint("qwen3")
    changes = {"model": str(directory), "device": "cuda" if on_gpu else "cpu", "prefill_graphs": 16, **CHANGES}
    config = EngineConfig(**(BASE.to_dict() | changes))
    own, following = NetworkLink(timeout_s=60.0), NetworkLink(timeout_s=60.0)
    following.listen("tcp://127.0.0.1:*", None)
    own.connect(following.endpoint, None)
    device = EmulatedGpu(LIBRARIES, "float32") if on_gpu else None
    worker = ModelWorker(config, directory, 0, SingleRank(), device, link=own)
    worker.initialize_cache()
    for tokens in (2, 1):
        following.receive((tokens, worker.card.config.hidden_size))
    yield worker, following
    worker.close()
    own.close()
    following.close()


def step_of(tokens: int, start: int) -> BatchRequest:
    """So many of each of the sequences, whose blocks are those of their numbers."""
    rows = np.arange(SEQUENCES, dtype=np.int32)
    updates = np.stack([rows, 0 * rows, 0 * rows, rows], axis=1) if start == 0 else np.empty((0, 4), np.int32)
    return BatchRequest(
        step_id=7,
        rows=rows,
        starts=np.full(SEQUENCES, start, np.int32),
        query_lens=np.full(SEQUENCES, tokens, np.int32),
        token_ids=np.arange(start, start + tokens * SEQUENCES, dtype=np.int32),
        sample=np.ones(SEQUENCES, np.bool_),
        table_updates=updates,
    )


def streams(worker: ModelWorker, following: NetworkLink) -> list[np.ndarray]:
    """Of a prompt's step, and of one that decodes behind it."""
    found = []
    for tokens, start in ((3, 0), (1, 3)):
        result = worker.execute(step_of(tokens, start))
        assert result.token_ids.tolist() == [-1] * SEQUENCES, "it samples nothing"
        assert not result.broken
        found.append(following.receive((tokens * SEQUENCES, worker.card.config.hidden_size)))
    return found


def test_it_gives_the_streams_of_all_tokens_and_none_of_the_padding_of_graphs() -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    with first_stage() as on_cpu, first_stage(on_gpu=True) as on_gpu:
        assert "graphs=5 of decode steps" in on_gpu[0].describe()
        for expected, found in zip(streams(*on_cpu), streams(*on_gpu), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_what_fails_in_it_ends_the_engine_for_the_next_one_waits_for_its_stream() -> None:
    def fails(*given: Any, **more: Any) -> None:
        raise ValueError("boom")

    with first_stage() as (worker, _):
        worker.served.model.forward = fails
        with pytest.raises(EngineDiedError, match="rank 0 failed in step 7: ValueError: boom"):
            worker.begin(step_of(3, 0))
