"""Reads the PDFs of requests: the texts of their pages, and pictures of those without."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from app.http.errors.rejections import Unavailable
from app.prompts.images.image_marks import PdfFile, PdfPage
from app.worker_threads import WorkerThreads
from batching import (
    InvalidRequest,
    PdfReader,
    Pixels,
    SandboxLost,
    TooManyPages,
    TooMuchText,
    UnreadablePdf,
)

# Of all PDFs of a request: as many pages as Anthropic's API takes, and more characters than a context has.
MAX_PAGES: Final = 600
MAX_CHARACTERS: Final = 4 << 20


class PdfReaderLost(Unavailable):
    """The process that reads was killed or does not get on, which is no file's fault."""

    def __init__(self) -> None:
        super().__init__(
            "the process that reads PDFs was ended or has no time; try again", retry_after=1
        )


class PdfFiles:
    """Has PDFs read in processes of their own, by as many threads as there are processes."""

    def __init__(self, num_workers: int) -> None:
        self._reader = PdfReader(num_workers)
        self._threads = WorkerThreads(num_workers)

    async def pages(
        self, file: PdfFile, param: str, key: str, before: Sequence[str | PdfPage]
    ) -> list[str | PdfPage]:
        """Return the text of each page, or the page if there is something on it but no text.

        key: whose request it is; keys alternate.
        before: the pages of the other PDFs of the request.

        Raises:
            InvalidRequest: the file cannot be read, or all together have too many pages or characters.
            PdfReaderLost: a process was killed, or had no result in time.
        """
        num_characters = sum(len(page) for page in before if isinstance(page, str))
        read = partial(
            self._reader.texts,
            file.data,
            max_pages=MAX_PAGES - len(before),
            max_characters=MAX_CHARACTERS - num_characters,
        )
        try:
            texts = await self._threads.run(read, key)
        except TooManyPages:
            message = f"{file.shown}: the PDFs have more pages than the limit of {MAX_PAGES}"
            raise InvalidRequest(param, message) from None
        except TooMuchText:
            limit = f"{MAX_CHARACTERS} characters"
            message = f"{file.shown}: the PDFs have more text than the limit of {limit}"
            raise InvalidRequest(param, message) from None
        except UnreadablePdf as error:
            raise InvalidRequest(param, f"{file.shown} {error}") from None
        except SandboxLost:
            raise PdfReaderLost from None
        return [
            PdfPage(file, number) if text is None else text for number, text in enumerate(texts, 1)
        ]

    def pixels(self, page: PdfPage, param: str, max_pixels: int) -> Pixels:
        """Return the RGB pixels of a page, `[height, width, 3]`; blocking.

        Raises: as `pages`.
        """
        try:
            return self._reader.picture(page.file.data, page.number, max_pixels)
        except UnreadablePdf as error:
            raise InvalidRequest(param, f"{page.shown} {error}") from None
        except SandboxLost:
            raise PdfReaderLost from None

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        self._reader.close()
