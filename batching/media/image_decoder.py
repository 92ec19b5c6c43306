"""Decodes the images of clients in processes with limits; the server's own gets the pixels."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from batching.media import decode_process
from batching.media.decode_process import ANSWER, MAX_SIDE, REQUEST, Outcome
from batching.sandbox.sandbox import Sandbox, SandboxExceeded, SandboxLimits

# Red, green and blue of each pixel: `[height, width, 3]`.
Pixels = NDArray[np.uint8]

_NUM_CHANNELS: Final = 3
# Seconds of a core for one image.  One of 40 million pixels takes two.
_CPU_SECONDS: Final = 10
# Bytes: of Python, Pillow and the file, and for each pixel, of which a decoder of WebP has several copies.
_BASE_BYTES: Final = 256 << 20
_BYTES_PER_PIXEL: Final = 24


class UnreadableImage(Exception):
    """An image that has no pixels for a model; the text says of it why."""


class TooManyPixels(UnreadableImage):
    def __init__(self, limit: int) -> None:
        super().__init__(f"has more pixels than the limit of {limit}")


_REASONS: Final = {
    Outcome.OTHER_FORMAT: "is not JPEG, PNG, WebP or GIF, or its header is damaged",
    Outcome.DAMAGED: "is damaged or incomplete",
    Outcome.SIDE_TOO_LONG: f"is wider or higher than the limit of {MAX_SIDE} pixels",
}
_TOO_MUCH: Final = "cannot be read within the limits of memory and time"


class ImageDecoder:
    """Decodes images, in any thread: so many at a time as there are processes.

    A process that takes too much, or crashes, ends without harm, and the image is rejected.

    max_pixels: those of a file, by its header.
    """

    def __init__(self, max_pixels: int, num_processes: int) -> None:
        self._max_pixels = max_pixels
        memory = _BASE_BYTES + _BYTES_PER_PIXEL * max_pixels
        self._sandbox = Sandbox(
            decode_process.__file__,
            SandboxLimits(_CPU_SECONDS, memory),
            arguments=[str(max_pixels)],
            num_processes=num_processes,
        )

    def decode(self, data: bytes, max_pixels: int | None = None) -> Pixels:
        """Return the pixels of a file: upright, on white, of the first frame; blocking.

        max_pixels: a picture with more is scaled down to at most so many; None is the limit of files.

        Raises:
            UnreadableImage: the file is no image that can be served.
            SandboxLost: the process was killed, or had no answer in time: no fault of the image.
            Interrupted: the caller has given up.
        """
        most = self._max_pixels if max_pixels is None else max_pixels
        try:
            return self._pixels(self._sandbox.ask(REQUEST.pack(most) + data))
        except SandboxExceeded:
            raise UnreadableImage(_TOO_MUCH) from None

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        self._sandbox.close()

    def _pixels(self, answer: bytes) -> Pixels:
        outcome, height, width = ANSWER.unpack_from(answer)
        if outcome == Outcome.TOO_MANY_PIXELS:
            raise TooManyPixels(self._max_pixels)
        if outcome != Outcome.DECODED:
            raise UnreadableImage(_REASONS[Outcome(outcome)])
        values = np.frombuffer(answer, np.uint8, offset=ANSWER.size)
        return values.reshape(height, width, _NUM_CHANNELS)
