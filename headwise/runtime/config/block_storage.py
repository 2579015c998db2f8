"""The storage behind a deployment's host caches, as its processes open it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from headwise.errors import DeploymentError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard, read_model_card
from headwise.storage.backends.base import BlockStorage, StorageNamespace
from headwise.storage.backends.select import only_of_others, open_storage
from headwise.storage.lookup import StorageLookup


def open_rank_storage(config: EngineConfig, card: ModelCard, rank: int) -> BlockStorage:
    """The storage of one rank's blocks. Raises `ConfigError` if it cannot be opened."""
    return _open(config, card, rank)


def open_lookup(config: EngineConfig, card: ModelCard) -> StorageLookup | None:
    """What tells an engine which blocks all of its ranks have in storage; None where there is no storage.

    Raises `ConfigError` if it cannot be opened.
    """
    if not config.storage:
        return None
    storages = [_open(config, card, rank, may_lend=False) for rank in range(card.plan.ranks)]
    return StorageLookup(storages, len(card.plan.groups))


def _open(config: EngineConfig, card: ModelCard, rank: int, may_lend: bool = True) -> BlockStorage:
    namespace, notes = storage_namespace(card, rank), config.cache_path / "storage-mounts"
    return open_storage(config.storage, namespace, card.layout.block_bytes, may_lend, notes)


def check_agrees(engine: str, own: str, of_scheduler: str) -> None:
    """Raise `DeploymentError` unless an engine's cache blocks are those that the scheduler routes by.

    own, of_scheduler: what `Preprocessor.namespace` is for each
    """
    if own != of_scheduler:
        raise DeploymentError(
            f"{engine} has another model than the scheduler: its blocks are {own}, the scheduler's {of_scheduler}; put "
            "the same files, and the same version of headwise, on all nodes"
        )


@dataclass(frozen=True)
class SharedBlocks:
    """What all ranks of an engine have to agree on, whatever nodes they are on.

    namespace: of rank 0's blocks
    volume:    of storage (`BlockStorage.volume`); empty: there is none, or it is not known to be one for all
    """

    namespace: StorageNamespace
    volume: str


def check_shared(who: str, config: EngineConfig, directory: Path, blocks: SharedBlocks) -> None:
    """Raise `DeploymentError` unless ``who``, on another node than its engine, has the same model in ``directory``, and
    the same storage: an engine asks storage what all of its ranks have there."""
    card = read_model_card(config, directory)
    own = storage_namespace(card, 0)
    if own != blocks.namespace:
        raise DeploymentError(
            f"{who} has another model than its engine: its blocks are {own}, the engine's {blocks.namespace}; put the "
            "same files, and the same version of headwise, on all nodes"
        )
    if not blocks.volume:
        return
    storage = _open(config, card, 0, may_lend=False)
    is_same = storage.volume == blocks.volume
    storage.close()
    if not is_same:
        raise DeploymentError(
            f"storage {config.storage} of {who} is another one than its engine's: ranks on several nodes need storage "
            "that all of them share, such as a network file system or mooncake://; or one node that has room for all"
        )


def foreign_storage(config: EngineConfig, card: ModelCard) -> str | None:
    """A warning if the storage directory has blocks of other models, and none of this one; else None."""
    namespace = storage_namespace(card, 0)
    others = only_of_others(config.storage, namespace)
    if not others:
        return None
    return (
        f"storage {config.storage} has nothing that can be used here: its blocks are of {'; '.join(others)}. They "
        f"count towards its capacity until they are evicted. This deployment's are of {namespace}"
    )


def storage_namespace(card: ModelCard, rank: int) -> StorageNamespace:
    """Whose blocks they are: the model's, with these heads in these slots, on this rank."""
    members = sha256(repr([group.members for group in card.plan.groups]).encode()).hexdigest()[:16]
    return StorageNamespace(card.identity, f"{card.layout_identity}/{members}", rank, card.plan.ranks)
