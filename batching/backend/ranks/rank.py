"""This process among those that serve a model together."""

from dataclasses import dataclass
from typing import Final, Self

import mlx.core as mx
import mlx.nn as nn

from batching.backend.exceptions import one_line
from batching.backend.ranks.division import divide
from batching.errors import ModelLoadError
from batching.ranks.links import Leader, Member
from batching.ranks.lockstep.consensus import ALONE, Consensus, Following, Leading


@dataclass(frozen=True)
class Rank:
    """A rank.

    consensus: with the others.
    group: of `mx.distributed`, what the parts of the model are added up in; None if this process is alone.
    leader: reaches the others; None at all ranks but the first.
    """

    consensus: Consensus = ALONE
    group: mx.distributed.Group | None = None
    leader: Leader | None = None

    @classmethod
    def leading(cls, leader: Leader, backend: str) -> Self:
        """Join the others as rank 0.

        Raises:
            ModelLoadError: MLX does not reach them.
        """
        group = _joined(backend, 0, leader.num_ranks)
        return cls(Leading(leader), group, leader)

    @classmethod
    def following(cls, member: Member, backend: str) -> Self:
        """Join the others; see `leading`."""
        group = _joined(backend, member.rank)
        return cls(Following(member), group)

    @property
    def is_alone(self) -> bool:
        return self.group is None

    def divide(self, model: nn.Module) -> None:
        """Leave of a model, whose arrays are not read yet, the part of this rank.

        Raises:
            ModelLoadError: it cannot be divided.
        """
        assert self.group is not None, "there are others"
        divide(model, self.group)


ONLY_RANK: Final = Rank()


def _joined(backend: str, rank: int, num_ranks: int | None = None) -> mx.distributed.Group:
    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"MLX does not connect the ranks: {one_line(error)}") from error
    if group.rank() != rank or num_ranks not in (None, group.size()):
        raise ModelLoadError(
            f"rank {rank} of {num_ranks or 'the model'} is rank {group.rank()} of {group.size()} to MLX"
        )
    return group
