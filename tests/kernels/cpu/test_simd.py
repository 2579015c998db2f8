"""What the log says of the instructions that kernels are compiled for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwise.kernels.cpu import amx
from headwise.kernels.cpu.simd import Isa, _compiled_for, _named

NOTHING = Isa(avx2=False, avx512f=False, avx512bw=False, avx512bf16=False, f16c=False)


@pytest.mark.parametrize(
    ("isa", "features", "says"),
    [
        (replace(NOTHING, avx512f=True, amx=True), {"avx512f": True, "avx2": True}, "amx-bf16"),
        (replace(NOTHING, avx512f=True, avx512bf16=True), {"avx512f": True, "avx2": True}, "avx512-bf16"),
        (replace(NOTHING, avx512f=True), {"avx512f": True, "avx2": True}, "avx512f, bfloat16 widened to float32"),
        (NOTHING, {"avx512f": False, "avx2": True, "avx": True}, "avx2, bfloat16 widened to float32"),
        (NOTHING, {"neon": True, "bf16": True}, "neon, bfloat16 widened to float32"),
        (NOTHING, {}, "riscv64, bfloat16 widened to float32"),
    ],
)
def test_instructions_are_named_and_it_is_said_where_bfloat16_is_not_multiplied(
    isa: Isa, features: dict[str, bool], says: str
) -> None:
    assert _named(isa, features, "riscv64") == says


@pytest.mark.parametrize(("cpu", "pairs"), [("znver4", True), ("cooperlake", True), ("emeraldrapids", False)])
def test_pairs_of_bfloat16_are_multiplied_as_they_are_where_that_is_not_the_slower_way(cpu: str, pairs: bool) -> None:
    features = dict.fromkeys(("avx2", "avx512f", "avx512bw", "avx512bf16", "f16c"), True)
    assert _compiled_for(cpu, features) == Isa(avx2=True, avx512f=True, avx512bw=True, avx512bf16=pairs, f16c=True)


@pytest.mark.parametrize("cpu", ["emeraldrapids", "graniterapids", "rocketlake"])
@pytest.mark.parametrize("granted", [True, False])
def test_tiles_are_taken_where_this_process_may_and_pairs_then_not_whatever_the_cpu_is_called(
    cpu: str, granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "is_granted", lambda: granted)
    features = dict.fromkeys(("avx512f", "avx512bf16", "amx-tile", "amx-bf16"), True)
    assert _compiled_for(cpu, features).amx is granted
    assert not _compiled_for(cpu, features).avx512bf16
    assert not _compiled_for("cooperlake", {**features, "amx-bf16": False}).amx
