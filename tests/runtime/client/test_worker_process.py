"""A local engine's worker may have a process of its own: the same answers, and nothing is left of it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.gpu.emulated_gpu import open_emulated
from support.gpu.streamed_gpu import open_failing, open_streamed
from support.gpu.tiny_engine import PROMPT, configuration, write_model
from support.waiting import eventually

from headwise import LocalEngine, SamplingParams
from headwise.errors import ConfigError, EngineDiedError, ModelError
from headwise.runtime.client import local_engine
from headwise.runtime.client.local_engine import _has_own_process
from headwise.runtime.client.worker_process import WorkerProcess

PLAIN = {"device": "cpu", "tensor_ops": "numpy", "kernels": "reference"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def is_alive(pid: int) -> bool:
    """A process that ended, but that nobody waited for, is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def said(engine: LocalEngine) -> list[int]:
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    return list(engine.generate([PROMPT[:9]], greedy)[0].token_ids)


def worker_of(lines: str) -> int:
    return int(lines.partition("in process ")[2].split()[0])


def test_tokens_are_those_of_a_thread_and_the_process_ends_with_the_engine(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalEngine(configuration(model, **PLAIN)) as engine:
        expected, num_blocks = said(engine), engine.core.card.spec.num_blocks
    caplog.set_level(logging.INFO, "headwise")
    with LocalEngine(configuration(model, **PLAIN), worker_process=True) as engine:
        assert "kernels=reference" in caplog.text, "what was chosen is told"
        pid = worker_of(caplog.text)
        assert is_alive(pid)
        assert pid != os.getpid()
        assert said(engine) == expected
        engine.sleep()
        engine.wake()
        assert said(engine) == expected
        assert engine.core.card.spec.num_blocks == num_blocks
    assert not is_alive(pid)


def test_a_killed_worker_ends_streams_with_an_error(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headwise")
    with LocalEngine(configuration(model, **PLAIN), worker_process=True) as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        os.kill(worker_of(caplog.text), signal.SIGKILL)
        with pytest.raises(EngineDiedError, match=r"worker's process \d+ ended with signal 9"):
            list(stream)


def test_what_keeps_the_worker_from_starting_is_raised_here(tmp_path: Path) -> None:
    broken = write_model(tmp_path)
    save_file({"model.norm.weight": np.ones(64, np.float32)}, broken / "model.safetensors")
    with pytest.raises(ModelError) as here:
        LocalEngine(configuration(broken, **PLAIN))
    with pytest.raises(ModelError) as apart:
        LocalEngine(configuration(broken, **PLAIN), worker_process=True)
    assert str(apart.value) == str(here.value)


def test_the_worker_ends_when_its_engine_is_killed(model: Path) -> None:
    script = (
        "import logging, time; logging.basicConfig(level=logging.INFO)\n"
        "from headwise import EngineConfig, LocalEngine\n"  # without a guard, which a script need not have
        f"engine = LocalEngine(EngineConfig.from_dict({ ({'model': str(model), 'kv_cache': '1MiB', **PLAIN})!r}),"
        " worker_process=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as owner:
        assert owner.stderr is not None
        pid = worker_of(next(line for line in owner.stderr if "in process" in line))
        assert is_alive(pid)
        owner.kill()
    eventually(lambda: not is_alive(pid))


def test_a_worker_on_a_gpu_has_a_process_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu, on_cpu = configuration(model, device="cuda"), configuration(model, device="cpu")
    assert _has_own_process(on_gpu, None)
    assert not _has_own_process(on_cpu, None)
    monkeypatch.setattr(local_engine, "has_channel", lambda: False)
    assert not _has_own_process(on_gpu, None), "pyzmq is not installed"


@pytest.mark.soak
def test_an_emulated_gpu_in_another_process_says_what_a_cpu_says(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    with LocalEngine(configuration(model, **PLAIN)) as engine:
        expected = said(engine)
    monkeypatch.setattr(local_engine, "WorkerProcess", partial(WorkerProcess, open_device=open_emulated))
    with LocalEngine(configuration(model, device="cuda", dtype="float32")) as engine:
        assert said(engine) == expected


def test_a_worker_whose_gpu_fails_ends_at_once_and_says_why(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its steps overlap, and blocks are on their way to the host: CUDA's streams and events tell of all of it."""
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    caplog.set_level(logging.INFO, "headwise")
    given = {"device": "cuda", "dtype": "float32", "host_cache": "1MiB", "write_policy": "write_through"}
    config, long = configuration(model, **given), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    monkeypatch.setattr(local_engine, "WorkerProcess", partial(WorkerProcess, open_device=open_failing))
    with LocalEngine(config) as engine:
        began = time.monotonic()
        with pytest.raises(EngineDiedError, match="the GPU failed: cudaErrorIllegalAddress") as raised:
            list(engine.stream(PROMPT, long))
        assert time.monotonic() - began < config.step_timeout_s / 2, "nobody waited for a step that never ends"
        eventually(lambda: not is_alive(worker_of(caplog.text)))
    assert "GpuFailedError" in str(raised.value)


@pytest.mark.soak
def test_tokens_that_come_by_streams_and_events_are_those_of_a_cpu(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    with LocalEngine(configuration(model, **PLAIN)) as engine:
        expected = said(engine)
    monkeypatch.setattr(local_engine, "WorkerProcess", partial(WorkerProcess, open_device=open_streamed))
    with LocalEngine(configuration(model, device="cuda", dtype="float32", host_cache="1MiB")) as engine:
        assert said(engine) == expected
        assert said(engine) == expected, "from the cache"


def test_a_device_of_this_process_is_not_given_to_another_one(model: Path) -> None:
    config = configuration(model, device="cuda", dtype="float32")
    with pytest.raises(ConfigError, match="worker_process=False"):
        LocalEngine(config, open_emulated(config, 1), worker_process=True)
