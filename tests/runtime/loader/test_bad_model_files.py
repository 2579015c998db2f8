"""Whatever a model's directory holds, what is wrong with it is told in one short line, and at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.random_models import CONFIGS
from typer.testing import CliRunner, Result

from headwise.errors import ConfigError, HeadwiseError, ModelError
from headwise.runtime.cli.app import app
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import read_model_card
from headwise.runtime.loader.checkpoint import INDEX, MOST_JSON_BYTES, SINGLE, Checkpoint, read_json
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.models.registry import model_config

ERNIE_MOE = {
    **CONFIGS["llama"],
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "window_size": 8,
    "sink_size": 2,
    "window_attn_skip_freq": 2,
    "head_wise_swa_ratio": 0.5,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "moe_layer_interval": 1,
    "moe_intermediate_size": 16,
    "moe_num_shared_experts": 1,
    "moe_norm_min": 1e-12,
}
GEMMA = {**CONFIGS["gemma3"], "layer_types": ["full_attention"] * 3, "text_config": {}, "rope_parameters": {}}
VALID = {
    "llama3": {**CONFIGS["llama3_scaled"], "eos_token_id": 1, "tie_word_embeddings": True, "hidden_act": "silu"},
    "linear": CONFIGS["linear_scaled"],
    "mistral": CONFIGS["mistral_window"],
    "gemma3": GEMMA,
    "ernie": ERNIE_MOE,
}
NESTED: list[Any] = []
for _ in range(500):
    NESTED = [NESTED]
NASTY: list[Any] = [None, [], {}, [[]], [{}], [None], {"a": []}, "", "a\nb", "x" * 100_000, True, -1, 0, 1.5, 10**9]
NASTY += [10**400, -(10**400), 2**63, 1e308, 1e-308, 5e-324, float("nan"), float("inf"), ["a"] * 50_000, NESTED]


def spoiled() -> Iterator[tuple[str, Any]]:
    """Every field of every valid configuration, and every field within one, with each nasty value; and which it is."""
    for name, config in VALID.items():
        for key, value in config.items():
            for nasty in NASTY:
                yield f"{name}: {key}", {**config, key: nasty}
                for part in value if isinstance(value, dict) else ():
                    yield f"{name}: {key}.{part}", {**config, key: {**value, part: nasty}}


def is_one_line(message: str) -> bool:
    return "\n" not in message and len(message) < 1000


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "110"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that has the files of a model, but no weights in them."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    write_config(directory, CONFIGS["llama"])
    (directory / SINGLE).touch()
    (directory / "tokenizer.json").write_text("{}")
    return directory


def write_config(directory: Path, config: Any) -> None:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


# ---- config.json ----


def test_a_field_of_any_value_is_taken_or_refused_in_one_line(tmp_path: Path) -> None:
    engine, refusals, crashes = EngineConfig(model="tiny", device="cpu"), [], []
    for which, config in spoiled():
        try:
            if model_config(config).num_layers != 3:  # then the planner may mind, too
                write_config(tmp_path, config)
                read_model_card(engine, tmp_path)
        except (ModelError, ConfigError) as error:
            refusals.append((which, str(error)))
        except Exception as error:
            crashes.append((which, repr(error)[:200]))
    assert crashes == []
    assert len(refusals) > len(NASTY)
    assert [(which, message[:200]) for which, message in refusals if not is_one_line(message)] == []


TOO_MANY = {
    "layers": {"num_hidden_layers": 10**9},
    "layers and heads": {"num_hidden_layers": 4000, "num_attention_heads": 4096, "num_key_value_heads": 4096},
    "KV heads": {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
    "head_dim": {"head_dim": 10**9},
}


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral_window"])
@pytest.mark.parametrize("what", TOO_MANY)
def test_a_geometry_that_no_model_has_is_refused_before_anything_is_made_of_it(what: str, name: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json: .*at most"):
        model_config({**CONFIGS[name], **TOO_MANY[what]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must hold a JSON object, not list"),
        ("null", "must hold a JSON object, not NoneType"),
        ("{", "is not valid JSON"),
        ("[" * 200_000, "is nested too deeply"),
        ('{"a":' * 200_000, "is nested too deeply"),
        ('{"architectures": [[]]}', "architectures"),
        ('{"architectures": [{"a": 1}]}', "architectures"),
        ('{"architectures": "LlamaForCausalLM"}', "must be a list of names"),
        ('{"architectures": ["a\\nb"]}', "is not supported"),
        ("1" * 10_000, "is not valid JSON"),
        ("\udcff", "is not valid JSON"),
    ],
    ids=range(11),
)
def test_info_tells_what_is_wrong_with_a_config_in_one_line(model: Path, text: str, message: str) -> None:
    (model / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    result = run("info", "--model", model)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1000


def test_a_json_file_of_any_size_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MOST_JSON_BYTES + 1)
    with pytest.raises(ModelError, match=rf"is more than {MOST_JSON_BYTES} bytes long"):
        read_json(path)


@pytest.mark.parametrize("weight_map", [{"a": 1}, {"a": []}, {"a": None, "b": "c"}, [], {}, "x"])
def test_an_index_that_names_no_files_is_refused(model: Path, weight_map: Any) -> None:
    (model / SINGLE).unlink()
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="weight_map"):
        _ = Checkpoint(model).names


# ---- config first, weights last ----


def test_an_unsupported_architecture_is_told_before_what_its_directory_lacks(tmp_path: Path) -> None:
    write_config(tmp_path, {"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ModelError, match="architecture GPT2LMHeadModel is not supported"):
        resolve_model(str(tmp_path), tmp_path)
    assert "GPT2LMHeadModel is not supported" in run("info", "--model", tmp_path).stderr


def test_a_missing_tokenizer_is_told_before_missing_weights(model: Path) -> None:
    (model / SINGLE).unlink()
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        resolve_model(str(model), model)


def test_info_needs_no_weights(model: Path) -> None:
    (model / SINGLE).unlink()
    result = run("info", "--model", model)
    assert result.exit_code == 0, result.stderr
    assert "3 layers, 8 query and 4 KV heads of 16" in result.stdout


class FakeHub:
    """The hub's package: a repository's files, brought as they are asked for, and what was asked for."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, root: Path, config: Any, *, tokenizer: bool = True) -> None:
        self.files = {"config.json": json.dumps(config), SINGLE: "weights"}
        self.files |= {"tokenizer.json": "{}"} if tokenizer else {}
        self.directory = root / "snapshots" / self.COMMIT
        self.asked: list[tuple[str, str | None]] = []

    def snapshot_download(self, repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append((repository, revision))
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            if any(Path(name).match(pattern) for pattern in allow_patterns):
                (self.directory / name).write_text(text)
        return str(self.directory)

    @property
    def fetched(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}


def hub_of(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> FakeHub:
    module = SimpleNamespace(snapshot_download=hub.snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return hub


def test_of_an_unsupported_repository_only_the_config_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = hub_of(monkeypatch, FakeHub(tmp_path, {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match="architecture GPT2LMHeadModel is not supported"):
        resolve_model("hf:organisation/name", tmp_path)
    assert hub.fetched == {"config.json"}


def test_of_a_repository_without_tokenizer_no_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = hub_of(monkeypatch, FakeHub(tmp_path, CONFIGS["llama"], tokenizer=False))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        resolve_model("hf:organisation/name", tmp_path)
    assert hub.fetched == {"config.json"}


def test_info_on_a_repository_fetches_the_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = hub_of(monkeypatch, FakeHub(tmp_path, CONFIGS["llama"]))
    result = run("info", "--model", "hf:organisation/name")
    assert result.exit_code == 0, result.stderr
    assert hub.fetched == {"config.json"}


def test_all_of_a_repository_is_fetched_from_the_commit_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = hub_of(monkeypatch, FakeHub(tmp_path, CONFIGS["llama"]))
    assert resolve_model("hf:organisation/name@main", tmp_path) == hub.directory
    assert hub.fetched == {"config.json", "tokenizer.json", SINGLE}
    first, *later = hub.asked
    assert first == ("organisation/name", "main")
    assert set(later) == {("organisation/name", hub.COMMIT)}


def test_a_hub_that_fails_in_any_way_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = hub_of(monkeypatch, FakeHub(tmp_path, CONFIGS["llama"]))

    def failing(*_: Any, **__: Any) -> str:
        raise EOFError("the connection\nended")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=failing))
    with pytest.raises(HeadwiseError, match="cannot fetch hf:organisation/name: the connection") as caught:
        resolve_model("hf:organisation/name", tmp_path)
    assert is_one_line(str(caught.value))
    assert hub.asked == []
