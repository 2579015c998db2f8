"""`benchmarks/gpu.py` without a GPU: every section is executed on an emulated one, and what goes wrong is told."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")

import gpu
import gpu_rig
from gpu_checkpoint import write_checkpoint
from gpu_model import compare_tokens
from gpu_report import FAILED, MET, MISSED, SKIPPED, Recorder, Row, result_of, to_line, to_markdown
from gpu_sanitizer import judge
from gpu_sizes import TINY

from headwise.kernels.cuda.cards import count_cards
from headwise.runtime.config import EngineConfig

SCRIPT = Path(gpu.__file__)
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

    def run(self, q, paged_kv_cache):
        assert tuple(q.shape) == self.query
        for pages in paged_kv_cache:
            assert tuple(pages.shape[1:]) == self.page and pages.is_contiguous()
        return torch.zeros_like(q)
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


@pytest.fixture(scope="module")
def emulated(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any], str]:
    """A run of everything in one process: status, output, result, markdown."""
    work = tmp_path_factory.mktemp("work")
    (work / "bin").mkdir()
    tool = work / "bin" / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    (work / "flashinfer.py").write_text(FLASHINFER)
    paths = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONPATH": str(work)}
    table = work / "table.md"
    return *run("--here", "--work", work, "--smollm2", tiny, "--markdown", table, **paths), table.read_text()


def test_every_section_runs_to_its_end_on_an_emulated_gpu(emulated: tuple[int, str, dict[str, Any], str]) -> None:
    status, output, result, _ = emulated
    assert result["failed"] == {}
    assert status == 0
    expected_skips = set() if HAS_TORCH else {"decode.over_torch", "decode.over_flashinfer", "prefill.over_torch"}
    assert set(result["skipped"]) == expected_skips
    assert list(result["seconds"]) == list(gpu.SECTIONS)
    for name in ("sanitizer.memcheck", "sanitizer.racecheck", "smollm2.same_tokens", "correctness.write_e4m3"):
        assert name in output


def test_the_result_has_every_promised_number(emulated: tuple[int, str, dict[str, Any], str]) -> None:
    result = emulated[2]
    assert {"benchmark", "date", "card", "triton", "numpy"} <= set(result)
    promised = {
        "correctness": {"attend_bf16", "attend_fp16", "attend_int8", "attend_e4m3", "ops_rope_bfloat16"},
        "decode": {"copy_bandwidth", "b1_c48_of_bandwidth", "b2_c48_of_bandwidth"},
        "heads": {"decode_over_uniform", "prefill_over_uniform"},
        "prefill": {"t32"},
        "copies": {"block8_h2d", "block8_d2h", "block8_both", "block8_hidden", "block8_decode", "block16_both"},
        "model": {"eager_b1_of_bandwidth", "graphs_b2_of_bandwidth", "graphs_same_tokens"},
        "smollm2": {"tokens_float32", "tokens_bfloat16"},
        "published": {"ttft_over_uniform", "tbt_over_uniform"},
        "recycling": {"throughput_ratio"},
    }
    if HAS_TORCH:
        promised["decode"] |= {"b2_c48_over_torch", "b2_c48_over_flashinfer"}
        promised["prefill"] |= {"t32_over_torch"}
    for section, names in promised.items():
        assert names <= set(result["results"][section]), section
    assert result["results"]["model"]["graphs_same_tokens"] == 1.0


def test_the_emulated_kernels_compute_what_the_reference_does(emulated: tuple[int, str, dict[str, Any], str]) -> None:
    assert not [name for name in emulated[2]["missed"] if name.startswith("correctness.")]


def test_table_and_markdown_have_a_line_for_every_number(emulated: tuple[int, str, dict[str, Any], str]) -> None:
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
    made = {name: [row[:4] for row in rows[:1]] if name != "prompts" else rows[:1] for name, rows in made.items()}
    arguments = ["--emulate", "--here", "--only", "smollm2", "--smollm2", str(tiny), "--expect", str(expected)]
    for wrong, status in ((0, 0), (7, 1)):
        made["tokens"][0][2] += wrong
        made["margins"][0][2] = 0.5
        expected.write_text(json.dumps(made))
        assert gpu.main([*arguments, "--work", str(tmp_path)]) == status
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["results"]["smollm2"]["tokens_float32"] == (2 if wrong else 4)
    assert "smollm2.same_tokens" in result["failed"]


# ---- processes that do not end well ----


def rows_of(code: str, limit_s: float) -> list[Row]:
    rows: list[Row] = []
    gpu.run_section("decode", [sys.executable, "-c", code], limit_s, rows.append)
    return rows


def test_rows_before_a_crash_are_kept_and_the_crash_is_a_row() -> None:
    line = to_line(Row("decode", "kept", MET, 1.0))
    rows = rows_of(f"import os; print({line!r}, flush=True); os.abort()", 60)
    assert [(row.name, row.status) for row in rows] == [("kept", MET), ("whole", FAILED)]
    assert "status -6" in rows[1].note


def test_a_section_that_hangs_is_stopped() -> None:
    rows = rows_of("import time; time.sleep(600)", 0.5)
    assert [(row.name, row.status) for row in rows] == [("whole", FAILED)]
    assert "not done after" in rows[0].note


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
        with rows.case("b8"):
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


@pytest.mark.parametrize(
    ("status", "said", "holds"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", True),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        (86, "========= Invalid __global__ read of size 16 bytes\n========= ERROR SUMMARY: 3 errors", False),
        (86, "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", False),
        (1, "========= ERROR SUMMARY: 0 errors", False),
        (0, "Device not supported", False),
    ],
)
def test_the_sanitizer_is_believed_only_when_it_says_that_it_found_nothing(status: int, said: str, holds: bool) -> None:
    assert judge(status, said)[0] is holds


# ---- the real rig, on a stand-in for CuPy ----


class FakeStream:
    ptr = 77

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking, "a stream that waits for the legacy default stream"

    def synchronize(self) -> None:
        pass


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        assert isinstance(stream, FakeStream)

    def synchronize(self) -> None:
        pass


class FakeArray(np.ndarray):
    """A NumPy array with what CuPy's has besides."""

    def set(self, array: np.ndarray) -> None:
        assert array.dtype == self.dtype == np.uint8
        self[...] = array


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
        Device=lambda: SimpleNamespace(compute_capability="90"),
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
    kernels = "kernels"

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
    monkeypatch.setattr("headwise.runtime.cuda_device.CudaDevice", FakeDevice)
    monkeypatch.setattr(gpu_rig, "CudaPrograms", lambda directory: directory)
    monkeypatch.setattr(gpu_rig, "driver_cuda", lambda: 13)
    return fake


