"""Which module serves which architecture. A new model is a new file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headwise.errors import ModelError
from headwise.runtime.models import (
    afmoe,
    arcee,
    bamba,
    cohere2,
    cohere2_moe,
    deepseek,
    deepseek_v4,
    deepseek_v32,
    ernie45,
    ernie45_vl,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4v,
    glm5,
    gpt_oss,
    granite,
    granite_swa,
    hunyuan_v1,
    hy_v4,
    kimi_linear,
    kimi_linear_config,
    laguna,
    llama,
    llama4,
    mellum,
    mimo_v2,
    minimax_m2,
    mistral,
    mistral4,
    mixtral,
    nemotron_h,
    olmo,
    phi3,
    qwen,
    qwen3_next,
    qwen_vl,
    seed_oss,
    smollm3,
    step3,
)
from headwise.runtime.models.base import Model
from headwise.runtime.models.decoder import Decoder
from headwise.runtime.models.drafting import with_draft_layer
from headwise.runtime.models.eagle import Eagle, StoredWeights
from headwise.runtime.models.hf_config import HfConfig
from headwise.runtime.models.images import missing_for_images
from headwise.runtime.models.kinds import check_kinds
from headwise.runtime.models.low_rank import Adapter
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.shard import Shard
from headwise.runtime.models.towers.select import image_tokens
from headwise.runtime.models.unsupported import what_is_missing
from headwise.runtime.models.values import shown
from headwise.runtime.models.weights import Prepare, Weights, make_anew
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.comm import Collectives


@dataclass(frozen=True)
class _Entry:
    parse: Callable[[HfConfig], ModelConfig]
    model: type[Decoder]


_MODELS = {
    deepseek.V2: _Entry(deepseek.parse_v2, deepseek.Deepseek),
    deepseek.V3: _Entry(deepseek.parse_v3, deepseek.Deepseek),
    deepseek.KIMI_K25: _Entry(deepseek.parse_kimi_k25, deepseek.Deepseek),
    deepseek_v4.ARCHITECTURE: _Entry(deepseek_v4.parse, deepseek_v4.DeepseekV4),
    deepseek_v32.ARCHITECTURE: _Entry(deepseek_v32.parse, deepseek_v32.DeepseekV32),
    **dict.fromkeys(llama.ARCHITECTURES, _Entry(llama.parse, llama.Llama)),
    **dict.fromkeys(llama4.ARCHITECTURES, _Entry(llama4.parse, llama4.Llama4)),
    **dict.fromkeys(mistral.ARCHITECTURES, _Entry(mistral.parse, mistral.Mistral)),
    mistral.MINISTRAL3: _Entry(mistral.parse_ministral3, mistral.Ministral3),
    mistral.MULTIMODAL: _Entry(mistral.parse_multimodal, mistral.Mistral),
    mistral4.ARCHITECTURE: _Entry(mistral4.parse, mistral4.Mistral4),
    arcee.ARCHITECTURE: _Entry(arcee.parse, arcee.Arcee),
    seed_oss.ARCHITECTURE: _Entry(seed_oss.parse, seed_oss.SeedOss),
    smollm3.ARCHITECTURE: _Entry(smollm3.parse, smollm3.SmolLM3),
    gemma2.ARCHITECTURE: _Entry(gemma2.parse, gemma2.Gemma2),
    **dict.fromkeys(gemma3.ARCHITECTURES, _Entry(gemma3.parse, gemma3.Gemma3)),
    **dict.fromkeys(gemma4.ARCHITECTURES, _Entry(gemma4.parse, gemma4.Gemma4)),
    qwen.QWEN2: _Entry(qwen.parse_qwen2, qwen.Qwen2),
    qwen.MIMO: _Entry(qwen.parse_mimo, qwen.MiMo),
    qwen.QWEN3: _Entry(qwen.parse_qwen3, qwen.Qwen3),
    qwen.QWEN3_MOE: _Entry(qwen.parse_qwen3_moe, qwen.Qwen3Moe),
    qwen.QWEN2_MOE: _Entry(qwen.parse_qwen2_moe, qwen.Qwen2Moe),
    qwen.DOTS1: _Entry(qwen.parse_dots1, qwen.Dots1),
    qwen.HUNYUAN3: _Entry(qwen.parse_hunyuan3, qwen.Hunyuan3),
    **dict.fromkeys(qwen_vl.QWEN2, _Entry(qwen_vl.parse_qwen2, qwen.Qwen2)),
    qwen_vl.QWEN3: _Entry(qwen_vl.parse_qwen3, qwen.Qwen3),
    qwen_vl.QWEN3_MOE: _Entry(qwen_vl.parse_qwen3_moe, qwen_vl.Qwen3VlMoe),
    qwen3_next.NEXT: _Entry(qwen3_next.parse_next, qwen3_next.Qwen3Next),
    **dict.fromkeys(qwen3_next.QWEN3_5, _Entry(qwen3_next.parse_qwen3_5, qwen3_next.Qwen3_5)),
    **dict.fromkeys(qwen3_next.QWEN3_5_MOE, _Entry(qwen3_next.parse_qwen3_5_moe, qwen3_next.Qwen3_5Moe)),
    glm4.GLM: _Entry(glm4.parse_glm, glm4.Glm),
    glm4.GLM4: _Entry(glm4.parse_glm4, glm4.Glm4),
    glm4.MOE: _Entry(glm4.parse_moe, glm4.Glm4Moe),
    glm4.SOLAR: _Entry(glm4.parse_solar, glm4.Glm4Moe),
    glm4.LITE: _Entry(glm4.parse_lite, deepseek.Deepseek),
    glm4v.DENSE: _Entry(glm4v.parse_dense, glm4.Glm4),
    glm4v.MOE: _Entry(glm4v.parse_with_experts, glm4.Glm4Moe),
    glm5.ARCHITECTURE: _Entry(glm5.parse, glm5.GlmMoeDsa),
    mimo_v2.ARCHITECTURE: _Entry(mimo_v2.parse, mimo_v2.MiMoV2),
    minimax_m2.ARCHITECTURE: _Entry(minimax_m2.parse, minimax_m2.MiniMaxM2),
    olmo.OLMO2: _Entry(olmo.parse_olmo2, olmo.Olmo),
    olmo.OLMO3: _Entry(olmo.parse_olmo3, olmo.Olmo),
    exaone4.DENSE: _Entry(exaone4.parse, exaone4.Exaone4),
    **dict.fromkeys(exaone4.ARCHITECTURES_MOE, _Entry(exaone4.parse_moe, exaone4.ExaoneMoe)),
    afmoe.ARCHITECTURE: _Entry(afmoe.parse, afmoe.Afmoe),
    cohere2.ARCHITECTURE: _Entry(cohere2.parse, cohere2.Cohere2),
    cohere2_moe.ARCHITECTURE: _Entry(cohere2_moe.parse, cohere2_moe.Cohere2Moe),
    granite.DENSE: _Entry(granite.parse, granite.Granite),
    granite.MOE: _Entry(granite.parse_moe, granite.GraniteMoe),
    granite.HYBRID: _Entry(granite.parse_hybrid, granite.GraniteHybrid),
    granite_swa.DENSE: _Entry(granite_swa.parse, granite_swa.GraniteSwa),
    granite_swa.MOE: _Entry(granite_swa.parse_moe, granite_swa.GraniteMoeSwa),
    hunyuan_v1.DENSE: _Entry(hunyuan_v1.parse, hunyuan_v1.HunyuanV1),
    hunyuan_v1.MOE: _Entry(hunyuan_v1.parse_moe, hunyuan_v1.HunyuanV1Moe),
    hy_v4.ARCHITECTURE: _Entry(hy_v4.parse, hy_v4.HyV4),
    laguna.ARCHITECTURE: _Entry(laguna.parse, laguna.Laguna),
    mellum.ARCHITECTURE: _Entry(mellum.parse, mellum.Mellum),
    bamba.ARCHITECTURE: _Entry(bamba.parse, bamba.Bamba),
    nemotron_h.ARCHITECTURE: _Entry(nemotron_h.parse, nemotron_h.NemotronH),
    kimi_linear_config.ARCHITECTURE: _Entry(kimi_linear_config.parse, kimi_linear.KimiLinear),
    step3.ARCHITECTURE: _Entry(step3.parse, step3.Step3),
    step3.MULTIMODAL: _Entry(step3.parse_multimodal, step3.Step3),
    mixtral.ARCHITECTURE: _Entry(mixtral.parse, mixtral.Mixtral),
    phi3.ARCHITECTURE: _Entry(phi3.parse, phi3.Phi3),
    gpt_oss.ARCHITECTURE: _Entry(gpt_oss.parse, gpt_oss.GptOss),
    ernie45.DENSE: _Entry(ernie45.parse, ernie45.Ernie45),
    ernie45.MOE: _Entry(ernie45.parse_moe, ernie45.Ernie45Moe),
    **dict.fromkeys((ernie45_vl.ARCHITECTURE, ernie45_vl.FORMERLY), _Entry(ernie45_vl.parse, ernie45_vl.Ernie45Vl)),
}


def model_config(config: HfConfig) -> ModelConfig:
    """Read a ``config.json`` mapping; raises ModelError on an architecture or a value that is not supported."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: 'architectures' must be a list of names, got {shown(names)}")
    entry = next((_MODELS[name] for name in names if name in _MODELS), None)
    if entry is None:
        named = ", ".join(name if name.isidentifier() and len(name) < 80 else shown(name) for name in names[:4])
        missing = what_is_missing(names[0], config, _MODELS) if names and len(names[0]) < 80 else ""
        raise ModelError(
            f"architecture {named or 'missing from config.json'} is not supported{missing and f': {missing}'}; "
            f"supported are {_supported()}"
        )
    model = entry.parse(config)
    check_kinds(config, model)
    return replace(model, missing_for_images=missing_for_images(config, model.axes), image_tokens=image_tokens(config))


