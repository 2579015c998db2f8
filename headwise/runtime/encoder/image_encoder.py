"""A model's vision tower, with its weights: files of images and videos in, what stands for them in a prompt out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.cache_controller.block_hash import ExtraKey
from headwise.cores import usable_cores
from headwise.errors import ConfigError, InvalidRequestError, ModelError
from headwise.kernels.bfloat16 import to_bits
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.encoder.embed_cache import EmbedCache
from headwise.runtime.encoder.images import check_pillow, decode
from headwise.runtime.encoder.videos import VideoFile, has_decoder
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.loader.checkpoint import read_json
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.models.towers import base as towers
from headwise.runtime.models.towers.base import FRAMES, Tower, TowerParts, VideoTower
from headwise.runtime.models.towers.select import tower_of
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.select import make_ops
from headwise.runtime.protocol.images import (
    MAX_IMAGE_EMBED_BYTES,
    EncodedImage,
    PromptImage,
    named,
)
from headwise.runtime.protocol.prompt_items import check_bytes
from headwise.units import parse_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """current: for as long as its context lasts, this thread's work goes to where the operations compute"""

    ops: TensorOps
    current: Callable[[], AbstractContextManager[Any]] = nullcontext


class ImageEncoder:
    """Encodes one image at a time, whichever thread asks, and keeps what it made of the latest ones.

    as_bfloat16: whether embeddings are given in bfloat16: the model computes in it, so no token depends on that
    """

    def __init__(self, tower: Tower, cache_bytes: int, as_bfloat16: bool, place: Place) -> None:
        self._tower = tower
        self._place = place
        self._as_bfloat16 = as_bfloat16
        self.cache = EmbedCache(cache_bytes)
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        directory: Path,
        tokenizer: Tokenizer | None = None,
        place: Place | None = None,
    ) -> ImageEncoder:
        """Load the tower of the model in ``directory``.

        place: where it computes; None: on this process's CPU cores

        Raises `ModelError` if the model has none that is served, and `ConfigError` where Pillow lacks.
        """
        check_pillow()
        settings = read_json(directory / "config.json")
        kind = tower_of(settings)
        tokenizer = tokenizer or Tokenizer.from_directory(directory, config.chat_template)
        place = place or Place(_ops(config))
        weights = open_weights(directory)
        as_bfloat16 = config.dtype_name == "bfloat16"
        number = 2 if as_bfloat16 else 4
        parts = TowerParts(
            settings,
            _processor(directory, "image_processor", "preprocessor_config.json"),
            weights,
            place.ops,
            tokenizer.control_token,
            MAX_IMAGE_EMBED_BYTES // number,
            _processor(directory, "video_processor", "video_preprocessor_config.json"),
            partial(tokenizer.encode, add_special_tokens=False),
        )
        if tokenizer.control_token(kind.placeholder) is None:
            raise ModelError(
                f"{kind.placeholder}, which stands for an image, is no control token of the model's tokenizer: users "
                "could write it"
            )
        with place.current():
            tower = kind.build(parts)
        log.info("encodes %s on %s, keeps %s of it", _taken(tower), place.ops.name, config.image_cache)
        return cls(tower, parse_bytes(config.image_cache), as_bfloat16, place)

    def encode(self, file: ImageFile) -> Iterator[EncodedImage | None]:
        """What stands for it comes last; before, None for each part of a video that is done, and for some frames that
        are decoded: each takes about as long as an image. Raises `InvalidRequestError` if it is none, or larger than a
        request may be."""
        with self._lock:
            found = self.cache.get(file.digest)
        if found is not None:
            yield found
            return
        if file.is_video:
            made = yield from self._steps_of_video(file)
        else:
            with self._lock:
                made = self._of_image(file.data)
        with self._lock:
            self.cache.put(file.digest, made)
        yield made

    def whole(self, file: ImageFile) -> EncodedImage:
        """The same at once."""
        *_, made = self.encode(file)
        assert made is not None
        return made

    def _of_image(self, data: bytes) -> EncodedImage:
        image = decode(data)
        with self._place.current():
            made = self._tower.encode(image)
        embeds = self._numbers(made.embeds)
        if embeds.nbytes > MAX_IMAGE_EMBED_BYTES:
            raise InvalidRequestError(
                f"the image's {len(embeds)} tokens take {embeds.nbytes} bytes; at most {MAX_IMAGE_EMBED_BYTES} can be "
                "sent: make it smaller"
            )
        embeds.flags.writeable = False
        return named(_prompt_image(made), embeds)

    def _steps_of_video(self, file: ImageFile) -> Generator[None, None, EncodedImage]:
        if not isinstance(self._tower, VideoTower):
            raise InvalidRequestError("this model takes no videos, or they are not served: send frames, as images")
        video = VideoFile(file.data)
        plan = self._tower.plan(video.form, file.fps)
        lengths = [each.end - each.start for each in plan.items]
        images, done = video.images(plan.frames), 0
        embeds: NDArray[Any] = np.empty((0, 0))
        for length in lengths:
            frames: list[Image] = []
            while len(frames) < FRAMES:
                image = next(images)
                if image is None:
                    yield
                else:
                    frames.append(image)
            with self._lock, self._place.current():
                made = self._numbers(self._tower.encode_part(frames, plan))
            if not embeds.size:
                check_bytes(made.shape[1] * made.itemsize * sum(lengths))
                embeds = np.empty((sum(lengths), made.shape[1]), made.dtype)
            embeds[done : done + length] = made
            done += length
            yield
        embeds.flags.writeable = False
        return named(PromptImage(plan.tokens, plan.items, plan.around, is_video=True), embeds)

    def _numbers(self, made: NDArray[np.float32]) -> NDArray[np.float32] | NDArray[np.uint16]:
        if not np.isfinite(made).all():
            raise InvalidRequestError("the vision tower makes numbers of this image that are not finite")
        return to_bits(made) if self._as_bfloat16 else np.ascontiguousarray(made, np.float32)

    def warm_up(self) -> None:
        """Compile what the first images would wait for: nobody is answered meanwhile."""
        from PIL import Image

        for size in ((8, 8), (256, 256)):
            with self._place.current():
                self._tower.encode(Image.new("RGB", size))

    def stats(self) -> dict[str, int]:
        cache = self.cache
        return {"images": len(cache), "bytes": cache.num_bytes, "hits": cache.hits, "misses": cache.misses}


