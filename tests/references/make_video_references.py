"""Write what transformers computes in float32 for videos of tiny random models: `videos-NAME.json`.

    PYTHONPATH=tests python tests/references/make_video_references.py [NAME ...]

Needs what `make_image_references.py` needs, whose references it takes the weights' shapes from. `support.tiny_videos`
has the videos. Each file holds:

    plans    by form of a video: which frames are taken, and in how many patches
    films    by video: what its processor makes of its frames, and what the tower makes of these
    prompts  as `make_references.py` writes them, with ``films``: the names of theirs, whose tokens are as the model's
             processor writes them

Positions behind a video of Qwen2-VL and Qwen2.5-VL are those of the models' own code: behind the last time, where that
is more than rows and columns. transformers 5.19 leaves time out; 4 had it. So no video here is so long.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from make_image_references import answer, load, spread
from support.tiny_images import FILMING, GLMS, REFERENCES, Family
from support.tiny_videos import ASKED, FILMS, FORMS, Form, frames
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from headwise.runtime.loader.chat import ChatTemplate, plain_chat
from headwise.runtime.loader.tokenizer import Tokenizer

PROMPTS = {"first": ("exact",), "both": ("odd", "exact"), "again": ("exact", "exact"), "still": ("single",)}
KINDS: dict[str, tuple[Any, Any]] = {
    "qwen2-vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
    "qwen2.5-vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
    "qwen3-vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    "qwen3.5": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    "glm4v": (Glm4vProcessor, Glm4vVideoProcessor),
    "glm4v-moe": (Glm46VProcessor, Glm46VVideoProcessor),
}


class Videos:
    """What a model's processor makes of videos."""

    def __init__(self, name: str) -> None:
        self.family: Family = FILMING[name]
        self._kind, make = KINDS[name]
        named = {key: value for key, value in self.family.videos.items() if key != "processor_class"}
        more = {} if name in GLMS else {"cap_pixels_per_frame": True}
        self._processor = make(**named, **more, do_sample_frames=True)

    @property
    def place(self) -> str:
        """What of the template's text the processor replaces."""
        return "<|video_pad|>" if self._kind in (Qwen2VLProcessor, Qwen2_5_VLProcessor) else self.family.film

    def metadata(self, form: Form) -> VideoMetadata:
        return VideoMetadata(
            form.frames, fps=form.fps, width=form.width, height=form.height, duration=form.frames / form.fps
        )

    def chosen(self, form: Form) -> list[int]:
        """Frames by number. Of a single one the processor of Qwen2-VL takes none, where the model has it twice."""
        if form.frames == 1 and self.family.name not in GLMS:
            return [0]
        more = {} if self.family.name in GLMS else {"fps": ASKED}
        found = self._processor.sample_frames(self.metadata(form), **more)
        return [int(each) for each in found] or [0]  # GLM-4.6V's takes none of less than a sixth of a second

    def grid(self, form: Form) -> list[int]:
        """In time, rows and columns of patches."""
        given = torch.zeros((1, len(self.chosen(form)), 3, form.height, form.width), dtype=torch.uint8)
        return self.of(given[0], form)["video_grid_thw"][0].tolist()

    def of(self, chosen: Any, form: Form) -> Any:
        if len(chosen) == 1:  # transformers pads behind scaling, and scales no single frame
            chosen = torch.cat([chosen, chosen])
        return self._processor(videos=[chosen], do_sample_frames=False, return_tensors="pt")

    def inputs(self, name: str) -> Any:
        form, images = FILMS[name], frames(name)
        chosen = torch.stack([torch.from_numpy(np.array(images[at])).permute(2, 0, 1) for at in self.chosen(form)])
        return self.of(chosen, form)

    def text(self, name: str, given: Any) -> str:
        metadata = self.metadata(FILMS[name])
        metadata.frames_indices = self.chosen(FILMS[name])
        form = SimpleNamespace(
            image_processor=self._processor,
            video_processor=self._processor,
            video_token="<|video_pad|>",
            vision_start_token="<|vision_start|>",
            vision_end_token="<|vision_end|>",
        )
        form._calculate_timestamps = lambda *given: Qwen3VLProcessor._calculate_timestamps(form, *given)
        form.image_token = "<|image|>"
        form.replace_frame_token_id = lambda *given, **named: self._kind.replace_frame_token_id(form, *given, **named)
        frames_of = self._kind.replace_video_token(form, {**given, "video_metadata": [metadata]}, 0)
        return self.family.film.replace("<|video|>", frames_of) if self.family.name in GLMS else frames_of

    def types(self, ids: list[int]) -> torch.Tensor:
        """Which tokens are of a video."""
        token = "<|image|>" if self.family.name in GLMS else "<|video_pad|>"
        return 2 * (torch.tensor([ids]) == self.family.id_of(token)).int()

    def seconds(self, name: str) -> float:
        """Of a part: `Qwen2_5_VLProcessor._process_videos`."""
        form = FILMS[name]
        return 2 / (len(self.chosen(form)) / form.frames * form.fps)


@torch.inference_mode()
def make(name: str) -> None:
    family, videos = FILMING[name], Videos(name)
    model, directory, _ = load(family, Path(tempfile.mkdtemp()))
    plans = {each: {"frames": videos.chosen(form), "grid": videos.grid(form)} for each, form in FORMS.items()}
    inputs = {each: videos.inputs(each) for each in FILMS}
    films = {}
    for each, given in inputs.items():
        found = model.get_video_features(**given, return_dict=True)
        added = getattr(found, "deepstack_features", None) or []
        features = torch.cat([torch.cat(list(part)) for part in (found.pooler_output, *added)], dim=1)
        films[each] = {"pixels": spread(given["pixel_values_videos"].numpy()), "features": spread(features.numpy())}
    tokenizer = Tokenizer.from_directory(directory)
    prompts = []
    for prompt, its in PROMPTS.items():
        parts = [{"type": "video"} for _ in its] + [{"type": "text", "text": f"Look at {prompt}, the video."}]
        text = ChatTemplate(family.template, {}).render(plain_chat([{"role": "user", "content": parts}]), True)
        before, *behind = text.split(videos.place)
        whole = before + "".join(videos.text(each, inputs[each]) + rest for each, rest in zip(its, behind, strict=True))
        ids = tokenizer.encode(whole, add_special_tokens=False)
        more = {
            key: torch.cat([inputs[each][key] for each in its]) for key in ("pixel_values_videos", "video_grid_thw")
        }
        more["mm_token_type_ids"] = videos.types(ids)
        if name == "qwen2.5-vl":
            more["second_per_grid_ts"] = torch.tensor([videos.seconds(each) for each in its])
        model.model.rope_deltas = None  # it keeps the last prompt's
        prompts.append({"films": list(its), **answer(model, prompt, ids, more)})
        distinct = len(set(prompts[-1]["output_ids"]))
        print(name, prompt, len(ids), f"{distinct} different tokens, least gap {min(prompts[-1]['gaps'])}")
    lines = ",\n".join(json.dumps(each) for each in prompts)
    head = {"transformers": transformers.__version__, "plans": plans, "films": films}
    (REFERENCES / f"videos-{name}.json").write_text(f'{json.dumps(head)[:-1]}, "prompts": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(FILMING))
    torch.set_num_threads(1)
    for name in parser.parse_args().models:
        make(name)


if __name__ == "__main__":
    main()
