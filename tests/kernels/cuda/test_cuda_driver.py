"""What a launch gives the driver: arguments and configuration, byte for byte as C compilers lay them out."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st
from support.gpu.host_library import STREAM, HostLibrary, LaunchAttribute, LaunchConfig
from support.gpu.machine_code import machine_code, parameters_of

from headwise.errors import ConfigError
from headwise.kernels.cuda import elementwise, kv_write
from headwise.kernels.cuda.driver import Driver, DriverKernel
from headwise.kernels.cuda.launch import Kernel
from headwise.kernels.cuda.parameters import PackedArguments, cuda_parameters, triton_parameters, waits_by_itself
from headwise.kernels.cuda.programs import SOURCES, CudaProgram, Defines, source_text
from headwise.kernels.gqa import gqa_layout

C_TYPES = {"Q": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
NUMBERS = {
    "Q": st.integers(0, 2**64 - 1),
    "q": st.integers(-(2**63), 2**63 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "f": st.floats(width=32, allow_nan=False),
}
KERNELS = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")
FUNCTION = SimpleNamespace(ptr=0xF00D)
PROGRAMMATIC = 6
"""The attribute by which the driver is told that a kernel need not wait for those in front of it."""
HEADER = Path(triton.__file__).parent / "backends/nvidia/include/cuda.h"


@given(st.data(), st.text("Qqif", max_size=40))
def test_arguments_lie_where_a_struct_has_its_members(data: st.DataObject, letters: str) -> None:
    arguments = [data.draw(NUMBERS[letter]) for letter in letters]
    packed = PackedArguments(letters)
    packed.pack(arguments)
    fields = [(f"at_{index}", C_TYPES[letter]) for index, letter in enumerate(letters)]
    members = type("Members", (ctypes.Structure,), {"_fields_": fields})
    if letters:
        read = members.from_address(packed.pointers[0])
        assert [getattr(read, name) for name, _ in fields] == arguments
    assert [number.item() for number in packed.numbers()] == arguments
    assert [number.dtype for number in packed.numbers()] == [np.dtype(letter) for letter in letters]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([1], "expected 2"),
        ([1, 2, 3], "expected 2"),
        ([1, 1 << 31], "format requires"),
        ([-1, 0], "(argument|format requires)"),  # by the version of Python
        ([1 << 64, 0], "(argument|format requires)"),
        ([1, 2.0], "not an integer"),
        ([None, 2], "not an integer"),
    ],
)
def test_what_does_not_fit_the_parameters_is_refused(arguments: list, why: str) -> None:
    with pytest.raises(ValueError, match=rf"arguments \(.*do not fit parameters 'Qi': .*{why}"):
        PackedArguments("Qi").pack(arguments)


def test_numbers_of_numpy_are_as_good() -> None:
    packed = PackedArguments("Qiqf")
    packed.pack([np.uint64(2**63), np.int32(-5), np.int64(-6), np.float32(0.1)])
    assert [number.item() for number in packed.numbers()] == [2**63, -5, -6, np.float32(0.1)]


def test_every_kernel_in_cuda_has_the_parameters_that_its_source_says() -> None:
    """That these are as wide as the compiler has them, the shim checks at each launch of a test."""
    kernels = {
        name: text for text in (path.read_text() for path in SOURCES.glob("*.cu")) for name in KERNELS.findall(text)
    }
    assert kernels
    for name, text in kernels.items():
        assert set(cuda_parameters(text, name)) <= set("Qqif"), name
    assert cuda_parameters(kernels["write_kv"], "write_kv") == "Q" * 12 + "q" * 8 + "i" * 8
    assert cuda_parameters(kernels["survey"], "survey") == "QQQQQqif"


@pytest.mark.parametrize(
    ("source", "defines"),
    [
        ("step_tokens.cu", {}),
        ("block_tables.cu", {}),
        ("elementwise.cu", elementwise.variant_of(np.dtype(np.float16))),
        ("kv_write.cu", kv_write.variant_of(gqa_layout(16, 1, 64, "int8"), np.dtype(np.float16))),
    ],
)
def test_machine_code_has_parameters_as_wide_as_the_source_says(source: str, defines: Defines) -> None:
    text, code = source_text(source), machine_code(source, defines, 90).cubin
    for name in KERNELS.findall(text):
        widths = [struct.calcsize(letter) for letter in cuda_parameters(text, name)]
        assert parameters_of(code, name) == widths, name


def test_a_kernel_of_a_source_has_that_ones_parameters() -> None:
    asked = Asked()
    program = CudaProgram("step_tokens.cu", asked, 90)
    program.kernel("fill", 64)
    program.kernel("keep", 128, 256)
    assert asked.kernels == [("fill", "QQQQi", 64, 0, False), ("keep", "QQQQQi", 128, 256, False)]


class Asked:
    """`MachineCode` that keeps what it was asked for."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, str, int, int, bool]] = []

    def kernel(self, name: str, parameters: str, threads: int, shared_bytes: int = 0, waits: bool = False) -> Kernel:
        self.kernels.append((name, parameters, threads, shared_bytes, waits))
        return lambda grid, arguments: None


def test_which_kernels_wait_by_themselves_their_source_says() -> None:
    for sm in (80, 90, 100):
        asked = Asked()
        CudaProgram("elementwise.cu", asked, sm).kernel("rms_norm", 128)
        CudaProgram("packed.cu", asked, sm).kernel("multiply_packed", 128)
        CudaProgram("packed_experts.cu", asked, sm).kernel("multiply_packed_experts", 128)
        assert [waits for *_, waits in asked.kernels] == [sm >= 90, sm >= 90, False]


