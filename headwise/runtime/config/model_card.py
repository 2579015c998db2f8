"""What all processes of a deployment must know of its model: read from the model's directory, no weights loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from headwise.cache_controller.block_hash import hash_seed
from headwise.cache_controller.head_exchange import Arrangement
from headwise.cache_controller.head_groups import HeadGroupPlan
from headwise.cache_controller.head_pattern import HeadPattern, parse_pattern, policies_from_scores
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.planner import Policies, agreed_policies, plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.windows import GroupWindows
from headwise.errors import ConfigError, InvalidRequestError, ModelError
from headwise.runtime.config.block_size import resolve_block_size
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.expert_codes import check_expert_codes
from headwise.runtime.loader.adapters import AdapterFile
from headwise.runtime.loader.block_file import BLOCKS
from headwise.runtime.loader.checkpoint import has_weights, parse_json, read_small_file, with_quantisation
from headwise.runtime.loader.digest import digest_weights
from headwise.runtime.loader.draft_model import DraftModel
from headwise.runtime.loader.progress import Progress
from headwise.runtime.loader.quantisation import scheme_of, without_scheme
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.models.attention.base import AttentionVariant, Serving
from headwise.runtime.models.attention.select import attention_of
from headwise.runtime.models.eagle_config import with_eagle
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.registry import drafting_config, model_config
from headwise.runtime.models.rope import served_up_to
from headwise.runtime.ops.select import resolve_ops_name

NUMERICS_VERSION = 2
"""Goes up with every change of ours by which the same tokens get other keys and values than before: older blocks in
storage, and those of engines of another version, are then not mixed with ours."""


@dataclass(frozen=True)
class CacheSpec:
    """What every worker of an engine must agree on before the first step.

    num_blocks: blocks in the pool, the same on every rank; 0 where the device is to be measured first
    max_rows:   sequences that may be in a batch
    max_blocks: columns of a block table
    num_host_blocks: blocks in the host's memory, the same on every rank
    """

    num_blocks: int
    max_rows: int
    max_blocks: int
    num_host_blocks: int = 0


@dataclass(frozen=True)
class Naming:
    """What hashes of blocks start from; see `ModelCard` for both. Other weights and adapters change it."""

    identity: str
    adapters: tuple[tuple[str, str], ...] = ()

    def hash_seed(self, cache_salt: str, adapter: str) -> bytes:
        """What the hashes of a request's blocks start from."""
        return hash_seed(self.identity, cache_salt, dict(self.adapters).get(adapter) or adapter)

    def check_adapter(self, name: str) -> None:
        """Raise `InvalidRequestError` if no adapter is called so; empty: none is asked for."""
        known = [known for known, _ in self.adapters]
        if name and name not in known:
            told = f"served are {', '.join(known)}" if known else "none is served: leave it out"
            raise InvalidRequestError(f"there is no adapter {name!r:.80}; {told}")


