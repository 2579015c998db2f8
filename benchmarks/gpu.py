"""Everything that only a GPU can show: correctness, then attention, copies and whole models against their aims.

    python benchmarks/gpu.py [--only decode,copies] [--markdown FILE] [--work DIR]
    python benchmarks/gpu.py --emulate

Each section is a process of its own with a time limit: one that fails, hangs or breaks the GPU's context is a row of
the table, and the others run. The table comes last but for one line of JSON. The exit status is 1 if anything failed;
an aim that was missed is no failure. `--emulate` executes every line on a machine without a GPU, at tiny sizes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_report import FAILED, Recorder, Row, described, from_line, result_of, show_table, to_line, to_markdown

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

if TYPE_CHECKING:
    from gpu_rig import Rig

LIMIT_S = 465.0
"""Of the whole run: sections are stopped, and no more begun, once it is over."""

LEAST_S = 5.0
"""No section is begun with less time than this."""

ABOUT, ABOUT_LIMIT_S = "about", 60.0
"""What a process is asked that tells card and versions."""


@dataclass(frozen=True)
class Section:
    """``module.function`` of the benchmark, and the seconds it may take. torch: it compares with torch."""

    module: str
    function: str
    limit_s: float
    torch: bool = False

    def run(self, options: argparse.Namespace, rows: Recorder) -> None:
        from gpu_rig import Bench, imported

        function = getattr(importlib.import_module(self.module), self.function)
        if self.torch:
            imported("torch")
        rig = open_rig(options)
        with rig.current():
            function(Bench(rig, rows, options))


SECTIONS = {
    "compile": Section("gpu_correctness", "compile_kernels", 90),
    "correctness": Section("gpu_correctness", "correctness", 80),
    "decode": Section("gpu_attention", "decode", 60, torch=True),
    "heads": Section("gpu_attention", "heads", 40),
    "prefill": Section("gpu_attention", "prefill", 40, torch=True),
    "copies": Section("gpu_copies", "copies", 60),
    "model": Section("gpu_model", "model", 90),
    "smollm2": Section("gpu_model", "smollm2", 60),
    "published": Section("gpu_serving", "published", 80),
    "recycling": Section("gpu_serving", "recycling", 110),
    "sanitizer": Section("gpu_sanitizer", "sanitizer", 90),
}


def open_rig(options: argparse.Namespace) -> Rig:
    """The GPU, or its emulation. Imported here: a process that runs no section needs neither."""
    if options.emulate:
        from gpu_emulated import EmulatedRig

        return EmulatedRig(options.work)
    from gpu_rig import CudaRig

    return CudaRig(options.work)


# ---- one section, in a process of its own ----


def run_child(name: str, options: argparse.Namespace) -> None:
    """Run a section and print its rows, a line of JSON each. Whatever else is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(line: str) -> None:
        print(line, file=out, flush=True)

    if name == ABOUT:
        try:
            emit(json.dumps(open_rig(options).about()))
        except Exception as error:
            emit(json.dumps({"error": described(error)}))
        return
    run_here(name, options, lambda row: emit(to_line(row)))


def run_here(name: str, options: argparse.Namespace, emit: Callable[[Row], None]) -> None:
    """Run a section in this process; what it raises is a row, too."""
    rows = Recorder(name, emit)
    try:
        SECTIONS[name].run(options, rows)
    except Exception as error:
        traceback.print_exc()
        rows.fail("whole", described(error))


def lines_of(command: Sequence[str], limit_s: float) -> Iterator[str]:
    """What a process prints, line by line. It and its children are killed after ``limit_s``.

    Raises:
        ChildError: it was killed, or ended otherwise than it should; after the lines it printed.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    late = threading.Event()

    def kill() -> None:
        late.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, kill)
    timer.start()
    try:
        assert process.stdout is not None
        yield from process.stdout
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            kill()
            process.wait()
    if late.is_set():
        raise ChildError(f"stopped: not done after {limit_s:.0f} s")
    if process.returncode:
        raise ChildError(f"its process ended with status {process.returncode}: see its output above")


class ChildError(Exception):
    """A section's process did not end well."""


