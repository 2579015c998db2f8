"""Opens a GPU in Paddle, with an error of one line if that fails."""

from __future__ import annotations

from typing import Any

from headwise.errors import ConfigError, first_line

INSTALL = "install paddlepaddle-gpu in place of paddlepaddle (https://www.paddlepaddle.org.cn/install/quick)"
INSTEAD = "or use tensor_ops cupy, or device cpu"


def open_paddle(gpu: int) -> int:
    """Make the GPU of this index Paddle's current device. Returns Paddle's current stream there, a ``cudaStream_t``.

    Raises:
        ConfigError: Paddle cannot be imported, is built for CPUs only, or cannot use the GPU.
    """
    try:
        from headwise.runtime.ops.paddle_import import paddle as installed
    except ImportError as error:
        raise ConfigError(
            f"tensor_ops paddle on device cuda cannot import Paddle ({first_line(error)}): {INSTALL}, {INSTEAD}"
        ) from None
    paddle: Any = installed  # its type annotations are those of one of several builds
    if not paddle.is_compiled_with_cuda():
        raise ConfigError(
            f"tensor_ops paddle on device cuda needs a Paddle that is compiled with CUDA, and the installed one, "
            f"{paddle.__version__}, is not: {INSTALL}, {INSTEAD}"
        )
    try:
        paddle.set_device(f"gpu:{gpu}")
        return int(paddle.device.current_stream().stream_base.cuda_stream)
    except Exception as error:  # Paddle passes on whatever its C++ code raises
        raise ConfigError(
            f"Paddle {paddle.__version__} cannot use GPU {gpu} ({first_line(error)}): is it made for the driver's "
            f"CUDA? {INSTALL.capitalize()} for that, {INSTEAD}"
        ) from error
