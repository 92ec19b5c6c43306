"""Changes are of one model, and are undone."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import ModuleType
from typing import Any

import mlx.nn as nn
import pytest

from batching.backend.hooks.changes import Changes, original, running


def number() -> int:
    return 1


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """A Python module of model classes, and nothing is left of changes to it."""
    made = ModuleType("models")
    vars(made).update(number=number, math=math)
    before = dict(vars(made))
    yield made
    assert vars(made) == before


def model_of(module: ModuleType) -> Any:
    class Model(nn.Module):
        def __call__(self) -> tuple[int, float]:
            return module.number(), module.math.sqrt(4)

    made: Any = Model
    return made()


def test_a_function_is_rebound_for_one_model_while_it_runs(module: ModuleType) -> None:
    models = [model_of(module) for _ in range(3)]
    changes = [Changes(), Changes()]
    for each, value in zip(changes, (2, 3), strict=True):
        model = models[value - 2]
        each.rebind(model, module, "number", lambda value=value: value)
        each.rebind_within(model, module, "math", sqrt=lambda _, value=value: value)
    assert [model() for model in models] == [(2, 2), (3, 3), (1, 2.0)]
    assert (module.number(), module.math.sqrt(4), module.math.pi) == (1, 2.0, math.pi)
    assert original(module, "number") is number
    assert original(module, "math") is math
    assert math.sqrt(4) == 2
    with running(models[1]):
        assert module.number() == 3
        # A model that is called within it is another one.
        assert models[0]() == (2, 2)
        assert module.number() == 3
    assert changes[0].undo()
    assert [model() for model in models] == [(1, 2.0), (3, 3), (1, 2.0)]
    assert changes[1].undo()
    assert not changes[1].undo()
    assert [type(model).__mro__[1] for model in models] == [nn.Module] * 3


def test_the_last_of_several_functions_holds_until_it_is_undone(module: ModuleType) -> None:
    model, first, second = model_of(module), Changes(), Changes()
    first.rebind(model, module, "number", lambda: 2)
    second.rebind(model, module, "number", lambda: 3)
    assert model()[0] == 3
    second.undo()
    assert model()[0] == 2
    second.rebind(model, module, "number", lambda: 4)
    first.take(second)
    assert not second.undo()
    assert model()[0] == 4
    first.undo()
    assert model()[0] == 1


def test_models_run_in_several_threads_at_once(module: ModuleType) -> None:
    both, changes = Barrier(2, timeout=20), Changes()

    def called(value: int) -> int:
        both.wait()
        return value

    models = [model_of(module) for _ in range(2)]
    for value, model in enumerate(models):
        changes.rebind(model, module, "number", lambda value=value: called(value))
    with ThreadPoolExecutor(2) as pool:
        assert [numbers[0] for numbers in pool.map(lambda model: model(), models)] == [0, 1]
    changes.undo()


def test_a_model_that_raises_leaves_what_runs_as_it_was(module: ModuleType) -> None:
    model, changes = model_of(module), Changes()

    def fail() -> None:
        raise ValueError("of the model")

    changes.rebind(model, module, "number", fail)
    with pytest.raises(ValueError, match="of the model"):
        model()
    assert module.number() == 1
    changes.undo()
