"""A model that is observed while it is loaded, beside one of the same type that is served."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.hooks.watch import Watch
from batching.backend.runner.mlx_runner import MLXRunner
from batching.block_manager import BlockTable
from batching.inputs.sampling_params import SamplingParams
from tests.support.platforms import check_model
from tests.support.requests import make_request, plan_of
from tests.support.serving import make_runner
from tests.support.tiny_models import VOCAB_SIZE, tiny_model


def logprobs(runner: MLXRunner, request_id: int) -> list[float]:
    """Return the log probabilities of a prompt's tokens, computed in one step over the pool."""
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    request = make_request(request_id, range(1, 20), max_tokens=1, sampling=sampling)
    request.block_table = BlockTable(range(5))
    (output,) = runner.run(plan_of(request))
    return [each.logprob for each in output.prompt_logprobs]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_that_is_served_computes_the_same_while_another_is_observed(family: str) -> None:
    served, other = tiny_model(family), tiny_model(family)
    checked = check_model(served, VOCAB_SIZE)
    runner = make_runner(served, VOCAB_SIZE, checked)
    tokens = mx.array([[1, 2, 3, 4]])
    expected = logprobs(runner, 0)
    caches = make_prompt_cache(other)
    watch = Watch(caches)
    with watch.watching(other):
        mx.eval(other(tokens, cache=caches))
        assert logprobs(runner, 1) == expected
    assert all(use.is_attended and not use.is_shared for use in watch.uses)
    assert logprobs(runner, 2) == expected