def test_who_waits_by_itself_waits_before_anything_else() -> None:
    """But for weights, which nobody writes."""
    loads_weights = {"multiply_packed", "multiply_packed_many"}
    for path in SOURCES.glob("*.cu"):
        text = path.read_text()
        for name in KERNELS.findall(text):
            if waits_by_itself(text, name) and name not in loads_weights:
                body = text[text.index(f" {name}(") :].partition("{\n")[2]
                assert body.startswith("    let_next_begin();\n    wait_for_earlier();\n"), name


@pytest.mark.parametrize(("overlaps", "waits"), [(True, True), (True, False), (False, True)])
def test_who_waits_by_itself_is_launched_at_once_where_that_is_asked_for(overlaps: bool, waits: bool) -> None:
    library = HostLibrary("i")
    kernel = DriverKernel(library.driver(overlaps), FUNCTION, "walk", "i", 32, waits=waits)
    kernel((1, 1, 1), [5])
    attributes = ((PROGRAMMATIC, 1),) if overlaps and waits else ()
    assert library.launched[0].attributes == attributes


def test_parameters_that_nobody_can_pack_are_refused() -> None:
    with pytest.raises(ConfigError, match="no kernel 'walk'"):
        cuda_parameters("__global__ void walks(int tokens)", "walk")
    with pytest.raises(ConfigError, match="tokens of kernel walk is 'unsigned': give a pointer, int, long long, float"):
        cuda_parameters("__global__ void walk(const int* rows, unsigned tokens)", "walk")
    assert cuda_parameters("__global__ void walk()", "walk") == ""
    assert triton_parameters(["*fp16", "i32", "i64", "fp32"]) == "Qiqf"


def test_a_launch_is_what_it_was_asked_for_on_the_current_stream() -> None:
    library = HostLibrary("Qif")
    kernel = DriverKernel(library.driver(), FUNCTION, "walk", "Qif", 128, 4096)
    kernel((7, 2, 1), [1 << 40, -3, 0.5])
    library.stream = 2
    kernel((0, 2, 1), [1, 2, 3.0])
    kernel((1, 1, 65535), (np.uint64(9), np.int32(8), 7))
    first, last = library.launched
    assert (first.function, first.grid, first.block, first.shared_bytes) == (FUNCTION.ptr, (7, 2, 1), (128, 1, 1), 4096)
    assert (first.stream, first.arguments) == (STREAM, (1 << 40, -3, 0.5))
    assert (last.grid, last.stream, last.arguments) == ((1, 1, 65535), 2, (9, 8, 7.0))
    assert not library.entered


def test_a_thread_without_a_context_enters_it_and_launches_then() -> None:
    library = HostLibrary("i")
    library.statuses = [201]
    DriverKernel(library.driver(), FUNCTION, "walk", "i", 32)((1, 1, 1), [5])
    assert library.entered == 1
    assert [launch.arguments for launch in library.launched] == [(5,), (5,)]


def test_a_launch_that_the_driver_refuses_says_what_and_why() -> None:
    library = HostLibrary("i")
    kernel = DriverKernel(library.driver(), FUNCTION, "walk", "i", 1024, 100)
    library.statuses = [701]
    with pytest.raises(
        RuntimeError,
        match=r"not launch walk as \(3, 1, 1\) blocks of 1024 threads with 100 bytes of dynamic shared memory: "
        r"CUresult 701, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, too many resources",
    ):
        kernel((3, 1, 1), [5])
    library.statuses = [201, 999]
    with pytest.raises(RuntimeError, match=r"CUresult 999$"):
        kernel((3, 1, 1), [5])
    kernel((3, 1, 1), [6])
    assert library.launched[-1].arguments == (6,)


def test_a_driver_that_is_too_old_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"older than CUDA 11\.8"):
        Driver(SimpleNamespace(cuLaunchKernel=None), lambda: 0)


@pytest.mark.skipif(not HEADER.exists(), reason="this Triton brings no cuda.h")
def test_the_configuration_is_that_of_the_drivers_header(tmp_path: Path) -> None:
    """And so is the test's own reading of it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to read the driver's header")
    members = ("gridDimX", "blockDimX", "sharedMemBytes", "hStream", "attrs", "numAttrs")
    told = ", ".join(f"offsetof(CUlaunchConfig, {member})" for member in members)
    source = tmp_path / "config.cpp"
    source.write_text(
        "#include <cuda.h>\n#include <cstddef>\n#include <cstdio>\n#include <type_traits>\n"
        "using Launch = CUresult(const CUlaunchConfig*, CUfunction, void**, void**);\n"
        "static_assert(std::is_same<decltype(cuLaunchKernelEx), Launch>::value);\n"
        f"static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == {PROGRAMMATIC});\n"
        f"const size_t kTold[] = {{{told}, sizeof(CUlaunchConfig), offsetof(CUlaunchAttribute, value),\n"
        "                         sizeof(CUlaunchAttribute)};\n"
        'int main() { for (size_t at : kTold) printf("%zu ", at); }\n'
    )  # fmt: skip
    program = tmp_path / "config"
    subprocess.run([compiler, "-std=c++17", f"-I{HEADER.parent}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    fields = ("grid", "block", "shared_bytes", "stream", "attributes", "num_attributes")
    assert [*map(int, printed.split())] == [
        *(getattr(LaunchConfig, field).offset for field in fields), ctypes.sizeof(LaunchConfig),
        LaunchAttribute.value.offset, ctypes.sizeof(LaunchAttribute),
    ]  # fmt: skip
