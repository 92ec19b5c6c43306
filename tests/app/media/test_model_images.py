"""What models take of images: read once, within limits, by processors that end."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest

from app.http.errors.invalid_requests import InvalidImage
from app.media.image_reader import ImageReaderLost, image_reader
from app.media.model_images import ModelImages, RequestedImage, model_images
from app.media.pdf_files import PdfFiles
from app.prompts.images.image_marks import ImageSource, PdfFile, PdfPage
from app.settings import Settings
from batching import (
    ImageInput,
    InvalidRequest,
    ModelInfo,
    ProcessorFailed,
    SandboxLost,
    VisionModel,
)
from tests.support.fake_images import (
    VISION,
    FakeProcessor,
    SeeingTokenizer,
    base64_of,
    data_url,
    fake_processors,
    picture,
)
from tests.support.pdfs import pdf

pytestmark = pytest.mark.anyio

PARAM: Final = "messages.0.content"
SETTINGS: Final = Settings(_env_file=None, max_image_mib=1, max_images=2)


def model(vision: VisionModel = VISION) -> ModelInfo:
    known = SeeingTokenizer()
    return ModelInfo("fake", known, known.end_token_ids, known.num_tokens, 100, vision=vision)


def requested(*sources: ImageSource | PdfPage) -> dict[str, RequestedImage]:
    return {source.mark: RequestedImage(source, PARAM) for source in sources}


async def no_file(file_id: str, param: str) -> bytes:
    raise InvalidRequest(param, f"no file {file_id}")


async def read(
    images: ModelImages, *sources: ImageSource | PdfPage, known: ModelInfo | None = None
) -> list[ImageInput]:
    made = await images.read(known or model(), requested(*sources), "key", no_file)
    return [made[source.mark] for source in sources]


def kept_within(max_kept: int) -> ModelImages:
    return ModelImages(
        image_reader(SETTINGS),
        PdfFiles(1),
        num_workers=1,
        max_images=2,
        max_pixels=10_000,
        max_kept=max_kept,
    )


@pytest.fixture(scope="module")
def images() -> Iterator[ModelImages]:
    with fake_processors():
        images = model_images(SETTINGS)
        yield images
        images.close()


@pytest.fixture(autouse=True)
def nothing_made(images: ModelImages) -> None:
    FakeProcessor.made.clear()


async def test_each_form_is_read(images: ModelImages) -> None:
    async def uploaded(file_id: str, param: str) -> bytes:
        assert (file_id, param) == ("file-1", PARAM)
        return picture(4)

    sources = [ImageSource(data_url(picture(2))), ImageSource(base64_of(picture(3)), "base64")]
    assert [made.num_rows for made in await read(images, *sources)] == [2, 3]
    source = ImageSource("file-1", "file")
    made = await images.read(model(), requested(source), "key", uploaded)
    assert made[source.mark].num_rows == 4
    assert await images.read(model(), {}, "key", no_file) == {}


async def test_equal_files_are_read_once_however_they_are_sent(images: ModelImages) -> None:
    data = picture(7)
    url, text = ImageSource(data_url(data)), ImageSource(base64_of(data), "base64")
    one, two = await read(images, url, text)
    assert one is two
    assert (await read(images, url))[0] is one
    (other,) = await read(images, url, known=model(replace(VISION, model_type="fake")))
    assert other is one
    assert len(FakeProcessor.made) == 1


async def test_a_detail_and_a_model_see_other_pixels() -> None:
    source = data_url(picture(600, 600))
    with fake_processors() as processors:
        images = model_images(Settings(_env_file=None))
        whole, low = await read(images, ImageSource(source), ImageSource(source, detail="low"))
        assert (whole.num_rows, low.num_rows) == (600, 512)
        images.close()
        assert processors.closed == 1


async def test_the_latest_images_stay() -> None:
    size = 2 * 2 * 3
    images = kept_within(3 * size)
    first, second, third = (
        ImageSource(data_url(picture(2, colour=colour))) for colour in ("red", "green", "blue")
    )
    large = ImageSource(data_url(picture(20)))
    for source in (first, second, third, first, large, ImageSource(data_url(picture(3))), first):
        await read(images, source)
    assert [made.num_rows for made in FakeProcessor.made] == [2, 2, 2, 20, 3]
    await read(images, second)
    assert len(FakeProcessor.made) == 6
    images.close()


async def test_the_processors_of_two_models_stay() -> None:
    class AnyProcessor(FakeProcessor):
        def __init__(self, vision: VisionModel, image_text: str, num_processes: int) -> None:
            super().__init__(VISION, image_text, num_processes)

    AnyProcessor.made, AnyProcessor.closed = [], 0
    with patch("app.media.model_images.ImageProcessor", AnyProcessor):
        images = kept_within(0)
        source = ImageSource(data_url(picture(2)))
        for name in ("a", "b", "a", "c", "a"):
            await read(images, source, known=model(replace(VISION, folder=Path(name))))
        assert AnyProcessor.closed == 1
        images.close()
        assert AnyProcessor.closed == 3


async def test_a_page_is_drawn_by_a_process_that_ends() -> None:
    with fake_processors():
        images = kept_within(0)
        (made,) = await read(images, PdfPage(PdfFile(pdf("a", None), "the file"), 2))
        assert made.num_rows == 141
        (process,) = images.pdfs._reader._sandbox._processes
        assert process.is_running
        images.close()
        assert not process.is_running


async def test_a_page_that_cannot_be_used_is_refused_by_name(images: ModelImages) -> None:
    page = PdfPage(PdfFile(pdf(None, box="0 0 200 0.01"), "the file"), 1)
    with pytest.raises(InvalidImage, match=r"^page 1 of the file is too flat") as caught:
        await read(images, page)
    assert caught.value.param == PARAM


async def test_more_images_than_the_limit_are_refused(images: ModelImages) -> None:
    sources = [ImageSource(data_url(picture(n))) for n in (2, 3, 4)]
    with pytest.raises(InvalidRequest, match=r"the limit of 2 \(MLX_SERVER_MAX_IMAGES\)") as caught:
        await read(images, *sources)
    assert caught.value.param == PARAM
    assert not FakeProcessor.made


@pytest.mark.parametrize("data", [b"no image", picture(2, 1)])
async def test_an_image_that_cannot_be_used_is_refused(images: ModelImages, data: bytes) -> None:
    with pytest.raises(InvalidImage, match="the image ") as caught:
        await read(images, ImageSource(data_url(data)))
    assert caught.value.param == PARAM


async def test_a_process_that_is_lost_is_no_fault_of_the_image(
    images: ModelImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: Any) -> ImageInput:
        raise SandboxLost

    source = ImageSource(data_url(picture(9)))
    with monkeypatch.context() as patched:
        patched.setattr(FakeProcessor, "process", lose)
        with pytest.raises(ImageReaderLost):
            await read(images, source)
    assert (await read(images, source))[0].num_rows == 9


async def test_a_processor_that_cannot_be_used_is_told_to_the_operator_too(
    images: ModelImages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> ImageInput:
        raise ProcessorFailed("OSError: no preprocessor_config.json")

    monkeypatch.setattr(FakeProcessor, "process", fail)
    with pytest.raises(InvalidRequest, match="image processor cannot be used") as caught:
        await read(images, ImageSource(data_url(picture(11))))
    assert caught.value.param == PARAM
    assert "of fake cannot be used: OSError: no preprocessor_config.json" in caplog.text
