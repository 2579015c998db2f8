"""Fills a kernel cache on a machine without a GPU: `python -m headwise.kernels.cuda.precompile --help`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, get_args

import numpy as np

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda import (
    all_reduce,
    block_copy,
    block_tables,
    dsa,
    dsa_ranks,
    elementwise,
    expanded,
    experts,
    gathered,
    gqa_ranks,
    indexer,
    kv_write,
    latent_ranks,
    latents,
    likeliest,
    logit_edits,
    mla,
    mla_ranks,
    packed,
    packed_many,
    sampling,
    step_tokens,
)
from headwise.kernels.cuda.all_reduce import RankSums
from headwise.kernels.cuda.attention import AttentionShape, check_shape, every_variant_of
from headwise.kernels.cuda.compressed_model import CompressedModel
from headwise.kernels.cuda.cubins import CubinCache, Target
from headwise.kernels.cuda.delta import DeltaShape
from headwise.kernels.cuda.delta import variants_of as delta_variants
from headwise.kernels.cuda.dsa import IndexShape
from headwise.kernels.cuda.expanded import ExpandedShape
from headwise.kernels.cuda.experts import ExpertShape
from headwise.kernels.cuda.gqa_ranks import RanksShape
from headwise.kernels.cuda.kda import KdaShape
from headwise.kernels.cuda.kda import variants_of as kda_variants
from headwise.kernels.cuda.launch import Variant
from headwise.kernels.cuda.mla import LatentShape
from headwise.kernels.cuda.packed import PackedForm
from headwise.kernels.cuda.programs import Defines, cubin_path
from headwise.kernels.cuda.ssm import SsmShape
from headwise.kernels.cuda.ssm import variants_of as ssm_variants
from headwise.kernels.dsa import index_dtype
from headwise.kernels.experts import SCORED_BY, Routing
from headwise.kernels.fused import Activation
from headwise.kernels.gqa import gqa_layout
from headwise.kernels.mla import latent_layout
from headwise.kernels.ssm_base import heads_of_member
from headwise.kernels.state_layout import StateSizes


@dataclass(frozen=True)
class LatentModel:
    """Latent attention, with an indexer or without. plain, value, parts: see `ExpandedShape`"""

    latents: LatentShape
    plain: int = 128
    value: int = 128
    index: IndexShape | None = None
    parts: int = 1

    def variants(self, sm: int) -> tuple[Variant, ...]:
        """The Triton kernels that it launches. Raises ConfigError: the indexer is not supported."""
        prompts = ExpandedShape(self.latents, self.plain, self.value, self.parts)
        own = mla.variants_of(self.latents, sm) + expanded.variants_of(prompts, sm)
        if self.parts > 1:
            own = mla_ranks.variants_of(prompts, sm)
        if self.index is None:
            return own
        dsa.check_index(self.index)
        if self.parts > 1:
            return own + dsa_ranks.variants_of(prompts, self.index, sm)
        return own + dsa.variants_of(self.latents, self.index, sm)

    def programs(self) -> Iterator[tuple[str, Defines]]:
        """The CUDA C++ files that it needs, with their macros."""
        shape = self.latents
        layout = latent_layout(shape.block_size, 1, shape.rank + shape.rotated, shape.kv_dtype, shape.rotated)
        yield latents.SOURCE, latents.variant_of(layout, numpy_dtype(shape.q_dtype))
        if self.parts > 1:
            yield latent_ranks.SOURCE, elementwise.variant_of(numpy_dtype(shape.q_dtype))
            if self.index is not None:
                yield gathered.SOURCE, {}
        if self.index is not None:
            yield indexer.SOURCE, indexer.variant_of(self.index.dtype, self.index.key_dtype)


def precompile(
    shapes: Sequence[AttentionShape],
    targets: Sequence[Target],
    directory: Path,
    mixtures: Sequence[ExpertShape] = (),
    deltas: Sequence[DeltaShape] = (),
    latent_models: Sequence[LatentModel] = (),
    packed_forms: Sequence[PackedForm] = (),
    sums: Sequence[RankSums] = (),
    tma: bool = False,
    ssms: Sequence[SsmShape] = (),
    kdas: Sequence[KdaShape] = (),
    shared_shapes: Sequence[RanksShape] = (),
    compressed: Sequence[CompressedModel] = (),
) -> Iterator[Path]:
    """Compile what models of ``shapes`` need on ``targets`` into ``directory``; yields each file once it is there.

    mixtures:      of experts, of models that have them
    deltas:        delta-nets, likewise
    latent_models: with latent attention
    packed_forms:  of weights of few bits
    sums:          of ranks, of models that have several
    tma:           see `Tuning.tma`
    ssms:          state space models, of models that have them
    kdas:          Kimi Delta Attention, likewise
    shared_shapes: of layers whose KV heads ranks keep together
    compressed:    of models with entries of several tokens

    Raises:
        ConfigError: a shape is not supported on a target, or Triton or NVRTC is not installed.
    """
    for target in targets:
        cubins = CubinCache(directory, target)
        for shape in shapes:
            check_shape(shape, target.sm)
            for variant in every_variant_of(shape, target.sm, tma):
                yield cubins.get(variant).path
            for source, defines in _programs(shape, target.sm):
                yield cubin_path(directory, source, defines, target.sm, target.cuda)
        for shared in shared_shapes:
            own = shared.own
            gqa_ranks.check_parts(shared)
            check_shape(own, target.sm)
            for variant in gqa_ranks.variants_of_shared(shared, target.sm, tma):
                yield cubins.get(variant).path
            for source, defines in (*_programs(own, target.sm), *gqa_ranks.programs_of(shared)):
                yield cubin_path(directory, source, defines, target.sm, target.cuda)
        for model in latent_models:
            mla.check_latents(model.latents, target.sm)
            for variant in model.variants(target.sm):
                yield cubins.get(variant).path
            for source, defines in (*model.programs(), *_any_programs(numpy_dtype(model.latents.q_dtype), target.sm)):
                yield cubin_path(directory, source, defines, target.sm, target.cuda)
        for each_model in compressed:
            for variant in each_model.variants(target.sm):
                yield cubins.get(variant).path
            for source, defines in (*each_model.programs(), *_any_programs(numpy_dtype(each_model.dtype), target.sm)):
                yield cubin_path(directory, source, defines, target.sm, target.cuda)
        for mixture in mixtures:
            experts.check_experts(mixture)
            for variant in experts.variants_of(mixture, target.sm):
                yield cubins.get(variant).path
            for source, defines in experts.programs_of(mixture):
                yield cubin_path(directory, source, defines, target.sm, target.cuda)
        for each in sums:
            yield cubin_path(directory, all_reduce.SOURCE, each.defines(), target.sm, target.cuda)
        for form in packed_forms:
            for variant in packed.variants_of(form):
                yield cubins.get(variant).path
            for source, defines in (*packed.programs_of(form, target.sm), *packed_many.programs_of(form)):
                yield cubin_path(directory, source, defines, target.sm, target.cuda)
        for delta in deltas:
            for variant in delta_variants(delta, target.sm).values():
                yield cubins.get(variant).path
        for ssm in ssms:
            for variant in ssm_variants(ssm, target.sm).values():
                yield cubins.get(variant).path
        for kda in kdas:
            for variant in kda_variants(kda, target.sm).values():
                yield cubins.get(variant).path


def _programs(shape: AttentionShape, sm: int) -> Iterator[tuple[str, Defines]]:
    """The CUDA C++ files that a model of ``shape`` needs, with their macros."""
    layout = gqa_layout(shape.block_size, 1, shape.head_dim, shape.kv_dtype, shape.value_dim)
    dtype = numpy_dtype(shape.q_dtype)
    yield kv_write.SOURCE, kv_write.variant_of(layout, dtype)
    yield from _any_programs(dtype, sm)


def _any_programs(dtype: np.dtype[Any], sm: int) -> Iterator[tuple[str, Defines]]:
    """Those of models of any attention."""
    yield elementwise.SOURCE, elementwise.variant_of(dtype)
    yield likeliest.SOURCE, elementwise.variant_of(dtype)
    yield sampling.SOURCE, elementwise.variant_of(dtype)
    yield logit_edits.SOURCE, elementwise.variant_of(dtype)
    if dtype != np.float32:  # of edited logits
        yield sampling.SOURCE, elementwise.variant_of(np.dtype(np.float32))
    if dtype.itemsize == 2:
        yield from packed.programs_of(packed.plain_form(str(dtype)), sm)
    yield block_tables.SOURCE, {}
    yield step_tokens.SOURCE, {}
    yield block_copy.SOURCE, {}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = _parser().parse_args(arguments)
    targets = [Target(sm, cuda) for sm in options.sm for cuda in options.cuda]
    try:
        shapes = list(_shapes(options))
        mixed = (
            list(_mixtures(options)),
            list(_deltas(options)),
            list(_latents(options)),
            list(_packed(options)),
            list(_sums(options)),
            options.tma,
            list(_ssms(options)),
            list(_kdas(options)),
            [RanksShape(shape, parts) for shape, parts in shapes if parts > 1],
            list(_compressed(options)),
        )
        alone = [shape for shape, parts in shapes if parts == 1]
        for path in precompile(alone, targets, options.directory, *mixed):
            print(path, flush=True)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headwise.kernels.cuda.precompile",
        description="Compile the kernels of one model shape, so that engines start without a compiler.",
    )
    parser.add_argument("directory", type=Path, help="the kernel cache to fill: 'kernels' under an engine's cache path")
    parser.add_argument("--sm", type=_numbers, default=[80, 90, 100], help="compute capabilities (default: 80,90,100)")
    parser.add_argument("--cuda", type=_numbers, default=[12, 13], help="CUDA versions of drivers (default: 12,13)")
    parser.add_argument("--q-heads", type=int, required=True, help="query heads of the model")
    parser.add_argument(
        "--kv-heads", type=_numbers, help="KV heads of a layer; where layers differ, of each kind: 16,4"
    )
    parser.add_argument("--head-dim", type=_numbers, help="size of heads; likewise: 256,512")
    parser.add_argument(
        "--value-dim", type=_numbers, help="size of their values, where that is another; likewise (default: --head-dim)"
    )
    parser.add_argument(
        "--kv-parts",
        type=_numbers,
        help="ranks that keep a KV head together, each a part of every block's tokens; --q-heads over it are those of "
        "all of these; likewise: 1,2 (default: 1)",
    )
    parser.add_argument("--block-size", type=int, default=64, help="tokens per block (default: 64)")
    parser.add_argument("--dtype", default="bfloat16", help="of queries (default: bfloat16)")
    parser.add_argument("--kv-dtype", default=None, help="of cached keys and values (default: that of queries)")
    parser.add_argument("--softcap", action="store_true", help="the model caps its attention scores")
    parser.add_argument("--sink-logits", action="store_true", help="the model has learned a sink for each query head")
    parser.add_argument(
        "--both-ways", action="store_true", help="images' tokens see one another (Gemma 3 from 4B on, Gemma 4)"
    )
    parser.add_argument("--chunked", action="store_true", help="layers see chunks, not windows (Llama 4)")
    parser.add_argument(
        "--tma", action=argparse.BooleanOptionalAction, default=True, help="for engines with prefill_tma (default: yes)"
    )
    parser.add_argument("--hidden-size", type=int, help="of the model: for experts, and for sums over --tp-size ranks")
    parser.add_argument(
        "--tp-size",
        type=int,
        default=1,
        help="ranks, which sum over each other, and that delta-nets' key heads, members of state space models and "
        "heads of Kimi Delta Attention are dealt to (default: 1)",
    )
    latent = parser.add_argument_group("latent attention", "of a model that has it, in place of KV heads")
    latent.add_argument("--latent-rank", type=int, help="'kv_lora_rank'; --q-heads are those of one rank")
    latent.add_argument("--latent-rotated", type=int, default=64, help="'qk_rope_head_dim' (default: 64)")
    latent.add_argument("--latent-plain", type=int, default=128, help="'qk_nope_head_dim' (default: 128)")
    latent.add_argument("--latent-value", type=int, default=128, help="'v_head_dim' (default: 128)")
    latent.add_argument(
        "--latent-parts",
        type=int,
        default=1,
        help="ranks that keep latents together, each a part of every block's tokens (default: 1)",
    )
    latent.add_argument("--index-heads", type=int, help="'index_n_heads', of a model with an indexer")
    latent.add_argument("--index-dim", type=int, default=128, help="'index_head_dim' (default: 128)")
    entries = parser.add_argument_group(
        "entries of several tokens",
        "of a model that has them, in place of KV heads; with --index-heads and --index-dim",
    )
    entries.add_argument("--entry-size", type=int, help="'head_dim'; --q-heads are those of one rank")
    entries.add_argument("--entry-rates", type=_numbers, default=[4, 128], help="tokens of each (default: 4,128)")
    entries.add_argument("--indexed-rate", type=int, default=4, help="of those that are chosen (default: 4)")
    entries.add_argument(
        "--entry-turning", type=int, default=32, help="half of 'qk_rope_head_dim'; counts with --kv-dtype (default: 32)"
    )
    entries.add_argument("--streams", type=int, default=4, help="of hyper-connections; 0: none (default: 4)")
    mixture = parser.add_argument_group("mixture of experts", "of a model that has one")
    mixture.add_argument("--experts", type=int, help="to choose from")
    mixture.add_argument("--experts-per-token", type=int, default=1)
    mixture.add_argument(
        "--shared-experts",
        type=int,
        default=0,
        help="for every token; one as large as several counts as those (default: 0)",
    )
    mixture.add_argument("--expert-size", type=int, help="intermediate size of an expert, on one rank")
    mixture.add_argument("--activation", choices=get_args(Activation), default="silu")
    mixture.add_argument("--expert-biases", action="store_true", help="projections have biases")
    mixture.add_argument("--weighs-input", action="store_true", help="experts are given weighted tokens (Llama 4)")
    mixture.add_argument("--scored-by", choices=SCORED_BY, default="softmax", help="what makes scores of logits")
    mixture.add_argument("--expert-groups", type=int, default=1, help="that experts come in (default: 1)")
    mixture.add_argument("--groups-per-token", type=int, default=1)
    mixture.add_argument("--best-of-group", type=int, default=1, help="experts that a group's score is the sum of")
    add_weight_options(parser)
    delta = parser.add_argument_group("gated delta-nets", "of a model that has them")
    delta.add_argument("--delta-key-heads", type=int, help="of the model")
    delta.add_argument("--delta-value-heads", type=int, help="of the model (default: as many)")
    delta.add_argument("--delta-key-dim", type=int, default=128, help="(default: 128)")
    delta.add_argument("--delta-value-dim", type=int, default=128, help="(default: 128)")
    delta.add_argument("--delta-convolution", type=int, default=4, help="tokens that it spans (default: 4)")
    ssm = parser.add_argument_group("state space models (Mamba-2)", "of a model that has them")
    ssm.add_argument("--ssm-heads", type=int, help="of the model")
    ssm.add_argument("--ssm-groups", type=int, default=1, help="of the model, that share keys (default: 1)")
    ssm.add_argument("--ssm-key-dim", type=int, default=128, help="'ssm_state_size' (default: 128)")
    ssm.add_argument("--ssm-value-dim", type=int, default=64, help="of heads (default: 64)")
    ssm.add_argument("--ssm-convolution", type=int, default=4, help="tokens that it spans (default: 4)")
    kda = parser.add_argument_group("Kimi Delta Attention", "of a model that has it")
    kda.add_argument("--kda-heads", type=int, help="of the model")
    kda.add_argument("--kda-head-dim", type=int, default=128, help="(default: 128)")
    kda.add_argument("--kda-convolution", type=int, default=4, help="tokens that it spans (default: 4)")
    return parser


def add_weight_options(parser: argparse.ArgumentParser) -> None:
    """Those that `codes_of` reads."""
    weights = parser.add_argument_group("weights of few bits", "of a model that is served with them")
    weights.add_argument("--weight-bits", type=int, choices=(4, 8))
    weights.add_argument("--weight-group", type=int, default=32, help="that share a scale; 0: a row (default: 32)")
    weights.add_argument("--weight-minima", action="store_true", help="groups have a minimum, too (AWQ, Q4_1)")
    weights.add_argument("--weight-floats", action="store_true", help="numbers of 8 bits are FP8 (E4M3)")


def _shapes(options: argparse.Namespace) -> Iterator[tuple[AttentionShape, int]]:
    """Each with the ranks that keep a KV head together, of one of which it is."""
    if options.latent_rank is not None or options.entry_size is not None:
        return
    if options.kv_heads is None or options.head_dim is None:
        raise ConfigError(
            "give --kv-heads and --head-dim, or --latent-rank of a model with latent attention, or --entry-size of one "
            "with entries of several tokens"
        )
    value_dims = options.value_dim or options.head_dim
    every = options.kv_heads, options.head_dim, value_dims, options.kv_parts or [1] * len(options.kv_heads)
    if len(set(map(len, every))) > 1:
        raise ConfigError(
            f"--kv-heads {every[0]}, --head-dim {every[1]}, --value-dim {every[2]} and --kv-parts {every[3]} do not go "
            "together: give as many of each, one for each kind of layer"
        )
    for kv_heads, head_dim, value_dim, parts in zip(*every, strict=True):
        if min(kv_heads, parts) < 1 or options.q_heads % (kv_heads * parts):
            raise ConfigError(
                f"{options.q_heads} query heads cannot share {kv_heads} KV heads evenly on {parts} ranks: give a "
                "multiple"
            )
        if options.block_size % parts:
            raise ConfigError(
                f"{parts} ranks cannot keep KV heads together in blocks of {options.block_size} tokens: give "
                "--kv-parts that divide --block-size"
            )
        shape = AttentionShape(
            share=options.q_heads // (kv_heads * parts),
            head_dim=head_dim,
            block_size=options.block_size // parts,
            q_dtype=options.dtype,
            kv_dtype=options.kv_dtype or options.dtype,
            softcap=options.softcap,
            sink_logits=options.sink_logits,
            chunked=options.chunked,
            smaller_value=0 if value_dim == head_dim else value_dim,
        )
        yield shape, parts
        if options.both_ways and parts == 1:
            yield replace(shape, both_ways=True), parts


def _compressed(options: argparse.Namespace) -> Iterator[CompressedModel]:
    if options.entry_size is None:
        return
    kept, rates = options.kv_dtype or options.dtype, tuple(options.entry_rates)
    indexed = options.indexed_rate if options.index_heads else 0
    if indexed and indexed not in rates:
        raise ConfigError(f"--indexed-rate {indexed} is not one of --entry-rates {','.join(map(str, rates))}")
    every = options.q_heads, options.entry_size, options.block_size, options.dtype, kept, options.entry_turning, rates
    yield CompressedModel(*every, indexed, options.index_heads or 0, options.index_dim, options.streams)


def _latents(options: argparse.Namespace) -> Iterator[LatentModel]:
    if options.latent_rank is None:
        return
    dtype, block_size, heads, parts = options.dtype, options.block_size, options.index_heads, options.latent_parts
    if min(block_size, parts) < 1 or block_size % parts:
        raise ConfigError(
            f"{parts} ranks cannot keep latents together in blocks of {block_size} tokens: give --latent-parts that "
            "divide --block-size"
        )
    block_size, kept = block_size // parts, options.kv_dtype or dtype
    shape = LatentShape(options.q_heads, options.latent_rank, options.latent_rotated, block_size, dtype, kept)
    index = None if heads is None else IndexShape(heads, options.index_dim, block_size, dtype, index_dtype(kept))
    yield LatentModel(shape, options.latent_plain, options.latent_value, index, parts)


def _mixtures(options: argparse.Namespace) -> Iterator[ExpertShape]:
    if options.experts is None:
        return
    if options.hidden_size is None or options.expert_size is None:
        raise ConfigError("--experts needs --hidden-size and --expert-size, of the model's config.json")
    yield ExpertShape(
        routing=Routing(
            options.experts,
            options.experts_per_token,
            norm_min=None,
            scored_by=options.scored_by,
            groups=options.expert_groups,
            groups_per_token=options.groups_per_token,
            best_of_group=options.best_of_group,
        ),
        shared=options.shared_experts,
        hidden=options.hidden_size,
        inner=options.expert_size,
        activation=options.activation,
        dtype=options.dtype,
        has_bias=options.expert_biases,
        weighs_input=options.weighs_input,
        up_codes=codes_of(options, options.hidden_size),
        down_codes=codes_of(options, options.expert_size),
    )


def _deltas(options: argparse.Namespace) -> Iterator[DeltaShape]:
    key_heads, ranks = options.delta_key_heads, options.tp_size
    if key_heads is None:
        return
    value_heads = options.delta_value_heads or key_heads
    if min(key_heads, ranks) < 1 or key_heads % ranks or value_heads % key_heads:
        raise ConfigError(
            f"{value_heads} value heads cannot share {key_heads} key heads on {ranks} ranks evenly: give those of the "
            "model's config.json, and a --tp-size that divides them"
        )
    sizes = StateSizes(
        options.delta_key_dim, options.delta_value_dim, value_heads // key_heads, options.delta_convolution
    )
    yield DeltaShape(key_heads // ranks, sizes, options.block_size, options.dtype)


def _ssms(options: argparse.Namespace) -> Iterator[SsmShape]:
    heads, groups, ranks = options.ssm_heads, options.ssm_groups, options.tp_size
    if heads is None:
        return
    are_whole = min(heads, groups, ranks) > 0 and heads % groups == 0
    share = heads_of_member(heads, groups) if are_whole else 1
    if not are_whole or heads // share % ranks or (groups % ranks and ranks % groups):
        raise ConfigError(
            f"{heads} heads in {groups} groups are not members of {share} on {ranks} ranks evenly: give those of the "
            "model's config.json, and a --tp-size that divides groups and members"
        )
    sizes = StateSizes(options.ssm_key_dim, options.ssm_value_dim, share, options.ssm_convolution)
    members, groups = heads // share // ranks, max(1, groups // ranks)
    yield SsmShape(members, groups, sizes, options.block_size, options.dtype)


def _kdas(options: argparse.Namespace) -> Iterator[KdaShape]:
    heads, dim, ranks = options.kda_heads, options.kda_head_dim, options.tp_size
    if heads is None:
        return
    if min(heads, ranks) < 1 or heads % ranks:
        raise ConfigError(
            f"{heads} heads of Kimi Delta Attention cannot be dealt to {ranks} ranks evenly: give those of the model's "
            "config.json, and a --tp-size that divides them"
        )
    sizes, own = StateSizes(dim, dim, 1, options.kda_convolution), heads // ranks
    # Behind a row's inputs and rates is what decays and gates are made of, as many numbers each as a head has.
    yield KdaShape(own, sizes, options.block_size, options.dtype, own * (sizes.channels + 1) + 2 * dim)


def _sums(options: argparse.Namespace) -> Iterator[RankSums]:
    if 1 < options.tp_size <= all_reduce.MOST_RANKS and options.hidden_size is not None:
        yield RankSums(options.dtype, options.tp_size, options.hidden_size)


def _packed(options: argparse.Namespace) -> Iterator[PackedForm]:
    form = codes_of(options, 2 * packed.MOST_STEP * (options.weight_group or 1))  # rows of many groups
    if form is not None:
        yield form


def codes_of(options: argparse.Namespace, depth: int) -> PackedForm | None:
    """The form of weights with rows of ``depth``; None: they are of ``dtype``. Tiles of FP8 may be cut by a rank."""
    bits, group, is_float = options.weight_bits, options.weight_group, options.weight_floats
    if bits is None:
        return None
    if is_float and bits != 8:
        raise ConfigError(f"--weight-floats are FP8, which has 8 bits: give --weight-bits 8, not {bits}")
    group = gcd(group, depth) if is_float else group or depth
    bits = packed.bits_taken(bits, depth, group)
    packed.check_groups(depth, group, bits)
    return packed.form_of(options.dtype, bits, group, options.weight_minima, depth, is_float)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
