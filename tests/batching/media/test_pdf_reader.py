"""PDFs of clients, read in processes."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Final

import pytest

from batching.media import pdf_reader
from batching.media.pdf_reader import PdfReader, TooManyPages, TooMuchText, UnreadablePdf
from tests.support.pdfs import BOMB, ENCRYPTED, LAUGHS, form, pdf
from tests.support.rows import rows

DATA: Final = pdf("Hello", None, "", "caf\xe9")


@pytest.fixture(scope="module")
def reader() -> Iterator[PdfReader]:
    with closing(PdfReader(num_processes=1)) as reader:
        yield reader


def read(reader: PdfReader, data: bytes = DATA) -> list[str | None]:
    return reader.texts(data, max_pages=5, max_characters=99)


def test_it_is_read_where_no_file_can_be_opened(reader: PdfReader) -> None:
    assert read(reader) == ["Hello", None, "", "caf\xe9"]
    assert read(reader, form()) == ["Name:\nFilled"]
    pixels = reader.picture(DATA, page=2, max_pixels=5000)
    assert pixels.shape == (50, 100, 3)
    assert pixels[0, 0].tolist() == [255, 0, 0]
    # A font that the file does not have is PDFium's own.
    assert reader.picture(DATA, page=1, max_pixels=5000).min() < 100


@rows(
    ("data", "kind", "reason"),
    [
        (ENCRYPTED, UnreadablePdf, "is encrypted: send it without a password"),
        (DATA[:-150], UnreadablePdf, "is damaged, incomplete or without pages"),
        (pdf(*"abcdef"), TooManyPages, "has too many pages"),
        (pdf(*["i" * 60] * 2), TooMuchText, "has too much text"),
    ],
)
def test_a_file_that_cannot_be_read_has_a_reason(
    reader: PdfReader, data: bytes, kind: type[Exception], reason: str
) -> None:
    with pytest.raises(UnreadablePdf) as caught:
        read(reader, data)
    assert (type(caught.value), str(caught.value)) == (kind, reason)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no limit of memory")
def test_a_file_that_takes_too_much_is_rejected_and_others_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Little more than the program itself has.
    monkeypatch.setattr(pdf_reader, "_MEMORY_BYTES", 224 << 20)
    monkeypatch.setattr(pdf_reader, "_CPU_SECONDS", 1)
    with closing(PdfReader(num_processes=1)) as reader:
        for ask in (partial(read, reader, BOMB), partial(reader.picture, LAUGHS, 1, 100)):
            with pytest.raises(UnreadablePdf, match="within the limits of 1 seconds and 224 MiB"):
                ask()
        assert read(reader) == ["Hello", None, "", "caf\xe9"]


def test_a_process_that_was_killed_is_replaced(reader: PdfReader) -> None:
    read(reader)
    process = reader._sandbox._processes[0]._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert read(reader, pdf("a")) == ["a"]
