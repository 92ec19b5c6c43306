"""Ten requests that meet everything a server does to a request, held against plain forward passes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from batching.backend.self_check.checked_model import CheckedModel
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from batching.steps.model_runner import ModelRunner
from batching.steps.stats import SchedulerStats
from batching.steps.step_plan import SliceOutput, StepPlan
from batching.steps.token_output import TokenLogprobs, TokenOutput
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.requests import make_request
from tests.support.serving import TIGHT, limits, make_runner, serve

NUM_TOKENS: Final = 8
CONFIG: Final = replace(TIGHT, num_blocks=20, max_draft_tokens=3, max_drafting_rows=12)
LOGPROBS: Final = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)
HITTING: Final = replace(LOGPROBS, prompt_logprobs=None)
SAMPLED: Final = replace(LOGPROBS, temperature=1.0)
# Whatever the model says, it repeats this token, so that drafts are right.
REPEATED: Final = 7
REPEATING: Final = replace(LOGPROBS, logit_bias=((REPEATED, 1000.0),))


class Conformance(NamedTuple):
    """How far a log probability is off, NaN if one is not a number, and what the scheduler did.

    num_copies: blocks that were copied on write.
    """

    difference: float
    stats: SchedulerStats
    num_copies: int


class CopyCounter:
    """A runner that counts the blocks that are copied."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_copies = 0

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        self.num_copies += len(plan.copies)
        return self._runner.run(plan)

    def reset(self) -> None:
        self._runner.reset()


def conformance(model: nn.Module, checked: CheckedModel, plain: nn.Module) -> Conformance:
    """Serve with a model, and hold what it returns against a plain one with the same weights."""
    requests = _requests()
    config = limits(checked, CONFIG)
    runner = CopyCounter(make_runner(model, VOCAB_SIZE, checked, config))
    served = serve(runner, config, requests)
    assert all(r.num_output_tokens == NUM_TOKENS for r in requests)
    off = [
        difference
        for request in requests
        for difference in _differences(plain, request, served.outputs[request.request_id])
    ]
    return Conformance(float(np.max(off)), served.stats, runner.num_copies)


def _requests() -> list[BatchRequest]:
    rng = np.random.default_rng(17)

    def tokens(count: int) -> list[int]:
        token_ids: list[int] = rng.integers(1, VOCAB_SIZE, count).tolist()
        return token_ids

    long = tokens(41)
    # Those that hit the prefix cache ask for no log probabilities of the prompt: these need its logits.
    asked = [
        (tokens(14), replace(SAMPLED, seed=1)),
        ([*[REPEATED] * 3, *tokens(5)], REPEATING),
        (long, LOGPROBS),
        (tokens(1), LOGPROBS),
        ([*long[:21], *tokens(4)], HITTING),
        (tokens(11), LOGPROBS),
        (tokens(3) * 6, LOGPROBS),
        ([*long[:30], *tokens(3)], HITTING),
        (tokens(29), LOGPROBS),
        (long, HITTING),
    ]
    requests = [
        make_request(i, prompt, max_tokens=NUM_TOKENS, sampling=sampling)
        for i, (prompt, sampling) in enumerate(asked)
    ]
    return [requests[0], requests[0].fork(len(asked)), *requests[1:]]


def _differences(
    plain: nn.Module, request: BatchRequest, outputs: Sequence[TokenOutput]
) -> Iterator[float]:
    """Yield how far each log probability is from that of one pass over prompt and output."""
    logits = plain(mx.array([request.token_ids]), cache=make_prompt_cache(plain))
    expected = _log_softmax(np.array(logits[0].astype(mx.float32)))
    returned: list[TokenLogprobs] = [
        *(logprobs for output in outputs for logprobs in output.prompt_logprobs),
        *(logprobs for output in outputs for logprobs in output.logprobs),
    ]
    assert len(returned) >= NUM_TOKENS
    tokens, rows = request.token_ids[-len(returned) :], expected[-len(returned) - 1 : -1]
    for row, token, logprobs in zip(rows, tokens, returned, strict=True):
        yield abs(row[token] - logprobs.logprob)
        yield abs(row.max() - logprobs.top[0][1])
        yield from (abs(row[top] - logprob) for top, logprob in logprobs.top)


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
