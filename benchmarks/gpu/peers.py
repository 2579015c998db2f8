"""What attention is compared with, where it is installed: torch's SDPA on gathered keys and values, and FlashInfer.

Gathering is not timed, and whatever gives another result than ours is no comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gpu.cases import Step
from gpu.rig import Work, imported

from headwise.kernels.gqa import kv_dtype_of

Tensor = Any
WORKSPACE_BYTES = 128 << 20
"""As FlashInfer's documentation has it."""


class Torch:
    """torch on the rig's arrays. module: torch itself

    Raises:
        ImportError: it is not installed.
    """

    def __init__(self) -> None:
        import torch

        self.module = torch

    def tensor(self, array: Any, dtype: str) -> Tensor:
        """A contiguous array as a tensor of the same memory; by way of bytes, which every library exchanges."""
        flat = self.module.from_dlpack(array.reshape(-1).view(np.uint8))
        return flat.view(getattr(self.module, dtype)).reshape(array.shape)

    def pages(self, step: Step) -> Tensor:
        """The arena ``[blocks, slots, 2, block_size, head_dim]``, its last but two axes keys and values."""
        layout, head_dim = step.layout, step.query.shape[2]
        dtype = kv_dtype_of(layout)
        tensor = self.module.from_dlpack(step.arena).view(getattr(self.module, dtype))
        return tensor.reshape(-1, layout.slots, 2, layout.block_size, head_dim)

    def error(self, step: Step, result: Tensor) -> float:
        """Relative distance of the step's output, which is computed, from ``result [tokens, q_heads, head_dim]``."""
        ours = self.tensor(step.out, step.out.dtype.name).float()
        return float((ours - result.float()).norm() / result.float().norm())

    def matmul(self, step: Step, size: int) -> Work:
        """A product of two random square matrices in the step's dtype."""
        dtype, device = getattr(self.module, step.query.dtype.name), self.pages(step).device
        left, right, out = (self.module.randn(size, size, device=device, dtype=dtype) for _ in range(3))
        return lambda: self.module.matmul(left, right, out=out)


class Sdpa:
    """torch's SDPA of a step of one group whose keys and values were gathered before: contiguous
    ``[batch, kv_heads, context, head_dim]`` each. causal: a prompt as a whole; else one query per sequence."""

    def __init__(self, torch: Torch, step: Step, causal: bool) -> None:
        self._torch, self._causal, self._scale = torch.module, causal, step.scale
        context = step.sequences[0][1]
        self._key, self._value = (part[:, :, :context] for part in self._gathered(torch.pages(step), step))
        query = torch.tensor(step.query, step.query.dtype.name)
        self._query = query.unsqueeze(0).transpose(1, 2) if causal else query.unsqueeze(2)

    def flash(self) -> tuple[Work, Tensor]:
        """By FlashAttention. The call, and its result ``[tokens, q_heads, head_dim]``."""
        return self._by("FLASH_ATTENTION")

    def cudnn(self) -> tuple[Work, Tensor]:
        """By cuDNN, which serves some cards and shapes only."""
        return self._by("CUDNN_ATTENTION")

    def _by(self, backend: str) -> tuple[Work, Tensor]:
        """A call that no other backend serves, with grouped queries as they are: nothing is repeated in memory."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        only, sdpa = [getattr(SDPBackend, backend)], self._torch.nn.functional.scaled_dot_product_attention

        def run() -> Tensor:
            with sdpa_kernel(only):
                return sdpa(
                    self._query, self._key, self._value, is_causal=self._causal, scale=self._scale, enable_gqa=True
                )

        result = run()
        return run, (result[0].transpose(0, 1) if self._causal else result.squeeze(2))

    def _gathered(self, pages: Tensor, step: Step) -> Iterator[Tensor]:
        blocks = self._torch.from_numpy(step.tables.astype(np.int64)).to(pages.device)
        for role in range(2):
            part = pages[:, :, role][blocks]  # [batch, columns, slots, block_size, head_dim]
            part = part.permute(0, 2, 1, 3, 4)
            yield part.reshape(part.shape[0], part.shape[1], -1, part.shape[-1]).contiguous()


class FlashInfer:
    """FlashInfer's paged decode, on pages of the arena's size: a page holds each head's tokens side by side.

    Raises:
        ImportError: it is not installed.
    """

    def __init__(self, torch: Torch) -> None:
        import flashinfer

        self._library, self._torch = flashinfer, torch

    def decode(self, step: Step) -> tuple[Work, Tensor]:
        """The planned call and its result ``[batch, q_heads, head_dim]``."""
        pages = self._torch.pages(step)
        batch, columns = step.tables.shape
        context, block_size = step.sequences[0][1], step.layout.block_size
        torch = self._torch.module

        def table(values: Any) -> Tensor:
            return torch.from_numpy(np.asarray(values, np.int32)).to(pages.device)

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pages.device)
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            table(np.arange(batch + 1) * columns), table(step.tables.reshape(-1)),
            table(np.full(batch, (context - 1) % block_size + 1)), step.query.shape[1], pages.shape[1],
            step.query.shape[2], block_size, q_data_type=pages.dtype, kv_data_type=pages.dtype, sm_scale=step.scale,
        )  # fmt: skip
        query = self._torch.tensor(step.query, step.query.dtype.name)
        cache = pages[:, :, 0].contiguous(), pages[:, :, 1].contiguous()

        def run() -> Tensor:
            return wrapper.run(query, cache)

        return run, run()


def open_peers() -> tuple[Torch | None, FlashInfer | None]:
    """Those that are installed."""
    torch = Torch() if imported("torch") is not None else None
    flashinfer = FlashInfer(torch) if torch is not None and imported("flashinfer") is not None else None
    return torch, flashinfer
