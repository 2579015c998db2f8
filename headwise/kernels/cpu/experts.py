"""A layer's mixture of experts on CPU cores, from a router's logits to the sum of what experts make of each token, in
one compiled call (`experts_jit`): alone, or as a part of a decoder's (`headwise.kernels.cpu.decoder`).

Expert by expert, each product would wake all threads, and be cut into pieces for them, for a few tokens: with 64
experts of which a token has 8, most of a step went by between the products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cpu import experts_jit, matmul_jit, records
from headwise.kernels.cpu.matmul import EPILOGUES, KINDS, PackedWeight
from headwise.kernels.cpu.memory import Scratch, ThreadScratch
from headwise.kernels.cpu.pool import pool_of_this_process
from headwise.kernels.cpu.records import place_of
from headwise.kernels.experts import SCORED_BY, Mixture

Floats = NDArray[np.float32]
Packed = tuple[PackedWeight, Floats | None]
"""A weight, and its bias as `headwise.kernels.cpu.matmul.pack_bias` made it."""
Mlp = tuple[Packed, Packed]
"""A weight that an activation is behind, gated if that is, and the one behind both."""

THREAD_BYTES = 1 << 19
"""Of weights that tokens go through, which are worth waking a thread for."""


@dataclass(frozen=True)
class PackedExperts:
    """Experts of equal shapes and kinds, in the order of their numbers, and the shared one if there is one.

    mixture: with arrays that compiled code can read
    record:  an `experts_jit.MIXTURE`, and ``mlps`` what it points to
    kept:    what that points to
    """

    mixture: Mixture
    mlps: Sequence[Mlp]
    record: NDArray[Any]
    kept: NDArray[Any]

    @staticmethod
    def of(mixture: Mixture, experts: Sequence[Mlp], shared: Mlp | None) -> PackedExperts | None:
        """Compiles what computes them. None if they are not alike, or more than `experts_jit.MOST_EXPERTS`."""
        if len({tuple(map(_form, expert)) for expert in experts}) != 1 or len(experts) > experts_jit.MOST_EXPERTS:
            return None
        experts_jit.mix()
        experts_jit.mix_alone()
        mlps = [*experts, *([] if shared is None else [shared])]
        kept = np.zeros(len(mlps), experts_jit.MLP)
        for record, mlp in zip(kept, mlps, strict=True):
            record["weights"] = [place_of(weight.table) for weight, _ in mlp]
            record["biases"] = [(0, 0) if bias is None else (place_of(bias), bias.size) for _, bias in mlp]
            record["codes"] = [matmul_jit.product_of(KINDS[weight.dtype]).address for weight, _ in mlp]
            record["size"] = mlp[0][0].results
        mixture = replace(
            mixture,
            correction=_floats(mixture.correction),
            scales=_floats(mixture.scales),
            logit_bias=_floats(mixture.logit_bias),
        )
        routing, own = mixture.routing, (mixture.correction, mixture.scales, mixture.logit_bias)
        correction, scales, logit_bias = (0 if array is None else place_of(array) for array in own)
        filled = records.filled(
            experts_jit.MIXTURE, mlps=place_of(kept), experts=len(experts), per_token=routing.per_token,
            has_shared=shared is not None, epilogue=EPILOGUES[mixture.activation], columns=experts[0][1][0].outputs,
            scored_by=SCORED_BY.index(routing.scored_by), groups=routing.groups,
            groups_per_token=routing.groups_per_token, best_of_group=routing.best_of_group,
            weighs_input=mixture.weighs_input,
            norm_min=-1.0 if routing.norm_min is None else routing.norm_min, scale=routing.scale,
            correction=correction, scales=scales, logit_bias=logit_bias,
        )  # fmt: skip
        return PackedExperts(mixture, mlps, filled, kept)

    @property
    def weights(self) -> Iterable[PackedWeight]:
        """Of each form one at least."""
        return (weight for mlp in (self.mlps[0], self.mlps[-1]) for weight, _ in mlp)

    @property
    def experts(self) -> int:
        return self.mixture.routing.experts

    @property
    def columns(self) -> int:
        return self.mlps[0][1][0].outputs

    @property
    def token_bytes(self) -> int:
        """Of the weights that a token goes through."""
        routed = self.mixture.routing.per_token * _bytes(self.mlps[0])
        return routed + (_bytes(self.mlps[-1]) if self.has_shared else 0)

    @property
    def has_shared(self) -> bool:
        return len(self.mlps) > self.experts

    def counters(self, rows: int, threads: int) -> int:
        """Numbers that are 0 for each call; see `experts_jit.mixture_counters`."""
        slots = rows * self.mixture.routing.per_token
        return int(experts_jit.mixture_counters(slots, self.experts, threads))

    def mix(self, x: Floats, logits: Floats, threads: int) -> Floats:
        """What their experts and the shared one make of tokens ``x [T, columns]`` with these ``logits [T, experts]``.

        A token's result depends neither on the tokens beside it nor on the number of threads, and is to the bit what
        the shared expert gives, to which is added what the token's experts give, in the order of their numbers.
        """
        (rows, experts), columns = logits.shape, self.columns
        if x.shape != (rows, columns) or experts != self.experts:
            raise ValueError(f"x {x.shape} and logits {logits.shape} do not fit {self.experts} experts of {columns}")
        out = np.empty((rows, columns), np.float32)
        if not rows:
            return out
        x, logits = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(logits, np.float32)
        threads = max(1, min(threads, rows * self.token_bytes // THREAD_BYTES))
        counters = np.zeros(self.counters(rows, threads), np.int64)
        mixing = records.filled(
            experts_jit.MIXING,
            **room_of([self], rows, threads, _scratch), x=place_of(x), logits=place_of(logits), out=place_of(out),
        )  # fmt: skip
        places = (experts_jit.mix().address, *map(place_of, (self.record, mixing, counters)))
        own = np.array(places, np.int64)
        pool_of_this_process().run(experts_jit.mix_alone().address, threads, place_of(own))
        return out


def room_of(
    mixtures: Sequence[PackedExperts], rows: int, threads: int, scratch: Scratch | ThreadScratch
) -> dict[str, int]:
    """Fields of an `experts_jit.MIXING` but for those of what is given: room for any of the mixtures."""

    def most(numbers: Iterable[int]) -> int:
        return max(numbers, default=0)

    every = rows * max(each.mixture.routing.per_token for each in mixtures)
    slots = min(every, experts_jit.SLOTS)
    weights = [weight for each in mixtures for weight, _ in each.mlps[0]]
    shared = [each.mlps[-1] for each in mixtures if each.has_shared]
    of_shared = [weight for mlp in shared for weight, _ in mlp]
    widest = most(weight.depth for weight in (*weights, *of_shared))
    sizes = {
        "chosen": 2 * every,
        "order": 2 * every,
        "ends": 2 * most(each.experts for each in mixtures),
        "weights": every,
        "factors": slots * most(_row_factors(weight) for weight in weights),
        "sums": slots * most(weight.row_sums for weight in weights),
        "gated": slots * most(each.mlps[0][1][0].inputs for each in mixtures),
        "down": slots * most(each.columns for each in mixtures),
        "shared_factors": rows * most(map(_row_factors, of_shared)),
        "shared_sums": rows * most(weight.row_sums for weight in of_shared),
        "shared_gated": rows * most(mlp[1][0].inputs for mlp in shared),
        "tiles": threads * matmul_jit.TILE,
        "values": threads * widest,
    }
    places = dict(zip(sizes, scratch.take(*sizes.values()), strict=True))
    return {"rows": rows, "threads": threads, "widest": widest, **places}


_scratch = ThreadScratch()


def _row_factors(weight: PackedWeight) -> int:
    """Numbers of 32 bits that a row becomes, wherever it was."""
    return weight.row_factors or weight.depth


def _bytes(mlp: Mlp) -> int:
    return sum(weight.nbytes for weight, _ in mlp)


def _floats(values: Floats | None) -> Floats | None:
    return None if values is None else np.ascontiguousarray(values, np.float32)


def _form(packed: Packed) -> tuple[Any, ...]:
    weight, bias = packed
    arrays = weight.packed.shape, weight.scales.shape, weight.minima.shape
    return weight.dtype, weight.outputs, weight.inputs, weight.gated, weight.offset, arrays, bias is None
