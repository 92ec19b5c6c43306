"""Pictures as files, and what the browser sees in them; the environment of the page's tests has no library for it."""

import base64
import struct
import zlib
from typing import Any, Final, NamedTuple

RED: Final = (255, 0, 0, 255)
GREEN: Final = (0, 128, 0, 255)
BLUE: Final = (0, 0, 255, 255)
WHITE: Final = (255, 255, 255, 255)
CLEAR: Final = (0, 0, 0, 0)

_DECODE: Final = """async (url) => {
  const [head, data] = url.split(",");
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt());
  const bitmap = await createImageBitmap(new Blob([bytes], { type: head.slice(5, -7) }));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  const context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0);
  return [head, bitmap.width, bitmap.height, [...context.getImageData(0, 0, 1, 1).data]];
}"""

_DRAW_JPEG: Final = """([width, height]) => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  context.fillStyle = "red";
  context.fillRect(0, 0, width / 2, height);
  return canvas.toDataURL("image/jpeg").split(",")[1];
}"""


class Seen(NamedTuple):
    """What is in a data URL: its beginning, the size, and the colour of the corner at the top left."""

    head: str
    width: int
    height: int
    colour: tuple[int, ...]


def seen(page: Any, url: str) -> Seen:
    """Let the browser decode a data URL."""
    head, width, height, colour = page.evaluate(_DECODE, url)
    return Seen(head, width, height, tuple(colour))


def png(width: int, height: int, colour: tuple[int, ...] = RED) -> bytes:
    """Return a PNG of one colour."""
    row = b"\0" + bytes(colour) * width
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    pixels = zlib.compress(row * height)
    parts = [(b"IHDR", head), (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def turned_jpeg(page: Any, width: int, height: int) -> bytes:
    """Return a photo, red at the left, of which EXIF says that it has to be turned clockwise."""
    jpeg = base64.b64decode(page.evaluate(_DRAW_JPEG, [width, height]))
    # One entry: the orientation, a short, is 6.
    exif = b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x112, 3, 1, 6, 0, 0)
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(exif)) + exif + jpeg[2:]


def file(name: str, content: bytes, kind: str = "image/png") -> dict[str, Any]:
    """Return a file that is picked."""
    return {"name": name, "mimeType": kind, "buffer": content}
