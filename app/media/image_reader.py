"""Reads the images of requests, in each form in which an API has them."""

from base64 import b64decode
from typing import Final

import anyio.to_thread

from app.http.errors.invalid_requests import InvalidImage
from app.http.errors.rejections import Unavailable
from app.media.fetch import ImageFetcher, too_large
from app.media.hosts import listed_origins
from app.settings import Settings, env_name
from batching import ImageDecoder, Pixels, SandboxLost, TooManyPixels, UnreadableImage

_DATA: Final = "data:"
_BASE64: Final = ";base64"


class ImageReaderLost(Unavailable):
    """The process that decodes was killed or does not get on, which is no image's fault."""

    def __init__(self) -> None:
        super().__init__(
            "the process that reads images was ended or has no time; try again", retry_after=1
        )


class ImageReader:
    """Returns files of images, of up to `max_bytes`, and what they show.

    What type a client says that a file has does not matter: the content says it.
    """

    def __init__(self, fetcher: ImageFetcher, decoder: ImageDecoder, max_bytes: int) -> None:
        self._fetcher = fetcher
        self._decoder = decoder
        self._max_bytes = max_bytes

    async def from_url(self, url: str, param: str) -> bytes:
        """Return the file of a `data:` URL with base64, or of a URL of a listed host.

        Raises:
            InvalidImage: there is no such file, or it is too large.
        """
        if url[: len(_DATA)].lower() != _DATA:
            return await self._fetcher.fetch(url, param)
        head, comma, text = url[len(_DATA) :].partition(",")
        if not comma or not head.lower().endswith(_BASE64):
            message = "a data: URL of an image is data:image/png;base64, and then base64"
            raise InvalidImage(param, message)
        return await self.from_base64(text, param)

    async def from_base64(self, text: str, param: str) -> bytes:
        """Return the file that a text holds as base64.

        Raises:
            InvalidImage: it is no base64, or the file is too large.
        """
        try:
            data = await anyio.to_thread.run_sync(_decoded, text)
        except ValueError:
            raise InvalidImage(param, "the image is not valid base64") from None
        if len(data) > self._max_bytes:
            raise too_large(self._max_bytes, param)
        return data

    def pixels(self, data: bytes, param: str, max_pixels: int | None = None) -> Pixels:
        """Return the RGB pixels of a file, `[height, width, 3]`; blocking.

        max_pixels: a picture with more is scaled down to at most so many.

        Raises:
            InvalidImage: it is no image that can be read within the limits.
            ImageReaderLost: the process that decodes was killed, or had no result in time.
        """
        try:
            return self._decoder.decode(data, max_pixels)
        except TooManyPixels as error:
            message = f"the image {error} ({env_name('max_image_pixels')})"
            raise InvalidImage(param, message) from None
        except UnreadableImage as error:
            raise InvalidImage(param, f"the image {error}") from None
        except SandboxLost:
            raise ImageReaderLost from None

    def close(self) -> None:
        """End the processes that decode."""
        self._decoder.close()


def image_reader(settings: Settings) -> ImageReader:
    """Return the reader that the settings describe; it starts processes when they are needed.

    Raises:
        SettingsError: a host that is listed is none.
    """
    max_bytes = settings.max_image_mib << 20
    fetcher = ImageFetcher(
        listed_origins(settings.media_hosts), max_bytes=max_bytes, timeout=settings.media_timeout
    )
    decoder = ImageDecoder(settings.max_image_pixels, settings.media_workers)
    return ImageReader(fetcher, decoder, max_bytes)


def _decoded(text: str) -> bytes:
    """Return the bytes of base64, which may have line ends."""
    return b64decode("".join(text.split()), validate=True)
