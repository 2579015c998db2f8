"""DeepSeek-V2 and V3, and Kimi-K2, which is a V3: latent attention (MLA), routed and shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.head_groups import Sharing
from headwise.cache_controller.policy import FULL
from headwise.errors import ModelError
from headwise.kernels.fused import Attention, Latents
from headwise.kernels.mla_base import UpProjections
from headwise.runtime.models.base import AttentionLayer, Rotation
from headwise.runtime.models.deepseek_routing import GroupedMoeConfig, v2_moe, v3_moe
from headwise.runtime.models.drafting import BEHIND_THE_LAST, DraftingNames
from headwise.runtime.models.grouped_moe import GroupedMoeDecoder
from headwise.runtime.models.hf_config import HfConfig, check_served, decoder_config, number, positive, rope, text_of
from headwise.runtime.models.layers import Layer, Linear
from headwise.runtime.models.mla_config import MlaConfig
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.rope import scaling_kind
from headwise.runtime.models.weight_view import taken
from headwise.runtime.ops.base import Tensor
from headwise.runtime.ops.quantised import GroupQuantised, Matrix, as_floats

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"

MOST_RANK = 1 << 16
"""No model has larger ranks or heads: a config that claims more would cost gigabytes."""

_SERVED_VALUES: dict[str, tuple[Any, ...]] = {"mlp_bias": (None, False), "rope_interleave": (None, True)}
_NORM_EPS = 1e-6
"""Of the norms of latents, whatever ``rms_norm_eps`` says."""

Floats = NDArray[np.float32]


def parse_v2(config: HfConfig) -> ModelConfig:
    return parse_latents(config, V2, v2_moe)


def parse_v3(config: HfConfig) -> ModelConfig:
    """As `parse_latents`; alone of all, its ``rope_interleave`` may be false."""
    if config.get("rope_interleave") is not False:
        return parse_latents(config, V3, v3_moe)
    parsed = parse_latents({**config, "rope_interleave": True}, V3, v3_moe)
    assert parsed.mla is not None, "parsed so"
    return replace(parsed, mla=replace(parsed.mla, in_halves=True))


def parse_kimi_k25(config: HfConfig) -> ModelConfig:
    """The text of a Kimi-K2.5, which is a Kimi-K2."""
    return parse_v3(text_of(config))


def parse_latents(
    config: HfConfig, architecture: str, read_moe: Callable[[HfConfig, int], GroupedMoeConfig]
) -> ModelConfig:
    """Read a ``config.json`` of latent attention, and its experts, if it has any, by ``read_moe``."""
    check_served(config, _SERVED_VALUES)
    mla = _mla(config)
    decoder = decoder_config({**config, "head_dim": mla.rotated, "num_key_value_heads": 1}, architecture)
    moe = read_moe(config, decoder.num_layers) if config.get("n_routed_experts") is not None else None
    return replace(
        decoder,
        policies=((FULL,),) * decoder.num_layers,
        attention_scale=(mla.plain + mla.rotated) ** -0.5 * _yarn_factor(config) ** 2,
        moe=moe,
        mla=mla,
    )


def _mla(config: HfConfig) -> MlaConfig:
    def size(key: str) -> int:
        return positive(config, key, most=MOST_RANK)

    rotated = size("qk_rope_head_dim")
    if rotated % 2:
        raise ModelError(f"config.json: 'qk_rope_head_dim' must be even, as its numbers turn in pairs, got {rotated}")
    return MlaConfig(
        rank=size("kv_lora_rank"),
        rotated=rotated,
        plain=size("qk_nope_head_dim"),
        value_dim=size("v_head_dim"),
        q_rank=None if config.get("q_lora_rank") is None else size("q_lora_rank"),
    )


def _yarn_factor(config: HfConfig) -> float:
    """What queries, and keys, of all dimensions are multiplied with where YaRN has lengthened the context."""
    scaling = rope(config).scaling or {}
    weight = number(scaling, "mscale_all_dim", optional=True)
    if scaling_kind(scaling) == "default" or not weight:
        return 1.0
    factor = number(scaling, "factor")
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


# ---- weights ----


@dataclass(frozen=True)
class LatentProjections:
    """One rank's weights of a layer's latent attention.

    into:       a token's queries and latent: ``[queries | latent]``; where queries have a rank of their own, what they
                are made of: ``[q_rank | latent]``
    into_heads: queries out of ``q_rank`` numbers, and the norm of these
    up, out:    of this rank's heads
    """

    into: Linear
    into_heads: tuple[Tensor, Linear] | None
    latent_norm: Tensor
    up: UpProjections
    out: Linear


class Deepseek(GroupedMoeDecoder):
    """The shared decoder with latent attention.

    Rotary embedding: DeepSeek rotates neighbours ``(2i, 2i + 1)`` by the angle ``i``, the rope operation the elements
    ``(i, i + D / 2)``. So the rows of projections that make what is rotated are reordered when they are loaded, even
    ones before odd ones: then the rope operation turns the pairs that DeepSeek turns, and queries and keys, being
    reordered alike, have the same products. Rows stay as they are where a model turns what the operation turns
    (``rope_interleave: false``).

    Tensor parallel: query heads are dealt out, and what latents are made of is whole on every rank.
    """

    drafting_names: ClassVar[DraftingNames | None] = BEHIND_THE_LAST

    @property
    def mla(self) -> MlaConfig:
        mla = self.config.mla
        assert mla is not None, "parsed so"
        return mla

    def _heads(self) -> tuple[int, int]:
        """This rank's query heads, from and to."""
        part = Sharing(self._shard.rank, self._shard.size).of(self.config.num_heads)
        return part.start, part.stop

    # ---- weights ----

    def load_attention(self, layer: int, at: str) -> LatentProjections:
        mla, (first, last) = self.mla, self._heads()
        values = [(first * mla.value_dim, last * mla.value_dim)]
        into = "q_proj" if mla.q_rank is None else "q_a_proj"
        queries = self._queries if mla.q_rank is None else self._whole
        return LatentProjections(
            into=replace(
                self._linear_weight(
                    f"{at}{into} + kv_a_proj_with_mqa",
                    lambda: _stacked([queries(f"{at}{into}"), self._latent_rows(f"{at}kv_a_proj_with_mqa")]),
                ),
                bias=self._into_bias(at),
            ),
            into_heads=None
            if mla.q_rank is None
            else (
                self._norm(f"{at}q_a_layernorm.weight"),
                self._linear_weight(f"{at}q_b_proj", lambda: self._queries(f"{at}q_b_proj")),
            ),
            latent_norm=self._norm(f"{at}kv_a_layernorm.weight"),
            up=self._up_projections(at),
            out=self._split_columns(
                f"{at}o_proj", values, self.config.out_bias, self.adds_later(layer, "after_attention")
            ),
        )

    def _into_bias(self, at: str) -> Tensor | None:
        """Of what queries and latents are made by; queries that have no rank of their own have none."""
        if not self.config.attention_bias:
            return None
        mla, (first, last) = self.mla, self._heads()
        latent = self._vector(f"{at}kv_a_proj_with_mqa.bias", mla.width)[self._order(mla.width)]
        if mla.q_rank is None:
            of_queries: Floats = np.zeros((last - first) * (mla.plain + mla.rotated), np.float32)
        else:
            of_queries = self._vector(f"{at}q_a_proj.bias", mla.q_rank)
        return self.ops.linear_bias(np.concatenate([of_queries, latent]))

    def _vector(self, name: str, size: int) -> Floats:
        found = self._weights.tensor(name)
        if found.shape != (size,):
            raise ModelError(
                f"{name} has the shape {found.shape} where config.json says {(size,)}: weights and config.json do not "
                "belong together"
            )
        return found

    def _order(self, count: int) -> NDArray[np.int64]:
        """Of ``count`` rows, the last ones of which are rotated, the order in which the rope operation takes them."""
        return np.arange(count) if self.mla.in_halves else _rotated_halved(count, self.mla.rotated)

    def _linear_weight(self, name: str, make: Callable[[], Matrix]) -> Linear:
        first, last = self._heads()
        made_of = f"{name}[heads {first}:{last}{'' if self.mla.in_halves else ', pairs in halves'}]"
        return Linear(self._prepare(made_of, lambda: self.ops.linear_weight(make())))

    def _whole(self, name: str) -> Matrix:
        rows = self.mla.q_rank
        assert rows is not None, "who asks has one"
        return self._rows_of(name, (0, rows), self.config.hidden_size, is_all=True)

    def _queries(self, name: str) -> Matrix:
        """Rows of this rank's queries, ``[heads * (plain + rotated), inputs]``."""
        mla, (first, last) = self.mla, self._heads()
        size = mla.plain + mla.rotated
        inputs = self.config.hidden_size if mla.q_rank is None else mla.q_rank
        rows = self._rows_of(name, (first * size, last * size), inputs)
        heads = np.arange(last - first)[:, None] * size
        return taken(rows, (heads + self._order(size)).reshape(-1))

    def _latent_rows(self, name: str) -> Matrix:
        mla = self.mla
        rows = self._rows_of(name, (0, mla.width), self.config.hidden_size, is_all=True)
        return taken(rows, self._order(mla.width))

    def _rows_of(self, name: str, part: tuple[int, int], inputs: int, is_all: bool = False) -> Matrix:
        """Rows of a matrix: as codes or in the model's dtype, where kept, else float32. is_all: it has no others"""
        kept = self._weights.kept_rows(f"{name}.weight", *part)
        expected = part[1] - part[0], inputs
        if kept is not None:
            self._check(name, kept.shape, expected)
            return kept
        read = self._weights.tensor(f"{name}.weight") if is_all else self._weights.rows(f"{name}.weight", *part)
        return self._checked(name, read, expected)

    def _up(self, name: str) -> tuple[Floats, Floats]:
        """What this rank's heads make of a latent, as `UpProjections` has it."""
        mla, (first, last) = self.mla, self._heads()
        size = mla.plain + mla.value_dim
        rows = self._weights.rows(f"{name}.weight", first * size, last * size)
        rows = self._checked(name, rows, ((last - first) * size, mla.rank))
        key, value = np.split(rows.reshape(last - first, size, mla.rank), [mla.plain], axis=1)
        return np.ascontiguousarray(key, np.float32), np.ascontiguousarray(value.transpose(0, 2, 1), np.float32)

    def _checked(self, name: str, rows: Floats, expected: tuple[int, int]) -> Floats:
        self._check(name, rows.shape, expected)
        return rows

    def _check(self, name: str, shape: tuple[int, ...], expected: tuple[int, int]) -> None:
        if shape != expected:
            raise ModelError(
                f"{name}.weight has the shape {shape} where config.json says {expected}: weights and config.json "
                "do not belong together"
            )

    def _up_projections(self, at: str) -> UpProjections:
        key, value = (self.ops.kernel_array(self.ops.tensor(part)) for part in self._up(f"{at}kv_b_proj"))
        if not self.config.sink_logits:
            return UpProjections(key, value)
        sinks = self._vector(f"{at}sinks", self.config.num_heads)[slice(*self._heads())]
        return UpProjections(key, value, self.ops.upload(np.ascontiguousarray(sinks, np.float32)))

    # ---- computation ----

    def fusible_attention(self, index: int, attention: Any) -> Attention | None:
        if type(attention) is not LatentProjections:
            return None
        ranked = attention.into_heads
        return Latents(
            into=attention.into.weight,
            ranked=None if ranked is None else (ranked[0], ranked[1].weight),
            latent_norm=attention.latent_norm,
            up=attention.up,
            out=attention.out.weight,
            rotation=self.rotation_of[index],
            eps=_NORM_EPS,
            into_bias=attention.into.bias,
            out_bias=attention.out.bias,
            out_adapters=attention.out.adapters,
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
        mla, weights, tokens = self.mla, layer.attention, x.shape[0]
        made = self._linear(x, weights.into)
        queries, compressed, shared = made[:, : -mla.width], made[:, -mla.width : -mla.rotated], made[:, -mla.rotated :]
        choosing: tuple[Any, ...] = ()
        if weights.into_heads is not None:
            norm, into_heads = weights.into_heads
            ranked = self.ops.rms_norm(queries, norm, _NORM_EPS)
            queries, choosing = self._linear(ranked, into_heads), self.choosing(index, weights, x, ranked)
        queries = queries.reshape([tokens, -1, mla.plain + mla.rotated])
        latents = self.ops.rms_norm(compressed, weights.latent_norm, _NORM_EPS)
        heads = attention(index, queries, latents, shared, weights.up, rotation, *choosing, wanted=wanted)
        return self.projected(self.gated(layer, x, heads, wanted), weights.out)

    def choosing(self, index: int, weights: Any, x: Tensor, ranked: Tensor) -> tuple[Any, ...]:
        """What a layer's tokens are chosen by, where attention sees only some: of ``x``, and of what queries are made
        of."""
        return ()


def _stacked(parts: list[Matrix]) -> Matrix:
    """Rows below each other."""
    quantised = [part for part in parts if isinstance(part, GroupQuantised)]
    if len(quantised) == len(parts):
        return GroupQuantised.concatenate(quantised, 0)
    return np.concatenate([as_floats(part) for part in parts])


def _rotated_halved(count: int, rotated: int) -> NDArray[np.int64]:
    """Of ``count`` rows the order in which the last ``rotated`` come even ones first, then odd ones."""
    plain = count - rotated
    return np.concatenate([np.arange(plain), plain + np.arange(0, rotated, 2), plain + np.arange(1, rotated, 2)])
