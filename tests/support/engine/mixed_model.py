"""Models of random geometry around a simulated cache: members of any kinds, sizes and policies, in several layers.

A member's "key" says whose it is, of which place and of which token, so that a layer notices what belongs to another
layer, head or position. A layer checks that each of its members is served just the tokens that it may see; what the
model says next depends on all that any of them sees.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.engine.simulated_copies import WatchedCopy
from support.engine.simulated_model import VOCAB, Context, TokenModel, next_token

from headwise.cache_controller.layout import BlockLayout, Role
from headwise.cache_controller.planner import plan_head_groups
from headwise.cache_controller.policy import FULL, STATE, HeadPolicy
from headwise.cache_controller.windows import GroupWindows
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.model_card import CacheSpec, ModelCard, kept_policies, with_pool
from headwise.runtime.models.attention.base import LayerCache
from headwise.runtime.models.base import AttentionLayer, Embeds
from headwise.runtime.models.model_config import LayerHeads, ModelConfig
from headwise.runtime.models.position_config import RopeConfig

NOTHING_SEEN = -1
NEVER_CAME = -11
"""In blocks that a load was asked for, until it comes."""

STATE_WORDS = 4
"""Of a state: whose it is, how many tokens it stands for, and their checksum in two halves."""


@dataclass(frozen=True)
class MixedLayer:
    """What a layer keeps.

    policies: of its members; one of a latent. Of states, none are anything else
    words:    int32 words of a member, for each token or once
    is_chunked: a query sees none before its own chunk of as many tokens as the window has
    alias:    the earlier layer whose members it uses, and keeps none itself; None: its own
    """

    policies: tuple[HeadPolicy, ...]
    words: int
    is_chunked: bool = False
    alias: int | None = None

    @property
    def is_state(self) -> bool:
        return any(policy.is_state for policy in self.policies)


@dataclass(frozen=True)
class MixedModel:
    """layers: of the model; spare: blocks that the pool has over what one sequence needs at its longest"""

    layers: tuple[MixedLayer, ...]
    spare: int = 8

    def owner(self, layer: int) -> int:
        """The layer whose members this one uses."""
        alias = self.layers[layer].alias
        return layer if alias is None else alias

    def seen(self, length: int) -> NDArray[np.bool_]:
        """``[length]``: which tokens anybody sees from the last one."""
        every = [visible(policy, length, layer.is_chunked)[0] for layer in self.layers for policy in layer.policies]
        return np.logical_or.reduce([np.zeros(length, dtype=np.bool_), *every])

    @property
    def has_states(self) -> bool:
        return any(layer.is_state for layer in self.layers)

    def tokens_of(self, context: Sequence[int]) -> int:
        """Of how many tokens a context is."""
        return len(context) - 2 * self.has_states

    @property
    def always_sees_the_first(self) -> bool:
        """Whether a prompt can be told by its first token, however far behind that is."""
        return any(policy.is_full or policy.sink for layer in self.layers for policy in layer.policies)

    def context(self, tokens: Sequence[int]) -> list[int]:
        """What is to be known when ``tokens`` have been computed: those seen, and behind them what states add."""
        whole = np.array(tokens, dtype=np.int32)
        context: list[int] = np.where(self.seen(len(whole)), whole, NOTHING_SEEN).tolist()
        return [*context, *_halves(zlib.crc32(whole.tobytes()))] if self.has_states else context

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """What the model says after ``prompt``."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(self.context(tokens)))
        return tokens[len(prompt) :]


