"""Phases of a decoder's layers in steps of which some rows go by adapters: those of other steps, and what adapters add.

Around a product that adapters add to there are two more, see `decoder_records.DOWN_RANKS` and `UP_RANKS`: what a
product's epilogue does where there are none, an activation, is the last one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cpu import decoder_records as at
from headwise.kernels.cpu import matmul_jit, records
from headwise.kernels.cpu.decoder_phases import NO_PLACE, Floats, Maker, Phases
from headwise.kernels.cpu.low_rank import PackedLowRank, RowGroups
from headwise.kernels.cpu.low_rank_jit import down_of, up_of
from headwise.kernels.cpu.matmul import PackedWeight, as_packed
from headwise.kernels.cpu.records import place_of
from headwise.kernels.fused import BesideExperts, DecoderLayer, DenseLayer, GroupedQueries, Latents

Adapters = Mapping[int, PackedLowRank]
"""What is added to products, by the addresses of their weights' records."""


@dataclass
class AdaptedMaker(Maker):
    """Phases of layers with ``adapters``."""

    adapters: Adapters = field(default_factory=dict)

    def _stays_in_tiles(self, mlp: DenseLayer) -> bool:
        """Adapters take float32 rows, and add to a product before it is activated."""
        is_adapted = self._of(mlp.into) is not None or self._of(mlp.down) is not None
        return not is_adapted and super()._stays_in_tiles(mlp)

    def _words_of_heads(self, attention: GroupedQueries) -> int:
        return 0 if self._of(attention.out) is not None else super()._words_of_heads(attention)

    def _product(
        self,
        weight: PackedWeight,
        out: int,
        bias: Floats | None = None,
        epilogue: int = matmul_jit.PLAIN,
        rows_of: PackedWeight | None = None,
        prepared: int = NO_PLACE,
    ) -> None:
        added = self._of(weight)
        if added is None:
            super()._product(weight, out, bias, epilogue, rows_of, prepared)
            return
        ranks = {"low_rank": place_of(added.record), "columns": added.ranks}
        self._widen(at.BETWEEN, added.ranks)
        self._add({"kind": at.DOWN_RANKS, **self._rows_given(), **ranks})
        made, plain = (at.INTO, as_packed(weight)) if weight.gated else (out, weight)
        super()._product(plain, made, bias)
        self._widen(out, weight.results)
        self._add({
            "kind": at.UP_RANKS, "source": made, "source_row": plain.outputs, "epilogue": epilogue, "out": out,
            "out_columns": weight.results, **ranks,
        })  # fmt: skip

    def _rows_given(self) -> dict[str, int]:
        """Where the rows lie, float32, that were prepared last; those that were normed or gated for it are kept."""
        rows = next(phase for phase in reversed(self.phases) if phase["kind"] == at.ROWS and phase["weight"])
        if rows["before"][1] or "gate" in rows:
            rows["kept"] = at.NORMED
            self._widen(at.NORMED, rows["columns"])
            return {"source": at.NORMED, "source_row": rows["columns"]}
        return {"source": rows["source"], "source_row": rows["source_row"]}

    def _of(self, weight: PackedWeight) -> PackedLowRank | None:
        return self.adapters.get(place_of(weight.table))


@dataclass(frozen=True)
class AdaptedLayers:
    """All layers, for steps of which some rows go by adapters.

    table:  a `records.LAYER` for each layer; attention leaves float32 rows where adapters take them
    wanted: fields of a `decoder_records.STEP` besides
    """

    phases: Phases
    table: NDArray[Any]
    leaves_rows: Sequence[bool]
    wanted: Mapping[str, int]

    @staticmethod
    def of(layers: Sequence[DecoderLayer], epilogue: int, eps: float) -> AdaptedLayers | None:
        """None: no adapter adds to any of them. epilogue: of MLPs; eps: of norms"""
        adapters = {place_of(weight.table): added for layer in layers for weight, added in _products(layer) if added}
        if not adapters:
            return None
        table, each = np.zeros(len(layers), records.LAYER), records.LAYER.itemsize
        places = [table.ctypes.data + index * each for index in range(len(layers))]
        made = AdaptedMaker(layers[0].attention.out.outputs, epilogue, eps, adapters=adapters)
        dtype = next(iter(adapters.values())).dtype
        return AdaptedLayers(
            Phases.made_by(made, layers, places),
            table,
            [place_of(layer.attention.out.table) in adapters for layer in layers],
            {"add_down": down_of(dtype).address, "add_up": up_of(dtype).address},
        )

    def tell(self, plain: NDArray[Any]) -> None:
        """What records say of layers in other steps, once they say all."""
        self.table[:] = plain
        self.table["out_words"][list(self.leaves_rows)] = 0


def fields_of(groups: RowGroups) -> dict[str, int]:
    """Of a `decoder_records.STEP`, whose rows are these."""
    return {
        "row_groups": place_of(groups.table), "adapted_groups": groups.adapted, "group_count": len(groups.table),
    }  # fmt: skip


def _products(layer: DecoderLayer) -> Iterator[tuple[PackedWeight, PackedLowRank | None]]:
    """Weights of a layer that adapters may add to, and what they do."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, GroupedQueries):
        yield attention.qkv, attention.qkv_adapters
        if attention.gate is not None:
            yield attention.gate, attention.gate_adapters
    if isinstance(attention, GroupedQueries | Latents):
        yield attention.out, attention.out_adapters
    dense = mlp.mlp if isinstance(mlp, BesideExperts) else mlp
    if isinstance(dense, DenseLayer):
        yield dense.into, dense.into_adapters
        yield dense.down, dense.down_adapters
