"""PDFs, byte by byte: pages with text, and scans, which have but a picture."""

import zlib
from typing import Final

HELLO: Final = b"BT /F 12 Tf 10 10 Td (Hello) Tj ET"
# The picture that pages have, of red and blue above white, all over them.
SCAN: Final = b"q 200 0 0 100 0 0 cm /I Do Q"

_CATALOG: Final = b"<< /Type /Catalog /Pages 2 0 R >>"
_FONT: Final = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
_PIXELS: Final = bytes([255, 0, 0, 0, 0, 255]) + b"\xff" * 6
_IMAGE: Final = (
    "/Type /XObject /Subtype /Image /Width 2 /Height 2 /ColorSpace /DeviceRGB /BitsPerComponent 8"
)
_RESOURCES: Final = b"<< /Font << /F 3 0 R >> /XObject << /I 4 0 R >> >>"


def pdf(*texts: str | None, box: str = "0 0 200 100") -> bytes:
    """Return a PDF of pages with these texts; one of None is a scan, and an empty one is blank."""
    contents = [SCAN if text is None else written(text) if text else b"" for text in texts]
    return drawn(*map(stream, contents), box=box)


def drawn(
    *contents: bytes, box: str = "0 0 200 100", page: str = "", image: bytes | None = None
) -> bytes:
    """Return a PDF of pages that have these streams.

    page: further entries of each page.
    image: the stream of the picture.
    """
    kids = " ".join(f"{5 + 2 * i} 0 R" for i in range(len(contents)))
    pages = f"<< /Type /Pages /Kids [{kids}] /Count {len(contents)} /MediaBox [{box}] >>"
    objects = [_CATALOG, pages.encode(), _FONT, image or stream(_PIXELS, _IMAGE)]
    for i, content in enumerate(contents):
        entries = f"/Type /Page /Parent 2 0 R /Contents {6 + 2 * i} 0 R {page}"
        objects += [f"<< {entries} /Resources ".encode() + _RESOURCES + b" >>", content]
    return of_objects(*objects)


def form(appearance: str = "") -> bytes:
    """Return a form into which a name is filled."""
    widget = "<< /Type /Annot /Subtype /Widget /FT /Tx /T (n) /V (Filled) /F 4 /DA (/F 12 Tf) /Rect [50 75 150 95]"
    fonts = "/Resources << /Font << /F 5 0 R >> >>"
    return of_objects(
        b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [6 0 R] /DR << /Font << /F 5 0 R >> >> >> >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 /MediaBox [0 0 200 100] >>",
        f"<< /Type /Page /Parent 2 0 R /Contents 4 0 R {fonts} /Annots [6 0 R] >>".encode(),
        stream(b"BT /F 12 Tf 10 80 Td (Name:) Tj ET"),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"{widget} {appearance} >>".encode(),
        stream(HELLO, f"/Type /XObject /Subtype /Form /BBox [0 0 100 30] {fonts}"),
    )


def of_tree(pages: str, trailer: str = "") -> bytes:
    """Return a PDF of an empty page, with these entries of the tree of pages."""
    tree, page = f"<< /Type /Pages {pages} >>", b"<< /Type /Page /Parent 2 0 R >>"
    return of_objects(_CATALOG, tree.encode(), page, trailer=trailer)


def of_objects(*objects: bytes, trailer: str = "") -> bytes:
    """Return the file of objects, the first of which is the catalogue."""
    data = b"%PDF-1.7\n"
    places = []
    for number, each in enumerate(objects, 1):
        places.append(f"{len(data):010} 00000 n \n")
        data += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    size = len(objects) + 1
    table = f"xref\n0 {size}\n0000000000 65535 f \n{''.join(places)}"
    end = f"trailer\n<< /Size {size} /Root 1 0 R {trailer} >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + (table + end).encode()


def written(text: str) -> bytes:
    """Return what draws lines of text."""
    lines = "".join(f"({line}) Tj T* " for line in text.split("\n"))
    return f"BT /F 12 Tf 14 TL 10 80 Td {lines}ET".encode("latin-1")


def stream(data: bytes, entries: str = "") -> bytes:
    """Return an object that is a stream."""
    return b"<< /Length %d %b >>\nstream\n%b\nendstream" % (len(data), entries.encode(), data)


def compressed(data: bytes, times: int = 1) -> bytes:
    """Return a stream that becomes so many times the data."""
    deflate = zlib.compressobj()
    first, again = (deflate.compress(data) + deflate.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return stream(first + again * (times - 1), "/Filter /FlateDecode")


ENCRYPTED: Final = of_tree(
    "/Kids [3 0 R] /Count 1",
    f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'00' * 32}> /U <{'00' * 32}> >> /ID [<00> <00>]",
)
# A picture of a picture of ..., twenty times each: drawn, it takes 20^9 steps.
LAUGHS: Final = of_objects(
    _CATALOG,
    b"<< /Type /Pages /Kids [3 0 R] /Count 1 /MediaBox [0 0 9 9] >>",
    b"<< /Type /Page /Parent 2 0 R /Contents 4 0 R /Resources << /XObject << /X 5 0 R >> >> >>",
    stream(b"/X Do " * 20),
    *(
        stream(
            b"/X Do " * 20,
            f"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X {i} 0 R >> >>",
        )
        for i in range(6, 14)
    ),
    stream(b"0 0 9 9 re f", "/Type /XObject /Subtype /Form /BBox [0 0 9 9]"),
)
# Spaces that 256 KB become.
BOMB: Final = drawn(compressed(b" " * (1 << 20), times=256))
