"""Adapters are loaded before the step that needs them; those that cannot be fail their own requests."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import pytest

from batching.adapters.adapter import Adapter
from batching.adapters.slots import AdapterLoad
from batching.backend.platforms.cpu.native_loader import Native
from batching.batch_inference import BatchInferenceEngine
from batching.block_manager import BlockTable
from batching.config import SchedulerConfig
from batching.errors import AdapterChanged, AdapterError
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.model_runner import SlicesFailed
from batching.steps.step_plan import Slice, StartedSequence, StepPlan
from batching.steps.token_output import TokenLogprobs
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.adapted_models import Adapted, adapt
from tests.support.greedy import most_probable
from tests.support.model_zoo import make_tiny
from tests.support.requests import make_request, respec
from tests.support.serving import pipeline_of, serve as served

CONFIG: Final = SchedulerConfig(
    num_blocks=96, block_size=4, max_num_seqs=6, max_num_batched_tokens=24, max_adapters=2
)
MISSING: Final = Adapter("missing", "missing", "0")


@cache
def model_on(native: Native | None) -> Adapted:
    return adapt(partial(make_tiny, "qwen3"), VOCAB_SIZE, native)


@pytest.fixture(params=["mlx", "native"])
def adapted(request: pytest.FixtureRequest) -> Adapted:
    made = model_on(request.getfixturevalue("native") if request.param == "native" else None)
    made.adapters.model.reset()
    made.numbers.clear()
    return made


def requests_of(*adapters: Adapter | None, num_tokens: int = 8) -> list[BatchRequest]:
    return [
        make_request(i, [3 + i, 5, 2 * i + 1], max_tokens=num_tokens, adapter=adapter)
        for i, adapter in enumerate(adapters)
    ]


def serve(
    adapted: Adapted, requests: list[BatchRequest], config: SchedulerConfig = CONFIG
) -> dict[int, str]:
    """Serve requests with steps that are queued where the platform queues any; return the failures."""
    runner = adapted.runner(config)
    scheduler = ContinuousBatchingScheduler(config)
    engine = BatchInferenceEngine(scheduler, runner, pipeline=pipeline_of(runner))
    engine.add(*requests)
    failures: dict[int, str] = {}
    while engine.has_work:
        for request_id, output in engine.step():
            if isinstance(output, Exception):
                failures[request_id] = str(output)
    assert scheduler.stats().num_free_blocks == config.num_blocks
    return failures


def assert_golden(adapted: Adapted, requests: list[BatchRequest]) -> None:
    """Token for token what mlx-lm generates greedily with merged weights."""
    for request in requests:
        output = request.output_token_ids
        plain = adapted.plain_with(request.spec.adapter)
        assert output
        assert most_probable(plain, request.spec.prompt, output) == output


def test_slots_change_hands_while_steps_are_in_flight(adapted: Adapted) -> None:
    """Twelve adapters in two slots, with and without requests between them that have none."""
    adapters = [adapted.add(f"a{i}", rank=1 + i % 8, seed=i) for i in range(12)]
    chosen = [each for pair in zip(adapters, [None, *adapters], strict=False) for each in pair]
    requests = requests_of(*chosen)
    assert serve(adapted, requests) == {}
    assert_golden(adapted, requests)


def test_thirty_two_rows_at_once(adapted: Adapted) -> None:
    adapters = [adapted.add(f"a{i}", rank=8 - i, seed=i) for i in range(8)]
    config = replace(
        CONFIG, max_num_seqs=32, num_blocks=192, max_num_batched_tokens=96, max_adapters=8
    )
    requests = requests_of(*(8 * [*adapters[:3], None] + adapters)[:32])
    assert serve(adapted, requests, config) == {}
    assert_golden(adapted, requests)


def test_an_adapter_that_cannot_be_read_fails_its_requests(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = adapted.add("good", rank=2)
    requests = requests_of(good, MISSING, None, MISSING, good)
    failures = serve(adapted, requests)
    assert failures == dict.fromkeys((1, 3), "the model failed while serving this request")
    assert_golden(adapted, [requests[i] for i in (0, 2, 4)])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AdapterChanged("cats"), str(AdapterChanged("cats"))),
        (AdapterError("cannot load the adapter /secret: it is gone"), "its adapter cannot be read"),
    ],
)
def test_its_clients_are_told_why(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, error: AdapterError, told: str
) -> None:
    def read(adapter: Adapter, _: object) -> None:
        raise error

    monkeypatch.setattr(adapted.adapters.model, "_read", read)
    assert serve(adapted, requests_of(None, MISSING)) == {1: told}


def plan_of(slot: int, *loads: AdapterLoad) -> StepPlan:
    """Return a plan of a prompt with the adapter in a slot."""
    (request,) = requests_of(None)
    blocks = BlockTable([0]).value
    read = Slice(0, 0, (3,), blocks, adapter_slot=slot, num_samples=1)
    return StepPlan((read,), started=(StartedSequence(0, request.spec, 0),), adapters=loads)


def test_a_failure_waits_for_the_request(adapted: Adapted) -> None:
    """A plan may load ahead, of nothing but adapters; another one in the slot is as good as new."""
    runner = adapted.runner(CONFIG)
    good = adapted.add("good", rank=2)
    ahead = StepPlan((), adapters=(AdapterLoad(1, MISSING), AdapterLoad(2, good)))
    assert runner.run(ahead) == []
    with pytest.raises(SlicesFailed) as failed:
        adapted.adapters.model.load(plan_of(1))
    assert failed.value.request_ids == {0}
    adapted.adapters.model.load(plan_of(2))
    adapted.adapters.model.load(plan_of(1, AdapterLoad(1, good)))


def test_a_reset_empties_the_slots(adapted: Adapted) -> None:
    runner = adapted.runner(CONFIG)
    good = adapted.add("good", rank=2)
    runner.run(StepPlan((), adapters=(AdapterLoad(1, good),)))
    runner.reset()
    with pytest.raises(KeyError):
        runner.run(plan_of(1))


def test_no_bit_depends_on_who_else_is_in_a_step(native: Native) -> None:
    """On the kernels: with an adapter or without, in a batch, in chunks and alone."""
    adapted = model_on(native)
    adapters = [adapted.add(f"b{i}", rank=1 + 3 * i, seed=i) for i in range(2)]
    sampling = SamplingParams(temperature=0.0, logprobs=2)

    def logprobs(chosen: Sequence[Adapter | None], **limits: Any) -> list[list[TokenLogprobs]]:
        requests = requests_of(*chosen, num_tokens=6)
        for request in requests:
            respec(request, sampling=sampling, prompt=request.spec.prompt * 5)
        config = replace(CONFIG, **limits)
        outputs = served(adapted.runner(config), config, requests).outputs
        return [[p for o in outputs[r.request_id] for p in o.logprobs] for r in requests]

    mixed = logprobs([*adapters, None, *adapters, None])
    assert mixed == logprobs([*adapters, None, *adapters, None], prefill_chunk=4)
    alone = [logprobs([None] * i + [each])[-1] for i, each in enumerate([*adapters, None])]
    assert mixed[:3] == alone
    assert mixed[2] != mixed[5]
    assert logprobs([None] * 6)[2::3] == mixed[2::3]


def test_rows_with_the_same_adapter_are_neighbours(adapted: Adapted) -> None:
    """Decodes come first, so that those of all are one piece; without adapters the order stays."""
    cache = adapted.checked.cache(8, CONFIG.block_size)
    chunks = {2, 5}

    def order(*slots: int) -> list[int]:
        slices = [
            Slice(i, 0, (3,), BlockTable([i]).value, adapter_slot=slot, is_prefill=i in chunks)
            for i, slot in enumerate(slots)
        ]
        return [s.sequence_id for s in cache.begin(slices).attention.slices]

    assert order(1, 0, 2, 1, 0, 1) == [1, 4, 0, 3, 5, 2]
    assert order(0, 0, 0, 0, 0, 0) == [0, 1, 2, 3, 4, 5]
