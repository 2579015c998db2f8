"""Write what transformers computes in float32 for images of tiny random models: `images-NAME.json`.

    PYTHONPATH=tests python tests/references/make_image_references.py [NAME ...]

Needs torch, torchvision, transformers and Pillow. `support.tiny_images` has the configs, draws the weights, and makes
the images. Each file holds:

    shapes   each weight's shape
    images   per image: what its processor makes of its size, its pixels, and what the projector makes of these, as the
             sums of absolute values and some of the numbers themselves, spread evenly; behind a Qwen3-VL token's
             numbers those that layers add (deepstack), layer by layer
    prompts  as `make_references.py` writes them, with ``images``: the names of theirs, whose tokens are as the
             model's processor writes them
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from make_references import NEW_TOKENS
from support.tiny_images import (
    ERNIE_VL,
    FAMILIES,
    FIRST_ID,
    GEMMA3,
    GEMMA4,
    GLMS,
    KIMI,
    LONGEST,
    MERGE,
    PATCH,
    REFERENCES,
    SIZES,
    Family,
    picture,
    write_image_model,
)
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.pixtral.processing_pixtral import PixtralProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.processing_utils import ProcessorMixin

from headwise.runtime.loader.chat import ChatTemplate, plain_chat
from headwise.runtime.loader.safetensors_file import SafetensorsFile
from headwise.runtime.loader.tokenizer import Tokenizer

PROMPTS: dict[str, tuple[str, ...]] = {
    "one": ("odd",),
    "two": ("large", "exact"),
    "same": ("tall", "tall"),
    "none": (),
    "each": tuple(SIZES),
}


def spread(values: np.ndarray, most: int = 64) -> dict[str, Any]:
    flat = values.reshape(-1).astype(np.float64)
    at = np.unique(np.linspace(0, len(flat) - 1, most).astype(int))
    return {
        "shape": list(values.shape),
        "sum": round(float(np.abs(flat).sum()), 4),
        "at": at.tolist(),
        "values": [round(float(each), 6) for each in flat[at]],
    }


class Kind:
    """What a family's processor and tower are called with."""

    def pixels(self, given: Any) -> torch.Tensor:
        return given["pixel_values"][0].float()

    def ids(self, ids: list[int]) -> dict[str, Any]:
        """What the model takes besides a prompt's tokens where there are images."""
        return {}


class Mistral3(Kind):
    """Pixtral's processing, with Pillow: of torchvision's, pixels may differ by a level."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._processor = PixtralImageProcessorPil(size={"longest_edge": LONGEST}, patch_size=PATCH * MERGE)
        self._form = SimpleNamespace(
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            image_token="[IMG]",
            image_break_token="[IMG_BREAK]",
            image_end_token="[IMG_END]",
        )

    def inputs(self, name: str) -> Any:
        return self._processor(picture(name), return_tensors="pt", patch_size=PATCH * MERGE)

    def features(self, given: Any) -> torch.Tensor:
        found = self._model.model.get_image_features(
            given["pixel_values"], given["image_sizes"], vision_feature_layer=-1, return_dict=True
        )
        return torch.cat(list(found.pooler_output))

    def sizes(self, given: Any) -> list[int]:
        return given["image_sizes"][0].tolist()

    def text(self, given: Any) -> str:
        return PixtralProcessor.replace_image_token(self._form, given, 0)

    def together(self, given: list[Any]) -> dict[str, Any]:
        """Padded to one size, as transformers takes images of several."""
        height, width = (max(int(each["image_sizes"][0][axis]) for each in given) for axis in (0, 1))
        pixels = [each["pixel_values"] for each in given]
        padded = [torch.nn.functional.pad(p, (0, width - p.shape[3], 0, height - p.shape[2])) for p in pixels]
        return {"pixel_values": torch.cat(padded), "image_sizes": torch.cat([each["image_sizes"] for each in given])}


class Llama4(Kind):
    """Tiles; in bfloat16, as its processor gives them, and computed with in float32."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._processor = Llama4ImageProcessor(size={"height": 16, "width": 16}, max_patches=4)

    def inputs(self, name: str) -> Any:
        return self._processor(picture(name), return_tensors="pt")

    def features(self, given: Any) -> torch.Tensor:
        pixels = given["pixel_values"].float()
        found = self._model.get_image_features(pixels).last_hidden_state
        return self._model.multi_modal_projector(found.reshape(-1, found.shape[-1]))

    def sizes(self, given: Any) -> list[int]:
        return given["aspect_ratios"][0].tolist()

    def text(self, given: Any) -> str:
        return Llama4Processor._prompt_split_image(None, given["aspect_ratios"][0], 4)

    def together(self, given: list[Any]) -> dict[str, Any]:
        return {"pixel_values": torch.cat([each["pixel_values"].float() for each in given])}


