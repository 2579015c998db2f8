"""Everything that only a GPU can show: correctness, then attention, copies and whole models against their aims.

    python benchmarks/gpu_checks.py [--only decode,copies] [--markdown FILE] [--result FILE] [--work DIR]
    python benchmarks/gpu_checks.py --emulate

Each section is a process of its own with a time limit, as is each of its cases: one that fails, crashes, hangs or
breaks the GPU's context is a row of the table, and the section goes on with the next case, in another process where it
has to. The table comes last but for one line of JSON, however the run ends, and both files are
whole after every row. The exit status is 1 if anything failed; an aim that was missed is no failure. Where the section
correctness has failures, no later aim counts as met. `--emulate` executes every line on a machine without a GPU, at
tiny sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.apart import BROKEN, LEAST_S, ChildError, Deadlines, lines_of, run_apart
from gpu.report import FAILED, BrokenError, Recorder, Report, Row, described, to_line

SCRIPT = Path(__file__).resolve().parents[1] / "gpu_checks.py"

sys.path.insert(0, str(SCRIPT.parents[1]))  # headwise itself need not be installed

if TYPE_CHECKING:
    from gpu.rig import Rig

LIMIT_S = 460.0
"""Of the whole run: sections are stopped, and no more begun, once it is over."""

NEEDED = {
    "numpy": "numpy", "ml_dtypes": "ml-dtypes", "triton": "triton", "msgpack": "msgpack", "yaml": "pyyaml",
    "xxhash": "xxhash", "safetensors": "safetensors", "tokenizers": "tokenizers", "jinja2": "jinja2",
}  # fmt: skip
"""Modules, besides CuPy, that some section needs, and the packages that have them."""

ABOUT, ABOUT_LIMIT_S = "about", 60.0
"""What a process is asked that tells card and versions."""


@dataclass(frozen=True)
class Section:
    """``module.function`` of the benchmark, and the seconds it may take. torch: it compares with torch.
    is_asked_for: it is run only where it is named.

    case_s: that one of its cases may take; None: no less than all of them
    """

    module: str
    function: str
    limit_s: float
    case_s: float | None = None
    torch: bool = False
    is_asked_for: bool = False

    def run(self, options: argparse.Namespace, rows: Recorder) -> None:
        from gpu.bench import Bench
        from gpu.rig import imported

        function = getattr(importlib.import_module(self.module), self.function)
        if self.torch:
            imported("torch")
        rig = open_rig(options)
        rows.is_broken = rig.is_broken
        with rig.current():
            bench = Bench(rig, rows, options)
            function(bench)
            bench.finish()


SECTIONS = {
    "compile": Section("gpu.correctness", "compile_kernels", 75),
    "correctness": Section("gpu.correctness", "correctness", 50, 20),
    "decode": Section("gpu.attention", "decode", 80, 20, torch=True),
    "heads": Section("gpu.attention", "heads", 30, 15),
    "prefill": Section("gpu.attention", "prefill", 65, 20, torch=True),
    "delta": Section("gpu.delta", "delta", 25, 12),
    "kda": Section("gpu.kda", "kda", 25, 12),
    "ssm": Section("gpu.ssm", "ssm", 50, 12),
    "latents": Section("gpu.latents", "latents", 60, 20),
    "latent_ranks": Section("gpu.latent_ranks", "latent_ranks", 24, 12),
    "entries": Section("gpu.entries", "entries", 18, 9),
    "copies": Section("gpu.copies", "copies", 50, 25),
    "ipc": Section("gpu.ipc", "ipc", 40),
    "products": Section("gpu.products", "products", 40, 12),
    "model": Section("gpu.model", "model", 85, 45),
    "moe": Section("gpu.model", "moe", 60, 25),
    "stages": Section("gpu.stages", "stages", 25, 15),
    "mtp": Section("gpu.drafting", "mtp", 50, 12),
    "published": Section("gpu.serving", "published", 60),
    "recycling": Section("gpu.serving", "recycling", 80),
    "smollm2": Section("gpu.model", "smollm2", 45, 25),
    "sanitizer": Section("gpu.sanitizer", "sanitizer", 75),
    "tiles": Section("gpu.tiles", "tiles", 90, 30, is_asked_for=True),
}
"""In this order: what everything rests on, what most depends on, and last what may not be to be had.

