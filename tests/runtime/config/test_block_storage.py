"""What ranks on other nodes than their engine's have to share with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gpu.tiny_engine import configuration, write_model

from headwise.errors import DeploymentError
from headwise.runtime.config.block_storage import SharedBlocks, check_shared, open_lookup, storage_namespace
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def shared(config: EngineConfig, model: Path) -> SharedBlocks:
    """As an engine says it."""
    card = read_model_card(config, model)
    lookup = open_lookup(config, card)
    volume = "" if lookup is None else lookup.volume
    if lookup is not None:
        lookup.close()
    return SharedBlocks(storage_namespace(card, 0), volume)


def stored_at(model: Path, directory: Path) -> EngineConfig:
    return configuration(
        model,
        tp_size=2,
        host_cache="1MiB",
        storage=f"file://{directory}?capacity=64MiB",
        cache_dir=str(directory.parent),
    )


def test_ranks_with_the_same_model_and_storage_go_on(model: Path, tmp_path: Path) -> None:
    config = stored_at(model, tmp_path / "storage")
    blocks = shared(config, model)
    assert blocks.volume
    check_shared("rank 1 on node b", config, model, blocks)
    check_shared("rank 1 on node b", replace(config, storage=""), model, replace(blocks, volume=""))


def test_a_directory_of_another_node_s_own_is_refused_and_the_remedy_told(model: Path, tmp_path: Path) -> None:
    blocks = shared(stored_at(model, tmp_path / "a"), model)
    with pytest.raises(
        DeploymentError, match=r"storage file://\S+ of rank 1 on node b is another one than its engine's: .* network"
    ):
        check_shared("rank 1 on node b", stored_at(model, tmp_path / "b"), model, blocks)


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    config = configuration(model, tp_size=2, cache_dir=str(tmp_path))
    blocks = shared(config, model)
    other = replace(blocks, namespace=replace(blocks.namespace, model="another"))
    with pytest.raises(DeploymentError, match=r"rank 1 on node b has another model than its engine: .* same files"):
        check_shared("rank 1 on node b", config, model, other)
