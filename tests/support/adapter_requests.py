"""Requests with unlike adapters that meet everything a server does to a request, held against merged models."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from batching.adapters.adapter import Adapter
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from batching.steps.stats import SchedulerStats
from batching.steps.token_output import TokenOutput
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.adapted_models import MAX_ADAPTERS, Adapted
from tests.support.requests import make_request
from tests.support.serving import TIGHT, limits, serve

NUM_TOKENS: Final = 8
CONFIG: Final = replace(
    TIGHT, num_blocks=24, max_draft_tokens=3, max_drafting_rows=12, max_adapters=MAX_ADAPTERS
)
LOGPROBS: Final = SamplingParams(temperature=0.0, logprobs=2)
SAMPLED: Final = replace(LOGPROBS, temperature=1.0, seed=1)
# Whatever the model says, it repeats this token, so that drafts are right.
REPEATED: Final = 7
REPEATING: Final = replace(LOGPROBS, logit_bias=((REPEATED, 1000.0),))


def requests_of(adapters: Sequence[Adapter | None]) -> list[BatchRequest]:
    """Return requests of which neighbours have unlike adapters, and a fork."""
    rng = np.random.default_rng(17)

    def tokens(count: int) -> list[int]:
        token_ids: list[int] = rng.integers(1, VOCAB_SIZE, count).tolist()
        return token_ids

    long = tokens(41)
    asked = [
        (tokens(14), SAMPLED),
        ([*[REPEATED] * 3, *tokens(5)], REPEATING),
        (long, LOGPROBS),
        (tokens(1), LOGPROBS),
        (tokens(11), LOGPROBS),
        (tokens(3) * 6, LOGPROBS),
        (tokens(29), LOGPROBS),
        # The same prompt with another adapter, and twice again with its own: the prefix is shared by these.
        (long, LOGPROBS),
        ([*long[:21], *tokens(4)], LOGPROBS),
        (long, LOGPROBS),
    ]
    chosen = [adapters[i % len(adapters)] for i in range(len(asked))]
    chosen[-2:] = [chosen[2]] * 2
    made = [
        make_request(i, prompt, max_tokens=NUM_TOKENS, sampling=sampling, adapter=adapter)
        for i, ((prompt, sampling), adapter) in enumerate(zip(asked, chosen, strict=True))
    ]
    return [made[0], made[0].fork(len(made)), *made[1:]]


class Outcome(NamedTuple):
    """How far a log probability is off, and what the scheduler did."""

    difference: float
    stats: SchedulerStats


def serve_adapted(adapted: Adapted, adapters: Sequence[Adapter | None]) -> Outcome:
    """Serve requests with adapters, and hold them against mlx-lm's model with each."""
    requests = requests_of(adapters)
    config = limits(adapted.checked, CONFIG)
    served = serve(adapted.runner(CONFIG), config, requests)
    plain = {adapter: adapted.plain_with(adapter) for adapter in adapters}
    off = [
        difference
        for request in requests
        for difference in _differences(
            plain[request.spec.adapter], request, served.outputs[request.request_id]
        )
    ]
    return Outcome(float(np.max(off)), served.stats)


def _differences(
    plain: nn.Module, request: BatchRequest, outputs: Sequence[TokenOutput]
) -> Iterator[float]:
    """Yield how far each log probability is from that of one pass over prompt and output."""
    logits = plain(mx.array([request.token_ids]), cache=make_prompt_cache(plain))[0]
    expected = np.array((logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(mx.float32))
    returned = [each for output in outputs for each in output.logprobs]
    assert len(returned) == NUM_TOKENS
    rows = expected[-NUM_TOKENS - 1 : -1]
    for row, token, logprobs in zip(rows, request.output_token_ids, returned, strict=True):
        yield abs(row[token] - logprobs.logprob)
        yield from (abs(row[top] - logprob) for top, logprob in logprobs.top)
        yield abs(row.max() - logprobs.top[0][1])
