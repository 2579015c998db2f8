"""What attention is compared with, where it is installed: torch's SDPA on gathered keys and values, and FlashInfer."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu_cases import Step
from gpu_rig import Work, imported

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
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.module = self._torch = torch
        self._backend, self._select = SDPBackend.FLASH_ATTENTION, sdpa_kernel

    def tensor(self, array: Any, dtype: str) -> Tensor:
        """A contiguous array as a tensor of the same memory; by way of bytes, which every library exchanges."""
        flat = self._torch.from_dlpack(array.reshape(-1).view(np.uint8))
        return flat.view(getattr(self._torch, dtype)).reshape(array.shape)

    def pages(self, step: Step) -> Tensor:
        """The arena ``[blocks, slots, 2, block_size, head_dim]``, its last but two axes keys and values."""
        layout, head_dim = step.layout, step.query.shape[2]
        dtype = kv_dtype_of(layout)
        tensor = self._torch.from_dlpack(step.arena).view(getattr(self._torch, dtype))
        return tensor.reshape(-1, layout.slots, 2, layout.block_size, head_dim)

    def gathered(self, step: Step) -> tuple[Tensor, Tensor]:
        """Keys and values of a step of one group, each contiguous ``[batch, kv_heads, context, head_dim]``."""
        pages = self.pages(step)
        blocks = self._torch.from_numpy(step.tables.astype(np.int64)).to(pages.device)
        found = []
        for role in range(2):
            part = pages[:, :, role][blocks]  # [batch, columns, slots, block_size, head_dim]
            part = part.permute(0, 2, 1, 3, 4)
            found.append(part.reshape(part.shape[0], part.shape[1], -1, part.shape[-1]).contiguous())
        return found[0], found[1]

    def attention(self, step: Step, causal: bool) -> tuple[Work, Tensor]:
        """Flash SDPA of the step's queries over gathered KV, and its result ``[tokens, q_heads, head_dim]``."""
        key, value = self.gathered(step)
        query = self.tensor(step.query, step.query.dtype.name)
        if causal:  # one sequence, all of its tokens
            query = query.unsqueeze(0).transpose(1, 2)
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        else:
            query = query.unsqueeze(2)
        sdpa = self._torch.nn.functional.scaled_dot_product_attention

        def run() -> Tensor:
            with self._select([self._backend]):
                return sdpa(query, key, value, is_causal=causal, scale=step.scale, enable_gqa=True)

        result = run()
        return run, (result[0].transpose(0, 1) if causal else result.squeeze(2))

    def error(self, step: Step, result: Tensor) -> float:
        """Relative distance of the step's output from torch's."""
        ours = self.tensor(step.out, step.out.dtype.name).float()
        return float((ours - result.float()).norm() / result.float().norm())


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
        torch = self._torch.module

        def table(values: Any) -> Tensor:
            return torch.from_numpy(np.asarray(values, np.int32)).to(pages.device)

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pages.device)
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(
            table(np.arange(batch + 1) * columns), table(step.tables.reshape(-1)),
            table(np.full(batch, step.layout.block_size)), step.query.shape[1], pages.shape[1], step.query.shape[2],
            step.layout.block_size, q_data_type=pages.dtype, kv_data_type=pages.dtype, sm_scale=step.scale,
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
