"""What was made of the latest images."""

from __future__ import annotations

from collections import OrderedDict

from headwise.runtime.protocol.images import EncodedImage


class EmbedCache:
    """Encoded images by their files' hashes. The least recently used go first, beyond ``max_bytes`` of embeddings.

    hits, misses: how often one was there, and was not
    num_bytes:    of the embeddings that are kept
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self.num_bytes = self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._images)

    def get(self, key: bytes) -> EncodedImage | None:
        found = self._images.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._images.move_to_end(key)
        return found

    def put(self, key: bytes, image: EncodedImage) -> None:
        if key in self._images or image.embeds.nbytes > self._max_bytes:
            return
        self._images[key] = image
        self.num_bytes += image.embeds.nbytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._images.popitem(last=False)
            self.num_bytes -= oldest.embeds.nbytes
