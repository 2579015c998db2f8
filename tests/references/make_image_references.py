"""Write what transformers computes in float32 for images of a tiny random model: `images.json`.

    PYTHONPATH=tests python tests/references/make_image_references.py

Needs torch, transformers and Pillow. `support.tiny_images` has the config, draws the weights, and makes the images. The
file holds:

    shapes   each weight's shape
    images   per image: the sizes that it is scaled to, its pixels and what the projector makes of it, as the sums of
             absolute values and some of the numbers themselves, spread evenly
    prompts  as `make_references.py` writes them, with ``images``: the names of theirs, whose tokens are as the
             processor of Pixtral writes them
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from make_references import NEW_TOKENS
from support.tiny_images import CONFIG, IMG, LONGEST, MERGE, PATCH, REFERENCES, SIZES, picture, write_image_model
from transformers import Mistral3Config, Mistral3ForConditionalGeneration
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

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


def text_of(processor: SimpleNamespace, name: str, sizes: Any) -> str:
    """What `PixtralProcessor.replace_image_token` writes, which needs torchvision to be called."""
    rows, columns = (int(size) // (processor.patch_size * processor.spatial_merge_size) for size in sizes)
    tokens = ([processor.image_token] * columns + [processor.image_break_token]) * rows
    return "".join([*tokens[:-1], processor.image_end_token])


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp())
    plain = {key: value for key, value in CONFIG.items() if key != "architectures"}
    model = Mistral3ForConditionalGeneration(Mistral3Config(**json.loads(json.dumps(plain)))).float().eval()
    model.save_pretrained(scratch / "names")
    saved = SafetensorsFile(scratch / "names" / "model.safetensors")
    shapes = {name: list(saved.shape(name)) for name in saved.names}
    directory = write_image_model(scratch / "model", shapes)
    model, loading = Mistral3ForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    model = model.eval()
    form = SimpleNamespace(
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    processor = PixtralImageProcessorPil(size={"longest_edge": LONGEST}, patch_size=PATCH * MERGE)
    images, inputs = {}, {}
    for name in SIZES:
        given = processor(picture(name), return_tensors="pt", patch_size=PATCH * MERGE)
        found = model.model.get_image_features(
            given["pixel_values"], given["image_sizes"], vision_feature_layer=-1, return_dict=True
        )
        inputs[name] = given
        images[name] = {
            "sizes": given["image_sizes"][0].tolist(),
            "pixels": spread(given["pixel_values"][0].numpy()),
            "features": spread(torch.cat(list(found.pooler_output)).numpy()),
        }
    tokenizer = Tokenizer.from_directory(directory)
    prompts = []
    for name, its in PROMPTS.items():
        parts = [{"type": "image"} for _ in its] + [{"type": "text", "text": f"Look at {name}, the image."}]
        text = (
            tokenizer.render_chat([{"role": "user", "content": parts}])
            if its
            else tokenizer.render_chat([{"role": "user", "content": "Look at none."}])
        )
        for each in its:
            text = text.replace("[IMG]", "\0" + text_of(form, each, images[each]["sizes"]).replace("[IMG]", "\1"), 1)
        ids = tokenizer.encode(text.replace("\0", "").replace("\1", "[IMG]"), add_special_tokens=False)
        prompts.append({"images": list(its), **answer(model, name, ids, [inputs[each] for each in its])})
        distinct = len(set(prompts[-1]["output_ids"]))
        print(name, len(ids), ids.count(IMG), f"{distinct} different tokens, least gap {min(prompts[-1]['gaps'])}")
    lines = ",\n".join(json.dumps(each) for each in prompts)
    head = {"transformers": transformers.__version__, "shapes": shapes, "images": images}
    REFERENCES.write_text(f'{json.dumps(head)[:-1]}, "prompts": [\n{lines}\n]}}\n')


def answer(model: Any, name: str, ids: list[int], given: list[Any]) -> dict[str, Any]:
    """Greedy tokens and by how much each was the best. Images are padded to one size, as transformers takes them."""
    more: dict[str, Any] = {}
    if given:
        height, width = (max(int(each["image_sizes"][0][axis]) for each in given) for axis in (0, 1))
        pad = [
            torch.nn.functional.pad(
                each["pixel_values"],
                (0, width - each["pixel_values"].shape[3], 0, height - each["pixel_values"].shape[2]),
            )
            for each in given
        ]
        more = {"pixel_values": torch.cat(pad), "image_sizes": torch.cat([each["image_sizes"] for each in given])}
    step = model(torch.tensor([ids]), use_cache=True, **more)
    output, gaps = [], []
    for _ in range(NEW_TOKENS):
        best = torch.topk(step.logits[0, -1], 2)
        output.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        step = model(torch.tensor([[output[-1]]]), past_key_values=step.past_key_values, use_cache=True)
    return {"name": name, "prompt_ids": ids, "output_ids": output, "gaps": gaps}


if __name__ == "__main__":
    main()