class KimiK25(Kind):
    """Patches, cut beforehand."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._processor = Kimi_K25ImageProcessor(**KIMI.processor)

    def inputs(self, name: str) -> Any:
        return self._processor(picture(name), return_tensors="pt")

    def features(self, given: Any) -> torch.Tensor:
        return torch.cat(list(self._model.get_image_features(**given).pooler_output))

    def sizes(self, given: Any) -> list[int]:
        return given["image_grid_thw"][0].tolist()[1:]

    def text(self, given: Any) -> str:
        form = SimpleNamespace(image_processor=self._processor, image_token="<|media_pad|>")
        return Kimi_K25Processor.replace_image_token(form, given, 0)

    def together(self, given: list[Any]) -> dict[str, Any]:
        return {name: torch.cat([each[name] for each in given]) for name in ("pixel_values", "image_grid_thw")}


class Gridded(Kind):
    """Patches in squares, as Qwen2-VL's and GLM-4.1V's processing cuts them, with Pillow; of a Qwen3-VL features of
    several layers."""

    def __init__(self, model: Any, family: Family) -> None:
        self._model, self._image_token = model, family.tokens[0]
        self._form, self._id = FORMS.get(family.name, QWEN), family.id_of(self._image_token)
        self._processor = self._form[0](**family.processor)

    def inputs(self, name: str) -> Any:
        return self._processor(picture(name), return_tensors="pt")

    def pixels(self, given: Any) -> torch.Tensor:
        return given["pixel_values"]

    def features(self, given: Any) -> torch.Tensor:
        found = self._model.get_image_features(**given, return_dict=True)
        added = getattr(found, "deepstack_features", None) or []
        return torch.cat([torch.cat(list(each)) for each in (found.pooler_output, *added)], dim=1)

    def sizes(self, given: Any) -> list[int]:
        return given["image_grid_thw"][0].tolist()[1:]

    def text(self, given: Any) -> str:
        form = SimpleNamespace(image_processor=self._processor, image_token=self._image_token)
        return self._form[1].replace_image_token(form, given, 0)

    def together(self, given: list[Any]) -> dict[str, Any]:
        return {name: torch.cat([each[name] for each in given]) for name in ("pixel_values", "image_grid_thw")}

    def ids(self, ids: list[int]) -> dict[str, Any]:
        return {"mm_token_type_ids": (torch.tensor([ids]) == self._id).int()}


QWEN, GLM = (Qwen2VLImageProcessorPil, Qwen2VLProcessor), (Glm4vImageProcessorPil, Glm4vProcessor)
ERNIE = Ernie4_5_VLMoeImageProcessorPil, Qwen2VLProcessor
FORMS: dict[str, Any] = {ERNIE_VL.name: ERNIE, **dict.fromkeys(GLMS, GLM)}


class Gemma3(Kind):
    """One size, with Pillow; an image's tokens see each other by their types."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._processor = Gemma3ImageProcessorPil(**GEMMA3.processor)

    def inputs(self, name: str) -> Any:
        return self._processor(picture(name), return_tensors="pt")

    def features(self, given: Any) -> torch.Tensor:
        return self._model.model.get_image_features(given["pixel_values"], return_dict=True).pooler_output[0]

    def sizes(self, given: Any) -> list[int]:
        return list(given["pixel_values"].shape[2:])

    def text(self, given: Any) -> str:
        image, start, end = GEMMA3.tokens
        tokenizer = SimpleNamespace(image_token=image, boi_token=start, boi_token_id=0, eoi_token=end)
        with mock.patch.object(ProcessorMixin, "__init__"):  # which wants a tokenizer of transformers'
            form = Gemma3Processor(None, tokenizer, image_seq_length=GEMMA3.config["mm_tokens_per_image"])
        return form.replace_image_token({"num_crops": [0]}, 0)

    def ids(self, ids: list[int]) -> dict[str, Any]:
        return {"token_type_ids": torch.tensor([[int(each == GEMMA3.id_of("<image_soft_token>")) for each in ids]])}

    def together(self, given: list[Any]) -> dict[str, Any]:
        return {"pixel_values": torch.cat([each["pixel_values"] for each in given])}


class Gemma4(Kind):
    """Patches, cut and padded beforehand."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._processor = Gemma4ImageProcessorPil(**GEMMA4.processor)

    def inputs(self, name: str) -> Any:
        return self._processor(picture(name), return_tensors="pt")

    def features(self, given: Any) -> torch.Tensor:
        return torch.cat(list(self._model.model.get_image_features(**_patches(given)).pooler_output))

    def sizes(self, given: Any) -> list[int]:
        columns, rows = (given["image_position_ids"][0].amax(0) + 1).tolist()
        return [rows, columns]

    def text(self, given: Any) -> str:
        image, start, end = GEMMA4.tokens
        form = SimpleNamespace(image_token=image, boi_token=start, eoi_token=end)
        return Gemma4Processor.replace_image_token(form, given, 0)

    def ids(self, ids: list[int]) -> dict[str, Any]:
        return {"mm_token_type_ids": torch.tensor([[int(each == GEMMA4.id_of("<|image|>")) for each in ids]])}

    def together(self, given: list[Any]) -> dict[str, Any]:
        each = [_patches(one) for one in given]
        return {name: torch.cat([one[name] for one in each]) for name in each[0]}


def _patches(given: Any) -> dict[str, Any]:
    return {name: given[name] for name in ("pixel_values", "image_position_ids")}


class Ernie(Gridded):
    """The same, and tokens around an image go to its experts, too."""

    def ids(self, ids: list[int]) -> dict[str, Any]:
        around = [ERNIE_VL.id_of("<|IMAGE_START|>"), ERNIE_VL.id_of("<|IMAGE_END|>")]
        kinds = np.isin([ids], [self._id, *around]).astype(np.int32)
        return {**super().ids(ids), "moe_mm_token_type_ids": torch.from_numpy(kinds)}


_PUBLISHED = {
    "model.mm_projector.": "mm_projector.",
    ".encoder.patch_embed.": ".patch_embed.",
    "language_model.model.blocks.": "language_model.model.layers.",
}
"""Parts of Kimi-K2.5's names that transformers does not write as they are published, though it reads those."""