def _taken(tower: Tower) -> str:
    """What is encoded, in words."""
    if not isinstance(tower, VideoTower):
        return "images, and no videos: the model's are not served"
    return "images and videos" if has_decoder() else "images, and no videos: pip install 'headwise[videos]'"


def check_images(config: EngineConfig, directory: Path) -> None:
    """Raise why images cannot be served of the model in ``directory``, before anything is started; they may be off."""
    if config.image_encoders:
        check_pillow()
        tower_of(read_json(directory / "config.json"))
    if config.image_encoder_gpus and not config.on_gpu:
        raise ConfigError(
            f"image_encoder_gpus {config.image_encoder_gpus:g} needs device cuda, got {config.device}: leave it out"
        )


def _prompt_image(made: towers.EncodedImage) -> PromptImage:
    """Of what a tower has made, without its items' names."""
    tokens, length = made.tokens, len(made.tokens)
    if not made.is_framed:
        return PromptImage(tokens, (ExtraKey(0, length, "", made.columns),))
    items = (ExtraKey(0, 1, ""), ExtraKey(1, length - 1, "", made.columns), ExtraKey(length - 1, length, ""))
    return PromptImage(tokens, items, (int(tokens[0]), int(tokens[-1])))


def _processor(directory: Path, part: str, file: str) -> Mapping[str, Any]:
    """What a checkpoint says of how images, or videos, are prepared, in a part of its processor's file, or in a file
    of their own; empty: nothing."""
    for name, field in (("processor_config.json", part), (file, "")):
        if not (directory / name).is_file():
            continue
        found = read_json(directory / name)
        chosen = found.get(field) if field else found
        if isinstance(chosen, Mapping):
            return chosen
    return {}


def _ops(config: EngineConfig) -> TensorOps:
    """On CPU cores, also where engines compute on GPUs."""
    threads = int(config.image_encoder_cpus) or usable_cores()
    if config.on_gpu or config.tensor_ops == "cupy":
        return make_ops("auto", threads, weights_dtype="float32" if config.dtype_name == "float32" else "bfloat16")
    return make_ops(config.tensor_ops, threads, config.dtype_name, config.dtype_name)