Limits are for what hangs, and sum to about twice `LIMIT_S`: one go gets through where sections take half of them; three
parts get through whatever they take. What a go has no time for is a failed row each.
"""


EACH_PART = ("compile", "correctness")
"""Sections that every part of a run begins with."""


def open_rig(options: argparse.Namespace) -> Rig:
    """The GPU, or its emulation. Imported here: a process that runs no section needs neither."""
    if options.emulate:
        from gpu.emulated import EmulatedRig

        return EmulatedRig(options.work, options.seed)
    from gpu.rig import CudaRig

    return CudaRig(options.work, options.seed)


# ---- one section, in a process of its own ----


def run_child(name: str, options: argparse.Namespace) -> None:
    """Run a section and print its rows, a line of JSON each. Whatever else is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(line: str) -> None:
        print(line, file=out, flush=True)

    if name == ABOUT:
        emit(json.dumps(told(options)))
        return
    rows = Recorder(name, lambda row: emit(to_line(row)), lambda line: emit(to_line(line)), options.passed)
    try:
        run_into(rows, name, options)
    except BrokenError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(BROKEN)  # what ends in order would ask the GPU to, and may hang


NO_GPU, ERROR = "no_gpu", "error"


def told(options: argparse.Namespace) -> dict[str, str]:
    """Card and versions; or the reason why there are none, by `NO_GPU` if nothing can be measured either."""
    from headwise.errors import ConfigError

    try:
        return open_rig(options).about()
    except ConfigError as error:
        return {NO_GPU: described(error)}
    except Exception as error:
        return {ERROR: described(error)}


def run_into(rows: Recorder, name: str, options: argparse.Namespace) -> None:
    """Run a section in this process; what it raises is a row, too."""
    try:
        SECTIONS[name].run(options, rows)
    except Exception as error:
        traceback.print_exc()
        rows.fail("whole", described(error))


def child_command(
    name: str, arguments: Sequence[str], options: argparse.Namespace, passed: Sequence[str] = ()
) -> list[str]:
    """This script for one section, with the options of this run. passed: cases that are passed over"""
    shared = ("--work", str(options.work), "--seed", str(options.seed), "--child", name)
    return [sys.executable, str(SCRIPT), *arguments, *shared, "--passed", json.dumps(list(passed))]


# ---- all of them ----


