"""Files of videos, decoded by FFmpeg (PyAV). What they claim is looked at before they are decoded: users sent them.

Which of FFmpeg's many formats and codecs a file is given to is decided here, by its first bytes and by `CODECS`: no
file leads FFmpeg to other files or addresses, and seldom used decoders see none. Refused are larger frames than
`MAX_PIXELS`, and more of them together than `MAX_DECODED`, since all of them may have to be decoded.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwise.cores import usable_cores
from headwise.errors import HeadwiseError, InvalidRequestError, first_line
from headwise.runtime.models.towers.base import VideoForm

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = "MP4, QuickTime, WebM and Matroska"
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "libvpx", "libvpx-vp9")
MAX_PIXELS = 4096 * 2304
"""Of a frame."""
MAX_DECODED = 1 << 36
"""Pixels of all frames: 18 minutes of 1,920 x 1,080 at 30 frames a second."""
MAX_FRAMES = 1 << 18
_MOST_FPS = 1000.0
_MOST_THREADS = 4
_BURST = 32
"""Frames that are decoded at once."""
_MANY = 16
"""Frames that are decoded rather than passed over."""
_SAME = 0.02
"""By how much the rate that a file claims may differ from that of its frames."""


def has_decoder() -> bool:
    """Whether videos can be decoded here."""
    return find_spec("av") is not None


@contextmanager
def _reading() -> Iterator[None]:
    """Raises `InvalidRequestError` for whatever a file leads PyAV to raise: more than errors of its own."""
    try:
        yield
    except HeadwiseError:
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise InvalidRequestError(f"the video is broken, it cannot be decoded: {why:.200}") from None


class _Key(NamedTuple):
    """A frame from which on can be decoded: when it is seen, in seconds, and in the file's own time"""

    seconds: float
    at: int


class VideoFile:
    """A video's file, whose frames were counted and not decoded.

    form: what the video is like, as it is seen

    Raises `InvalidRequestError` for what is none, or refused.
    """

    def __init__(self, data: bytes) -> None:
        if not has_decoder():
            raise InvalidRequestError("videos are not enabled here: pip install 'headwise[videos]' where encoders run")
        self._data, self._format = data, _format_of(data)
        with self._opened() as container:
            stream = _stream_of(container)
            width, height = int(stream.codec_context.width), int(stream.codec_context.height)
            rate = float(stream.average_rate or 0)
            self._times, self._keys = _times_of(container, stream)
            turned = _is_turned(container, stream)
        frames, fps = len(self._times), _rate_of(self._times, rate)
        most = MAX_DECODED // (width * height)
        if frames > most:
            raise InvalidRequestError(
                f"the video has {frames} frames of {width} x {height} pixels; at most {most} of this size are allowed: "
                "cut it, or make it smaller"
            )
        self.form = VideoForm(frames, fps, *((height, width) if turned else (width, height)))

    def images(self, numbers: Iterable[int]) -> Iterator[Image | None]:
        """Frames by their numbers, of which none is below the one in front: of mode RGB, turned as the file says. The
        frame of a number is the one that is seen in the middle of its time, where all have equal times. Between them
        None, whenever many others were decoded.

        Raises `InvalidRequestError` where one cannot be decoded.
        """
        first, fps = float(self._times[0]), self.form.fps
        with self._opened() as container:
            frames = _Frames(container, self._keys, fps)
            for number in numbers:
                yield from frames.go_to(first + (number + 0.5) / fps)
                yield _image_of(frames.shown)

    def _opened(self) -> Any:
        import av

        with _reading():
            return av.open(io.BytesIO(self._data), format=self._format)