def drafting_config(config: ModelConfig, weights: Sequence[str]) -> ModelConfig:
    """``config`` with a layer that drafts, if the model has one among its ``weights``, told by name, that is served."""
    return with_draft_layer(config, _MODELS[config.architecture].model.drafting_names, weights)


_ENDINGS = ("ForCausalLM", "ForConditionalGeneration")


def _supported() -> str:
    """All that are, short: they end alike, and some names both ways."""
    every = sorted(_MODELS.keys() - {ernie45_vl.FORMERLY})
    found = [{name.removesuffix(end) for name in every if name.endswith(end)} for end in _ENDINGS]
    both = found[0] & found[1]
    told = {**{f"..{end}": names - both for end, names in zip(_ENDINGS, found, strict=True)}, "both": both}
    return "; ".join(f"{end} of {', '.join(sorted(names))}" for end, names in told.items())


def build_model(
    config: ModelConfig,
    weights: Weights,
    ops: TensorOps,
    collectives: Collectives,
    shard: Shard,
    prepare: Prepare = make_anew,
    adapters: Sequence[Adapter] = (),
    head: StoredWeights | None = None,
) -> Model:
    """One rank's model with its weights loaded; raises ModelError if they, or adapters, do not fit the config.

    head: weights of what drafts beside it, where its config has that
    """
    model = _MODELS[config.architecture].model(config, weights, ops, collectives, shard, prepare, adapters)
    if head is not None:
        model.draft_by(lambda embedding: Eagle(config, head, ops, collectives, shard, prepare, embedding))
    return model
