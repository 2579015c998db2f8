"""Names of a DeepSeek-V4's weights: as it was published, as transformers saves them, and as its modules are called."""

from __future__ import annotations

import re
from collections.abc import Iterable

_EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_RENAMED = (
    (r"^(?:model\.)?embed(?:_tokens)?\.weight$", "model.embed_tokens.weight"),
    (r"^(?:lm_)?head\.weight$", "lm_head.weight"),
    (r"^(?:model\.)?hc_head(?:_|\.hc_)(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"^(?:model\.)?(mtp\.\d+)\.hc_head_(fn|base|scale)$", r"\1.hc_head.hc_\2"),
    (r"^(?:model\.)?(?=mtp\.)", ""),
    (r"^(?!model\.|lm_head\.|mtp\.)", "model."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"(\.self_attn(?:\.compressor(?:\.indexer)?)?)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_(a|b)\.", r".q_\1_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_(a|b)\.", r".o_\1_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
)
_PATTERNS = tuple((re.compile(pattern), name) for pattern, name in _RENAMED)
_EXPERT = re.compile(r"\.(experts\.\d+|shared_experts)\.(w[123])\.")


def renamed(names: Iterable[str]) -> dict[str, str]:
    """Of each of a checkpoint's names what the module is called; of layers that draft, ``mtp.N...``."""
    return {name: _renamed(name) for name in names}


def _renamed(name: str) -> str:
    name = _EXPERT.sub(lambda found: f".{found[1]}.{_EXPERT_PARTS[found[2]]}.", name)
    for pattern, to in _PATTERNS:
        name = pattern.sub(to, name)
    return name
