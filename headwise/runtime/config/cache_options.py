"""Fields of the configuration: what is cached, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwise.errors import ConfigError
from headwise.runtime.config.addresses import parse_ports
from headwise.runtime.config.compute_options import ComputeOptions
from headwise.runtime.config.options import option
from headwise.units import parse_bytes

CPU_KV_CACHE = "512MiB"


@dataclass(frozen=True)
class CacheOptions(ComputeOptions):
    """What is cached, and where"""

    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "int4"] = option(
        "auto",
        "Of cached keys and values; auto is that of the activations. int8 and float8_e4m3fn are quantised, with a "
        "scale per token and head; int4 with a scale and a minimum per 32 elements. A CPU has no float16.",
    )
    block_size: int | Literal["auto"] = option(
        "auto",
        "Tokens per cache block; auto is 64, or 128 for models whose recurrent states fit badly beside blocks of 64 "
        "tokens: by the model and kv_dtype alone, so that engines of any number of ranks agree. With "
        "context_parallel_size it is at least 16 times that, and a multiple of it.",
        1,
        4096,
    )
    kv_cache: str = option(
        "auto",
        "Memory of each worker's block pool, such as 8GiB; auto is what gpu_memory_utilization leaves on a GPU, and "
        "512MiB on a CPU, which are taken from the system at start.",
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of a GPU's memory that a worker with kv_cache auto takes in all, weights included.", 0.05, 0.99
    )
    prefix_caching: bool = option(True, "Keep finished blocks and reuse them for requests with the same prefix.")
    recycling: bool = option(
        True,
        "Give a window head's blocks back once no query can see them; off: when the request ends, to compare.",
    )
    checkpoint_tokens: int = option(
        8192,
        "Tokens of a long prompt after each of which a checkpoint of recurrent states is kept, in models that have "
        "them; 0: only at a prompt's end, and where prompts were found to part.",
        0,
    )
    head_grouping: Literal["auto", "per_head_index"] = option(
        "auto", "How heads are packed into groups: by policy, or one group per KV head index."
    )
    head_pattern: str = option(
        "",
        "File of scores per layer and KV head, DuoAttention's TSV or the JSON of `headwise calibrate`: the heads "
        "that score lowest see a sink and a window only. Empty: attention as the model defines it.",
    )
    sparsity: float = option(0.5, "Share of heads that head_pattern limits to sink and window.", 0.0, 1.0)
    sink: int = option(64, "First tokens that heads limited by head_pattern always see.", 0)
    window: int = option(256, "Most recent tokens that heads limited by head_pattern see.", 1)
    retained_share: float = option(
        0.5,
        "Share of each tier's blocks, in device and host memory, that requests may have kept in place of others "
        "(retain_s, and cache_control and prompt_cache_retention over HTTP); 0: they ask for it in vain.",
        0.0,
        1.0,
    )
    host_cache: str = option(
        "auto",
        "Host memory of each worker for blocks that left the device, and for other engines to fetch, such as 8GiB; 0: "
        "none. auto is 0 without peer_loads or with max_replicas 1, and else, as there may be several engines, as much "
        "as the block pool, and at most an eighth of a node's memory for all of its engines.",
    )
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = option(
        "write_through_selective",
        "When a block is copied to the host: once it is computed, once it was computed or served "
        "write_through_threshold times, or once it is about to be evicted from the device.",
    )
    write_through_threshold: int = option(2, "Uses of a block that make write_through_selective copy it.", 1)
    load_timeout_s: float = option(
        5.0,
        "Seconds a step waits for a block to come from the host, and a request for another engine's blocks while none "
        "come, of two minutes in all; then it is computed anew.",
        0.001,
    )
    storage: str = option(
        "",
        "Where blocks are kept beyond the deployment's life and shared between engines: "
        "file:///path?capacity=50GiB or mooncake://host:port; empty: nowhere. Needs host_cache.",
    )
    prefetch: Literal["best_effort", "wait_complete", "timeout"] = option(
        "timeout",
        "Whether a request waits for what storage has of its prefix: no longer than it queues anyway, until all of "
        "it is there, or for at most prefetch_timeout_s.",
    )
    prefetch_timeout_s: float = option(2.0, "Seconds that prefetch=timeout waits.", 0.0)
    storage_timeout_s: float = option(
        10.0, "Seconds after which storage that does not answer is not waited for, nor used until it does.", 0.001
    )
    peer_loads: bool = option(
        True,
        "Engines fetch from each other what they lack of a request's prefix, where that is faster than computing it. "
        "Needs host_cache, which there is by itself, prefix_caching, routing cache_aware, and no max_replicas 1.",
    )
    peer_transports: str = option(
        "auto",
        "How engines read each other's caches: some of cuda_ipc,shared_memory,nixl,mooncake,tcp, the best of which "
        "that leads from one to the other is used; cuda_ipc is for what is on GPUs alone, and nixl reads that, too. "
        "auto is cuda_ipc on GPUs, shared_memory,tcp, and where there are RDMA devices what is installed for them; "
        "none.",
    )
    peer_plain: bool = option(
        False,
        "Let nixl and mooncake of peer_transports, which neither encrypt nor authenticate, be used where the "
        "deployment is encrypted.",
    )
    peer_ports: str = option(
        "",
        "Ports FIRST-LAST of a node, of which each worker there takes a free one for peer_transports tcp, four for "
        "mooncake, and nixl those of TCP, for firewalls; empty: any free port.",
    )

    def _check_cache(self) -> None:
        if self.kv_cache != "auto":
            parse_bytes(self.kv_cache, "kv_cache")
        if self.host_cache != "auto" and parse_bytes(self.host_cache, "host_cache") and not self.prefix_caching:
            raise ConfigError("host_cache keeps blocks for requests with the same prefix: it needs prefix_caching")
        parse_ports(self.peer_ports, "peer_ports")
        if self.storage:
            from headwise.storage.backends.select import check_storage  # not for `--help`

            check_storage(self.storage)

    @property
    def kv_dtype_name(self) -> str:
        """Of cached keys and values."""
        return self.dtype_name if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def kv_cache_bytes(self) -> int | None:
        """Of each worker; None if its device is measured first."""
        if self.kv_cache != "auto":
            return parse_bytes(self.kv_cache, "kv_cache")
        return None if self.on_gpu else parse_bytes(CPU_KV_CACHE)

    @property
    def host_cache_bytes(self) -> int:
        """Of each worker; 0 where ``auto`` was not resolved (`resolve_host_cache`)."""
        return 0 if self.host_cache == "auto" else parse_bytes(self.host_cache, "host_cache")

    @property
    def longest_prefetch_s(self) -> float:
        """Seconds that a request may be held back for what storage has of its prefix."""
        return self.prefetch_timeout_s if self.prefetch == "timeout" else self.storage_timeout_s


def storage_without_host_cache() -> ConfigError:
    return ConfigError("storage is reached by way of the host's memory: give host_cache, such as 2GiB")
