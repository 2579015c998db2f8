"""Runs the CPU benchmarks, keeps their figures in `benchmarks/results/cpu.json`, and writes what README shows of them.

    python benchmarks/figures.py [--only NAME ...] [--quick]    run all, or some; --quick leaves README as it is
    python benchmarks/figures.py --table                        write README's tables from what was measured before
    python benchmarks/figures.py --check                        exit with 1 if README differs from that

Each script runs in a process of its own, one after the other. A script that fails keeps its former figures. So does one
that lacks what it needs besides headwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from figures_gpu import gpu_table
from figures_peers import PICTURE, peers_picture
from figures_table import SCRIPTS, rows, table

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
QUICK_RESULTS = RESULTS.with_name("quick.json")
GPU_RESULTS = RESULTS.with_name("gpu-h200.json")
BEGIN = "<!-- measured: begin; written by `make figures` from benchmarks/results/cpu.json -->"
END = "<!-- measured: end -->"
BEGIN_GPU = "<!-- measured on a GPU: begin; written by `python benchmarks/figures.py --table` -->"
END_GPU = "<!-- measured on a GPU: end -->"
LIMIT_S = 3600.0
"""Of one script."""
NEEDS = dict.fromkeys(
    ("peers", "peers_mixture", "peers_hybrid", "peers_state_space", "peers_drafts", "peers_shared"),
    (".venv-peers/.installed", "make peers"),
)
"""By script: the file without which it is left out, and what makes it."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SCRIPTS, help="this script; may be repeated")
    parser.add_argument("--quick", action="store_true", help="see that all run: figures of no worth, kept apart")
    parser.add_argument("--table", action="store_true", help="run nothing, write README's table")
    parser.add_argument("--check", action="store_true", help="run nothing, compare README's table")
    args = parser.parse_args(arguments)
    if args.check:
        check()
    elif args.table:
        write_readme()
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the script that runs, too
        failed = run_all(args.only or list(SCRIPTS), args.quick)
        if not args.quick:
            write_readme()
        if failed:
            sys.exit(f"failed: {', '.join(failed)}; their former figures stand")


# ---- run ----


def run_all(names: Sequence[str], quick: bool) -> list[str]:
    """Run scripts and keep what they found; the names of those that failed."""
    results, failed = QUICK_RESULTS if quick else RESULTS, []
    commit, machine = commit_of(ROOT), machine_of()
    for name in names:
        print(f"\n==== {name} ====", flush=True)
        needed, remedy = NEEDS.get(name, ("", ""))
        if not (ROOT / needed).exists():
            print(f"left out, its former figures stand: there is no {needed}, which `{remedy}` makes", flush=True)
            continue
        began, load = time.monotonic(), os.getloadavg()[0]
        last = run([sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *(["--quick"] if quick else [])])
        try:
            figures = json.loads(last or "")
            rows(name, figures)
        except (ValueError, LookupError) as error:
            print(f"{name} gave no figures that README can show: {type(error).__name__} {error}", flush=True)
            failed.append(name)
            continue
        kept = read(results)
        kept[name] = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": commit,
            "machine": machine,
            "load_before": round(load, 2),
            "seconds": round(time.monotonic() - began),
            "figures": figures,
        }
        results.parent.mkdir(exist_ok=True)
        results.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
    return failed


def run(command: Sequence[str]) -> str | None:
    """Run a script, showing what it prints; its last line, None if it failed or took longer than `LIMIT_S`."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as process:

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(LIMIT_S, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line if line.strip() else last
        except BaseException:  # Ctrl-C does not reach a session of its own
            end()
            raise
        finally:
            timer.cancel()
    return last if process.returncode == 0 else None


def commit_of(root: Path) -> str:
    """The commit that is measured, with a plus if files of the package or the benchmarks were changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "headwise", "benchmarks/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine_of() -> dict[str, Any]:
    """What figures depend on."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    names = [value.strip() for key, _, value in lines if key.strip() == "model name"]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
    }


# ---- README ----


def read(results: Path) -> dict[str, Any]:
    """What was measured before, by script."""
    if not results.exists():
        return {}
    kept: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return kept


def with_table(readme: str, results: Mapping[str, Any]) -> str:
    """README's text with the tables that belong to the results, and to those of a GPU."""
    text = between(readme, BEGIN, END, table(results))
    return between(text, BEGIN_GPU, END_GPU, gpu_table(read(GPU_RESULTS)))


def between(text: str, begin: str, end: str, what: str) -> str:
    """``text`` with ``what`` between two lines of it."""
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"README.md must have one line {begin} and, after the table, one {end}")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{what}\n\n{end}{rest.partition(end)[2]}"


def pictures(results: Mapping[str, Any]) -> dict[Path, str]:
    """README's pictures that belong to the results, by file."""
    return {README.parent / PICTURE: peers_picture(results["peers"]["figures"])} if "peers" in results else {}


def write_readme() -> None:
    results = read(RESULTS)
    README.write_text(with_table(README.read_text(encoding="utf-8"), results), encoding="utf-8")
    for file, picture in pictures(results).items():
        file.write_text(picture, encoding="utf-8")
    print(f"wrote the tables of {README.name}")


def check() -> None:
    text, results = README.read_text(encoding="utf-8"), read(RESULTS)
    remedy = "run `python benchmarks/figures.py --table`"
    if text != with_table(text, results):
        sys.exit(f"README's tables differ from benchmarks/results/{RESULTS.name} and {GPU_RESULTS.name}: {remedy}")
    for file, picture in pictures(results).items():
        if not file.exists() or file.read_text(encoding="utf-8") != picture:
            sys.exit(f"{file.name} differs from benchmarks/results/cpu.json: {remedy}")


if __name__ == "__main__":
    main()
