"""Fields of the configuration: engines, how many there are, of how many ranks, and on which nodes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, Self

from headwise.errors import ConfigError
from headwise.runtime.config.options import option
from headwise.units import parse_pairs


@dataclass(frozen=True)
class FleetOptions:
    """Engines: how many, of how many ranks, and on which nodes"""

    name: str = option("headwise", "Name of the deployment, one per Ray cluster.")
    replicas: int = option(
        1,
        "Number of engines at the start, each a whole copy of the model; at least min_replicas. It stays, unless there "
        "is a target or `headwise scale` sets another.",
        0,
        1024,
    )
    prefill_replicas: int = option(
        0,
        "Of the engines, those that only compute prompts, for others that fetch the blocks: decoding is not held up by "
        "long prompts then. Together with decode_replicas they may be more than replicas says; all others serve whole "
        "requests.",
        0,
        1024,
    )
    decode_replicas: int = option(0, "Of the engines, those that only decode. Needs prefill_replicas.", 0, 1024)
    decode_prompt_tokens: int = option(
        256,
        "Tokens of a prompt, those that are cached not counted, that an engine which only decodes computes itself.",
        0,
    )
    elastic_roles: bool = option(
        False,
        "Let engines change from computing prompts for others to decoding, and back, one at a time, where requests "
        "would have waited less for upscale_delay_s. Changes nothing while there are no engines for prompts.",
    )
    min_replicas: int = option(
        1, "Fewest engines; 0: none while there are no requests, and the first request waits for one.", 0, 1024
    )
    max_replicas: int = option(
        0,
        "Most engines, for `headwise scale`, too, which every client but a tenant's may use; 0: four times "
        "replicas, at least 8. A target needs a limit.",
        0,
        1024,
    )
    target_ttft_s: float = option(
        0.0,
        "Seconds in which nine of ten requests should get their first token: the number of engines follows the load. "
        "0: no such target.",
        0.0,
    )
    target_queue_s: float = option(
        0.0, "Seconds in which nine of ten requests should start, instead of target_ttft_s. 0: no such target.", 0.0
    )
    upscale_delay_s: float = option(15.0, "Seconds for which a target must need more engines before they start.", 0.0)
    downscale_delay_s: float = option(300.0, "Seconds for which fewer engines must be enough before one goes.", 0.0)
    drain_timeout_s: float = option(
        60.0,
        "Seconds in which an engine that goes ends its requests and hands over what only it has cached, to storage or "
        "to other engines; what still runs then goes on elsewhere.",
        0.0,
    )
    tp_size: int = option(
        1,
        "Tensor-parallel workers per engine; must divide the model's KV heads, or be more, up to one for each query "
        "head.",
        1,
        1024,
    )
    context_parallel_size: int = option(
        1,
        "Neighbouring ranks that keep together what each would have a copy of, latents (MLA) and KV heads that ranks "
        "share, token by token in turn: as many times the context fits, and ranks exchange queries in each layer. "
        "Divides tp_size.",
        1,
        64,
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages of a pipeline, of tp_size ranks each, among which an engine's layers are dealt: each has a part of the "
        "weights and of every block, and gives the next one what its layers make of a step, while it begins another.",
        1,
        64,
    )
    prefill_tp_size: int = option(0, "tp_size of engines that only compute prompts; 0: tp_size.", 0, 1024)
    decode_tp_size: int = option(0, "tp_size of engines that only decode; 0: tp_size.", 0, 1024)
    engine_cpus: float = option(
        0.0,
        "CPUs that an engine with its ranks asks Ray for, and shares among its ranks' threads; 0: 0.1 and 0.2 for each "
        "rank, and the ranks compute with all cores of their node.",
        0.0,
        65536.0,
    )
    engine_resources: str = option(
        "", "Custom resources of Ray that each engine asks for, besides CPUs and GPUs: NAME=AMOUNT,..."
    )
    node_labels: str = option("", "Labels that a Ray node must have to run engines: KEY=VALUE,...; empty: any node.")
    placement: Literal["spread", "pack"] = option(
        "spread",
        "Nodes that engines go to: those with the fewest engines of this deployment, so that a lost node takes few "
        "of them, or those with the most, so that other nodes stay free.",
    )
    tp_placement: Literal["auto", "node", "any"] = option(
        "auto",
        "Nodes that the ranks of one engine are on, or with pipeline_parallel_size those of one stage: node is one "
        "node; any is as few as have room, on GPUs alone, which NCCL connects then; auto is any where there are GPUs, "
        "and no node has one for each rank, else node. Stages are on several nodes with any, and where no node holds "
        "all of them.",
    )
    rebalance: Literal["auto", "always", "never"] = option(
        "auto",
        "Whether engines move, one at a time, when a node has come over which they spread better; auto is only where "
        "engines of a node share its cores: on CPUs, without engine_cpus.",
    )
    engine_timeout_s: float = option(
        20.0, "Seconds after which an engine that is alive but does nothing is replaced.", 1.0
    )
    step_timeout_s: float = option(
        120.0,
        "Seconds after which a step that does not end counts as a dead worker; much sooner, but not before 15 s, once "
        "it is known how long such steps take.",
        1.0,
    )
    start_timeout_s: float = option(600.0, "Seconds that workers may take to load the model.", 1.0)

    def _check_fleet(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ConfigError(f"name must be letters, digits, '.', '_' or '-', got {self.name!r}")
        self._check_scaling()
        self._check_ranks()
        self._check_placement()

    def _check_scaling(self) -> None:
        if self.target_ttft_s and self.target_queue_s:
            raise ConfigError("give one of target_ttft_s and target_queue_s, not both: they say what engines are for")
        if self.follows_load and not self.max_replicas:
            raise ConfigError(
                "target_ttft_s and target_queue_s need max_replicas: the most engines that may be started"
            )
        if self.max_replicas and self.max_replicas < self.first_replicas:
            raise ConfigError(
                f"max_replicas {self.max_replicas} must be at least min_replicas {self.min_replicas} and replicas "
                f"{self.replicas}, and prefill_replicas with decode_replicas, {self.prefill_replicas} and "
                f"{self.decode_replicas}"
            )
        if self.decode_replicas and not self.prefill_replicas:
            raise ConfigError(f"decode_replicas {self.decode_replicas} needs prefill_replicas 1 at least")
        if self.prefill_replicas and self.first_replicas <= self.prefill_replicas:
            raise ConfigError(
                f"prefill_replicas {self.prefill_replicas} compute prompts for others: give decode_replicas, or more "
                f"replicas than {self.first_replicas}"
            )
        if self.min_replicas and not self.replicas:
            raise ConfigError(f"replicas 0 needs min_replicas 0, got {self.min_replicas}")

    def _check_ranks(self) -> None:
        parts = self.context_parallel_size
        if parts > 1 and len(self.tp_sizes) > 1:
            raise ConfigError(
                f"context_parallel_size {parts} needs engines of equally many ranks, got {self.tp_sizes}: leave out "
                "prefill_tp_size and decode_tp_size"
            )
        if self.tp_size % parts:
            raise ConfigError(f"context_parallel_size {parts} does not divide tp_size {self.tp_size}")

    def _check_placement(self) -> None:
        parse_pairs(self.node_labels, "node_labels such as zone=a,ray.io/accelerator-type=H100")
        for name, amount in self.custom_resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ConfigError(f"engine_resources has {name}: CPUs are engine_cpus, and each rank takes a GPU")
            if not 0.0001 <= amount < math.inf or (amount > 1 and amount % 1):
                raise ConfigError(
                    f"engine_resources {name}={amount:g}: Ray takes whole numbers, and fractions of one from 0.0001 on"
                )

    @property
    def follows_load(self) -> bool:
        """Whether the number of engines follows the load."""
        return bool(self.target_ttft_s or self.target_queue_s)

    @property
    def most_replicas(self) -> int:
        """The most engines that there may be: any client can ask for them."""
        return self.max_replicas or min(1024, max(8, 4 * self.first_replicas))

    @property
    def first_replicas(self) -> int:
        """Engines that a deployment starts with."""
        return max(self.replicas, self.min_replicas, self.prefill_replicas + self.decode_replicas)

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Those that engines of the deployment have or may get, ascending."""
        return tuple(sorted({self.tp_size, self.prefill_tp_size or self.tp_size, self.decode_tp_size or self.tp_size}))

    def of_ranks(self, tp_size: int) -> Self:
        """The configuration of one engine, which has so many ranks; `tp_sizes` stay what they are.

        Raises:
            ConfigError: no engine has so many.
        """
        if tp_size not in self.tp_sizes:
            raise ConfigError(f"engines have {' or '.join(map(str, self.tp_sizes))} ranks each, got {tp_size}")
        others = [size for size in self.tp_sizes if size != tp_size]
        prefill, decode = [*others, 0, 0][:2]
        return replace(self, tp_size=tp_size, prefill_tp_size=prefill, decode_tp_size=decode)

    @property
    def ranks(self) -> int:
        """Workers of an engine."""
        return self.tp_size * self.pipeline_parallel_size

    @property
    def first_ranks(self) -> int:
        """Workers of the engines that a deployment starts with."""
        prefill, decode = self.prefill_replicas, self.decode_replicas
        mixed = max(1, self.first_replicas) - prefill - decode
        sizes = self.tp_size, self.prefill_tp_size or self.tp_size, self.decode_tp_size or self.tp_size
        engines = sum(count * size for count, size in zip((mixed, prefill, decode), sizes, strict=True))
        return engines * self.pipeline_parallel_size

    @property
    def custom_resources(self) -> dict[str, float]:
        """Of `engine_resources`, by name."""
        example = "engine_resources such as license=1,fast_disk=0.5"
        pairs = parse_pairs(self.engine_resources, example)
        try:
            return {name: float(amount) for name, amount in pairs.items()}
        except ValueError:
            raise ConfigError(f"engine_resources {self.engine_resources!r} has no numbers; write {example}") from None
