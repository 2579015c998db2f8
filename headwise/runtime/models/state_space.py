"""State space models (Mamba-2) in some layers of a decoder: what their configs and weights have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.policy import STATE
from headwise.errors import ModelError
from headwise.kernels.fused import Attention, StateSpace
from headwise.kernels.ssm_base import SsmProjected, SsmWeights, heads_of_member
from headwise.kernels.state_layout import StateSizes
from headwise.runtime.models.base import AttentionLayer, Rotation
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.hf_config import MOST_HEAD_DIM, MOST_HEADS, MOST_MEMBERS, HfConfig, check_served, positive
from headwise.runtime.models.layers import Layer, Linear
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.states_config import SsmConfig
from headwise.runtime.models.values import finite_number, shown
from headwise.runtime.ops.base import KernelArray, Tensor

Floats = NDArray[np.float32]

MOST_CONVOLUTION = 64
_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "mamba_proj_bias": (None, False),
    "use_bias": (None, False),
    "mamba_hidden_act": (None, "silu"),
}


@dataclass(frozen=True)
class FieldNames:
    """What a family's ``config.json`` calls the sizes of such layers, and the defaults that it leaves out."""

    heads: tuple[str, int]
    head_dim: tuple[str, int]
    groups: tuple[str, int]
    state: tuple[str, int]
    convolution: tuple[str, int]


MAMBA_FIELDS = FieldNames(
    heads=("mamba_n_heads", 128),
    head_dim=("mamba_d_head", 0),
    groups=("mamba_n_groups", 1),
    state=("mamba_d_state", 256),
    convolution=("mamba_d_conv", 4),
)
"""Of Bamba and Granite 4, whose configs have the same defaults."""


