"""Tiny random models with vision towers, and images for them.

What transformers makes of both is in `tests/references/images-NAME.json`, with the shapes of the weights, which are
drawn anew from a fixed seed, here and where the references were made; so are the images.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image
from support.tiny_checkpoints import TINY_CONFIGS, draw_weights
from support.tiny_models import byte_level_tokenizer
from tokenizers import AddedToken

from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

REFERENCES = Path(__file__).parent.parent / "references"
FIRST_ID = 263
IMG, IMG_BREAK, IMG_END = 263, 264, 265
IMAGE_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
PATCH, MERGE, LONGEST = 4, 2, 64

CONFIG: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": IMG,
    "spatial_merge_size": MERGE,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
    "vision_feature_layer": -1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "text_config": {
        "model_type": "mistral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 272,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "image_size": LONGEST,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    },
}
PROCESSOR = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": LONGEST}, "patch_size": PATCH}

LLAMA4_CONFIG: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "image_token_index": 264,
    "boi_token_index": 265,
    "eoi_token_index": 266,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "text_config": {**TINY_CONFIGS["llama4"], "vocab_size": 272},
    "vision_config": {
        "model_type": "llama4_vision_model",
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
        "projector_input_dim": 48,
        "projector_output_dim": 48,
        "vision_output_dim": 48,
        "pixel_shuffle_ratio": 0.5,
        "rope_theta": 10000.0,
    },
}

KIMI_CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "image_token_id": FIRST_ID,
    "video_token_id": 288,
    "vision_start_token_id": FIRST_ID + 1,
    "vision_end_token_id": FIRST_ID + 3,
    "projection_hidden_size": 32,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "text_config": {**TINY_CONFIGS["deepseek-v3"], "vocab_size": 288},
    "vision_config": {
        "model_type": "kimi_k25_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "merge_kernel_size": [MERGE, MERGE],
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    },
}

_QWEN_TEXT: dict[str, Any] = {
    key: value
    for key, value in TINY_CONFIGS["qwen3"].items()
    if key not in ("architectures", "model_type", "rope_theta", "vocab_size")
}
_QWEN2_TEXT = {
    **{key: value for key, value in _QWEN_TEXT.items() if key != "head_dim"},
    "hidden_size": 256,  # the head size follows from it
    "vocab_size": 272,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
}
_QWEN3_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}


def _qwen(architecture: str, model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "image_token_id": FIRST_ID,
        "vision_start_token_id": FIRST_ID + 1,
        "vision_end_token_id": FIRST_ID + 2,
        "video_token_id": FIRST_ID + 3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "text_config": {"model_type": f"{model_type}_text", **text},
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "depth": 3,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            **vision,
        },
    }


_QWEN3_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "hidden_act": "gelu_pytorch_tanh",
}
QWEN2_VL_CONFIG = _qwen(
    "Qwen2VLForConditionalGeneration",
    "qwen2_vl",
    _QWEN2_TEXT,
    {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 256, "hidden_act": "quick_gelu"},
)
QWEN2_5_VL_CONFIG = _qwen(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    _QWEN2_TEXT,
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 256,
        "hidden_act": "silu",
        "tokens_per_second": 1,
        "window_size": 16,  # two by two squares
        "fullatt_block_indexes": [1],
    },
)
QWEN3_VL_CONFIG = _qwen(
    "Qwen3VLForConditionalGeneration",
    "qwen3_vl",
    {**_QWEN_TEXT, "vocab_size": 272, "rope_parameters": {**_QWEN3_ROPE, "mrope_section": [12, 10, 10]}},
    {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 2]},
)
QWEN3_5_CONFIG = _qwen(
    "Qwen3_5ForConditionalGeneration",
    "qwen3_5",
    {
        **{
            key: value
            for key, value in TINY_CONFIGS["qwen3.5"].items()
            if key not in ("architectures", "model_type", "rope_theta", "partial_rotary_factor")
        },
        "vocab_size": 272,
        "rope_parameters": {**_QWEN3_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
    },
    _QWEN3_VISION,
)
ERNIE_CONFIG: dict[str, Any] = {
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
    "model_type": "ernie4_5_vl_moe",
    "image_token_id": FIRST_ID,
    "image_start_token_id": FIRST_ID + 1,
    "image_end_token_id": FIRST_ID + 2,
    "video_token_id": FIRST_ID + 3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "text_config": {
        "model_type": "ernie4_5_vl_moe_text",
        "hidden_size": 256,  # the head size follows from it
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 272,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [11, 11, 10]},
        "moe_intermediate_size": [64, 32],
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "vision_config": {
        "model_type": "ernie4_5_vl_moe_vision",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_merge_size": 2,
    },
}
_QWEN_PROCESSOR = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
QWEN2_PROCESSOR = {**_QWEN_PROCESSOR, "min_pixels": 256, "max_pixels": 4096}
QWEN3_PROCESSOR = {
    **_QWEN_PROCESSOR,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

_NOT_GLM_S = ("architectures", "model_type", "vocab_size", "rope_theta", "partial_rotary_factor", "use_qk_norm")
_GLM_SECTIONS = {"rope_type": "default", "mrope_section": [4, 6, 6]}


def _glm(architecture: str, model_type: str, like: str, text: dict[str, Any], has_bias: bool = False) -> dict[str, Any]:
    own = {key: value for key, value in TINY_CONFIGS[like].items() if key not in _NOT_GLM_S} | text
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "image_token_id": FIRST_ID,
        "image_start_token_id": FIRST_ID + 1,
        "image_end_token_id": FIRST_ID + 2,
        "video_token_id": FIRST_ID + 3,
        "video_start_token_id": FIRST_ID + 4,
        "video_end_token_id": FIRST_ID + 5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "text_config": {"model_type": f"{model_type}_text", "vocab_size": 272, **own},
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "depth": 3,
            "hidden_size": 32,
            "hidden_act": "silu",
            "attention_bias": has_bias,
            "num_heads": 4,
            "image_size": 24,  # six by six positions
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "rms_norm_eps": 1e-5,
            "out_hidden_size": own["hidden_size"],
            "intermediate_size": 80,
        },
    }


GLM4V_CONFIG = _glm(
    "Glm4vForConditionalGeneration",
    "glm4v",
    "glm4",
    {
        "hidden_size": 256,
        "head_dim": 64,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": _GLM_SECTIONS,
    },
)
GLM4V_MOE_CONFIG = _glm(
    "Glm4vMoeForConditionalGeneration",
    "glm4v_moe",
    "glm4-moe",
    {"rope_parameters": {**_GLM_SECTIONS, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    has_bias=True,
)
GLM_PROCESSOR = {**_QWEN_PROCESSOR, "size": {"shortest_edge": 512, "longest_edge": 8192}}
_GLM_TOKENS = (
    "<|image|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|video|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
_GLM_PLACE = "<|begin_of_image|><|image|><|end_of_image|>"
_GLM_FILM = "<|begin_of_video|><|video|><|end_of_video|>"
_QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"

GEMMA3_CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": 9,
    "image_token_index": FIRST_ID,
    "boi_token_index": FIRST_ID + 1,
    "eoi_token_index": FIRST_ID + 2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 272,
        "max_position_embeddings": 4096,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 24,
        "patch_size": PATCH,
        "vision_use_head": False,
    },
}
"""A window that is longer than an image's tokens, and shorter than prompts."""

