"""A model's vision tower, with its weights: files of images in, what stands for them in a prompt out."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwise.cores import usable_cores
from headwise.errors import ConfigError, InvalidRequestError, ModelError
from headwise.kernels.bfloat16 import to_bits
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.encoder.embed_cache import EmbedCache
from headwise.runtime.encoder.images import check_pillow, decode
from headwise.runtime.loader.checkpoint import read_json
from headwise.runtime.loader.quantised_checkpoint import open_weights
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.models.towers.base import Tower, TowerParts
from headwise.runtime.models.towers.select import tower_of
from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.select import make_ops
from headwise.runtime.protocol.images import MAX_IMAGE_EMBED_BYTES, EncodedImage, named
from headwise.units import parse_bytes

_MOST_BYTES = MAX_IMAGE_EMBED_BYTES - (1 << 20)
"""Of an image's embeddings, where its tower can scale it down to as few: with its tokens they are one message."""


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
        most = _MOST_BYTES // (2 if as_bfloat16 else 4)
        parts = TowerParts(settings, _processor(directory), weights, place.ops, tokenizer.control_token, most)
        if tokenizer.control_token(kind.placeholder) is None:
            raise ModelError(
                f"{kind.placeholder}, which stands for an image, is no control token of the model's tokenizer: users "
                "could write it"
            )
        with place.current():
            tower = kind.build(parts)
        return cls(tower, parse_bytes(config.image_cache), as_bfloat16, place)

    def encode(self, data: bytes) -> EncodedImage:
        """Of an image's file. Raises `InvalidRequestError` if it is none, or larger than a request may be."""
        key = hashlib.sha256(data).digest()
        with self._lock:
            found = self.cache.get(key)
            if found is None:
                found = self._encode(data)
                self.cache.put(key, found)
            return found

    def _encode(self, data: bytes) -> EncodedImage:
        image = decode(data)
        with self._place.current():
            made = self._tower.encode(image)
        if not np.isfinite(made.embeds).all():
            raise InvalidRequestError("the vision tower makes numbers of this image that are not finite")
        embeds = to_bits(made.embeds) if self._as_bfloat16 else np.ascontiguousarray(made.embeds, np.float32)
        if embeds.nbytes > MAX_IMAGE_EMBED_BYTES:
            raise InvalidRequestError(
                f"the image's {len(embeds)} tokens take {embeds.nbytes} bytes; at most {MAX_IMAGE_EMBED_BYTES} can be "
                "sent: make it smaller"
            )
        embeds.flags.writeable = False
        return named(embeds, made.tokens, made.columns, made.is_framed)

    def warm_up(self) -> None:
        """Compile what the first images would wait for: nobody is answered meanwhile."""
        from PIL import Image

        for size in ((8, 8), (256, 256)):
            with self._place.current():
                self._tower.encode(Image.new("RGB", size))

    def stats(self) -> dict[str, int]:
        cache = self.cache
        return {"images": len(cache), "bytes": cache.num_bytes, "hits": cache.hits, "misses": cache.misses}


def check_images(config: EngineConfig, directory: Path) -> None:
    """Raise why images cannot be served of the model in ``directory``, before anything is started; they may be off."""
    if config.image_encoders:
        check_pillow()
        tower_of(read_json(directory / "config.json"))
    if config.image_encoder_gpus and not config.on_gpu:
        raise ConfigError(
            f"image_encoder_gpus {config.image_encoder_gpus:g} needs device cuda, got {config.device}: leave it out"
        )


def _processor(directory: Path) -> Mapping[str, Any]:
    """What a checkpoint says of how images are prepared; empty: nothing."""
    for name, field in (("processor_config.json", "image_processor"), ("preprocessor_config.json", "")):
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
