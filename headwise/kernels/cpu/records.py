"""Records that the Python halves fill by name, and compiled code reads at their address.

Numbers are int64, but for a few float32; arrays are given as addresses, whose owners the Python halves keep alive. All
records of one step hang together by such addresses, so that one call with one integer stands for all layers of a model.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.kernels.cpu.memory import from_a_line_on

_N = np.int64

KEPT_BYTES = 16 << 20
"""Of a `Room`: more than decode steps take, but for those of many long sequences."""


def numbers(names: str) -> list[tuple[str, type[np.int64]]]:
    """Fields of a record that are int64."""
    return [(name, _N) for name in names.split()]


WEIGHT = np.dtype(
    numbers(
        "kind data data_bytes scales scale_count minima minima_count columns depth turns group_turns has_minima offset"
    )
)
"""A packed weight. ``data`` are bytes, ``scales`` and ``minima`` float16 ``[panels, groups, PANEL]``.

kind:        one of `matmul_kinds.KINDS`
columns:     of the weight; the last panel may have more
depth:       numbers of a row that it multiplies, padded to whole turns
turns:       of a panel
group_turns: that share a scale
offset:      taken off each code
"""

PRODUCT = np.dtype(
    numbers(
        "code x rows inputs weight bias bias_length epilogue out columns factors sums tiles tile_floats counters"
        " threads"
    )
)
"""A product of its own.

code:     address of the compiled product with weights of this kind
x:        float32 ``[rows, inputs]``; the same address as ``factors`` where those are the factors already
weight:   a `WEIGHT`
bias:     float32, of no length where there is none
epilogue: `matmul_jit.PLAIN` to `matmul_jit.CLIPPED`
out:      float32 ``[rows, columns]``
tiles:    ``tile_floats`` for each thread: `matmul_jit.TILE`, and as many as the weight is deep
counters: `matmul_jit.PRODUCT_COUNTERS` and one for each of the ``threads``, that are 0
"""

HEAD_GROUP, HEAD_SLOT, HEAD_WINDOW, HEAD_SINK = HEADS = range(4)
"""Arrays of a layer's heads, as in `headwise.kernels.base.HeadTable`."""

LAYER = np.dtype([("heads", _N, (len(HEADS), 2)), ("sink_logits", _N, (2,)), *numbers("plan states out_words")])
"""What attention, or what has states in its place, is told of a layer: address and length of what says where its heads
lie, and of learned sinks' logits (0 where it has none); which `PLAN` is its own; and its `STATES`, 0 for none.

out_words: of a row that attention prepares for the product that follows, in tiles (`matmul_rows.tiled_row`); 0: what
           comes out is float32
"""

PLAN = np.dtype(numbers("items item_count parts part_count rows is_tiled partial_rows sees"))
"""A plan of attention: see `attention_plan.Plan`."""

PLANNING = np.dtype(
    numbers(
        "cu_seqlens seq_lens sequences follows shared sees windows sinks kv_heads share dim items item_room parts"
        " part_room item_count part_count rows is_tiled partial_rows cost"
    )
)
"""A plan of attention to be made, for heads of these windows and sinks.

follows, shared: of an `AttentionBatch`; 0: none do
sees:    likewise, where heads go by it; 0: each row sees up to itself
items, parts: where they go, with room for so many; if there are more, only their number is told
item_count:   and what follows: results, see `attention_plan.Plan`
"""

CACHE = np.dtype(
    numbers(
        "arena arena_bytes block_stride slot_stride value_offset block_size block_scales slot_scales key_scales"
        " value_scales"
    )
)
"""A cache's arena. Strides from block to block and slot to slot, and from keys to values, in elements; then from block
to block and slot to slot, and where the scales of keys and values lie within a slot, in floats."""

PASS = np.dtype(
    [
        ("cache", CACHE),
        *numbers(
            "rows q_heads kv_heads dim value_dim query query_row query_head key key_row key_head value value_row"
            " value_head out cosines sines half cu_seqlens seq_lens sequences follows tables table_columns groups plans"
            " partials partial_rows scratch scratch_floats lse"
        ),
        ("factor", np.float32),
        ("softcap", np.float32),
    ]
)
"""What writes keys and values to a cache and attends to it, for one layer or many of a kind.

query, key, value: float32 ``[rows, heads, dim]``, of values ``value_dim``, which is no more; ..._row, ..._head: floats
                   from row to row, head to head
out:               float32 ``[rows, q_heads, value_dim]``
cosines, sines:    float32 ``[rows, half]``; no ``half``: nothing is rotated
cu_seqlens ...:    of an `AttentionBatch`
plans:             `PLAN` records
partials:          maxima, sums and weighted values of parts, float32 ``[partial_rows * (2 + dim)]``
scratch:           ``scratch_floats`` for each thread
lse:               float32 ``[rows, q_heads]``, for the logarithms, to base 2, of softmaxes' sums; 0: nobody asks
factor, softcap:   of queries; of scores, 0 for none

Of states ``query`` are `DeltaProjected.numbers`, `SsmProjected.numbers` or `KdaProjected.numbers`, ``query_row`` of a
token, and ``key`` and ``value`` the latter's decays and gates; the cache's ``value_offset`` is where in a slot the
matrices lie, in floats.
"""

DELTA_NET, SSM, KDA = range(3)
"""Rules by which states are taken on."""

