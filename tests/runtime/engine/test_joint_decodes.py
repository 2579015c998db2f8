"""Whole engines whose decodes read a prefix together say what they say reading it each by itself."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine.given_guesses import GivenGuesses
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.gpu.tiny_engine import configuration, write_model

from headwise import LocalEngine
from headwise.cache_controller.joint_reads import JointReads
from headwise.kernels.cpu.attention_plan import Plan, Planner
from headwise.runtime.protocol.request import SamplingParams

NEVER = 1 << 30
PREFIX = np.random.default_rng(1).integers(3, 200, 604).tolist()
PROMPTS = [[*PREFIX, *range(10 + number, 10 + 3 * number)] for number in range(1, 5)]
"""Of several lengths, behind 75 whole blocks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def answers(engine: LocalEngine, least_tokens: int) -> list[tuple[list[int], list[float]]]:
    """Tokens of `PROMPTS`, which decode together, beside one that shares nothing; and their log-probabilities, where
    none have drafts."""
    engine.core.resources.steps.joint_reads = JointReads(engine.core.cache, least_tokens)
    logprobs = None if engine.config.speculation else 0
    if engine.config.speculation:  # whatever it costs
        engine.core.resources.speculator = GivenGuesses(defaultdict(lambda: [99] * 20), engine.config.speculation)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    salt = {"cache_salt": f"{least_tokens}"}
    engine.generate([PREFIX], SamplingParams(max_tokens=1, temperature=0.0), **salt)
    results = engine.generate([*PROMPTS, PREFIX[7:50]], params, **salt)
    assert all(result.usage.cached_tokens == 600 for result in results[: len(PROMPTS)])
    if engine.config.speculation:
        assert engine.core.stats()["speculation"]["drafted"] > 0
    return [(list(result.token_ids), [each.chosen for each in result.logprobs or ()]) for result in results]


@pytest.mark.parametrize("speculation", [0, 2])
@pytest.mark.parametrize("tensor_ops", ["numpy", "numba"])
def test_on_a_cpu_to_the_bit(model: Path, tensor_ops: str, speculation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, and as one call of all layers."""
    pytest.importorskip("numba")
    given = {
        "device": "cpu",
        "tensor_ops": tensor_ops,
        "kernels": "numba",
        "speculation": speculation,
        "kv_cache": "4MiB",
        "max_batched_tokens": 512,
    }
    heirs, plan = list[int](), Planner.plan

    def watched(self: Planner, *asked: Any) -> Plan:
        found = plan(self, *asked)
        heirs.append(int(found.items[:, -2].sum()))
        return found

    monkeypatch.setattr(Planner, "plan", watched)
    with LocalEngine(configuration(model, **given), worker_process=False) as engine:
        alone = answers(engine, NEVER)
        assert not any(heirs)
        assert answers(engine, 256) == alone
        assert max(heirs) >= len(PROMPTS), "one of the two heads sees all"


@pytest.mark.parametrize("speculation", [0, 2])
def test_on_a_gpu(model: Path, speculation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    from headwise.kernels.cuda.joint import JointDecodes

    given = {"kv_cache": "4MiB", "max_batched_tokens": 512, "speculation": speculation}
    with LocalEngine(configuration(model, device="cpu", tensor_ops="numpy", kernels="reference", **given)) as engine:
        expected = answers(engine, NEVER)
    sizes, attend = list[int](), JointDecodes.attend

    def watched(self: JointDecodes, variants: Any, batch: Any, *others: Any) -> None:
        sizes.append(int(batch.joint[1].max()))
        attend(self, variants, batch, *others)

    monkeypatch.setattr(JointDecodes, "attend", watched)
    with LocalEngine(
        configuration(model, device="cuda", dtype="float32", **given), EmulatedGpu(LIBRARIES, "float32")
    ) as gpu:
        found = answers(gpu, 256)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, own), (_, others) in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, others, atol=1e-4)
    assert max(sizes) > len(PROMPTS) if speculation else max(sizes) == len(PROMPTS), "drafts are members, too"
