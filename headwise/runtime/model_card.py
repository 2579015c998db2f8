"""What all processes of a deployment must know of its model: read from the model's directory, no weights loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from headwise.cache_controller.head_pattern import HeadPattern, Policies, parse_pattern, policies_from_scores
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.planner import HeadGroupPlan, plan_head_groups
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.windows import GroupWindows
from headwise.errors import ConfigError
from headwise.kernels.gqa import gqa_layout
from headwise.runtime.config import EngineConfig
from headwise.runtime.executor import CacheSpec
from headwise.runtime.loader.checkpoint import parse_json, read_small_file
from headwise.runtime.models.base import ModelConfig
from headwise.runtime.models.registry import model_config

HEADER_BYTES = 1 << 20
IDENTITY_SAMPLES, SAMPLE_BYTES = 512, 4096
"""Of each weight file, spread evenly."""


@dataclass(frozen=True)
class ModelCard:
    """A model as a deployment serves it.

    model:         the name it was asked for by
    identity:      differs between models, and between head policies, whose cache blocks must not be mixed
    spec:          with no blocks as long as the pool's size is not known: `with_pool`
    max_model_len: most tokens of a sequence: the model's or the configured length, or what the pool holds
    recycling:     whether blocks that a group's window has left are given back
    """

    model: str
    identity: str
    config: ModelConfig
    plan: HeadGroupPlan
    layout: BlockLayout
    spec: CacheSpec
    max_model_len: int
    recycling: bool = True

    @property
    def kept(self) -> tuple[HeadPolicy, ...]:
        """What the cache keeps for each group: without recycling, everything."""
        return kept_policies(self.plan, self.recycling)

    @property
    def bytes_per_token(self) -> float:
        """Cache bytes a token takes, over all ranks and groups."""
        return self.layout.block_bytes * len(self.plan.groups) * self.plan.tp_size / self.layout.block_size


def kept_policies(plan: HeadGroupPlan, recycling: bool) -> tuple[HeadPolicy, ...]:
    return plan.policies if recycling else (FULL,) * len(plan.groups)


def read_model_card(config: EngineConfig, directory: Path) -> ModelCard:
    """Read a model's geometry; raises ModelError or ConfigError if it cannot be served as configured."""
    path = directory / "config.json"
    raw = read_small_file(path)
    model, identity = model_config(parse_json(path, raw)), _identity(raw, directory)
    if config.head_pattern:
        policies = _patterned(config, model, identity)
        if policies != model.policies:
            model, identity = replace(model, policies=policies), _with_policies(identity, policies)
    try:
        plan = plan_head_groups(model.policies, config.tp_size, config.head_grouping)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    layout = gqa_layout(config.block_size, plan.slots, model.head_dim, config.kv_dtype_name)
    asked = _asked_length(config, model)
    spec = _cache_spec(config, layout, asked)
    card = ModelCard(config.model, identity, model, plan, layout, spec, asked, config.recycling)
    return card if config.kv_cache_bytes is None else with_pool(card, config, config.kv_cache_bytes)


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
    max_model_len = min(_asked_length(config, card.config), _tokens_that_fit(config, card.plan, spec))
    if max_model_len < config.max_model_len:
        raise ConfigError(
            f"kv_cache {config.kv_cache} holds {max_model_len} tokens, max_model_len is {config.max_model_len}: "
            "raise the one or lower the other"
        )
    return replace(card, spec=spec, max_model_len=max_model_len)


def load_pattern(path: str | Path) -> HeadPattern:
    """Read a head pattern's file; raises ConfigError naming it."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read head pattern {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no head pattern: it is not text; give a TSV or JSON file") from None
    return parse_pattern(text, str(path))


def _patterned(config: EngineConfig, model: ModelConfig, identity: str) -> Policies:
    """The model's policies under the configured head pattern."""
    pattern = load_pattern(config.head_pattern)
    pattern.check_fits((model.num_layers, model.num_kv_heads), config.model, identity)
    return policies_from_scores(pattern.scores, config.sparsity, config.sink, config.window, model.policies)


def _with_policies(identity: str, policies: Policies) -> str:
    """Keys and values depend on what the layers below could see: other policies, other blocks."""
    table = ";".join(",".join(f"{policy.window}/{policy.sink}" for policy in row) for row in policies)
    return sha256(f"{identity}:{table}".encode()).hexdigest()[:32]


def _tokens_that_fit(config: EngineConfig, plan: HeadGroupPlan, spec: CacheSpec) -> int:
    """The longest sequence that the pool holds, in whole blocks: window groups take a fixed part of it."""
    windows = GroupWindows(kept_policies(plan, config.recycling), config.block_size)

    def fits(columns: int) -> bool:
        return int(windows.peak_blocks(columns * config.block_size, config.tokens_in_flight)) <= spec.num_blocks

    low, high = 1, spec.max_blocks
    while low < high:  # the largest number of columns that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * config.block_size


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
    return CacheSpec(0, config.max_num_seqs, -(-max_tokens // config.block_size), host_blocks)


def _identity(raw_config: bytes, directory: Path) -> str:
    """A hash over the configuration, the weight files' headers, and samples of the weights all over the files.

    Cache blocks in storage outlive a deployment, so models that differ in their weights alone must differ, too. Whole
    files are not read: some are hundreds of gigabytes, and training moves weights everywhere.
    """
    digest = sha256(raw_config)
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEADER_BYTES))
            for sample in range(IDENTITY_SAMPLES):
                file.seek(size * sample // IDENTITY_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
