"""Rank 0 of a model over several processes: it has the scheduler, and the others run what it plans."""

from batching.config import EngineConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.ranks.links import Leader


def build_ranked_engine(
    config: EngineConfig, leader: Leader, backend: str, slices: LoadSlices
) -> LoadedEngine:
    raise NotImplementedError
