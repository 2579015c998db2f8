"""The one configuration object. Every field is a CLI flag and a YAML key of the same name."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headwise.errors import ConfigError
from headwise.runtime.config.adapters import parse_adapters
from headwise.runtime.config.addresses import check_advertised, is_loopback, parse_ports
from headwise.runtime.config.http import check_collector, check_http
from headwise.units import parse_bytes, parse_pairs

CPU_KV_CACHE = "512MiB"

FEWEST_TOKENS = 64
"""That a cache block has where ``block_size`` is ``auto``; which models need more, `choose_block_size` says."""

FEWEST_OWN_TOKENS = 16
"""The same that a rank has of it, where ranks keep tokens together: kernels read neighbours side by side."""


def fewest_tokens(parts: int) -> int:
    """That a block has where ``block_size`` is ``auto`` and so many ranks keep its tokens together."""
    return -(-max(FEWEST_TOKENS, FEWEST_OWN_TOKENS * parts) // parts) * parts


_CPU_CHOICES = {
    "tensor_ops": ("numba", "paddle", "numpy"),
    "kernels": ("numba", "reference"),
    "dtype": ("float32", "bfloat16"),
    "weights_dtype": ("float32", "bfloat16", "int8", "int4", "gguf"),
    "kv_dtype": ("float32", "bfloat16", "int8", "float8_e4m3fn", "int4"),
}
_CUDA_CHOICES = {"tensor_ops": ("cupy", "paddle"), "kernels": ("cuda",)}
"""What may be chosen besides auto, by device; the rest is free."""

_FLOAT32_OPS = ("paddle", "numpy")
"""Tensor operations that compute in nothing else on a CPU."""


def _option(default: Any, text: str, low: float = -math.inf, high: float = math.inf, *, is_secret: bool = False) -> Any:
    return field(default=default, repr=not is_secret, metadata={"help": text, "low": low, "high": high})


@dataclass(frozen=True)
class EngineConfig:
    """How a deployment serves a model. Raises `ConfigError` on values that cannot work."""

    model: str = _option(
        "smollm2-135m",
        "Model to serve: a demo alias (smollm2-135m, gemma3-270m), a GGUF file, a Hugging Face directory, "
        "or hf:organisation/name.",
    )
    name: str = _option("headwise", "Name of the deployment, one per Ray cluster.")
    host: str = _option("127.0.0.1", "Address that clients connect to; 0.0.0.0 listens on every interface.")
    port: int = _option(8700, "Port that clients connect to; 0 takes a free one.", 0, 65535)
    engine_ports: str = _option(
        "",
        "Ports FIRST-LAST of a node, of which each engine there takes a free one, for firewalls and port mappings; "
        "empty: any free port. Clients that cannot reach an engine go through the scheduler's port.",
    )
    advertise_host: str = _option(
        "",
        "Address or name that clients are told instead of a node's own, where NAT or a mapping to the same ports lies "
        "between; empty: the node's own.",
    )
    http: int = _option(
        0,
        "Port of OpenAI's API over HTTP: at host with API keys or insecure, at 127.0.0.1 otherwise; 0: none.",
        0,
        65535,
    )
    http_servers: int = _option(1, "Processes that serve HTTP, all at the same port.", 1, 64)
    otlp_endpoint: str = _option(
        "", "OpenTelemetry collector that gets a span of each HTTP request, such as http://localhost:4318; empty: none."
    )
    api_key: str = _option(
        "",
        "A key that clients must have, over HTTP and ZeroMQ; others on the machine can read it in the command line.",
        is_secret=True,
    )
    api_key_file: str = _option("", "File of such keys, one a line; empty lines and those that begin with # are none.")
    server_key_file: str = _option(
        "",
        "File of the secret key by which clients over ZeroMQ know the deployment, made if it is not there; empty: a "
        "new key at each start.",
    )
    insecure: bool = _option(
        False, "Serve at host without keys, where none are given: whoever reaches the ports may use them."
    )
    http_cert: str = _option("", "PEM file of the certificate (chain) with which HTTP is encrypted; empty: it is not.")
    http_key: str = _option("", "PEM file of its key.")
    http_max_body: str = _option("16MiB", "Largest body of an HTTP request.")
    chat_template: str = _option(
        "",
        "File of a Jinja template for chats, instead of the model's own; on every node that runs the scheduler or HTTP "
        "servers. Empty: the model's own.",
    )
    adapters: str = _option(
        "",
        "LoRA adapters in PEFT's format that requests may ask for: NAME=DIRECTORY,...; on every node. Empty: none.",
    )
    image_encoders: int = _option(
        0,
        "Processes that encode images of chats, for models whose vision tower is served; they load its weights. 0: "
        "images are refused. Needs Pillow: `pip install 'headwise[images]'`.",
        0,
        64,
    )
    image_encoder_cpus: float = _option(
        0.0,
        "CPUs that each of them asks Ray for, and computes with; 0: 0.1, and it computes with all cores of its node.",
        0.0,
        65536.0,
    )
    image_encoder_gpus: float = _option(
        0.0,
        "Part of a GPU that each of them asks Ray for, and computes on; 0: none, it computes on CPU cores. It is of no "
        "GPU that an engine has. Needs device cuda.",
        0.0,
        1.0,
    )
    image_cache: str = _option(
        "1GiB", "Memory of each of them for what it has made of images, so that none is encoded twice; 0: none."
    )
    tool_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3",
        "mistral",
        "granite",
        "nemotron",
        "gpt_oss",
        "qwen3_coder",
        "glm45",
        "minimax_m2",
        "seed_oss",
        "kimi_k2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
    ] = _option("auto", "How the model writes calls of tools, for HTTP; auto is what its chat template contains.")
    reasoning_parser: Literal["auto", "none", "think", "seed_oss", "gpt_oss"] = _option(
        "auto", "How the model marks what it thinks before it answers, for HTTP; auto is what its template contains."
    )
    replicas: int = _option(
        1,
        "Number of engines at the start, each a whole copy of the model; at least min_replicas. It stays, unless there "
        "is a target or `headwise scale` sets another.",
        0,
        1024,
    )
    prefill_replicas: int = _option(
        0,
        "Of the engines, those that only compute prompts, for others that fetch the blocks: decoding is not held up by "
        "long prompts then. Together with decode_replicas they may be more than replicas says; all others serve whole "
        "requests.",
        0,
        1024,
    )
    decode_replicas: int = _option(0, "Of the engines, those that only decode. Needs prefill_replicas.", 0, 1024)
    decode_prompt_tokens: int = _option(
        256,
        "Tokens of a prompt, those that are cached not counted, that an engine which only decodes computes itself.",
        0,
    )
    elastic_roles: bool = _option(
        False,
        "Let engines change from computing prompts for others to decoding, and back, one at a time, where requests "
        "would have waited less for upscale_delay_s. Changes nothing while there are no engines for prompts.",
    )
    min_replicas: int = _option(
        1, "Fewest engines; 0: none while there are no requests, and the first request waits for one.", 0, 1024
    )
    max_replicas: int = _option(
        0,
        "Most engines, for `headwise scale`, too, which every client may use; 0: four times replicas, at least 8. A "
        "target needs a limit.",
        0,
        1024,
    )
    target_ttft_s: float = _option(
        0.0,
        "Seconds in which nine of ten requests should get their first token: the number of engines follows the load. "
        "0: no such target.",
        0.0,
    )
    target_queue_s: float = _option(
        0.0, "Seconds in which nine of ten requests should start, instead of target_ttft_s. 0: no such target.", 0.0
    )
    upscale_delay_s: float = _option(15.0, "Seconds for which a target must need more engines before they start.", 0.0)
    downscale_delay_s: float = _option(300.0, "Seconds for which fewer engines must be enough before one goes.", 0.0)
    drain_timeout_s: float = _option(
        60.0,
        "Seconds in which an engine that goes ends its requests and hands over what only it has cached, to storage or "
        "to other engines; what still runs then goes on elsewhere.",
        0.0,
    )
    tp_size: int = _option(
        1,
        "Tensor-parallel workers per engine; must divide the model's KV heads, or be more, up to one for each query "
        "head.",
        1,
        1024,
    )
    context_parallel_size: int = _option(
        1,
        "Neighbouring ranks that keep together what each would have a copy of, latents (MLA) and KV heads that ranks "
        "share, token by token in turn: as many times the context fits, and ranks exchange queries in each layer. "
        "Divides tp_size.",
        1,
        64,
    )
    prefill_tp_size: int = _option(0, "tp_size of engines that only compute prompts; 0: tp_size.", 0, 1024)
    decode_tp_size: int = _option(0, "tp_size of engines that only decode; 0: tp_size.", 0, 1024)
    pipeline_parallel_size: int = _option(
        1,
        "Stages of a pipeline, of tp_size ranks each, among which an engine's layers are dealt: each has a part of the "
        "weights and of every block, and gives the next one what its layers make of a step, while it begins another.",
        1,
        64,
    )
    engine_cpus: float = _option(
        0.0,
        "CPUs that an engine with its ranks asks Ray for, and shares among its ranks' threads; 0: 0.1 and 0.2 for each "
        "rank, and the ranks compute with all cores of their node.",
        0.0,
        65536.0,
    )
    engine_resources: str = _option(
        "", "Custom resources of Ray that each engine asks for, besides CPUs and GPUs: NAME=AMOUNT,..."
    )
    node_labels: str = _option("", "Labels that a Ray node must have to run engines: KEY=VALUE,...; empty: any node.")
    placement: Literal["spread", "pack"] = _option(
        "spread",
        "Nodes that engines go to: those with the fewest engines of this deployment, so that a lost node takes few "
        "of them, or those with the most, so that other nodes stay free.",
    )
    tp_placement: Literal["auto", "node", "any"] = _option(
        "auto",
        "Nodes that the ranks of one engine are on, or with pipeline_parallel_size those of one stage: node is one "
        "node; any is as few as have room, on GPUs alone, which NCCL connects then; auto is any where there are GPUs, "
        "and no node has one for each rank, else node. Stages are on several nodes with any, and where no node holds "
        "all of them.",
    )
    rebalance: Literal["auto", "always", "never"] = _option(
        "auto",
        "Whether engines move, one at a time, when a node has come over which they spread better; auto is only where "
        "engines of a node share its cores: on CPUs, without engine_cpus.",
    )
    device: Literal["auto", "cpu", "cuda"] = _option(
        "auto", "Where workers compute: on a GPU each, or on CPU cores; auto is cuda where all ranks can have a GPU."
    )
    tensor_ops: Literal["auto", "numba", "paddle", "numpy", "cupy"] = _option(
        "auto",
        "Framework behind the model's tensor operations; auto is cupy on a GPU, and numba, our own kernels, on a "
        "CPU. There, paddle and numpy compute in float32 only.",
    )
    kernels: Literal["auto", "numba", "reference", "cuda"] = _option(
        "auto",
        "Attention kernels; auto is cuda on a GPU, else numba. reference is plain NumPy, slow and the definition of "
        "what is right.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto",
        "Of weights and activations; auto is bfloat16 on a GPU and on a CPU that multiplies it natively, else float32. "
        "A CPU has no float16.",
    )
    weights_dtype: Literal["auto", "float32", "bfloat16", "int8", "int4", "gguf", "fp8"] = _option(
        "auto",
        "Of weights in memory; auto is that of the activations. int8 has a scale for each 32 numbers. int4 computes "
        "from the codes of 4 bits of a checkpoint by awq, gptq or compressed-tensors, gguf from a GGUF file's own "
        "blocks; what these cannot compute from is bfloat16 on a CPU, of dtype on a GPU. fp8 computes from an FP8 "
        "checkpoint's own codes, on a GPU.",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "int4"] = _option(
        "auto",
        "Of cached keys and values; auto is that of the activations. int8 and float8_e4m3fn are quantised, with a "
        "scale per token and head; int4 with a scale and a minimum per 32 elements. A CPU has no float16.",
    )
    cuda_graphs: bool = _option(
        True, "Record steps on a GPU as CUDA graphs at start: a decode step as one, prefill as one for each layer."
    )
    prefill_tma: bool = _option(
        True,
        "On GPUs of compute capability 9.0 on, let the tensor memory accelerator bring a prompt's keys and values, "
        "where heads are 128 or 256 numbers that the cache has as they are.",
    )
    overlap_kernels: bool = _option(
        False,
        "On GPUs of compute capability 9.0 on, let kernels begin before those in front of them have ended, and read "
        "weights meanwhile; products of up to 16 rows are headwise's own then. Not measured yet.",
    )
    one_shot_all_reduce: bool = _option(
        True,
        "Sum small tensors of ranks on GPUs in one launch, by memory that they share, where they can: else all go by "
        "NCCL.",
    )
    prefill_graphs: int = _option(
        -1,
        "Most tokens of a step that runs by prefill's graphs, padded to one of a few sizes: of larger ones the GPU "
        "takes longer than the host. 0: none does; -1: by an estimate for the model and the card, or 1,024 where "
        "there is none.",
        -1,
        65536,
    )
    cpu_threads: int = _option(0, "Threads per worker on a CPU; 0 shares the machine's cores between ranks.", 0, 1024)
    block_size: int | Literal["auto"] = _option(
        "auto",
        "Tokens per cache block; auto is 64, or 128 for models whose recurrent states fit badly beside blocks of 64 "
        "tokens: by the model and kv_dtype alone, so that engines of any number of ranks agree. With "
        "context_parallel_size it is at least 16 times that, and a multiple of it.",
        1,
        4096,
    )
    kv_cache: str = _option(
        "auto",
        "Memory of each worker's block pool, such as 8GiB; auto is what gpu_memory_utilization leaves on a GPU, and "
        "512MiB on a CPU, which are taken from the system at start.",
    )
    gpu_memory_utilization: float = _option(
        0.9, "Share of a GPU's memory that a worker with kv_cache auto takes in all, weights included.", 0.05, 0.99
    )
    host_cache: str = _option(
        "auto",
        "Host memory of each worker for blocks that left the device, and for other engines to fetch, such as 8GiB; 0: "
        "none. auto is 0 without peer_loads or with max_replicas 1, and else, as there may be several engines, as much "
        "as the block pool, and at most an eighth of a node's memory for all of its engines.",
    )
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = _option(
        "write_through_selective",
        "When a block is copied to the host: once it is computed, once it was computed or served "
        "write_through_threshold times, or once it is about to be evicted from the device.",
    )
    write_through_threshold: int = _option(2, "Uses of a block that make write_through_selective copy it.", 1)
    load_timeout_s: float = _option(
        5.0,
        "Seconds a step waits for a block to come from the host, and a request for another engine's blocks while none "
        "come, of two minutes in all; then it is computed anew.",
        0.001,
    )
    storage: str = _option(
        "",
        "Where blocks are kept beyond the deployment's life and shared between engines: "
        "file:///path?capacity=50GiB or mooncake://host:port; empty: nowhere. Needs host_cache.",
    )
    prefetch: Literal["best_effort", "wait_complete", "timeout"] = _option(
        "timeout",
        "Whether a request waits for what storage has of its prefix: no longer than it queues anyway, until all of "
        "it is there, or for at most prefetch_timeout_s.",
    )
    prefetch_timeout_s: float = _option(2.0, "Seconds that prefetch=timeout waits.", 0.0)
    storage_timeout_s: float = _option(
        10.0, "Seconds after which storage that does not answer is not waited for, nor used until it does.", 0.001
    )
    peer_loads: bool = _option(
        True,
        "Engines fetch from each other what they lack of a request's prefix, where that is faster than computing it. "
        "Needs host_cache, which there is by itself, prefix_caching, routing cache_aware, and no max_replicas 1.",
    )
    peer_transports: str = _option(
        "auto",
        "How engines read each other's caches: some of cuda_ipc,shared_memory,nixl,mooncake,tcp, the best of which "
        "that leads from one to the other is used; cuda_ipc is for what is on GPUs alone, and nixl reads that, too. "
        "auto is cuda_ipc on GPUs, shared_memory,tcp, and where there are RDMA devices what is installed for them; "
        "none.",
    )
    peer_plain: bool = _option(
        False,
        "Let nixl and mooncake of peer_transports, which neither encrypt nor authenticate, be used where the "
        "deployment is encrypted.",
    )
    peer_ports: str = _option(
        "",
        "Ports FIRST-LAST of a node, of which each worker there takes a free one for peer_transports tcp, four for "
        "mooncake, and nixl those of TCP, for firewalls; empty: any free port.",
    )
    head_grouping: Literal["auto", "per_head_index"] = _option(
        "auto", "How heads are packed into groups: by policy, or one group per KV head index."
    )
    head_pattern: str = _option(
        "",
        "File of scores per layer and KV head, DuoAttention's TSV or the JSON of `headwise calibrate`: the heads "
        "that score lowest see a sink and a window only. Empty: attention as the model defines it.",
    )
    sparsity: float = _option(0.5, "Share of heads that head_pattern limits to sink and window.", 0.0, 1.0)
    sink: int = _option(64, "First tokens that heads limited by head_pattern always see.", 0)
    window: int = _option(256, "Most recent tokens that heads limited by head_pattern see.", 1)
    prefix_caching: bool = _option(True, "Keep finished blocks and reuse them for requests with the same prefix.")
    checkpoint_tokens: int = _option(
        8192,
        "Tokens of a long prompt after each of which a checkpoint of recurrent states is kept, in models that have "
        "them; 0: only at a prompt's end, and where prompts were found to part.",
        0,
    )
    recycling: bool = _option(
        True,
        "Give a window head's blocks back once no query can see them; off: when the request ends, to compare.",
    )
    max_model_len: int = _option(0, "Most tokens of a sequence, prompt and output; 0 is the model's own limit.", 0)
    max_num_seqs: int = _option(0, "Most sequences in one step; 0: 256 on a GPU, 64 on a CPU.", 0, 65536)
    max_batched_tokens: int = _option(
        0,
        "Token budget of a step, and of one prompt in all steps in flight: longer ones are computed in chunks. 0: 8192 "
        "on a GPU, 512 on a CPU, with `image_encoders` 576: one image of Gemma 4 is 280 tokens.",
        0,
    )
    max_queued: int = _option(4096, "Most requests waiting in the scheduler, and in an engine; more are refused.", 1)
    tokenizer_processes: int = _option(
        2, "Processes that tokenise for the scheduler; of several, one is for short prompts only.", 1, 64
    )
    engine_queue: int = _option(
        64, "Requests waiting in an engine from which on it gets no more; they wait in the scheduler.", 1
    )
    routing: Literal["cache_aware", "least_loaded", "round_robin"] = _option(
        "cache_aware",
        "Which engine a request goes to: where it is expected to start first, given what each has cached of its "
        "prompt; the one with the fewest requests; or each in turn.",
    )
    index_blocks: int = _option(
        4_000_000, "Most blocks that the index of all engines keeps; the least recently used are forgotten.", 1
    )
    index_timeout_s: float = _option(
        0.1, "Seconds that a request waits for what the index knows of it; then it is routed without.", 0.001
    )
    secure: bool = _option(
        False,
        "Encrypt ZeroMQ's connections (CURVE): clients need the server's key and an API key. So it is anyway with API "
        "keys, and where host is no loopback address, unless insecure.",
    )
    engine_timeout_s: float = _option(
        20.0, "Seconds after which an engine that is alive but does nothing is replaced.", 1.0
    )
    front_timeout_s: float = _option(
        15.0, "Seconds after which a scheduler or an index that is alive but does nothing is replaced.", 5.0
    )
    standby: bool = _option(
        True, "Keep a second scheduler ready, which takes the place of the first one when that dies or hangs."
    )
    failover_timeout_s: float = _option(
        1.5,
        "Seconds after which a scheduler that is alive but does nothing is replaced by the one that stands by, if that "
        "answers meanwhile; the index after twice as many.",
        0.5,
    )
    owner_timeout_s: float = _option(
        30.0,
        "Seconds after which the owner of a detached deployment is started again if the scheduler hears nothing of it.",
        5.0,
    )
    async_scheduling: bool = _option(True, "Schedule step n+1 while step n runs.")
    speculation: int = _option(
        0,
        "Most draft tokens of a sequence in a step: speculative decoding by prompt lookup, and by a layer of the model "
        "that drafts (`mtp`), or a head beside it (`draft_model`). Output that is guessed right takes fewer steps and "
        "stays the same; there are drafts where they pay, by what was measured. 0: none.",
        0,
        32,
    )
    mtp: bool = _option(
        True,
        "With `speculation`, draft by the layer that a model has for it (multi-token prediction), if it has one: it "
        "takes a layer's memory and cache, and is written in each step.",
    )
    draft_model: str = _option(
        "",
        "With `speculation`, draft by this EAGLE-3 head, which was made for the model, in place of a layer of its own: "
        "a directory of config.json and safetensors, on every node, or hf:organisation/name. Empty: none.",
    )
    step_timeout_s: float = _option(
        120.0,
        "Seconds after which a step that does not end counts as a dead worker; much sooner, but not before 15 s, once "
        "it is known how long such steps take.",
        1.0,
    )
    start_timeout_s: float = _option(600.0, "Seconds that workers may take to load the model.", 1.0)
    packed_cache: bool = _option(
        True,
        "Keep weights as a CPU's kernels read them in cache_dir, where loading them took over 2 s: the next start maps "
        "the file.",
    )
    cache_dir: str = _option(
        "~/.cache/headwise", "Directory for downloaded and converted models, and for packed weights."
    )

    def __post_init__(self) -> None:
        hints = _hints()
        for f in fields(self):
            _check(f, hints[f.name], getattr(self, f.name))
        if not self.model.strip():
            raise ConfigError("model must name a model; try smollm2-135m")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ConfigError(f"name must be letters, digits, '.', '_' or '-', got {self.name!r}")
        if self.kv_cache != "auto":
            parse_bytes(self.kv_cache)
        if self.host_cache != "auto" and parse_bytes(self.host_cache) and not self.prefix_caching:
            raise ConfigError("host_cache keeps blocks for requests with the same prefix: it needs prefix_caching")
        if self.draft_model and not self.speculation:
            raise ConfigError(
                f"draft_model {self.draft_model} drafts for speculation, which is 0: give speculation 3, or leave "
                "draft_model out"
            )
        parse_bytes(self.image_cache)
        parse_ports(self.engine_ports)
        parse_ports(self.peer_ports, "peer_ports")
        check_advertised(self.advertise_host)
        check_http(self.http, self.port, self.http_cert, self.http_key, parse_bytes(self.http_max_body))
        check_collector(self.otlp_endpoint, self.http)
        self._check_scaling()
        self._check_device()
        self._check_placement()
        self._check_context()
        if self.peer_transports not in ("auto", "none"):
            from headwise.transfer.connectors.names import check_plain  # not for `--help`

            check_plain(self.peer_transports, self.is_encrypted, self.peer_plain)
        if self.storage and not self.host_cache_bytes and not self.chooses_host_cache:
            raise storage_without_host_cache()
        if self.storage:
            from headwise.storage.backends.select import check_storage  # not for `--help`

            check_storage(self.storage)
        if self.head_pattern:
            from headwise.cache_controller.head_pattern import check_streaming  # numpy: not for `--help`

            check_streaming(self.sparsity, self.sink, self.window, self.fewest_block_tokens)

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
        self._check_roles()
        if self.min_replicas and not self.replicas:
            raise ConfigError(f"replicas 0 needs min_replicas 0, got {self.min_replicas}")

    def _check_roles(self) -> None:
        if len(self.tp_sizes) > 1 and self.without_peer_loads:
            raise ConfigError(
                f"prefill_tp_size {self.prefill_tp_size} and decode_tp_size {self.decode_tp_size} beside tp_size "
                f"{self.tp_size} are for engines that fetch blocks from each other, and {self.without_peer_loads}"
            )
        if self.decode_replicas and not self.prefill_replicas:
            raise ConfigError(f"decode_replicas {self.decode_replicas} needs prefill_replicas 1 at least")
        if self.prefill_replicas and self.first_replicas <= self.prefill_replicas:
            raise ConfigError(
                f"prefill_replicas {self.prefill_replicas} compute prompts for others: give decode_replicas, or more "
                f"replicas than {self.first_replicas}"
            )
        if (self.prefill_replicas or self.elastic_roles) and self.without_peer_loads:
            name = "prefill_replicas" if self.prefill_replicas else "elastic_roles"
            raise ConfigError(f"{name} needs engines that fetch blocks from each other, and {self.without_peer_loads}")

    def _check_device(self) -> None:
        """Refuse what the device cannot do, once it is known: ``auto`` is resolved where there are GPUs to count."""
        own = tuple({self.dtype_name} & {"float32", "bfloat16"})
        packed = () if self.tensor_ops == "paddle" else ("int8", "int4", "gguf", "fp8")
        cuda_choices = {**_CUDA_CHOICES, "weights_dtype": (*own, *packed)}
        choices = {"cpu": _CPU_CHOICES, "cuda": cuda_choices}.get(self.device, {})
        for name, allowed in choices.items():
            if getattr(self, name) not in ("auto", *allowed):
                raise ConfigError(
                    f"{name} {getattr(self, name)} does not go with device {self.device}: choose "
                    f"{' or '.join(('auto', *allowed))}"
                )
        if self.device == "cpu" and self.tp_placement == "any" and self.pipeline_parallel_size == 1:
            raise ConfigError(
                "tp_placement any does not go with device cpu: the ranks of one engine share memory there, so all of "
                "them have to be on one node; choose node or auto, or stages by pipeline_parallel_size"
            )
        if self.device == "cpu" and self.tensor_ops in _FLOAT32_OPS and not self.computes_float32:
            name = "dtype" if self.dtype_name != "float32" else "weights_dtype"
            raise ConfigError(
                f"tensor_ops {self.tensor_ops} computes in float32 only, and {name} is {getattr(self, name)}: choose "
                f"tensor_ops numba, or {name} float32"
            )

    def _check_context(self) -> None:
        parts = self.context_parallel_size
        if parts > 1 and len(self.tp_sizes) > 1:
            raise ConfigError(
                f"context_parallel_size {parts} needs engines of equally many ranks, got {self.tp_sizes}: leave out "
                "prefill_tp_size and decode_tp_size"
            )
        if self.tp_size % parts:
            raise ConfigError(f"context_parallel_size {parts} does not divide tp_size {self.tp_size}")
        if self.block_size != "auto" and self.block_size % parts:
            raise ConfigError(
                f"block_size {self.block_size} is no multiple of context_parallel_size {parts}: ranks keep equally "
                f"many tokens of a block; choose {-(-self.block_size // parts) * parts}, or auto"
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

    def _check_placement(self) -> None:
        _ = self.adapter_paths
        parse_pairs(self.node_labels, "node_labels such as zone=a,ray.io/accelerator-type=H100")
        for name, amount in self.custom_resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ConfigError(f"engine_resources has {name}: CPUs are engine_cpus, and each rank takes a GPU")
            if not 0.0001 <= amount < math.inf or (amount > 1 and amount % 1):
                raise ConfigError(
                    f"engine_resources {name}={amount:g}: Ray takes whole numbers, and fractions of one from 0.0001 on"
                )

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Those that engines of the deployment have or may get, ascending."""
        return tuple(sorted({self.tp_size, self.prefill_tp_size or self.tp_size, self.decode_tp_size or self.tp_size}))

    def of_ranks(self, tp_size: int) -> EngineConfig:
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
    def adapter_paths(self) -> dict[str, Path]:
        """Directories of `adapters`, by name; raises ConfigError if they are written wrongly."""
        return parse_adapters(self.adapters, self.model)

    @property
    def custom_resources(self) -> dict[str, float]:
        """Of `engine_resources`, by name."""
        example = "engine_resources such as license=1,fast_disk=0.5"
        pairs = parse_pairs(self.engine_resources, example)
        try:
            return {name: float(amount) for name, amount in pairs.items()}
        except ValueError:
            raise ConfigError(f"engine_resources {self.engine_resources!r} has no numbers; write {example}") from None

    @property
    def http_host(self) -> str:
        """Where HTTP is served: only at loopback, unless there are keys, or it is said to be open to all."""
        return self.host if self.api_key or self.api_key_file or self.insecure else "127.0.0.1"

    @property
    def is_encrypted(self) -> bool:
        """Whether ZeroMQ's connections are, so that clients need keys: where there are some, or where others than this
        machine could connect.
        """
        has_keys = bool(self.api_key or self.api_key_file or self.server_key_file)
        return self.secure or has_keys or not (self.insecure or is_loopback(self.host))

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype_name(self) -> str:
        """Of activations. What ``auto`` is on a CPU, `resolve_device` decides: it is float32 until then."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def weights_dtype_name(self) -> str:
        """Of weights in memory; ``gguf`` is that of each tensor in the file."""
        return self.dtype_name if self.weights_dtype == "auto" else self.weights_dtype

    @property
    def computes_float32(self) -> bool:
        """Whether both weights and activations are float32."""
        return self.dtype_name == self.weights_dtype_name == "float32"

    @property
    def computes_from_blocks(self) -> bool:
        """Whether weights are what a GGUF file has, as it has them."""
        return self.weights_dtype == "gguf"

    @property
    def keeps_codes(self) -> bool:
        """Whether weights that a checkpoint has as integers stay so."""
        return self.weights_dtype in ("int8", "int4")

    @property
    def keeps_fp8(self) -> bool:
        """Whether weights that a checkpoint has as FP8 stay so."""
        return self.weights_dtype == "fp8"

    @property
    def has_packed_weights(self) -> bool:
        """Whether matrices are kept as codes of few bits, with scales."""
        return self.keeps_codes or self.keeps_fp8 or self.computes_from_blocks

    @property
    def kv_dtype_name(self) -> str:
        """Of cached keys and values."""
        return self.dtype_name if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def kv_cache_bytes(self) -> int | None:
        """Of each worker; None if its device is measured first."""
        if self.kv_cache != "auto":
            return parse_bytes(self.kv_cache)
        return None if self.on_gpu else parse_bytes(CPU_KV_CACHE)

    @property
    def fewest_block_tokens(self) -> int:
        """Those of a cache block; where the model is to tell, it may be more."""
        return fewest_tokens(self.context_parallel_size) if self.block_size == "auto" else self.block_size

    @property
    def host_cache_bytes(self) -> int:
        """Of each worker; 0 where ``auto`` was not resolved (`resolve_host_cache`)."""
        return 0 if self.host_cache == "auto" else parse_bytes(self.host_cache)

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
    def longest_prefetch_s(self) -> float:
        """Seconds that a request may be held back for what storage has of its prefix."""
        return self.prefetch_timeout_s if self.prefetch == "timeout" else self.storage_timeout_s

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
    def most_seqs(self) -> int:
        """Most sequences in one step."""
        return self.max_num_seqs or (256 if self.on_gpu else 64)

    @property
    def most_batched_tokens(self) -> int:
        """Token budget of a step."""
        return self.max_batched_tokens or (8192 if self.on_gpu else 576 if self.image_encoders else 512)

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

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser()

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


def storage_without_host_cache() -> ConfigError:
    return ConfigError("storage is reached by way of the host's memory: give host_cache, such as 2GiB")


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


def _check(f: Field[Any], hint: Any, value: Any) -> None:
    """Raise `ConfigError` unless ``value`` is of the field's type and range."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{f.name} must be one of {', '.join(map(str, get_args(hint)))}, got {value!r}")
        return
    hint, words = number_or_words(hint)
    if value in words:
        return
    expected = (int, float) if hint is float else hint
    if not isinstance(value, expected) or (isinstance(value, bool) and hint is not bool):
        got = repr(value) if f.repr else f"a secret {type(value).__name__}"
        raise ConfigError(f"{f.name} must be {' or '.join((getattr(hint, '__name__', hint), *words))}, got {got}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = f.metadata["low"], f.metadata["high"]
        if not low <= value <= high:  # also catches NaN
            limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise ConfigError(f"{f.name} must be {limits}, got {value!r}")


def number_or_words(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """The type of a field, and which words may stand there in place of a number: none of most fields."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, ()
    number, words = get_args(hint)
    return number, get_args(words)


def field_default(f: Field[Any]) -> Any:
    """The default of a config field."""
    return None if f.default is MISSING else f.default
