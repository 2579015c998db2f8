"""`benchmarks/gpu_checks.py` without a GPU: every section runs on an emulated one, and what goes wrong is told."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

from gpu import checks as gpu
from gpu import join
from gpu import rig as gpu_rig
from gpu import sanitizer as gpu_sanitizer
from gpu.bench import MOST_FLUSHES, Bench
from gpu.cases import decode_step, half_windowed, prefill_step
from gpu.checkpoint import write_checkpoint
from gpu.emulated import EmulatedRig
from gpu.latent_ranks import error_of, step_of
from gpu.model import check_file, compare_tokens, sha256_of
from gpu.random_bytes import RANDOM_BYTES, fill
from gpu.report import (
    FAILED,
    MET,
    MISSED,
    SKIPPED,
    VOID,
    CaseLine,
    Recorder,
    Report,
    Row,
    result_of,
    to_line,
    to_markdown,
)
from gpu.sanitizer import judge
from gpu.sizes import TINY
from gpu.spot_check import WrongError, check_step
from support.gpu.cuda_shim import ShimPrograms

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda.cards import count_cards
from headwise.kernels.cuda.programs import compile_source
from headwise.runtime.config.engine_config import EngineConfig

SCRIPT = gpu.SCRIPT
HAS_TORCH = importlib.util.find_spec("torch") is not None

SANITIZER = r"""#!/bin/sh
# Stands for compute-sanitizer: runs what memcheck is to look at, and says what the tools say.
tool=$2
while [ "$1" != --error-exitcode ]; do shift; done
shift 2
if [ $tool = racecheck ]; then echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"; exit; fi
"$@" || exit
echo "========= ERROR SUMMARY: 0 errors"
"""

FLASHINFER = '''
"""Stands for FlashInfer: as much of its interface as the benchmark calls, with its checks."""
import torch

__version__ = "0.0"


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "HND"

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             q_data_type="float16", kv_data_type=None, sm_scale=None):
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert int(indptr[-1]) == len(indices) and len(last_page_len) == len(indptr) - 1
        self.page = (num_kv_heads, page_size, head_dim)
        self.query = (len(last_page_len), num_qo_heads, head_dim)
        self.tables, self.scale = indices.reshape(len(last_page_len), -1), sm_scale
        self.lengths = (self.tables.shape[1] - 1) * page_size + last_page_len

    def run(self, q, paged_kv_cache):
        assert tuple(q.shape) == self.query
        for pages in paged_kv_cache:
            assert tuple(pages.shape[1:]) == self.page and pages.is_contiguous()
        return torch.stack([self._attend(*each, paged_kv_cache) for each in zip(q, self.tables, self.lengths)])

    def _attend(self, q, table, length, cache):
        heads, _, head_dim = self.page
        keys, values = (
            pages[table.long()].transpose(0, 1).reshape(heads, -1, head_dim)[:, :length].float() for pages in cache
        )
        queries = q.float().reshape(heads, -1, head_dim)
        weights = torch.softmax(queries @ keys.transpose(1, 2) * self.scale, -1)
        return (weights @ values).reshape(q.shape).to(q.dtype)
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", TINY.llama)


def run(*arguments: object, **environment: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, all that was printed, and the result."""
    command = [sys.executable, str(SCRIPT), "--emulate", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout, json.loads(done.stdout.splitlines()[-1])


_LONG = {"compile", "correctness", "model", "stages", "mtp", "published", "smollm2", "sanitizer"}
"""Those that take most of the time. What runs in them, tests of kernels and of engines on an emulated GPU show, too."""
LONG = tuple(name for name in gpu.SECTIONS if name in _LONG | {"prefill"})  # which tells what was compiled before
SHORT = tuple(name for name in gpu.SECTIONS if name not in _LONG)
Emulated = tuple[int, str, dict[str, Any], str]


@pytest.fixture(scope="module", params=[SHORT, pytest.param(LONG, marks=pytest.mark.soak)], ids=["short", "long"])
def emulated(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """A run of these sections in one process: status, output, result, markdown."""
    work, sections = tmp_path_factory.mktemp("work"), ",".join(request.param)
    (work / "bin").mkdir()
    tool = work / "bin" / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    (work / "flashinfer.py").write_text(FLASHINFER)
    paths = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONPATH": str(work)}
    table = work / "table.md"
    files = ("--markdown", table, "--result", work / "result.json")
    status, output, result = run("--here", "--only", sections, "--work", work, "--smollm2", tiny, *files, **paths)
    assert tuple(result["seconds"]) == request.param
    assert json.loads((work / "result.json").read_text()) == result
    return status, output, result, table.read_text()


def test_every_section_runs_to_its_end_on_an_emulated_gpu(emulated: Emulated) -> None:
    status, output, result, _ = emulated
    assert result["failed"] == {}
    assert status == 0
    without_cudnn = {"decode.b1_c48_over_cudnn", "decode.b2_c48_over_cudnn", "prefill.t32_over_cudnn"}
    without_torch = {"decode.over_torch", "decode.over_flashinfer", "prefill.over_torch"}
    absent = {row for row in (without_cudnn if HAS_TORCH else without_torch) if row.split(".")[0] in result["seconds"]}
    assert set(result["skipped"]) == absent
    assert all(row in output for row in absent)
    told = {
        "sanitizer": {"sanitizer.memcheck_cxx", "sanitizer.memcheck_triton", "sanitizer.racecheck_triton"},
        "smollm2": {"smollm2.same_tokens"},
        "correctness": {"correctness.write_e4m3", "correctness.block_tables"},
    }
    for name in result["seconds"]:
        assert all(row in output for row in told.get(name, ()))


WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.path[:] = [path for path in sys.path if path != ROOT]
sys.meta_path[:] = [Absent(), *(finder for finder in sys.meta_path if "editable" not in str(finder).lower())]
"""
"""What Python does at its start, with names in place of these two: as if packages were not installed."""

ABSENT = (
    "paddle", "ray", "zmq", "gguf", "llguidance", "prometheus_client", "starlette", "uvicorn", "typer",
    "threadpoolctl", "pydantic", "rich",
)  # fmt: skip
"""What headwise asks for, but a machine lent for its GPU need not have, beside headwise itself."""


def test_a_machine_needs_no_more_packages_than_the_script_says(tmp_path: Path) -> None:
    told = f"ABSENT, ROOT = {set(ABSENT)!r}, {str(SCRIPT.parents[1])!r}\n"
    (tmp_path / "sitecustomize.py").write_text(told + WITHOUT)
    there = ["-c", "import importlib.util as u; print(u.find_spec('numpy').name); import headwise"]
    paths = {**os.environ, "PYTHONPATH": str(tmp_path)}
    alone = subprocess.run([sys.executable, *there], capture_output=True, text=True, env=paths, cwd="/", check=False)
    assert (alone.stdout, alone.returncode) == ("numpy\n", 1), alone.stderr
    sections = "copies,recycling"
    files = ("--work", tmp_path / "work", "--result", tmp_path / "gpu.json")
    status, _, result = run("--here", "--only", sections, *files, PYTHONPATH=str(tmp_path))
    assert (status, result["failed"]) == (0, {})
    assert list(result["seconds"]) == sections.split(",")


def test_what_is_missing_is_told_at_once_and_the_rest_is_measured(tmp_path: Path) -> None:
    told = f"ABSENT, ROOT = {{'rich', 'jinja2', 'tokenizers'}}, {str(SCRIPT.parents[1])!r}\n"
    (tmp_path / "sitecustomize.py").write_text(told + WITHOUT)
    files = ("--work", tmp_path / "work", "--result", tmp_path / "gpu.json")
    status, output, result = run("--here", "--only", "copies", *files, PYTHONPATH=str(tmp_path))
    note = "not installed: tokenizers, jinja2; what needs them fails"
    assert (status, result["failed"]) == (1, {"about.packages": note})
    assert "about.packages FAILED" in output.splitlines()[0]
    assert "| copies.block16_right |" in output, "a table without rich"


def test_the_result_has_every_promised_number(emulated: Emulated) -> None:
    result = emulated[2]
    assert {"benchmark", "date", "seed", "card", "triton", "numpy"} <= set(result)
    promised = {
        "correctness": {
            "attend_bf16",
            "attend_fp16",
            "attend_int8",
            "attend_e4m3",
            "attend_int4",
            "ops_rope_bfloat16",
            "ops_add_rms_norm_bias_bfloat16",
            "ops_rms_norm_heads_bfloat16",
            "delta_states_bfloat16",
            "kda_float16",
            "kda_states_bfloat16",
            "ssm_nano_float16",
            "ssm_granite_states_bfloat16",
            "sampling_bfloat16",
        },
        "decode": {
            "copy_bandwidth",
            "read_bandwidth",
            "peak_bandwidth",
            "copy_of_peak",
            "b1_c48_of_bandwidth",
            "b1_c48_of_peak",
            "b2_c48_of_bandwidth",
            "b2_c48_of_peak",
            "skewed_of_bandwidth",
            "skewed_of_peak",
            "together_b3_c128_over_alone",
            "together_b3_c128_of_bandwidth",
            "int8_of_peak",
            "int8_of_bandwidth",
            "float8_e4m3fn_of_bandwidth",
            "int4_of_bandwidth",
            "int4_over_own",
        },
        "heads": {"decode_over_uniform", "decode_over_one_table", "prefill_over_uniform"},
        "prefill": {"t32", "d64", "d128", "d128_tma_speedup"},
        "delta": {"b1_of_bandwidth", "t20"},
        "kda": {"b1_of_bandwidth", "t20"},
        "ssm": {"nano_b1_of_bandwidth", "nano_t20", "granite_b1_of_bandwidth"},
        "products": {"floats_1_of_bandwidth", "int8_3_of_bandwidth", "int4_1_over_floats", "fp8_3_over_floats"},
        "latents": {
            "b2_c48_of_bandwidth",
            "b2_c48_chosen_over_dense",
            *(
                f"{name}_error{cache}"
                for name in ("alone", "dense", "chosen")
                for cache in ("", "_int8", "_float8_e4m3fn", "_int4")
            ),
        },
        "latent_ranks": {
            "b2_c48_over_alone",
            *(f"{name}_{of}_error" for name in ("decodes", "mixed") for of in ("2_bfloat16", "4_bfloat16", "2_int8")),
        },
        "entries": {
            *(f"b2_rate{rate}{cache}_of_bandwidth" for rate in (4, 8) for cache in ("", "_float8_e4m3fn")),
            *(
                f"{name}_{rate}{cache}_error"
                for name in ("made", "seen")
                for rate in (4, 8)
                for cache in ("", "_int8", "_float8_e4m3fn")
            ),
        },
        "copies": {"block8_h2d", "block8_d2h", "block8_both", "block8_hidden", "block8_decode", "block16_both"},
        "model": {
            "eager_b1_of_bandwidth",
            "graphs_b2_of_bandwidth",
            "graphs_same_tokens",
            "sampled_b2_of_bandwidth",
            "host_b2",
            "draw_greedy",
            "draw_plain",
            "draw_top_k",
            "draw_top_p",
            "draw_top_k_top_p",
        },
        "moe": {"step_b1_of_bandwidth", "step_b2_of_bandwidth"},
        "mtp": {f"{way}_b{batch}_over_plain" for way in ("filled", "proposed", "drafted") for batch in (1, 2)},
        "stages": {"host_64"},
        "smollm2": {"tokens_float32", "tokens_bfloat16"},
        "published": {"ttft_over_uniform", "tbt_over_uniform"},
        "recycling": {"throughput_ratio"},
    }
    if "compile" in result["seconds"]:
        promised["prefill"] |= {"d64_registers", "d64_spilled", "d64_serialised"}
    if HAS_TORCH:
        promised["decode"] |= {"b2_c48_over_torch", "b2_c48_over_flashinfer"}
        promised["prefill"] |= {"t32_over_torch", "t32_matmul"}
    assert promised.keys() & result["seconds"].keys()
    for section in promised.keys() & result["seconds"].keys():
        assert promised[section] <= set(result["results"][section]), section
    if "model" in result["seconds"]:
        assert result["results"]["model"]["graphs_same_tokens"] == 1.0


def test_table_and_markdown_have_a_line_for_every_number(emulated: Emulated) -> None:
    _, output, result, markdown = emulated
    table = [line for line in output.splitlines() if line.startswith("│")]
    for section, numbers in result["results"].items():
        for name in numbers:
            assert any(f" {section}.{name} " in line for line in table)
            assert f"| {section}.{name} |" in markdown


def test_a_section_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    status, output, result = run("--only", "smollm2,heads", "--smollm2", nowhere, "--expect", nowhere)
    assert status == 1
    assert "FileNotFoundError" in result["failed"]["smollm2.whole"]
    assert "smollm2.whole" in output
    assert "decode_over_uniform" in result["results"]["heads"]


def test_sections_that_no_time_is_left_for_are_failures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--emulate", "--here", "--only", "heads,decode", "--limit", "0", "--work", str(tmp_path)]
    assert gpu.main(arguments) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["failed"]) == {"heads.whole", "decode.whole"}


def test_without_a_gpu_one_line_says_so() -> None:
    if count_cards():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    result = json.loads(done.stdout.splitlines()[-1])
    assert "device cuda needs" in result["failed"]["about.card"]
    assert result["seconds"] == {}


def test_an_unknown_section_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--only", "decode,everything"])
    assert "no section everything: choose from compile, correctness" in capsys.readouterr().err


def test_expected_tokens_made_beforehand_are_compared_with(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = tmp_path / "expected.json"
    assert gpu.main(["--make-expected", str(expected), "--smollm2", str(tiny)]) == 0
    made = json.loads(expected.read_text())
    made = {name: [row[:4] for row in rows[:2]] if name != "prompts" else rows[:2] for name, rows in made.items()}
    made["tokens"][1][2] += 7
    made["margins"][1][2] = 0.5
    expected.write_text(json.dumps(made))
    arguments = ["--emulate", "--here", "--only", "smollm2", "--smollm2", str(tiny), "--expect", str(expected)]
    assert gpu.main([*arguments, "--work", str(tmp_path)]) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["results"]["smollm2"]["tokens_float32"] == 4 + 2, "of the second prompt, those before the wrong one"
    assert "smollm2.same_tokens" in result["failed"]


# ---- processes that do not end well ----


def test_parts_of_a_run_have_every_section_once_and_begin_with_what_all_rest_on() -> None:
    usual = gpu.usual_sections()
    assert set(gpu.SECTIONS) - set(usual) == {"tiles"}
    parts = gpu.parts_of(usual, 3)
    assert all(part[:2] == list(gpu.EACH_PART) for part in parts)
    rest = [name for part in parts for name in part[2:]]
    assert sorted([*rest, *gpu.EACH_PART]) == sorted(usual)
    limits = [sum(gpu.SECTIONS[name].limit_s for name in part) for part in parts]
    assert max(limits) < gpu.LIMIT_S, "each gets through"
    assert gpu.parse(["--part", "2/3"]).only == parts[1]
    for wrong in ("4/3", "0/2", "x"):
        with pytest.raises(SystemExit):
            gpu.parse(["--part", wrong])
    with pytest.raises(SystemExit):
        gpu.parse(["--precompile", "90,12"])


def rows_of(code: str, limit_s: float, case_s: float | None = None) -> list[Row]:
    rows: list[Row] = []
    gpu.run_apart("decode", lambda passed: [sys.executable, "-c", code], limit_s, case_s or limit_s, rows.append)
    return rows


def test_parts_of_a_run_are_joined_section_by_section(tmp_path: Path) -> None:
    """What a later part has measured anew replaces all that an earlier one has of that section."""
    parts = []
    for name, rows in {
        "first": [Row("decode", "old", MISSED, 0.5, aim=1.0), Row("heads", "kept", FAILED, note="why")],
        "second": [Row("decode", "new", MET, 2.0, aim=1.0), Row("ipc", "whole", MET, 3.0)],
    }.items():
        parts.append(tmp_path / name)
        parts[-1].mkdir()
        report = Report({"card": name}, parts[-1] / "gpu.md", parts[-1] / "gpu.json")
        for row in rows:
            report.add(row)
            report.seconds[row.section] = 1.0
        report.save()
    join.main([str(tmp_path / "whole"), *map(str, parts)])
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert whole["card"] == "first"
    assert whole["results"] == {"decode": {"new": 2.0}, "heads": {}, "ipc": {"whole": 3.0}}
    assert whole["missed"] == {}
    assert list(whole["failed"]) == ["heads.kept"]
    lines = (tmp_path / "whole.md").read_text().splitlines()
    assert [line.split()[1] for line in lines[4:]] == ["decode.new", "heads.kept", "ipc.whole"]


def test_rows_before_a_crash_are_kept_and_the_crash_is_a_row() -> None:
    line = to_line(Row("decode", "kept", MET, 1.0))
    rows = rows_of(f"import os; print({line!r}, flush=True); os.abort()", 60)
    assert [(row.name, row.status) for row in rows] == [("kept", MET), ("whole", FAILED)]
    assert "SIGABRT (status -6)" in rows[1].note


def test_a_section_that_hangs_is_stopped() -> None:
    rows = rows_of("import time; time.sleep(600)", 0.5)
    assert [(row.name, row.status) for row in rows] == [("whole", FAILED)]
    assert "not done after" in rows[0].note


TRIAL = """
import os, sys, time
from types import SimpleNamespace

sys.path[:0] = [{benchmarks!r}]
from gpu import checks


def section(bench):
    rows, is_hurt = bench.rows, []
    bench.rows.is_broken = lambda: bool(is_hurt)
    rows.add("setup", 1.0)
    for name in {cases!r}:
        with rows.case(name) as begin:
            begin()
            rows.add(name + "_number", 2.0)
            with rows.case(name + "_peer", optional=True) as begin_peer:
                begin_peer()
                if name == "peer_crashes":
                    os.abort()
            if name == "crashes":
                os.kill(os.getpid(), 11)
            if name == "hangs":
                time.sleep(600)
            if name == "breaks":
                is_hurt.append(True)
                raise RuntimeError("cudaErrorIllegalAddress")
            if name == "raises":
                raise RuntimeError("wrong")
            rows.check(name, True)
    rows.state("end", "of all cases")


sys.modules["trial"] = SimpleNamespace(section=section)
checks.SECTIONS["trial"] = checks.Section("trial", "section", {limit_s}, {case_s})
if __name__ == "__main__":
    sys.exit(checks.main())
"""
"""A script like gpu_checks.py, of one section more, whose cases end in every way."""


def rows_of_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *cases: str, limit_s: float = 120, case_s: float = 30
) -> list[tuple[str, str, str]]:
    """(name, status, note) of what a run prints of such cases."""
    script = tmp_path / "trial.py"
    benchmarks = str(SCRIPT.parent)
    script.write_text(TRIAL.format(benchmarks=benchmarks, cases=cases, limit_s=limit_s, case_s=case_s))
    monkeypatch.setattr(gpu, "SCRIPT", script)
    monkeypatch.setitem(gpu.SECTIONS, "trial", gpu.Section("trial", "section", limit_s, case_s))
    arguments = ["--emulate", "--only", "trial"]
    options = gpu.parse([*arguments, "--work", str(tmp_path)])
    rows: list[Row] = []
    gpu.run_section("trial", options, arguments, limit_s, rows.append)
    return [(row.name, row.status, row.note) for row in rows]


def test_cases_that_crash_or_break_the_gpu_are_rows_and_those_behind_them_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows_of_trial(tmp_path, monkeypatch, "first", "crashes", "breaks", "raises", "last")
    assert [(name, status) for name, status, _ in found] == [
        ("setup", ""),
        ("first_number", ""),
        ("first", MET),
        ("crashes_number", ""),
        ("crashes", FAILED),
        ("breaks_number", ""),
        ("breaks", FAILED),
        ("raises_number", ""),
        ("raises", FAILED),
        ("last_number", ""),
        ("last", MET),
        ("end", ""),
    ], "each once, in order"
    notes = {name: note for name, _, note in found}
    assert "SIGSEGV (status -11)" in notes["crashes"]
    assert notes["breaks"] == "RuntimeError: cudaErrorIllegalAddress"
    assert notes["raises"] == "RuntimeError: wrong"


def test_a_case_that_hangs_is_stopped_in_its_time_and_one_within_another_does_not_cost_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    found = rows_of_trial(tmp_path, monkeypatch, "hangs", "peer_crashes", "last", case_s=1)
    assert time.monotonic() - began < 100, "the section's limit is not waited for"
    assert [(name, status) for name, status, _ in found] == [
        ("setup", ""),
        ("hangs_number", ""),
        ("hangs", FAILED),
        ("peer_crashes_number", ""),
        ("peer_crashes_peer", FAILED),
        ("peer_crashes", MET),
        ("last_number", ""),
        ("last", MET),
        ("end", ""),
    ]
    assert "not done after" in {name: note for name, _, note in found}["hangs"]


def test_what_a_hanging_case_leaves_no_time_for_is_a_row() -> None:
    """Of a process that imports nothing: it is in that case at once."""
    begins, hangs = to_line(CaseLine("hangs", is_over=False)), "import time; time.sleep(600)"
    found = rows_of(f"print({begins!r}, flush=True); {hangs}", 2, case_s=600)
    assert [(row.name, row.status) for row in found] == [("hangs", FAILED), ("rest", FAILED)]
    assert "not done after 2 s" in found[0].note
    assert "the section's 2 s are over" in found[1].note


def test_a_case_that_does_not_say_that_it_begins_is_told_of() -> None:
    rows = Recorder("heads", lambda row: None)
    with pytest.raises(AssertionError, match="case b8"), rows.case("b8"):
        pass


def test_every_section_with_cases_has_a_limit_for_each() -> None:
    limits = [section for section in gpu.SECTIONS.values() if section.case_s is not None]
    assert len(limits) >= 9
    assert all(section.case_s < section.limit_s - gpu.LEAST_S for section in limits if section.case_s is not None)


def test_output_that_is_no_row_is_a_failure() -> None:
    assert [row.status for row in rows_of("print('hello')", 60)] == [FAILED]


# ---- parts ----


def recorded(record: Callable[[Recorder], object]) -> Row:
    rows: list[Row] = []
    record(Recorder("heads", rows.append))
    return rows[0]


@pytest.mark.parametrize(
    ("measured", "aim", "status"),
    [
        (0.9, {"least": 0.85}, MET),
        (0.8, {"least": 0.85}, MISSED),
        (0.5, {"most": 0.55}, MET),
        (0.6, {"most": 0.55}, MISSED),
        (float("nan"), {"least": 0.85}, MISSED),
        (float("nan"), {"most": 0.55}, MISSED),
        (1.0, {}, ""),
    ],
)
def test_an_aim_is_met_or_missed(measured: float, aim: dict[str, float], status: str) -> None:
    assert recorded(lambda rows: rows.add("x", measured, **aim)).status == status


def test_what_a_case_raises_is_a_row() -> None:
    def broken(rows: Recorder) -> None:
        with rows.case("b8") as begin:
            begin()
            raise ValueError("two\nlines")

    row = recorded(broken)
    assert (row.status, row.note) == (FAILED, "ValueError: two lines")


def test_the_result_lists_what_was_missed_failed_and_skipped() -> None:
    rows = [
        Row("heads", "a", MISSED, 0.7, aim=0.55, at_most=True),
        Row("heads", "b", FAILED, note="why"),
        Row("heads", "c", SKIPPED, note="because"),
        Row("heads", "d", MISSED, float("nan"), aim=1.0),
    ]
    result = result_of({"card": "H200"}, rows, {"heads": 1.0})
    assert result["missed"] == {"heads.a": [0.7, "<= 0.55"], "heads.d": [None, ">= 1"]}
    assert result["failed"] == {"heads.b": "why"}
    assert result["skipped"] == {"heads.c": "because"}
    assert "| heads.a | 0.7 | <= 0.55 | no |  |" in to_markdown({"card": "H200"}, rows)


def test_tokens_may_differ_from_where_two_were_as_good_as_equal() -> None:
    expected = {"tokens": [[1, 2, 3], [4, 5, 6]], "margins": [[1.0, 1.0, 1.0], [1.0, 1e-5, 1.0]]}
    assert compare_tokens([[1, 2, 3], [4, 5, 6]], expected) == (6, 0.0)
    assert compare_tokens([[1, 2, 3], [4, 9, 6]], expected) == (4, 1e-5)
    assert compare_tokens([[9, 2, 3], [4, 9, 6]], expected) == (1, 1.0)


def test_a_gguf_file_that_lacks_a_piece_is_told_from_the_whole(tmp_path: Path) -> None:
    whole, piece = tmp_path / "whole.gguf", tmp_path / "piece.gguf"
    whole.write_bytes(b"12345678")
    piece.write_bytes(b"1234")
    check_file(whole, sha256_of(whole))
    check_file(tmp_path, sha256_of(whole))  # a directory has no sum
    with pytest.raises(ValueError, match="of 4 bytes"):
        check_file(piece, sha256_of(whole))


@pytest.mark.parametrize(
    ("status", "said", "verdict"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", MET),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", MET),
        (86, "========= Invalid __global__ read of size 16 bytes\n========= ERROR SUMMARY: 3 errors", FAILED),
        (86, "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", FAILED),
        (1, "========= ERROR SUMMARY: 0 errors", FAILED),
        (0, "nothing", FAILED),
        (1, "========= Error: Device not supported\n========= ERROR SUMMARY: 1 error", SKIPPED),
    ],
)
def test_the_sanitizer_is_believed_only_when_it_says_that_it_found_nothing(
    status: int, said: str, verdict: str
) -> None:
    assert judge(status, said)[0] == verdict


def test_the_sanitizer_is_found_where_cuda_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_sanitizer, "USUAL_PLACES", (f"{tmp_path}/cuda*/bin",))
    assert gpu_sanitizer.find_tool() is None
    for version in ("12.9", "13.0"):
        place = tmp_path / f"cuda-{version}" / "bin"
        place.mkdir(parents=True)
        (place / "compute-sanitizer").write_text("")
        (place / "compute-sanitizer").chmod(0o755)
    assert gpu_sanitizer.find_tool() == str(place / "compute-sanitizer")


# ---- what is left of a run that is stopped ----


def test_once_the_proof_has_failed_no_aim_is_met(tmp_path: Path) -> None:
    report = Report({"card": "H200"}, tmp_path / "table.md", tmp_path / "result.json")
    report.add(Row("correctness", "write", MET))
    assert report.add(Row("decode", "a", MET, 0.9, aim=0.85)).status == MET
    report.add(Row("correctness", "attend", FAILED, 0.5, aim=0.02, at_most=True))
    for row in (Row("decode", "b", MET, 0.9, aim=0.85), Row("decode", "c", MISSED, 0.1, aim=0.85)):
        report.add(row)
    report.add(Row("copies", "right", MET))
    assert [row.status for row in report.rows] == [MET, MET, FAILED, VOID, MISSED, MET]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["void"] == ["decode.b"]
    assert result["results"]["decode"]["b"] == 0.9
    assert "| decode.b | 0.9 | >= 0.85 | void |" in (tmp_path / "table.md").read_text()


def test_a_run_that_is_stopped_leaves_table_and_result(tmp_path: Path) -> None:
    files = ("--markdown", tmp_path / "table.md", "--result", tmp_path / "result.json", "--work", tmp_path)
    command = [sys.executable, SCRIPT, "--emulate", "--only", "heads,decode", *files]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        next(line for line in lines if "heads.decode_over_uniform" in line)
        seen = json.loads((tmp_path / "result.json").read_text())
        process.send_signal(signal.SIGTERM)
        last = list(lines)[-1]
    assert process.returncode == 128 + signal.SIGTERM
    assert "decode_over_uniform" in seen["results"]["heads"]
    result = json.loads(last)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert "stopped" in result["failed"]["run.whole"]
    assert "heads.decode_over_uniform" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(("error", "begins"), [(ConfigError("there is no GPU 0"), False), (KeyError("name"), True)])
def test_sections_run_where_the_card_is_there_but_does_not_tell_its_name(
    error: Exception, begins: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def about(self: object) -> dict[str, str]:
        raise error

    monkeypatch.setattr(EmulatedRig, "about", about)
    arguments = ["--emulate", "--here", "--only", "smollm2", "--work", str(tmp_path)]
    assert gpu.main(arguments) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ("smollm2" in result["seconds"]) is begins
    assert "about.card" in result["failed"]


# ---- what is timed ----


class TimedRig:
    """A rig whose host is ahead of the GPU once that reads ``needed`` times before the work."""

    sizes = SimpleNamespace(rounds=3, rehearsed=True)

    def __init__(self, needed: int) -> None:
        self.needed, self.flushed, self.timed = needed, 0, []

    def flush(self) -> None:
        self.flushed += 1

    def mark(self) -> int:
        return self.flushed

    def wait(self, mark: int) -> None:
        self.timed.append(mark)
        self.flushed = 0

    def has_passed(self, mark: int) -> bool:
        return self.flushed < self.needed

    def seconds_between(self, first: int, last: int) -> float:
        return float(first)


@pytest.mark.parametrize(("needed", "flushes", "late"), [(1, 1, 0), (5, 8, 0), (10**9, MOST_FLUSHES, 3)])
def test_the_gpu_reads_until_the_host_is_ahead(needed: int, flushes: int, late: int) -> None:
    rows: list[Row] = []
    bench = Bench(TimedRig(needed), Recorder("heads", rows.append), Namespace(), is_warm=True)
    assert bench.seconds({"work": lambda: None}) == {"work": flushes}
    bench.finish()
    assert [(row.name, row.measured) for row in rows] == ([("late", late)] if late else [])


def test_works_that_begin_with_the_host_are_timed_as_they_are() -> None:
    bench = Bench(TimedRig(10**9), Recorder("heads", lambda row: None), Namespace(), is_warm=True)
    assert bench.seconds({"work": lambda: None}, ahead=False) == {"work": 1}
    assert bench.late == 0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> EmulatedRig:
    return EmulatedRig(tmp_path_factory.mktemp("rig"), seed=7)


def test_timed_steps_compute_what_numpy_does(rig: EmulatedRig) -> None:
    heads, windows = TINY.attention, half_windowed(TINY.attention, TINY.window)
    assert check_step(rig, decode_step(rig, heads, 2, 96, 16, windows)) < 0.01
    assert check_step(rig, decode_step(rig, heads, 2, 96, 16, windows, one_table=True)) < 0.01
    assert check_step(rig, prefill_step(rig, heads, 40, 16, windows)) < 0.01


@pytest.mark.parametrize("wrong", ["table", "window", "unwritten"])
def test_a_step_that_computes_something_else_is_not_timed(wrong: str, rig: EmulatedRig) -> None:
    step = decode_step(rig, TINY.attention, 1, 96, 16, half_windowed(TINY.attention, TINY.window))
    if wrong == "table":
        step.batch.block_tables[...] = np.roll(step.batch.block_tables, 1, axis=1)
    elif wrong == "window":
        step.heads.sink[...] = np.where(step.heads.window, 8, 0)
    else:
        step.batch.cu_seqlens_q[...] = 0
    with pytest.raises(WrongError):
        check_step(rig, step)


def test_ranks_that_are_threads_use_a_rig_in_turns(rig: EmulatedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, in_use = rig.parts, threading.Lock()

    def multiply_heads(*arrays: Any) -> None:
        assert in_use.acquire(blocking=False), "a rig's cuBLAS is for one thread at a time"
        time.sleep(0.02)
        parts.multiply_heads(*arrays)
        in_use.release()

    monkeypatch.setattr(rig, "parts", replace(parts, multiply_heads=multiply_heads))
    step = step_of(TINY.latents, 4, ((1, 21), (1, 3)), TINY.block_size, np.random.default_rng(3))
    assert error_of(rig, step, 4) < 0.02


def test_random_memory_repeats_nothing(rig: EmulatedRig) -> None:
    size = 4 * RANDOM_BYTES + 512
    blocks = fill(rig, rig.empty(size)).view(numpy_dtype("bfloat16")).reshape(-1, 1 << 7)
    assert np.isfinite(blocks).all()
    first = blocks[:: 1 << 15].view(np.uint16)
    assert len(np.unique(first, axis=0)) == len(first)
    other = fill(rig, rig.empty(1 << 10), salt=1)
    assert not np.array_equal(other, fill(rig, rig.empty(1 << 10)))


def test_the_kernel_that_only_reads_compiles_and_runs(tmp_path: Path) -> None:
    source = str(gpu_rig.READ_SOURCE)
    kernel = ShimPrograms(tmp_path)(source, {}).kernel(gpu_rig.READ_KERNEL, 64)
    memory, sink = np.zeros((1000, 4), np.uint32), np.zeros(4, np.uint32)
    memory[77] = 0x9E3779B9, 0, 0, 0  # the number whose sum is told
    for vectors, told in ((1000, 0x9E3779B9), (77, 0)):
        sink[:] = 0
        kernel((3, 1, 1), (np.uint64(memory.ctypes.data), np.int64(vectors), np.uint64(sink.ctypes.data)))
        assert sink[0] == told
    try:
        ptx = compile_source(source, {}, 90).ptx
    except ConfigError as error:
        pytest.skip(str(error))
    loads = [index for index, line in enumerate(ptx.splitlines()) if "ld.global" in line]
    assert len(loads) == 5
    assert not any("bra" in line or "xor" in line for line in ptx.splitlines()[loads[0] : loads[3]])  # all in flight


# ---- the real rig, on a stand-in for CuPy ----


class FakeStream:
    ptr = 77

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking, "a stream that waits for the legacy default stream"

    def synchronize(self) -> None:
        pass


class FakeEvent:
    done = True

    def record(self, stream: FakeStream) -> None:
        assert isinstance(stream, FakeStream)

    def synchronize(self) -> None:
        pass


class FakeArray(np.ndarray):
    """A NumPy array with what CuPy's has besides."""

    def set(self, array: np.ndarray) -> None:
        assert array.dtype == self.dtype == np.uint8
        self[...] = array


ATTRIBUTES = {"MultiProcessorCount": 132, "MemoryClockRate": 2_619_000, "GlobalMemoryBusWidth": 5120}
"""As an H100 SXM's driver has them."""


def fake_cupy() -> SimpleNamespace:
    copies: list[tuple[int, ...]] = []
    runtime = SimpleNamespace(
        memcpyDefault=4,
        memcpyAsync=lambda *arguments: copies.append(arguments),
        memsetAsync=lambda *arguments: copies.append(arguments),
        deviceSynchronize=lambda: None,
        memGetInfo=lambda: (5 << 30, 141 << 30),
        getDeviceProperties=lambda index: {"name": b"NVIDIA H200"},
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13010,
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        Stream=FakeStream,
        Event=FakeEvent,
        Device=lambda: SimpleNamespace(compute_capability="90", attributes=ATTRIBUTES),
        get_current_stream=lambda: FakeStream(non_blocking=True),
        get_elapsed_time=lambda first, last: 2.5,
    )
    return SimpleNamespace(
        __version__="14.2.0",
        cuda=cuda,
        copies=copies,
        empty=lambda size, dtype: np.empty(size, dtype).view(FakeArray),
        asnumpy=lambda array: np.array(array).view(np.ndarray),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )


class FakeDevice:
    kernels, parts = "kernels", "parts"

    def __init__(self, config: object) -> None:
        self.config = config

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def block_copy(self) -> str:
        return "copy"

    def copy_stream(self, name: str) -> str:
        return name

    def host_arena(self, num_bytes: int) -> int:
        return num_bytes


class FakePrograms:
    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __call__(self, source: str, defines: object) -> FakePrograms:
        assert Path(source).exists()
        return self

    def kernel(self, name: str, threads: int) -> Callable[..., None]:
        return lambda grid, arguments: self.launched.append((name, threads, grid, arguments))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = fake_cupy()
    torch = SimpleNamespace(
        __version__="2.11",
        cuda=SimpleNamespace(
            stream=lambda stream: nullcontext(stream), ExternalStream=lambda ptr: ptr, empty_cache=lambda: None
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr("headwise.runtime.worker.cuda_device.CudaDevice", FakeDevice)
    monkeypatch.setattr(gpu_rig, "CudaPrograms", lambda directory: FakePrograms())
    monkeypatch.setattr(gpu_rig, "driver_cuda", lambda: 13)
    return fake


def test_the_real_rig_brings_arrays_to_the_device_and_back(cupy: SimpleNamespace, tmp_path: Path) -> None:
    rig = gpu_rig.CudaRig(tmp_path, 3)
    for dtype in ("float32", "int32", "bfloat16"):
        array = np.arange(24).reshape(2, 3, 4).astype(numpy_dtype(dtype))
        there = rig.upload(array)
        assert there.shape == array.shape
        assert there.dtype == array.dtype
        np.testing.assert_array_equal(rig.download(there), array)


def test_the_real_rig_copies_and_times_on_the_current_stream(cupy: SimpleNamespace, tmp_path: Path) -> None:
    rig = gpu_rig.CudaRig(tmp_path, 3)
    memory = np.zeros(8, np.uint8)
    with rig.current():
        rig.copy(memory, memory)
        rig.copy_side_by_side((memory, memory), (memory, memory))
        rig.read(memory.view(FakeArray))
        first, last = rig.mark(), rig.mark()
        rig.wait(last)
        rig.synchronize()
    address = memory.ctypes.data
    assert cupy.copies == [(address, address, 8, 4, 77)] * 3
    ((name, threads, grid, (where, vectors, _)),) = rig.programs.launched
    assert (name, threads, grid) == ("read_all", 512, (528, 1, 1))
    assert (where, vectors) == (address, 0)
    assert rig.has_passed(first)
    assert rig.seconds_between(first, last) == 0.0025


def test_the_real_rig_reads_all_of_its_memory_before_what_is_timed(
    cupy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_rig, "FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(gpu_rig, "_asked", lambda *fields: ", ".join(fields))
    rig = gpu_rig.CudaRig(tmp_path, 3)
    with rig.current():
        rig.flush()
        assert rig.programs.launched[0][3][1] == (1 << 12) // 16
        assert rig.clocks().startswith("clocks.sm, clocks.mem")


def test_the_real_rig_tells_its_memorys_peak_and_whether_the_gpu_can_be_used(
    cupy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = gpu_rig.CudaRig(tmp_path, 3)
    assert rig.peak_bandwidth() == pytest.approx(3.35e12, rel=1e-3), "as published of that card"
    monkeypatch.delitem(ATTRIBUTES, "MemoryClockRate")
    assert rig.peak_bandwidth() is None
    assert not rig.is_broken()

    def fails() -> None:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    cupy.cuda.runtime.deviceSynchronize = fails
    assert rig.is_broken()


def test_the_real_rig_tells_card_and_versions(cupy: SimpleNamespace, tmp_path: Path) -> None:
    rig = gpu_rig.CudaRig(tmp_path, 3)
    about = rig.about()
    assert about["card"] == "NVIDIA H200, 141 GiB"
    assert {"triton", "numpy", "driver"} <= set(about)
    assert (about["cuda"], about["driver_cuda"], about["cupy"]) == ("13.0", "13.1", "14.2.0")
    assert (rig.target.sm, rig.target.cuda) == (90, 13)
    assert rig.free_bytes() == 5 << 30
    assert (rig.block_copy(), rig.copy_stream("load"), rig.host_arena(9)) == ("copy", "load", 9)
    assert isinstance(rig.device(EngineConfig()), FakeDevice)