def run_all(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the chosen sections, show what came of them, and return the exit status."""
    started = time.monotonic()
    report = Report(what_is_known_here(options), options.markdown, options.result)

    def emit(row: Row) -> None:
        row = report.add(row)
        shown = (row.full_name, row.measured_text, row.aim_text and f"({row.aim_text})", row.status, row.note)
        print(f"[{time.monotonic() - started:5.0f} s]", *filter(None, shown), flush=True)

    try:
        chosen = options.only if find_card(options, arguments, report, emit) else []
        for name in chosen:
            begun = time.monotonic()
            run_section(name, options, arguments, options.limit - (begun - started), emit)
            report.seconds[name] = time.monotonic() - begun
    except BaseException as error:  # whoever stops the run gets what there is, too
        emit(Row("run", "whole", FAILED, note=f"stopped: {described(error)}"))
        raise
    finally:
        report.save()
        print()
        report.show()
        print(report.line(), flush=True)
    return int(report.has_failures)


def find_card(
    options: argparse.Namespace, arguments: Sequence[str], report: Report, emit: Callable[[Row], None]
) -> bool:
    """Put card and versions into the report, and what is missing; False if there is nothing to measure on."""
    if missing := [package for module, package in NEEDED.items() if not is_there(module)]:
        emit(Row(ABOUT, "packages", FAILED, note=f"not installed: {', '.join(missing)}; what needs them fails"))
    try:
        said = told(options) if options.here else ask_about(options, arguments)
    except (ChildError, ValueError) as error:
        said = {ERROR: described(error)}
    if NO_GPU in said or ERROR in said:
        emit(Row(ABOUT, "card", FAILED, note=said.get(NO_GPU, said.get(ERROR, ""))))
    else:
        report.about |= said
    print(", ".join(f"{name} {value}" for name, value in report.about.items()), flush=True)
    return NO_GPU not in said


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def ask_about(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, str]:
    """What `told` says in a process of its own, so that this one stays off the card; raises `ChildError`."""
    lines = lines_of(child_command(ABOUT, arguments, options), Deadlines(time.monotonic() + ABOUT_LIMIT_S))
    said: dict[str, str] = json.loads("".join(lines))
    return said


def run_section(
    name: str, options: argparse.Namespace, arguments: Sequence[str], left_s: float, emit: Callable[[Row], None]
) -> None:
    """Run a section within its limit and the time that is left."""
    if left_s < LEAST_S:
        emit(Row(name, "whole", FAILED, note=f"not begun: {options.limit:.0f} s are over; see --only and --limit"))
    elif options.here:
        run_into(Recorder(name, emit), name, options)
    else:
        section = SECTIONS[name]
        command_of = partial(child_command, name, arguments, options)
        run_apart(name, command_of, min(section.limit_s, left_s), section.case_s or section.limit_s, emit)


def what_is_known_here(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": options.seed,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


@contextmanager
def work_directory(given: Path | None) -> Iterator[Path]:
    """For compiled kernels and random checkpoints: the given one, else one that goes with the run."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="headwise-gpu-") as made:
        yield Path(made)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_sections, default=usual_sections(), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--part", type=_part, help="N/M: the N-th of M parts of these sections, of about equal time")
    parser.add_argument("--precompile", type=_target, help="SM,CUDA: only compile all kernels into --work")
    parser.add_argument("--emulate", action="store_true", help="on a CPU, tiny: to execute every line")
    parser.add_argument("--here", action="store_true", help="all in this process, with no limits: for a debugger")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of the whole run (default: %(default)g)")
    parser.add_argument("--work", type=Path, help="keep compiled kernels and random checkpoints here")
    parser.add_argument("--seed", type=int, help="of all random inputs (default: a new one)")
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    parser.add_argument("--result", type=Path, help="write the line of JSON to this file, too")
    parser.add_argument("--layers", type=int, help="of the random Llama-3.2-1B, in place of its 16")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M: a converted directory, or its GGUF file")
    parser.add_argument("--expect", type=Path, help="its greedy tokens, made by --make-expected on a CPU")
    parser.add_argument("--make-expected", type=Path, help="make that file from --smollm2, on this machine's CPU")
    parser.add_argument("--sanitize-target", choices=("cxx", "triton"), help="run these kernels once, and nothing else")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--passed", type=json.loads, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part is not None:
        options.only = parts_of(options.only, options.part[1])[options.part[0] - 1]
    if options.precompile is not None and options.work is None:
        parser.error("--precompile needs --work, the folder that is to have the kernels")
    if options.seed is None:
        options.seed = secrets.randbits(32)
    return options


def parts_of(names: Sequence[str], count: int) -> list[list[str]]:
    """``names`` in ``count`` parts of about equal limits. Each compiles, and shows its kernels to be right, first."""
    first = [name for name in names if name in EACH_PART]
    parts: list[list[str]] = [list(first) for _ in range(count)]
    for name in sorted((name for name in names if name not in EACH_PART), key=lambda name: -SECTIONS[name].limit_s):
        min(parts, key=lambda part: sum(SECTIONS[other].limit_s for other in part)).append(name)
    return [sorted(part, key=list(SECTIONS).index) for part in parts]


def usual_sections() -> list[str]:
    """Those that are run where none is named."""
    return [name for name, section in SECTIONS.items() if not section.is_asked_for]


def _part(text: str) -> tuple[int, int]:
    at, _, count = text.partition("/")
    if not (at.isdigit() and count.isdigit() and 1 <= int(at) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: give 1/3, 2/3 or 3/3")
    return int(at), int(count)


def _target(text: str) -> tuple[int, int]:
    sm, _, cuda = text.partition(",")
    if not (sm.isdigit() and cuda.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no target: give compute capability and CUDA version, as 90,12")
    return int(sm), int(cuda)


def _sections(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"there is no section {', '.join(unknown)}: choose from {', '.join(SECTIONS)}")
    return names


def stop(*_: object) -> None:
    """At a signal: unwinds, so that no section is left behind and what was found is shown."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.make_expected:
        from gpu.model import make_expected

        return make_expected(options)
    signal.signal(signal.SIGTERM, stop)
    with work_directory(options.work) as options.work:
        if options.child:
            run_child(options.child, options)
            return 0
        if options.sanitize_target:
            from gpu.sanitizer import run_target

            run_target(open_rig(options), options.sanitize_target)
            return 0
        if options.precompile is not None:
            from gpu.correctness import precompile_all

            print(precompile_all(options.precompile, options.work / "kernels", options.layers), "kernels")
            return 0
        return run_all(options, arguments)
