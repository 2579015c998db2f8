"""The one configuration object. Every field is a CLI flag and a YAML key of the same name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from headwise.errors import ConfigError
from headwise.runtime.config.cache_options import CacheOptions, storage_without_host_cache
from headwise.runtime.config.compute_options import ComputeOptions
from headwise.runtime.config.fleet_options import FleetOptions
from headwise.runtime.config.front_options import FrontOptions
from headwise.runtime.config.options import check_option

GROUPS = (ComputeOptions, CacheOptions, FleetOptions, FrontOptions)
"""Of fields, in their order; each group's docstring is what it is about."""

FEWEST_TOKENS = 64
"""That a cache block has where ``block_size`` is ``auto``; which models need more, `choose_block_size` says."""

FEWEST_OWN_TOKENS = 16
"""The same that a rank has of it, where ranks keep tokens together: kernels read neighbours side by side."""


def fewest_tokens(parts: int) -> int:
    """That a block has where ``block_size`` is ``auto`` and so many ranks keep its tokens together."""
    return -(-max(FEWEST_TOKENS, FEWEST_OWN_TOKENS * parts) // parts) * parts


@dataclass(frozen=True)
class EngineConfig(FrontOptions, FleetOptions, CacheOptions):
    """How a deployment serves a model. Raises `ConfigError` on values that cannot work.

    Groups have their fields, and what can be said of these alone; what is of several groups is said here.
    """

    def __post_init__(self) -> None:
        hints = _hints()
        for f in fields(self):
            check_option(f, hints[f.name], getattr(self, f.name))
        self._check_compute()
        self._check_cache()
        self._check_fleet()
        self._check_front()
        self._check_peers()
        if self.device == "cpu" and self.tp_placement == "any" and self.pipeline_parallel_size == 1:
            raise ConfigError(
                "tp_placement any does not go with device cpu: the ranks of one engine share memory there, so all of "
                "them have to be on one node; choose node or auto, or stages by pipeline_parallel_size"
            )
        parts = self.context_parallel_size
        if self.block_size != "auto" and self.block_size % parts:
            raise ConfigError(
                f"block_size {self.block_size} is no multiple of context_parallel_size {parts}: ranks keep equally "
                f"many tokens of a block; choose {-(-self.block_size // parts) * parts}, or auto"
            )
        if self.storage and not self.host_cache_bytes and not self.chooses_host_cache:
            raise storage_without_host_cache()
        if self.head_pattern:
            from headwise.cache_controller.head_pattern import check_streaming  # numpy: not for `--help`

            check_streaming(self.sparsity, self.sink, self.window, self.fewest_block_tokens)

    def _check_peers(self) -> None:
        """Refuse engines that cannot fetch blocks from each other where they have to."""
        if len(self.tp_sizes) > 1 and self.without_peer_loads:
            raise ConfigError(
                f"prefill_tp_size {self.prefill_tp_size} and decode_tp_size {self.decode_tp_size} beside tp_size "
                f"{self.tp_size} are for engines that fetch blocks from each other, and {self.without_peer_loads}"
            )
        if (self.prefill_replicas or self.elastic_roles) and self.without_peer_loads:
            name = "prefill_replicas" if self.prefill_replicas else "elastic_roles"
            raise ConfigError(f"{name} needs engines that fetch blocks from each other, and {self.without_peer_loads}")
        if self.peer_transports not in ("auto", "none"):
            from headwise.transfer.connectors.names import check_plain  # not for `--help`

            check_plain(self.peer_transports, self.is_encrypted, self.peer_plain)

    @property
    def fewest_block_tokens(self) -> int:
        """Those of a cache block; where the model is to tell, it may be more."""
        return fewest_tokens(self.context_parallel_size) if self.block_size == "auto" else self.block_size

    @property
    def chooses_host_cache(self) -> bool:
        """Whether the start of the deployment chooses a host cache, for engines to fetch blocks from each other."""
        is_read = self.peer_loads and self.prefix_caching and self.routing == "cache_aware" and self.most_replicas > 1
        return self.host_cache == "auto" and is_read and self.peer_transports != "none"

    @property
    def without_peer_loads(self) -> str:
        """Why engines do not fetch blocks from each other; empty: they do."""
        reasons = {
            "peer_loads is off": not self.peer_loads,
            "host_cache is 0": not self.host_cache_bytes and not self.chooses_host_cache,
            "prefix_caching is off": not self.prefix_caching,
            f"routing is {self.routing}": self.routing != "cache_aware",
            "there is one engine at most": self.most_replicas < 2,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def returns_tokens(self) -> bool:
        """Whether a pipeline's last stage gives the first one what it samples, so that the engine can send steps with
        tokens that it does not know yet. Drafts are of known ones."""
        return self.pipeline_parallel_size > 1 and self.async_scheduling and not self.speculation

    @property
    def steps_in_flight(self) -> int:
        """Steps that may be on their way to the workers at once: one in each stage, and one that waits for those."""
        return self.pipeline_parallel_size + 1 if self.async_scheduling else 1

    @property
    def most_batched_tokens(self) -> int:
        """Token budget of a step."""
        return self.max_batched_tokens or (8192 if self.on_gpu else 576 if self.image_encoders else 512)

    @property
    def fair_prompts(self) -> bool:
        """Whether prompts have turns, and do not go in the order in which they came."""
        return self.prompt_order == "fair"

    @property
    def prefill_chunk(self) -> int:
        """Most tokens of one sequence in a step: a prompt's chunks in a stage, and on their way to it, are no more than
        a step's budget."""
        return -(-self.most_batched_tokens // min(2, self.steps_in_flight))

    def batched_tokens_for(self, chunk: int) -> int:
        """The least ``max_batched_tokens`` with chunks of so many tokens."""
        return (chunk - 1) * min(2, self.steps_in_flight) + 1

    @property
    def tokens_in_flight(self) -> int:
        """Most tokens of one sequence in the steps that are on their way together."""
        return self.prefill_chunk * self.steps_in_flight

    @property
    def most_drafts(self) -> int:
        """Most guesses in a step, of all sequences: prompts must not wait for them."""
        return self.most_batched_tokens // 4 if self.speculation else 0

    @property
    def most_sampled(self) -> int:
        """Most tokens that are sampled in a step."""
        return self.most_seqs + min(self.most_drafts, self.speculation * self.most_seqs)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "configuration") -> EngineConfig:
        """Build from a mapping; unknown keys raise `ConfigError` with the nearest known key."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys are {', '.join(known)}"
                raise ConfigError(f"{source}: unknown key {key!r}{hint}")
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path | None, overrides: Mapping[str, Any]) -> EngineConfig:
        """A YAML file's values (``None``: no file) with ``overrides`` on top."""
        values: dict[str, Any] = {}
        if path is not None:
            values = _read_yaml(Path(path))
        return cls.from_dict({**values, **overrides}, source=str(path) if path else "configuration")


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, not {type(data).__name__}")
    return data


@cache
def _hints() -> dict[str, Any]:
    """Of all fields. Made once: they take some milliseconds, and every change to a configuration makes a new one."""
    return get_type_hints(EngineConfig)
