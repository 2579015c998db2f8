"""What a worker computes on: a CPU, or a GPU through CuPy. Chosen once, at start."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from headwise.cache_controller.block_tables import BlockTables, HostBlockTables, TableShape
from headwise.kernels.block_copy import BlockCopy
from headwise.kernels.select import instructions, make_block_copy
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.models.attention.base import Kernels
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.comm import Collectives, Communicator, host_collectives
from headwise.runtime.ops.select import make_ops
from headwise.runtime.ops.stage_links import HostLink, LinkedStage, StageLinks, host_links
from headwise.runtime.worker.device_sampler import DeviceSampler
from headwise.runtime.worker.last_sampled import HostLastSampled, LastSampled
from headwise.transfer.base import Stream
from headwise.transfer.connectors.cuda_ipc import DeviceSharing
from headwise.transfer.cpu_stream import CpuStream
from headwise.transfer.host_memory import HostArena

COPY_THREADS = 1
"""Threads of each direction on a CPU: copies run beside the forward pass, which wants the cores."""


class Device(Protocol):
    """One worker's.

    name:    for people
    sampler: draws tokens where their scores are; None where that is the host's memory
    products_per_s: what the hardware multiplies at most, in bfloat16, for estimates; 0: not known
    """

    name: str
    ops: TensorOps
    products_per_s: float

    @property
    def kernels(self) -> Kernels:
        """Those of the model's attention variant, once `check` has seen the model."""

    @property
    def sampler(self) -> DeviceSampler | None: ...

    def check(self, card: ModelCard, model_dir: Path) -> None:
        """Look whether the model can be served here, before its weights are loaded; make the kernels ready for it.

        Raises:
            ConfigError: it cannot.
        """

    def current(self) -> AbstractContextManager[Any]:
        """For as long as the context lasts, this thread's work goes to the device, and to its compute stream."""

    def collectives(self, comm: Communicator) -> Collectives:
        """Those of the ranks of ``comm``, all of which call this once, within `current`.

        Raises:
            DeploymentError: the ranks' devices cannot be connected.
        """

    def stage_links(self, link: HostLink, stage: LinkedStage) -> StageLinks:
        """Those over ``link``, whose other ends call this, too, within `current`.

        Raises:
            DeploymentError: the devices cannot be connected.
        """

    def spare_bytes(self) -> int:
        """Device memory that the block pool may take, of what is free now; for devices with memory of their own."""

    def block_tables(self, shape: TableShape) -> BlockTables:
        """Where the kernels read them; made, and used, within `current`."""

    def last_sampled(self, max_rows: int) -> LastSampled:
        """Where steps find the tokens of those before them; made, and used, within `current`."""

    def block_copy(self) -> BlockCopy:
        """Copies between the device's arena and the host's, for one thread."""

    def copy_stream(self, name: str) -> Stream:
        """A stream for them, beside the compute stream."""

    def host_arena(self, num_bytes: int, is_shared: bool = False) -> HostArena:
        """Host memory that the device reads and writes as fast as it can. is_shared: see `HostArena`"""

    def sharing(self) -> DeviceSharing | None:
        """How other processes of this node read the device's memory; None where it has none of its own."""


class CpuDevice:
    """`Device` on ``threads`` cores."""

    sampler, products_per_s = None, 0.0

    def __init__(self, config: EngineConfig, threads: int) -> None:
        self._kernels_name, self._threads = config.kernels, threads
        self.name = f"cpu ({threads} threads, {instructions()})"
        self.ops = make_ops(config.tensor_ops, threads, config.dtype_name, config.weights_dtype_name)

    def check(self, card: ModelCard, model_dir: Path) -> None:
        """See `Device.check`; host memory grows as it is needed."""
        self.kernels: Kernels = attention_of(card.config).host_kernels(self._kernels_name, self._threads)

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def collectives(self, comm: Communicator) -> Collectives:
        return host_collectives(self.ops, comm)

    def stage_links(self, link: HostLink, stage: LinkedStage) -> StageLinks:
        return host_links(self.ops, link, stage)

    def spare_bytes(self) -> int:
        raise NotImplementedError("a CPU's pool has a size by default")

    def block_tables(self, shape: TableShape) -> BlockTables:
        return HostBlockTables(shape)

    def last_sampled(self, max_rows: int) -> LastSampled:
        return HostLastSampled(max_rows)

    def block_copy(self) -> BlockCopy:
        return make_block_copy(self._kernels_name, COPY_THREADS)

    def copy_stream(self, name: str) -> Stream:
        return CpuStream(name)

    def host_arena(self, num_bytes: int, is_shared: bool = False) -> HostArena:
        return HostArena(num_bytes, is_shared=is_shared)

    def sharing(self) -> None:
        return None


def open_device(config: EngineConfig, threads: int) -> Device:
    """The device that the configuration names, made ready; ``threads`` are those of a CPU.

    Raises:
        ConfigError: there is no such device, or it cannot be used.
    """
    if config.device != "cuda":
        return CpuDevice(config, threads)
    from headwise.runtime.worker.cuda_device import CudaDevice

    return CudaDevice(config)
