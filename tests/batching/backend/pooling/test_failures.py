"""A vector that is not finite fails its own request, and no other."""

import mlx.core as mx
import pytest

from batching.batch_inference import BatchInferenceEngine
from batching.errors import RequestFailed
from batching.pooling import PoolingParams, PoolingType
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.token_output import TokenOutput
from tests.support.platforms import check_model
from tests.support.requests import make_request
from tests.support.serving import TIGHT, make_runner
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

POISON = VOCAB_SIZE - 1


@pytest.mark.parametrize("pooling", PoolingType)
def test_a_request_that_overflows_fails_alone(pooling: PoolingType) -> None:
    model = tiny_model("qwen3")
    checked = check_model(model, VOCAB_SIZE)
    weight = model.model.embed_tokens.weight
    weight[POISON] = mx.full(weight.shape[1:], mx.nan)
    scheduler = ContinuousBatchingScheduler(TIGHT)
    engine = BatchInferenceEngine(scheduler, make_runner(model, VOCAB_SIZE, checked), max_stall=1e9)
    params = PoolingParams(type=pooling)
    for request_id, prompt in enumerate(([1, 2, 3], [POISON, 4], [5, 6, 7, 8])):
        engine.add(make_request(request_id, prompt, max_tokens=0, pooling=params))
    outputs: dict[int, object] = {}
    while engine.has_work:
        outputs |= dict(engine.step())
    assert isinstance(outputs[1], RequestFailed)
    for request_id in (0, 2):
        output = outputs[request_id]
        assert isinstance(output, TokenOutput)
        assert output.embedding is not None
    assert scheduler.stats().num_free_blocks == TIGHT.num_blocks
