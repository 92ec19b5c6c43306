"""PDFs of requests: what their pages are, and limits of all together."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import pytest

from app.http.errors.responses import error_report
from app.media import pdf_files
from app.media.pdf_files import PdfFiles, PdfReaderLost
from app.prompts.images.image_marks import PdfFile, PdfPage
from batching import InvalidRequest, PdfReader, SandboxLost
from tests.support.pdfs import pdf

pytestmark = pytest.mark.anyio

PARAM: Final = "messages.0.content"


@pytest.fixture(scope="module")
def files() -> Iterator[PdfFiles]:
    with closing(PdfFiles(1)) as files:
        yield files


def named(data: bytes) -> PdfFile:
    return PdfFile(data, "the file 'a'")


async def test_a_page_is_its_text_or_itself(files: PdfFiles) -> None:
    file = named(pdf("Hello", None, ""))
    pages = await files.pages(file, PARAM, "key", ())
    assert pages == ["Hello", PdfPage(file, 2), ""]
    assert files.pixels(PdfPage(file, 2), PARAM, 5000).shape == (50, 100, 3)


async def test_all_files_together_have_limits(
    files: PdfFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf_files, "MAX_PAGES", 3)
    monkeypatch.setattr(pdf_files, "MAX_CHARACTERS", 10)
    file = named(pdf("Hello", None))
    assert len(await files.pages(file, PARAM, "key", ["12345"])) == 2
    others: list[tuple[list[str | PdfPage], str]] = [
        ([PdfPage(file, 2), ""], "the PDFs have more pages than the limit of 3"),
        (["123456"], "the PDFs have more text than the limit of 10 characters"),
    ]
    for before, reason in others:
        with pytest.raises(InvalidRequest) as caught:
            await files.pages(file, PARAM, "key", before)
        assert (str(caught.value), caught.value.param) == (f"the file 'a': {reason}", PARAM)


async def test_what_cannot_be_read_has_a_name_and_a_reason(files: PdfFiles) -> None:
    damaged = named(b"%PDF-1.7")
    with pytest.raises(InvalidRequest, match=r"^the file 'a' is damaged") as caught:
        await files.pages(damaged, PARAM, "key", ())
    assert caught.value.param == PARAM
    with pytest.raises(InvalidRequest, match=r"^page 7 of the file 'a' is damaged"):
        files.pixels(PdfPage(damaged, 7), PARAM, 9)


async def test_a_process_that_is_lost_is_no_fault_of_the_file(
    files: PdfFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: Any, **__: Any) -> None:
        raise SandboxLost

    monkeypatch.setattr(PdfReader, "texts", lose)
    monkeypatch.setattr(PdfReader, "picture", lose)
    with pytest.raises(PdfReaderLost) as caught:
        await files.pages(named(b""), PARAM, "key", ())
    assert error_report(caught.value).status == 503
    with pytest.raises(PdfReaderLost):
        files.pixels(PdfPage(named(b""), 1), PARAM, 9)
