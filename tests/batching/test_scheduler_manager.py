"""The manager does what the residency decides: loads, leases, unloads, with real threads."""

import asyncio
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from batching.config import EngineConfig, SchedulerConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.memory_use import MemoryUse
from batching.errors import (
    EngineClosed,
    EngineError,
    ModelLoadError,
    ModelNotFound,
    ModelTooLarge,
    RequestError,
)
from batching.models.residency.model_state import MemoryNeed, ModelState
from batching.models.served_model import ServedModel
from batching.scheduler_manager import SchedulerManager
from batching.steps.observer import Observers
from tests.support.fakes import ByteTokenizer, FakeClock, expected_output, loaded_engine
from tests.support.requests import specs
from tests.support.served_adapters import open_adapter

CONFIGS: Final = [EngineConfig(model=name, model_id=name) for name in ("first", "second")]
LIMITS: Final = SchedulerConfig(
    num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16
)


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
        while not self.may_finish.wait(0.001):
            slices.pause(0.25)
        loaded = loaded_engine(LIMITS, ByteTokenizer(), model_id=config.model_id)
        return LoadedEngine(loaded.engine, loaded.model, memory=MemoryUse(weights=4, kv_cache=2))


def _need(config: EngineConfig) -> MemoryNeed:
    return MemoryNeed(6, 6)


def manager_of(*models: ServedModel, **options: Any) -> tuple[SchedulerManager, Builder]:
    """Return a manager of models of 6 bytes each, in which one has room at a time."""
    builder = Builder()
    served = models or [ServedModel(config=config) for config in CONFIGS]
    options = {"capacity": 10, "min_resident": 0.0, "need": _need, **options}
    return SchedulerManager(served, builder, **options), builder


def states(manager: SchedulerManager) -> list[ModelState]:
    return [status.state for status in manager.statuses()]


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


def test_an_unknown_model_is_not_found_and_the_nearest_names_are_told() -> None:
    manager = SchedulerManager(CONFIGS, Builder())
    with pytest.raises(ModelNotFound, match=r"'frist' does not exist here; did you mean 'first'\?"):
        manager.get("frist")
    with pytest.raises(ModelNotFound, match=r"'x' does not exist here$"):
        manager.unload("x")


def test_few_names_are_compared_with_an_unknown_one(tmp_path: Path) -> None:
    """A comparison takes up to a millisecond, and there may be a thousand adapters."""
    manager = SchedulerManager(CONFIGS, Builder())
    file = open_adapter(tmp_path, "style")
    for i in range(100):
        manager.adapters.add(f"{i:03d}.style", "first", file, source="")
    with pytest.raises(ModelNotFound, match=r"did you mean '020.style'"):
        manager.resolve("020.styl")
    with pytest.raises(ModelNotFound) as far:
        manager.resolve("9999.style")
    assert "'099.style'" not in str(far.value) and "did you mean" in str(far.value)


def test_an_alias_is_a_name_of_its_model() -> None:
    model = ServedModel(config=CONFIGS[0], aliases=("gpt-4o",))
    manager, builder = manager_of(model)
    assert manager.get("gpt-4o") is manager.loaded("first") is manager.loaded("gpt-4o")
    assert builder.built == ["first"]
    assert manager.models == (model,)
    manager.close()


