"""Sampling defaults that model files declare: read, checked, and never a reason not to load."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.api.openai.completions.request import CompletionRequest
from batching import SamplingDefaults
from batching.backend.generation_config import directory_defaults, gguf_defaults
from batching.backend.loader import load_model
from batching.model_files.gguf_header import read_header
from tests.support.gguf_writer import Value, write_gguf

NONE = SamplingDefaults()
EDGES: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.01, 0, 0.7, 2, 2.01, math.inf, math.nan, 10**400, "hot", [1], {}, True),
    "top_p": (0, 1e-9, 1, 1.01, -1, math.nan, "0.9", False),
    "top_k": (-2, -1, 0, 20, 2**31 - 1, 2**31, "20", True),
    "min_p": (-0.01, 0, 0.05, 1, 1.01, math.nan, []),
    "repetition_penalty": (0, 0.009, 0.01, 1.1, 100, 100.1, -math.inf, "1.1"),
}


def declared(directory: Path, **config: Any) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(json.dumps(config))
    return directory_defaults(directory)


def declared_in_gguf(directory: Path, **values: Value) -> SamplingDefaults:
    metadata = {f"general.sampling.{key}": value for key, value in values.items()}
    return gguf_defaults(read_header(write_gguf(directory / "m.gguf", metadata, {})))


def test_a_directory_declares_them_in_its_generation_config(tmp_path: Path) -> None:
    defaults = declared(
        tmp_path,
        do_sample=True,
        eos_token_id=[1, 2],
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.0,
        repetition_penalty=1.05,
        max_new_tokens=2048,
    )
    assert defaults == SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.0, repetition_penalty=1.05
    )


def test_what_is_not_declared_stays_open(tmp_path: Path) -> None:
    assert directory_defaults(tmp_path) == NONE
    assert declared(tmp_path, eos_token_id=2, top_p=None) == NONE
    assert declared(tmp_path, top_k=20) == SamplingDefaults(top_k=20)


def test_do_sample_does_not_count(tmp_path: Path) -> None:
    assert declared(tmp_path, do_sample=False) == NONE
    assert declared(tmp_path, do_sample=False, temperature=0.6).temperature == 0.6


def test_a_gguf_declares_them_in_its_metadata(tmp_path: Path) -> None:
    defaults = declared_in_gguf(
        tmp_path, temp=0.6, top_p=0.95, top_k=20, min_p=0.05, penalty_repeat=1.1, mirostat=0
    )
    # Stored as 32-bit floats, and the decimal numbers all the same.
    assert defaults == SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1
    )


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in EDGES for v in EDGES[n]])
def test_exactly_what_a_request_may_say_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    try:
        CompletionRequest.model_validate({"prompt": "x", name: value}, strict=True)
    except ValidationError:
        assert declared(tmp_path, **{name: value}) == NONE
        assert f"{tmp_path / 'generation_config.json'}: {name} is ignored" in caplog.text
    else:
        assert declared(tmp_path, **{name: value}) == SamplingDefaults(**{name: value})
        assert caplog.text == ""


def test_a_bad_value_leaves_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert declared(tmp_path, temperature=9, top_k=20) == SamplingDefaults(top_k=20)
    defaults = declared_in_gguf(tmp_path, temp=math.nan, top_p=[1, 2], top_k=0.5, min_p=0.5)
    assert defaults == SamplingDefaults(min_p=0.5)
    for key in ("temp", "top_p", "top_k"):
        assert f"{tmp_path / 'm.gguf'}: general.sampling.{key} is ignored" in caplog.text


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"7", b"[" * 100_000, b'{"top_k": ' + b"9" * 5000 + b"}"],
)
def test_a_damaged_file_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "generation_config.json"
    path.write_bytes(content)
    assert directory_defaults(tmp_path) == NONE
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} is ignored: ")
    assert "\n" not in record.getMessage()


def test_a_file_that_cannot_be_read_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").mkdir()
    assert directory_defaults(tmp_path) == NONE
    assert "generation_config.json is ignored" in caplog.text


def test_a_value_nested_deeply_or_long_is_one_short_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nested: Any = "\x1b[2J\n" * 1000
    for _ in range(800):
        nested = [nested]
    assert declared(tmp_path, temperature=nested, top_p="\x1b[2J\n" * 1000) == NONE
    for record in caplog.records:
        assert len(record.getMessage()) < len(str(tmp_path)) + 150
        assert record.getMessage().isprintable()
    assert len(caplog.records) == 2


def test_a_loaded_directory_has_its_defaults(directory: Path) -> None:
    assert load_model(str(directory), dtype=None).sampling_defaults == NONE
    declared(directory, temperature=0.6, top_k=-1)
    defaults = load_model(str(directory), dtype=None).sampling_defaults
    assert defaults == SamplingDefaults(temperature=0.6, top_k=-1)
    (directory / "generation_config.json").write_text("{")
    assert load_model(str(directory), dtype=None).sampling_defaults == NONE
