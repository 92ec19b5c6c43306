"""Steps that are queued behind others: they need neither the interpreter's lock nor known positions."""

import faulthandler
import sys
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.platforms.cpu.native_loader import Native
from batching.request import BatchRequest
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.kernel_models import Unqueued
from tests.support.model_zoo import make_tiny
from tests.support.platforms import check_model, use_kernels
from tests.support.requests import make_request
from tests.support.serving import limits, make_runner, serve

LENGTHS = (5, 9, 13)
SECONDS = 100


@pytest.fixture(autouse=True)
def _ends_if_it_hangs() -> Iterator[None]:
    """End the process if it does: with the interpreter's lock held nothing in Python could."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def requests() -> list[BatchRequest]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    return [make_request(i, prompt, max_tokens=20) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("model_type", ["afm7", "gemma4", "gemma4-shared", "gemma4_text"])
def test_tokens_are_those_of_one_step_at_a_time(model_type: str, native: Native) -> None:
    model = use_kernels(make_tiny(model_type), native)
    checked = check_model(model, VOCAB_SIZE, native)
    runner = make_runner(model, VOCAB_SIZE, checked)
    assert runner.takes_queued_steps
    tokens = []
    for served in (runner, Unqueued(runner)):
        made = requests()
        serve(served, limits(checked), made)
        tokens.append([request.output_token_ids for request in made])
    assert tokens[0] == tokens[1]
    assert all(len(output) == 20 for output in tokens[0])


def test_what_waits_with_the_interpreters_lock_waits_for_no_operation_that_needs_it(
    native: Native,
) -> None:
    kernels = native.module
    x = mx.ones((64, 512))
    for _ in range(50):
        (x,) = kernels.linear(x, [kernels.pack(mx.zeros((512, 512)))], [None])
    mx.async_eval(x)
    # As after a step that raised, behind which another one is queued.
    mx.clear_cache()
    assert not x.any().item()


def test_an_operation_shares_weights_and_no_object_of_python(native: Native) -> None:
    kernels = native.module
    weights = kernels.pack(mx.ones((8, 32)))
    count = sys.getrefcount(weights)
    (y,) = kernels.linear(mx.ones((1, 32)), [weights], [None])
    # One that it kept it would give back on the thread that computes, with the interpreter's lock.
    assert sys.getrefcount(weights) == count
    del weights
    assert y.tolist() == [[32.0] * 8]
