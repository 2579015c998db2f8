"""Each kernel once under compute-sanitizer: the section sanitizer of `gpu_checks.py`."""

from __future__ import annotations

import argparse
import glob
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from gpu.bench import Bench
from gpu.codes import check_codes
from gpu.correctness import (
    OWN_OPS,
    Case,
    cases,
    check_block_tables,
    check_copies,
    check_ops,
    check_rope,
    check_sampling,
    kernels_of,
    make_inputs,
    to_device,
)
from gpu.report import FAILED, MET, SKIPPED, STATED, Recorder, Row
from gpu.rig import Rig

from headwise.runtime.config.engine_config import EngineConfig

TOOL = "compute-sanitizer"
USUAL_PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/cuda*/bin")
OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
"""By tool. Calls that the driver refuses raise in Python where they matter."""

CXX, TRITON = "cxx", "triton"
"""What is looked at, each by itself: racecheck also reports what Triton's reductions do on purpose, threads that write
one sum to one place, each as its own order of adding has it (triton-lang/triton#7264)."""

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) .*")
REFUSAL = re.compile(r".*(?:[Dd]evice not supported|[Nn]ot supported on this|[Pp]ermission|Unable to).*")
"""The tool cannot work on this machine: that says nothing of the kernels."""

FOUND_STATUS = 86
LONGEST_S = 85.0


def sanitizer(bench: Bench) -> None:
    """memcheck and racecheck of the kernels in CUDA C++ and of those in Triton, side by side."""
    tool = find_tool()
    if tool is None:
        for name in OPTIONS:
            bench.rows.skip(name, f"no {TOOL} on the PATH, nor in {', '.join(USUAL_PLACES)}")
        return
    running = {}
    for name, options in OPTIONS.items():
        for kernels in (CXX, TRITON):
            log = bench.rig.work / f"{name}-{kernels}.log"
            command = [tool, "--tool", name, *options, "--error-exitcode", str(FOUND_STATUS), *_target(bench, kernels)]
            with log.open("w") as output:
                running[f"{name}_{kernels}"] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), log
    deadline = time.monotonic() + LONGEST_S
    for name, (process, log) in running.items():
        with bench.rows.case(name) as begin:
            begin()
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            finally:
                process.kill()
            verdict, note = judge(status, log.read_text(errors="replace"))
            bench.rows.conclude(name, verdict, note)


def _target(bench: Bench, kernels: str) -> list[str]:
    """The command that runs ``kernels``."""
    script = Path(__file__).resolve().parents[1] / "gpu_checks.py"
    emulate = ["--emulate"] if bench.options.emulate else []
    shared = ("--work", str(bench.rig.work), "--seed", str(bench.rig.seed))
    return [sys.executable, str(script), "--sanitize-target", kernels, *shared, *emulate]


def find_tool() -> str | None:
    """The tool on the PATH, or where it is installed."""
    places = (place for pattern in USUAL_PLACES for place in sorted(glob.glob(pattern), reverse=True))
    return shutil.which(TOOL) or next(filter(None, (shutil.which(TOOL, path=place) for place in places)), None)


def judge(status: int, said: str) -> tuple[str, str]:
    """What a tool found, as the status of a row, and its own words."""
    if refusal := REFUSAL.search(said):
        return SKIPPED, f"{TOOL} cannot work here: {' '.join(refusal[0].split())}"[:300]
    summary = SUMMARY.search(said)
    if summary is None:
        return FAILED, f"status {status} and no summary; it said: {' '.join(said.split())[-300:]}"
    if status == 0 and summary[1] == "0":
        return MET, summary[0]
    found = next((line for line in said.splitlines() if "Invalid" in line or "hazard" in line), "")
    return FAILED, f"status {status}: {summary[0]} {found} {' '.join(said.split())[-200:]}"


def run_target(rig: Rig, kernels: str) -> None:
    """What the tools look at. Raises if a kernel computes something else than it should."""
    failed: list[Row] = []

    def emit(row: Row) -> None:
        if row.status not in (MET, STATED):
            failed.append(row)

    bench, rng = Bench(rig, Recorder("target", emit), argparse.Namespace()), np.random.default_rng(rig.seed)
    cased = [
        replace(case, sequences=rig.sizes.sanitized)
        for case in cases(rig.sizes.long, rig.target.sm)[: rig.sizes.sanitized_cases]
    ]
    with rig.current():
        for case in cased:
            for each in (case, replace(case, sequences=case.sequences[::2])):  # the others, which decode
                (_attend if kernels == TRITON else _write)(rig, each, rng)
        if kernels == CXX:
            _others(bench, cased[0], rng)
        rig.synchronize()
    if failed:
        raise SystemExit(f"wrong under the sanitizer: {failed}")


def _write(rig: Rig, case: Case, rng: np.random.Generator) -> None:
    device = to_device(rig, make_inputs(case, rng))
    rig.kernels.write_kv(device.key, device.value, device.arena, device.layout, device.batch, device.heads)
    rig.synchronize()


def _attend(rig: Rig, case: Case, rng: np.random.Generator) -> None:
    """Attend once; splits of a decode are merged, too."""
    inputs = make_inputs(case, rng)
    device = to_device(rig, inputs)
    kernels_of(rig, case).attend(
        device.query, device.written, device.layout, device.batch, device.heads,
        scale=case.head_dim**-0.5, softcap=case.softcap, out=rig.upload(np.zeros_like(inputs.query)),
    )  # fmt: skip
    rig.synchronize()


def _others(bench: Bench, case: Case, rng: np.random.Generator) -> None:
    """The other kernels in CUDA C++."""
    check_rope(bench, case, rng)
    check_copies(bench, rng)
    device = bench.rig.device(EngineConfig(device="cuda", dtype="bfloat16", cache_dir=str(bench.rig.work)))
    with device.current():
        check_ops(bench, device.ops, "bfloat16", rng, only=OWN_OPS)
        check_sampling(bench, device, "bfloat16", rng)
        check_block_tables(bench, device, rng)
    check_codes(bench, rng)
