"""Tests of compiled code run again, in a process whose code is compiled for another CPU than this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest

_AVX_512 = "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"

OTHER_CPUS = {
    "without AVX-512": ("haswell", "+avx2,+fma,+bmi,+bmi2,+f16c"),
    "without float16": ("generic", ""),
    "without bfloat16": ("skylake-avx512", _AVX_512),
    "with bfloat16": ("cooperlake", f"{_AVX_512},+avx512bf16"),
}
"""By what they lack, or are taken to be good at: Numba's names of a CPU and its features."""

INNER = "compiled_for_other_cpus"
"""In the names of tests that do this, which are not run again within."""


def assert_passes(path: str, cpu: str, selected: str = "") -> None:
    """Run the tests of a file that ``selected`` names, or all, as one of `OTHER_CPUS` would, if this one can, too."""
    name, features = OTHER_CPUS[cpu]
    here = llvmlite.binding.get_host_cpu_features()
    if not all(here.get(feature[1:]) for feature in features.split(",") if feature):
        pytest.skip(f"this CPU has not all of {features}")
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    which = f"({selected}) and not {INNER}" if selected else f"not {INNER}"
    command = [sys.executable, "-m", "pytest", "-m", "not soak", "-k", which, "-p", "no:cacheprovider", str(Path(path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
