"""Edits logits on a GPU before tokens are drawn from them: the host half of `logit_edits.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.kernels.cuda.elementwise import variant_of
from headwise.kernels.cuda.launch import Kernel, addresses_of
from headwise.kernels.cuda.programs import Programs

Array = Any

SOURCE = "logit_edits.cu"
THREADS = 1024


class CudaLogitEdits:
    """Edited logits out of scores of ``dtype`` on the device, on the current stream.

    threads: of a block

    Raises:
        ConfigError: there is no kernel for ``dtype``.
    """

    def __init__(self, programs: Programs, dtype: np.dtype[Any], threads: int = THREADS) -> None:
        self._edit: Kernel = programs(SOURCE, variant_of(dtype)).kernel("edit", threads)

    def edit(self, scores: Array, cap: float, logits: Array, *columns: Array) -> None:
        """Write the edited ``logits``, float32 ``[rows, vocab]``, of ``scores [rows, vocab]``.

        scores:  each row in one piece
        cap:     logits are ``cap * tanh(scores / cap)``; 0 for none
        columns: of 4 bytes a number, C-contiguous, as `headwise.runtime.worker.logit_edits.LogitEdits` describes them:
                 mask_of, masks, begins, tokens and values of biases, the same of what was seen, penalties
        """
        count, vocab = scores.shape
        words = columns[1].shape[1]
        self._edit(
            (count, 1, 1),
            (*addresses_of(scores, logits, *columns), scores.strides[0], vocab, words, cap),
        )
