"""Opens one model over several processes; MLX is imported when it is called."""

from pathlib import Path

from batching.config import EngineConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.ranks.links import Leader, Member


def build_ranked_engine(
    config: EngineConfig, leader: Leader, backend: str, slices: LoadSlices
) -> LoadedEngine:
    """Build the engine of rank 0, in the MLX thread, while the other ranks are in `run_member`.

    backend: the one of `mx.distributed` that connects them; it finds its settings in the environment.

    Raises:
        ModelLoadError: a rank cannot serve its part, or a setting is not served over ranks.
        RankLost: a rank is gone.
    """
    from batching.backend.builder.ranked import build_ranked_engine

    return build_ranked_engine(config, leader, backend, slices)


def run_member(config: EngineConfig, member: Member, backend: str) -> None:
    """Open the part of a rank other than 0, and run the steps that rank 0 plans until that ends.

    Raises:
        ModelLoadError: a rank cannot serve its part, or a setting is not served over ranks.
        RankLost: rank 0 is gone.
        Exception: this rank could not run a step; it must leave, as the others cannot go on without it.
    """
    from batching.backend.builder.ranked import run_member

    run_member(config, member, backend)


def fetch_model(config: EngineConfig) -> Path:
    """Return where the files of a model are, which are downloaded if they are not here.

    Raises:
        ModelLoadError: they are nowhere.
    """
    from batching.backend.loader import resolve

    return resolve(config.model, trust_remote_code=config.trust_remote_code)
