"""Forms: their header in the first line, then the body."""

from typing import Final

from app.http.form import FormReader
from batching import InvalidRequest
from tests.fuzz.mutations import bytes_mutation
from tests.fuzz.target import Target, pieces_of

_MAX_FIELDS: Final = 64
_WORDS: Final = (
    *(b"\r\n", b"\n", b"\r", b"--b", b"--b--", b"\r\n--b\r\n", b"\r\n--b--\r\n", b"boundary=b"),
    *(b"Content-Disposition: form-data; ", b'name="file"', b'; filename="a"', b'name="purpose"'),
    *(b"multipart/form-data; ", b"filename*=UTF-8''a", b"\\", b'"', b";", b":", b"="),
)

Form = tuple[dict[str, str], str | None, bytes, bool]


def run(data: bytes) -> None:
    """How a body is split decides nothing, and a form is bounded."""
    header, _, body = data.partition(b"\n")
    whole = _read(header, [body])
    # What stands before the first boundary, which no client sends, is skipped or rejected piece by piece.
    if not body.startswith((b"\r", b"\n")):
        assert _read(header, pieces_of(body)) == whole, whole
    if whole is not None:
        fields, _, file, _ = whole
        assert len(fields) <= _MAX_FIELDS
        assert len(file) <= len(body)


def _read(header: bytes, pieces: list[bytes]) -> Form | None:
    """Return what a form has, and whether it is complete; None if it is rejected."""
    try:
        form = FormReader(header.decode("latin-1"))
        file = b"".join(map(form.feed, pieces))
    except InvalidRequest:
        return None
    return form.fields, form.filename, file, form.is_complete


TARGET: Final = Target(run=run, mutate=bytes_mutation(*_WORDS))
