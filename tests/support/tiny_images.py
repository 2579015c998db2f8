"""A tiny random model of Mistral 3 with a vision tower, and images for it.

What transformers makes of both is in `tests/references/images.json`, with the config and the shapes of the weights,
which are drawn anew from a fixed seed, here and where the references were made; so are the images.
"""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image
from support.tiny_checkpoints import draw_weights
from support.tiny_models import byte_level_tokenizer
from tokenizers import AddedToken

from headwise.runtime.loader.safetensors_file import TensorForm, write_safetensors

REFERENCES = Path(__file__).parent.parent / "references" / "images.json"
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
    "{%- elif part.type in ['image', 'image_url'] %}{{ '[IMG]' }}{%- endif %}"
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


@cache
def references() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(REFERENCES.read_text())
    return found


def write_image_model(directory: Path, shapes: dict[str, list[int]]) -> Path:
    """A whole checkpoint: weights, tokenizer, chat template, and what says how images are prepared."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in IMAGE_TOKENS])
    assert [tokenizer.token_to_id(token) for token in IMAGE_TOKENS] == [IMG, IMG_BREAK, IMG_END]
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    weights = draw_weights(CONFIG["text_config"], shapes)
    forms = {name: TensorForm("F32", array.shape) for name, array in weights.items()}
    write_safetensors(directory / "model.safetensors", forms, (weights[name] for name in forms))
    return directory


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="headwise-images-")


@cache
def image_model() -> Path:
    """The checkpoint that the references are of, once a process."""
    return write_image_model(Path(_scratch().name) / "mistral3", references()["shapes"])
