"""Files of images, byte by byte where a library would not write them."""

import struct
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import Image


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """Return a file of a format."""
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    size: tuple[int, int], depth: int, colour: int, rows: Sequence[bytes] = (), *chunks: bytes
) -> bytes:
    """Return a PNG of rows as they are written, with chunks before them."""
    head = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = [chunk(b"IHDR", head), *chunks, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def webp_header(width: int, height: int) -> bytes:
    """Return the beginning of a WebP of this size."""
    size = b"".join((side - 1).to_bytes(3, "little") for side in (width, height))
    return b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + size + b"VP8 \0\0\0\0"