def visible(policy: HeadPolicy, length: int, is_chunked: bool = False, queries: int = 1) -> NDArray[np.bool_]:
    """``[queries, length]``: the tokens that the last queries see by their member's policy; none of a state's."""
    key, query = np.arange(length), np.arange(length - queries, length)[:, None]
    if policy.is_state:
        return np.zeros((queries, length), dtype=np.bool_)
    if policy.is_full:
        return key <= query
    if is_chunked:
        return (key <= query) & (key // policy.window == query // policy.window)
    return (key <= query) & ((query - key < policy.window) | (key < policy.sink))


def mixed_card(model: MixedModel, config: EngineConfig, *, longest: int, max_rows: int, host_blocks: int) -> ModelCard:
    """A card of the model, whose pool holds a sequence of ``longest`` tokens and the model's spare blocks."""
    layers, block_size = model.layers, config.block_size
    of_one = [_layout(layer, block_size) for layer in layers]
    plan = plan_head_groups([layer.policies for layer in layers], sizes=[layout.slot_bytes for layout in of_one])
    layouts = [plan.in_blocks(layout) for layout in of_one]
    geometry = ModelConfig(
        architecture="Simulated",
        hidden_size=1,
        intermediate_size=1,
        num_layers=len(layers),
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=VOCAB,
        max_position=longest,
        rms_norm_eps=0.0,
        tie_embeddings=True,
        policies=tuple(layer.policies for layer in layers),
        ropes=(RopeConfig(1.0),) * len(layers),
        attention_scale=1.0,
        layer_heads=tuple(
            LayerHeads(len(layers[model.owner(index)].policies), 1, model.owner(index)) for index in range(len(layers))
        ),
    )
    spec = CacheSpec(0, max_rows, -(-longest // block_size), host_blocks)
    card = ModelCard("simulated", "simulated", geometry, plan, tuple(layouts), spec, longest)
    windows = GroupWindows(kept_policies(plan, config.recycling), block_size)
    needed = int(windows.peak_blocks(longest, config.tokens_in_flight, state_copies=2))
    return with_pool(card, config, (needed + model.spare) * plan.block_bytes)


def _layout(layer: MixedLayer, block_size: int) -> BlockLayout:
    """Of one member. What a latent and a KV head are told apart by is nothing but their size."""
    return BlockLayout(block_size, 1, (Role("words", (layer.words,), "int32", is_state=layer.is_state),), alignment=4)


@dataclass
class _LayerSees:
    """What one layer's members were served of a sequence: tokens, and the checksum of all where there is a state."""

    tokens: NDArray[np.int32]
    checksum: int | None = None


def _context(layers: list[_LayerSees | None], has_states: bool) -> Context:
    known = [layer for layer in layers if layer is not None]
    if len(known) < len(layers):
        return None
    context: list[int] = np.maximum.reduce([layer.tokens for layer in known]).tolist()
    sums = [layer.checksum for layer in known if layer.checksum is not None]
    return [*context, *_halves(sums[0])] if has_states else context


class MixedOverCache:
    """`CachedAttention` of every kind of layer: writes what is kept of the step's tokens, and reads what is seen.

    It notes in ``copies.violations`` whatever is not as it must be.

    asked: blocks that a load was asked for, and that nobody was given since: something of them may never come
    seen:  ``[sequences][layers]``, what members were served in the latest step
    """

    def __init__(self, model: MixedModel, card: ModelCard, copies: WatchedCopy) -> None:
        self._model, self._copies = model, copies
        self._padding = _padding(card)
        self._block_words = card.layout.block_bytes // 4
        self.asked: set[int] = set()
        self.seen: list[list[_LayerSees | None]] = []

    @property
    def contexts(self) -> list[Context]:
        """What is known of each sequence of the latest step; None: something of it never came."""
        return [_context(layers, self._model.has_states) for layers in self.seen]

    def __call__(self, cache: LayerCache, layer: int, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """``tokens [T]`` -> which sequence each row is of, ``[T, 1]``."""
        owner = self._model.owner(layer)
        if self._model.layers[owner].is_state:
            cache.wait()  # states are read first
        elif owner == layer:
            self._write(cache, layer, tokens)
        cache.wait()
        ends, lengths = cache.batch.cu_seqlens_q.tolist(), cache.batch.seq_lens.tolist()
        if layer == 0:
            self.seen = [[] for _ in lengths]
        rows = np.zeros((len(tokens), 1), dtype=np.float32)
        for index, (first, last) in enumerate(pairwise(ends)):
            tables = cache.batch.block_tables[index * cache.batch.groups :]
            if self._model.layers[owner].is_state:
                sees = self._go_on(cache, owner, tables, tokens[first:last], lengths[index])
            else:
                sees = self._read(cache, owner, tables, lengths[index], last - first)
            self.seen[index].append(sees)
            rows[first:last] = index
        return rows

    def result_of(self, *projected: Any) -> NDArray[np.float32]:
        return np.zeros((len(projected[1]), 1), dtype=np.float32)

    def _write(self, cache: LayerCache, layer: int, tokens: NDArray[np.int32]) -> None:
        size, ends = cache.layout.block_size, cache.batch.cu_seqlens_q.tolist()
        for index, length in enumerate(cache.batch.seq_lens.tolist()):
            own = tokens[ends[index] : ends[index + 1]]
            positions = np.arange(length - len(own), length)
            for head, (group, slot) in enumerate(_places(cache)):
                ids = cache.batch.block_tables[index * cache.batch.groups + group][positions // size]
                kept = ids >= 0
                keys = _key(layer, head, positions, own)[:, None] + np.arange(self._model.layers[layer].words)
                self.fill_padding(cache.arena, group, ids[kept])
                _of_tokens(cache)[ids[kept], slot, positions[kept] % size] = keys[kept]
                self.asked.difference_update(ids[kept & (positions % size == 0)].tolist())  # they are somebody else's

    def _read(
        self, cache: LayerCache, layer: int, tables: NDArray[np.int32], length: int, queries: int
    ) -> _LayerSees | None:
        """What the last of a step's queries sees; what the others see must be there, too."""
        size, kept = cache.layout.block_size, self._model.layers[layer]
        found = np.full(length, NOTHING_SEEN, dtype=np.int32)
        policies = list(zip(cache.heads.window.tolist(), cache.heads.sink.tolist(), strict=True))
        if policies != [(policy.window, policy.sink) for policy in kept.policies]:
            self._violated(f"layer {layer} is given other policies than its own: {policies}")
        for head, (group, slot) in enumerate(_places(cache)):
            seen = visible(kept.policies[head], length, kept.is_chunked, queries)
            positions = np.flatnonzero(seen.any(axis=0))
            ids = tables[group][positions // size]
            if (ids < 0).any():
                self._violated(f"head {head} of layer {layer} lost a block of {length} tokens")
                return None
            words = _of_tokens(cache)[ids, slot, positions % size]
            if self.asked.intersection(ids[(words == NEVER_CAME).any(axis=1)].tolist()):
                return None
            stored = words - np.arange(kept.words)
            tokens = stored[:, 0] - _key(layer, head, positions, 0)
            if (stored != stored[:, :1]).any() or ((tokens < 0) | (tokens >= VOCAB)).any():
                self._violated(f"head {head} of layer {layer} is served another's keys, or no keys at all")
                return None
            known = found[positions]
            if ((known >= 0) & (known != tokens)).any():
                self._violated(f"heads of layer {layer} hold different tokens for one sequence")
            found[positions[seen[-1, positions]]] = tokens[seen[-1, positions]]
        return _LayerSees(found)

    def _go_on(
        self, cache: LayerCache, layer: int, tables: NDArray[np.int32], tokens: NDArray[np.int32], length: int
    ) -> _LayerSees | None:
        """Take a sequence's states on by a step's tokens; what the members of a layer stand for is the same."""
        size, start, sums = cache.layout.block_size, length - len(tokens), set()
        for head, (group, slot) in enumerate(_places(cache)):
            states, table, checksum, source = _of_states(cache)[:, slot], tables[group], 0, None
            if start:
                left = int(table[(start - 1) // size])
                source = left if left >= 0 else int(table[(length - 1) // size])
                checksum = self._state_in(states, source, _tag(layer, head), start)
            for column in range(start // size, (length - 1) // size + 1):
                first, last = max(start, column * size), min(length, (column + 1) * size)
                if checksum is not None:
                    checksum = zlib.crc32(tokens[first - start : last - start].tobytes(), checksum)
                if (block := int(table[column])) >= 0:
                    self.fill_padding(cache.arena, group, np.array([block]))
                    self._keep_state(states[block], _tag(layer, head), last, checksum)
                    if checksum is None:
                        self.asked.add(block)
                    elif block != source:  # where it is, other members may be missing
                        self.asked.discard(block)
            sums.add(checksum)
        if None in sums:
            return None
        if len(sums) > 1:
            self._violated(f"states of layer {layer} stand for different tokens of one sequence")
        return _LayerSees(np.full(length, NOTHING_SEEN, dtype=np.int32), sums.pop())

    def _state_in(self, states: NDArray[np.int32], block: int, tag: int, tokens: int) -> int | None:
        """The checksum of so many tokens that a member has in this block; None: it never came."""
        whose, count, *halves = states[block, :STATE_WORDS].tolist()
        if whose == NEVER_CAME and block in self.asked:
            return None
        if block < 0 or (whose, count) != (tag, tokens):
            self._violated(f"state {tag} of {tokens} tokens is to be in block {block}: there is {whose} of {count}")
        checksum: int = halves[0] << 16 | halves[1]
        return checksum

    def _keep_state(self, state: NDArray[np.int32], tag: int, tokens: int, checksum: int | None) -> None:
        if checksum is None:
            state[:] = NEVER_CAME
        else:
            state[:] = 0  # whatever is kept is not negative: see `holds`
            state[:STATE_WORDS] = tag, tokens, *_halves(checksum)

    def fill_padding(self, arena: NDArray[np.uint8], group: int, blocks: NDArray[np.int32]) -> None:
        """What no member fills of a group's blocks is stored with them, as if there were something."""
        words = arena.view(np.int32).reshape(-1, self._block_words)
        words[np.ix_(blocks, self._padding[group])] = 0

    def _violated(self, what: str) -> None:
        self._copies.violations.append(what)


def _padding(card: ModelCard) -> list[NDArray[np.int64]]:
    """Of each group, the words of a block that no member fills."""
    padding = []
    for group in card.plan.groups:
        is_filled = np.zeros(card.layout.block_bytes // 4, dtype=np.bool_)
        for member in group.members[0]:
            _, slot = card.plan.placement(0, member.layer)[member.kv_head]
            start, stop = card.layouts[member.layer].slot_range(int(slot), int(slot) + 1)
            is_filled[start // 4 : stop // 4] = True
        padding.append(np.flatnonzero(~is_filled))
    return padding


def _tag(layer: int, head: int) -> int:
    return layer * 8 + head


def _key(layer: int, head: int, positions: NDArray[Any], tokens: NDArray[np.int32] | int) -> NDArray[np.int32]:
    """The first of the words that a member keeps of tokens."""
    keys: NDArray[np.int32] = ((_tag(layer, head) * 256 + positions) * VOCAB + tokens).astype(np.int32)
    return keys


def _halves(checksum: int) -> tuple[int, int]:
    return checksum >> 16, checksum & 0xFFFF


def _places(cache: LayerCache) -> list[tuple[int, int]]:
    return list(zip(cache.heads.group.tolist(), cache.heads.slot.tolist(), strict=True))


def _of_tokens(cache: LayerCache) -> NDArray[np.int32]:
    """``[blocks, slots, block_size, words]`` of an arena, sharing its memory."""
    states = _of_states(cache)
    return states.reshape(*states.shape[:2], cache.layout.block_size, cache.layout.roles[0].shape[0])


def _of_states(cache: LayerCache) -> NDArray[np.int32]:
    """``[blocks, slots, words]`` of an arena, sharing its memory."""
    layout = cache.layout
    blocks = cache.arena.view(np.int32).reshape(-1, layout.block_bytes // 4)
    first, last = layout.slot_range(0, layout.slots)
    filled = blocks[:, first // 4 : last // 4]
    return filled.reshape(len(blocks), layout.slots, layout.slot_bytes // 4)


class MixedTokenModel(TokenModel):
    """A `TokenModel` that asks every layer for what its members see."""

    def __init__(self, config: ModelConfig, attention: MixedOverCache) -> None:
        super().__init__(config, attention)

    def forward(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        attention: AttentionLayer,
        embeds: Embeds | None = None,
        wanted: NDArray[np.int64] | None = None,
        stream: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Hidden rows ``[T, 1]``: which sequence each is of."""
        assert embeds is None
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        for layer in range(self.config.num_layers):
            hidden: NDArray[np.float32] = attention(layer, layer, token_ids)
        return hidden if wanted is None else hidden[wanted]


# ---- random models ----


WINDOWS = st.builds(HeadPolicy, st.integers(2, 13), st.sampled_from([0, 0, 2, 5]))


@st.composite
def _own_layers(draw: st.DrawFn) -> MixedLayer:
    """A layer that keeps members of its own."""
    kind = draw(st.sampled_from(["heads", "heads", "heads", "chunks", "latent", "states"]))
    if kind == "latent":
        return MixedLayer((FULL,), draw(st.sampled_from([3, 5])))
    if kind == "states":
        return MixedLayer((STATE,) * draw(st.integers(1, 2)), draw(st.sampled_from([4, 9, 16])))
    words = draw(st.sampled_from([1, 2]))  # heads of two sizes
    if kind == "chunks":
        chunk = draw(st.sampled_from([4, 8]))
        return MixedLayer((HeadPolicy(chunk),) * draw(st.integers(1, 2)), words, is_chunked=True)
    policies = draw(st.lists(st.just(FULL) | WINDOWS, min_size=1, max_size=3))
    return MixedLayer(tuple(policies), words)


@st.composite
def mixed_models(draw: st.DrawFn) -> MixedModel:
    """Any mixture of up to five layers, of which some may use an earlier one's members.

    No model that is served keeps states alone.
    """
    layers = [draw(_own_layers())]
    for index in range(1, draw(st.integers(1, 5))):
        shareable = [at for at in range(index) if layers[at].alias is None and not layers[at].is_state]
        if shareable and draw(st.booleans()):
            alias = draw(st.sampled_from(shareable))
            layers.append(MixedLayer((), layers[alias].words, alias=alias))
        else:
            layers.append(draw(_own_layers()))
    if all(layer.is_state for layer in layers):
        layers.append(MixedLayer((draw(st.just(FULL) | WINDOWS),), 1))
    return MixedModel(tuple(layers), spare=draw(st.integers(0, 16)))
