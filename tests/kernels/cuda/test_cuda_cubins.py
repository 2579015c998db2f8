"""Machine code of the attention kernels: compiled here, without a GPU, for the cards it will run on."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headwise.errors import ConfigError

pytest.importorskip("triton")

from gpu.machine_code import loops_of as machine_loops
from gpu.machine_code import sass_of
from support.gpu.host_library import HostLibrary
from support.gpu.machine_code import parameters_of, variant_code

from headwise.kernels.cuda import cubins, dsa_ranks, gqa_ranks, mla_ranks, nvrtc, packed, precompile
from headwise.kernels.cuda.attention import HEAD_DIMS, AttentionShape, variants_of
from headwise.kernels.cuda.cubins import Compiled, CubinCache, Target, compile_variant
from headwise.kernels.cuda.dsa import IndexShape
from headwise.kernels.cuda.expanded import ExpandedShape
from headwise.kernels.cuda.gqa_ranks import RanksShape
from headwise.kernels.cuda.launch import OVERLAPS_FROM, CupyLauncher, Variant
from headwise.kernels.cuda.mla import LatentShape
from headwise.kernels.cuda.tiles import SHARED_BYTES, SHARED_BYTES_FROM_90, decode_tile, prefill_tile
from headwise.runtime.config.engine_config import EngineConfig

LLAMA = AttentionShape(share=4, head_dim=128, block_size=64, q_dtype="bfloat16", kv_dtype="bfloat16")
PREFILL, DECODE = 0, 1


def expansion_in(dtype: str) -> Variant:
    """The kernel that compiles in no time."""
    (expansion,) = packed.variants_of(packed.form_of(dtype, 8, 32, False))
    return expansion


SMALL = expansion_in("bfloat16")

SOAK = [pytest.mark.soak]
EACH_SM = [90, *(pytest.param(sm, marks=pytest.mark.soak) for sm in (80, 100))]
"""The oldest, whose instructions are fewest and best known, in a soak."""
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def loops_of(ptx: str) -> Iterator[str]:
    """What lies between a label and a branch back to it."""
    labels = {match.group(1): match.end() for match in re.finditer(r"^(\$L__\w+):", ptx, re.MULTILINE)}
    for branch in re.finditer(r"\bbra(?:\.uni)?\s+(\$L__\w+)", ptx):
        begin = labels.get(branch.group(1), branch.end())
        if begin < branch.start():
            yield ptx[begin : branch.start()]


def assert_overlaps_loads(compiled: Compiled, matrix_instruction: str) -> None:
    """Every loop that multiplies matrices also loads tiles for later rounds, without waiting for them."""
    loops = [loop for loop in loops_of(compiled.ptx) if matrix_instruction in loop]
    assert loops
    for loop in loops:
        assert loop.count("cp.async.c") >= 4


@pytest.mark.parametrize("kernel", [PREFILL, DECODE])
@pytest.mark.parametrize("sm", EACH_SM)
def test_machine_code_takes_the_arguments_of_the_signature_and_then_pointers_alone(sm: int, kernel: int) -> None:
    variant = variants_of(LLAMA, sm)[kernel]
    compiled = variant_code(variant, Target(sm, cuda=12))
    widths = parameters_of(compiled.cubin, compiled.name)
    assert widths[: len(variant.signature)] == [struct.calcsize(letter) for letter in variant.parameters]
    assert set(widths[len(variant.signature) :]) <= {8}
    assert len(widths) == compiled.parameters
    assert f".reqntid {compiled.threads}" in compiled.ptx
    assert "cluster" not in compiled.ptx.split("{")[0]


@pytest.mark.parametrize("sm", EACH_SM)
def test_decodes_that_may_begin_early_plan_before_they_wait_and_touch_nothing_else(sm: int) -> None:
    """Where the card can begin them so, and prompts never. What they plan by is written by no kernel of the step."""
    prompts, decodes = (variants_of(LLAMA, sm)[kernel] for kernel in (PREFILL, DECODE))
    assert (prompts.waits, decodes.waits) == (False, sm >= OVERLAPS_FROM)
    compiled = variant_code(decodes, Target(sm, cuda=12))
    before, waits, after = compiled.ptx.partition("griddepcontrol.wait")
    assert bool(waits) == decodes.waits
    if waits:
        pointers = [decodes.signature[int(at)][0] for at in re.findall(r"ld\.param\.b64.*_param_(\d+)\]", before)]
        assert sorted(pointers) == ["cu_seqlens_q", "head_sink", "head_window", "seq_lens"]
        assert not re.search(r"\b(st|atom|red|cp)\.(global|async)", before)
        assert not re.search(r"\bret;", before)  # what has nothing to do must not seem to have waited either
        assert "griddepcontrol.wait" not in after


@pytest.mark.parametrize("sm", EACH_SM[:1] + EACH_SM[2:])
def test_matrix_instructions_see_what_was_copied_into_shared_memory(sm: int) -> None:
    ptx = variant_code(variants_of(LLAMA, sm)[PREFILL], Target(sm, cuda=12)).ptx
    for loop in loops_of(ptx):
        for copied in re.split(r"cp\.async\.wait_group", loop)[1:]:
            before, multiplies, _ = copied.partition(MATRIX_INSTRUCTION[sm])
            assert not multiplies or "fence.proxy.async" in before


def test_fences_are_added_where_the_compiler_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = "\tcp.async.wait_group \t0;\n\tbar.sync \t0;\n"
    assert cubins.fenced(copied + "mma.sync.aligned") == copied + "mma.sync.aligned"
    assert cubins.fenced(copied + "wgmma.mma_async.sync").startswith(
        "\tcp.async.wait_group \t0;\n\tfence.proxy.async.shared::cta;\n\tbar.sync"
    )
    prefill = variants_of(replace(LLAMA, head_dim=64), 90)[PREFILL]
    monkeypatch.setattr(cubins, "FENCED_SINCE", (99,))
    ptx = compile_variant(prefill, Target(90, 12)).ptx
    waits = re.findall(r"cp\.async\.wait_group\s+\d+;(\s+fence\.proxy\.async)?", ptx)
    assert waits
    assert all(waits)


@pytest.mark.parametrize("sm", EACH_SM)
def test_prefill_uses_the_tensor_cores_of_the_card_and_overlaps_its_loads(sm: int) -> None:
    compiled = variant_code(variants_of(LLAMA, sm)[PREFILL], Target(sm, cuda=12))
    assert not compiled.is_serialised
    assert_overlaps_loads(compiled, MATRIX_INSTRUCTION[sm])
    # sm_80 has all accumulators in registers: a few values outside of the loops do not fit.
    assert compiled.spilled_bytes <= (128 if sm == 80 else 0)
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)


@pytest.mark.soak
@pytest.mark.parametrize("sm", [80, 90])
def test_rows_that_see_behind_themselves_spill_no_more_than_others_allow(sm: int) -> None:
    prefill, decode = variants_of(replace(LLAMA, both_ways=True), sm)
    assert decode == variants_of(LLAMA, sm)[DECODE]
    compiled = variant_code(prefill, Target(sm, cuda=12))
    assert not compiled.is_serialised
    assert_overlaps_loads(compiled, MATRIX_INSTRUCTION[sm])
    assert compiled.spilled_bytes <= (128 if sm == 80 else 0)


@pytest.mark.parametrize(
    ("sm", "kv_dtype"),
    [pytest.param(*where, marks=pytest.mark.soak) for where in ((90, "float8_e4m3fn"), (100, "int8"), (90, "int4"))],
)
def test_prefill_over_a_quantised_cache_has_the_registers_to_convert_it(sm: int, kv_dtype: str) -> None:
    shape = AttentionShape(share=4, head_dim=128, block_size=64, q_dtype="bfloat16", kv_dtype=kv_dtype)
    compiled = variant_code(variants_of(shape, sm)[PREFILL], Target(sm, cuda=12))
    assert_overlaps_loads(compiled, MATRIX_INSTRUCTION[sm])
    assert compiled.spilled_bytes <= (96 if sm == 100 else 0)
    assert not any(loop.spills for loop in machine_loops(sass_of(compiled)))


@pytest.mark.parametrize("kernel", [PREFILL, DECODE])
@pytest.mark.parametrize(
    ("sm", "kv_dtype"),
    [
        *(pytest.param(sm, "bfloat16", marks=pytest.mark.soak) for sm in (80, 90, 100)),  # as machine_code.py --served
        pytest.param(90, "int8", marks=pytest.mark.soak),
    ],
)
def test_heads_of_512_spill_next_to_nothing_within_a_loop_and_fit_the_card(sm: int, kv_dtype: str, kernel: int) -> None:
    shape = AttentionShape(share=8, head_dim=512, block_size=64, q_dtype="bfloat16", kv_dtype=kv_dtype)
    compiled = variant_code(variants_of(shape, sm)[kernel], Target(sm, cuda=12))
    assert not compiled.is_serialised
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)
    loops = list(machine_loops(sass_of(compiled)))
    assert loops
    allowed = 2 if kv_dtype == "int8" and kernel == PREFILL else 0  # of a thousand, where all columns are masked
    assert max(loop.spills for loop in loops) <= allowed


@pytest.mark.parametrize("sm", EACH_SM)
def test_decode_overlaps_its_loads_and_leaves_room_for_three_programs(sm: int) -> None:
    compiled = variant_code(variants_of(LLAMA, sm)[DECODE], Target(sm, cuda=12))
    assert_overlaps_loads(compiled, "mma.sync")
    assert compiled.spilled_bytes == 0
    assert compiled.registers * compiled.threads * 3 <= 65536
    assert compiled.shared_bytes * (2 if sm == 80 else 3) <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)


QUANTISED_DECODES = [
    pytest.param(sm, kv, size, *most, marks=[] if (sm, kv, size) in ((90, "int8", 128), (90, "int4", 128)) else SOAK)
    for kv, size, *most in (
        ("int8", 64, 630, 8), ("int8", 128, 895, 16), ("float8_e4m3fn", 64, 565, 8), ("float8_e4m3fn", 128, 770, 16),
        ("int4", 64, 345, 12), ("int4", 128, 535, 6),
    )
    for sm in (80, 90, 100)
    if (sm, kv) != (80, "float8_e4m3fn")
]  # fmt: skip


@pytest.mark.parametrize(("sm", "kv_dtype", "head_dim", "most", "wide"), QUANTISED_DECODES)
def test_decode_over_few_bits_moves_them_16_bytes_at_once_and_takes_few_instructions(
    sm: int, kv_dtype: str, head_dim: int, most: int, wide: int
) -> None:
    """For a tile: 128 keys and values of eight bits, 64 of four. Of 64 of bfloat16 it is 264 at head size 64, 387 at
    128."""
    shape = AttentionShape(share=4, head_dim=head_dim, block_size=64, q_dtype="bfloat16", kv_dtype=kv_dtype)
    compiled = variant_code(variants_of(shape, sm)[DECODE], Target(sm, cuda=12))
    assert_overlaps_loads(compiled, "mma.sync")
    assert compiled.spilled_bytes == 0
    assert compiled.registers * compiled.threads * 3 <= 65536
    assert compiled.shared_bytes * (2 if sm == 80 else 3) <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)
    (loop,) = machine_loops(sass_of(compiled))
    assert loop.instructions <= most
    assert loop.wide == wide, "copies into shared memory; of what is not read by words, stores of numbers there"


@pytest.mark.parametrize("kernel", [PREFILL, DECODE])
@pytest.mark.parametrize(
    ("sm", "kv_dtype"),
    [
        (90, "bfloat16"),
        *(pytest.param(*where, marks=SOAK) for where in ((80, "bfloat16"), (100, "bfloat16"), (90, "int8"))),
    ],
)
def test_keys_of_192_and_values_of_128_fit_the_card(sm: int, kv_dtype: str, kernel: int) -> None:
    shape = AttentionShape(8, 192, 64, "bfloat16", kv_dtype, sink_logits=True, smaller_value=128)
    compiled = variant_code(variants_of(shape, sm)[kernel], Target(sm, cuda=12))
    assert not compiled.is_serialised
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= SHARED_BYTES.get(sm, SHARED_BYTES_FROM_90)


@pytest.mark.parametrize("kernel", [PREFILL, DECODE])
def test_learned_sinks_take_no_more_registers_than_there_are(kernel: int) -> None:
    shape = AttentionShape(8, 64, 64, "bfloat16", "bfloat16", sink_logits=True)
    compiled = variant_code(variants_of(shape, 90)[kernel], Target(90, cuda=12))
    assert compiled.spilled_bytes == 0


@pytest.mark.parametrize(
    ("sm", "kv_dtype"),
    [(90, "float8_e4m3fn"), *(pytest.param(*where, marks=pytest.mark.soak) for where in ((80, "int8"), (90, "int4")))],
)
def test_decode_of_quantised_blocks_smaller_than_a_tile_overlaps_its_loads(sm: int, kv_dtype: str) -> None:
    shape = AttentionShape(share=4, head_dim=128, block_size=16, q_dtype="bfloat16", kv_dtype=kv_dtype)
    compiled = variant_code(variants_of(shape, sm)[DECODE], Target(sm, cuda=12))
    assert_overlaps_loads(compiled, "mma.sync")
    assert not any(loop.spills for loop in machine_loops(sass_of(compiled)))
    # Beside its loop a program may have some three numbers of 4 bits' scales in memory, once.
    assert compiled.spilled_bytes <= (16 if kv_dtype == "int4" else 0)


@pytest.mark.parametrize("cuda", [12, 13])
def test_machine_code_is_made_for_the_cuda_of_the_driver(cuda: int) -> None:
    compiled = compile_variant(SMALL, Target(90, cuda))
    version = re.search(r"^\.version (\d+)\.", compiled.ptx, re.MULTILINE)
    assert version is not None
    assert int(version.group(1)) <= cuda - 4  # PTX 8 belongs to CUDA 12, PTX 9 to CUDA 13
    assert compiled.cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_every_tile_is_one_the_kernels_take(sm: int) -> None:
    for head_dim in HEAD_DIMS:
        for q_dtype, kv_dtype in (
            ("bfloat16", "bfloat16"),
            ("float16", "int8"),
            ("float16", "int4"),
            ("float32", "float32"),
        ):
            for tile in (
                prefill_tile(head_dim, q_dtype, kv_dtype, sm),
                decode_tile(head_dim, q_dtype, kv_dtype, sm, 16),
            ):
                assert tile.rows >= 16
                assert tile.keys >= 16


def test_a_variant_is_compiled_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CubinCache(tmp_path, Target(90, 12)).get(SMALL)
    assert first.path.read_bytes().startswith(b"\x7fELF")
    assert first.parameters >= len(SMALL.signature)
    monkeypatch.setattr(cubins, "compile_variant", None)
    assert CubinCache(tmp_path, Target(90, 12)).get(SMALL) == first
    assert len(list(tmp_path.iterdir())) == 2  # nothing half written is left


def test_every_target_and_variant_has_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Compiled(b"code", "", "kernel", 128, 0, 3, 32, 0)
    monkeypatch.setattr(cubins, "compile_variant", lambda variant, target: made)
    shapes = (
        LLAMA,
        AttentionShape(4, 128, 64, "float16", "float16"),
        AttentionShape(4, 128, 16, "bfloat16", "bfloat16"),
    )
    paths = {
        CubinCache(tmp_path, target).get(variants_of(shape, target.sm)[DECODE]).path
        for target in (Target(80, 12), Target(90, 12), Target(90, 13))
        for shape in shapes
    }
    assert len(paths) == 9


def test_machine_code_made_elsewhere_serves_where_triton_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = CubinCache(tmp_path, Target(90, 12)).get(SMALL)
    monkeypatch.setattr(cubins, "_triton_version", lambda: None)
    assert CubinCache(tmp_path, Target(90, 12)).get(SMALL) == here
    with pytest.raises(ConfigError, match=r"no machine code.*sm80.*pip install triton.*precompile"):
        CubinCache(tmp_path, Target(80, 12)).get(SMALL)


@pytest.mark.parametrize(("installed", "found"), [(None, "3.10.0"), ("3.6.0", "3.10.0"), ("3.10.0", "3.10.0")])
def test_of_what_was_made_the_newest_that_is_not_older_than_ours_serves(
    installed: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Compiled(b"code", "", "kernel", 128, 0, 3, 32, 0)
    monkeypatch.setattr(cubins, "compile_variant", lambda variant, target: made)
    for version in ("3.9.1", "3.10.0", "3.11.0"):
        monkeypatch.setattr(cubins, "_triton_version", lambda version=version: version)
        path = CubinCache(tmp_path, Target(90, 12)).get(SMALL).path
        assert path.stem.endswith(f"-triton{version}"), "what is older is compiled anew"
    path.with_suffix(".json").unlink()
    monkeypatch.setattr(cubins, "compile_variant", None)
    monkeypatch.setattr(cubins, "_triton_version", lambda: installed)
    assert CubinCache(tmp_path, Target(90, 12)).get(SMALL).path.stem.endswith(f"-triton{found}")


@pytest.mark.parametrize(("version", "is_told"), [(None, False), ("3.6.0", True), ("3.9.0", False), ("3.10.0", False)])
def test_a_triton_that_serialises_is_told_of_at_start(
    version: str | None,
    is_told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cubins, "_triton_version", lambda: version)
    CubinCache(tmp_path, Target(90, 12))
    assert [record.message for record in caplog.records] == is_told * [
        "Triton 3.6.0 is older than 3.9: some of the kernels that it compiles are slower; "
        f"`pip install 'triton>=3.9,<4'`, or fill {tmp_path} by `python -m "
        "headwise.kernels.cuda.precompile` where that is"
    ]


def test_a_kernel_that_is_serialised_is_named_whenever_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Compiled(b"code", "", "kernel", 128, 0, 3, 32, 0, is_serialised=True)
    monkeypatch.setattr(cubins, "compile_variant", lambda variant, target: made)
    monkeypatch.setattr(cubins, "_triton_version", lambda: "3.9.0")
    cache = CubinCache(tmp_path, Target(90, 12))
    for _ in range(2):  # compiled, and found
        assert cache.get(SMALL).threads == 128
        (record,) = caplog.records
        assert re.match("kernel expand_packed {.*} is slower than it could be: .* serialises", record.message)
        caplog.clear()
    monkeypatch.setattr(cubins, "compile_variant", lambda variant, target: replace(made, is_serialised=False))
    monkeypatch.setattr(cubins, "_triton_version", lambda: "3.10.0")
    cache.get(SMALL)
    assert not caplog.records


def test_missing_triton_and_an_unusable_directory_are_config_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"kernel cache .*file/kernels cannot be made"):
        CubinCache(tmp_path / "file" / "kernels", Target(90, 12))
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="pip install triton"):
        compile_variant(SMALL, Target(90, 12))


def test_what_does_not_compile_names_the_kernel_and_the_card() -> None:
    signature = tuple((name, type_.replace("bf16", "fp8e4nv")) for name, type_ in SMALL.signature)
    wrong = replace(SMALL, signature=signature)
    with pytest.raises(ConfigError, match=r"(?s)expand_packed does not compile for sm_80.*fp8e4nv"):
        compile_variant(wrong, Target(80, 12))


def test_precompile_fills_the_cache_that_an_engine_looks_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Compiled(b"code", "", "kernel", 128, 0, 3, 32, 0)
    monkeypatch.setattr(cubins, "compile_variant", lambda variant, target: made)
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *source: nvrtc.Compiled(b"code", "", ""))
    model = ["--q-heads", "32", "--kv-heads", "8", "--head-dim", "128"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *model])
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert all(file.exists() for file in files)
    sources = sorted(file.name.split("-sm90")[0] for file in files)
    assert sources == [
        "attend", "attend", "attend", "attend_joint", "block_copy", "block_tables", "elementwise", "kv_write",
        "likeliest", "logit_edits", "packed", "packed", "sampling", "sampling", "step_tokens",
    ]  # fmt: skip
    monkeypatch.setattr(cubins, "compile_variant", None)
    for variant in variants_of(LLAMA, 90, EngineConfig().prefill_tma):
        CubinCache(tmp_path, Target(90, 12)).get(variant)
    monkeypatch.setattr(cubins, "compile_variant", lambda variant, target: made)
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *model, "--both-ways"])
    assert len({line for line in capsys.readouterr().out.splitlines() if "attend-" in line}) == 4  # of a prompt two
    mixture = ["--experts", "64", "--experts-per-token", "6", "--shared-experts", "2", "--expert-size", "1536"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *model, *mixture, "--hidden-size", "2560"])
    gated = capsys.readouterr().out.splitlines()
    more = [Path(line).name.split("-sm90")[0] for line in gated]
    assert sorted(set(more) - set(sources)) == ["experts", "multiply_experts"]
    ungated = [*model, *mixture, "--hidden-size", "2560", "--activation", "relu2"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *ungated])
    own = {Path(line).name.split("-sm90")[0] for line in {*capsys.readouterr().out.splitlines()} - {*gated}}
    assert own == {"multiply_experts"}, "the first products are others, what chooses experts is the same"
    delta = ["--delta-key-heads", "16", "--delta-value-heads", "32", "--tp-size"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *model, *delta, "2"])
    nets = [Path(line).name.split("-sm90")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(set(nets) - set(sources)) == ["carry", "convolve", "finish", "solve", "step", "walk"]
    ssm = ["--ssm-heads", "64", "--ssm-groups", "8", "--tp-size"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *model, *ssm, "2"])
    files_of_ssm = [Path(line).name.split("-sm90")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(set(files_of_ssm) - set(sources)) == ["carry", "convolve", "relate", "step", "walk"]
    with pytest.raises(SystemExit, match="64 heads in 8 groups are not members of 4 on 3 ranks evenly"):
        precompile.main([str(tmp_path), "--sm", "90", *model, *ssm, "3"])
    kda = ["--kda-heads", "32", "--tp-size"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *model, *kda, "4"])
    files_of_kda = [Path(line).name.split("-sm90")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(set(files_of_kda) - set(sources)) == ["carry", "convolve", "finish", "pair", "solve", "step", "walk"]
    with pytest.raises(SystemExit, match="32 heads of Kimi Delta Attention cannot be dealt to 3 ranks evenly"):
        precompile.main([str(tmp_path), "--sm", "90", *model, *kda, "3"])
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *model, "--tp-size", "4", "--hidden-size", "4096"])
    summed = {Path(line).name.split("-sm90")[0] for line in capsys.readouterr().out.splitlines()}
    assert summed - set(sources) == {"all_reduce"}
    with pytest.raises(SystemExit, match="32 value heads cannot share 16 key heads on 3 ranks"):
        precompile.main([str(tmp_path), "--sm", "90", *model, *delta, "3"])
    weights = ["--weight-bits", "4", "--weight-group", "128"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *model, *weights])
    made_now = {Path(line).name.partition("-")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"packed", "expand_packed"} <= made_now
    fp8 = ["--weight-bits", "8", "--weight-group", "128", "--weight-floats", "--hidden-size", "2560"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *model, *mixture, *fp8])
    made_now = {Path(line).name.partition("-")[0] for line in capsys.readouterr().out.splitlines()}
    assert made_now >= {"multiply_packed_experts", "packed_experts", "packed"}
    assert "multiply_experts" not in made_now
    with pytest.raises(SystemExit, match="--weight-floats are FP8, which has 8 bits: give --weight-bits 8, not 4"):
        precompile.main([str(tmp_path), "--sm", "90", *model, "--weight-bits", "4", "--weight-floats"])
    small_values = ["--q-heads", "16", "--kv-heads", "1,2", "--head-dim", "192,192", "--value-dim"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *small_values, "128,128"])
    assert "attend" in {Path(line).name.partition("-")[0] for line in capsys.readouterr().out.splitlines()}
    with pytest.raises(SystemExit, match=r"--value-dim \[128\] and --kv-parts \[1, 1\] do not go together"):
        precompile.main([str(tmp_path), "--sm", "90", *small_values, "128"])
    with pytest.raises(SystemExit, match="values of 256 beside keys of 192 are not supported on a GPU"):
        precompile.main([str(tmp_path), "--sm", "90", *small_values, "128,256"])
    latents = ["--q-heads", "16", "--latent-rank", "512", "--index-heads", "64"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *latents])
    made_of = {Path(line).name.split("-sm90")[0] for line in capsys.readouterr().out.splitlines()}
    assert made_of - {*sources, *more} == {
        "attend_latents", "score_tokens", "attend_chosen", "latents", "indexer", "gather_latents",
        "attend_expanded",
    }  # fmt: skip
    shared = ["--q-heads", "16", "--latent-rank", "512", "--latent-parts"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *shared, "8"])
    made_of_ranks = {Path(line) for line in capsys.readouterr().out.splitlines()}
    assert {path.name.split("-sm90")[0] for path in made_of_ranks} - {*sources, *more} == {
        "attend_latents", "latents", "latent_ranks", "gather_latents", "attend_expanded",
    }  # fmt: skip
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *shared, "8", "--index-heads", "64"])
    made_of_both = {Path(line) for line in capsys.readouterr().out.splitlines()}
    assert {path.name.split("-sm90")[0] for path in made_of_both - made_of_ranks} - {*sources, *more} == {
        "score_tokens", "attend_chosen", "indexer", "gathered",
    }  # fmt: skip
    of_entries = ["--q-heads", "64", "--entry-size", "512", "--index-heads", "64"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *of_entries])
    made_of_entries = {Path(line) for line in capsys.readouterr().out.splitlines()}
    assert {path.name.split("-sm90")[0] for path in made_of_entries} - {*sources, *more} == {
        "attend_compressed", "score_tokens", "turned", "entries", "indexer", "streams", "named_experts",
    }  # fmt: skip
    assert sum(path.name.startswith("attend_compressed") for path in made_of_entries) == 4
    with pytest.raises(SystemExit, match="--indexed-rate 8 is not one of --entry-rates 4,128"):
        precompile.main([str(tmp_path), "--sm", "90", *of_entries, "--indexed-rate", "8"])
    with pytest.raises(SystemExit, match="8 rotated numbers of a row in int8 are not supported"):
        precompile.main([str(tmp_path), "--sm", "90", *of_entries, "--kv-dtype", "int8", "--entry-turning", "4"])
    monkeypatch.setattr(cubins, "compile_variant", None)
    of_rank = ExpandedShape(LatentShape(16, 512, 64, 8, "bfloat16", "bfloat16"), 128, 128, parts=8)
    for variant in mla_ranks.variants_of(of_rank, 90):
        assert CubinCache(tmp_path, Target(90, 12)).get(variant).path.with_suffix(".cubin") in made_of_ranks
    for variant in dsa_ranks.variants_of(of_rank, IndexShape(64, 128, 8, "bfloat16", "bfloat16"), 90):
        assert CubinCache(tmp_path, Target(90, 12)).get(variant).path.with_suffix(".cubin") in made_of_both
    with pytest.raises(SystemExit, match="3 ranks cannot keep latents together in blocks of 64 tokens"):
        precompile.main([str(tmp_path), "--sm", "90", *shared, "3"])
    with pytest.raises(SystemExit, match="give --kv-heads and --head-dim, or --latent-rank"):
        precompile.main([str(tmp_path), "--q-heads", "16"])
    monkeypatch.setattr(cubins, "compile_variant", lambda variant, target: made)
    gemma = ["--q-heads", "32", "--kv-heads", "16,4", "--head-dim", "256,512"]
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *gemma])
    unlike = [Path(line).name.split("-sm90")[0] for line in capsys.readouterr().out.splitlines()]
    assert unlike.count("attend") == 5
    with pytest.raises(SystemExit, match=r"--kv-heads \[16, 4\], --head-dim \[256\], .* do not go together"):
        precompile.main([str(tmp_path), "--sm", "90", *gemma, "--head-dim", "256"])
    precompile.main([str(tmp_path), "--sm", "90", "--cuda", "12", *gemma, "--kv-parts", "1,2"])
    together = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = [path.name.split("-sm90")[0] for path in together]
    assert names.count("attend") == 6
    assert {*names} - {*sources} == {"latent_ranks", "gathered"}
    of_one = RanksShape(AttentionShape(4, 512, 32, "bfloat16", "bfloat16"), parts=2)
    for variant in gqa_ranks.variants_of_shared(of_one, 90, EngineConfig().prefill_tma):
        assert CubinCache(tmp_path, Target(90, 12)).get(variant).path.with_suffix(".cubin") in together
    for parts, message in (
        ("1,3", "32 query heads cannot share 4 KV heads evenly on 3 ranks"),
        ("1,8", "8 ranks cannot keep KV heads together in blocks of 4 tokens"),
        ("2", r"--kv-parts \[2\] do not go together"),
    ):
        with pytest.raises(SystemExit, match=message):
            precompile.main([str(tmp_path), "--sm", "90", *gemma, "--kv-parts", parts, "--block-size", "4"])
    with pytest.raises(SystemExit, match="--experts needs --hidden-size and --expert-size"):
        precompile.main([str(tmp_path), "--sm", "90", *model, *mixture])
    with pytest.raises(SystemExit, match=r"error: KV dtype float8_e4m3fn needs"):
        precompile.main([str(tmp_path), "--sm", "80", "--kv-dtype", "float8_e4m3fn", *model])


FUNCTION = 0xF00D


class FakeKernel:
    """As strict as CuPy's `RawKernel` (cupy/_core/raw.pyx, cupy/cuda/function.pxd)."""

    __slots__ = ("kernel", "max_dynamic_shared_size_bytes", "name", "preferred_shared_memory_carveout")

    def __init__(self, name: str, address: int) -> None:
        self.name, self.kernel = name, SimpleNamespace(ptr=address)


