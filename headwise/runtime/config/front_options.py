"""Fields of the configuration: what clients meet, and which engine their requests go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwise.errors import ConfigError
from headwise.runtime.config.addresses import check_advertised, is_loopback, parse_ports
from headwise.runtime.config.http import check_collector, check_http
from headwise.runtime.config.options import option
from headwise.units import parse_bytes


@dataclass(frozen=True)
class FrontOptions:
    """What clients meet, and which engine their requests go to"""

    host: str = option("127.0.0.1", "Address that clients connect to; 0.0.0.0 listens on every interface.")
    port: int = option(8700, "Port that clients connect to; 0 takes a free one.", 0, 65535)
    engine_ports: str = option(
        "",
        "Ports FIRST-LAST of a node, of which each engine there takes a free one, for firewalls and port mappings; "
        "empty: any free port. Clients that cannot reach an engine go through the scheduler's port.",
    )
    advertise_host: str = option(
        "",
        "Address or name that clients are told instead of a node's own, where NAT or a mapping to the same ports lies "
        "between; empty: the node's own.",
    )
    secure: bool = option(
        False,
        "Encrypt ZeroMQ's connections (CURVE): clients need the server's key and an API key. So it is anyway with API "
        "keys, and where host is no loopback address, unless insecure.",
    )
    insecure: bool = option(
        False, "Serve at host without keys, where none are given: whoever reaches the ports may use them."
    )
    api_key: str = option(
        "",
        "A key that clients must have, over HTTP and ZeroMQ; others on the machine can read it in the command line.",
        is_secret=True,
    )
    api_key_file: str = option(
        "",
        "File of such keys, one a line, and behind a key tenant=NAME, priority=N and share=N, where it is a tenant's; "
        "empty lines and those that begin with # are none.",
    )
    server_key_file: str = option(
        "",
        "File of the secret key by which clients over ZeroMQ know the deployment, made if it is not there; empty: a "
        "new key at each start.",
    )
    http: int = option(
        0,
        "Port of OpenAI's API over HTTP: at host with API keys or insecure, at 127.0.0.1 otherwise; 0: none.",
        0,
        65535,
    )
    http_servers: int = option(1, "Processes that serve HTTP, all at the same port.", 1, 64)
    http_cert: str = option("", "PEM file of the certificate (chain) with which HTTP is encrypted; empty: it is not.")
    http_key: str = option("", "PEM file of its key.")
    http_max_body: str = option("16MiB", "Largest body of an HTTP request.")
    http_operations: bool = option(
        False,
        "Serve operations over HTTP, too, for operators' API keys: adapters that come and go, other weights, sleep, an "
        "empty cache.",
    )
    otlp_endpoint: str = option(
        "", "OpenTelemetry collector that gets a span of each HTTP request, such as http://localhost:4318; empty: none."
    )
    chat_template: str = option(
        "",
        "File of a Jinja template for chats, instead of the model's own; on every node that runs the scheduler or HTTP "
        "servers. Empty: the model's own.",
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
    ] = option("auto", "How the model writes calls of tools, for HTTP; auto is what its chat template contains.")
    reasoning_parser: Literal["auto", "none", "think", "seed_oss", "gpt_oss"] = option(
        "auto", "How the model marks what it thinks before it answers, for HTTP; auto is what its template contains."
    )
    image_encoders: int = option(
        0,
        "Processes that encode images of chats, for models whose vision tower is served; they load its weights. 0: "
        "images are refused. Needs Pillow: `pip install 'headwise[images]'`; for videos `'headwise[videos]'`.",
        0,
        64,
    )
    image_encoder_cpus: float = option(
        0.0,
        "CPUs that each of them asks Ray for, and computes with; 0: 0.1, and it computes with all cores of its node.",
        0.0,
        65536.0,
    )
    image_encoder_gpus: float = option(
        0.0,
        "Part of a GPU that each of them asks Ray for, and computes on; 0: none, it computes on CPU cores. It is of no "
        "GPU that an engine has. Needs device cuda.",
        0.0,
        1.0,
    )
    image_cache: str = option(
        "1GiB", "Memory of each of them for what it has made of images, so that none is encoded twice; 0: none."
    )
    embed_memory: str = option(
        "2GiB",
        "Memory of each engine for embeddings that came with requests, images' among them, until these end; more are "
        "refused meanwhile. A prompt may have 512MiB of them.",
    )
    max_queued: int = option(4096, "Most requests waiting in the scheduler, and in an engine; more are refused.", 1)
    tokenizer_processes: int = option(
        2, "Processes that tokenise for the scheduler; of several, one is for short prompts only.", 1, 64
    )
    engine_queue: int = option(
        64,
        "Requests waiting in an engine from which on it gets no more; they wait in the scheduler, but for a few that "
        "would begin before most of these.",
        1,
    )
    routing: Literal["cache_aware", "least_loaded", "round_robin"] = option(
        "cache_aware",
        "Which engine a request goes to: where it is expected to start first, given what each has cached of its "
        "prompt; the one with the fewest requests; or each in turn.",
    )
    index_blocks: int = option(
        4_000_000, "Most blocks that the index of all engines keeps; the least recently used are forgotten.", 1
    )
    index_timeout_s: float = option(
        0.1, "Seconds that a request waits for what the index knows of it; then it is routed without.", 0.001
    )
    standby: bool = option(
        True, "Keep a second scheduler ready, which takes the place of the first one when that dies or hangs."
    )
    failover_timeout_s: float = option(
        1.5,
        "Seconds after which a scheduler that is alive but does nothing is replaced by the one that stands by, if that "
        "answers meanwhile; the index after twice as many.",
        0.5,
    )
    front_timeout_s: float = option(
        15.0, "Seconds after which a scheduler or an index that is alive but does nothing is replaced.", 5.0
    )
    owner_timeout_s: float = option(
        30.0,
        "Seconds after which the owner of a detached deployment is started again if the scheduler hears nothing of it.",
        5.0,
    )

    def _check_front(self) -> None:
        parse_bytes(self.image_cache, "image_cache")
        parse_bytes(self.embed_memory, "embed_memory")
        parse_ports(self.engine_ports)
        check_advertised(self.advertise_host)
        max_body = parse_bytes(self.http_max_body, "http_max_body")
        check_http(self.http, self.port, self.http_cert, self.http_key, max_body)
        check_collector(self.otlp_endpoint, self.http)
        if self.http_operations and not (self.http and (self.api_key or self.api_key_file)):
            raise ConfigError(
                "http_operations need http, and API keys, by which operators are known: give api_key_file"
            )

    @property
    def embed_memory_bytes(self) -> int:
        return parse_bytes(self.embed_memory, "embed_memory")

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
