"""The bits of a vector depend on its input and on nothing else."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.pooling.head import DenseLayer, PoolingHead
from batching.backend.runner.mlx_runner import MLXRunner
from batching.config import SchedulerConfig
from batching.inputs.sampling_params import SamplingParams
from batching.pooling import PoolingParams, PoolingType, Vector
from batching.request import BatchRequest
from batching.steps.token_output import TokenOutput
from tests.support.platforms import check_model, use_kernels
from tests.support.requests import make_request
from tests.support.serving import TIGHT, limits, make_runner, serve
from tests.support.tiny_models import DEVICE_KINDS, VOCAB_SIZE, Check, tiny_model
from tests.support.weekly import weekly_pairs

ROOMY: Final = SchedulerConfig(
    num_blocks=64, block_size=4, max_num_seqs=5, max_num_batched_tokens=256
)
# So few blocks that requests which decode take those of others, which are read in small chunks.
CROWDED: Final = replace(TIGHT, num_blocks=22, prefill_chunk=2, max_num_batched_tokens=6)
FAMILIES: Final = ("qwen3", "mistral", "gemma2", "mamba", "qwen3_moe")
RNG: Final = random.Random(5)
PROMPTS: Final = [[RNG.randrange(VOCAB_SIZE) for _ in range(size)] for size in (1, 9, 30, 47)]
HEAD: Final = PoolingHead(
    (DenseLayer(np.random.default_rng(2).standard_normal((8, 32), np.float32), None, "Tanh"),)
)


def pooled(first_id: int, params: PoolingParams) -> list[BatchRequest]:
    return [
        make_request(first_id + i, prompt, max_tokens=0, pooling=params)
        for i, prompt in enumerate(PROMPTS)
    ]


def neighbours() -> list[BatchRequest]:
    """Return requests that are served first, and need more blocks from token to token."""
    return [
        make_request(
            100 + i,
            [i, 3, 8, 1, 2],
            max_tokens=40,
            sampling=SamplingParams(temperature=1.2, seed=i),
        )
        for i in range(3)
    ]


def served(
    runner: MLXRunner, config: SchedulerConfig, requests: list[BatchRequest]
) -> list[TokenOutput]:
    """Return the outputs that have vectors, in the order of the requests."""
    outputs = serve(runner, config, requests).outputs
    ends = [outputs[request.request_id][-1] for request in requests]
    return [output for output in ends if output.embedding is not None]


def in_every_way(family: str, pooling: PoolingType, check: Check) -> Iterator[list[Vector]]:
    """Yield the vectors of all prompts: alone, together, preempted beside others, and cached."""
    model = tiny_model(family)
    checked = check(model, VOCAB_SIZE)
    params = PoolingParams(type=pooling, dimensions=6)

    def outputs(config: SchedulerConfig, requests: list[BatchRequest]) -> list[TokenOutput]:
        runner = make_runner(model, VOCAB_SIZE, checked, config, head=HEAD)
        return served(runner, limits(checked, config), requests)

    yield [vector(output) for each in pooled(0, params) for output in outputs(ROOMY, [each])]
    yield [vector(output) for output in outputs(ROOMY, pooled(0, params))]
    preempted = outputs(CROWDED, [*neighbours(), *pooled(200, params)])
    assert any(output.num_preemptions for output in preempted)
    yield [vector(output) for output in preempted]
    # What the first ones leave in the prefix cache serves the second ones.
    cached = outputs(ROOMY, [*pooled(0, params), *pooled(200, params)])[len(PROMPTS) :]
    is_cached = any(output.num_cached_tokens for output in cached)
    assert is_cached == (pooling is PoolingType.LAST)
    yield [vector(output) for output in cached]


def vector(output: TokenOutput) -> Vector:
    assert output.embedding is not None
    return output.embedding


@pytest.mark.parametrize(("family", "pooling"), weekly_pairs(FAMILIES, PoolingType))
def test_bits_depend_on_no_neighbour_no_chunk_and_no_preemption(
    family: str, pooling: PoolingType, native: Native
) -> None:
    alone, *others = in_every_way(
        family, pooling, lambda model, size: check_model(use_kernels(model, native), size, native)
    )
    assert len({each.tobytes() for each in alone}) == len(PROMPTS)
    assert others == [alone] * len(others)


@pytest.mark.parametrize(
    ("device_kind", "pooling"),
    weekly_pairs(DEVICE_KINDS, PoolingType),
    indirect=["device_kind"],
)
def test_without_the_kernels_vectors_differ_by_what_the_products_of_the_library_do(
    pooling: PoolingType, device_kind: Check
) -> None:
    alone, *others = in_every_way("qwen3", pooling, device_kind)
    for other in others:
        assert np.array(other) == pytest.approx(np.array(alone), abs=1e-5)


def test_the_vector_is_the_hidden_states_of_the_model() -> None:
    """A check of the rows by the model itself, without any of the scheduler."""
    model: Any = tiny_model("qwen3")
    hidden = np.array(model.model(mx.array([PROMPTS[2]])))[0]
    runner = make_runner(model, VOCAB_SIZE, check_model(model, VOCAB_SIZE), ROOMY)
    rows = {
        PoolingType.LAST: hidden[-1],
        PoolingType.CLS: hidden[0],
        PoolingType.MEAN: hidden.mean(0),
    }
    for pooling, row in rows.items():
        request = make_request(
            2, PROMPTS[2], max_tokens=0, pooling=PoolingParams(type=pooling, normalize=False)
        )
        (output,) = served(runner, ROOMY, [request])
        assert list(vector(output)) == pytest.approx(row.tolist(), abs=1e-5)
