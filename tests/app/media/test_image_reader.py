"""Images in the forms that APIs have."""

from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import pytest
from PIL import Image

from app.http.errors.invalid_requests import InvalidImage
from app.http.errors.responses import error_report
from app.media.image_reader import ImageReader, ImageReaderLost, image_reader
from app.settings import Settings, SettingsError
from batching import ImageDecoder, Pixels, SandboxLost
from tests.support.images import encoded, png
from tests.support.rows import rows

pytestmark = pytest.mark.anyio

PARAM: Final = "messages.0.content.1"
FILE: Final = encoded(Image.new("RGB", (4, 2), "red"), "PNG")
TEXT: Final = b64encode(FILE).decode()


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    settings = Settings(_env_file=None, max_image_mib=1, max_image_pixels=100)
    with closing(image_reader(settings)) as reader:
        yield reader


@rows("url", [f"data:image/png;base64,{TEXT}", f"DATA:;charset=x;BASE64,{TEXT}"])
async def test_a_data_url_holds_a_file(reader: ImageReader, url: str) -> None:
    assert await reader.from_url(url, PARAM) == FILE


@rows("text", [TEXT, "\n".join(TEXT[i : i + 7] for i in range(0, len(TEXT), 7)) + "\r\n"])
async def test_base64_holds_a_file(reader: ImageReader, text: str) -> None:
    assert await reader.from_base64(text, PARAM) == FILE


@rows(
    ("url", "reason"),
    [
        ("data:image/png,abc", "a data: URL of an image is data:image/png;base64, and then base64"),
        (
            "data:image/png;base64",
            "a data: URL of an image is data:image/png;base64, and then base64",
        ),
        ("data:;base64,a", "the image is not valid base64"),
        ("data:;base64,YQ==YQ==", "the image is not valid base64"),
        ("data:;base64,_-__", "the image is not valid base64"),
        ("data:;base64,\ud800", "the image is not valid base64"),
        (
            f"data:;base64,{'AAAA' * 349_526}",
            "the image is larger than the limit of 1 MiB (MLX_SERVER_MAX_IMAGE_MIB)",
        ),
        (
            "https://images.example/a.png",
            (
                "the server loads no images from 'images.example', port 443: the hosts are those of "
                "MLX_SERVER_MEDIA_DOMAINS; send the image in a data: URL"
            ),
        ),
    ],
)
async def test_what_is_no_file_is_rejected(reader: ImageReader, url: str, reason: str) -> None:
    with pytest.raises(InvalidImage) as caught:
        await reader.from_url(url, PARAM)
    report = error_report(caught.value)
    assert (report.status, report.code, report.param) == (400, "invalid_image", PARAM)
    assert report.message == reason


def test_a_file_has_pixels(reader: ImageReader) -> None:
    assert reader.pixels(FILE, PARAM).tolist() == [[[255, 0, 0]] * 4] * 2
    assert reader.pixels(FILE, PARAM, max_pixels=2).shape == (1, 2, 3)


@rows(
    ("data", "reason"),
    [
        (b"", "the image is not JPEG, PNG, WebP or GIF, or its header is damaged"),
        (FILE[:-30], "the image is damaged or incomplete"),
        (
            png((11, 10), 8, 0),
            "the image has more pixels than the limit of 100 (MLX_SERVER_MAX_IMAGE_PIXELS)",
        ),
    ],
)
def test_a_file_without_pixels_is_rejected(reader: ImageReader, data: bytes, reason: str) -> None:
    with pytest.raises(InvalidImage) as caught:
        reader.pixels(data, PARAM)
    assert (str(caught.value), caught.value.param) == (reason, PARAM)


def test_a_process_that_is_lost_is_no_fault_of_the_image(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(self: ImageDecoder, data: bytes, max_pixels: int | None) -> Pixels:
        raise SandboxLost

    monkeypatch.setattr(ImageDecoder, "decode", lose)
    with pytest.raises(ImageReaderLost) as caught:
        reader.pixels(FILE, PARAM)
    assert error_report(caught.value).status == 503


def test_a_mistake_in_the_list_of_hosts_is_seen_at_once() -> None:
    with pytest.raises(SettingsError, match="is no host"):
        image_reader(Settings(_env_file=None, media_domains="a.example, https://b.example"))
