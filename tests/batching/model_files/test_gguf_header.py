"""The header of a GGUF file: what is read of it, and what is refused."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from batching.errors import ModelLoadError
from batching.model_files.gguf_header import read_header
from tests.support.gguf_bytes import (
    A_NUMBER,
    A_TENSOR,
    HOSTILE,
    check_inside,
    gguf,
    read_or_reject,
    tensor,
    text,
    value,
)
from tests.support.rows import rows


@rows("what", HOSTILE)
def test_a_header_that_lies_is_rejected(what: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        read_header(path)


def test_numbers_of_64_bits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    doubles = value("b", 9, struct.pack("<IQd", 12, 1, 2.5))
    path.write_bytes(gguf(value("a", 12, struct.pack("<d", 1.5)), doubles))
    metadata = read_header(path).metadata
    assert (metadata["a"], metadata["b"]) == (1.5, [2.5])


def test_an_alignment_moves_the_data(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    aligned = value("general.alignment", 4, struct.pack("<I", 1024))
    path.write_bytes(gguf(aligned, A_NUMBER, tensors=(A_TENSOR,)))
    header = read_header(path)
    assert header.data_start == 1024
    assert header.metadata == {"general.alignment": 1024, "a": 7}
    assert header.tensors["t"].shape == (2, 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(st.binary(max_size=200), st.sampled_from([2, 3]))
@example(bytes(200), 3)
def test_any_bytes_are_a_header_or_rejected(tmp_path: Path, content: bytes, version: int) -> None:
    whole = b"GGUF" + struct.pack("<I", version) + content
    if (header := read_or_reject(tmp_path / "m.gguf", whole)) is not None:
        check_inside(header, len(whole))


@rows(
    ("content", "reason"),
    [
        (b"GGML" + bytes(40), "it is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 (only 2 and 3 are)"),
        (gguf(value("split.count", 2, struct.pack("<H", 3))), "a part of a split file"),
        (gguf(tensors=(tensor("t", (1 << 20,)),)), "it is incomplete"),
        (gguf(tensors=(tensor("t", (4,), kind=999),)), "type number 999, which is not supported"),
        (gguf(tensors=(tensor("t", (31,), kind=2),)), "rows of 31 weights are no whole blocks"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a")[:4], "it is damaged or incomplete"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value("a", 9, struct.pack("<IQQ", 8, 1, 9)),
            "it is damaged or incomplete",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value("a", 9, struct.pack("<IQ", 8, 1)),
            "it is damaged or incomplete",
        ),
        (b"", "it is damaged or incomplete"),
    ],
)
def test_what_is_not_read_is_refused_with_a_reason(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        read_header(path)
    assert reason in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="No such file"):
        read_header(tmp_path / "m.gguf")


def test_values_of_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    words = value("words", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))
    numbers = value("numbers", 9, struct.pack("<IQii", 5, 2, 1, 2))
    name = value("name", 8, text("x"))
    path.write_bytes(gguf(A_NUMBER, words, numbers, name, tensors=(A_TENSOR,)))
    header = read_header(path)
    assert (header.strings("words"), header.numbers("numbers")) == (["a", "b"], [1, 2])
    assert (header.text("name"), header.text("a", "other"), header.text("b")) == (
        "x",
        "other",
        None,
    )
    assert (header.integer("a"), header.number("b", 2.5), header.strings("a")) == (7, 2.5, [])
    with pytest.raises(ModelLoadError, match="b is missing"):
        header.number("b")
    with pytest.raises(ModelLoadError, match="name is not one number"):
        header.number("name")