def test_the_real_rig_brings_arrays_to_the_device_and_back(cupy: SimpleNamespace, tmp_path: Path) -> None:
    rig = gpu_rig.CudaRig(tmp_path)
    for dtype in ("float32", "int32", "bfloat16"):
        array = np.arange(24).reshape(2, 3, 4).astype(gpu_rig.numpy_dtype(dtype))
        there = rig.upload(array)
        assert there.shape == array.shape
        assert there.dtype == array.dtype
        np.testing.assert_array_equal(rig.download(there), array)


def test_the_real_rig_copies_and_times_on_the_current_stream(cupy: SimpleNamespace, tmp_path: Path) -> None:
    rig = gpu_rig.CudaRig(tmp_path)
    memory = np.zeros(8, np.uint8)
    with rig.current():
        rig.copy(memory, memory)
        rig.copy_side_by_side((memory, memory), (memory, memory))
        rig.flush()
        first, last = rig.mark(), rig.mark()
        rig.wait(last)
        rig.synchronize()
    address = memory.ctypes.data
    assert cupy.copies[:3] == [(address, address, 8, 4, 77)] * 3
    assert cupy.copies[3][1:] == (0, gpu_rig.FLUSH_BYTES, 77)
    assert rig.seconds_between(first, last) == 0.0025


def test_the_real_rig_tells_card_and_versions(cupy: SimpleNamespace, tmp_path: Path) -> None:
    rig = gpu_rig.CudaRig(tmp_path)
    about = rig.about()
    assert about["card"] == "NVIDIA H200, 141 GiB"
    assert (about["cuda"], about["driver_cuda"], about["cupy"]) == ("13.0", "13.1", "14.2.0")
    assert (rig.target.sm, rig.target.cuda) == (90, 13)
    assert rig.free_bytes() == 5 << 30
    assert (rig.block_copy(), rig.copy_stream("load"), rig.host_arena(9)) == ("copy", "load", 9)
    assert isinstance(rig.device(EngineConfig()), FakeDevice)
