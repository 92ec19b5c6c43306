"""Makes of the images of requests, and of pages of PDFs, what a model takes."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from hashlib import sha256
from threading import Lock
from typing import Final, NamedTuple

from app.http.errors.invalid_requests import InvalidImage
from app.media.image_reader import ImageReader, ImageReaderLost, image_reader
from app.media.pdf_files import PdfFiles
from app.prompts.images.image_marks import ImageSource, PdfPage
from app.prompts.images.image_places import image_text
from app.settings import Settings, env_name
from app.worker_threads import WorkerThreads
from batching import (
    ImageInput,
    ImageProcessor,
    InvalidRequest,
    ModelInfo,
    Pixels,
    ProcessorFailed,
    SandboxLost,
    UnfitImage,
    VisionModel,
)

logger = logging.getLogger(__name__)

# OpenAI's `low`: 512 by 512.
_LOW_PIXELS: Final = 512 * 512
# Bytes of images that are ready for a model.
_MAX_KEPT: Final = 256 << 20
# Models whose processors stay.
_MAX_PROCESSORS: Final = 2

# Returns a file of a client, by its id and the field that names it.
ReadFile = Callable[[str, str], Awaitable[bytes]]


class RequestedImage(NamedTuple):
    """An image of a request, or a page that has no text, and the field that has it, for errors."""

    source: ImageSource | PdfPage
    param: str

    @property
    def shown(self) -> str:
        """How messages name it."""
        return self.source.shown if isinstance(self.source, PdfPage) else "the image"


class _Picture(NamedTuple):
    """What shows the pixels of an image, given how many at most, and what tells it from others."""

    identity: bytes
    pixels: Callable[[int], Pixels]


class ModelImages:
    """Reads images, and has the processors of models run in processes of their own.

    A conversation repeats its images with each turn, so that the latest stay as they were made.

    max_images: of one request.
    max_pixels: those that a model sees of an image.
    max_kept: bytes of the images that stay.
    """

    def __init__(
        self,
        reader: ImageReader,
        pdfs: PdfFiles,
        *,
        num_workers: int,
        max_images: int,
        max_pixels: int,
        max_kept: int,
    ) -> None:
        self._reader = reader
        self.pdfs = pdfs
        self._threads = WorkerThreads(num_workers)
        self._num_workers = num_workers
        self._max_images = max_images
        self._max_pixels = max_pixels
        self._max_kept = max_kept
        self._processors: OrderedDict[tuple[VisionModel, str], ImageProcessor] = OrderedDict()
        self._kept: OrderedDict[bytes, ImageInput] = OrderedDict()
        self._num_kept = 0
        self._lock = Lock()

    async def read(
        self,
        model: ModelInfo,
        images: Mapping[str, RequestedImage],
        key: str,
        read_file: ReadFile,
    ) -> dict[str, ImageInput]:
        """Return what a model takes for each image, by its mark.

        key: whose request it is; keys alternate.
        read_file: how an image is read that the client has uploaded.

        Raises:
            InvalidRequest: the model takes no images, or not so many.
            InvalidImage: one cannot be read.
            ImageReaderLost, PdfReaderLost: a process was killed, or had no result in time.
        """
        if not images:
            return {}
        first = next(iter(images.values()))
        if not isinstance(model.vision, VisionModel):
            what = "an image"
            if isinstance(first.source, PdfPage):
                what = f"{first.source.shown} has no text, and an image of it"
            message = f"{first.param}: {what} cannot be read: this model {model.vision.reason}"
            raise InvalidRequest(first.param, message)
        if len(images) > self._max_images:
            limit = f"{self._max_images} ({env_name('max_images')})"
            raise InvalidRequest(
                first.param,
                f"the request has more images, pages without text included, than the limit of {limit}",
            )
        read: dict[str, ImageInput] = {}
        for mark, image in images.items():
            picture = await self._picture(image, read_file)
            make = partial(self._made, model, model.vision, image, picture)
            read[mark] = await self._threads.run(make, key)
        return read

    def close(self) -> None:
        """End all processes."""
        self._reader.close()
        self.pdfs.close()
        for processor in self._processors.values():
            processor.close()

    async def _picture(self, image: RequestedImage, read_file: ReadFile) -> _Picture:
        source, param = image
        if isinstance(source, PdfPage):
            show = partial(self.pdfs.pixels, source, param)
            return _Picture(source.mark.encode(), show)
        data = await self._data(source, param, read_file)
        return _Picture(data, partial(self._reader.pixels, data, param))

    async def _data(self, source: ImageSource, param: str, read_file: ReadFile) -> bytes:
        if source.form == "base64":
            return await self._reader.from_base64(source.value, param)
        if source.form == "file":
            return await read_file(source.value, param)
        return await self._reader.from_url(source.value, param)

    def _made(
        self, model: ModelInfo, vision: VisionModel, image: RequestedImage, picture: _Picture
    ) -> ImageInput:
        max_pixels = _pixels_of(image.source, self._max_pixels)
        text = image_text(model).text
        digest = sha256(repr((vision, text, max_pixels)).encode() + picture.identity).digest()
        with self._lock:
            if (kept := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                return kept
        pixels = picture.pixels(max_pixels)
        try:
            made = self._processor(vision, text).process(pixels)
        except UnfitImage as error:
            raise InvalidImage(image.param, f"{image.shown} {error}") from None
        except ProcessorFailed as error:
            logger.warning("the image processor of %s cannot be used: %s", model.model_id, error)
            message = f"{image.param}: an image cannot be read: this model's image processor cannot be used"
            raise InvalidRequest(image.param, message) from None
        except SandboxLost:
            raise ImageReaderLost from None
        self._keep(digest, made)
        return made

    def _processor(self, vision: VisionModel, text: str) -> ImageProcessor:
        name = vision, text
        with self._lock:
            if name not in self._processors:
                self._processors[name] = ImageProcessor(vision, text, self._num_workers)
            self._processors.move_to_end(name)
            while len(self._processors) > _MAX_PROCESSORS:
                self._processors.popitem(last=False)[1].close()
            return self._processors[name]

    def _keep(self, digest: bytes, image: ImageInput) -> None:
        with self._lock:
            if image.num_bytes <= self._max_kept and digest not in self._kept:
                self._kept[digest] = image
                self._num_kept += image.num_bytes
            while self._num_kept > self._max_kept:
                self._num_kept -= self._kept.popitem(last=False)[1].num_bytes


def model_images(settings: Settings) -> ModelImages:
    """Return what reads images as the settings say.

    Raises:
        SettingsError: a host that is listed is none.
    """
    return ModelImages(
        image_reader(settings),
        PdfFiles(settings.media_workers),
        num_workers=settings.media_workers,
        max_images=settings.max_images,
        max_pixels=settings.vision_pixels,
        max_kept=_MAX_KEPT,
    )


def _pixels_of(source: ImageSource | PdfPage, max_pixels: int) -> int:
    is_low = isinstance(source, ImageSource) and source.detail == "low"
    return min(max_pixels, _LOW_PIXELS) if is_low else max_pixels