def run_section(name: str, command: Sequence[str], limit_s: float, emit: Callable[[Row], None]) -> None:
    """Run ``command``, which prints rows, and hand each to ``emit``; a failure is a row, too."""
    try:
        for line in lines_of(command, limit_s):
            emit(from_line(line))
    except (ChildError, ValueError, TypeError) as error:
        Recorder(name, emit).fail("whole", described(error))


def child_command(name: str, arguments: Sequence[str], work: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), *arguments, "--work", str(work), "--child", name]


# ---- all of them ----


def run_all(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the chosen sections, show what came of them, and return the exit status."""
    started, rows, seconds = time.monotonic(), [], {}

    def emit(row: Row) -> None:
        rows.append(row)
        shown = (f"{row.section}.{row.name}", row.measured_text, row.aim_text and f"({row.aim_text})", row.status)
        print(f"[{time.monotonic() - started:5.0f} s]", *filter(None, shown), row.note, flush=True)

    about: dict[str, Any] = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), **versions_here()}
    try:
        about |= open_rig(options).about() if options.here else ask_about(options, arguments)
        chosen = options.only
    except Exception as error:
        emit(Row(ABOUT, "card", FAILED, note=described(error)))
        chosen = []
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    for name in chosen:
        begun, left = time.monotonic(), options.limit - (time.monotonic() - started)
        if left < LEAST_S:
            emit(Row(name, "whole", FAILED, note=f"not begun: {options.limit:.0f} s are over; see --only and --limit"))
        elif options.here:
            run_here(name, options, emit)
        else:
            limit_s = min(SECTIONS[name].limit_s, left)
            run_section(name, child_command(name, arguments, options.work), limit_s, emit)
        seconds[name] = time.monotonic() - begun
    print()
    show_table(rows, "\n".join(f"{name} {value}" for name, value in about.items()))
    if options.markdown:
        options.markdown.write_text(to_markdown(about, rows))
    print(json.dumps(result_of(about, rows, seconds)))
    return int(any(row.status == FAILED for row in rows))


def ask_about(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, str]:
    """Card and versions, from a process of its own; raises `ChildError` with its last words."""
    said: dict[str, str] = json.loads("".join(lines_of(child_command(ABOUT, arguments, options.work), ABOUT_LIMIT_S)))
    if "error" in said:
        raise ChildError(said["error"])
    return said


def versions_here() -> dict[str, str]:
    return {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


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
    parser.add_argument("--only", type=_sections, default=list(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--emulate", action="store_true", help="on a CPU, tiny: to execute every line")
    parser.add_argument("--here", action="store_true", help="all in this process, with no limits: for a debugger")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of the whole run (default: %(default)g)")
    parser.add_argument("--work", type=Path, help="keep compiled kernels and random checkpoints here")
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    parser.add_argument("--layers", type=int, help="of the random Llama-3.2-1B, in place of its 16")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M: a converted directory, or its GGUF file")
    parser.add_argument("--expect", type=Path, help="its greedy tokens, made by --make-expected on a CPU")
    parser.add_argument("--make-expected", type=Path, help="make that file from --smollm2, on this machine's CPU")
    parser.add_argument("--sanitize-target", action="store_true", help="run each kernel once, and nothing else")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _sections(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"there is no section {', '.join(unknown)}: choose from {', '.join(SECTIONS)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.make_expected:
        from gpu_model import make_expected

        return make_expected(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds: no section is left behind
    with work_directory(options.work) as options.work:
        if options.child:
            run_child(options.child, options)
            return 0
        if options.sanitize_target:
            from gpu_sanitizer import run_target

            run_target(open_rig(options))
            return 0
        return run_all(options, arguments)


if __name__ == "__main__":
    sys.exit(main())
