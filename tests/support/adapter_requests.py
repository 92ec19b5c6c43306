"""Requests with unlike adapters that meet everything a server does to a request, held against merged models."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from batching.adapters.adapter import Adapter
from batching.adapters.slots import AdapterSlots
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from batching.steps.model_runner import ModelRunner
from batching.steps.stats import SchedulerStats
from batching.steps.step_plan import SliceOutput, StepPlan
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.adapted_models import MAX_ADAPTERS, Adapted
from tests.support.requests import make_request
from tests.support.serving import TIGHT, limits, serve

NUM_TOKENS: Final = 8
CONFIG: Final = replace(TIGHT, num_blocks=24, max_draft_tokens=3, max_drafting_rows=12)
LOGPROBS: Final = SamplingParams(temperature=0.0, logprobs=2)
SAMPLED: Final = replace(LOGPROBS, temperature=1.0, seed=1)
# Whatever the model says, it repeats this token, so that drafts are right.
REPEATED: Final = 7
REPEATING: Final = replace(LOGPROBS, logit_bias=((REPEATED, 1000.0),))


class GivesSlots:
    """A runner that gives slots to what a scheduler plans."""

    def __init__(self, runner: ModelRunner, num_slots: int) -> None:
        self._runner, self._slots = runner, AdapterSlots(num_slots)
        self._num_slots = num_slots
        self._adapters: dict[int, Adapter | None] = {}
        self._given: dict[int, int] = {}

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        for gone in plan.gone:
            if gone in self._given:
                self._slots.release(self._adapters.pop(gone))
                del self._given[gone]
        for started in plan.started:
            adapter = self._adapters[started.sequence_id] = started.spec.adapter
            self._given[started.sequence_id] = self._slots.take(adapter)
        slices = tuple(replace(s, adapter_slot=self._given[s.sequence_id]) for s in plan.slices)
        return self._runner.run(replace(plan, slices=slices, adapters=self._slots.take_loads()))

    def reset(self) -> None:
        self._slots = AdapterSlots(self._num_slots)
        self._given.clear()
        self._runner.reset()


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
    runner = GivesSlots(adapted.runner(CONFIG), MAX_ADAPTERS)
    served = serve(runner, config, requests)
    plain = {adapter: adapted.plain_with(adapter) for adapter in adapters}
    off = [
        difference
        for request in requests
        for difference in _differences(plain[request.spec.adapter], request, served.outputs)
    ]
    return Outcome(float(np.max(off)), served.stats)


def _differences(plain: nn.Module, request: BatchRequest, outputs: dict) -> Iterator[float]:
    logits = plain(mx.array([request.token_ids]), cache=make_prompt_cache(plain))[0]
    expected = np.array((logits - mx.logsumexp(logits, axis=-1, keepdims=True)).astype(mx.float32))
    returned = [each for output in outputs[request.request_id] for each in output.logprobs]
    assert len(returned) == NUM_TOKENS
    rows = expected[-NUM_TOKENS - 1 : -1]
    for row, token, logprobs in zip(rows, request.output_token_ids, returned, strict=True):
        yield abs(row[token] - logprobs.logprob)
        yield from (abs(row[top] - logprob) for top, logprob in logprobs.top)
        yield abs(row.max() - logprobs.top[0][1])
