"""References to adapters: folders and hub ids, and folders that clients may name."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from batching.adapters.files.adapter_file import AdapterFile
from batching.adapters.files.references import resolve_adapter
from batching.errors import AdapterError
from tests.support.adapter_files import (
    PEFT_CONFIG,
    peft_tensors,
    random_layers,
    safetensors,
    write_peft,
)
from tests.support.hub import Hub
from tests.support.hub_cache import hub_of, use_cache
from tests.support.rows import rows

REPOSITORY = "example/style"
FILES = {
    "adapter_config.json": json.dumps(PEFT_CONFIG).encode(),
    "adapter_model.safetensors": safetensors(peft_tensors(random_layers())),
}


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "style").mkdir()
    assert resolve_adapter("~/style") == tmp_path / "style"
    assert resolve_adapter(str(tmp_path / "style")) == tmp_path / "style"


@rows(
    ("reference", "reason"),
    [
        ("/none", "there is no folder /none"),
        ("none", "there is no folder none"),
        ("~no-such-user-here/style", "there is no folder ~no-such-user-here/style"),
        ("a\0b", "there is no folder a?b"),
        ("a/" + "b" * 300 + "/c", f"there is no folder a/{'b' * 298}"),
        ("file", "file is not the folder of an adapter"),
    ],
)
def test_what_is_no_folder(
    reference: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(AdapterError) as caught:
        resolve_adapter(reference)
    assert str(caught.value) == reason


def test_folders_that_clients_may_name(tmp_path: Path) -> None:
    allowed = tmp_path / "adapters"
    folder = write_peft(allowed / "style", {})
    (allowed / "link").symlink_to("style")
    (tmp_path / "allowed-link").symlink_to(allowed)
    for reference in ("style", "link", "../adapters/style"):
        for root in (allowed, tmp_path / "allowed-link"):
            found = resolve_adapter(str(root / reference), [tmp_path / "none", root])
            assert found == folder.resolve()


def test_other_folders_are_not_for_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    allowed, other = tmp_path / "adapters", tmp_path / "adapters-of-others"
    allowed.mkdir()
    other.mkdir()
    (allowed / "link").symlink_to(other)
    hidden = [
        allowed / "link",
        allowed / "../adapters-of-others",
        other,
        other / "none",
        "a/b",
        "/",
    ]
    for reference in map(str, hidden):
        with pytest.raises(AdapterError) as caught:
            resolve_adapter(reference, [allowed])
        assert str(caught.value) == (
            f"{reference} is not within the folders that adapters may be loaded from"
        )
    with pytest.raises(AdapterError, match="is not within the folders"):
        resolve_adapter(str(other), [])
    (allowed / "loop").symlink_to("loop")
    (allowed / "file").touch()
    for name in ("none", "loop", "file"):
        with pytest.raises(AdapterError, match=f"there is no folder {allowed / name}"):
            resolve_adapter(str(allowed / name), [allowed])


@contextmanager
def hub_for_adapters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    use_cache(monkeypatch, folder)
    with hub_of(monkeypatch) as hub:
        # The client has read its setting already.
        former = constants.ENDPOINT
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(former, hub.url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def test_a_repository_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_for_adapters(tmp_path, monkeypatch) as hub:
        hub.repositories[REPOSITORY] = FILES | {"adapter_model.bin": b"pickle", "README.md": b"-"}
        folder = resolve_adapter(REPOSITORY)
        assert {path.name for path in folder.iterdir()} == FILES.keys()
        assert len(AdapterFile(folder, "style").layers) == 2
        asked = len(hub.asked)
        hub.repositories.clear()
        assert resolve_adapter(REPOSITORY) == folder
        assert len(hub.asked) == asked


def test_a_part_of_a_repository_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_for_adapters(tmp_path, monkeypatch) as hub:
        hub.repositories[REPOSITORY] = FILES
        snapshot_download(REPOSITORY, allow_patterns=["*.json"])
        assert len(AdapterFile(resolve_adapter(REPOSITORY), "style").layers) == 2


def test_repositories_that_have_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_for_adapters(tmp_path, monkeypatch) as hub:
        hub.repositories["example/pickle"] = {
            "adapter_config.json": b"{}",
            "adapter_model.bin": b"",
        }
        for _ in "not in the cache", "in the cache":
            with pytest.raises(AdapterError) as caught:
                resolve_adapter("example/pickle")
            assert str(caught.value) == (
                "example/pickle has no adapter_config.json with adapters.safetensors or "
                "adapter_model.safetensors: no other adapters are read"
            )
        with pytest.raises(AdapterError) as caught:
            resolve_adapter("example/none")
        start = "there is no folder example/none, and the hub has not given that adapter: "
        assert str(caught.value).startswith(start)
        assert str(caught.value).isprintable()
