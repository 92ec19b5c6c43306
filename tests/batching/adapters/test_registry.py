"""Names of served adapters."""

import threading
from pathlib import Path

import pytest

from batching.adapters.files.adapter_file import AdapterFile
from batching.adapters.files.registry import AdapterRegistry
from batching.errors import AdapterError
from tests.support.adapter_files import mlx_lm_tensors, random_layers, write_mlx_lm
from tests.support.rows import rows


@pytest.fixture
def file(tmp_path: Path) -> AdapterFile:
    return AdapterFile(write_mlx_lm(tmp_path / "1", mlx_lm_tensors(random_layers())), "style")


@pytest.fixture
def other(tmp_path: Path) -> AdapterFile:
    return AdapterFile(write_mlx_lm(tmp_path / "2", mlx_lm_tensors(random_layers(2))), "style")


def test_adapters_are_found_by_their_names(file: AdapterFile, other: AdapterFile) -> None:
    registry = AdapterRegistry()
    style = registry.add("style", "qwen:4b", file, source="example/style")
    tone = registry.add("example/tone-2.0", "llama", other, source="/tone")
    assert (style.adapter, style.source) == (file.adapter, "example/style")
    assert registry.find("style") is registry.find("qwen:4b:style") is style
    assert registry.find("llama:example/tone-2.0") is tone
    for unknown in ("tone", "llama:style", ":style", "qwen:4b", "style:", ""):
        assert registry.find(unknown) is None
    assert registry.of("qwen:4b") == [style]
    assert registry.of("none") == []
    assert registry.remove("style") is style
    assert registry.remove("style") is registry.find("style") is None
    # Requests in flight still read it.
    assert file.is_open


@rows("name", ["", " ", "a b", "a:b", "-a", "ä", "a\n", "a" * 129])
def test_what_is_no_name(name: str, file: AdapterFile) -> None:
    with pytest.raises(AdapterError, match="cannot be the name of an adapter"):
        AdapterRegistry().add(name, "llama", file, source="")


def test_names_that_are_taken(file: AdapterFile, other: AdapterFile) -> None:
    registry = AdapterRegistry({"llama", "qwen"}.__contains__)
    registry.add("style", "llama", file, source="")
    for base in ("llama", "qwen"):
        with pytest.raises(AdapterError, match="the adapter 'style' is already loaded"):
            registry.add("style", base, other, source="")
    with pytest.raises(AdapterError, match="'qwen' is the name of a model"):
        registry.add("qwen", "llama", other, source="")
    assert registry.of("llama")[0].file is file


def test_an_adapter_in_place_of_another(file: AdapterFile, other: AdapterFile) -> None:
    registry = AdapterRegistry(max_adapters=1)
    registry.replace("style", "llama", file, source="1")
    replaced = registry.replace("style", "llama", other, source="2")
    assert registry.find("style") is replaced
    assert replaced.adapter == other.adapter
    with pytest.raises(AdapterError, match="is already loaded"):
        registry.replace("style", "qwen", file, source="3")
    with pytest.raises(AdapterError, match="1 adapters are loaded, which is the limit"):
        registry.add("tone", "llama", file, source="")


def test_threads_that_want_one_name(file: AdapterFile) -> None:
    registry = AdapterRegistry()
    start, added = threading.Barrier(8), []

    def add_and_remove() -> None:
        start.wait()
        for i in range(100):
            try:
                added.append(registry.add(f"{i}", "llama", file, source=""))
            except AdapterError:
                assert registry.find(f"{i}") is not None
            assert len(registry.of("llama")) <= 100

    threads = [threading.Thread(target=add_and_remove) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(each.name) for each in added) == [*range(100)]
    assert {each.name for each in registry.of("llama")} == {each.name for each in added}