GEMMA4_CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "image_token_id": FIRST_ID,
    "boi_token_id": FIRST_ID + 1,
    "eoi_token_id": FIRST_ID + 2,
    "audio_token_id": 100_000,
    "video_token_id": 100_001,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "text_config": {
        **TINY_CONFIGS["gemma4"],
        "vocab_size": 272,
        "vocab_size_per_layer_input": 272,
        "pad_token_id": 0,
        "sliding_window": 12,
        "use_bidirectional_attention": "vision",
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": PATCH,
        "pooling_kernel_size": 2,
        "position_embedding_size": 160,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "use_clipped_linears": True,
        "standardize": True,
    },
}

SIZES = {"exact": (24, 16), "odd": (37, 21), "tall": (9, 50), "large": (200, 130), "tiny": (2, 17), "thin": (300, 9)}
"""Width and height: whole squares of patches, others, and some that are scaled down."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{ '<|im_start|>system\n' }}"
    "{{ message.content if message.content is string else message.content[0].text }}{{ '<|im_end|>' }}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'text' %}{{ part.text }}"
    "{%- elif part.type in ['image', 'image_url'] %}{{ '[IMG]' }}"
    "{%- elif part.type == 'video' %}{{ '[VIDEO]' }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{ '<|im_end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""In the manner of Mistral Small 3.1's: a system message is the text of its first part."""


