"""Prefixes that are in the store: read instead of computed, whatever the model keeps of them."""

from collections.abc import Sequence

from batching.config import SchedulerConfig
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from tests.support.block_stores import FakeStore
from tests.support.fakes import TokenRunner, right, small_config
from tests.support.requests import make_request


def traces(
    config: SchedulerConfig, store: FakeStore, requests: Sequence[BatchRequest]
) -> list[str]:
    """Serve requests in a new engine, and return its plans; all that may be stored then is."""
    scheduler, runner = ContinuousBatchingScheduler(config, store), TokenRunner(config, store)
    for each in requests:
        scheduler.add(each)
    lines: list[str] = []
    while scheduler.has_work or scheduler.has_unsaved:
        plan = scheduler.schedule(now=0.0)
        lines.append(str(plan))
        scheduler.update(plan, runner.run(plan))
    assert right(*requests)
    return lines


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_prefix_is_read_in_the_next_life() -> None:
    store, config = FakeStore(), small_config(max_num_batched_tokens=16)
    first = make_request(0, PROMPT, max_tokens=3)
    assert traces(config, store, [first]) == [
        "0[0:10]",
        "0[10:11]",
        "0[11:12]",
        "0>block",
        "1>block",
        "2>block",
    ]
    again = make_request(1, PROMPT, max_tokens=3)
    # How long a block takes is not known before the first.
    assert traces(config, store, [again]) == [
        "block>0",
        "1[8:10] block>1",
        "1[10:11]",
        "1[11:12]",
    ]
    assert again.num_cached_tokens == 8
