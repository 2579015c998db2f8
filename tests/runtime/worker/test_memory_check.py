"""A deployment that asks for more memory than there is hears of it before its weights are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import write_llama_gguf

from headwise.errors import ConfigError
from headwise.runtime.client.local_engine import LocalEngine
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.worker.memory_check import check_memory
from headwise.transfer.host_memory import memory_limits

HUGE = "1000000TiB"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return resolve_model(str(write_llama_gguf(tmp_path / "tiny.gguf")), tmp_path / "cache")


POOL = f"kv_cache {HUGE} for each of 1 workers: a block pool of [0-9]+ bytes does not fit: .* choose a smaller"
HOST = f"host_cache {HUGE} for each of 1 workers: a host cache of [0-9]+ bytes does not fit: .* choose a smaller"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"kv_cache": HUGE}, POOL), ({"kv_cache": "1MiB", "host_cache": HUGE}, HOST)],
    ids=["kv_cache", "host_cache"],
)
def test_what_does_not_fit_is_named_before_the_model_is_loaded(
    sizes: dict[str, str], message: str, model: Path
) -> None:
    (model / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ConfigError, match=message) as caught:
        LocalEngine(EngineConfig(model=str(model), device="cpu", **sizes))
    assert "\n" not in str(caught.value)


def test_pool_and_host_cache_that_fit_one_by_one_must_fit_together(model: Path) -> None:
    two_thirds = f"{min(limit.bytes for limit in memory_limits()) * 2 // 3 >> 20}MiB"
    config = EngineConfig(model=str(model), device="cpu", kv_cache=two_thirds)
    check_memory(config, read_model_card(config, model))
    both = EngineConfig(model=str(model), device="cpu", kv_cache=two_thirds, host_cache=two_thirds)
    with pytest.raises(ConfigError, match=r"a block pool and host cache of .* bytes does not fit"):
        check_memory(both, read_model_card(both, model))


def test_a_pool_on_a_gpu_takes_nothing_of_the_host(model: Path) -> None:
    on_cpu = EngineConfig(model=str(model), device="cpu", kv_cache=HUGE)
    check_memory(EngineConfig(model=str(model), device="cuda", kv_cache=HUGE), read_model_card(on_cpu, model))
