"""The command line, without any weights: help, flags, errors, ``info``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headwise import __version__
from headwise.runtime.cli.app import app
from headwise.runtime.cli.options import config_reference
from headwise.runtime.config.engine_config import EngineConfig

COMMANDS = [["generate"], ["serve"], ["info"], ["demo"], ["bench", "serve"], ["calibrate"]]
COMMANDS += [["sleep"], ["wake"], ["reset-cache"], ["status"], ["index", "match"], ["batch"]]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "110"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that has the files of a model, but no weights in them."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").touch()
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"headwise {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout
    assert "Examples:\n" in result.stdout or command == ["demo"]


@pytest.mark.parametrize("command", ["generate", "serve", "info", "demo"])
def test_every_configuration_field_is_a_flag_with_its_help(command: str) -> None:
    shown = " ".join(run(command, "--help").stdout.split())
    for f in fields(EngineConfig):
        assert f"--{f.name.replace('_', '-')} " in shown.replace("/", " ")
        assert f.metadata["help"] in shown


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from headwise.runtime.cli.app import app;"
        "assert CliRunner().invoke(app, ['generate', '--help']).exit_code == 0;"
        "print(*{'ray', 'paddle', 'numba', 'numpy', 'zmq', 'tokenizers', 'gguf', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_info_shows_groups_blocks_and_pool(model: Path) -> None:
    pool = ("--dtype", "float32", "--block-size", 16, "--kv-cache", "96KiB")
    result = run("info", "--model", model, *pool, "--length", 40, "--length", 9999)
    assert result.exit_code == 0
    assert "3 layers, 4 query and 2 KV heads of 16" in result.stdout
    assert "1 x 6 slots per rank (auto, padding 0.0%)" in result.stdout
    assert "full attention, 6 (layer, KV head) pairs" in result.stdout
    assert "16 tokens of one group, 12 KiB" in result.stdout  # 16 tokens x 6 pairs x (key + value) x 16 x 4 bytes
    assert "8 blocks per rank, 96 KiB" in result.stdout
    assert re.search(r"requests of 40 tokens +2 fit\n", result.stdout)  # 3 blocks each
    assert re.search(r"requests of 9999 tokens +none: the longest sequence has 128 tokens", result.stdout)


def test_flags_reach_the_configuration_and_win_over_the_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {model}\nblock_size: 16\nhead_grouping: per_head_index\n")
    assert "16 tokens of one group" in run("info", "--config", file).stdout
    overridden = run("info", "--config", file, "--block-size", 32).stdout
    assert "32 tokens of one group" in overridden
    assert "2 x 3 slots per rank (per_head_index" in overridden


def test_info_prints_the_configuration_reference() -> None:
    assert run("info", "--config-reference").stdout == config_reference() + "\n"


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("blocksize: 16\n", "unknown key 'blocksize'; did you mean 'block_size'?"),
        ("model: [\n", "is not valid YAML"),
        ("port: 70000\n", "port must be from 0 to 65535, got 70000"),
    ],
)
def test_a_bad_file_is_one_line_on_stderr_and_exit_code_1(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml)
    result = run("info", "--config", file)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "no-such-model"], "'no-such-model' is no known model, file or directory"),
        (["--kv-cache", "lots"], "kv_cache 'lots' is not a size"),
        (["--replicas", "0"], "replicas 0 needs min_replicas 0, got 1"),
    ],
)
def test_a_bad_value_is_one_line_on_stderr_and_exit_code_1(flags: list[str], message: str) -> None:
    result = run("info", *flags)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_a_model_that_does_not_fit_the_cache_says_what_would(model: Path) -> None:
    result = run("info", "--model", model, "--kv-cache", "1KiB")
    assert result.exit_code == 1
    assert "give at least" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "--no-such-flag"],
        ["info", "--port", "many"],
        ["info", "--device", "gpu"],
        ["generate"],
        ["generate", "Hello", "--address", "127.0.0.1:1", "--local"],
        ["generate", "Hello", "--address", "127.0.0.1:1", "--block-size", "16"],
        ["generate", "Hello", "--system", "Be brief."],
        ["generate", "Hello", "--sampling", "{"],
        ["generate", "Hello", "--sampling", "[1]"],
        ["bench", "serve", "--concurrency", "2"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_wrong_usage_has_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr
    assert result.stdout == ""


def test_bad_sampling_values_are_refused_before_anything_is_started() -> None:
    result = run("generate", "Hello", "--temperature", "-1")
    assert result.exit_code == 1
    assert result.stderr == "error: temperature must be a number in [0, 100], got -1.0\n"
    result = run("generate", "Hello", "--sampling", '{"min_tokens": 500}')
    assert result.exit_code == 1
    assert result.stderr == "error: min_tokens 500 is more than max_tokens 128\n"


def test_bench_serve_needs_one_kind_of_load() -> None:
    result = run("bench", "serve", "--address", "127.0.0.1:1", "--rate", "1", "--concurrency", "1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: give either a concurrency (closed loop) or a rate (open loop)")


def test_only_a_ray_job_is_served_on_the_cluster_that_its_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.actors.deployment import cluster_of_this_job

    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")  # as `ray job submit` takes it
    assert cluster_of_this_job() is None
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert cluster_of_this_job() == "127.0.0.1:6379"


# ---- keys ----


def test_a_server_key_and_a_client_s_go_together(tmp_path: Path) -> None:
    for half in (["--server-key", "0" * 64], ["--client-key-file", tmp_path / "key"]):
        result = run("status", "--address", "127.0.0.1:1", *half)
        assert result.exit_code == 1
        assert "--server-key and --client-key-file go together" in result.output


def test_keys_that_are_none_are_told_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-mine-00001\n")
    keys = ["--server-key", "my key", "--client-key-file", tmp_path / "key"]
    result = run("status", "--address", "127.0.0.1:1", *keys)
    assert result.exit_code == 1
    assert "64 hexadecimal digits" in result.output
    assert "my key" not in result.output
