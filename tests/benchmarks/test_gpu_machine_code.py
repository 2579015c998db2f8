"""`make machine-code` fails where the assembler made worse of a served kernel than is known."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import pytest

pytest.importorskip("triton", reason="it compiles the kernels, and is not installed")

from gpu import machine_code
from gpu.known_spills import KNOWN_SPILLS
from gpu.machine_code import Seen, look_at_served
from gpu.served_kernels import CARDS, Served, served

from headwise.kernels.cuda.attention import HEAD_DIMS, check_supported

LISTED, CLEAN = Served(90, 256, "bfloat16", "prefill"), Served(90, 128, "bfloat16", "decode")


def test_all_head_sizes_caches_and_cards_are_looked_at_and_nothing_else_is_known_to_spill() -> None:
    every = served(CARDS)
    attention = [each for each in every if isinstance(each.size, int)]
    assert {(each.sm, each.size) for each in attention} == {(sm, dim) for sm in CARDS for dim in HEAD_DIMS}
    for each in attention:
        check_supported(int(each.size), "bfloat16", each.numbers, each.sm, 64)
    assert {(each.sm, each.variant.kernel) for each in every} >= {
        (sm, kernel) for sm in CARDS for kernel in ("attend", "multiply_experts", "step", "solve", "relate", "carry")
    }
    assert KNOWN_SPILLS.keys() <= {astuple(each) for each in every}


@pytest.mark.parametrize(
    ("kernel", "seen", "status", "said"),
    [
        (CLEAN, Seen(111, 0, 0, False), 0, ""),
        (CLEAN, Seen(111, 0, 0, True), 1, "serialised"),
        (CLEAN, Seen(255, 4, 0, False), 1, "spills more than the 0 bytes (0 in loops)"),
        (LISTED, Seen(255, 88, 0, False), 0, "once a program"),
        (LISTED, Seen(255, 92, 0, False), 1, "spills more than the 88 bytes (0 in loops)"),
        (LISTED, Seen(255, 88, 1, False), 1, "spills more than the 88 bytes (0 in loops)"),
        (LISTED, Seen(250, 0, 0, False), 0, "shorten known_spills.py"),
    ],
)
def test_what_is_worse_than_known_fails_and_what_is_better_is_told(
    kernel: Served,
    seen: Seen,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def known(each: Served) -> Seen:
        spills: Any = KNOWN_SPILLS.get(astuple(each))
        listed = Seen(255, spills.bytes, spills.in_loops, False) if spills else Seen(100, 0, 0, False)
        return seen if each == kernel else listed

    monkeypatch.setattr(machine_code, "look_at", known)
    monkeypatch.setattr(machine_code, "ProcessPoolExecutor", lambda processes, mp_context: ThreadPoolExecutor(1))
    assert look_at_served(CARDS) == status
    (line,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(f"| sm_{kernel.sm} | {kernel.size} | {kernel.numbers} | {kernel.kernel} |")
    )
    assert said in line
