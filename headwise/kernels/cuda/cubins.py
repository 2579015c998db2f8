"""Machine code of the Triton kernels, compiled without a GPU or its driver, and kept on disk.

A file is named by everything its code depends on: kernel source, variant, target, and the Triton that compiled it. So
machine code built elsewhere (`precompile`) serves where Triton is not installed at all, and that of a newer Triton
where an older one is: newer ones make better code of the same source.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from threading import Lock
from typing import Any

from headwise.errors import ConfigError
from headwise.kernels.cuda.cards import release_of
from headwise.kernels.cuda.files import write_whole
from headwise.kernels.cuda.launch import CubinFile, Variant

log = logging.getLogger(__name__)

NEWEST_CUDA_12 = 12
OLDEST_TRITON = (3, 9)
"""The assembler serialises matrix products of some kernels that an older one makes."""
_REMEDY = "`pip install 'triton>=3.9,<4'`, or fill %s by `python -m headwise.kernels.cuda.precompile` where that is"
FENCED_SINCE = (3, 7, 1)
"""Triton from here on has the fences of `fenced` itself (triton-lang/triton#9610)."""
_KERNEL_IMPORT = re.compile(r"^from headwise\.kernels\.cuda\.(\w+_jit) import", re.MULTILINE)
SCRATCH_ALIGNMENT = 128
"""Bytes. CuPy's memory is on multiples of 512."""
_compiling = Lock()


@dataclass(frozen=True)
class Target:
    """A card of compute capability ``sm`` (90 for an H100) under a driver of CUDA ``cuda`` (12 or 13) or newer."""

    sm: int
    cuda: int


@dataclass(frozen=True)
class Compiled:
    """Machine code in memory, with what the compiler says of it.

    is_serialised: the assembler waits for every matrix product before the next (ptxas, C7510 and its kin)
    scratch_bytes: of device memory that each program of a grid is to have: for TMA's descriptors
    """

    cubin: bytes
    ptx: str
    name: str
    threads: int
    shared_bytes: int
    parameters: int
    registers: int
    spilled_bytes: int
    is_serialised: bool = False
    scratch_bytes: int = 0


class CubinCache:
    """The compiled variants of one target in ``directory``, which any number of processes may share.

    A Triton that is too old is told of in the log: it compiles what the directory lacks, and each kernel of those that
    is slower for it is named when it is first used.

    Raises:
        ConfigError: ``directory`` cannot be made.
    """

    def __init__(self, directory: Path, target: Target) -> None:
        self._directory, self._target = directory, target
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the kernel cache {directory} cannot be made ({error}): give another") from error
        version = _triton_version()
        if version is not None and release_of(version) < OLDEST_TRITON:
            log.warning(
                f"Triton %s is older than 3.9: some of the kernels that it compiles are slower; {_REMEDY}",
                version, directory,
            )  # fmt: skip

    def get(self, variant: Variant) -> CubinFile:
        """The machine code of ``variant``, compiled if no file has it.

        Raises:
            ConfigError: no file has it and Triton is not installed, or cannot compile it.
        """
        stem, made = self._made(variant)
        version, newest = _triton_version(), max(made, default=())
        if version is None and not made:
            raise ConfigError(
                f"{self._directory} has no machine code of kernel {stem}: `pip install triton`, or fill it by "
                "`python -m headwise.kernels.cuda.precompile` elsewhere"
            )
        if version is None or newest >= release_of(version):
            notes = made[newest]
        else:
            notes = self._directory / f"{stem}-triton{version}.json"
            _write(notes, compile_variant(variant, self._target))
        return _read(notes, variant)

    def find(self, variant: Variant) -> CubinFile | None:
        """The newest machine code of ``variant`` that is there."""
        _, made = self._made(variant)
        return _read(made[max(made)], variant) if made else None

    def _made(self, variant: Variant) -> tuple[str, dict[tuple[int, ...], Path]]:
        """How files of ``variant`` begin, and those that are there, by the Triton that made them."""
        stem = f"{variant.kernel}-sm{self._target.sm}-cuda{self._target.cuda}-{_digest(variant)}"
        return stem, {_version_of(path): path for path in self._directory.glob(f"{stem}-triton*.json")}


def compile_variant(variant: Variant, target: Target) -> Compiled:
    """``variant`` as machine code for ``target``. Takes seconds.

    Raises:
        ConfigError: Triton is not installed, or cannot compile it.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = import_module(f"headwise.kernels.cuda.{variant.module}")
    except ImportError as error:
        raise ConfigError(f"kernel {variant.kernel} needs triton ({error}): `pip install triton`") from error
    function = getattr(source, variant.kernel)
    signature = dict(variant.signature) | {name: "constexpr" for name, _ in variant.constants}
    order = {name: signature[name] for name in function.arg_names}
    multiples = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(order) if name in variant.multiples}
    described = ASTSource(function, order, dict(variant.constants), multiples)
    of_programs = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "maxnreg": variant.most_registers}
    options = {**of_programs, "enable_fp_fusion": True}
    with _compiling, _private_compiler(target) as log:
        try:
            kernel = triton.compile(described, target=GPUTarget("cuda", target.sm, 32), options=options)
        except Exception as error:
            raise ConfigError(f"kernel {variant.kernel} does not compile for sm_{target.sm} ({error})") from error
    return _compiled(kernel, log.getvalue())


@contextlib.contextmanager
def _private_compiler(target: Target) -> Iterator[io.StringIO]:
    """Triton with a cache of its own that is thrown away, and an assembler whose code the target's driver takes.

    Yields what the assembler prints.
    """
    from triton import __version__, knobs

    log = io.StringIO()
    with contextlib.ExitStack() as scopes, tempfile.TemporaryDirectory() as directory:
        for part in (knobs.cache, knobs.nvidia, knobs.runtime):
            scopes.enter_context(part.scope())
        knobs.cache.dir = directory
        knobs.nvidia.dump_ptxas_log = True
        if target.cuda <= NEWEST_CUDA_12 and not knobs.nvidia.ptxas_blackwell.version.startswith("12."):
            # Drivers of CUDA 12 take no machine code of CUDA 13's assembler; Triton brings both.
            knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path
        if release_of(__version__) < FENCED_SINCE:
            knobs.runtime.add_stages_inspection_hook = _add_fences
        with contextlib.redirect_stdout(log):
            yield log


def fenced(ptx: str) -> str:
    """``ptx`` with a fence wherever a thread has waited for its copies into shared memory.

    ``wgmma`` and ``tcgen05.mma`` read shared memory by the async proxy, ``cp.async`` writes it by the generic one: only
    behind ``fence.proxy.async`` does one see what the other wrote (PTX ISA, "Async proxy").
    """
    if re.search(r"\b(wgmma\.mma_async|tcgen05\.mma)\b", ptx) is None:
        return ptx
    return re.sub(r"\bcp\.async\.wait_(group\s+\d+|all);", r"\g<0>\n\tfence.proxy.async.shared::cta;", ptx)


def _add_fences(*compilation: Any) -> tuple[str, str]:
    """Triton's hook: called with (backend, stages, ...) to change stages, without arguments for a key of the change."""
    if compilation:
        stages = compilation[1]
        make_ptx = stages["ptx"]
        stages["ptx"] = lambda *source: fenced(make_ptx(*source))
    return "fenced", "fenced"


def _compiled(kernel: Any, log: str) -> Compiled:
    ptx = kernel.asm["ptx"]
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    registers, spilled = re.search(r"Used (\d+) registers", log), re.findall(r"(\d+) bytes spill", log)
    assert entry is not None, f"unexpected words of the compiler: {ptx[:500]}"
    assert registers is not None, f"unexpected words of the assembler: {log}"
    scratch_bytes, alignment = kernel.metadata.global_scratch_size, kernel.metadata.global_scratch_align
    assert alignment <= SCRATCH_ALIGNMENT, f"{kernel.metadata.name} needs memory on multiples of {alignment} bytes"
    return Compiled(
        cubin=kernel.asm["cubin"],
        ptx=ptx,
        name=kernel.metadata.name,
        threads=kernel.metadata.num_warps * 32,
        shared_bytes=kernel.metadata.shared,
        parameters=entry.group(1).count(".param"),
        registers=int(registers.group(1)),
        spilled_bytes=sum(map(int, spilled)),
        is_serialised="serialized" in log,
        scratch_bytes=scratch_bytes,
    )


def _digest(variant: Variant) -> str:
    sources = b"".join(path.read_bytes() for path in (*_sources(variant.module), Path(__file__)))
    return hashlib.sha256(sources + repr(variant).encode()).hexdigest()[:24]


def _sources(module: str) -> list[Path]:
    """The file of a module of kernels, and of those that it imports functions from."""
    path = Path(__file__).with_name(f"{module}.py")
    return [path, *(source for other in _KERNEL_IMPORT.findall(path.read_text()) for source in _sources(other))]


@cache
def _triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def _version_of(notes: Path) -> tuple[int, ...]:
    return release_of(notes.stem.rpartition("-triton")[2])


def _write(notes: Path, compiled: Compiled) -> None:
    """Both files, the notes last and each at once: whoever finds the notes finds all."""
    described = {
        "name": compiled.name,
        "threads": compiled.threads,
        "shared_bytes": compiled.shared_bytes,
        "parameters": compiled.parameters,
        "registers": compiled.registers,
        "spilled_bytes": compiled.spilled_bytes,
        "is_serialised": compiled.is_serialised,
        "scratch_bytes": compiled.scratch_bytes,
    }
    for path, content in ((notes.with_suffix(".cubin"), compiled.cubin), (notes, json.dumps(described).encode())):
        write_whole(path, content)


def _read(notes: Path, variant: Variant) -> CubinFile:
    described = json.loads(notes.read_text())
    if described["is_serialised"]:
        log.warning(
            f"kernel %s %s is slower than it could be: the assembler serialises its matrix products; {_REMEDY}",
            variant.kernel, dict(variant.constants), notes.parent,
        )  # fmt: skip
    return CubinFile(path=notes.with_suffix(".cubin"), **described)
