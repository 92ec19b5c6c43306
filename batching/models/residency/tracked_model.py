"""One model as the residency knows it."""

from dataclasses import dataclass, field
from math import inf
from typing import Final

from batching.models.residency.actions import Waiter
from batching.models.residency.model_state import TRANSITIONS, MemoryNeed, ModelState

_UNKNOWN: Final = MemoryNeed()


@dataclass(slots=True)
class TrackedModel:
    """A model's state, and who has it or waits for it.

    own_need: what it needs; None until it is known.
    is_cancelled, is_closing: the load, or the close, that is under way.
    is_unwanted: it is to drain.
    keep_alive: seconds instead of `idle_unload` that the last request asked for; None if it did not.
    changed, used: seconds, since when it is loaded or has failed, and when it was last used.
    """

    model_id: str
    own_need: MemoryNeed | None
    is_pinned: bool
    idle_unload: float
    state: ModelState = ModelState.UNLOADED
    error: BaseException | None = None
    waiters: list[Waiter] = field(default_factory=list)
    num_leases: int = 0
    is_cancelled: bool = False
    is_closing: bool = False
    is_unwanted: bool = False
    keep_alive: float | None = None
    changed: float = -inf
    used: float = -inf
    num_changes: int = 0

    @property
    def need(self) -> MemoryNeed:
        return self.own_need or _UNKNOWN

    def move_to(self, state: ModelState, now: float) -> None:
        assert state in TRANSITIONS[self.state], f"{self.model_id}: {self.state} -> {state}"
        self.state, self.changed = state, now
        self.num_changes += 1

    @property
    def order(self) -> tuple[bool, float]:
        """The order of loads: the first waiter's due time, best-effort ones last."""
        return min((waiter.is_best_effort, waiter.due_time) for waiter in self.waiters)

    @property
    def is_idle(self) -> bool:
        return not self.num_leases and not self.waiters
