"""The text of files in prompts."""

from base64 import b64encode

import pytest

from app.prompts.file_text import UnreadableFile, decoded, file_text
from tests.support.rows import rows


@rows(
    ("data", "name", "text"),
    [
        (b"a", "a.py", '<document name="a.py">\na\n</document>'),
        ("\ufeffé".encode(), None, "<document>\né\n</document>"),
        (b"a", '"', '<document name="\'">\na\n</document>'),
    ],
)
def test_a_text_has_its_name(data: bytes, name: str | None, text: str) -> None:
    assert file_text(data, name) == text


@rows(
    ("data", "reason"),
    [
        (b"\n%PDF-1.4", "the file 'a' is a PDF"),
        (b"\xff", "the file 'a' is no text in UTF-8"),
        (b"a\0b", "the file 'a' is no text in UTF-8"),
    ],
)
def test_what_is_no_text_is_refused_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableFile, match=reason):
        file_text(data, "a")


def test_base64_may_be_in_a_url() -> None:
    data = b64encode(b"abc").decode()
    for text in (data, f"data:text/plain;base64,{data}", f"DATA:,{data[:2]}\n{data[2:]}"):
        assert decoded(text) == b"abc"
    with pytest.raises(UnreadableFile, match="not valid base64"):
        decoded("data:text/plain;base64,?")
