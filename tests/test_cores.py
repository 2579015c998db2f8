"""A container's limit of CPU time counts as cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwise.cores import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("5000 100000\n", 1),
        ("1600000 100000\n", 8),
        ("", 8),
        ("200000 0\n", 8),
        ("many 100000\n", 8),
    ],
)
def test_the_limit_of_a_cgroup(tmp_path: Path, limit: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3), ("250000", 3), ("", 8)])
def test_the_limit_of_a_cgroup_of_the_first_version(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(tmp_path) == cores


def test_without_cgroups_all_cores_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none") == 8
