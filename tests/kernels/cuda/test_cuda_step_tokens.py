"""Tokens that stay on a GPU between steps: executed on a CPU by `cuda_shim`, compiled for GPUs by NVRTC."""

from __future__ import annotations

import numpy as np
import pytest
from support.gpu.cuda_shim import ShimPrograms
from support.gpu.emulated_gpu import EmulatedOps
from support.gpu.machine_code import TARGETS, machine_code, spilled

from headwise.kernels.cuda.step_tokens import SOURCE, CudaStepTokens
from headwise.runtime.protocol.batch import LAST_SAMPLED, BatchRequest
from headwise.runtime.worker.last_sampled import NO_TOKEN, DeviceLastSampled, HostLastSampled, LastSampled

MAX_ROWS = 70


@pytest.fixture(scope="module", params=["host", "device"])
def last(request: pytest.FixtureRequest) -> LastSampled:
    if request.param == "host":
        return HostLastSampled(MAX_ROWS)
    programs = ShimPrograms()
    return DeviceLastSampled(EmulatedOps("float32", programs), CudaStepTokens(programs, threads=32), MAX_ROWS)


def inputs(last: LastSampled, rows: list[int], query_lens: list[int], tokens: list[int], padding: int = 0) -> list[int]:
    """What a step computes with."""
    ints = np.zeros(len(rows), np.int32)
    lens, given = np.array(query_lens, np.int32), np.array(tokens, np.int32)
    nothing = np.empty((0, 4), np.int32)
    batch = BatchRequest(0, np.array(rows, np.int32), ints, lens, given, ints.astype(np.bool_), nothing)
    begins = np.minimum(np.cumsum([0, *query_lens, *[1] * padding]), len(tokens)).astype(np.int32)
    uploaded = last.inputs(batch).copy()
    last.fill(uploaded, begins, np.array([*rows, *[0] * padding], np.int32))
    return uploaded.tolist()


def test_a_step_takes_what_the_one_before_sampled(last: LastSampled) -> None:
    rows, tokens = np.arange(69, 29, -1, dtype=np.int32), np.arange(100, 140, dtype=np.int32)
    best = np.ones(40, np.float32)
    best[[3, 5, 7]] = np.nan, np.inf, -np.inf
    told = last.keep(rows, tokens, best)
    expected = tokens.copy()
    expected[[3, 5, 7]] = NO_TOKEN
    assert told.get().tolist() == expected.tolist()
    asked = rows.tolist()
    found = inputs(last, asked, [1] * 40, [LAST_SAMPLED] * 40, padding=8)
    assert found == np.maximum(expected, 0).tolist(), "who has none goes on with some token"


def test_prompts_and_known_tokens_stay_and_tokens_of_the_host_are_entered(last: LastSampled) -> None:
    last.enter(np.array([4, 9], np.int32), np.array([55, NO_TOKEN], np.int32))
    found = inputs(last, [4, 8, 9, 4], [1, 3, 1, 1], [LAST_SAMPLED, 1, 2, 3, LAST_SAMPLED, 77])
    assert found == [55, 1, 2, 3, 0, 77]


@pytest.mark.parametrize("target", TARGETS)
def test_the_code_spills_nothing(target: str) -> None:
    assert spilled(machine_code(SOURCE, {}, target)) == []
