"""`models export`: a GGUF file's model in a directory, and what keeps it from there."""

import json
from pathlib import Path

import pytest

from app.commands.parser import main
from tests.support.gguf_architectures import TINY
from tests.support.gguf_bytes import A_TENSOR, gguf
from tests.support.gguf_converter import random_model, write_model
from tests.support.hub_cache import use_cache
from tests.support.local_models import write_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(monkeypatch, tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", TINY["llama"], *random_model(TINY["llama"]))


def error(capsys: pytest.CaptureFixture[str], name: str | Path, directory: Path) -> str:
    capsys.readouterr()
    assert main(["models", "export", str(name), str(directory)]) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert line.count("\n") == 1
    return line.removesuffix("\n")


def test_a_directory_is_written(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "new" / "exported"
    assert main(["models", "export", str(file), str(directory)]) == 0
    names = {path.name for path in directory.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert capsys.readouterr().out == (f"{file} is in {directory}: {size // 1024} KiB of float32\n")


def test_a_document_says_what_was_written(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "exported"
    directory.mkdir()
    options = ["--dtype", "bfloat16", "--json"]
    assert main(["models", "export", str(file), str(directory), *options]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": str(file),
        "path": str(directory),
        "dtype": "bfloat16",
        "size": sum(path.stat().st_size for path in directory.iterdir()),
    }


def test_what_is_there_is_not_overwritten(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error(capsys, file, tmp_path) == f"{tmp_path} is not empty"
    assert error(capsys, file, file) == f"cannot write {file}: File exists"


def test_only_gguf_files_are_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, directory = write_folder(tmp_path / "model"), tmp_path / "exported"
    assert error(capsys, folder, directory) == f"{folder} is no GGUF file: mlx-lm loads it as it is"
    assert error(capsys, "org/model", directory) == "org/model is not on this machine"
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(gguf(tensors=(A_TENSOR,)))
    assert "it has no tokens" in error(capsys, damaged, directory)
    monkeypatch.setenv("MLX_SERVER_PORT", "none")
    assert "MLX_SERVER_PORT" in error(capsys, damaged, directory)
