"""Builds what each rank of a model needs: the engine of rank 0, and the executors of the others."""

from batching.backend.builder.encoder import encoder_directory
from batching.backend.builder.engine import build_engine
from batching.backend.builder.opening import open_model
from batching.backend.builder.platforms import choose_platform
from batching.backend.ranks.rank import Rank
from batching.config import EngineConfig
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import ModelLoadError
from batching.ranks.links import Leader, Member
from batching.ranks.lockstep import follow
from batching.ranks.unserved import check_served


def build_ranked_engine(
    config: EngineConfig, leader: Leader, backend: str, slices: LoadSlices = ONE_SLICE
) -> LoadedEngine:
    """Build the engine of rank 0; see `batching.ranked_model`."""
    _check(config, slices)
    return build_engine(config, slices, Rank.leading(leader, backend))


def run_member(config: EngineConfig, member: Member, backend: str) -> None:
    """Open a part of a model, and run the steps of rank 0; see `batching.ranked_model`."""
    _check(config, ONE_SLICE)
    rank = Rank.following(member, backend)
    model = open_model(config, choose_platform(config, is_divided=True), ONE_SLICE, rank)
    model.platform.wire()
    try:
        follow(member, model.executor)
    finally:
        model.executor.close()


def _check(config: EngineConfig, slices: LoadSlices) -> None:
    check_served(config)
    if encoder_directory(config, slices) is not None:
        raise ModelLoadError(f"{config.model} is an encoder, which is not divided among ranks")
