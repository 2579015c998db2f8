"""A layer's experts on CPU cores: their products, and the sums of what tokens get of them, in one compiled call.

Expert by expert, each product would wake all threads, and be cut into pieces for them, for a few tokens: with 64
experts of which a token has 8, most of a step went by between the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cpu import experts_jit, matmul_jit, records
from headwise.kernels.cpu.matmul import EPILOGUES, KINDS, PackedWeight
from headwise.kernels.cpu.memory import CACHE_LINE
from headwise.kernels.cpu.pool import pool_of_this_process
from headwise.kernels.cpu.records import address_of, place_of
from headwise.kernels.fused import Activation

MOST_ROWS = 2 * matmul_jit.ROW_BLOCK
"""Of a part: an expert that many tokens go to is shared out among threads."""

Packed = tuple[PackedWeight, NDArray[np.float32] | None]
"""A weight, and its bias as `headwise.kernels.cpu.matmul.pack_bias` made it."""


@dataclass(frozen=True)
class PackedExperts:
    """Experts of equal shapes and kinds, in the order of their numbers.

    products: ``[experts, 2]``, `records.PRODUCT` of a gated weight and of the one behind it, but for what is of a call
    kept:     what they point to
    """

    gate: PackedWeight
    down: PackedWeight
    products: NDArray[Any]
    kept: Sequence[tuple[Packed, Packed]]

    @staticmethod
    def of(experts: Sequence[tuple[Packed, Packed]], activation: Activation) -> PackedExperts | None:
        """Of each expert, its gated weight and the one behind it; None if they are not alike."""
        forms = {tuple(_form(weight, bias) for weight, bias in expert) for expert in experts}
        if len(forms) != 1:
            return None
        (gate, _), (down, _) = experts[0]
        products = np.zeros((len(experts), 2), records.PRODUCT)
        for side, epilogue in enumerate((activation, None)):
            for product, expert in zip(products[:, side], experts, strict=True):
                weight, bias = expert[side]
                product["code"] = matmul_jit.product_of(KINDS[weight.dtype]).address
                product["inputs"], product["columns"] = weight.inputs, weight.outputs // (2 if weight.gated else 1)
                product["weight"], product["epilogue"] = place_of(weight.table), EPILOGUES[epilogue]
                if bias is not None:
                    product["bias"], product["bias_length"] = place_of(bias), bias.size
                product["factors"] = weight.dtype != "float32"  # where they are, compiled code fills in
        products["threads"] = 1
        return PackedExperts(gate, down, products, experts)

    def add(
        self,
        x: NDArray[np.float32],
        chosen: NDArray[np.int64],
        weights: NDArray[np.float32],
        out: NDArray[np.float32],
        threads: int,
    ) -> bool:
        """Add to ``out [T, columns]`` what each token's experts ``chosen [T, k]`` make of ``x [T, inputs]``, times
        ``weights [T, k]``. False: nothing was done, for there would be less than one part for each thread.

        A token's result depends neither on the tokens beside it nor on the number of threads, and is to the bit what
        its experts give one after the other, in the order of their numbers.
        """
        (rows, per_token), columns = chosen.shape, self.down.outputs
        if x.shape != (rows, self.gate.inputs) or out.shape != (rows, columns) or weights.shape != chosen.shape:
            raise ValueError(f"x {x.shape}, out {out.shape}, {chosen.shape} experts and {weights.shape} do not fit")
        parts = _Parts.of(np.bincount(chosen.reshape(-1), minlength=len(self.products)))
        if len(parts.experts) < threads:
            return False
        by_number = np.arange(rows)[:, None], np.argsort(chosen, axis=1)
        chosen, weights = chosen[by_number], np.ascontiguousarray(weights[by_number], np.float32)
        x = np.ascontiguousarray(x, np.float32)
        order = np.argsort(chosen, axis=None, kind="stable")
        tokens, places = order // per_token, np.empty(rows * per_token, np.int64)
        places[order] = np.arange(len(order))
        counters = np.zeros((len(parts.experts), 2, matmul_jit.PRODUCT_COUNTERS + 1), np.int64)
        products, taken = self.products[parts.experts], np.zeros(3, np.int64)
        products["rows"] = parts.sizes[:, None]
        places_of_counters = np.arange(products.size, dtype=np.int64).reshape(-1, 2) * counters[:1, 0].nbytes
        products["counters"] = place_of(counters) + places_of_counters
        room = self._scratch(int(parts.sizes[0]))
        scratch = np.empty(threads * room["scratch_bytes"] + CACHE_LINE, np.uint8)
        down = np.empty((rows * per_token, columns), np.float32)
        call = records.filled(
            experts_jit.EXPERTS, multiply=matmul_jit.multiply().address, products=place_of(products),
            parts=len(parts.experts), firsts=place_of(parts.firsts), order=place_of(tokens), x=place_of(x),
            inputs=self.gate.inputs, scratch=_padded(place_of(scratch)), down=place_of(down),
            out=address_of(out, np.float32), columns=columns, rows=rows, per_token=per_token, places=place_of(places),
            weights=place_of(weights), counters=place_of(taken), **room,
        )  # fmt: skip
        pool_of_this_process().run(experts_jit.run().address, threads, place_of(call))
        return True

    def _scratch(self, rows: int) -> dict[str, int]:
        """Bytes at which a thread's parts of its scratch begin, for parts of so many rows, and all of them."""
        weights = self.gate, self.down
        sizes = {
            "gathered": rows * self.gate.inputs,
            "factors": rows * max(weight.row_factors for weight in weights),
            "sums": rows * max(weight.row_sums for weight in weights),
            "gated": rows * self.down.inputs,
            "tiles": matmul_jit.TILE + max(weight.depth for weight in weights),
        }
        begins, at = {}, 0
        for name, floats in sizes.items():
            begins[name] = at
            at += _padded(4 * floats)
        del begins["gathered"]  # at the beginning
        return {**begins, "scratch_bytes": at}


@dataclass(frozen=True)
class _Parts:
    """Some tokens of one expert each, the largest parts first, so that threads are through at about the same time.

    firsts, sizes: of the tokens in the order of experts, the first one, and how many
    """

    experts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @staticmethod
    def of(counts: NDArray[np.int64]) -> _Parts:
        """Of experts with so many tokens each."""
        pieces, ends = -(-counts // MOST_ROWS), np.cumsum(counts)
        experts = np.repeat(np.arange(len(counts)), pieces)
        within = np.arange(len(experts)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        firsts = (ends - counts)[experts] + within * MOST_ROWS
        sizes = np.minimum(ends[experts] - firsts, MOST_ROWS)
        largest = np.argsort(-sizes, kind="stable")
        return _Parts(experts[largest], firsts[largest], sizes[largest])


def _form(weight: PackedWeight, bias: NDArray[np.float32] | None) -> tuple[Any, ...]:
    arrays = weight.packed.shape, weight.scales.shape, weight.minima.shape
    return weight.dtype, weight.outputs, weight.inputs, weight.gated, weight.offset, arrays, bias is None


def _padded(size: int) -> int:
    return -(-size // CACHE_LINE) * CACHE_LINE
