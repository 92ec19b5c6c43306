"""A field of a request is written at one place, and arrives wherever it is needed."""

from dataclasses import MISSING, fields, replace

from batching.adapters.adapter import Adapter
from batching.block_manager import BlockIds, BlockTable, Run
from batching.constraints.protocol import AllowedTokens
from batching.inputs.images import PlacedImage
from batching.inputs.retention import RetainedPrefix, Retention
from batching.inputs.sampling_params import SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.pooling import PoolingParams
from batching.priority_queue import Priority
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.step_plan import StartedSequence
from tests.support.fakes import TokenRunner, small_config
from tests.support.requests import image_of

# No field has its default.
SPEC = SequenceSpec(
    prompt=(1, 2, 3, 4, 5, 6),
    max_tokens=3,
    sampling=SamplingParams(temperature=0.5, seed=7),
    stop_token_ids=frozenset({255}),
    constraint=AllowedTokens(range(64)),
    priority=Priority.HIGH,
    is_best_effort=True,
    cache_salt="salt",
    retention=Retention("group", (RetainedPrefix(None, 9),), may_store=False),
    reports_progress=True,
    pooling=None,
    images=(PlacedImage(0, image_of(b"cat", 1)),),
    num_choices=3,
    adapter=Adapter("cats", "/cats", "c" * 64),
    time_limit=9.0,
)


def started(spec: SequenceSpec) -> list[StartedSequence]:
    """Return what an executor is told of the choices of a spec until they end."""
    scheduler = ContinuousBatchingScheduler(
        small_config(num_blocks=3, max_num_seqs=2, max_adapters=1)
    )
    runner = TokenRunner(scheduler.config)
    request = BatchRequest(0, spec)
    for i in range(1, spec.num_choices):
        request.fork(i)
    scheduler.add(request)
    told: list[StartedSequence] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        told += plan.started
        scheduler.update(plan, runner.run(plan))
    return told


def test_all_fields_of_a_spec_reach_the_executor_for_each_choice() -> None:
    pooled = {"pooling"}
    assert all(
        getattr(SPEC, field.name) != field.default
        for field in fields(SequenceSpec)
        if field.default is not MISSING and field.name not in pooled
    )
    told = started(SPEC)
    assert {each.sequence_id for each in told} == {0, 1, 2}
    # Some were preempted, and started again.
    assert len(told) > 3
    assert all(each.spec is SPEC for each in told)
    pooling = SequenceSpec(prompt=(1, 2), max_tokens=0, pooling=PoolingParams(normalize=False))
    assert [each.spec for each in started(pooling)] == [pooling]


def test_a_choice_that_starts_again_has_what_it_had_generated_and_its_seed() -> None:
    told = started(SPEC)
    seeds: dict[int, set[int]] = {}
    for each in told:
        seeds.setdefault(each.sequence_id, set()).add(each.seed)
    assert [len(each) for each in seeds.values()] == [1, 1, 1]
    assert len(set.union(*seeds.values())) == 3
    again = [
        each for i, each in enumerate(told) if each.sequence_id in {s.sequence_id for s in told[:i]}
    ]
    assert again and all(each.output_token_ids for each in again)


def test_what_a_table_was_does_not_change_with_it() -> None:
    table = BlockTable([3, 4, 9])
    before = table.value
    assert before is table.value
    table.extend([10])
    assert (before.block_ids, before.runs) == ((3, 4, 9), ((3, 2), (9, 1)))
    assert table.value.block_ids == (3, 4, 9, 10)
    table.drop(2)
    assert table.value == BlockIds((9, 9, 9, 10), (Run(9, 2),), 2)
    table.replace(3, 5)
    assert table.value.block_ids == (9, 9, 9, 5)
    table.clear()
    assert table.value == BlockIds()


def test_no_salt_is_taken_for_an_adapter() -> None:
    """Clients write salts; keys and values of the model alone are not those with an adapter."""
    digests = "a" * 64, "b" * 64
    salts = ["", "s", *(f"{salt}\0adapter {digest}" for salt in ("", "s") for digest in digests)]
    salts += [f"\xff{digest} {salt}" for digest in digests for salt in ("", "s")]
    adapters = [None, *(Adapter("cats", "/cats", digest) for digest in digests)]
    keys = [
        replace(SPEC, cache_salt=salt, adapter=adapter).cache_key
        for salt in salts
        for adapter in adapters
    ]
    assert len({*keys}) == len(keys)
