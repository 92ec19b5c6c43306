"""Where a request asks for its prompt to be cached, and for how long."""

from collections.abc import Iterable
from typing import Final, Literal

from app.api.schemas.base import RequestModel

_SECONDS: Final = {"5m": 300.0, "1h": 3600.0}


class CacheControl(RequestModel):
    """The prompt up to here is retained where others need room, for so long after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return _SECONDS[self.ttl]


class CacheableBlock(RequestModel):
    """A block, or a tool, that may be the last one to be cached."""

    cache_control: CacheControl | None = None


def num_controls(blocks: Iterable[object]) -> int:
    """Return how many of these are to be cached."""
    return len(_controls(blocks))


def longest(blocks: Iterable[object]) -> float:
    """Return the seconds that the last one of these is cached for, at the most; 0 if none is to be."""
    return max((control.seconds for control in _controls(blocks)), default=0.0)


def _controls(blocks: Iterable[object]) -> list[CacheControl]:
    found = (block.cache_control for block in blocks if isinstance(block, CacheableBlock))
    return [control for control in found if control is not None]
