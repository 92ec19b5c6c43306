"""A rank that follows writes the keys and values that the first rank writes, of plans without what samples."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from batching.backend.builder.opening import OpenModel, open_model
from batching.backend.builder.ranked import build_ranked_engine
from batching.backend.hooks.changes import Changes
from batching.backend.platforms.mlx import MLXPlatform
from batching.backend.vision.opening import open_vision
from batching.batch_inference import BatchInferenceEngine
from batching.config import EngineConfig
from batching.engine.load_slices import ONE_SLICE
from batching.errors import RankLost
from batching.inputs.sampling_params import SamplingParams
from batching.model_info.vision import NoVision
from batching.pooling import PoolingParams, PoolingType
from batching.ranks.lockstep.steps import Lockstep, follow
from batching.scheduler import ContinuousBatchingScheduler
from tests.support.model_files import write_tiny
from tests.support.rank_scenarios import FaultyConstraint, prompt
from tests.support.requests import make_request


class RecordingLeader:
    """A leader that keeps what it sends."""

    num_ranks = 2

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def receive(self) -> Sequence[bytes]:
        raise AssertionError("nothing is asked")

    def check(self) -> None:
        """No rank is gone."""

    def limit(self, seconds: float | None) -> None:
        """Nothing goes on for long."""


class LateMember:
    """A member that gets what was sent to it once all of it is there."""

    rank = 1

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._messages = iter(messages)

    def send(self, message: bytes) -> None:
        raise AssertionError("nothing is asked")

    def receive(self) -> bytes:
        return next(self._messages)

    def limit(self, seconds: float | None) -> None:
        """Nothing goes on for long."""


@pytest.fixture(params=["llama", "qwen3_next", "gpt_oss"])
def models(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[OpenModel]]:
    path = write_tiny(request.param, tmp_path / "model")
    config = EngineConfig(
        model=str(path),
        model_id="tiny",
        num_blocks=20,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        prefill_chunk=16,
        max_draft_tokens=3,
    )
    opened = [open_model(config, MLXPlatform()) for _ in range(2)]
    yield opened
    for model in opened:
        model.executor.close()


def test_what_follows_has_the_same_pool(models: list[OpenModel]) -> None:
    first, other = (model.executor for model in models)
    leader = RecordingLeader()
    first.lead(Lockstep(leader))
    engine = BatchInferenceEngine(ContinuousBatchingScheduler(models[0].sizes.limits), first)
    seeded = SamplingParams(temperature=0.9, seed=3, logprobs=2, prompt_logprobs=1)
    faulty: Any = FaultyConstraint()
    forked = make_request(5, prompt(19, 3), max_tokens=8, sampling=seeded)
    forked.fork(6)
    for request in (
        make_request(0, prompt(50), max_tokens=20, sampling=seeded),
        make_request(1, 6 * prompt(5), max_tokens=24),
        make_request(2, prompt(41, 1), max_tokens=20),
        make_request(3, prompt(30, 2), max_tokens=9, constraint=faulty),
        make_request(4, prompt(25, 4), max_tokens=0, pooling=PoolingParams(type=PoolingType.MEAN)),
        forked,
    ):
        engine.add(request, *request.forks)
    while engine.has_work:
        engine.step()
    assert engine.stats().num_preemptions
    first.runner.lockstep = None
    follow(LateMember([*leader.sent, b"E"]), other)
    pools = [each.runner.cache.arrays for each in (first, other)]
    assert len(pools[0]) == len(pools[1]) > 0
    assert all(map(mx.array_equal, *pools))


def test_mlx_connects_no_rank_before_all_are_about_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops all threads until the others have come, and so the signs of life."""

    class LostLeader(RecordingLeader):
        def receive(self) -> Sequence[bytes]:
            raise RankLost(1, "is gone")

    monkeypatch.setattr(mx.distributed, "init", lambda **_: pytest.fail("MLX waits for others"))
    config = EngineConfig(model=str(tmp_path), model_id="tiny")
    with pytest.raises(RankLost):
        build_ranked_engine(config, LostLeader(), "ring")


def test_images_are_not_served_by_several_ranks(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "vision_config": {}, "image_token_index": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = nn.Module()
    found = open_vision(
        str(tmp_path), model, None, Changes(), ONE_SLICE, most_uncut=512, is_divided=True
    )
    assert found == NoVision("is served without its vision part, which is not divided among ranks")
