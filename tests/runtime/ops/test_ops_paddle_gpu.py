"""Paddle as a GPU worker uses it, on a CPU: its tensors' memory is lent to a CuPy that is NumPy's."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu.host_cupy import HostArray
from support.gpu.paddle_on_the_host import cupy_on_the_host
from support.later import paddle
from support.tensor_operations import HEADS, X, int32, rope

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda.cards import Card
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.ops.base import CapturingOps
from headwise.runtime.ops.paddle_device import open_paddle
from headwise.runtime.worker import cuda_device
from headwise.runtime.worker.cuda_device import CudaDevice
from headwise.transfer.cuda_stream import ComputeStream

if find_spec("paddle") is None:
    pytest.skip("paddle is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with cupy_on_the_host() as module:
        yield module


@pytest.fixture(scope="module")
def ops(module: ModuleType) -> Any:
    paddle.set_device("cpu")
    return module.PaddleGpuOps("float32")


# ---- operations ----


def test_there_are_no_graphs_and_memory_can_be_given_back(ops: Any) -> None:
    assert not isinstance(ops, CapturingOps)
    ops.give_back_memory()


def test_operations_of_another_thread_record_no_gradients(ops: Any) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(rope(ops)))
    thread.start()
    thread.join()
    assert found[0].stop_gradient


# ---- memory ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_and_kernel_arrays_are_the_same_memory(module: ModuleType, dtype: str) -> None:
    ops = module.PaddleGpuOps(dtype)
    tensor = ops.tensor(HEADS)
    array = ops.kernel_array(tensor)
    assert isinstance(array, HostArray)
    assert (array.shape, array.dtype) == (HEADS.shape, numpy_dtype(dtype))
    assert array.ctypes.data == tensor.data_ptr()
    assert ops.from_kernel_array(array) is tensor
    array[1] = 7
    np.testing.assert_array_equal(ops.numpy(tensor)[1], np.full((5, 8), 7))
    np.testing.assert_array_equal(ops.numpy(tensor)[2], HEADS[2].astype(numpy_dtype(dtype)).astype(np.float32))
    out = ops.empty_like(array)
    assert (out.shape, out.dtype) == (array.shape, array.dtype)
    out[...] = array
    np.testing.assert_array_equal(ops.numpy(ops.from_kernel_array(out)), ops.numpy(tensor))


def test_a_slice_becomes_a_contiguous_array(ops: Any) -> None:
    part = ops.kernel_array(ops.tensor(HEADS)[:, 2:4])
    assert part.flags.c_contiguous
    np.testing.assert_array_equal(part, HEADS[:, 2:4])


def test_parts_of_a_kernel_array_become_tensors_of_its_memory(ops: Any) -> None:
    array = ops.kernel_array(ops.tensor(HEADS))
    for part in (array[1:3], array[2, 1:4], array.reshape(-1)[5:11].reshape(2, 3), array.reshape(20, 8)):
        tensor = ops.from_kernel_array(part)
        assert (tensor.data_ptr(), tuple(tensor.shape)) == (part.ctypes.data, part.shape)
        part[...] = 3
        np.testing.assert_array_equal(ops.numpy(tensor), part)


def test_what_paddle_did_not_lend_becomes_no_tensor(ops: Any) -> None:
    array = ops.kernel_array(ops.tensor(HEADS))
    for other in (array.copy(), array[:, 1], array.view(np.int32)):
        with pytest.raises(TypeError, match=rf"{other.dtype} .* cannot become a tensor: only kernel arrays that came"):
            ops.from_kernel_array(other)


def test_uploads_keep_their_dtype_and_are_no_longer_the_hosts(ops: Any) -> None:
    for dtype in (np.int32, np.int64, np.float32, np.uint8):
        values = np.arange(12, dtype=dtype).reshape(3, 4).T
        array = ops.upload(values)
        np.testing.assert_array_equal(array, values)
        assert array.dtype == dtype
        assert not np.shares_memory(array, values)
        assert ops.from_kernel_array(array).data_ptr() == array.ctypes.data


def test_a_steps_arrays_come_in_one_buffer_that_paddle_reads(ops: Any) -> None:
    upload = ops.step_upload()
    first = upload(int32(5, 6, 7), int32(1, 2, 3, 4).reshape(2, 2), int32())
    tensors = [ops.from_kernel_array(array) for array in first]
    np.testing.assert_array_equal(tensors[1].numpy(), [[1, 2], [3, 4]])
    assert tensors[2].shape == [0]
    again = upload(int32(8, 9, 10), int32(4, 3, 2, 1).reshape(2, 2), int32())
    assert [array.ctypes.data for array in again] == [array.ctypes.data for array in first]
    np.testing.assert_array_equal(tensors[0].numpy(), [8, 9, 10])
    for turn in range(6):  # more than there are pinned buffers, and growing
        grown = upload(np.full(100 << turn, turn, np.int32), int32(turn))
        np.testing.assert_array_equal(ops.from_kernel_array(grown[0]).numpy(), np.full(100 << turn, turn))


def test_no_memory_is_memory_too(ops: Any) -> None:
    for array in (ops.empty_bytes(0), ops.upload(np.empty((0, 4), np.int32))):
        assert array.size == 0
        assert list(ops.from_kernel_array(array).shape) == list(array.shape)
    assert ops.empty_bytes(5).dtype == np.uint8


def test_memory_lives_as_long_as_the_last_array_in_it(ops: Any) -> None:
    tensor = ops.tensor(X)
    memory = weakref.ref(tensor)
    part = ops.kernel_array(tensor)[1:]
    del tensor
    assert memory() is not None
    np.testing.assert_array_equal(part, X[1:])
    del part
    assert memory() is None


def test_tensors_and_arrays_can_die_in_any_order() -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}; from support.gpu import paddle_on_the_host as paddle"
    found = subprocess.run(  # a deadlock is out of Python's reach
        [sys.executable, "-c", f"{code}; paddle.die_in_every_order()"], capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == "all are dead", found.stderr


# ---- stream ----


class FakeStream:
    """Of CuPy: `current` has the pointers of those that are, or None for new ones."""

    current: list[int | None] = []  # noqa: RUF012

    def __init__(self, ptr: int | None = None, device: int | None = None, non_blocking: bool = True) -> None:
        assert non_blocking
        self.ptr, self.device = ptr, device

    def __enter__(self) -> None:
        self.current.append(self.ptr)

    def __exit__(self, *error: object) -> None:
        self.current.pop()


class FakeDevice(FakeStream):
    current: list[int | None] = []  # noqa: RUF012


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    cuda = SimpleNamespace(Device=FakeDevice, Stream=FakeStream, ExternalStream=FakeStream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    return FakeStream.current


def paddle_with_cuda(**changes: Any) -> SimpleNamespace:
    stream = SimpleNamespace(stream_base=SimpleNamespace(cuda_stream=0x7F00))
    device = SimpleNamespace(current_stream=lambda: stream)
    built = {"is_compiled_with_cuda": lambda: True, "device": device, "set_device": lambda name: None}
    return SimpleNamespace(__version__="3.3.1", **{**built, **changes})


def use(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    monkeypatch.setitem(sys.modules, "headwise.runtime.ops.paddle_import", fake)


def test_the_compute_stream_is_paddles_while_it_is_current(streams: list[int | None]) -> None:
    with ComputeStream(2, 0x7F00).current():
        assert (FakeDevice.current, streams) == ([2], [0x7F00])
    with ComputeStream(2).current():
        assert streams == [None], "a new one"
    assert streams == []


@pytest.mark.parametrize("raw", [0, 1])
def test_the_legacy_default_stream_is_refused(streams: list[int | None], raw: int) -> None:
    with pytest.raises(ConfigError, match=r"given for GPU 2 is CUDA's legacy default stream, .* make another one"):
        ComputeStream(2, raw)


def test_paddles_current_stream_on_the_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    use(monkeypatch, SimpleNamespace(paddle=paddle_with_cuda(set_device=opened.append)))
    assert open_paddle(3) == 0x7F00
    assert opened == ["gpu:3"]


def test_a_paddle_for_cpus_is_refused_with_the_remedy() -> None:
    message = r"needs a Paddle that is compiled with CUDA, and the installed one, 3\..* is not: install paddle"
    with pytest.raises(ConfigError, match=message):
        open_paddle(0)


def test_no_paddle_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"cannot import Paddle \(.*\): install paddlepaddle-gpu .*, or use"):
        open_paddle(0)


def test_a_paddle_for_another_cuda_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("(External) CUDA error(35), driver is insufficient\n  [Hint: ...]")

    use(monkeypatch, SimpleNamespace(paddle=paddle_with_cuda(set_device=fail)))
    with pytest.raises(ConfigError, match=r"Paddle 3\.3\.1 cannot use GPU 0 \(.*insufficient\): is it made for the"):
        open_paddle(0)


CARD = Card("a card", sm=90, total_bytes=1 << 33, free_bytes=1 << 33)


def test_a_gpu_worker_without_paddles_gpu_build_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "open_card", lambda gpu: CARD)
    with pytest.raises(ConfigError, match="needs a Paddle that is compiled with CUDA"):
        CudaDevice(EngineConfig(device="cuda", tensor_ops="paddle"))


@pytest.mark.parametrize(("name", "stream"), [("paddle", 0x7F00), ("cupy", None), ("auto", None)])
def test_a_gpu_worker_computes_on_the_stream_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch, streams: list[int | None], name: str, stream: int | None
) -> None:
    seen: dict[str, Any] = {}

    def make_gpu_ops(
        name: str, dtype: str, programs: object, launcher: object, weights_dtype: str, own_products: bool
    ) -> Any:
        seen.update(name=name, dtype=dtype, streams=list(streams), own_products=own_products)
        return SimpleNamespace(empty_bytes=None)

    for other in (
        "CudaPrograms",
        "CupyLauncher",
        "CubinCache",
        "CudaBlockTables",
        "CudaStepTokens",
        "DeviceSampler",
    ):
        monkeypatch.setattr(cuda_device, other, lambda *arguments: SimpleNamespace(get=None, sms=1))
    monkeypatch.setattr(cuda_device, "Driver", lambda overlaps: seen.update(overlaps=overlaps))
    monkeypatch.setattr(cuda_device, "driver_cuda", lambda: 12)
    monkeypatch.setattr(cuda_device, "open_card", lambda gpu: CARD)
    monkeypatch.setattr(cuda_device, "open_paddle", lambda gpu: 0x7F00)
    monkeypatch.setattr(cuda_device, "make_gpu_ops", make_gpu_ops)
    overlaps = name == "cupy"
    device = CudaDevice(EngineConfig(device="cuda", tensor_ops=name, overlap_kernels=overlaps))
    told = {"overlaps": overlaps, "own_products": overlaps}
    assert seen == {"name": name, "dtype": "bfloat16", "streams": [stream], **told}
    with device.current():
        assert streams == [stream]


# ---- a whole engine ----


def test_a_whole_engine_says_what_one_on_a_cpu_says(module: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels of a GPU are interpreted by Triton, which is not installed")
    from support.gpu.cuda_shim import LIBRARIES
    from support.gpu.emulated_gpu import EmulatedGpu
    from support.gpu.tiny_engine import answers, configuration, write_model

    from headwise import LocalEngine

    class PaddleGpu(EmulatedGpu):
        def __init__(self) -> None:
            super().__init__(LIBRARIES, "float32")
            self.ops = module.PaddleGpuOps("float32")

    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model")
    expected = answers(LocalEngine(configuration(model, device="cpu", tensor_ops="numpy", kernels="reference")))
    config = configuration(model, device="cuda", tensor_ops="paddle", dtype="float32")
    gpu = LocalEngine(config, PaddleGpu())
    assert "tensors=paddle gemm=paddle kernels=cuda" in gpu._worker.describe()
    assert answers(gpu) == expected
    assert expected[-1][1] > 0, "a prefix was served from the cache"
