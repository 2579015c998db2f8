"""Prefixes that an earlier engine left in storage give the same tokens, whatever became of the storage meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.engine.loaded_model import CACHE_KINDS, GREEDY, MODELS, LoadedModel, serve, tiny_cache_kinds
from support.mooncake import Master, require_mooncake
from support.reference import Answer, answers, assert_same
from support.waiting import PATIENCE_S, eventually

from headwise.errors import ConfigError
from headwise.runtime.client.local_engine import LocalEngine
from headwise.runtime.engine.core import EngineCore
from headwise.runtime.protocol.request import GenerationResult

pytestmark = pytest.mark.model

TOKENS = 8
"""Of a demo model; of a tiny one all 64 of the reference."""
PATIENT: dict[str, Any] = {"prefetch": "wait_complete", "storage_timeout_s": PATIENCE_S, "load_timeout_s": PATIENCE_S}
"""Of an engine that uses what storage has, however long a busy machine takes to bring it."""


@pytest.fixture(scope="module", params=CACHE_KINDS)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return LoadedModel(request.param)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    """For what is done to storage: it holds blocks of bytes, whatever computed them."""
    return LoadedModel("qwen3")


def long_prompt(loaded: LoadedModel) -> Answer:
    return next(answer for answer in answers(loaded.name) if answer.name == "long_700").first(loaded.tokens(TOKENS))


def serve_greedily(loaded: LoadedModel, engine: EngineCore, answer: Answer) -> GenerationResult:
    sampling = {answer.name: replace(GREEDY, max_tokens=len(answer.output_ids))}
    result = serve(engine, loaded.preprocessor, [answer], sampling)[answer.name]
    assert_same(answer, result.token_ids)
    return result


def run(loaded: LoadedModel, directory: Path, **changes: Any) -> tuple[int, EngineCore]:
    """Serve the long prompt with a new engine, whose tokens must be the reference's; how many were cached."""
    answer = long_prompt(loaded)
    settings = {"block_size": 16, "host_cache": "256MiB", "write_policy": "write_through", **PATIENT, **changes}
    engine, executor = loaded.engine(storage=f"file://{directory}?capacity=1GiB", **settings)
    try:
        result = serve_greedily(loaded, engine, answer)
    finally:
        executor.close()
        loaded.worker.close()
    assert result.usage is not None
    assert engine.cache.host.pool.num_held == 0
    return result.usage.cached_tokens, engine


