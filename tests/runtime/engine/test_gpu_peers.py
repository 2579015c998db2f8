"""Two engines on emulated GPUs of one node: what is on the device of one the other reads there, by CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import EmulatedGpu
from support.gpu.host_ipc import HostGpu
from support.gpu.tiny_engine import PROMPT, configuration, write_model

from headwise.runtime.engine.core import EngineCore
from headwise.runtime.engine.local_executor import LocalExecutor
from headwise.runtime.frontend.preprocessor import Preprocessor
from headwise.runtime.ops.comm import SingleRank
from headwise.runtime.protocol.lease_messages import Taken
from headwise.runtime.protocol.request import GenerateRequest, GenerationResult, PeerHint, SamplingParams
from headwise.runtime.worker.worker import ModelWorker
from headwise.transfer.connectors import nixl
from headwise.transfer.connectors.select import PeerAccess

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


class GpuEngine:
    """An engine on a GPU of its own, and its `Peers`: messages arrive at once."""

    epoch = 1

    def __init__(self, name: str, model: Path, engines: dict[str, GpuEngine], **options: Any) -> None:
        tiers = {"kv_cache": "1MiB", "host_cache": "8MiB", "write_policy": "write_back", "max_replicas": 2, **options}
        self.config = configuration(model, device="cuda", dtype="float32", **tiers)
        self.name, self._engines, self.inbox = name, engines, list[Any]()
        self.gpu = HostGpu(may_open_own=True)
        device = EmulatedGpu(LIBRARIES, "float32", gpu=self.gpu)
        self.worker = ModelWorker(self.config, model, 0, SingleRank(), device, peers=PeerAccess())
        self.worker.initialize_cache()
        self._executor = LocalExecutor(self.worker)
        tokenizer = Preprocessor.open(self.config).tokenizer
        self.core = EngineCore(self.config, self.worker.card, tokenizer, self._executor, peers=self)
        engines[name] = self

    def close(self) -> None:
        self._executor.close()
        self.worker.close()

    # ---- `Peers` ----

    def knows(self, engine: str, epoch: int) -> bool:
        return engine in self._engines and engine != self.name and epoch == self.epoch

    def epoch_of(self, engine: str) -> int | None:
        return self.epoch if self.knows(engine, self.epoch) else None

    def tp_size(self, engine: str) -> int:
        return 1

    def send(self, engine: str, message: Any) -> None:
        self._engines[engine].core.asked(self.name.encode(), message)

    def answer(self, reader: bytes, message: Any) -> None:
        self._engines[reader.decode()].inbox.append(message)

    def receive(self) -> list[Any]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def taken(self) -> list[Taken]:
        return []


@pytest.fixture(params=["auto"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, GpuEngine]]:
    """Two; parameter: their transports."""
    model, engines = write_model(tmp_path), dict[str, GpuEngine]()
    for name in "ab":
        GpuEngine(name, model, engines, peer_transports=request.param)
    yield engines
    for engine in engines.values():
        engine.close()


def serve(engines: dict[str, GpuEngine], name: str, prompt: list[int], peer: PeerHint | None = None) -> tuple[Any, int]:
    """The tokens of an answer, and how many of its prompt were cached."""
    result = GenerationResult("r")
    request = GenerateRequest("r", np.array(prompt, np.int32), GREEDY)
    engines[name].core.add(replace(request, peer=peer))
    while result.finish_reason is None:
        for each in engines.values():
            each.core.serve_peers()
            for delta in each.core.step(0.01) if each.core.has_work() else ():
                result.add(delta) if delta.request_id == "r" else None
    assert result.usage is not None
    return result.token_ids, result.usage.cached_tokens


def lent(engines: dict[str, GpuEngine]) -> int:
    return engines["a"].core.stats()["peers"]["lent"]["device_blocks"]


def test_tokens_are_those_of_one_engine_with_what_came_from_the_others_device(engines) -> None:
    a, b = engines["a"], engines["b"]
    assert "peers=cuda_ipc,shared_memory,tcp" in a.worker.describe()
    expected, _ = serve(engines, "a", PROMPT[:42])
    assert serve(engines, "b", PROMPT[:42], PeerHint("a", 1, 40)) == (expected, 40)
    assert lent(engines) > 5, "a block for each of five columns, and those that the window sees"
    assert a.core.stats()["host"]["stored_blocks"] == 0
    assert b.core.stats()["transfers"]["peer"]["bytes"] == lent(engines) * a.worker.card.layout.block_bytes
    assert (len(b.gpu.opened), len(a.gpu.opened)) == (1, 0)

    # Prefill apart from decode.
    other = PROMPT[:40:-1]
    apart = serve(engines, "b", other, PeerHint("a", 1, 24, prefills=True))
    alone, _ = serve(engines, "a", other)
    assert apart == (alone, 24)

    # Asleep an owner's memory is nobody's.
    a.core.operate("sleep")
    while a.core.has_work():
        a.core.step(0.01)
    assert not b.gpu.opened


def has_nixl() -> bool:
    try:
        return bool(nixl.load())
    except ImportError:
        return False


@pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed; `make rdma` installs it")
@pytest.mark.parametrize("engines", ["nixl,tcp"], indirect=True)
def test_the_device_of_another_node_is_read_by_nixl(engines) -> None:
    a, b = engines["a"], engines["b"]
    assert "peers=nixl,tcp" in a.worker.describe()
    expected, _ = serve(engines, "a", PROMPT[:42])
    assert serve(engines, "b", PROMPT[:42], PeerHint("a", 1, 40)) == (expected, 40)
    assert lent(engines) > 5
    assert a.core.stats()["host"]["stored_blocks"] == 0
    assert b.core.stats()["transfers"]["peer"]["bytes"] == lent(engines) * a.worker.card.layout.block_bytes
