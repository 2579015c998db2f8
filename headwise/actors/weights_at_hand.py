"""That a node has the weights that it is to load, although they are only at another one."""

from __future__ import annotations

from headwise.actors.node_files import find_directory
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.new_weights import check_places, directories_of
from headwise.runtime.loader.directory_copies import DirectoryCopies


class WeightsAtHand:
    """Those that a process of this node needs, where the configuration lets it copy them; else it does nothing."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._copies = DirectoryCopies(config.weights_places, find_directory, config.start_timeout_s)

    def have(self, model: str, adapters: str | None) -> None:
        """Return when they are here. Raises `ModelError` where they cannot be had, and `ConfigError` where they may
        not."""
        check_places(self._config, model, adapters)
        if self._config.copy_weights:
            for directory in directories_of(self._config, model, adapters):
                self._copies.have(directory)

    def keep(self, model: str, adapters: str | None) -> None:
        """No others are needed from now on."""
        if self._config.copy_weights:
            self._copies.keep(directories_of(self._config, model, adapters))

    def let_go(self) -> None:
        """None are."""
        if self._config.copy_weights:
            self._copies.keep(())
