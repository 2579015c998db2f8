"""Ranks that keep a KV head together, as threads: each with an arena of its own tokens, and kernels on NumPy arrays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from support.attention_scene import Case
from support.gpu.cuda_shim import LIBRARIES
from support.gpu.emulated_gpu import SerialPrograms, poisoned_array
from support.gpu.interpreted_attention import SMALL
from support.gpu.interpreted_latents import gpu_parts
from support.gpu.latent_ranks import Meeting, ThreadRanks
from support.shared_heads import SharedScene

from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import HostLengths
from headwise.kernels.cuda.attention import Tuning
from headwise.kernels.cuda.kernels import CudaKernels


def head_kernels(tuning: Tuning = SMALL, sms: int = 4) -> CudaKernels:
    kernels = CudaKernels(replace(gpu_parts(sms), programs=SerialPrograms(LIBRARIES)))
    kernels._attention.tuning = tuning
    kernels._attention.__post_init__()  # with memory for as many splits
    return kernels


class RanksScene(SharedScene):
    """A case whose cache is written. ``query`` and ``kv`` are as kernels are given them.

    gap_heads: as many heads that are none lie behind each token's
    """

    gap_heads = 0

    def __init__(self, case: Case, parts: int, dtype: str = "float32", sms: int = 4, tuning: Tuning = SMALL) -> None:
        super().__init__(case, parts, dtype)
        self.query = self.query.astype(self.dtype).astype(np.float32)
        if case.dtype == dtype:
            self.kv = [tuple(rows.astype(self.dtype).astype(np.float32) for rows in kv) for kv in self.kv]
        self.kernels = [head_kernels(tuning, sms) for _ in range(parts)]
        self.write_shared(self.kernels[0])

    def decoding(self) -> RanksScene:
        """With a batch of a graph: no more is known of it."""
        self.batch = replace(self.batch, max_query_len=1)
        return self

    def knowing(self) -> RanksScene:
        """With that of a step that is none."""
        known = HostLengths(self.batch.cu_seqlens_q.copy(), self.batch.seq_lens.copy())
        self.batch = replace(self.batch, on_host=known)
        return self

    def laid_out(self, rows: np.ndarray) -> np.ndarray:
        tokens, heads, size = rows.shape
        wide = poisoned_array((tokens, heads + self.gap_heads, size), self.dtype)
        wide[:, :heads] = rows
        return wide[:, :heads]

    def attend_as_threads(self) -> tuple[np.ndarray, Meeting]:
        """What all heads see, and what ranks told each other meanwhile."""
        meeting = Meeting(self.parts)

        def of_rank(part: int) -> np.ndarray:
            try:
                return self.attend_on(ThreadRanks(TokenShare(part, self.parts), meeting), self.kernels[part])
            except BaseException:
                meeting.leave()
                raise

        with ThreadPoolExecutor(self.parts) as threads:
            return np.concatenate(list(threads.map(of_rank, range(self.parts))), axis=1), meeting

    def launched(self, part: int = 0) -> list[tuple[str, Any]]:
        launched: list[tuple[str, Any]] = self.kernels[part]._attention.launcher.launched
        return launched
