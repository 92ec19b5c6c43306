"""An engine with an adapter: a model of its own, on the engine of its base."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.prompts.templates.request_template import with_template
from app.prompts.turn_order import turn_order
from batching.adapters.files.adapter_file import opened
from batching.engine import async_engine
from batching.engine.async_engine import AsyncEngine
from batching.errors import AdapterError, InvalidRequest
from batching.model_info.model import ModelInfo
from tests.support.requests import specs
from tests.support.served_adapters import LAYERS, open_adapter
from tests.support.speaker import MODEL_ID, speaking_manager

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    manager = speaking_manager(adapters=LAYERS)
    yield manager.get(MODEL_ID)
    manager.close()


async def test_what_is_submitted_has_the_adapter_and_counts_for_the_base(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    cats, dogs = (engine.adapted(open_adapter(tmp_path, n, i)) for i, n in enumerate("ab"))
    for each in (cats, dogs, engine, cats):
        asked = specs([[1, 2, 3]], max_tokens=2)
        each.check(asked)
        stream = await each.submit(asked)
        async for _ in stream:
            pass
    assert [each.model.model_id for each in (cats, dogs, engine)] == ["a", "b", MODEL_ID]
    stats = await engine.stats()
    assert (stats.num_adapter_loads, stats.num_adapter_hits) == (2, 1)
    assert cats.latest_stats == engine.latest_stats


def test_an_adapter_is_fitted_once_and_kept_by_those_that_use_it(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[Any] = []
    monkeypatch.setattr(async_engine, "fit", lambda file, _: fitted.append(file.adapter.name))
    file = open_adapter(tmp_path, "cats")
    views = [engine.adapted(file), engine.adapted(file)]
    assert fitted == ["cats"]
    kept = weakref.ref(file)
    del file
    gc.collect()
    assert kept() is views[0].adapter
    fitted.clear()
    views.clear()
    gc.collect()
    assert kept() is None


async def test_a_stream_keeps_the_file_of_its_adapter(engine: AsyncEngine, tmp_path: Path) -> None:
    file = open_adapter(tmp_path, "cats")
    kept = weakref.ref(file)
    stream = await engine.adapted(file).submit(specs([[1, 2, 3]], max_tokens=2))
    del file
    gc.collect()
    assert kept() is not None
    stream.close()
    del stream
    await engine.stats()
    gc.collect()
    assert kept() is None


def test_what_was_found_out_of_a_model_is_true_with_an_adapter_too(engine: AsyncEngine) -> None:
    found: list[str] = []

    def find(model: ModelInfo) -> int:
        found.append(model.model_id)
        return len(found)

    base = engine.model
    cats = base.adapted("cats")
    assert (cats.model_id, cats.tokenizer) == ("cats", base.tokenizer)
    # By its base's name, from which some things are guessed.
    assert [each.derived(find) for each in (cats, base, cats)] == [1, 1, 1]
    assert found == [MODEL_ID]
    assert turn_order(cats) is turn_order(base)
    assert with_template(cats, "{{ messages }}").derived(find) == 2
    assert replace(cats, tokenizer=base.tokenizer) == base


def test_an_adapter_whose_file_has_changed_is_refused_at_once(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """A step would fail, and all others begin again, for each of its requests."""
    file = open_adapter(tmp_path, "cats", seed=73)
    engine.adapted(file)
    (tmp_path / "cats" / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(AdapterError):
        opened(file.adapter)
    with pytest.raises(AdapterError, match="'cats' have changed"):
        engine.adapted(file)


def test_a_model_without_adapters_takes_none(tmp_path: Path) -> None:
    manager = speaking_manager()
    engine, file = manager.get(MODEL_ID), open_adapter(tmp_path, "cats")
    why = f"the model '{MODEL_ID}' is served without adapters"
    with pytest.raises(AdapterError, match=why):
        engine.adapted(file)
    with pytest.raises(InvalidRequest, match=why):
        engine.check(specs([[1]], adapter=file.adapter))
    manager.close()