def with_head_dim(config: HfConfig) -> HfConfig:
    """With the size of a state space model's heads, which may be said to follow from others."""
    if config.get("mamba_d_head", "auto") != "auto":
        return config
    heads = positive(config, MAMBA_FIELDS.heads[0], default=MAMBA_FIELDS.heads[1])
    inner = positive(config, "mamba_expand", default=2) * positive(config, "hidden_size")
    return {**config, "mamba_d_head": inner // heads}


def ssm_config(
    config: HfConfig, names: FieldNames, layers: Sequence[int], *, has_group_norms: bool, eps: float
) -> SsmConfig:
    """The layers' sizes. has_group_norms: what comes out is normed by group, not as a whole.

    Raises:
        ModelError: a field is wrong, or says what is not served.
    """
    check_served(config, _SERVED_VALUES)
    _check_steps(config)
    heads = positive(config, names.heads[0], default=names.heads[1], most=MOST_HEADS)
    groups = positive(config, names.groups[0], default=names.groups[1], most=MOST_HEADS)
    if heads % groups:
        raise ModelError(
            f"config.json: {heads} heads cannot be in {groups} groups evenly: {names.heads[0]!r} must be a multiple of "
            f"{names.groups[0]!r}"
        )
    if len(layers) * heads > MOST_MEMBERS:
        raise ModelError(
            f"config.json: {len(layers)} state space models of {heads} heads make {len(layers) * heads}; at most "
            f"{MOST_MEMBERS} can be served"
        )
    share = heads_of_member(heads, groups)
    sizes = StateSizes(
        key_dim=positive(config, names.state[0], default=names.state[1], most=MOST_HEAD_DIM),
        value_dim=positive(config, names.head_dim[0], default=names.head_dim[1], most=MOST_HEAD_DIM),
        share=share,
        convolution=positive(config, names.convolution[0], default=names.convolution[1], most=MOST_CONVOLUTION),
    )
    return SsmConfig(
        tuple(layers),
        heads // share,
        sizes,
        groups=groups,
        norm_groups=groups if has_group_norms else 1,
        eps=eps,
    )


def _check_steps(config: HfConfig) -> None:
    """Steps have no bounds: implementations differ in what they do with some."""
    limits = config.get("time_step_limit")
    if limits is None:
        return
    told = [_bound(limit) for limit in limits] if isinstance(limits, list | tuple) and len(limits) == 2 else [None]
    if told not in ([0.0, float("inf")], [float("-inf"), float("inf")]):
        raise ModelError(
            f"config.json: 'time_step_limit' is {shown(limits)}, which cannot be served; steps have no bounds here: "
            "[0, Infinity]"
        )


def _bound(limit: Any) -> float | None:
    if isinstance(limit, dict):  # as newer files write what JSON has no number for
        limit = limit.get("__float__")
    unbounded = {"Infinity": float("inf"), "-Infinity": float("-inf")}
    if isinstance(limit, float) and np.isinf(limit):
        return limit
    return unbounded[limit] if isinstance(limit, str) and limit in unbounded else finite_number(limit)


def with_states(decoder: ModelConfig, ssm: SsmConfig) -> ModelConfig:
    """``decoder`` with states in those layers.

    Raises:
        ModelError: no layer is left that has attention.
    """
    if len(ssm.layers) == decoder.num_layers:
        raise ModelError(
            f"config.json: none of {decoder.num_layers} layers has attention; at least one must, as states alone are "
            "not served"
        )
    states = (STATE,) * ssm.members
    rows = tuple(states if layer in ssm.layers else row for layer, row in enumerate(decoder.policies))
    return replace(decoder, policies=rows, states=ssm if ssm.layers else None)


@dataclass(frozen=True)
class SsmProjections:
    """One rank's part of a state space model.

    into:    to `SsmProjected.numbers`
    between: what is computed with before the norm
    norm:    of what comes out: float32 ``[values]``, or ``[groups, values / groups]`` where each is normed by itself
    parts:   if they are not this rank's alone: of all norm groups, the columns of each that this rank has
    """

    into: Linear
    between: SsmWeights
    norm: Tensor
    parts: tuple[tuple[int, int], ...]
    out: Linear


class StateSpaceDecoder(Decoder):
    """The shared decoder with two kinds of layers.

    Tensor parallel: a rank has some members, and their groups' keys and queries. Where it has not all that is normed
    together, one more sum over the ranks, of a few numbers for each token, tells how large that is.
    """

    mixer_name: ClassVar[str] = "mamba"
    """Hugging Face's name of what stands for attention in such a layer."""

    @property
    def _ssm(self) -> SsmConfig:
        assert isinstance(self.config.states, SsmConfig), "parsed so"
        return self.config.states

    def has_states(self, layer: int) -> bool:
        return self.config.states is not None and layer in self.config.states.layers

    # ---- weights ----

    def load_attention(self, layer: int, at: str) -> Any:
        if not self.has_states(layer):
            return super().load_attention(layer, at)
        return self._load_states(self._shard.kv_heads[layer], at.replace("self_attn", self.mixer_name))

    def _load_states(self, members: tuple[int, ...], at: str) -> SsmProjections:
        rows = RowPlaces(self._ssm)
        values = [rows.values(member) for member in members]
        parts, groups = self._norm_parts(members), rows.groups(members)
        norm = self._vector(f"{at}norm.weight", rows.all_values)
        own = np.concatenate([norm[start:stop] for start, stop in values])
        is_whole = not parts and self._ssm.norm_groups > 1
        return SsmProjections(
            into=self._split_rows([(f"{at}in_proj", list(rows.projected(members)))], has_bias=False),
            between=self._between(members, groups, at),
            norm=self.ops.norm_weight(own.reshape(self._own_norm_groups(members), -1) if is_whole else own),
            parts=parts,
            out=self._split_columns(f"{at}out_proj", values, has_bias=False),
        )

    def _between(self, members: tuple[int, ...], groups: list[int], at: str) -> SsmWeights:
        ssm, upload, rows = self._ssm, self.ops.upload, RowPlaces(self._ssm)
        sizes, own = ssm.sizes, list(members)

        def of_heads(name: str) -> Floats:
            every = self._vector(at + name, ssm.members * sizes.share)
            return np.ascontiguousarray(every.reshape(ssm.members, sizes.share)[own])

        channels = np.array([list(rows.channels(member)) for member in members])
        taps, name = self._weights.tensor(f"{at}conv1d.weight"), f"{at}conv1d.bias"
        self._check_shape(f"{at}conv1d.weight", taps, (rows.all_channels, 1, sizes.convolution))
        bias = self._vector(name, rows.all_channels) if name in self._weights.names else np.zeros(rows.all_channels)
        return SsmWeights(
            convolution=upload(np.ascontiguousarray(taps[:, 0][channels].transpose(0, 2, 1), np.float32)),
            convolution_bias=upload(np.ascontiguousarray(bias[channels], np.float32)),
            speed=upload(np.exp(of_heads("A_log"))),
            bias=upload(of_heads("dt_bias")),
            skip=upload(of_heads("D")),
            group=upload(np.array([groups.index(ssm.group_of(member)) for member in members], np.int32)),
            groups=len(groups),
        )

    def _vector(self, name: str, length: int) -> Floats:
        vector = self._weights.tensor(name)
        self._check_shape(name, vector, (length,))
        return np.ascontiguousarray(vector, np.float32)

    def _check_shape(self, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
        if array.shape != shape:
            raise ModelError(
                f"{name} has the shape {array.shape}, config.json says {shape}: weights and config.json do not belong "
                "together"
            )

    def _own_norm_groups(self, members: tuple[int, ...]) -> int:
        return len(members) * self._ssm.norm_groups // self._ssm.members

    def _norm_parts(self, members: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """See `SsmProjections.parts`; none, if all that is normed together is this rank's."""
        ssm, each = self._ssm, self._ssm.members // self._ssm.norm_groups
        values, counts = ssm.sizes.share * ssm.sizes.value_dim, [0] * ssm.norm_groups
        for member in members:
            counts[member // each] += 1
        if set(counts) <= {0, each}:
            return ()
        ends = np.cumsum(counts) * values
        return tuple((int(end) - count * values, int(end)) for end, count in zip(ends, counts, strict=True))

    # ---- computation ----

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        if not isinstance(attention, SsmProjections):
            return super().fusible_attention(index, attention)
        if attention.parts:
            return None
        norm = self.ops.kernel_array(attention.norm)
        groups = norm.shape[0] if norm.ndim > 1 else 1
        return StateSpace(
            into=attention.into.weight,
            between=attention.between,
            sizes=self._ssm.sizes,
            norm=norm.reshape(-1),
            norm_groups=groups,
            eps=self._ssm.eps,
            out=attention.out.weight,
        )

    def attend(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        rotation: Rotation,
        attention: AttentionLayer,
        wanted: NDArray[np.int64] | None = None,
    ) -> Tensor:
        weights = layer.attention
        if not isinstance(weights, SsmProjections):
            return super().attend(index, layer, x, rotation, attention, wanted)
        numbers, sizes = self.ops.kernel_array(self._linear(x, weights.into)), self._ssm.sizes
        values = len(weights.between.speed) * sizes.share * sizes.value_dim
        seen = attention(index, SsmProjected(numbers, weights.between, values), wanted=wanted)
        return self.projected(self._normed(seen, weights) if seen.shape[0] else seen, weights.out)

    def _normed(self, seen: Tensor, weights: SsmProjections) -> Tensor:
        """RMS norm of each norm group of ``seen [rows, values]``."""
        if weights.parts:
            return self._normed_over_ranks(seen, weights)
        shape, groups = seen.shape, weights.norm.shape[:-1]
        return self.ops.rms_norm(seen.reshape([shape[0], *groups, -1]), weights.norm, self._ssm.eps).reshape(shape)

    def _normed_over_ranks(self, seen: Tensor, weights: SsmProjections) -> Tensor:
        ops, ssm = self.ops, self._ssm
        narrow = ops.kernel_array(seen)
        rows = narrow.astype(np.float32)
        squares = np.concatenate([_squares(rows[:, start:stop]) for start, stop in weights.parts], axis=1)
        sums = ops.kernel_array(self.reduce(ops.from_kernel_array(squares))).astype(np.float32)
        width = ssm.members * ssm.sizes.share * ssm.sizes.value_dim // ssm.norm_groups
        factors = 1 / np.sqrt(sums / np.float32(width) + np.float32(ssm.eps))
        weight = ops.kernel_array(weights.norm)
        made = [
            rows[:, start:stop] * factors[:, part : part + 1] * weight[start:stop]
            for part, (start, stop) in enumerate(weights.parts)
            if stop > start
        ]
        return ops.from_kernel_array(np.concatenate(made, axis=1).astype(narrow.dtype))


def _squares(rows: KernelArray) -> KernelArray:
    """Their sum, float32 ``[rows, 1]``."""
    return (rows * rows).sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class RowPlaces:
    """Where in a checkpoint's projection ``[gates | values | keys | queries | steps]`` a member's rows are.

    Of the convolution's channels ``[values | keys | queries]``, likewise.
    """

    ssm: SsmConfig

    @property
    def all_values(self) -> int:
        return self.ssm.members * self._each

    @property
    def all_channels(self) -> int:
        return self.all_values + 2 * self._all_keys

    @property
    def _each(self) -> int:
        return self.ssm.sizes.share * self.ssm.sizes.value_dim

    @property
    def _all_keys(self) -> int:
        return self.ssm.groups * self.ssm.sizes.key_dim

    def groups(self, members: Sequence[int]) -> list[int]:
        """Those that members are of, ascending."""
        return sorted({self.ssm.group_of(member) for member in members})

    def values(self, member: int) -> tuple[int, int]:
        """Of the values, and so of what comes out."""
        return member * self._each, (member + 1) * self._each

    def projected(self, members: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Rows in the order of `SsmProjected.numbers`."""
        dim, values, steps = self.ssm.sizes.key_dim, self.all_values, 2 * self.all_values + 2 * self._all_keys
        for group in self.groups(members):
            for keys in (2 * values + self._all_keys, 2 * values):
                yield keys + group * dim, keys + (group + 1) * dim
        for member in members:
            for first in (values, 0):
                yield first + member * self._each, first + (member + 1) * self._each
        share = self.ssm.sizes.share
        for member in members:
            yield steps + member * share, steps + (member + 1) * share

    def channels(self, member: int) -> Iterator[int]:
        """``[query | key | values]`` of a member."""
        dim, group = self.ssm.sizes.key_dim, self.ssm.group_of(member)
        for keys in (self.all_values + self._all_keys, self.all_values):
            yield from range(keys + group * dim, keys + (group + 1) * dim)
        yield from range(member * self._each, (member + 1) * self._each)