def test_a_model_that_failed_to_load_says_why_and_is_tried_again_later() -> None:
    clock, reasons = FakeClock(), ["a corrupt file", "no memory"]

    def build(config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        raise ModelLoadError(reasons[0])

    manager = SchedulerManager(CONFIGS, build, clock=clock)
    for reason, seconds in (("a corrupt file", 0.0), ("a corrupt file", 1.0), ("no memory", 9.0)):
        clock.now = seconds
        if seconds:
            reasons[0] = "no memory"
        with pytest.raises(ModelLoadError, match=reason):
            manager.get("first")
        (first, second) = manager.statuses()
        assert (first.state, first.reason) == (ModelState.FAILED, reason)
        assert (second.state, second.reason) == (ModelState.UNLOADED, "")
    manager.close()


def test_engines_tell_their_observers_whenever_these_are_named() -> None:
    manager = SchedulerManager(CONFIGS, Builder())
    first = manager.get("first")
    observers = {"first": Observers(), "second": Observers()}
    manager.engines.observe(observers.__getitem__)
    second = manager.get("second")
    assert [first.observer, second.observer] == [observers["first"], observers["second"]]
    assert manager.loaded("first") is first
    assert manager.loaded("third") is None
    assert manager.engines.loaded == (first, second)
    manager.close()


def test_an_idle_model_makes_room_and_one_in_use_drains_first() -> None:
    manager, builder = manager_of()
    manager.get("first")
    second = manager.request("second")
    engine = second.future.result(20).engine
    assert builder.built == ["first", "second"]
    first = manager.request("first")
    assert states(manager) == [ModelState.UNLOADED, ModelState.DRAINING]
    assert engine.is_alive
    (status, _) = manager.statuses()
    assert (status.num_requests, status.num_waiting) == (0, 1)
    second.close()
    second.close()
    assert first.future.result(20).engine.model.model_id == "first"
    assert not engine.is_alive
    (status, _) = manager.statuses()
    assert (status.num_requests, status.num_waiting) == (1, 0)
    assert status.use == MemoryUse(weights=4, kv_cache=2)
    first.close()
    manager.close()


def test_a_load_that_every_request_has_left_ends_and_is_seen_while_it_runs() -> None:
    manager, builder = manager_of()
    builder.may_finish.clear()
    requests = [manager.request("first") for _ in range(2)]
    builder.is_building.wait(20)
    while manager.statuses()[0].progress != 0.25:
        pass
    changes: list[ModelState] = []
    cancelled = threading.Event()

    def listener() -> None:
        changes.append(manager.statuses()[0].state)
        if changes[-1] is ModelState.UNLOADED:
            cancelled.set()

    end = manager.listeners.add(listener)
    for request in requests:
        assert states(manager)[0] is ModelState.LOADING
        request.close()
    assert cancelled.wait(20)
    end()
    builder.may_finish.set()
    assert manager.get("first").is_alive
    assert ModelState.LOADED not in changes
    manager.close()


def test_an_idle_model_is_unloaded_in_time_and_a_pinned_one_stays() -> None:
    clock = FakeClock()
    models = [
        ServedModel(config=CONFIGS[0], idle_unload=60.0),
        ServedModel(config=CONFIGS[1], idle_unload=60.0, is_pinned=True),
    ]
    manager, _ = manager_of(*models, capacity=None, clock=clock)
    for config in CONFIGS:
        manager.get(config.model_id)
    clock.now = 20.0
    assert [status.expires_in for status in manager.statuses()] == [40.0, None]
    manager.tick()
    assert states(manager) == [ModelState.LOADED] * 2
    clock.now = 60.0
    manager.tick()
    assert manager.engines.loaded == (manager.loaded("second"),)
    manager.unload("second")
    assert manager.loaded("second") is None
    manager.close()


def test_a_model_that_is_divided_is_not_unloaded() -> None:
    manager, _ = manager_of(lost=lambda: None)
    with pytest.raises(RequestError, match="divided among ranks"):
        manager.unload("first")
    manager.close()


def test_what_can_never_fit_is_refused_at_once() -> None:
    manager, builder = manager_of(capacity=5)
    with pytest.raises(ModelTooLarge):
        manager.get("first")
    assert builder.built == []
    manager.close()


def test_after_the_end_no_model_is_loaded() -> None:
    manager, _ = manager_of()
    manager.get("first")
    waiting = manager.request("second")
    manager.close(20)
    assert manager.health.unhealthy_reason == "the engine has stopped"
    waiting.close()
    with pytest.raises(EngineClosed):
        manager.get("first")


def test_a_part_of_a_load_that_does_not_end_is_reported() -> None:
    clock, builder = FakeClock(), Builder()
    entered, leave = threading.Event(), threading.Event()

    def build(config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        entered.set()
        assert leave.wait(20)
        return builder(config, slices)

    manager = SchedulerManager(CONFIGS, build, clock=clock)
    request = manager.request("first")
    assert entered.wait(20)
    assert manager.health.unhealthy_reason is None
    clock.now = 500.0
    assert (
        manager.health.unhealthy_reason == "a part of the load of a model has not ended for 500 s"
    )
    manager.health.excuse(500.0)
    assert manager.health.unhealthy_reason is None
    leave.set()
    request.future.result(20)
    request.close()
    manager.close()


NUM_CLIENTS: Final = 8


async def _ask_often(manager: SchedulerManager, rng: random.Random, num_requests: int) -> int:
    """Send requests to any model, some of which leave; return how many were served."""
    num_served = 0
    for _ in range(num_requests):
        request = manager.request(rng.choice(manager.model_ids), rng.random())
        try:
            if rng.random() < 0.2:
                await asyncio.sleep(0)
                continue
            engine = (await asyncio.wrap_future(request.future)).engine
            prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 9))]
            stream = await engine.submit(specs([prompt], max_tokens=5))
            tokens = [token async for _, output in stream for token in output.token_ids]
            assert tokens == expected_output(prompt, 5)
            num_served += 1
        finally:
            request.close()
    return num_served


