"""Latents in four bits: the compressed part in one code a number, the rotated part in two.

Codes come in groups of 32 with a scale and a minimum, as `headwise.kernels.nibbles` has them. Rotated keys, whose
products decide what is seen, lose too much by one code. A token's stored row is therefore

    latent    width numbers, in codes
    fine      what is left of its last numbers: those that are rotated, and what fills their last group

so that a rotated number is kept to a 32nd of a step. It is one row of groups, and scores are one product, with queries
``[query | its last numbers]``: kernels that know four bits read latents, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import ConfigError
from headwise.kernels.nibbles import GROUP, INT4, pack, unpack


def stored_twice(rotated: int) -> int:
    """How many of a latent's last numbers have a second code."""
    return -(-rotated // GROUP) * GROUP


def stored_width(width: int, rotated: int) -> int:
    """Codes of a latent of ``width`` numbers, the last ``rotated`` of which are rotated.

    Raises:
        ConfigError: latents are no whole number of groups.
    """
    if width % GROUP or width < stored_twice(rotated):
        raise ConfigError(
            f"kv_dtype {INT4} takes latents (MLA) of a multiple of {GROUP} numbers, not of {width}: choose kv_dtype "
            "int8"
        )
    return width + stored_twice(rotated)


def pack_latents(latents: NDArray[Any], twice: int) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """``latents [..., width]``, of which the last ``twice`` have two codes, as `nibbles.pack` has rows."""
    exact = latents.astype(np.float32)
    codes, scales = pack(exact)
    fine = pack(exact[..., exact.shape[-1] - twice :] - unpack(codes, scales)[..., exact.shape[-1] - twice :])
    return np.concatenate([codes, fine[0]], axis=-1), np.concatenate([scales, fine[1]], axis=-2)


def unpack_latents(
    codes: NDArray[np.uint8], scales: NDArray[np.float16], twice: int, dtype: Any = np.float32
) -> NDArray[Any]:
    """The reverse, but for what was rounded: ``[..., width]`` of ``dtype``."""
    rows = unpack(codes, scales).astype(dtype)
    width = rows.shape[-1] - twice
    rows[..., width - twice : width] += rows[..., width:]
    return rows[..., :width]


def stretch_queries(query: NDArray[np.float32], rotated: int) -> NDArray[np.float32]:
    """Queries of latents ``[..., width]`` as their products with stored rows take them."""
    return np.concatenate([query, query[..., query.shape[-1] - stored_twice(rotated) :]], axis=-1)


def compressed_of(mixed: NDArray[np.float32], rotated: int) -> NDArray[np.float32]:
    """The compressed part ``[..., rank]`` of sums of stored rows, with what of it has a second code."""
    twice = stored_twice(rotated)
    width, more = mixed.shape[-1] - twice, twice - rotated
    if more:
        mixed[..., width - twice : width - rotated] += mixed[..., width : width + more]
    return mixed[..., : width - rotated]