class FakeCupy(SimpleNamespace):
    """As much of CuPy as loading needs; keeps what was loaded."""

    def __init__(self, refuse: bool = False) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.functions: list[FakeKernel] = []
        device = SimpleNamespace(compute_capability="90", attributes={"MultiProcessorCount": 132})
        self.cuda = SimpleNamespace(Device=lambda: device)
        self._refuse = refuse

    def RawModule(self, *, path: str) -> SimpleNamespace:  # noqa: N802
        assert type(path) is str
        self.loaded.append(path)
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> FakeKernel:
        if self._refuse:
            raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
        self.functions.append(FakeKernel(name, FUNCTION))
        return self.functions[-1]


@pytest.fixture
def big(tmp_path: Path) -> Callable[[Variant], cubins.CubinFile]:
    """Machine code with scratch pointers behind its two parameters, and much shared memory."""
    return lambda variant: cubins.CubinFile(tmp_path / "big.cubin", "attend", 256, 100_000, 4)


def test_cupy_launches_with_the_scratch_pointers_and_shared_memory_the_code_asks_for(
    big: Callable[[Variant], cubins.CubinFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy, library = FakeCupy(), HostLibrary("QiQQ")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launcher = CupyLauncher(big, library.driver())
    assert (launcher.sm, launcher.sms) == (90, 132)
    variant = Variant("attend", (("query", "*fp16"), ("batch", "i32")), (), (), 8, 2)
    launcher.prepare(variant)
    launcher.launch(variant, (0, 1, 1), [1, 2])
    launcher.launch(variant, (7, 2, 1), [1, 2])
    assert len(cupy.loaded) == 1
    assert cupy.functions[0].max_dynamic_shared_size_bytes == 100_000
    assert cupy.functions[0].preferred_shared_memory_carveout == 100
    (launch,) = library.launched
    assert (launch.function, launch.grid, launch.block) == (FUNCTION, (7, 2, 1), (256, 1, 1))
    assert (launch.shared_bytes, launch.arguments) == (100_000, (1, 2, 0, 0))


def test_each_program_of_a_launch_has_the_memory_its_code_asks_for(
    big: Callable[[Variant], cubins.CubinFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[np.ndarray] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        given.append(np.empty(shape, dtype))
        return given[-1]

    cupy, library = FakeCupy(), HostLibrary("QQQQ")
    cupy.empty = empty
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launcher = CupyLauncher(lambda variant: replace(big(variant), scratch_bytes=256), library.driver())
    variant = Variant("attend", (("query", "*fp16"),), (), (), 8, 2)
    launcher.launch(variant, (0, 1, 1), [1])
    launcher.launch(variant, (7, 2, 1), [1])
    (scratch,) = given
    assert scratch.nbytes == 7 * 2 * 256
    assert library.launched[0].arguments == (1, scratch.ctypes.data, 0, 0)


@pytest.mark.soak
@pytest.mark.parametrize("sm", [90, 100])
def test_by_tma_no_thread_copies_what_all_rows_see(sm: int) -> None:
    shape = AttentionShape(4, 128, 64, "bfloat16", "bfloat16")
    by_tma, by_copies = (variant_code(variants_of(shape, sm, tma)[PREFILL], Target(sm, 12)) for tma in (True, False))
    assert by_tma.scratch_bytes == 2 * 128, "two descriptors"
    assert by_tma.ptx.count("cp.async.bulk.tensor.3d") >= 2
    assert "cp.async.bulk.tensor" not in by_copies.ptx
    assert by_copies.scratch_bytes == 0
    assert by_tma.ptx.count("cp.async.cg") < by_copies.ptx.count("cp.async.cg")


def test_a_driver_that_refuses_the_code_is_named_with_the_remedy(
    big: Callable[[Variant], cubins.CubinFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(refuse=True))
    with pytest.raises(ConfigError, match=r"attend.*big\.cubin.*UNSUPPORTED_PTX.*update the driver"):
        CupyLauncher(big, HostLibrary("").driver()).prepare(Variant("attend", (), (), (), 8, 2))


def test_interpreting_a_kernel_leaves_the_compiler_as_it_was() -> None:
    from headwise.kernels.cuda.interpreter import InterpreterLauncher

    codes, scale, out = np.ones((1, 32), np.int8), np.full((1, 1), 2, np.float32), np.zeros((1, 32), np.float32)
    places = (array.ctypes.data for array in (codes, scale, scale, out))
    InterpreterLauncher().launch(expansion_in("float32"), (1, 1, 1), [*places, 1, 32])
    assert (out == 2.0).all()
    assert compile_variant(SMALL, Target(90, 12)).cubin.startswith(b"\x7fELF")
