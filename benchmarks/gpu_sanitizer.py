"""Each kernel once under compute-sanitizer: the section sanitizer of `gpu.py`."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from gpu_correctness import Case, cases, check_copies, check_rope, make_inputs, to_device
from gpu_report import Recorder, Row
from gpu_rig import Bench, Rig

TOOL, USUAL_PLACE = "compute-sanitizer", "/usr/local/cuda/bin"
OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
"""By tool. Calls that the driver refuses raise in Python where they matter."""

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) .*")
FOUND_STATUS = 86
LONGEST_S = 85.0


def sanitizer(bench: Bench) -> None:
    """memcheck and racecheck, side by side."""
    tool = shutil.which(TOOL) or shutil.which(TOOL, path=USUAL_PLACE)
    if tool is None:
        for name in OPTIONS:
            bench.rows.skip(name, f"no {TOOL} on the PATH")
        return
    script = Path(__file__).with_name("gpu.py")
    target = [sys.executable, str(script), "--sanitize-target", "--work", str(bench.rig.work)]
    target += ["--emulate"] if bench.options.emulate else []
    running = {}
    for name, options in OPTIONS.items():
        log = bench.rig.work / f"{name}.log"
        command = [tool, "--tool", name, *options, "--error-exitcode", str(FOUND_STATUS), *target]
        with log.open("w") as output:
            running[name] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), log
    deadline = time.monotonic() + LONGEST_S
    for name, (process, log) in running.items():
        with bench.rows.case(name):
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            finally:
                process.kill()
            holds, note = judge(status, log.read_text(errors="replace"))
            bench.rows.check(name, holds, note)


def judge(status: int, said: str) -> tuple[bool, str]:
    """Whether a tool found nothing, and its own words."""
    summary = SUMMARY.search(said)
    if summary is None:
        return False, f"status {status} and no summary; it said: {' '.join(said.split())[-300:]}"
    found = next((line for line in said.splitlines() if "Invalid" in line or "hazard" in line), "")
    clean = status == 0 and summary[1] == "0"
    return clean, summary[0] if clean else f"status {status}: {summary[0]} {found}"


def run_target(rig: Rig) -> None:
    """What the tools look at. Raises if a kernel computes something else than it should."""
    rng = np.random.default_rng(0)
    failed: list[Row] = []

    def emit(row: Row) -> None:
        if row.status not in ("yes", ""):
            failed.append(row)

    bench = Bench(rig, Recorder("target", emit), argparse.Namespace())
    short = [replace(case, sequences=rig.sizes.sanitized) for case in cases(rig.sizes.long, rig.target.sm)]
    with rig.current():
        for case in short:
            _run(rig, case, rng)
            _run(rig, replace(case, sequences=case.sequences[::2]), rng)
        check_rope(bench, short[0], rng)
        check_copies(bench, rng)
        rig.synchronize()
    if failed:
        raise SystemExit(f"wrong under the sanitizer: {failed}")


def _run(rig: Rig, case: Case, rng: np.random.Generator) -> None:
    """Write and attend once; splits of a decode are merged, too."""
    inputs = make_inputs(case, rng)
    device = to_device(rig, inputs)
    arguments = device.arena, device.layout, device.batch, device.heads
    rig.kernels.write_kv(device.key, device.value, *arguments)
    out = rig.upload(np.zeros_like(inputs.query))
    rig.kernels.attend(device.query, *arguments, scale=case.head_dim**-0.5, softcap=case.softcap, out=out)
    rig.synchronize()