async def _unload_often(
    manager: SchedulerManager, rng: random.Random, served: Sequence[Any]
) -> int:
    num_unloads = 0
    while not all(task.done() for task in served):
        manager.unload(rng.choice(manager.model_ids))
        num_unloads += 1
        await asyncio.sleep(0)
    return num_unloads


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.timeout(120)
def test_unloads_at_any_moment_cost_no_request_its_answer(seed: int) -> None:
    """A thousand requests and more unloads than that, of three models of which one fits at a time."""
    rng = random.Random(seed)
    configs = [EngineConfig(model=name, model_id=name) for name in "abc"]
    manager, builder = manager_of(*(ServedModel(config=config) for config in configs))

    async def race() -> tuple[int, int]:
        clients = [
            asyncio.create_task(_ask_often(manager, rng, 1000 // 3 // NUM_CLIENTS))
            for _ in range(NUM_CLIENTS)
        ]
        num_unloads = await _unload_often(manager, rng, clients)
        return sum([await client for client in clients]), num_unloads

    num_served, num_unloads = asyncio.run(race())
    assert num_served > 200
    assert num_unloads > 300
    assert len(builder.built) > 20
    assert all(status.num_requests == status.num_waiting == 0 for status in manager.statuses())
    manager.close(20)
    assert set(states(manager)) <= {ModelState.UNLOADED, ModelState.LOADED}


def test_an_error_that_is_no_engines_is_told_to_those_that_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def build(config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        raise ZeroDivisionError

    manager = SchedulerManager(CONFIGS, build)
    with pytest.raises(ModelLoadError, match="cannot load first: ZeroDivisionError"):
        manager.get("first")
    assert "ZeroDivisionError" in caplog.text
    assert manager.statuses()[0].state is ModelState.FAILED
    manager.close()


def test_a_load_after_the_thread_has_failed_is_refused() -> None:
    manager, _ = manager_of()
    manager.get("first")

    def fail(*_: object) -> None:
        raise SystemExit

    manager._thread._wait = fail  # type: ignore[method-assign]
    manager._thread.post(lambda: None)
    assert manager._thread._has_ended.wait(20)
    with pytest.raises(EngineError):
        manager.get("second")
    manager.close()


def test_a_request_that_leaves_as_it_is_answered_holds_nothing() -> None:
    """Its future is cancelled, and the manager does not know it yet."""
    manager, builder = manager_of()
    builder.may_finish.clear()
    granted, kept = manager.request("first"), manager.request("first")
    granted.future.cancel()
    builder.may_finish.set()
    kept.future.result(20)
    assert manager.statuses()[0].num_requests == 1
    kept.close()
    # The same where it is refused.
    waiting = manager.request("second")
    refused = manager.request("first")
    refused.future.cancel()
    manager.close(20)
    waiting.close()
    refused.close()


def test_a_model_of_which_nothing_is_known_is_measured_again_and_by_its_load() -> None:
    asked: list[str] = []

    def unknown(config: EngineConfig) -> None:
        asked.append(config.model_id)

    manager, _ = manager_of(need=unknown)
    for _ in range(2):
        manager.measure("first")
        assert not manager.is_measured("first")
    manager.get("first")
    assert manager.is_measured("first")
    manager.measure("first")
    assert asked == ["first"] * 3
    manager.close()


def test_an_adapter_that_does_not_fit_is_told_at_the_load_of_its_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, _ = manager_of(*(ServedModel(config=config) for config in CONFIGS))
    for base in ("first", "second"):
        file = open_adapter(tmp_path, f"{base}-cats")
        manager.adapters.add(f"{base}-cats", base, file, source="")
    assert manager.get("first-cats") is manager.loaded("first:first-cats")
    assert caplog.messages == ["the model 'first' is served without adapters"]
    manager.close()
