"""The configuration object, its YAML files, and the page that documents it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import ConfigError
from headwise.runtime.cli.options import config_reference
from headwise.runtime.config.addresses import parse_ports
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.host_cache import NodeRoom, resolve_host_cache
from headwise.units import parse_bytes

ROOT = Path(__file__).parents[3]


def test_the_configuration_page_is_the_one_the_code_generates() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert config_reference() in page, "run `headwise info --config-reference` and paste it into docs/configuration.md"


def test_an_image_of_gemma_4_is_one_chunk_where_images_are_encoded() -> None:
    assert EngineConfig(image_encoders=1).prefill_chunk >= 280
    assert EngineConfig().prefill_chunk == EngineConfig(image_encoders=1, max_batched_tokens=512).prefill_chunk == 256


def test_every_field_is_explained_in_the_reference() -> None:
    reference = config_reference()
    for f in fields(EngineConfig):
        assert f.metadata["help"], f"{f.name} has no help text"
        assert f"`{f.name}` | `--{f.name.replace('_', '-')}`" in reference


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "deploy").glob("*.yaml")))
def test_the_deployment_files_are_valid(name: str) -> None:
    assert EngineConfig.load(ROOT / "deploy" / name, {}).model


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: gemma3-270m\nport: 9000\nblock_size: 32\n")
    config = EngineConfig.load(path, {"port": 9001})
    assert (config.model, config.port, config.block_size) == ("gemma3-270m", 9001, 32)
    assert config.replicas == EngineConfig().replicas


def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("blocksize: 32\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: unknown key 'blocksize'; did you mean 'block_size'\?"):
        EngineConfig.load(path, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "is not valid YAML"),
        ("- a\n- b\n", "must hold a mapping of keys to values, not list"),
        ("", "must hold a mapping of keys to values, not NoneType"),
        ("port: '8700'\n", "port must be int, got '8700'"),
        ("port: true\n", "port must be int, got True"),
        ("prefix_caching: 1\n", "prefix_caching must be bool, got 1"),
        ("block_size: '64'\n", "block_size must be int or auto, got '64'"),
        ("block_size: true\n", "block_size must be int or auto, got True"),
        ("block_size: 0\n", "block_size must be from 1 to 4096, got 0"),
        ("port: 70000\n", "port must be from 0 to 65535, got 70000"),
        ("step_timeout_s: .nan\n", "step_timeout_s must be at least 1, got nan"),
        ("device: gpu\n", "device must be one of auto, cpu, cuda, got 'gpu'"),
        ("kv_cache: 8 parsecs\n", "kv_cache '8 parsecs' is not a size; write a number and a unit"),
        ("embed_memory: much\n", "embed_memory 'much' is not a size"),
        ("name: a/b\n", "name must be letters, digits"),
        ("model: ' '\n", "model must name a model"),
    ],
)
def test_bad_files_are_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        EngineConfig.load(path, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration file .*absent\.yaml: No such file"):
        EngineConfig.load(tmp_path / "absent.yaml", {})


@pytest.mark.parametrize(
    ("text", "count"), [("8GiB", 8 * 2**30), ("512 mb", 512 * 10**6), ("1.5KiB", 1536), ("4096", 4096), ("7B", 7)]
)
def test_sizes_are_read_with_their_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_a_configuration_survives_being_written_down() -> None:
    config = EngineConfig(model="gemma3-270m", tp_size=2, prefix_caching=False)
    assert EngineConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        ("ftp://host/cache", "unknown scheme"),
        ("/var/cache", "unknown scheme"),
        ("file:///var/cache", "gives no capacity"),
        ("file:///var/cache?capacity=much", "capacity="),
        ("file://var/cache?capacity=1GiB", "three slashes"),
        ("mooncake://10.0.0.1", "host and port"),
        ("mooncake://10.0.0.1:port", "not a URL"),
        ("mooncake://10.0.0.1:50051?colour=red", "nothing else"),
        ("mooncake://10.0.0.1:50051?protocol=pigeon", "pigeon"),
    ],
)
def test_a_bad_storage_url_is_told_where_it_is_given(storage: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(host_cache="1GiB", storage=storage)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_ttft_s": 1.0, "target_queue_s": 1.0, "max_replicas": 2}, "one of target_ttft_s and target_queue_s"),
        ({"target_ttft_s": 1.0}, "need max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas 2 must be at least min_replicas 3"),
        ({"replicas": 3, "max_replicas": 2}, "and replicas 3"),
        ({"replicas": 0}, "replicas 0 needs min_replicas 0, got 1"),
        ({"decode_replicas": 1}, "decode_replicas 1 needs prefill_replicas"),
        (
            {"elastic_roles": True, "host_cache": "0"},
            "elastic_roles needs engines that fetch blocks from each other, and host_cache is 0",
        ),
        ({"prefill_replicas": 2, "replicas": 2, "host_cache": "1GiB"}, "give decode_replicas, or more"),
        (
            {"prefill_replicas": 1, "decode_replicas": 1, "host_cache": "0"},
            "fetch blocks from each other, and host_cache is 0",
        ),
        ({"prefill_replicas": 2, "decode_replicas": 3, "max_replicas": 4}, "max_replicas 4 must be at least"),
    ],
)
def test_numbers_of_engines_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**values)


@pytest.mark.parametrize(
    ("values", "why_not"),
    [
        ({}, ""),
        ({"peer_loads": False}, "peer_loads is off"),
        ({"host_cache": "0"}, "host_cache is 0"),
        ({"routing": "round_robin"}, "routing is round_robin"),
        ({"max_replicas": 1}, "there is one engine at most"),
    ],
)
def test_engines_fetch_from_each_other_unless_something_is_missing(values: dict[str, Any], why_not: str) -> None:
    assert EngineConfig(**{"host_cache": "1GiB", **values}).without_peer_loads == why_not


@pytest.mark.parametrize(
    ("values", "host_cache"),
    [
        ({}, "512MiB"),  # others may come
        ({"kv_cache": "64GiB"}, "1024MiB"),  # a sixteenth of 16 GiB
        ({"max_replicas": 1}, "0"),
        ({"replicas": 0, "min_replicas": 0}, "512MiB"),
        ({"replicas": 2}, "512MiB"),
        ({"max_replicas": 3}, "512MiB"),
        ({"min_replicas": 2}, "512MiB"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "tp_size": 2}, "512MiB"),
        ({"elastic_roles": True}, "512MiB"),
        ({"replicas": 2, "kv_cache": "64MiB"}, "64MiB"),
        ({"replicas": 2, "kv_cache": "64GiB"}, "1024MiB"),  # an eighth of 16 GiB, by two
        ({"replicas": 2, "max_replicas": 8, "kv_cache": "64GiB"}, "256MiB"),
        ({"replicas": 8, "engine_cpus": 2.0, "kv_cache": "64GiB"}, "512MiB"),  # four fit there
        ({"replicas": 2, "tp_size": 4, "decode_tp_size": 8, "kv_cache": "64GiB"}, "128MiB"),
        ({"replicas": 2, "device": "cuda"}, "1024MiB"),
        ({"replicas": 16, "device": "cuda", "tp_size": 2}, "512MiB"),  # two fit there
        ({"replicas": 1000}, "0"),  # 2 MiB each
        ({"replicas": 2, "host_cache": "0"}, "0"),
        ({"replicas": 2, "host_cache": "3GiB"}, "3GiB"),
        ({"host_cache": "3GiB"}, "3GiB"),
        ({"replicas": 2, "peer_loads": False}, "0"),
        ({"replicas": 2, "peer_transports": "none"}, "0"),
        ({"replicas": 2, "prefix_caching": False}, "0"),
        ({"replicas": 2, "routing": "round_robin"}, "0"),
    ],
)
def test_several_engines_get_a_host_cache_by_themselves(values: dict[str, Any], host_cache: str) -> None:
    nodes = [NodeRoom(64 << 30, 8, 4), NodeRoom(16 << 30, 8, 4)]
    config = resolve_host_cache(EngineConfig(**{"device": "cpu", **values}), nodes)
    assert config.host_cache == host_cache
    assert bool(config.without_peer_loads) is (host_cache == "0")
    assert resolve_host_cache(config, []) == config


@pytest.mark.parametrize(
    ("values", "host_cache"),
    [
        ({"tp_size": 16}, "4096MiB"),  # 8 ranks on each node: an eighth of 256 GiB for all of them
        ({"tp_size": 8}, "4096MiB"),
        ({"tp_size": 4}, "4096MiB"),
        ({"tp_size": 2, "tp_placement": "any"}, "8192MiB"),  # 4 ranks in all, which may all be on one
    ],
)
def test_ranks_that_span_nodes_share_the_memory_of_those_that_they_are_on(
    values: dict[str, Any], host_cache: str
) -> None:
    config = EngineConfig(device="cuda", replicas=2, **values)
    assert resolve_host_cache(config, [NodeRoom(256 << 30, 64, 8)] * 4).host_cache == host_cache


def test_what_needs_a_host_cache_is_refused_where_no_node_has_the_memory() -> None:
    with pytest.raises(ConfigError, match=r"prefill_replicas needs engines that fetch blocks .* host_cache is 0"):
        resolve_host_cache(EngineConfig(prefill_replicas=1, decode_replicas=1), [NodeRoom(64 << 20)])
    with pytest.raises(ConfigError, match="storage is reached by way of the host's memory"):
        resolve_host_cache(EngineConfig(replicas=2, storage="file:///tmp/x?capacity=1GiB"), [])


def test_an_unresolved_host_cache_takes_no_memory() -> None:
    assert EngineConfig(replicas=2).host_cache_bytes == 0


def test_a_deployment_starts_with_its_replicas_but_no_fewer_than_the_fewest() -> None:
    assert EngineConfig(replicas=3).first_replicas == 3
    assert EngineConfig(min_replicas=2).first_replicas == 2
    assert EngineConfig(prefill_replicas=1, decode_replicas=2, host_cache="1GiB").first_replicas == 3
    assert EngineConfig(prefill_replicas=1, replicas=4, host_cache="1GiB").first_replicas == 4
    assert EngineConfig(replicas=0, min_replicas=0).first_replicas == 0


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 8),
        ({"replicas": 0, "min_replicas": 0}, 8),
        ({"replicas": 16}, 64),
        ({"replicas": 1024}, 1024),
        ({"max_replicas": 3}, 3),
        ({"max_replicas": 1024}, 1024),
    ],
)
def test_clients_can_ask_for_a_few_times_as_many_engines_where_no_bound_is_given(
    options: dict[str, int], most: int
) -> None:
    assert EngineConfig(**options).most_replicas == most
    assert not EngineConfig(replicas=3).follows_load


@pytest.mark.parametrize(
    "ports",
    [
        "8701",
        "a-b",
        "9000-8000",
        "0-10",
        "70000-70001",
        "9000-",
        "-9000",
        "9000 - 9010",
        "9000-9010\n",
        "1-2-3",
        "٩-٩",
        " ",
    ],
)
def test_engine_ports_that_are_no_range_are_refused_in_one_line(ports: str) -> None:
    with pytest.raises(ConfigError, match=r"engine_ports must be FIRST-LAST, such as 9000-9015.*got ") as refused:
        EngineConfig(engine_ports=ports)
    assert "\n" not in str(refused.value)


def test_engine_ports_are_first_and_last() -> None:
    EngineConfig(engine_ports="9000-9000")
    assert parse_ports("9000-9002") == range(9000, 9003)
    assert parse_ports("1-65535") == range(1, 65536)
    assert len(parse_ports("")) == 0


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "host:9000",
        "tcp://host",
        "a b",
        "::1",
        "[::1]",
        "-a",
        "a..b",
        ".a",
        "999.1.1.1",
        "12",
        "a\n",
        "x" * 300,
    ],
)
def test_hosts_that_no_client_can_connect_to_are_not_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match=r"advertise_host must be an IPv4 address or a name.*got ") as refused:
        EngineConfig(advertise_host=host)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("host", ["", "10.0.0.5", "node-7", "llm.example.com", "a_b.svc.cluster.local"])
def test_addresses_and_names_may_be_advertised(host: str) -> None:
    EngineConfig(advertise_host=host)


def test_roles_may_have_ranks_of_their_own() -> None:
    config = EngineConfig(
        replicas=4, prefill_replicas=1, decode_replicas=2, tp_size=2, prefill_tp_size=1, decode_tp_size=4,
        host_cache="1GiB",
    )  # fmt: skip
    assert config.tp_sizes == (1, 2, 4)
    for ranks in config.tp_sizes:
        engine = config.of_ranks(ranks)
        assert (engine.tp_size, engine.tp_sizes) == (ranks, config.tp_sizes)
    assert config.first_ranks == 1 + 2 * 4 + 2
    with pytest.raises(ConfigError, match="engines have 1 or 2 or 4 ranks each, got 3"):
        config.of_ranks(3)
    with pytest.raises(
        ConfigError, match="tp_size 1 are for engines that fetch blocks from each other, and host_cache is 0"
    ):
        EngineConfig(decode_tp_size=3, host_cache="0")