def _format_of(data: bytes) -> str:
    """FFmpeg's name of it."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    raise InvalidRequestError(
        f"{len(data)} bytes, which begin with {data[:12]!r}, are no video that is served: {FORMATS}"
    )


def _stream_of(container: Any) -> Any:
    """The first video of it, if it may be decoded."""
    streams = [each for each in container.streams.video if each.codec_context is not None]
    if not streams:
        raise InvalidRequestError("the file has no video, or none whose codec is known")
    context = streams[0].codec_context
    if context.name not in CODECS:
        raise InvalidRequestError(
            f"the video is coded as {context.name}; served are H.264, H.265, VP8, VP9, AV1, MPEG-4"
        )
    _check_size(context)
    context.options = {"max_pixels": str(MAX_PIXELS)}  # of frames behind the first one, too
    return streams[0]


def _check_size(frame: Any) -> None:
    if not 0 < frame.width * frame.height <= MAX_PIXELS:
        raise InvalidRequestError(
            f"the video has frames of {frame.width} x {frame.height} pixels; at most {MAX_PIXELS} are allowed"
        )


def _times_of(container: Any, stream: Any) -> tuple[NDArray[np.float64], list[_Key]]:
    """When each frame is seen, in seconds, in their order, and which ones need no others; nothing is decoded."""
    times: list[float] = []
    keys: list[_Key] = []
    with _reading():
        for packet in container.demux(stream):
            at = packet.dts if packet.pts is None else packet.pts
            if not packet.size or at is None or packet.is_discard:
                continue
            times.append(float(at * packet.time_base))
            if packet.is_keyframe:
                keys.append(_Key(times[-1], int(at)))
            if len(times) > MAX_FRAMES:
                raise InvalidRequestError(f"the video has more than {MAX_FRAMES} frames, which are allowed at most")
    if not times:
        raise InvalidRequestError("the video has no frames")
    return np.sort(np.array(times)), sorted(keys)


def _rate_of(times: NDArray[np.float64], claimed: float) -> float:
    """Frames a second."""
    span = float(times[-1] - times[0])
    found = (len(times) - 1) / span if span > 0 else claimed
    if abs(claimed - found) < _SAME * found:  # it is exact, while times are rounded
        found = claimed
    return min(found, _MOST_FPS) if found > 0 else 1.0


class _Frames:
    """A video's frames as they are seen, in their order. What is in front of a key frame is passed over, where that is
    much.

    shown: the frame that is seen
    """

    def __init__(self, container: Any, keys: Sequence[_Key], fps: float) -> None:
        self._container, self._keys, self._fps = container, keys, fps
        self._stream = _stream_of(container)
        self._stream.thread_type = "AUTO"
        self._stream.codec_context.thread_count = min(usable_cores(), _MOST_THREADS)
        self._next = self._decoded()
        self.shown: Any = None
        self._ahead: Any = None  # the frame behind it; None: it is not decoded yet, or there is none
        self._is_over = False
        self._count = 0

    def go_to(self, seconds: float) -> Iterator[None]:
        """To what is seen at this time, or last before. Raises `InvalidRequestError` where nothing can be decoded."""
        key = self._key_before(seconds)
        if key is not None:
            self._skip(key.at)
        yield from self._go_on(seconds)
        if self.shown is None and key is not None:  # the file's index leads elsewhere: from its beginning, then
            self._keys = ()
            self._skip(0)
            yield from self._go_on(seconds)
        self.shown = self.shown or self._ahead
        if self.shown is None:
            raise InvalidRequestError("the video is broken: none of its frames can be decoded")

    def _go_on(self, seconds: float) -> Iterator[None]:
        while not self._is_over and (self._ahead is None or _seconds(self._ahead) <= seconds):
            self.shown = self._ahead or self.shown
            self._ahead = next(self._next, None)
            self._is_over = self._ahead is None
            self._count += 1
            if self._count % _BURST == 0:
                yield

    def _key_before(self, seconds: float) -> _Key | None:
        """The last key frame up to this time, if it is far behind what is decoded."""
        at = bisect_right(self._keys, seconds, key=lambda key: key.seconds) - 1
        if at < 0 or self._ahead is None:
            return None
        key = self._keys[at]
        return key if (key.seconds - _seconds(self._ahead)) * self._fps > _MANY else None

    def _skip(self, at: int) -> None:
        """Go on with the key frame of this time."""
        self.shown = self._ahead = None
        self._is_over = False
        with _reading():
            self._container.seek(at, stream=self._stream)
        self._next = self._decoded()

    def _decoded(self) -> Iterator[Any]:
        with _reading():
            for frame in self._container.decode(self._stream):
                if frame.pts is not None:
                    _check_size(frame)
                    yield frame


def _seconds(frame: Any) -> float:
    return float(frame.pts * frame.time_base)


def _image_of(frame: Any) -> Image:
    image: Image = frame.to_image()
    turns = round(frame.rotation / 90) % 4  # counter-clockwise, as Pillow counts
    return image.rotate(90 * turns, expand=True) if turns else image


def _is_turned(container: Any, stream: Any) -> bool:
    """Whether the first frame is seen with its sides exchanged."""
    with _reading():
        container.seek(0)
        return bool(round(next(container.decode(stream)).rotation / 90) % 2)
