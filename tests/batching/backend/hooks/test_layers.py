"""A forward pass that stops between two layers."""

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
import pytest

from batching.backend.hooks.changes import Changes
from batching.backend.hooks.layers import in_slices, layers_of
from batching.backend.self_check.expert_flips import plain_logits
from batching.engine.load_slices import ONE_SLICE, LoadCancelled
from tests.support.model_zoo import make_tiny

T = TypeVar("T")

PROMPT = [1, 5, 9, 4, 6]


class Slices:
    """Counts the slices; does something else between two of them."""

    def __init__(self, other: nn.Module | None = None) -> None:
        self.num_pauses = 0
        self.other = other

    def pause(self, progress: float | None = None) -> None:
        self.num_pauses += 1
        if self.other is not None:
            mx.eval(plain_logits(self.other, [PROMPT]))

    def in_thread(self, func: Callable[[], T]) -> T:
        raise AssertionError("not within a pass")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba", "gemma3_text"])
def test_the_results_are_those_of_a_pass_at_once(name: str) -> None:
    model, slices = make_tiny(name), Slices(make_tiny("llama"))
    expected = plain_logits(model, [PROMPT])
    classes = [type(layer) for layer in layers_of(model).values()]
    with in_slices(model, slices):
        found = plain_logits(model, [PROMPT])
    assert mx.array_equal(found, expected)
    assert slices.num_pauses == len(classes) > 1
    assert [type(layer) for layer in layers_of(model).values()] == classes


def test_a_load_of_one_slice_is_not_stopped() -> None:
    model = make_tiny("llama")
    before = [type(layer) for layer in layers_of(model).values()]
    with in_slices(model, ONE_SLICE):
        assert [type(layer) for layer in layers_of(model).values()] == before


def test_a_pass_can_end_within() -> None:
    class Cancelled(Slices):
        def pause(self, progress: float | None = None) -> None:
            raise LoadCancelled

    model = make_tiny("llama")
    expected = plain_logits(model, [PROMPT])
    with pytest.raises(LoadCancelled), in_slices(model, Cancelled()):
        plain_logits(model, [PROMPT])
    assert mx.array_equal(plain_logits(model, [PROMPT]), expected)


def test_other_models_run_as_they_are_between_two_layers() -> None:
    """The first one's module calls another function while it runs, and the other one's does not."""
    from mlx_lm.models import llama

    model, other = make_tiny("llama"), make_tiny("llama")
    expected = plain_logits(other, [PROMPT])
    seen: list[mx.array] = []

    class Looking(Slices):
        def pause(self, progress: float | None = None) -> None:
            seen.append(plain_logits(other, [PROMPT]))

    changes = Changes()
    changes.rebind(model, llama, "scaled_dot_product_attention", lambda queries, *_, **__: queries)
    with in_slices(model, Looking()):
        mx.eval(plain_logits(model, [PROMPT]))
    changes.undo()
    assert seen and all(mx.array_equal(each, expected) for each in seen)
