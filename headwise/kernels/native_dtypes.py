"""Which dtypes this machine's CPU multiplies by instructions of its own."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_LISTS = ("flags", "Features")
"""What the line is called that lists a core's instruction sets: on x86, and on Arm."""

_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""AVX512-BF16 and AMX-BF16 on x86, BF16 of Armv8.6 on Arm."""


def multiplies_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether a core multiplies bfloat16 natively; False where the system does not say."""
    try:
        with cpuinfo.open() as lines:
            for line in lines:
                name, _, listed = line.partition(":")
                if name.strip() in _LISTS:
                    return not _BFLOAT16.isdisjoint(listed.split())
    except OSError:
        pass
    return False
