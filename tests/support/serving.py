"""A tiny model behind the real scheduler, without a server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.nn as nn

from batching.backend.pooling.head import NO_HEAD, PoolingHead
from batching.backend.runner.mlx_runner import MLXRunner
from batching.backend.self_check.checked_model import CheckedModel
from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig, blocks_held
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.model_runner import ModelRunner
from batching.steps.stats import SchedulerStats
from batching.steps.token_output import TokenOutput

# So small a pool that requests are preempted, and chunks that cut every prompt.
TIGHT = SchedulerConfig(
    num_blocks=30, block_size=4, max_num_seqs=5, max_num_batched_tokens=16, prefill_chunk=7
)


class Served(NamedTuple):
    """What each request got, by id."""

    outputs: dict[int, list[TokenOutput]]
    stats: SchedulerStats


def limits(checked: CheckedModel, config: SchedulerConfig = TIGHT) -> SchedulerConfig:
    """Return the limits within which a model is served: with checkpoints, with blocks for windows."""
    if checked.layout.has_state:
        config = replace(config, num_checkpoints=6)
    if (window := checked.layout.window) is not None:
        num_blocks = config.max_num_seqs * blocks_held(window, config.block_size) + 8
        config = replace(config, window=window, num_window_blocks=num_blocks)
    return config


def make_runner(
    model: nn.Module,
    vocab_size: int,
    checked: CheckedModel,
    config: SchedulerConfig = TIGHT,
    *,
    head: PoolingHead = NO_HEAD,
) -> MLXRunner:
    num_window_blocks = limits(checked, config).num_window_blocks
    cache = checked.cache(config.num_blocks, config.block_size, num_window_blocks=num_window_blocks)
    cache.reset()
    return MLXRunner(
        model,
        vocab_size,
        checked.selection,
        cache,
        checked.platform.sampler(),
        head,
        checked.graphs(cache, is_check=True),
    )


def pipeline_of(runner: ModelRunner) -> MLXRunner | None:
    """Return what queues the steps of a runner, as a server does it."""
    return runner if isinstance(runner, MLXRunner) and runner.takes_queued_steps else None


def serve(runner: ModelRunner, config: SchedulerConfig, requests: Sequence[BatchRequest]) -> Served:
    """Serve requests, those with forks together with these."""
    scheduler = ContinuousBatchingScheduler(config)
    # No limit in time: the chunks must not depend on how fast the machine is today.
    engine = BatchInferenceEngine(scheduler, runner, max_stall=1e9, pipeline=pipeline_of(runner))
    for request in requests:
        if request.fork_of is None:
            engine.add(request, *request.forks)
    outputs: dict[int, list[TokenOutput]] = {r.request_id: [] for r in requests}
    while engine.has_work:
        for request_id, output in engine.step():
            assert isinstance(output, TokenOutput), output
            outputs[request_id].append(output)
    stats = scheduler.stats()
    assert stats.num_free_blocks == config.num_blocks
    assert stats.num_free_window_blocks == config.num_window_blocks
    return Served(outputs, stats)
