"""A GPU, through CuPy: its compute stream, kernels, copies and pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from headwise.cache_controller.block_tables import TableShape
from headwise.cache_controller.dtypes import dtype_bytes, numpy_dtype
from headwise.errors import DeploymentError
from headwise.kernels.cuda.all_reduce import RankSums
from headwise.kernels.cuda.block_copy import CudaBlockCopy, make_cuda_block_copy
from headwise.kernels.cuda.block_tables import CudaBlockTables
from headwise.kernels.cuda.cards import Card, check_room, open_card, spare_bytes
from headwise.kernels.cuda.cubins import CubinCache, Target
from headwise.kernels.cuda.driver import Driver
from headwise.kernels.cuda.kernels import CudaKernels
from headwise.kernels.cuda.launch import CupyLauncher, driver_cuda, empty_array
from headwise.kernels.cuda.parts import GpuParts
from headwise.kernels.cuda.programs import CudaPrograms
from headwise.kernels.cuda.step_tokens import CudaStepTokens
from headwise.runtime.config.decode_reads import codes_in_memory
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.comm import Collectives, Communicator, host_collectives
from headwise.runtime.ops.one_shot import connect_one_shot
from headwise.runtime.ops.paddle_device import open_paddle
from headwise.runtime.ops.select import make_gpu_ops
from headwise.runtime.ops.stage_links import HostLink, LinkedStage, StageLinks, host_links
from headwise.runtime.worker.device_block_tables import DeviceBlockTables
from headwise.runtime.worker.device_sampler import DeviceSampler
from headwise.runtime.worker.last_sampled import DeviceLastSampled
from headwise.transfer.cuda_sharing import CudaSharing
from headwise.transfer.cuda_stream import ComputeStream, CudaStream
from headwise.transfer.host_memory import HostArena, numa_node_of_gpu

GPU = 0
"""The one that this process sees first: Ray shows each worker its own."""


class CudaDevice:
    """`Device` on one GPU. All work of the worker's thread goes to one stream: its own, or where Paddle computes,
    Paddle's current one. Copies have others.

    parts: what kernels are made with
    sums:  of the model's ranks, once `check` has seen it

    Raises:
        ConfigError: the GPU, its driver or CuPy cannot be used, or Paddle, where that is chosen.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._card: Card = open_card(GPU)
        self.name = f"cuda ({self._card.name}, sm_{self._card.sm})"
        self.products_per_s = self._card.products_per_s
        self._compute = ComputeStream(GPU, open_paddle(GPU) if config.tensor_ops == "paddle" else None)
        self._cubins = config.cache_path / "kernels"
        with self.current():
            driver = Driver(overlaps=config.overlap_kernels)
            programs = CudaPrograms(self._cubins, driver)
            launcher = CupyLauncher(CubinCache(self._cubins, Target(self._card.sm, driver_cuda())).get, driver)
            self.ops: TensorOps = make_gpu_ops(
                config.tensor_ops, config.dtype_name, programs, launcher, config.weights_dtype,
                config.overlap_kernels,
            )  # fmt: skip
            self.sampler = DeviceSampler(self.ops, programs, numpy_dtype(config.dtype_name))
            self._tables = CudaBlockTables(programs)
            self._step_tokens = CudaStepTokens(programs)
            self.parts = GpuParts(
                launcher, programs, self.ops.empty_bytes, empty_array, _heads_of(self.ops), config.prefill_tma
            )
            self.kernels: Any = CudaKernels(self.parts)

    def check(self, card: ModelCard, model_dir: Path) -> None:
        """See `Device.check`."""
        config, layout = self._config, card.layout
        self.sums = RankSums(config.dtype_name, config.tp_size, card.config.hidden_size)
        weights = _weight_bytes(config, card, model_dir) // config.ranks
        pool = max(card.spec.num_blocks, len(card.plan.groups)) * layout.block_bytes
        check_room(self._card, {"weights": weights, "KV cache": pool})
        with self.current():
            variant = attention_of(card.config)
            self.kernels = variant.gpu_kernels(self.parts, card.layouts, config.tp_size, config.dtype_name)

    def current(self) -> AbstractContextManager[Any]:
        return self._compute.current()

    def collectives(self, comm: Communicator) -> Collectives:
        """See `Device.collectives`: over NCCL, where it can serve, for tensors of CuPy's, and for what is small by
        kernels that read the other ranks' memory, where they can."""
        if comm.size > 1 and self.ops.name == "cupy":
            from headwise.runtime.ops.nccl import connect_gpus

            connected = connect_gpus(comm)
            if connected is not None:
                sharing = self.sharing() if self._config.one_shot_all_reduce else None
                if sharing is None:
                    return connected
                return connect_one_shot(connected, comm, self.ops, sharing, self.parts.programs, self.sums)
        if comm.spans_nodes:
            raise DeploymentError(
                f"tensor-parallel ranks on several nodes need NCCL, which tensor_ops {self.ops.name} does not use: "
                "choose tensor_ops cupy, or tp_placement node"
            )
        return host_collectives(self.ops, comm)

    def stage_links(self, link: HostLink, stage: LinkedStage) -> StageLinks:
        """See `Device.stage_links`: over NCCL, where both ends can, for tensors of CuPy's."""
        from headwise.runtime.ops.gpu_ops import GpuOps

        if isinstance(self.ops, GpuOps):
            from headwise.runtime.ops.nccl_links import connect_stages

            return connect_stages(self.ops, link, stage)
        return host_links(self.ops, link, stage)

    def spare_bytes(self) -> int:
        """See `Device.spare_bytes`: all but the share of the card that is to stay free."""
        return spare_bytes(open_card(GPU), self._config.gpu_memory_utilization)

    def block_tables(self, shape: TableShape) -> DeviceBlockTables:
        return DeviceBlockTables(self.ops, self._tables, shape)

    def last_sampled(self, max_rows: int) -> DeviceLastSampled:
        return DeviceLastSampled(self.ops, self._step_tokens, max_rows)

    def block_copy(self) -> CudaBlockCopy:
        with self.current():
            return make_cuda_block_copy(self._cubins)

    def copy_stream(self, name: str) -> CudaStream:
        return CudaStream(GPU)

    def host_arena(self, num_bytes: int, is_shared: bool = False) -> HostArena:
        return HostArena(num_bytes, numa_node=numa_node_of_gpu(GPU), pin=True, is_shared=is_shared)

    def sharing(self) -> CudaSharing:
        return CudaSharing(GPU)


def _weight_bytes(config: EngineConfig, card: ModelCard, model_dir: Path) -> int:
    """Of all ranks, in memory."""
    if not config.has_packed_weights:
        return open_weights(model_dir).num_elements * dtype_bytes(config.dtype_name)
    return codes_in_memory(config, card, model_dir)


def _heads_of(ops: TensorOps) -> Callable[[Any, Any, Any], None]:
    """Products of heads, which Paddle's operations do not have: no variant that needs them is served with these."""
    from headwise.runtime.ops.gpu_ops import GpuOps

    return ops.multiply_heads if isinstance(ops, GpuOps) else _no_products


def _no_products(x: Any, weights: Any, out: Any) -> None:
    raise NotImplementedError("tensor_ops paddle")