STATES = np.dtype(
    [
        *numbers(
            "rule heads share key_dim value_dim convolution weights speed bias norm groups group convolution_bias skip"
        ),
        ("eps", np.float32),
        ("pad", np.float32),
    ]
)
"""A layer with states of so many members, ``heads``: sizes as in `StateSizes`, addresses and ``eps`` of `DeltaWeights`
or `KdaWeights`, or addresses and ``groups`` of `SsmWeights`. What another rule has is 0."""

UP = np.dtype(numbers("matrix first_rank ranks"))
"""Half a panel of outputs of an adapter: ``matrix [ranks, PANEL / 2]`` is of the ranks from ``first_rank`` on; those
that the outputs have nothing of are left out."""

ADAPTER = np.dtype(numbers("down rank_panels ups"))
"""What one adapter adds to a projection: ``down [rank_panels, inputs, low_rank_jit.RANKS]``, and `UP` records; 0 and no
panels: nothing."""

LOW_RANK = np.dtype(numbers("adapters inputs rank_panels panels"))
"""What adapters add to a projection: `ADAPTER` records, of which none has more ``rank_panels``; and panels of its
outputs, as they lie packed."""

ADDING = np.dtype(
    numbers("down up low_rank x x_row between between_row made columns rows groups adapted counters tiles threads")
)
"""What adapters add to a product of its own: arguments of `low_rank_jit.down_of` and ``up_of``, and their addresses."""

JOB = np.dtype([*numbers("state function argument thread"), ("semaphore", _N, (4,))])
"""What a thread of the pool is to do: to call a C ``function`` of ``argument`` and its own number. A cache line.

state:     see `pool_jit`
function:  0: to end
semaphore: a ``sem_t``, which C libraries of 64 bits give 32 bytes
"""

CALL = np.dtype(numbers("function own layer counters rows piece"))
"""A call of compiled KV write or attention for one layer, see `attention_calls_jit`.

function:    address of what `kv_write_jit.write_of` or `attention_jit.attend_of` made
own, layer:  a `PASS` and a `LAYER`
counters:    that are 0
rows, piece: to be written, and those that a thread takes at a time
"""

PACKING = np.dtype(numbers("kind source inputs order panels turns panel_bytes packed counter"))
"""A weight to be packed.

source:  its numbers ``[rows, inputs]``: float32; or int8; or uint8, of fewer bits and of whole turns
order:   which row each packed column is, -1 for none
turns:   of a panel, of ``panel_bytes`` bytes
packed:  where they go, see `packing_jit`
counter: one, that is 0
"""

TAKING = np.dtype(
    numbers("kind packed panels turns ids count inputs scales minima groups group_inputs offset has_minima out counter")
)
"""Rows to be read of a packed weight.

ids:            int32, ``count`` of them
scales, minima: of the weight, float16 ``[panels, groups, PANEL]``; ``group_inputs`` numbers are a group
offset:         taken off each code
out:            float32 ``[count, inputs]``
counter:        one, that is 0
"""


def address_of(array: NDArray[Any], dtype: Any) -> int:
    """Where an array lies. Compiled code is told no more, so it must be contiguous and of the dtype that is read.

    Raises:
        TypeError: it is not.
    """
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"need a contiguous array of {np.dtype(dtype)}, got {array.dtype} with strides {array.strides}")
    return place_of(array)


def place_of(array: NDArray[Any]) -> int:
    """Where an array lies: as ``array.ctypes.data``, which takes three times as long, several times for each layer."""
    buffer: Any = array
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError):  # it is empty, read-only, not contiguous, or of a dtype that buffers have not
        place: int = array.ctypes.data
        return place


def filled(dtype: np.dtype[Any], **fields: Any) -> NDArray[np.int64]:
    """One record with these fields, the others 0, as numbers of 8 bytes.

    Raises:
        TypeError: it has no such field.
    """
    return np.array([_values(dtype, fields)], dtype).view(np.int64)


def _values(dtype: np.dtype[Any], fields: dict[str, Any]) -> tuple[Any, ...]:
    values = tuple([fields.pop(name, 0) for name in dtype.names or ()])
    if fields:
        raise TypeError(f"a record of {dtype.names} has no {sorted(fields)}")
    return values


class Record:
    """A record that is filled anew for each call, where it lies: nothing is allocated for it."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._records = np.zeros(1, dtype)
        self.place = place_of(self._records.view(np.int64))

    def fill(self, **fields: Any) -> int:
        """With these fields, the others 0; where it lies. Raises as `filled`."""
        self._records[0] = _values(self._records.dtype, fields)
        return self.place

    def of(self, name: str) -> int:
        """A field."""
        return int(self._records[name][0])

    def change(self, **fields: Any) -> None:
        """Only these fields."""
        for name, value in fields.items():
            self._records[name] = value


class Room:
    """An array that is kept from call to call, and made anew where it is too small; what is in it is nobody's."""

    def __init__(self, dtype: Any) -> None:
        self._array = np.empty(0, dtype)

    def of(self, length: int) -> NDArray[Any]:
        """``length`` elements, or more. Those of a call that takes more than `KEPT_BYTES` are that call's alone."""
        if len(self._array) >= length:
            return self._array
        array = from_a_line_on(length, self._array.dtype)
        if array.nbytes <= KEPT_BYTES:
            self._array = array
        return array
