"""Lines of a file in pieces."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import binary, integers, lists, sampled_from

from app.batches.lines import Line, Piece, read_pieces

MAX_BYTES = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines") / "in.jsonl"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=lists(binary(max_size=7) | sampled_from([b"\n", b" \n"]), max_size=9),
    piece_bytes=integers(1, 5000),
)
def test_pieces_are_the_lines_of_the_file(path: Path, parts: list[bytes], piece_bytes: int) -> None:
    text = b"".join(parts)
    path.write_bytes(text)
    pieces = list(read_pieces(path, MAX_BYTES, piece_bytes))
    whole = [part + b"\n" for part in text.split(b"\n")]
    whole[-1] = whole[-1][:-1]
    is_long = [len(line.removesuffix(b"\n")) > MAX_BYTES for line in whole]
    assert [line for piece in pieces for line in piece.lines] == [
        Line(number, None if is_long[number - 1] else line)
        for number, line in enumerate(whole, 1)
        if line and (is_long[number - 1] or not line.isspace())
    ]
    assert pieces[-1].num_read == len(whole) - (not whole[-1])


def test_what_is_skipped_is_work_too(path: Path) -> None:
    path.write_bytes(b"\n" * 5 + b"x" * 300_000 + b"\n")
    assert list(read_pieces(path, MAX_BYTES, 1 << 17)) == [
        Piece(5, []),
        Piece(5, []),
        Piece(6, [Line(6, None)]),
    ]
    assert list(read_pieces(path, MAX_BYTES, 4096))[:2] == [Piece(4, []), Piece(5, [])]
