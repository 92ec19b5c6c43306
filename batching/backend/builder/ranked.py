"""Builds what each rank of a model needs: the engine of rank 0, and the executors of the others."""

from collections.abc import Callable
from functools import partial
from typing import Self, TypeVar

from batching.backend.builder.encoder import encoder_directory
from batching.backend.builder.engine import build_engine
from batching.backend.builder.opening import open_model
from batching.backend.builder.platforms import choose_platform
from batching.backend.ranks.chunks import NUM_CHUNKS
from batching.backend.ranks.rank import Rank
from batching.config import EngineConfig
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import ModelLoadError
from batching.ranks.heartbeats import TIMEOUT as HEARTBEAT_TIMEOUT
from batching.ranks.links import Leader, Member
from batching.ranks.lockstep.consensus import Following, Leading
from batching.ranks.lockstep.steps import follow
from batching.ranks.unserved import check_served

T = TypeVar("T")


def build_ranked_engine(
    config: EngineConfig, leader: Leader, backend: str, slices: LoadSlices = ONE_SLICE
) -> LoadedEngine:
    """Build the engine of rank 0; see `batching.backend_calls.ranked_model`."""
    Leading(leader).each(partial(_check, config, slices))
    with _AlikeSlices(slices, leader, _slice_seconds(config)) as alike:
        return build_engine(config, alike, Rank.leading(leader, backend))


def run_member(config: EngineConfig, member: Member, backend: str) -> None:
    """Open a part of a model, and run the steps of rank 0; see `batching.backend_calls.ranked_model`."""
    Following(member).each(partial(_check, config, ONE_SLICE))
    # Rank 0 finds first what no rank gets out of, so that all say the same of it.
    seconds = _slice_seconds(config) + HEARTBEAT_TIMEOUT
    with _AlikeSlices(ONE_SLICE, member, seconds) as alike:
        rank = Rank.following(member, backend)
        platform = choose_platform(config, is_divided=True)
        model = open_model(config, platform, alike, rank)
        model.platform.wire()
    try:
        follow(member, model.executor)
    finally:
        model.executor.close()


class _AlikeSlices:
    """Slices that are the same at all ranks, whether others run between them or not.

    What is computed up to a pause is computed by one call, and the ranks have to make the same calls.

    None may take for ever, as a collective does in which MLX hangs: after some seconds the ranks end.
    """

    def __init__(self, slices: LoadSlices, link: Leader | Member, seconds: float) -> None:
        self._slices, self._link, self._seconds = slices, link, seconds

    def __enter__(self) -> Self:
        self._link.limit(self._seconds)
        return self

    def __exit__(self, *_: object) -> None:
        self._link.limit(None)

    def pause(self, progress: float | None = None) -> None:
        self._slices.pause(progress)
        self._link.limit(self._seconds)

    def in_thread(self, func: Callable[[], T]) -> T:
        self._link.limit(None)
        try:
            return self._slices.in_thread(func)
        finally:
            self._link.limit(self._seconds)


def _slice_seconds(config: EngineConfig) -> float:
    """Return how long a slice may take: the longest checks all chunks at once, and a step has one of them."""
    return NUM_CHUNKS * config.step_timeout


def _check(config: EngineConfig, slices: LoadSlices) -> None:
    """Check a configuration, which may ask the hub; then MLX connects the ranks, and stops all threads until each has come."""
    check_served(config)
    if encoder_directory(config, slices) is not None:
        raise ModelLoadError(f"{config.model} is an encoder, which is not divided among ranks")
