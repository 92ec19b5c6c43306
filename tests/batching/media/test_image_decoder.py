"""Images of clients, decoded in processes."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from PIL import Image

from batching.media import image_decoder
from batching.media.image_decoder import ImageDecoder, TooManyPixels, UnreadableImage
from tests.support.images import encoded, png
from tests.support.rows import rows

LIMIT: Final = 10_000_000
FOUR_K: Final = (3840, 2160)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    with closing(ImageDecoder(LIMIT, num_processes=1)) as decoder:
        yield decoder


def pid(decoder: ImageDecoder) -> int:
    process = decoder._sandbox._processes[0]._process
    assert process is not None
    return process.pid


@rows("form", ["PNG", "GIF", "WEBP", "JPEG"])
def test_each_format_is_decoded_where_no_file_can_be_opened(
    decoder: ImageDecoder, form: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {} if form == "GIF" else {"exif": exif}
    values = decoder.decode(encoded(Image.new("RGB", (4, 2), "blue"), form, **options))
    assert values.shape == ((2, 4, 3) if form == "GIF" else (4, 2, 3))
    assert (values[..., 2] > 250).all() and (values[..., :2] < 5).all()


@rows(
    ("data", "reason"),
    [
        (b"<svg/>", "is not JPEG, PNG, WebP or GIF"),
        (png((2, 2), 8, 0, [b"\0"]), "is damaged or incomplete"),
        (png((0, 2), 8, 0), "or its header is damaged"),
        (png((20_000, 1), 8, 0), "is wider or higher than the limit of 16384 pixels"),
    ],
)
def test_an_image_that_cannot_be_read_has_a_reason(
    decoder: ImageDecoder, data: bytes, reason: str
) -> None:
    with pytest.raises(UnreadableImage, match=reason):
        decoder.decode(data)


def test_pixels_have_a_limit_by_the_header(decoder: ImageDecoder) -> None:
    with pytest.raises(TooManyPixels, match="has more pixels than the limit of 10000000"):
        decoder.decode(png((100_000, 100_000), 8, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_image_takes_bounded_memory_and_the_server_gets_what_is_capped() -> None:
    image = Image.effect_noise((240, 135), 90).resize(FOUR_K).convert("RGBA")
    with closing(ImageDecoder(LIMIT, num_processes=1)) as decoder:
        values = decoder.decode(encoded(image, "PNG", compress_level=1), 1_000_000)
        assert values.shape == (750, 1333, 3)
        assert values.base is not None and values.nbytes <= 3_000_000
        status = Path(f"/proc/{pid(decoder)}/status").read_text()
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        assert int(peak) < 300_000


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no limit of memory")
def test_an_image_that_takes_too_much_is_rejected_and_others_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Little more than the program itself has.
    monkeypatch.setattr(image_decoder, "_BASE_BYTES", 128 << 20)
    monkeypatch.setattr(image_decoder, "_BYTES_PER_PIXEL", 0)
    with closing(ImageDecoder(LIMIT, num_processes=1)) as decoder:
        with pytest.raises(UnreadableImage, match="cannot be read within the limits"):
            decoder.decode(encoded(Image.new("RGB", FOUR_K), "WEBP", method=0))
        assert decoder.decode(encoded(Image.new("RGB", (1, 1)), "PNG")).shape == (1, 1, 3)


def test_a_process_that_was_killed_is_replaced(decoder: ImageDecoder) -> None:
    data = encoded(Image.new("RGB", (1, 1)), "PNG")
    decoder.decode(data)
    os.kill(pid(decoder), signal.SIGKILL)
    assert decoder.decode(data).tolist() == [[[0, 0, 0]]]
