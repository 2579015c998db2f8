"""Runs a benchmark in its mode of seconds, in this process, and takes its last line."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import pytest
from figures_table import rows


def quick_figures(name: str, capsys: pytest.CaptureFixture[str], *arguments: str, **others: Any) -> dict[str, Any]:
    """The figures of ``python benchmarks/NAME.py --quick``, which must have all that README's table shows."""
    return figures_of(name, capsys, "--quick", *arguments, **others)


def figures_of(name: str, capsys: pytest.CaptureFixture[str], *arguments: str, **others: Any) -> dict[str, Any]:
    """The same with these arguments alone. others: what else its ``main`` takes"""
    importlib.import_module(name).main([*arguments], **others)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3, "a table comes before the figures"
    figures: dict[str, Any] = json.loads(lines[-1])
    for row in rows(name, figures):
        assert not re.search(r"\b(nan|inf)\b", row)
    return figures