def picture(name: str, seed: int = 0) -> Image.Image:
    """One of `SIZES`: random blocks of colour, so that scaling makes a difference but no mush."""
    width, height = SIZES[name]
    draw = np.random.default_rng([seed, width, height])
    blocks = draw.integers(0, 256, ((height + 6) // 7, (width + 6) // 7, 3), dtype=np.uint8)
    return Image.fromarray(np.ascontiguousarray(blocks.repeat(7, 0).repeat(7, 1)[:height, :width]), "RGB")


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@dataclass(frozen=True)
class Family:
    """tokens: those that stand for images and around them, by their ids from 263 on; the first one is an image's
    place:   what the template writes for an image; empty: ``written``
    written: what of that headwise and the processor put an image's tokens for; empty: the first token
    film:    what the template writes for a video; empty: as for an image
    videos:  what says how videos are prepared
    """

    name: str
    config: dict[str, Any]
    processor: dict[str, Any]
    tokens: tuple[str, ...]
    place: str = ""
    written: str = ""
    film: str = ""
    videos: dict[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> str:
        place = self.place or self.written or self.tokens[0]
        return CHAT_TEMPLATE.replace("[IMG]", place).replace("[VIDEO]", self.film or place)

    @property
    def references(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((REFERENCES / f"images-{self.name}.json").read_text())
        return found

    def id_of(self, token: str) -> int:
        return FIRST_ID + self.tokens.index(token)


MISTRAL3 = Family("mistral3", CONFIG, PROCESSOR, IMAGE_TOKENS)
LLAMA4 = Family(
    "llama4",
    LLAMA4_CONFIG,
    {"size": {"height": 16, "width": 16}, "max_patches": 4},
    ("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
)
KIMI = Family(
    "kimi-k25",
    KIMI_CONFIG,
    {"size": {"max_height": 16, "max_width": 16}, "max_patches": 64, "patch_size": PATCH, "merge_size": MERGE},
    ("<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>"),
)
GEMMA3 = Family(
    "gemma3",
    GEMMA3_CONFIG,
    {"size": {"height": 24, "width": 24}, "resample": 2, "do_convert_rgb": None, "do_pan_and_scan": None},
    ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    written="<start_of_image>",
)
GEMMA4 = Family(
    "gemma4",
    GEMMA4_CONFIG,
    {"patch_size": PATCH, "pooling_kernel_size": 2, "max_soft_tokens": 70, "do_normalize": False, "resample": 3},
    ("<|image|>", "<|image>", "<image|>"),
)
QWEN2_VIDEOS = {
    **_QWEN_PROCESSOR,
    "size": {"shortest_edge": 256, "longest_edge": 2048},
    "fps": 2,
    "max_video_tokens": 300,  # which is less than a long video would take
}
QWEN3_VIDEOS = {
    **_QWEN_PROCESSOR,
    "size": {"shortest_edge": 1024, "longest_edge": 24576},
    "max_video_tokens": 40,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _qwen_family(name: str, config: dict[str, Any], processor: dict[str, Any], videos: dict[str, Any]) -> Family:
    film = _QWEN_PLACE.replace("image", "video")
    return Family(name, config, processor, _QWEN_TOKENS, _QWEN_PLACE, film=film, videos=videos)


QWEN2_VL = _qwen_family("qwen2-vl", QWEN2_VL_CONFIG, QWEN2_PROCESSOR, QWEN2_VIDEOS)
QWEN2_5_VL = _qwen_family("qwen2.5-vl", QWEN2_5_VL_CONFIG, QWEN2_PROCESSOR, QWEN2_VIDEOS)
QWEN3_VL = _qwen_family("qwen3-vl", QWEN3_VL_CONFIG, QWEN3_PROCESSOR, QWEN3_VIDEOS)
QWEN3_5 = _qwen_family("qwen3.5", QWEN3_5_CONFIG, QWEN3_PROCESSOR, QWEN3_VIDEOS)
QWENS = {family.name: family for family in (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_5)}


def _glm_family(name: str, config: dict[str, Any], kind: str) -> Family:
    """kind: of its processors"""
    videos = {
        **_QWEN_PROCESSOR,
        "size": {"shortest_edge": 512, "longest_edge": 12288},
        "max_duration": 60,
        "processor_class": f"{kind}Processor",
        "video_processor_type": f"{kind}VideoProcessor",
    }
    return Family(name, config, GLM_PROCESSOR, _GLM_TOKENS, _GLM_PLACE, film=_GLM_FILM, videos=videos)


GLM4V = _glm_family("glm4v", GLM4V_CONFIG, "Glm4v")
GLM4V_MOE = _glm_family("glm4v-moe", GLM4V_MOE_CONFIG, "Glm46V")
GLMS = {family.name: family for family in (GLM4V, GLM4V_MOE)}
FILMING = {**QWENS, **GLMS}
"""Those that take videos."""
ERNIE_VL = Family(
    "ernie4.5-vl",
    ERNIE_CONFIG,
    {"patch_size": PATCH, "merge_size": MERGE, "size": {"shortest_edge": 256, "longest_edge": 4096}},
    ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_PLACEHOLDER|>"),
    "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
)
FAMILIES = {family.name: family for family in (MISTRAL3, LLAMA4, KIMI, GEMMA3, GEMMA4, ERNIE_VL)} | QWENS | GLMS


def write_image_model(
    directory: Path, family: Family, shapes: dict[str, list[int]], more: Mapping[str, list[int]] | None = None
) -> Path:
    """A whole checkpoint: weights, tokenizer, chat template, and what says how images are prepared. more: shapes of
    weights that leave the others as they are without"""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(family.config))
    (directory / "preprocessor_config.json").write_text(json.dumps(family.processor))
    if family.videos:
        (directory / "video_preprocessor_config.json").write_text(json.dumps(family.videos))
    (directory / "chat_template.jinja").write_text(family.template)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in family.tokens])
    assert all(tokenizer.token_to_id(token) == family.id_of(token) for token in family.tokens)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    text = family.config["text_config"]
    weights = {**draw_weights(text, shapes), **draw_weights(text, more or {})}
    forms = {name: TensorForm("F32", array.shape) for name, array in weights.items()}
    write_safetensors(directory / "model.safetensors", forms, (weights[name] for name in forms))
    return directory


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="headwise-images-")


@cache
def references(name: str = "mistral3") -> dict[str, Any]:
    return FAMILIES[name].references


@cache
def image_model(name: str = "mistral3") -> Path:
    """The checkpoint that the references are of, once a process."""
    return write_image_model(Path(_scratch().name) / name, FAMILIES[name], references(name)["shapes"])
