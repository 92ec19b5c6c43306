"""The other ranks of a model over several processes: each runs its part of the steps of rank 0."""

from batching.config import EngineConfig
from batching.ranks.links import Member


def run_member(config: EngineConfig, member: Member, backend: str) -> None:
    raise NotImplementedError
