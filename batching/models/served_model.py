"""A model that clients can name, and how it is kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from batching.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model of the server.

    aliases: further names that clients may use for it.
    is_pinned: it is never unloaded to make room, or for being idle.
    loads_at_start: it is loaded before the server takes requests.
    idle_unload: seconds without a request after which it is unloaded; None is never.
    adapters: folders or hub ids of the adapters that are served from the start, by their names.
    """

    config: EngineConfig
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    loads_at_start: bool = False
    idle_unload: float | None = None
    adapters: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def model_id(self) -> str:
        return self.config.model_id
