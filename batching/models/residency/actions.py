"""What the residency decides, and the requests that it decides about."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Begin(NamedTuple):
    """Load a model, in at most so many bytes."""

    model_id: str
    num_bytes: int


class Cancel(NamedTuple):
    """End a load that no request waits for any more."""

    model_id: str


class Close(NamedTuple):
    """Unload a model that serves no requests."""

    model_id: str


@dataclass(eq=False, slots=True)
class Waiter:
    """A request for a model, until it is granted, refused or has left.

    due_time: the waiter with the earliest one is first; see `PriorityQueueWithAging`.
    token: what the caller knows it by.
    is_best_effort: it waits behind all others, and no model in use makes room for it.
    """

    model_id: str
    due_time: float
    token: Any = None
    is_best_effort: bool = False


class Grant(NamedTuple):
    """Let a waiter use its model, which is loaded; `release` ends the use."""

    waiter: Waiter


class Refuse(NamedTuple):
    waiter: Waiter
    error: BaseException


Action = Begin | Cancel | Close | Grant | Refuse