@dataclass(frozen=True)
class ModelCard:
    """A model as a deployment serves it.

    model:         the name it was asked for by
    identity:      what block hashes start from: differs wherever keys and values do, so between models, any of their
                   weights, head policies and numerics; empty if the weights were not looked at
    spec:          with no blocks as long as the pool's size is not known: `with_pool`
    max_model_len: most tokens of a sequence: the model's or the configured length, or what the pool holds, of the
                   engines with the ranks that hold least
    layouts:       ``[cache_layers]``, of blocks of each layer's members; all of one size
    recycling:     whether blocks that a group's window has left are given back
    weights:       a hash of the model's configuration and all weights, however it is served; empty likewise
    blocks:        a hash of the weights with a GGUF file's own blocks, where those are computed from; empty otherwise
    tp_sizes:      those of the deployment's engines, where they are not all alike; else empty
    adapters:      names of those that requests may ask for, each with a hash of all that it is
    drafting:      a hash of the configuration and weights of a head that drafts beside the model; empty: there is none
    """

    model: str
    identity: str
    config: ModelConfig
    plan: HeadGroupPlan
    layouts: tuple[BlockLayout, ...]
    spec: CacheSpec
    max_model_len: int
    recycling: bool = True
    weights: str = ""
    blocks: str = ""
    tp_sizes: tuple[int, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    drafting: str = ""

    def renewed(self, other: ModelCard) -> ModelCard:
        """With the weights and adapters of another card of the same model."""
        identity, adapters = other.identity, other.adapters
        return replace(self, identity=identity, weights=other.weights, blocks=other.blocks, adapters=adapters)

    @property
    def naming(self) -> Naming:
        """What hashes of blocks start from."""
        return Naming(self.identity, self.adapters)

    def hash_seed(self, cache_salt: str, adapter: str) -> bytes:
        """See `Naming`."""
        return self.naming.hash_seed(cache_salt, adapter)

    def check_adapter(self, name: str) -> None:
        """See `Naming`."""
        self.naming.check_adapter(name)

    @property
    def layout(self) -> BlockLayout:
        """Of the first layer's blocks, for what all have alike: ``block_size`` and ``block_bytes``."""
        return self.layouts[0]

    @property
    def token_parts(self) -> int:
        """Ranks that keep tokens together, each a part of them."""
        return max(layout.parts for layout in self.layouts)

    @property
    def layout_identity(self) -> str:
        """A string that differs whenever the bytes of a block would be read differently."""
        return "+".join(dict.fromkeys(layout.identity for layout in self.layouts))

    @property
    def kept(self) -> tuple[HeadPolicy, ...]:
        """What the cache keeps for each group: without recycling, everything."""
        return kept_policies(self.plan, self.recycling)

    @property
    def has_states(self) -> bool:
        """Whether some layers keep states in place of tokens."""
        return any(policy.is_state for policy in self.plan.policies)

    @property
    def bytes_per_token(self) -> float:
        """Cache bytes a token takes, over all ranks and groups."""
        groups = sum(not policy.is_state for policy in self.plan.policies)
        return self.layout.block_bytes * groups * self.plan.ranks / self.layout.block_size

    @property
    def bytes_per_sequence(self) -> int:
        """Cache bytes of a sequence's states, over all ranks, however long it is; a checkpoint takes as many."""
        return self.layout.block_bytes * sum(policy.is_state for policy in self.plan.policies) * self.plan.ranks


def kept_policies(plan: HeadGroupPlan, recycling: bool) -> tuple[HeadPolicy, ...]:
    return tuple(policy if recycling or policy.is_state else FULL for policy in plan.policies)


def read_model_card(
    config: EngineConfig, directory: Path, progress: Progress | None = None, *, identify: bool = True
) -> ModelCard:
    """Read a model's geometry; raises ModelError or ConfigError if it cannot be served as configured.

    identify: also find out which model it is. That takes reading all of its weights, the first time (see
              `digest_weights`); blocks cannot be hashed without
    """
    raw = read_small_file(directory / "config.json")
    found = with_quantisation(directory, parse_json(directory / "config.json", raw))
    weights, blocks, drafting = "", "", ""
    model = model_config(without_scheme(found))
    head = DraftModel(config.draft_model, config.cache_path, weights=identify) if config.draft_model else None
    if head is not None:
        model = with_eagle(model, head.config(model))
    elif config.speculation and config.mtp and (identify or has_weights(directory)):
        model = drafting_config(model, open_weights(directory).names)
    _check_blocks(config, directory)
    _check_codes(config, found)
    check_expert_codes(config, model, found)
    if identify:
        blocks = _blocks(directory, config, progress)  # first, since these are read together with the weights
        weights = _weights(raw, directory, config, progress)
        drafting = "" if head is None else _draft_weights(head.directory, config, progress)
    if config.head_pattern and model.layer_heads:
        raise ConfigError(
            f"{config.model} has layers of unlike heads or with a shared cache: head patterns, and sparsity, are for "
            "models whose layers are alike; leave head_pattern out"
        )
    if config.head_pattern and model.compressed is not None:
        raise ConfigError(f"{config.model} compresses its cache, which no head pattern has: serve it without")
    if config.head_pattern and model.cache_layers > model.num_layers:
        raise ConfigError(f"{config.model}: its layers share an indexer, which no head pattern has: serve it without")
    if config.head_pattern and model.chunk:
        raise ConfigError(f"{config.model} has chunked attention, which no head pattern has: serve it without")
    if config.head_pattern and any(policy.is_state for row in model.policies for policy in row):
        raise ConfigError(f"{config.model} keeps states in some layers, which no head pattern has: serve it without")
    if config.head_pattern:
        pattern = load_pattern(config.head_pattern)
        if pattern.identity and pattern.model != config.model:  # only the weights can tell
            weights = weights or _weights(raw, directory, config, progress)
        pattern.check_fits((model.decoder_layers, model.num_kv_heads), config.model, weights)
        given, behind = model.policies[: model.decoder_layers], model.policies[model.decoder_layers :]
        policies = policies_from_scores(pattern.scores, config.sparsity, config.sink, config.window, given)
        model = replace(model, policies=(*policies, *behind))
    asked = _asked_length(config, model)
    model = _in_stages(served_up_to(model, asked), config)
    identity = _identity(weights + blocks + drafting, model, config) if identify else ""
    attention = attention_of(model)
    chosen = config.device, config.kernels, config.kv_dtype_name, config.tensor_ops
    for tp_size in config.tp_sizes:
        attention.check(Serving(config.model, tp_size, *chosen, config.context_parallel_size, config.dtype_name))
    plan, layouts = _plan(config, model, attention, resolve_block_size(config, model))
    spec = _cache_spec(config, layouts[0], asked)
    adapters = [AdapterFile(name, path) for name, path in config.adapter_paths.items()]
    card = ModelCard(
        config.model,
        identity,
        model,
        plan,
        layouts,
        spec,
        asked,
        config.recycling,
        weights,
        blocks,
        config.tp_sizes if len(config.tp_sizes) > 1 else (),
        tuple((each.name, each.identity if identify else "") for each in adapters),
        drafting,
    )
    if config.kv_cache_bytes is None:
        return card
    longest = [
        with_pool(_with_ranks(card, config, size), config.of_ranks(size), config.kv_cache_bytes).max_model_len
        for size in config.tp_sizes
    ]
    return replace(with_pool(card, config, config.kv_cache_bytes), max_model_len=min(longest))


def check_same(card: ModelCard, adapters: Sequence[AdapterFile]) -> None:
    """Raise ModelError if an adapter is another one than when the card was read: blocks are named by the card's."""
    known = dict(card.adapters)
    for each in adapters:
        if known.get(each.name) and known[each.name] != each.identity:
            raise ModelError(f"adapter {each.name!r} has changed since this engine started, or differs between nodes")


def _with_ranks(card: ModelCard, config: EngineConfig, tp_size: int) -> ModelCard:
    """The card of a deployment's engine that has so many ranks."""
    if tp_size == config.tp_size:
        return card
    attention, block_size = attention_of(card.config), card.layout.block_size
    plan, layouts = _plan(config.of_ranks(tp_size), card.config, attention, block_size)
    spec = _cache_spec(config, layouts[0], card.max_model_len)
    return replace(card, plan=plan, layouts=layouts, spec=spec)


def with_pool(card: ModelCard, config: EngineConfig, num_bytes: int) -> ModelCard:
    """The card with a block pool of ``num_bytes`` per rank.

    Raises:
        ConfigError: they do not hold one block of each group, or not the length that is configured.
    """
    block_bytes, groups = card.layout.block_bytes, len(card.plan.groups)
    num_blocks = num_bytes // block_bytes
    if num_blocks < groups:
        raise ConfigError(
            f"kv_cache {config.kv_cache} holds {num_blocks} blocks of {block_bytes} bytes; a sequence "
            f"needs {groups}, one per head group: give at least {block_bytes * groups} bytes, or a smaller block_size"
        )
    spec = replace(card.spec, num_blocks=num_blocks)
    max_model_len = min(_asked_length(config, card.config), _tokens_that_fit(config, card, spec))
    if max_model_len < config.max_model_len:
        raise ConfigError(
            f"kv_cache {config.kv_cache} holds {max_model_len} tokens, max_model_len is {config.max_model_len}: "
            "raise the one or lower the other"
        )
    return replace(card, spec=spec, max_model_len=max_model_len)


def arrangement_with(config: EngineConfig, card: ModelCard, tp_size: int) -> Arrangement:
    """How the deployment's engines that have ``tp_size`` ranks keep its blocks.

    Raises:
        ConfigError: there are none, or the model cannot be served by so many.
    """
    attention, block_size = attention_of(card.config), card.layout.block_size
    return Arrangement.of(*_plan(config.of_ranks(tp_size), card.config, attention, block_size))


def _in_stages(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    try:
        return model.in_stages(config.pipeline_parallel_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def plan_with(config: EngineConfig, card: ModelCard, block_size: int) -> HeadGroupPlan:
    """The head groups if blocks had so many tokens.

    Raises:
        ConfigError: the model cannot be served so.
    """
    return _plan(config, card.config, attention_of(card.config), block_size)[0]


def _plan(
    config: EngineConfig, model: ModelConfig, attention: AttentionVariant, block_size: int
) -> tuple[HeadGroupPlan, tuple[BlockLayout, ...]]:
    """The head groups, and the layout of each layer's blocks: one object for layers whose members are alike."""
    of_one = [
        replace(
            attention.layout(block_size, 1, config.kv_dtype_name, layer),
            parts=attention.token_parts(layer, config.tp_size, config.context_parallel_size),
        )
        for layer in range(model.cache_layers)
    ]
    sizes, replicated = [layout.slot_bytes for layout in of_one], attention.is_replicated

    def plan_of(policies: Policies, tp_size: int) -> HeadGroupPlan:
        given = policies, tp_size, config.head_grouping
        return plan_head_groups(
            *given, sizes=sizes, is_replicated=replicated, stages=stages, layer_of=model.layer_of_caches
        )

    try:
        stages = model.stages(config.pipeline_parallel_size)
        policies: Policies = model.policies
        if len(config.tp_sizes) > 1:
            policies = agreed_policies(policies, lambda given: [plan_of(given, size) for size in config.tp_sizes])
        plan = plan_of(policies, config.tp_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    layouts = {layout: plan.in_blocks(layout) for layout in of_one}
    return plan, tuple(layouts[layout] for layout in of_one)


def load_pattern(path: str | Path) -> HeadPattern:
    """Read a head pattern's file; raises ConfigError naming it."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read head pattern {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no head pattern: it is not text; give a TSV or JSON file") from None
    return parse_pattern(text, str(path))


def check_unchanged(card: ModelCard, config: EngineConfig, directory: Path) -> None:
    """Raise ModelError unless the weights in ``directory`` are still those of the card."""
    blocks, raw_config = _blocks(directory, config), read_small_file(directory / "config.json")
    if (_weights(raw_config, directory, config), blocks) != (card.weights, card.blocks):
        raise ModelError(
            f"the model in {directory} is no longer the one that the deployment was started with: start it again"
        )


def check_draft_unchanged(card: ModelCard, config: EngineConfig, directory: Path) -> None:
    """Raise ModelError unless the head in ``directory`` is still that of the card."""
    if _draft_weights(directory, config) != card.drafting:
        raise ModelError(
            f"the draft model in {directory} is no longer the one that the deployment was started with: start it again"
        )


def _tokens_that_fit(config: EngineConfig, card: ModelCard, spec: CacheSpec) -> int:
    """The longest sequence that the pool holds, in whole blocks: window groups take a fixed part of it."""
    block_size = card.layout.block_size
    windows = GroupWindows(kept_policies(card.plan, config.recycling), block_size)

    def fits(columns: int) -> bool:
        tokens = columns * block_size
        return int(windows.peak_blocks(tokens, config.tokens_in_flight, state_copies=2)) <= spec.num_blocks

    low, high = 1, spec.max_blocks
    while low < high:  # the largest number of columns that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * block_size


def _asked_length(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's own limit, {model.max_position}"
        )
    return config.max_model_len or model.max_position


def _cache_spec(config: EngineConfig, layout: BlockLayout, max_tokens: int) -> CacheSpec:
    """Sizes of the block tables and the host's pool, the device's still empty."""
    host_blocks = config.host_cache_bytes // layout.block_bytes
    if config.host_cache_bytes and not host_blocks:
        raise ConfigError(
            f"host_cache {config.host_cache} does not hold one block of {layout.block_bytes} bytes: give at least a "
            "hundred times that, or 0 for none"
        )
    return CacheSpec(0, config.most_seqs, -(-max_tokens // layout.block_size), host_blocks)


def _weights(raw_config: bytes, directory: Path, config: EngineConfig, progress: Progress | None = None) -> str:
    """A hash of the configuration and the weights."""
    weights = digest_weights(directory, config.cache_path, progress)
    return sha256(len(raw_config).to_bytes(8, "little") + raw_config + weights.encode()).hexdigest()[:32]


def _draft_weights(directory: Path, config: EngineConfig, progress: Progress | None = None) -> str:
    """`_weights` of a head that drafts."""
    return _weights(read_small_file(directory / "config.json"), directory, config, progress)


def _blocks(directory: Path, config: EngineConfig, progress: Progress | None = None) -> str:
    """A hash of the weights and of a GGUF file's own blocks; empty where those are not computed from."""
    if not config.computes_from_blocks:
        return ""
    return digest_weights(directory, config.cache_path, progress, blocks=True)


def _check_blocks(config: EngineConfig, directory: Path) -> None:
    """Raise ConfigError if blocks of a GGUF file are to be computed from, and there are none."""
    if config.computes_from_blocks and not (directory / BLOCKS).exists():
        raise ConfigError(
            f"weights_dtype gguf computes from a GGUF file's own blocks, and {config.model} is no GGUF file: "
            "choose weights_dtype int8 or bfloat16, or give a GGUF file"
        )


def _check_codes(config: EngineConfig, found: Mapping[str, Any]) -> None:
    """Raise ConfigError if a checkpoint's codes of 4 bits, or FP8, are to be computed from, and it has none."""
    if config.weights_dtype not in ("int4", "fp8"):
        return
    scheme, is_fp8 = scheme_of(found), config.weights_dtype == "fp8"
    if scheme is None or not (scheme.is_fp8 if is_fp8 else scheme.is_int4):
        codes = "FP8 matrices" if is_fp8 else "codes of 4 bits"
        methods = "fp8 or compressed-tensors" if is_fp8 else "awq, gptq or compressed-tensors"
        raise ConfigError(
            f"weights_dtype {config.weights_dtype} computes from a checkpoint's own {codes}, and {config.model} has "
            f"none: choose weights_dtype int8 or bfloat16, or give a model that was quantised by {methods}"
        )


def _identity(weights: str, model: ModelConfig, config: EngineConfig) -> str:
    """Keys and values depend on the weights, on what the layers below could see, and on how they are computed."""
    table = ";".join(",".join(f"{policy.window}/{policy.sink}" for policy in row) for row in model.policies)
    rotation = "/long" if any(rope.is_long for rope in model.ropes) else ""
    return sha256(f"{weights}:{table}:{_numerics(config)}{rotation}".encode()).hexdigest()[:32]


def _numerics(config: EngineConfig) -> str:
    """What has keys and values differ by more than the rounding of float32.

    On a CPU all tensor operations and kernels that take a dtype compute the same in it. Which of them a process would
    choose is of no account, then, nor may it be: it depends on what is installed beside it, and a scheduler must agree
    with engines on other nodes.
    """
    family = f"cuda/{resolve_ops_name(config.tensor_ops, on_gpu=True)}" if config.on_gpu else "cpu"
    dtype, weights_dtype = config.dtype_name, config.weights_dtype_name
    weights = "" if weights_dtype == dtype else f"/{weights_dtype}"
    return f"{NUMERICS_VERSION}/{family}/{dtype}{weights}"
