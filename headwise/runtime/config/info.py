"""``headwise info``: what a configuration means for a model's cache, without loading weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from headwise.cache_controller.head_groups import HeadGroup, HeadGroupPlan
from headwise.cache_controller.planner import MAX_STATE_PADDING
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.unified_pages import planned_bytes, unified_pages
from headwise.cache_controller.windows import GroupWindows
from headwise.kernels.bandwidth import read_bandwidth
from headwise.kernels.select import resolve_kernels_name
from headwise.runtime.config.block_size import choose_block_size
from headwise.runtime.config.decode_reads import DecodeReads, decode_reads, kinds_of_blocks
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.host_cache import MOST_BYTES
from headwise.runtime.config.model_card import ModelCard, plan_with
from headwise.runtime.config.threads import threads_per_worker
from headwise.runtime.models.attention.base import AttentionVariant
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.ops.select import resolve_ops_name
from headwise.units import format_bytes


def describe(
    config: EngineConfig, card: ModelCard, directory: Path, lengths: Sequence[int] = ()
) -> Iterator[tuple[str, str]]:
    """Name and value of what a user may want to know of a deployment of the model in ``directory`` before it starts.

    Measures how fast a CPU's memory is, which takes about 0.2 s.

    lengths: tokens of the requests to count in the pool; empty takes the powers of 4 from 1,024 on, and the longest
    """
    model, plan, layout, spec = card.config, card.plan, card.layout, card.spec
    yield "model", f"{card.model} ({model.architecture})"
    attention = attention_of(model)
    kind = "" if model.eagle is None else " (EAGLE-3)"
    drafting = f", one more that drafts{kind}" if model.draft_layers else ""
    yield "geometry", f"{model.decoder_layers} layers{drafting}, {attention.geometry()}"
    yield "longest sequence", f"{card.max_model_len} tokens"
    yield (
        "head groups",
        f"{len(plan.groups)} x {plan.slots_text} slots per rank ({config.head_grouping}, padding {plan.padding:.1%})",
    )
    for name, text in head_groups(card):
        yield f"  {name}", text
    yield "block", f"{layout.block_size} tokens of one group, {format_bytes(layout.block_bytes)}"
    pool = f"{spec.num_blocks} blocks per rank, {format_bytes(spec.num_blocks * layout.block_bytes)}"
    yield "block pool", pool if spec.num_blocks else "measured at start"
    if spec.num_host_blocks:
        host = format_bytes(spec.num_host_blocks * layout.block_bytes)
        yield "host cache", f"{spec.num_host_blocks} blocks per rank, {host}, {config.write_policy}"
    elif config.chooses_host_cache:
        yield "host cache", f"chosen at start by the nodes' memory, at most {_most_host_cache(config)} per rank"
    if config.storage:
        yield "storage", f"{config.storage}, prefetch {config.prefetch}"
    if config.prefix_caching:
        yield "smallest reusable prefix", f"{layout.block_size} tokens"
    yield "cache of 1,000 tokens", _bytes_of_thousand(card)
    if card.token_parts > 1:
        yield "context parallel", _parts(card)
    if (times := plan.copies_beside([of_layer.parts for of_layer in card.layouts])) > 1:
        yield "kept by several ranks", _copies(card, times)
    yield "over pages of one layer", _over_unified_pages(config, card)
    if card.has_states:
        yield "states of a sequence", _bytes_of_states(config, card)
        yield "padding", _padding_beside_states(config, card)
    yield from _decode_rows(config, decode_reads(config, card, directory))
    for tokens in (lengths or _usual_lengths(card.max_model_len)) if spec.num_blocks else ():
        yield f"requests of {tokens} tokens", _requests_that_fit(config, card, tokens)
    if card.adapters:
        yield "adapters", ", ".join(name for name, _ in card.adapters)
    if len(plan.stages) > 1:
        yield "stages", _stages(card)
    yield "replicas x ranks", _replicas(config)
    yield "blocks from other engines", f"no, {why_not}" if (why_not := config.without_peer_loads) else "yes"


def _most_host_cache(config: EngineConfig) -> str:
    return format_bytes(config.kv_cache_bytes or MOST_BYTES)


def _stages(card: ModelCard) -> str:
    """Which layers each has."""
    dealt = (f"{stage[0]} to {stage[-1]}" if len(stage) > 1 else str(stage[0]) for stage in card.plan.stages)
    ranks = "1 rank" if card.plan.tp_size == 1 else f"{card.plan.tp_size} ranks"
    return f"{len(card.plan.stages)} of {ranks} each: layers {', '.join(dealt)}"


def _replicas(config: EngineConfig) -> str:
    """How many engines of how many ranks, and what they are for."""
    stages = config.pipeline_parallel_size
    whole, of_prefill, of_decode = (
        str(size) if stages == 1 else f"{stages * size} ({stages} stages of {size})"
        for size in (config.tp_size, config.prefill_tp_size or config.tp_size, config.decode_tp_size or config.tp_size)
    )
    if not config.prefill_replicas:
        return f"{config.first_replicas} x {whole}"
    prefill, decode = config.prefill_replicas, config.decode_replicas
    if len(config.tp_sizes) == 1:
        return f"{config.first_replicas} x {whole}, {prefill} for prompts and {decode} to decode"
    parts = f"{prefill} x {of_prefill} for prompts"
    parts += f", {decode} x {of_decode} to decode" if decode else ""
    others = config.first_replicas - prefill - decode
    return f"{parts}, {others} x {whole} for whole requests" if others else parts


def head_groups(card: ModelCard) -> Iterator[tuple[str, str]]:
    """Which group, and its policy and members, in words; neighbours that are alike together."""
    attention = attention_of(card.config)
    for text, alike in groupby(enumerate(card.plan.groups), key=lambda entry: _group(entry[1], card, attention)):
        first, *others = [index for index, _ in alike]
        yield (f"groups {first} to {others[-1]}", f"{text} each") if others else (f"group {first}", text)


def _decode_rows(config: EngineConfig, reads: DecodeReads) -> Iterator[tuple[str, str]]:
    """What a decode step reads, and the least time that it takes on this machine."""
    yield (
        "a decode step reads",
        f"{format_bytes(reads.weights)} of {config.weights_dtype_name} weights ({format_bytes(reads.layers)} in "
        f"layers, {format_bytes(reads.lm_head)} in the LM head), and of a sequence's {config.kv_dtype_name} cache "
        f"{format_bytes(reads.thousand)} for the first 1,000 tokens",
    )
    if config.on_gpu:
        return
    threads = threads_per_worker(config) * config.tp_size  # of one stage: they take turns at a step
    rate = read_bandwidth(threads)
    weights_s, thousand_s = reads.weights / rate, reads.thousand / rate
    yield (
        "at this machine's best",
        f"{weights_s * 1e3:.3g} ms a step, {1 / weights_s:.3g} tokens/s of one sequence, and {thousand_s * 1e3:.2g} ms "
        f"for the cache of 1,000 tokens: {threads} threads read {rate / 1e9:.3g} GB/s",
    )


def chosen(config: EngineConfig, card: ModelCard, directory: Path) -> str:
    """What was chosen for a deployment of the model in ``directory``, in one line."""
    plan, spec = card.plan, card.spec
    tensor_ops = resolve_ops_name(config.tensor_ops, config.on_gpu)
    kernels = resolve_kernels_name(config.kernels, config.on_gpu)
    weights = config.weights_dtype_name
    if config.computes_from_blocks:
        weights += f" ({kinds_of_blocks(directory)})"
    pool, slots, block_size = "measured at start", plan.slots_text.replace(" ", ""), card.layout.block_size
    if spec.num_blocks:
        size = format_bytes(spec.num_blocks * card.layout.block_bytes)
        pool = f"{spec.num_blocks} blocks of {block_size} tokens, {size} per rank"
    return (
        f"{card.model}: device={config.device} tensor_ops={tensor_ops} kernels={kernels} "
        f"dtype={config.dtype_name} weights_dtype={weights} kv_dtype={config.kv_dtype_name} "
        f"replicas={config.first_replicas} tp_size={'+'.join(map(str, config.tp_sizes))} stages={len(plan.stages)} "
        f"head_groups={len(plan.groups)}x{slots} block_size={block_size} pool={pool} "
        f"host_cache={config.host_cache}"
    )


def _bytes_of_thousand(card: ModelCard) -> str:
    policies = [policy for policy in card.plan.policies if not policy.is_state]
    inside = 1000 * card.bytes_per_token
    behind = inside * sum(policy.is_full for policy in policies) / max(1, len(policies))
    ranks = card.plan.ranks
    text = f"{format_bytes(inside)} over all ranks" + (f", {format_bytes(inside / ranks)} each" if ranks > 1 else "")
    return text if behind == inside else f"{text}; {format_bytes(behind)} once no window reaches them any more"


def _parts(card: ModelCard) -> str:
    """Which layers' tokens ranks keep together."""
    kept = [layout.parts for layout, row in zip(card.layouts, card.config.policies, strict=True) if row]
    shared = sum(parts > 1 for parts in kept)
    of = "all layers" if shared == len(kept) else f"{shared} of {len(kept)} layers"
    return f"of {of}, a token of a member is on one of {card.token_parts} ranks, in turn"


