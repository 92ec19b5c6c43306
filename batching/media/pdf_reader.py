"""Reads the PDFs of clients in processes with limits; the server's own gets texts and pixels."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from batching.media.image_decoder import Pixels
from batching.sandbox.sandbox import Sandbox, SandboxExceeded, SandboxLimits

# Not imported: the server's process does without PDFium.
_WORKER: Final = Path(__file__).with_name("pdf_process.py")
# Seconds of a core for the texts of a file, or for the picture of a page.  The texts of 600 full pages take one.
_CPU_SECONDS: Final = 10
# Of the file, and of what a page shows: a scan of A3 in colour with 600 dots an inch has 200 MB.
_MEMORY_BYTES: Final = 1 << 30


class UnreadablePdf(Exception):
    """A PDF, or a page of one, that cannot be read; the text says of it why."""


class TooManyPages(UnreadablePdf):
    """It has more pages than asked for."""


class TooMuchText(UnreadablePdf):
    """Its pages have more characters than asked for."""


# By the worker's outcomes.
_ERRORS: Final[dict[str, tuple[type[UnreadablePdf], str]]] = {
    "encrypted": (UnreadablePdf, "is encrypted: send it without a password"),
    "damaged": (UnreadablePdf, "is damaged, incomplete or without pages"),
    "too many pages": (TooManyPages, "has too many pages"),
    "too much text": (TooMuchText, "has too much text"),
}


class PdfReader:
    """Reads PDFs, in any thread: so many at a time as there are processes.

    A process that takes too much, or crashes, ends without harm, and the file is rejected.
    """

    def __init__(self, num_processes: int) -> None:
        self._sandbox = Sandbox(
            str(_WORKER),
            SandboxLimits(_CPU_SECONDS, _MEMORY_BYTES),
            num_processes=num_processes,
        )

    def texts(self, data: bytes, max_pages: int, max_characters: int) -> list[str | None]:
        """Return the text of each page, in order: None if there is something on it but no text; blocking.

        Raises:
            UnreadablePdf: it is no such file, or has more pages or characters.
            SandboxLost: the process was killed, or had no answer in time: no fault of the file.
            Interrupted: the caller has given up.
        """
        found, _ = self._asked(data, max_pages=max_pages, max_characters=max_characters)
        texts: list[str | None] = found["texts"]
        return texts

    def picture(self, data: bytes, page: int, max_pixels: int) -> Pixels:
        """Return what a page shows, of which the first is 1, in at most so many pixels; blocking.

        Raises: as `texts`.
        """
        found, pixels = self._asked(data, page=page, max_pixels=max_pixels)
        return np.frombuffer(pixels, np.uint8).reshape(found["height"], found["width"], 3)

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        self._sandbox.close()

    def _asked(self, data: bytes, **arguments: int) -> tuple[dict[str, Any], bytes]:
        try:
            answer = self._sandbox.ask(json.dumps(arguments).encode() + b"\n" + data)
        except SandboxExceeded:
            limits = f"{_CPU_SECONDS} seconds and {_MEMORY_BYTES >> 20} MiB"
            raise UnreadablePdf(f"cannot be read within the limits of {limits}") from None
        line, _, pixels = answer.partition(b"\n")
        found = json.loads(line)
        if found["outcome"] in _ERRORS:
            kind, reason = _ERRORS[found["outcome"]]
            raise kind(reason)
        return found, pixels
