import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from batching.config import EngineConfig, SchedulerConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import ModelLoadError, ModelNotFound
from batching.scheduler_manager import SchedulerManager
from batching.steps.observer import Observers
from tests.support.fakes import ByteTokenizer, loaded_engine

CONFIGS = [EngineConfig(model=name, model_id=name) for name in ("first", "second")]


class Builder:
    """Counts what it builds."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.is_building = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()

    def __call__(self, config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        self.built.append(config.model_id)
        self.is_building.set()
        assert self.may_finish.wait(20)
        return loaded_engine(SchedulerConfig(), ByteTokenizer(), model_id=config.model_id)


def test_a_model_is_loaded_when_it_is_first_asked_for_and_once() -> None:
    builder = Builder()
    manager = SchedulerManager(CONFIGS, builder)
    assert manager.model_ids == ("first", "second")
    assert builder.built == []
    second = manager.get("second")
    assert manager.get("second") is second
    assert second.model.model_id == "second"
    assert builder.built == ["second"]
    manager.close()
    assert not second.is_alive


def test_two_that_ask_at_once_get_the_same_engine() -> None:
    builder = Builder()
    builder.may_finish.clear()
    manager = SchedulerManager(CONFIGS, builder)
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(manager.get, "first") for _ in range(4)]
        builder.is_building.wait()
        builder.may_finish.set()
        threads = {future.result() for future in futures}
    assert len(threads) == 1
    assert builder.built == ["first"]
    manager.close(timeout=20)


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="'third'"):
        SchedulerManager(CONFIGS, Builder()).get("third")


def test_a_model_that_failed_to_load_can_be_asked_for_again() -> None:
    def build(config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        raise ModelLoadError(f"no {config.model_id}")

    manager = SchedulerManager(CONFIGS, build)
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="no first"):
            manager.get("first")
    manager.close()


def test_engines_tell_their_observers_whenever_these_are_named() -> None:
    manager = SchedulerManager(CONFIGS, Builder())
    first = manager.get("first")
    observers = {"first": Observers(), "second": Observers()}
    manager.observe(observers.__getitem__)
    second = manager.get("second")
    assert [first.observer, second.observer] == [observers["first"], observers["second"]]
    assert manager.loaded("first") is first
    assert manager.loaded("third") is None
    assert manager.engines == (first, second)
    manager.close()
