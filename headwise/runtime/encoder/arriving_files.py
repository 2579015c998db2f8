"""Files of images and videos that come in parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwise.errors import InvalidRequestError
from headwise.runtime.encoder.job_queue import Job
from headwise.runtime.loader.chat_images import MAX_FPS, ImageFile
from headwise.runtime.protocol.encoder_messages import Encode, FilePart
from headwise.runtime.protocol.images import IMAGE_LIMITS


@dataclass
class _Arriving:
    """heard: when its last part came"""

    job: Job
    encode: Encode
    heard: float
    data: bytearray = field(default_factory=bytearray)


class ArrivingFiles:
    """Used by the socket's thread. Whoever begins a file has made room for it (`JobQueue.admit`)."""

    def __init__(self) -> None:
        self._files: dict[tuple[bytes, int], _Arriving] = {}

    def begin(self, job: Job, encode: Encode, now: float) -> int | None:
        """The first byte that is to come next; None: all of the file is there, the job has it."""
        arriving = self._files[job.client, job.key] = _Arriving(job, encode, now)
        return self._take(arriving, encode.data)

    def take(self, client: bytes, part: FilePart, now: float) -> tuple[Job, int | None] | None:
        """The job whose file it is of, and what `begin` returns; None: nobody waits for it. Raises
        `InvalidRequestError` for another part than the next one: the file is forgotten."""
        arriving = self._files.get((client, part.key))
        if arriving is None:
            return None
        arriving.heard = now
        left = arriving.encode.size - len(arriving.data)
        if part.first != len(arriving.data) or not 0 < len(part.data) <= left:
            del self._files[client, part.key]
            raise InvalidRequestError(
                f"{len(part.data)} bytes of a file from byte {part.first} on came where byte {len(arriving.data)} of "
                f"{arriving.encode.size} is next"
            )
        return arriving.job, self._take(arriving, part.data)

    def drop(self, client: bytes, key: int | None = None) -> None:
        """Forget the files of a client, or one of them."""
        for which in [each for each in self._files if each[0] == client and key in (None, each[1])]:
            del self._files[which]

    def stalled_since(self, moment: float) -> list[tuple[bytes, int]]:
        """Those of which no part has come since then."""
        return [which for which, each in self._files.items() if each.heard < moment]

    def _take(self, arriving: _Arriving, data: bytes) -> int | None:
        arriving.data += data
        job, encode = arriving.job, arriving.encode
        if len(arriving.data) < encode.size:
            return len(arriving.data)
        del self._files[job.client, job.key]
        job.file = ImageFile(bytes(arriving.data), encode.is_video, encode.fps)
        return None


def check_encode(encode: Encode) -> None:
    """Raise `InvalidRequestError` for a file that is too large, or is not what is said of it."""
    most = IMAGE_LIMITS.bytes_of(encode.is_video)
    noun = "video" if encode.is_video else "image"
    if encode.size > most:
        raise InvalidRequestError(f"the {noun} has {encode.size} bytes; at most {most} are allowed")
    if not 0 < len(encode.data) <= encode.size:
        raise InvalidRequestError(f"{len(encode.data)} bytes came of a file that is said to have {encode.size}")
    if not 0 <= encode.fps <= MAX_FPS:
        raise InvalidRequestError(f"fps must be from 0 to {MAX_FPS:g}, got {encode.fps}")