@pytest.fixture(scope="module")
def left(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine left that nothing went wrong with; to be copied."""
    directory = tmp_path_factory.mktemp("left")
    assert run(tiny, directory)[0] == 0
    return directory


@tiny_cache_kinds()
def test_a_new_engine_is_warm_from_what_the_last_one_left(loaded: LoadedModel, tmp_path: Path) -> None:
    block_size = 16 if loaded.name in MODELS else 64  # the host's tests have tiny models' blocks of 16
    cached, engine = run(loaded, tmp_path, block_size=block_size)
    assert cached == 0
    assert engine.stats()["storage"]["put_blocks"] > 0
    cached, engine = run(loaded, tmp_path, block_size=block_size)
    assert cached > 600
    stats = engine.stats()
    assert stats["storage"]["hit_tokens"] == cached
    assert stats["transfers"]["fetch"]["bytes"] > 0


def test_what_another_layout_left_is_not_found_and_both_are_kept(tiny: LoadedModel, left: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(left, tmp_path / "storage")
    assert run(tiny, directory, block_size=32)[0] == 0
    assert run(tiny, directory)[0] > 600


def segments(directory: Path) -> list[Path]:
    found = [path for path in directory.rglob("*.seg") if path.stat().st_size]
    assert found
    return found


def vanish(directory: Path) -> None:
    shutil.rmtree(directory)


def truncate(directory: Path) -> None:
    """To half of what was written: files are made longer than that."""
    for path in segments(directory):
        written = len(path.read_bytes().rstrip(b"\0"))
        with path.open("r+b") as file:
            file.truncate(written // 2)


def flip_a_bit_everywhere(directory: Path) -> None:
    """One in every 10,000 bytes: in every block, and in some headers."""
    for path in segments(directory):
        data = bytearray(path.read_bytes())
        for at in range(5_000, len(data), 10_000):
            data[at] ^= 0x10
        path.write_bytes(data)


@pytest.mark.parametrize("damage", [vanish, pytest.param(truncate, marks=pytest.mark.soak), flip_a_bit_everywhere])
def test_damaged_storage_is_a_miss_and_serves_again(
    tiny: LoadedModel, left: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    directory = shutil.copytree(left, tmp_path / "storage")
    damage(directory)
    cached, engine = run(tiny, directory)
    assert cached < 600
    if damage is flip_a_bit_everywhere:
        assert engine.stats()["storage"]["missed_blocks"] > 0
    if damage is vanish:
        assert run(tiny, directory)[0] > 600


def refuse_writes(patch: pytest.MonkeyPatch, error: int) -> None:
    """Let the operating system refuse what a disk does that is full, or that may only be read."""

    def refused(*args: object) -> int:
        raise OSError(error, os.strerror(error))

    patch.setattr(os, "pwritev", refused)
    patch.setattr(os, "ftruncate", refused)


@pytest.mark.parametrize("error", [errno.ENOSPC, pytest.param(errno.EROFS, marks=pytest.mark.soak)])
def test_storage_that_cannot_be_written_serves_what_it_has(
    tiny: LoadedModel, left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    refuse_writes(monkeypatch, error)
    assert run(tiny, left)[0] > 600
    cached, engine = run(tiny, tmp_path)
    assert cached == 0
    assert engine.stats()["storage"]["failed_puts"] > 0


def test_the_directory_vanishes_while_an_engine_serves(tiny: LoadedModel, tmp_path: Path) -> None:
    directory = tmp_path / "storage"
    wanted = long_prompt(tiny)
    engine, executor = tiny.engine(
        block_size=16, host_cache="256MiB", write_policy="write_through", storage=f"file://{directory}?capacity=1GiB"
    )
    for turn in range(2):
        serve_greedily(tiny, engine, replace(wanted, name=f"turn {turn}"))
        engine.cache.reset()
        shutil.rmtree(directory, ignore_errors=True)
    executor.close()
    tiny.worker.close()


def test_storage_that_hangs_holds_up_a_request_for_no_longer_than_it_may(tiny: LoadedModel, tmp_path: Path) -> None:
    wanted = long_prompt(tiny)
    engine, executor = tiny.engine(
        block_size=16,
        host_cache="256MiB",
        write_policy="write_through",
        storage=f"file://{tmp_path}?capacity=1GiB",
        prefetch="wait_complete",
        storage_timeout_s=0.5,
    )
    serve_greedily(tiny, engine, wanted)
    engine.cache.reset()
    eventually(lambda: any(path.stat().st_size for path in tmp_path.rglob("*.seg")))  # writing may have stalled, too
    pipes = segments(tmp_path)
    for pipe in pipes:
        pipe.unlink()
        os.mkfifo(pipe)  # to open it for reading takes until somebody writes
    result = serve_greedily(tiny, engine, replace(wanted, name="again"))
    assert result.usage is not None
    assert result.usage.cached_tokens == 0
    assert engine.stats()["storage"]["is_stalled"]
    for pipe in pipes:
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # whoever waits may go on
    executor.close()
    tiny.worker.close()


@pytest.mark.soak
def test_a_mooncake_master_dies_and_comes_back(tiny: LoadedModel) -> None:
    require_mooncake()
    wanted = long_prompt(tiny)
    with Master() as master:
        engine, executor = tiny.engine(
            block_size=16,
            host_cache="256MiB",
            write_policy="write_through",
            storage=f"mooncake://{master.address}?segment=256MiB",
            **PATIENT,
        )
        turns = count()

        def cached() -> int:
            """Tokens that storage has of the prompt, which is served right whatever those are."""
            engine.cache.reset()
            result = serve_greedily(tiny, engine, replace(wanted, name=f"turn {next(turns)}"))
            assert result.usage is not None
            return result.usage.cached_tokens

        assert cached() == 0
        assert cached() > 600
        master.kill()
        assert cached() == 0
        assert engine.stats()["storage"]["failed_puts"] > 0
        master.start()
        eventually(lambda: cached() > 600)
        executor.close()
        tiny.worker.close()


def test_a_storage_that_is_none_is_refused_at_start(tiny: LoadedModel, tmp_path: Path) -> None:
    for url, message in {
        "ftp://host/path": "unknown scheme",
        f"file://{tmp_path}": "gives no capacity",
        f"file://{tmp_path}?capacity=1KiB": "does not hold one block",
        "file://host/path?capacity=1GiB": "no directory of this machine",
        f"file://{tmp_path}?size=1GiB": "capacity",
        "mooncake://": "host and port",
    }.items():
        with pytest.raises(ConfigError, match=message):
            tiny.engine(storage=url, host_cache="64MiB")
    with pytest.raises(ConfigError, match="give host_cache"):
        tiny.engine(storage=f"file://{tmp_path}?capacity=1GiB", host_cache="0")
    with pytest.raises(ConfigError, match="give host_cache"):
        LocalEngine(replace(tiny.config, storage=f"file://{tmp_path}?capacity=1GiB"))
