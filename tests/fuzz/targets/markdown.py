"""Markdown of a completion, as the page lexes it while it grows."""

from typing import Final

from tests.fuzz.mutations import bytes_mutation
from tests.fuzz.page import Page
from tests.fuzz.target import Target, pieces_of

_WORDS: Final = (
    *(b"\n", b"\n\n", b"# ", b"* ", b"1. ", b"> ", b"    ", b"\t", b"```", b"~~~", b"---"),
    *(b"| a | b |\n", b"|---|---|\n", b"[a]", b"(b)", b"[a]: /b 'c'\n", b"![", b"](", b"<a>"),
    *(b"<!--", b"-->", b"&amp;", b"*", b"**", b"_", b"__", b"~~", b"`", b"``", b"\\", b"\\("),
    *(b"\\)", b"$", b"$$", b"http://a.b", b"a.", b"a@b.c", b"www.", b":", b"[ ] ", b"<b ", b'="'),
    *(b"\\[", b"\\]", b"  \n"),
)
_PAGE: Final = Page(cpu_seconds=1.0)


def run(data: bytes) -> None:
    """It takes little time, whatever it is."""
    _PAGE.ask("markdown", pieces_of(data.decode(errors="replace")))


TARGET: Final = Target(run=run, mutate=bytes_mutation(*_WORDS), max_bytes=20_000)
