"""Which module serves which architecture. A new model is a new file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from headwise.errors import ModelError
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
    """What serves an architecture, as ``module.name`` of this package: imported once a model asks for it, for each
    process of a deployment comes by here, and all families together take a tenth of its start.

    parse: gives `ModelConfig`; model: a `Decoder`
    """

    parse: str
    model: str

    def read(self, config: HfConfig) -> ModelConfig:
        parse: Callable[[HfConfig], ModelConfig] = _named(self.parse)
        return parse(config)

    def model_class(self) -> type[Decoder]:
        found: type[Decoder] = _named(self.model)
        return found


def _named(path: str) -> Any:
    module, _, name = path.partition(".")
    return getattr(import_module(f"{__package__}.{module}"), name)


_MODELS = {
    "DeepseekV2ForCausalLM": _Entry("deepseek.parse_v2", "deepseek.Deepseek"),
    "DeepseekV3ForCausalLM": _Entry("deepseek.parse_v3", "deepseek.Deepseek"),
    "KimiK25ForConditionalGeneration": _Entry("deepseek.parse_kimi_k25", "deepseek.Deepseek"),
    "DeepseekV4ForCausalLM": _Entry("deepseek_v4_config.parse", "deepseek_v4.DeepseekV4"),
    "DeepseekV32ForCausalLM": _Entry("deepseek_v32.parse", "deepseek_v32.DeepseekV32"),
    "LlamaForCausalLM": _Entry("llama.parse", "llama.Llama"),
    "Llama4ForCausalLM": _Entry("llama4.parse", "llama4.Llama4"),
    "Llama4ForConditionalGeneration": _Entry("llama4.parse", "llama4.Llama4"),
    "MistralForCausalLM": _Entry("mistral.parse", "mistral.Mistral"),
    "Ministral3ForCausalLM": _Entry("mistral.parse_ministral3", "mistral.Ministral3"),
    "Mistral3ForConditionalGeneration": _Entry("mistral.parse_multimodal", "mistral.Mistral"),
    "Mistral4ForCausalLM": _Entry("mistral4.parse", "mistral4.Mistral4"),
    "ArceeForCausalLM": _Entry("arcee.parse", "arcee.Arcee"),
    "SeedOssForCausalLM": _Entry("seed_oss.parse", "seed_oss.SeedOss"),
    "SmolLM3ForCausalLM": _Entry("smollm3.parse", "smollm3.SmolLM3"),
    "Gemma2ForCausalLM": _Entry("gemma2.parse", "gemma2.Gemma2"),
    "Gemma3ForCausalLM": _Entry("gemma3.parse", "gemma3.Gemma3"),
    "Gemma3ForConditionalGeneration": _Entry("gemma3.parse", "gemma3.Gemma3"),
    "Gemma4ForCausalLM": _Entry("gemma4_config.parse", "gemma4.Gemma4"),
    "Gemma4ForConditionalGeneration": _Entry("gemma4_config.parse", "gemma4.Gemma4"),
    "Qwen2ForCausalLM": _Entry("qwen.parse_qwen2", "qwen.Qwen2"),
    "MiMoForCausalLM": _Entry("qwen.parse_mimo", "qwen.MiMo"),
    "Qwen3ForCausalLM": _Entry("qwen.parse_qwen3", "qwen.Qwen3"),
    "Qwen3MoeForCausalLM": _Entry("qwen.parse_qwen3_moe", "qwen.Qwen3Moe"),
    "Qwen2MoeForCausalLM": _Entry("qwen.parse_qwen2_moe", "qwen.Qwen2Moe"),
    "Dots1ForCausalLM": _Entry("qwen.parse_dots1", "qwen.Dots1"),
    "HYV3ForCausalLM": _Entry("qwen.parse_hunyuan3", "qwen.Hunyuan3"),
    "Qwen2VLForConditionalGeneration": _Entry("qwen_vl.parse_qwen2", "qwen.Qwen2"),
    "Qwen2_5_VLForConditionalGeneration": _Entry("qwen_vl.parse_qwen2", "qwen.Qwen2"),
    "Qwen3VLForConditionalGeneration": _Entry("qwen_vl.parse_qwen3", "qwen.Qwen3"),
    "Qwen3VLMoeForConditionalGeneration": _Entry("qwen_vl.parse_qwen3_moe", "qwen_vl.Qwen3VlMoe"),
    "Qwen3NextForCausalLM": _Entry("qwen3_next.parse_next", "qwen3_next.Qwen3Next"),
    "Qwen3_5ForCausalLM": _Entry("qwen3_next.parse_qwen3_5", "qwen3_next.Qwen3_5"),
    "Qwen3_5ForConditionalGeneration": _Entry("qwen3_next.parse_qwen3_5", "qwen3_next.Qwen3_5"),
    "Qwen3_5MoeForCausalLM": _Entry("qwen3_next.parse_qwen3_5_moe", "qwen3_next.Qwen3_5Moe"),
    "Qwen3_5MoeForConditionalGeneration": _Entry("qwen3_next.parse_qwen3_5_moe", "qwen3_next.Qwen3_5Moe"),
    "GlmForCausalLM": _Entry("glm4.parse_glm", "glm4.Glm"),
    "Glm4ForCausalLM": _Entry("glm4.parse_glm4", "glm4.Glm4"),
    "Glm4MoeForCausalLM": _Entry("glm4.parse_moe", "glm4.Glm4Moe"),
    "SolarOpenForCausalLM": _Entry("glm4.parse_solar", "glm4.Glm4Moe"),
    "Glm4MoeLiteForCausalLM": _Entry("glm4.parse_lite", "deepseek.Deepseek"),
    "Glm4vForConditionalGeneration": _Entry("glm4v.parse_dense", "glm4.Glm4"),
    "Glm4vMoeForConditionalGeneration": _Entry("glm4v.parse_with_experts", "glm4.Glm4Moe"),
    "GlmMoeDsaForCausalLM": _Entry("glm5.parse", "glm5.GlmMoeDsa"),
    "MiMoV2FlashForCausalLM": _Entry("mimo_v2.parse", "mimo_v2.MiMoV2"),
    "MiniMaxM2ForCausalLM": _Entry("minimax_m2.parse", "minimax_m2.MiniMaxM2"),
    "Olmo2ForCausalLM": _Entry("olmo.parse_olmo2", "olmo.Olmo"),
    "Olmo3ForCausalLM": _Entry("olmo.parse_olmo3", "olmo.Olmo"),
    "Exaone4ForCausalLM": _Entry("exaone4.parse", "exaone4.Exaone4"),
    "ExaoneMoeForCausalLM": _Entry("exaone4.parse_moe", "exaone4.ExaoneMoe"),
    "ExaoneMoEForCausalLM": _Entry("exaone4.parse_moe", "exaone4.ExaoneMoe"),
    "AfmoeForCausalLM": _Entry("afmoe.parse", "afmoe.Afmoe"),
    "Cohere2ForCausalLM": _Entry("cohere2.parse", "cohere2.Cohere2"),
    "Cohere2MoeForCausalLM": _Entry("cohere2_moe.parse", "cohere2_moe.Cohere2Moe"),
    "GraniteForCausalLM": _Entry("granite.parse", "granite.Granite"),
    "GraniteMoeForCausalLM": _Entry("granite.parse_moe", "granite.GraniteMoe"),
    "GraniteMoeHybridForCausalLM": _Entry("granite.parse_hybrid", "granite.GraniteHybrid"),
    "GraniteSWAForCausalLM": _Entry("granite_swa.parse", "granite_swa.GraniteSwa"),
    "GraniteMoeSWAForCausalLM": _Entry("granite_swa.parse_moe", "granite_swa.GraniteMoeSwa"),
    "HunYuanDenseV1ForCausalLM": _Entry("hunyuan_v1.parse", "hunyuan_v1.HunyuanV1"),
    "HunYuanMoEV1ForCausalLM": _Entry("hunyuan_v1.parse_moe", "hunyuan_v1.HunyuanV1Moe"),
    "HYV4ForCausalLM": _Entry("hy_v4_config.parse", "hy_v4.HyV4"),
    "LagunaForCausalLM": _Entry("laguna.parse", "laguna.Laguna"),
    "MellumForCausalLM": _Entry("mellum.parse", "mellum.Mellum"),
    "BambaForCausalLM": _Entry("bamba.parse", "bamba.Bamba"),
    "NemotronHForCausalLM": _Entry("nemotron_h.parse", "nemotron_h.NemotronH"),
    "KimiLinearForCausalLM": _Entry("kimi_linear_config.parse", "kimi_linear.KimiLinear"),
    "Step3p5ForCausalLM": _Entry("step3_config.parse", "step3.Step3"),
    "Step3p7ForConditionalGeneration": _Entry("step3_config.parse_multimodal", "step3.Step3"),
    "MixtralForCausalLM": _Entry("mixtral.parse", "mixtral.Mixtral"),
    "Phi3ForCausalLM": _Entry("phi3.parse", "phi3.Phi3"),
    "GptOssForCausalLM": _Entry("gpt_oss.parse", "gpt_oss.GptOss"),
    "Ernie4_5ForCausalLM": _Entry("ernie45.parse", "ernie45.Ernie45"),
    "Ernie4_5_MoeForCausalLM": _Entry("ernie45.parse_moe", "ernie45.Ernie45Moe"),
    "Ernie4_5_VLMoeForConditionalGeneration": _Entry("ernie45_vl.parse", "ernie45_vl.Ernie45Vl"),
    "Ernie4_5_VL_MoeForConditionalGeneration": _Entry("ernie45_vl.parse", "ernie45_vl.Ernie45Vl"),
}
_FORMERLY = "Ernie4_5_VL_MoeForConditionalGeneration"
"""What transformers called a model at first, which is no name of its own."""


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
    model = entry.read(config)
    check_kinds(config, model)
    return replace(model, missing_for_images=missing_for_images(config, model.axes), image_tokens=image_tokens(config))


def drafting_config(config: ModelConfig, weights: Sequence[str]) -> ModelConfig:
    """``config`` with a layer that drafts, if the model has one among its ``weights``, told by name, that is served."""
    return with_draft_layer(config, _MODELS[config.architecture].model_class().drafting_names, weights)


_ENDINGS = ("ForCausalLM", "ForConditionalGeneration")


def _supported() -> str:
    """All that are, short: they end alike, and some names both ways."""
    every = sorted(_MODELS.keys() - {_FORMERLY})
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
    family = _MODELS[config.architecture].model_class()
    model = family(config, weights, ops, collectives, shard, prepare, adapters)
    if head is not None:
        model.draft_by(lambda embedding: Eagle(config, head, ops, collectives, shard, prepare, embedding))
    return model