def _published(name: str) -> str:
    for written, published in _PUBLISHED.items():
        name = name.replace(written, published)
    return name


def load(family: Family, scratch: Path) -> tuple[Any, Path, dict[str, list[int]]]:
    """The model, all of whose weights transformers has found a use for, its directory, and the weights' shapes."""
    (scratch / "config.json").write_text(json.dumps(family.config))
    empty = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(scratch), dtype=torch.float32)
    empty.save_pretrained(scratch / "names")
    saved = SafetensorsFile(scratch / "names" / "model.safetensors")
    shapes = {_published(name): list(saved.shape(name)) for name in saved.names}
    directory = write_image_model(scratch / "model", family, shapes)
    model, loading = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval(), directory, shapes


@torch.inference_mode()
def make(name: str) -> None:
    family = FAMILIES[name]
    model, directory, shapes = load(family, Path(tempfile.mkdtemp()))
    kinds = {"mistral3": Mistral3, "llama4": Llama4, "kimi-k25": KimiK25, "gemma3": Gemma3, "gemma4": Gemma4}
    on_grid = Ernie if name == ERNIE_VL.name else Gridded
    kind = kinds[name](model) if name in kinds else on_grid(model, family)
    inputs = {each: kind.inputs(each) for each in SIZES}
    images = {
        each: {
            "sizes": kind.sizes(given),
            "pixels": spread(kind.pixels(given).numpy()),
            "features": spread(kind.features(given).numpy()),
        }
        for each, given in inputs.items()
    }
    tokenizer = Tokenizer.from_directory(directory)
    prompts = []
    for prompt, its in PROMPTS.items():
        parts = [{"type": "image"} for _ in its] + [{"type": "text", "text": f"Look at {prompt}, the image."}]
        chat = plain_chat([{"role": "user", "content": parts if its else "Look at none."}])
        text = ChatTemplate(family.template, {}).render(chat, True)  # as it is before headwise reads it
        before, *behind = text.split(family.written or family.tokens[0])
        whole = before + "".join(kind.text(inputs[each]) + rest for each, rest in zip(its, behind, strict=True))
        ids = tokenizer.encode(whole, add_special_tokens=False)
        more = {**kind.together([inputs[each] for each in its]), **kind.ids(ids)} if its else {}
        if isinstance(kind, Gridded):
            model.model.rope_deltas = None  # it keeps the last prompt's
        prompts.append({"images": list(its), **answer(model, prompt, ids, more)})
        distinct = len(set(prompts[-1]["output_ids"]))
        if name in ("kimi-k25", "gemma4"):  # where the model itself says this one, transformers goes on with another
            said = [*prompts[-1]["output_ids"], FIRST_ID].index(FIRST_ID)
            assert said >= 32, "choose another size of the vocabulary"
            prompts[-1]["gaps"][said + 1 :] = [0.0] * (NEW_TOKENS - said - 1)  # nobody judges by what follows
        print(name, prompt, len(ids), f"{distinct} different tokens, least gap {min(prompts[-1]['gaps'])}")
    lines = ",\n".join(json.dumps(each) for each in prompts)
    head = {"transformers": transformers.__version__, "shapes": shapes, "images": images}
    (REFERENCES / f"images-{name}.json").write_text(f'{json.dumps(head)[:-1]}, "prompts": [\n{lines}\n]}}\n')


def answer(model: Any, name: str, ids: list[int], more: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens and by how much each was the best."""
    step = model(torch.tensor([ids]), use_cache=True, **more)
    output, gaps = [], []
    for _ in range(NEW_TOKENS):
        best = torch.topk(step.logits[0, -1], 2)
        output.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        step = model(torch.tensor([[output[-1]]]), past_key_values=step.past_key_values, use_cache=True)
    return {"name": name, "prompt_ids": ids, "output_ids": output, "gaps": gaps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(FAMILIES))
    torch.set_num_threads(1)
    for name in parser.parse_args().models:
        make(name)


if __name__ == "__main__":
    main()