def _copies(card: ModelCard, times: float) -> str:
    """What it costs that ranks keep the same members, and share the query heads that use them."""
    counts = {
        card.plan.sharing(rank)[layer].ranks // card.layouts[layer].parts
        for rank in range(card.plan.ranks)
        for layer in card.plan.stages[rank // card.plan.tp_size]
        if (row := card.config.policies[layer]) and not row[0].is_state
    }
    every = f"each member by {' or '.join(map(str, sorted(counts)))} of {card.plan.tp_size}"
    text = f"{every}; a token takes {times:.3g} times the bytes that it would on one rank"
    most = _most_parts(card)
    return text if most <= card.token_parts else f"{text}, and less with context_parallel_size {most}"


def _most_parts(card: ModelCard) -> int:
    """The most ranks that could keep tokens of some layer together."""
    attention, tp_size, layers = attention_of(card.config), card.plan.tp_size, range(card.config.num_layers)
    fitting = (
        parts
        for parts in range(tp_size, 1, -1)
        if tp_size % parts == 0 and any(attention.token_parts(layer, tp_size, parts) > 1 for layer in layers)
    )
    return next(fitting, 1)


def _bytes_of_states(config: EngineConfig, card: ModelCard) -> str:
    size = f"{format_bytes(card.bytes_per_sequence)} over all ranks, however long it is"
    if not config.prefix_caching:
        return size
    every = f", and every {config.checkpoint_tokens} tokens of it" if config.checkpoint_tokens else ""
    return f"{size}; as much again for each checkpoint that is cached: at the end of a prompt{every}"


def _padding_beside_states(config: EngineConfig, card: ModelCard) -> str:
    """Of tokens and of states, which share blocks of the same bytes, and why blocks are as long as they are, or
    whether longer ones would have less."""

    def shares(plan: HeadGroupPlan) -> tuple[float, float]:
        return plan.padding_of(states=False), plan.padding_of(states=True)

    of_tokens, of_states = shares(card.plan)
    text = f"{of_tokens:.1%} of tokens, {of_states:.1%} of states"
    if config.block_size == "auto":
        chosen_size = choose_block_size(card.config, config.kv_dtype_name, card.token_parts, config.tp_size)
        return f"{text}; {chosen_size.reason}"
    if max(of_tokens, of_states) <= MAX_STATE_PADDING:
        return text
    for block_size in (2 * config.block_size, 4 * config.block_size):
        longer = shares(plan_with(config, card, block_size))
        if max(longer) <= MAX_STATE_PADDING:
            return f"{text}; with block_size {block_size} {longer[0]:.1%} and {longer[1]:.1%}"
    return text


def requests_that_fit(config: EngineConfig, card: ModelCard, tokens: int) -> tuple[int, int]:
    """Requests of so many tokens that the pool holds at once: as configured, and if every head kept everything."""

    def fit(policies: Sequence[HeadPolicy]) -> int:
        windows = GroupWindows(policies, card.layout.block_size)
        return card.spec.num_blocks // int(windows.peak_blocks(tokens, config.tokens_in_flight))

    return fit(card.kept), fit([policy if policy.is_state else FULL for policy in card.kept])


def _requests_that_fit(config: EngineConfig, card: ModelCard, tokens: int) -> str:
    if tokens > card.max_model_len:
        return f"none: the longest sequence has {card.max_model_len} tokens"
    fit, without = requests_that_fit(config, card, tokens)
    return f"{fit} fit" if fit == without else f"{fit} fit; {without} if every head kept everything"


def _usual_lengths(longest: int) -> list[int]:
    powers = (1024 * 4**k for k in range(8))
    return [*(tokens for tokens in powers if tokens < longest), longest]


def _group(group: HeadGroup, card: ModelCard, attention: AttentionVariant) -> str:
    members = {member for rank in group.members for member in rank}  # of each, one of its ranks' copies
    size = sum(card.plan.sizes[member.layer] * card.layouts[member.layer].parts for member in members)
    kept = f"{format_bytes(size / card.layout.block_size)} a token"
    if group.policy.is_state:
        kept = f"{format_bytes(size)} a sequence"
    return f"{policy_name(group.policy)}, {attention.members(len(members), group.policy)}, {kept}"


_COMPARED = (8192, 32768, 131072)
"""Tokens of requests that are compared, as far as the model serves them; else its longest."""


def _over_unified_pages(config: EngineConfig, card: ModelCard) -> str:
    """How many times as many requests fit as in pages of one layer each, by their length."""
    policies = card.config.policies
    if not card.recycling:
        policies = tuple(tuple(policy if policy.is_state else FULL for policy in row) for row in policies)
    step = card.layout.block_size, config.tokens_in_flight
    pages, texts = unified_pages(card.plan, policies, *step), []
    for tokens in [n for n in _COMPARED if n <= card.max_model_len] or [card.max_model_len]:
        own = planned_bytes(card.plan, card.kept, tokens, *step)
        padded, longer = (size / own for size in (pages.padded_bytes(tokens), pages.lengthened_bytes(tokens)))
        texts.append(f"{padded:.2f} / {longer:.2f} of {tokens} tokens")
    return f"times as many requests fit, those padded / lengthened to the largest: {', '.join(texts)}"


def policy_name(policy: HeadPolicy) -> str:
    """A policy in words."""
    if policy.is_full:
        return "full attention"
    if policy.is_state:
        return "states"
    return f"window of {policy.window}" + (f", sink of {policy.sink}" if policy.sink else "")
