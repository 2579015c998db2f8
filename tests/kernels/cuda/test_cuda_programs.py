"""CUDA C++ to machine code by NVRTC, which needs no GPU: what comes out, what is kept, and what is said without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.gpu.machine_code import TARGETS, accesses, machine_code, need_nvrtc, spilled

from headwise.errors import ConfigError
from headwise.kernels.cuda import nvrtc, programs
from headwise.kernels.cuda.kv_write import all_variants
from headwise.kernels.cuda.nvrtc import find_nvrtc
from headwise.kernels.cuda.programs import Defines, cubin_path


@pytest.fixture(autouse=True)
def _compiler() -> None:
    need_nvrtc()


@pytest.mark.parametrize("sm", TARGETS)
def test_the_block_copy_streams_whole_vectors_all_loaded_before_the_first_is_stored(sm: int) -> None:
    compiled = machine_code("block_copy.cu", {}, sm)
    assert spilled(compiled) == []
    order = re.findall(r"\b(ld|st)\.global\.cs\.v4", compiled.ptx)
    assert order == ["ld"] * 4 + ["st"] * 4


@pytest.mark.parametrize("sm", [90, *(pytest.param(sm, marks=pytest.mark.soak) for sm in (80, 100))])
@pytest.mark.parametrize("defines", list(all_variants((128,))), ids=lambda d: f"{d['INPUT']}-{d['CACHE']}")
def test_the_kv_write_reads_and_writes_whole_vectors_without_spills(sm: int, defines: Defines) -> None:
    compiled = machine_code("kv_write.cu", defines, sm)
    assert spilled(compiled) == []
    assert accesses(compiled, "ld") - {"s32"} == {"v4.u32", "v4.f32", "u32"}  # rows; angles; numbers of the batch
    scaled = {"INT8": {"v2.u32", "f32"}, "E4M3": {"v2.u32", "f32"}, "INT4": {"v2.u32", "u32"}}  # rows; scales
    assert accesses(compiled, "st") == {"v4.u32"} | scaled.get(str(defines["CACHE"]), set())


@pytest.mark.parametrize("head_dim", [32, 64, 96, 256, 512])
@pytest.mark.parametrize("dtype", ["BF16", *(pytest.param(name, marks=pytest.mark.soak) for name in ("F16", "F32"))])
def test_every_head_size_compiles_without_spills(dtype: str, head_dim: int) -> None:
    variants = [defines for defines in all_variants((head_dim,)) if defines["INPUT"] == dtype]
    assert len(variants) == 4, "as it is, and of each cache of fewer bits"
    for defines in variants:
        assert spilled(machine_code("kv_write.cu", defines, 90)) == [], defines


def test_a_cubin_on_disk_is_found_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cubin_path(tmp_path / "cubins", "block_copy.cu", {}, 90)
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert path.stat().st_mode & 0o777 == 0o644, "other users may look there, too"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    assert cubin_path(tmp_path / "cubins", "block_copy.cu", {}, 90) == path
    with pytest.raises(ConfigError, match=r"no NVRTC .* sm_80: `pip install nvidia-cuda-nvrtc-cu12`.* found: none"):
        cubin_path(tmp_path / "cubins", "block_copy.cu", {}, 80)


def test_machine_code_of_a_compiler_that_the_driver_is_too_old_for_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = find_nvrtc(90)
    monkeypatch.setattr(good, "version", (13, 0))
    with monkeypatch.context() as patch:
        patch.setattr(programs, "find_nvrtc", lambda sm, newest: good)
        newer = cubin_path(tmp_path, "block_copy.cu", {}, 90, newest=13)
    assert cubin_path(tmp_path, "block_copy.cu", {}, 90, newest=13) == newer
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([(12, good.path)]))
    older = cubin_path(tmp_path, "block_copy.cu", {}, 90, newest=12)
    assert older != newer
    assert cubin_path(tmp_path, "block_copy.cu", {}, 90, newest=13) == older, "a newer driver takes both"


def test_other_sources_macros_and_cards_have_other_cubins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    monkeypatch.setattr(programs, "SOURCES", sources)
    kernel = sources / "kernel.cu"
    paths = set()
    for text in ("", " "):
        kernel.write_text(f'extern "C" __global__ void set(int* to) {{ *to = NUMBER; }}{text}')
        for number in (1, 2):
            paths |= {cubin_path(tmp_path, "kernel.cu", {"NUMBER": number}, sm) for sm in (80, 90)}
    assert len(paths) == 8


def test_an_error_in_a_source_comes_with_the_compilers_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SOURCES", tmp_path)
    (tmp_path / "kernel.cu").write_text('extern "C" __global__ void set(int* to) { *to = nowhere; }')
    with pytest.raises(
        ConfigError, match=r'kernel.cu does not compile .*sm_90(.|\n)*identifier "nowhere" is undefined'
    ):
        cubin_path(tmp_path, "kernel.cu", {}, 90)
    assert not list(tmp_path.glob("*.cubin"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"cannot be kept in {tmp_path}/file/cubins"):
        cubin_path(tmp_path / "file" / "cubins", "block_copy.cu", {}, 90)


def test_a_compiler_that_will_not_do_is_passed_over_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = find_nvrtc(90)
    broken = tmp_path / "libnvrtc.so.12"
    broken.write_text("no library")
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([(12, str(broken)), (12, good.path)]))
    assert find_nvrtc(90).path == good.path
    with pytest.raises(ConfigError, match=rf"sm_20: .*{broken} \(.*{good.path} \(CUDA .* cannot compile for sm_20\)"):
        find_nvrtc(20)


def test_no_compiler_newer_than_the_driver_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    good = find_nvrtc(90)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([(13, good.path)]))
    with pytest.raises(ConfigError, match="no NVRTC of CUDA 12 or older"):
        find_nvrtc(90, newest=12)
