"""The images and files of requests: what stands for them in a prompt."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from fastapi import Request

from app.api.serving import client_of
from app.media.fetch import too_large
from app.media.model_images import RequestedImage
from app.prompts.file_text import (
    UnreadableFile,
    decoded,
    file_text,
    is_pdf,
    pdf_text,
    shown_name,
)
from app.prompts.images.image_marks import Attachment, FileSource, ImageSource, PdfFile, PdfPage
from app.prompts.render import Attached
from app.server_state import server_state
from app.settings import env_name
from app.storage.disk.in_thread import in_thread
from app.storage.files import StoredFile
from batching import InvalidRequest, ModelInfo

# The limit in characters of an id that a message repeats.
_MAX_ID: Final = 100


async def attached_to(
    request: Request, model: ModelInfo, attachments: Mapping[str, Attachment]
) -> Mapping[str, Attached]:
    """Return what stands for the images and files of a conversation, by their marks.

    Raises:
        InvalidRequest: the model takes no images or not so many, or a file cannot be read or is none of the client's.
        InvalidImage, ImageReaderLost, PdfReaderLost: see `ModelImages.read`.
    """
    if not attachments:
        return {}
    files = _ClientFiles(request)
    texts: dict[str, str] = {}
    images: dict[str, RequestedImage] = {}
    for mark, (source, param) in attachments.items():
        if isinstance(source, ImageSource):
            images[mark] = RequestedImage(source, param)
        else:
            texts[mark], scans = await files.text(source, param)
            images |= {scan.mark: RequestedImage(scan, param) for scan in scans}
    key = client_of(request).name
    made = await server_state(request).images.read(model, images, key, files.image)
    return {**made, **texts}


class _ClientFiles:
    """The files that the client of a request has uploaded."""

    def __init__(self, request: Request) -> None:
        self._files = server_state(request).storage.batch.files
        self._owner = client_of(request).key_digest
        self._max_image = server_state(request).settings.max_image_mib << 20
        # As much as a body could hold.
        self._max_text = server_state(request).settings.max_body_bytes
        self._num_left = self._max_text
        self._pdfs = server_state(request).images.pdfs
        self._key = client_of(request).name
        # Of all PDFs so far.
        self._pages: list[str | PdfPage] = []

    async def image(self, file_id: str, param: str) -> bytes:
        """Return the file of an image.

        Raises:
            InvalidRequest: there is none of the client, or it is too large.
        """
        _, data = await self._read(file_id, param, self._max_image)
        if data is None:
            raise too_large(self._max_image, param)
        return data

    async def text(self, source: FileSource, param: str) -> tuple[str, list[PdfPage]]:
        """Return what a prompt has of a file, and the pages of which it has marks.

        Raises:
            InvalidRequest: there is none of the client, it cannot be read, or all are too large together.
            PdfReaderLost: a process was killed, or had no result in time.
        """
        try:
            data, name = await self._named(source, param)
            if not is_pdf(data):
                return await in_thread(partial(file_text, data, name)), []
        except UnreadableFile as error:
            raise InvalidRequest(param, str(error)) from None
        file = PdfFile(data, shown_name(name))
        pages = await self._pdfs.pages(file, param, self._key, self._pages)
        self._pages += pages
        scans = [page for page in pages if isinstance(page, PdfPage)]
        return await in_thread(partial(pdf_text, pages, name)), scans

    async def _named(self, source: FileSource, param: str) -> tuple[bytes, str | None]:
        """Return a file and its name.

        Raises:
            InvalidRequest: there is none of the client, or all are too large together.
            UnreadableFile: it is no base64.
        """
        if source.form == "base64":
            return await in_thread(partial(decoded, source.value)), source.name
        file, data = await self._read(source.value, param, self._num_left)
        if data is None:
            limit = f"{self._max_text} bytes ({env_name('max_body_bytes')})"
            raise InvalidRequest(param, f"the files are larger than the limit of {limit}")
        self._num_left -= len(data)
        return data, source.name or file.filename

    async def _read(
        self, file_id: str, param: str, max_bytes: int
    ) -> tuple[StoredFile, bytes | None]:
        """Return a file, and its bytes unless they are too many."""

        def read() -> tuple[StoredFile, bytes | None] | None:
            if (file := self._files.get(self._owner, file_id)) is None:
                return None
            if file.num_bytes > max_bytes:
                return file, None
            # It may be deleted at this moment.
            with suppress(FileNotFoundError):
                return file, self._files.path(file_id).read_bytes()
            return None

        if (found := await in_thread(read)) is None:
            raise InvalidRequest(param, f"there is no file with the id {file_id[:_MAX_ID]!r}")
        return found
