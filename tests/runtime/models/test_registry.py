"""The table of architectures: whose families are imported when they are asked for, and not before."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from headwise.runtime.models import registry
from headwise.runtime.models.decoder import Decoder


@pytest.mark.parametrize("name", registry._MODELS)
def test_every_architecture_has_what_reads_its_config_and_what_computes_it(name: str) -> None:
    entry = registry._MODELS[name]
    assert issubclass(entry.model_class(), Decoder)
    assert list(inspect.signature(registry._named(entry.parse)).parameters) == ["config"]


def test_actors_import_no_family_of_models_no_converter_and_no_attention_before_a_model_asks() -> None:
    code = "import sys, headwise.actors.engine, headwise.actors.scheduler, headwise.actors.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    found = {name.removeprefix("headwise.runtime.") for name in done.stdout.split() if name.startswith("headwise.")}
    assert "models.registry" in found
    families = {f"models.{entry.model.partition('.')[0]}" for entry in registry._MODELS.values()}
    assert not found & families
    assert not found & {"loader.gguf_convert", "loader.gguf_config"}
    assert not found & {f"models.attention.{name}" for name in ("gqa", "mla", "dsa", "compressed", "states")}
